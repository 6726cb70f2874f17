"""Thin wrappers around the Linux system calls that Python lacks (`unshare`, `mount`, capabilities …).

Invariant: every function either succeeds or raises `OSError` with the kernel's errno. Constants have the kernel's names.
Policy is left to the callers. A user namespace created here has exactly one user and one group, mapped to the caller's
outside; no other id can be mapped or switched to afterwards.
"""

from __future__ import annotations

import ctypes
import os
import platform
import struct

CLONE_NEWNS = 0x00020000
CLONE_NEWCGROUP = 0x02000000
CLONE_NEWUTS = 0x04000000
CLONE_NEWIPC = 0x08000000
CLONE_NEWUSER = 0x10000000
CLONE_NEWPID = 0x20000000
CLONE_NEWNET = 0x40000000
ALL_NAMESPACES = (
    CLONE_NEWNS | CLONE_NEWCGROUP | CLONE_NEWUTS | CLONE_NEWIPC | CLONE_NEWUSER | CLONE_NEWPID | CLONE_NEWNET
)

MS_RDONLY = 1
MS_NOSUID = 2
MS_NODEV = 4
MS_NOEXEC = 8
MS_REMOUNT = 32
MS_BIND = 4096
MS_REC = 16384
MS_PRIVATE = 1 << 18
MNT_DETACH = 2

PR_SET_DUMPABLE = 4
PR_SET_SECCOMP = 22
PR_SET_CHILD_SUBREAPER = 36
PR_SET_NO_NEW_PRIVS = 38
SECCOMP_MODE_FILTER = 2

RESOLVE_NO_MAGICLINKS = 0x02
RESOLVE_NO_SYMLINKS = 0x04
RESOLVE_BENEATH = 0x08

_NUMBERS = {
    "x86_64": {"capset": 126, "pivot_root": 155},
    "aarch64": {"capset": 91, "pivot_root": 41},
}
_OPENAT2, _MOUNT_SETATTR = 437, 442

_libc = ctypes.CDLL(None, use_errno=True)
_libc.syscall.restype = ctypes.c_long
_libc.mount.argtypes = (ctypes.c_char_p, ctypes.c_char_p, ctypes.c_char_p, ctypes.c_ulong, ctypes.c_char_p)
_libc.prctl.argtypes = (ctypes.c_int, *[ctypes.c_ulong] * 4)


def machine() -> str:
    """Returns the architecture's name: x86_64 or aarch64.

    Raises:
        OSError: the architecture is not supported.
    """
    name = platform.machine()
    if name not in _NUMBERS:
        raise OSError(f"no table of system calls for {name}; x86_64 and aarch64 are known")
    return name


def _check(result: int, what: str) -> int:
    if result == -1:
        number = ctypes.get_errno()
        raise OSError(number, f"{what}: {os.strerror(number)}")
    return result


def syscall(what: str, number: int, *arguments: int | str | bytes) -> int:
    """Makes a system call that the C library lacks; a text is a path, bytes are a structure that the kernel reads. `what`
    begins the text of an error."""
    converted = [
        ctypes.c_long(argument)
        if isinstance(argument, int)
        else ctypes.c_char_p(os.fsencode(argument))
        if isinstance(argument, str)
        else ctypes.create_string_buffer(argument, len(argument))
        for argument in arguments
    ]
    return _check(int(_libc.syscall(ctypes.c_long(number), *converted)), what)


def unshare(flags: int) -> None:
    """Moves this process into new namespaces."""
    _check(_libc.unshare(flags), "unshare")


def enter_user_namespace(inner_id: int, further_flags: int = 0) -> None:
    """Enters a new user namespace (and those of `further_flags`), in which this process's user and group are `inner_id`."""
    user, group = os.geteuid(), os.getegid()
    prctl(PR_SET_DUMPABLE, 1)  # otherwise /proc/self would belong to the host's root
    unshare(CLONE_NEWUSER | further_flags)
    prctl(PR_SET_DUMPABLE, 1)
    for name, text in (
        ("setgroups", "deny"),
        ("uid_map", f"{inner_id} {user} 1"),
        ("gid_map", f"{inner_id} {group} 1"),
    ):
        with open(f"/proc/self/{name}", "wb", buffering=0) as file:
            file.write(text.encode())


def setns(fd: int, kind: int) -> None:
    """Moves this process into the namespace of `fd`."""
    _check(_libc.setns(fd, kind), "setns")


def mount(source: str, target: str, kind: str = "", flags: int = 0, options: str = "") -> None:
    """Calls mount(2)."""
    encoded = [os.fsencode(part) for part in (source, target, kind)]
    _check(_libc.mount(*encoded, flags, options.encode()), f"mount on {target}")


def unmount(target: str) -> None:
    """Detaches the mount on `target`."""
    _check(_libc.umount2(os.fsencode(target), MNT_DETACH), f"umount of {target}")


def pivot_root(new_root: str, old_root: str) -> None:
    """Makes `new_root` the root of this mount namespace and puts the old one at `old_root`."""
    syscall("pivot_root", _NUMBERS[machine()]["pivot_root"], new_root, old_root)


def make_read_only(target: str) -> None:
    """Makes the mount on `target` and all mounts beneath it read-only, without devices and set-user-id programs."""
    attributes = struct.pack("=QQQQ", 1 | 2 | 4, 0, 0, 0)  # MOUNT_ATTR_RDONLY, _NOSUID, _NODEV
    at_fdcwd, at_recursive = -100, 0x8000
    syscall(f"read-only {target}", _MOUNT_SETATTR, at_fdcwd, target, at_recursive, attributes, len(attributes))


def prctl(option: int, value: int = 0) -> None:
    """Calls prctl(2) with one argument."""
    _check(_libc.prctl(option, value, 0, 0, 0), f"prctl {option}")


def drop_capabilities() -> None:
    """Empties this process's capability sets; permanently, if PR_SET_NO_NEW_PRIVS is set."""
    syscall("capset", _NUMBERS[machine()]["capset"], struct.pack("=Ii", 0x20080522, 0), bytes(24))


def install_seccomp(program: bytes) -> None:
    """Permanently installs a BPF program (8 bytes per instruction) as this process's system-call filter."""
    instructions = ctypes.create_string_buffer(program, len(program))
    filter_program = struct.pack("@HP", len(program) // 8, ctypes.addressof(instructions))
    holder = ctypes.create_string_buffer(filter_program, len(filter_program))
    _check(_libc.prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, ctypes.addressof(holder), 0, 0), "seccomp")


def open_beneath(directory: int, path: str, flags: int) -> int:
    """Opens `path` beneath the directory descriptor without following any symbolic link, including the last component."""
    how = struct.pack("=QQQ", flags, 0, RESOLVE_BENEATH | RESOLVE_NO_SYMLINKS | RESOLVE_NO_MAGICLINKS)
    return syscall(f"open {path}", _OPENAT2, directory, path, how, len(how))
