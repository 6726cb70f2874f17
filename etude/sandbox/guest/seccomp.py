"""The seccomp system-call filter of a run: classic BPF, assembled by hand.

Invariant: a call is allowed only if its number is at most the last known one and it is not in the tables of those that reach
beyond the process's own files, memory and children. Newer calls fail with ENOSYS; calls of other architectures kill the
process. The filter is a second barrier: namespaces and missing capabilities block what it denies too, except for what
namespaces do not cover: `AF_VSOCK`, kernel keyrings, memory that belongs to no process and so escapes measurement, and
quotas that all runs and the host share.
"""

from __future__ import annotations

import errno
import struct
from collections.abc import Callable

from . import kernel

_LD_WORD_ABS, _JEQ, _JGT, _JSET, _RET = 0x20, 0x15, 0x25, 0x45, 0x06
_KILL_PROCESS, _ERRNO, _ALLOW = 0x80000000, 0x00050000, 0x7FFF0000
_OFFSET_NUMBER, _OFFSET_ARCH, _OFFSET_ARGUMENTS = 0, 4, 16
_LAST_KNOWN_CALL = 466  # removexattrat, Linux 6.13

_ARCH = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
_Calls = dict[str, "tuple[int | None, int | None]"]
"""Each call's numbers on x86-64 and 64-bit ARM; None where it does not exist."""

_DENIED: _Calls = {
    "ptrace": (101, 117),
    "process_vm_readv": (310, 270),
    "process_vm_writev": (311, 271),
    "kcmp": (312, 272),
    "mount": (165, 40),
    "umount2": (166, 39),
    "pivot_root": (155, 41),
    "chroot": (161, 51),
    "unshare": (272, 97),
    "setns": (308, 268),
    "add_key": (248, 217),
    "request_key": (249, 218),
    "keyctl": (250, 219),
    "bpf": (321, 280),
    "userfaultfd": (323, 282),
    "perf_event_open": (298, 241),
    "kexec_load": (246, 104),
    "kexec_file_load": (320, 294),
    "init_module": (175, 105),
    "finit_module": (313, 273),
    "delete_module": (176, 106),
    "create_module": (174, None),
    "reboot": (169, 142),
    "swapon": (167, 224),
    "swapoff": (168, 225),
    "sethostname": (170, 161),
    "setdomainname": (171, 162),
    "iopl": (172, None),
    "ioperm": (173, None),
    "modify_ldt": (154, None),
    "acct": (163, 89),
    "quotactl": (179, 60),
    "syslog": (103, 116),
    "settimeofday": (164, 170),
    "clock_settime": (227, 112),
    "adjtimex": (159, 171),
    "clock_adjtime": (305, 266),
    "lookup_dcookie": (212, 18),
    "name_to_handle_at": (303, 264),
    "open_by_handle_at": (304, 265),
    "fanotify_init": (300, 262),
    "vhangup": (153, 58),
    "migrate_pages": (256, 238),
    "move_pages": (279, 239),
    "uselib": (134, None),
    "personality": (135, 92),
    "memfd_create": (319, 279),
    "shmget": (29, 194),
    "msgget": (68, 186),
    "semget": (64, 190),
    "pidfd_getfd": (438, 438),
    "process_madvise": (440, 440),
    "mount_setattr": (442, 442),
    "quotactl_fd": (443, 443),
    "memfd_secret": (447, 447),
    "process_mrelease": (448, 448),
    "set_mempolicy_home_node": (450, 450),
    "open_tree": (428, 428),
    "move_mount": (429, 429),
    "fsopen": (430, 430),
    "fsconfig": (431, 431),
    "fsmount": (432, 432),
    "fspick": (433, 433),
    "io_uring_setup": (425, 425),
    "io_uring_enter": (426, 426),
    "io_uring_register": (427, 427),
    "statmount": (457, 457),
    "listmount": (458, 458),
    "lsm_set_self_attr": (460, 460),
}
"""Calls that fail with EPERM. `memfd_create`, `shmget`, `msgget` and `semget` create memory outside any process's resident
set, which the supervisor could not measure."""
_ABSENT: _Calls = {
    "clone3": (435, 435),
    "vmsplice": (278, 75),
    "splice": (275, 76),
    "tee": (276, 77),
    "io_setup": (206, 0),
    "inotify_init": (253, None),
    "inotify_init1": (294, 26),
    "inotify_add_watch": (254, 27),
    "inotify_rm_watch": (255, 28),
    "landlock_create_ruleset": (444, 444),
    "landlock_add_rule": (445, 445),
    "landlock_restrict_self": (446, 446),
}
"""Calls that fail with ENOSYS, so that a program does without. `clone3` has its flags in memory, which no filter can read:
the C library falls back to `clone`. The next three hold pages in pipes that no process has mapped. Asynchronous I/O and
inotify use quotas that the host's user has once for all runs, and inotify reveals what others do to shared files. Landlock
keeps any number of rules in the kernel's memory, a copy for each process that applies them."""
_WITHOUT_EFFECT: _Calls = {
    "sync": (162, 81),
    "syncfs": (306, 267),
    "fsync": (74, 82),
    "fdatasync": (75, 83),
    "sync_file_range": (277, 84),
}
"""Calls that succeed and do nothing: a run's files are in memory, so they would only flush the host's."""

_ALLOWED_FAMILIES = (1, 2, 10)  # AF_UNIX, AF_INET, AF_INET6; not AF_VSOCK, AF_ALG, AF_NETLINK, AF_PACKET …
_ALLOWED_PROTOCOLS = (0, 6, 17)  # the family's default, TCP, UDP; none that loads a module or has separate buffers
_SUPERVISOR = 1
_ALL_OF_A_USER = {"setpriority": 2, "ioprio_set": 3}
_TIOCSTI, _TIOCLINUX = 0x5412, 0x541C
_F_SETLEASE, _F_NOTIFY, _F_SETPIPE_SZ = 1024, 1026, 1031
_SOL_SOCKET, _SO_SNDBUF, _SO_RCVBUF, _SO_SNDBUFFORCE, _SO_RCVBUFFORCE = 1, 7, 8, 32, 33
_MAP_SHARED, _MAP_ANONYMOUS = 0x1, 0x20
_MAP_HUGETLB, _MADV_PAGEOUT, _MS_SYNC, _POSIX_FADV_DONTNEED = 0x40000, 21, 4, 4

_Condition = Callable[[int], list[bytes]]
"""Returns instructions that continue if the condition holds, else skip the given number of further instructions."""


def _instruction(code: int, value: int, if_true: int = 0, if_false: int = 0) -> bytes:
    return struct.pack("=HBBI", code, if_true, if_false, value)


def _return_errno(number: int) -> bytes:
    """Returns from the filter: the call fails with this errno, or with 0 succeeds without effect."""
    return _instruction(_RET, _ERRNO | number)


def _argument(index: int) -> bytes:
    """Loads the low word of a call's argument (both architectures are little-endian)."""
    return _instruction(_LD_WORD_ABS, _OFFSET_ARGUMENTS + 8 * index)


def _is(index: int, *values: int) -> _Condition:
    """The condition that an argument is one of `values`."""
    *others, last = values
    tests = [_instruction(_JEQ, value, len(others) - i) for i, value in enumerate(others)]
    return lambda skipped: [_argument(index), *tests, _instruction(_JEQ, last, 0, skipped)]


def _is_not(index: int, *values: int) -> _Condition:
    """The condition that an argument is not one of `values`."""
    return lambda skipped: [
        _argument(index),
        *(_instruction(_JEQ, value, len(values) - 1 - i + skipped) for i, value in enumerate(values)),
    ]


def _has(index: int, bits: int) -> _Condition:
    """The condition that an argument has any of `bits` set."""
    return lambda skipped: [_argument(index), _instruction(_JSET, bits, 0, skipped)]


def _rule(number: int, *conditions: _Condition) -> list[bytes]:
    """Ends the call with this errno if all conditions hold."""
    body = [_return_errno(number)]
    for condition in reversed(conditions):
        body = condition(len(body)) + body
    return body


def _sockets() -> list[bytes]:
    """Returns the rules of `socket` and `socketpair`."""
    families = _rule(errno.EAFNOSUPPORT, _is_not(0, *_ALLOWED_FAMILIES))
    return families + _rule(errno.EPROTONOSUPPORT, _is_not(0, 1), _is_not(2, *_ALLOWED_PROTOCOLS))


_RULES = {
    "clone": _rule(errno.EPERM, _has(0, kernel.ALL_NAMESPACES)),
    "socket": _sockets(),
    "socketpair": _sockets(),
    "ioctl": _rule(errno.EPERM, _is(1, _TIOCSTI, _TIOCLINUX)),
    # Notifications of what others do to shared files, leases that block their writers, pipes with larger buffers.
    "fcntl": _rule(errno.EPERM, _is(1, _F_SETLEASE, _F_NOTIFY, _F_SETPIPE_SZ)),
    # Most programs set buffer sizes as a hint, so that succeeds. The supervisor counts every socket with its initial size.
    "setsockopt": _rule(0, _is(1, _SOL_SOCKET), _is(2, _SO_SNDBUF, _SO_RCVBUF))
    + _rule(errno.EPERM, _is(1, _SOL_SOCKET), _is(2, _SO_SNDBUFFORCE, _SO_RCVBUFFORCE)),
    # The host's huge pages, swap, page cache and disk.
    # And shared memory without a file: its pages stay after `mremap`, `munmap` of a part or `madvise`, in no process's
    # resident set. A file of the run is counted by its tmpfs.
    "mmap": _rule(errno.ENOMEM, _has(3, _MAP_HUGETLB))
    + _rule(errno.EPERM, _has(3, _MAP_ANONYMOUS), _has(3, _MAP_SHARED)),
    # Attributes of files: a list of access rights takes 64 KiB for each file, which its tmpfs does not count.
    **dict.fromkeys(("setxattr", "lsetxattr", "fsetxattr", "setxattrat"), _rule(errno.ENOTSUP)),
    "madvise": _rule(errno.EINVAL, _is(2, _MADV_PAGEOUT)),
    "fadvise64": _rule(0, _is(3, _POSIX_FADV_DONTNEED)),
    "msync": _rule(0, _has(2, _MS_SYNC)),
    # Program and supervisor are the same user to the host, so one could change the other without any privilege.
    **{
        name: _rule(errno.EPERM, _is(0, _SUPERVISOR))
        for name in ("prlimit64", "sched_setaffinity", "sched_setscheduler", "sched_setparam", "sched_setattr")
    },
    **{
        name: _rule(errno.EPERM, _is(0, everybody)) + _rule(errno.EPERM, _is(1, _SUPERVISOR))
        for name, everybody in _ALL_OF_A_USER.items()
    },
}
"""Rules that end a call with some arguments; with others it is allowed."""
_CALLS_WITH_RULES: _Calls = {
    "clone": (56, 220),
    "socket": (41, 198),
    "socketpair": (53, 199),
    "ioctl": (16, 29),
    "fcntl": (72, 25),
    "setsockopt": (54, 208),
    "mmap": (9, 222),
    "setxattr": (188, 5),
    "lsetxattr": (189, 6),
    "fsetxattr": (190, 7),
    "setxattrat": (463, 463),
    "madvise": (28, 233),
    "fadvise64": (221, 223),
    "msync": (26, 227),
    "prlimit64": (302, 261),
    "sched_setaffinity": (203, 122),
    "sched_setscheduler": (144, 119),
    "sched_setparam": (142, 118),
    "sched_setattr": (314, 274),
    "setpriority": (141, 140),
    "ioprio_set": (251, 30),
}


def numbers(calls: _Calls, machine: str) -> dict[str, int]:
    """Returns the calls of a table that this architecture has, with their numbers."""
    column = tuple(_ARCH).index(machine)
    return {name: number for name, columns in calls.items() if (number := columns[column]) is not None}


def _only_when_call_is(number: int, body: list[bytes]) -> list[bytes]:
    """Returns `body`, which must end in a return, skipped unless the loaded call number is `number`."""
    return [_instruction(_JEQ, number, 0, len(body)), *body]


def assemble(machine: str) -> bytes:
    """Assembles the filter for one architecture, 8 bytes per instruction."""
    allow = _instruction(_RET, _ALLOW)
    program = [
        _instruction(_LD_WORD_ABS, _OFFSET_ARCH),
        _instruction(_JEQ, _ARCH[machine], 1, 0),
        _instruction(_RET, _KILL_PROCESS),
        _instruction(_LD_WORD_ABS, _OFFSET_NUMBER),
        _instruction(_JGT, _LAST_KNOWN_CALL, 0, 1),  # x32's numbers, which have bit 30 set, too
        _return_errno(errno.ENOSYS),
    ]
    for name, number in numbers(_CALLS_WITH_RULES, machine).items():
        program += _only_when_call_is(number, [*_RULES[name], allow])
    for calls, answer in ((_DENIED, errno.EPERM), (_ABSENT, errno.ENOSYS), (_WITHOUT_EFFECT, 0)):
        for number in sorted(numbers(calls, machine).values()):
            program += _only_when_call_is(number, [_return_errno(answer)])
    program.append(allow)
    return b"".join(program)
