"""Landlock: restricts a program's writes to its own directories, independently of the mounts.

Invariant: once `restrict` has returned on a kernel with Landlock, neither this process nor its descendants can write
outside `writable` and `devices` or change mounts; from version 6 of its ABI, they can neither signal processes outside nor
connect to their abstract sockets. It is a second barrier besides the mount namespace, skipped without kernel support.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Sequence

from . import kernel

_CREATE_RULESET, _ADD_RULE, _RESTRICT_SELF = 444, 445, 446
_EXECUTE, _WRITE_FILE, _READ_FILE, _READ_DIR = 1 << 0, 1 << 1, 1 << 2, 1 << 3
_RIGHTS_OF_VERSION = {1: 13, 2: 14, 3: 15, 4: 15, 5: 16}  # number of file-system rights in each ABI
_IOCTL_DEVICE = 1 << 15
_SCOPE_ABSTRACT_SOCKETS, _SCOPE_SIGNALS = 1 << 0, 1 << 1
_RETURN_VERSION, _PATH_BENEATH = 1, 1


def restrict(writable: Sequence[str], devices: Sequence[str]) -> None:
    """Restricts this process: it may read and execute everything, modify `writable`, and write to files in `devices`."""
    try:
        version = kernel.syscall("landlock", _CREATE_RULESET, 0, 0, _RETURN_VERSION)
    except OSError:
        return
    handled = (1 << _RIGHTS_OF_VERSION[min(version, 5)]) - 1
    rules = {"/": _EXECUTE | _READ_FILE | _READ_DIR, **dict.fromkeys(writable, handled)}
    rules |= dict.fromkeys(devices, (_WRITE_FILE | _READ_FILE | _READ_DIR | _IOCTL_DEVICE) & handled)
    attributes = struct.pack("=QQQ", handled, 0, _SCOPE_ABSTRACT_SOCKETS | _SCOPE_SIGNALS)[: 24 if version >= 6 else 8]
    ruleset = kernel.syscall("landlock", _CREATE_RULESET, attributes, len(attributes), 0)
    try:
        for path, access in rules.items():
            directory = os.open(path, os.O_PATH | os.O_CLOEXEC)
            try:
                rule = struct.pack("=Qi", access, directory)
                kernel.syscall("landlock rule", _ADD_RULE, ruleset, _PATH_BENEATH, rule, 0)
            finally:
                os.close(directory)
        kernel.syscall("landlock", _RESTRICT_SELF, ruleset, 0)
    finally:
        os.close(ruleset)
