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

_EXECUTE, _WRITE_FILE, _READ_FILE, _READ_DIR = 1 << 0, 1 << 1, 1 << 2, 1 << 3
_RIGHTS_OF_VERSION = {1: 13, 2: 14, 3: 15, 4: 15, 5: 16}  # number of file-system rights in each ABI
_IOCTL_DEVICE = 1 << 15
_SCOPE_ABSTRACT_SOCKETS, _SCOPE_SIGNALS = 1 << 0, 1 << 1


def restrict(writable: Sequence[str], devices: Sequence[str]) -> None:
    """Restricts this process: it may read and execute everything, modify `writable`, and write to files in `devices`."""
    version = kernel.landlock_version()
    if version == 0:
        return
    handled = (1 << _RIGHTS_OF_VERSION[min(version, 5)]) - 1
    scoped = _SCOPE_ABSTRACT_SOCKETS | _SCOPE_SIGNALS
    ruleset = kernel.landlock_ruleset(struct.pack("=QQQ", handled, 0, scoped)[: 24 if version >= 6 else 8])
    try:
        _allow(ruleset, "/", _EXECUTE | _READ_FILE | _READ_DIR)
        for path in writable:
            _allow(ruleset, path, handled)
        for path in devices:
            _allow(ruleset, path, (_WRITE_FILE | _READ_FILE | _READ_DIR | _IOCTL_DEVICE) & handled)
        kernel.landlock_restrict(ruleset)
    finally:
        os.close(ruleset)


def _allow(ruleset: int, path: str, access: int) -> None:
    directory = os.open(path, os.O_PATH | os.O_CLOEXEC)
    try:
        kernel.landlock_allow_beneath(ruleset, directory, access)
    finally:
        os.close(directory)
