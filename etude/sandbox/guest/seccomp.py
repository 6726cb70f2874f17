"""The system-call filter of a run: classic BPF, assembled by hand.

Invariant: a call is allowed only if it is in the table of known calls and not on the list of those that reach beyond the
process's own files, memory and children. Newer calls, and those of other architectures, do not exist for the program.
The filter is a second wall: what it denies is out of reach by namespaces and missing capabilities too, except for what
namespaces do not cover: `AF_VSOCK`, kernel keyrings, memory that belongs to no process and so escapes the census, and
counts that all runs and the host share.
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

_NAMESPACE_FLAGS = (
    kernel.CLONE_NEWNS
    | kernel.CLONE_NEWCGROUP
    | kernel.CLONE_NEWUTS
    | kernel.CLONE_NEWIPC
    | kernel.CLONE_NEWUSER
    | kernel.CLONE_NEWPID
    | kernel.CLONE_NEWNET
)
_SAME_NUMBER_EVERYWHERE = {
    "pidfd_getfd": 438,
    "process_madvise": 440,
    "mount_setattr": 442,
    "quotactl_fd": 443,
    "memfd_secret": 447,
    "process_mrelease": 448,
    "set_mempolicy_home_node": 450,
    "open_tree": 428,
    "move_mount": 429,
    "fsopen": 430,
    "fsconfig": 431,
    "fsmount": 432,
    "fspick": 433,
    "io_uring_setup": 425,
    "io_uring_enter": 426,
    "io_uring_register": 427,
    "statmount": 457,
    "listmount": 458,
    "lsm_set_self_attr": 460,
}
_DENIED = {
    "x86_64": {
        "ptrace": 101,
        "process_vm_readv": 310,
        "process_vm_writev": 311,
        "kcmp": 312,
        "mount": 165,
        "umount2": 166,
        "pivot_root": 155,
        "chroot": 161,
        "unshare": 272,
        "setns": 308,
        "add_key": 248,
        "request_key": 249,
        "keyctl": 250,
        "bpf": 321,
        "userfaultfd": 323,
        "perf_event_open": 298,
        "kexec_load": 246,
        "kexec_file_load": 320,
        "init_module": 175,
        "finit_module": 313,
        "delete_module": 176,
        "create_module": 174,
        "reboot": 169,
        "swapon": 167,
        "swapoff": 168,
        "sethostname": 170,
        "setdomainname": 171,
        "iopl": 172,
        "ioperm": 173,
        "modify_ldt": 154,
        "acct": 163,
        "quotactl": 179,
        "syslog": 103,
        "settimeofday": 164,
        "clock_settime": 227,
        "adjtimex": 159,
        "clock_adjtime": 305,
        "lookup_dcookie": 212,
        "name_to_handle_at": 303,
        "open_by_handle_at": 304,
        "fanotify_init": 300,
        "vhangup": 153,
        "migrate_pages": 256,
        "move_pages": 279,
        "uselib": 134,
        "personality": 135,
        "memfd_create": 319,
        "shmget": 29,
        "msgget": 68,
        "semget": 64,
    },
    "aarch64": {
        "ptrace": 117,
        "process_vm_readv": 270,
        "process_vm_writev": 271,
        "kcmp": 272,
        "mount": 40,
        "umount2": 39,
        "pivot_root": 41,
        "chroot": 51,
        "unshare": 97,
        "setns": 268,
        "add_key": 217,
        "request_key": 218,
        "keyctl": 219,
        "bpf": 280,
        "userfaultfd": 282,
        "perf_event_open": 241,
        "kexec_load": 104,
        "kexec_file_load": 294,
        "init_module": 105,
        "finit_module": 273,
        "delete_module": 106,
        "reboot": 142,
        "swapon": 224,
        "swapoff": 225,
        "sethostname": 161,
        "setdomainname": 162,
        "acct": 89,
        "quotactl": 60,
        "syslog": 116,
        "settimeofday": 170,
        "clock_settime": 112,
        "adjtimex": 171,
        "clock_adjtime": 266,
        "lookup_dcookie": 18,
        "name_to_handle_at": 264,
        "open_by_handle_at": 265,
        "fanotify_init": 262,
        "vhangup": 58,
        "migrate_pages": 238,
        "move_pages": 239,
        "personality": 92,
        "memfd_create": 279,
        "shmget": 194,
        "msgget": 186,
        "semget": 190,
    },
}
"""By architecture, the calls that fail with EPERM. The last four create memory outside any process's resident set, which
the supervisor would not see grow."""
_ABSENT = {
    "x86_64": {
        "clone3": 435,
        "vmsplice": 278,
        "splice": 275,
        "tee": 276,
        "io_setup": 206,
        "inotify_init": 253,
        "inotify_init1": 294,
        "inotify_add_watch": 254,
        "inotify_rm_watch": 255,
    },
    "aarch64": {
        "clone3": 435,
        "vmsplice": 75,
        "splice": 76,
        "tee": 77,
        "io_setup": 0,
        "inotify_init1": 26,
        "inotify_add_watch": 27,
        "inotify_rm_watch": 28,
    },
}
"""Those that fail with ENOSYS, so that a program does without. `clone3` has its flags in memory, where no filter looks: the
C library falls back to `clone`. The next three hold pages in pipes that no process has mapped. The rest draw on counts
that the host's user has once for all runs, and inotify watches what others do to the files that everybody sees."""
_WITHOUT_EFFECT = {
    "x86_64": {"sync": 162, "syncfs": 306, "fsync": 74, "fdatasync": 75, "sync_file_range": 277},
    "aarch64": {"sync": 81, "syncfs": 267, "fsync": 82, "fdatasync": 83, "sync_file_range": 84},
}
"""Those that succeed and do nothing. A run's files are in memory; these would only flush the host's."""

_ALLOWED_FAMILIES = (1, 2, 10)  # AF_UNIX, AF_INET, AF_INET6: AF_VSOCK, AF_ALG, AF_NETLINK, AF_PACKET … are not there
_ALLOWED_PROTOCOLS = (0, 6, 17)  # the family's own, TCP, UDP: nothing that loads a module or has buffers of its own
_SUPERVISOR = 1
_ALL_OF_A_USER = {"setpriority": 2, "ioprio_set": 3}
_TIOCSTI, _TIOCLINUX = 0x5412, 0x541C
_F_SETLEASE, _F_NOTIFY, _F_SETPIPE_SZ = 1024, 1026, 1031
_SOL_SOCKET, _SO_SNDBUF, _SO_RCVBUF, _SO_SNDBUFFORCE, _SO_RCVBUFFORCE = 1, 7, 8, 32, 33
_MAP_HUGETLB, _MADV_PAGEOUT, _MS_SYNC, _POSIX_FADV_DONTNEED = 0x40000, 21, 4, 4

_Condition = Callable[[int], list[bytes]]
"""Instructions that continue if it holds, else skip the given number of further instructions."""


def denied_calls(machine: str) -> dict[str, int]:
    """The names and numbers of the calls that fail with EPERM whatever their arguments."""
    return {**_SAME_NUMBER_EVERYWHERE, **_DENIED[machine]}


def _instruction(code: int, value: int, if_true: int = 0, if_false: int = 0) -> bytes:
    return struct.pack("=HBBI", code, if_true, if_false, value)


def _answer(number: int) -> bytes:
    """Ends the call with this errno; 0 is success."""
    return _instruction(_RET, _ERRNO | number)


def _argument(index: int) -> bytes:
    """Loads the low word of an argument (both architectures are little-endian)."""
    return _instruction(_LD_WORD_ABS, _OFFSET_ARGUMENTS + 8 * index)


def _is(index: int, *values: int) -> _Condition:
    """An argument is one of `values`."""
    *others, last = values
    tests = [_instruction(_JEQ, value, len(others) - i) for i, value in enumerate(others)]
    return lambda skipped: [_argument(index), *tests, _instruction(_JEQ, last, 0, skipped)]


def _is_not(index: int, *values: int) -> _Condition:
    """An argument is none of `values`."""
    return lambda skipped: [
        _argument(index),
        *(_instruction(_JEQ, value, len(values) - 1 - i + skipped) for i, value in enumerate(values)),
    ]


def _has(index: int, bits: int) -> _Condition:
    """An argument has any of `bits`."""
    return lambda skipped: [_argument(index), _instruction(_JSET, bits, 0, skipped)]


def _rule(number: int, *conditions: _Condition) -> list[bytes]:
    """Ends the call with this errno where all conditions hold."""
    body = [_answer(number)]
    for condition in reversed(conditions):
        body = condition(len(body)) + body
    return body


def _sockets() -> list[bytes]:
    """The rules of `socket` and `socketpair`."""
    families = _rule(errno.EAFNOSUPPORT, _is_not(0, *_ALLOWED_FAMILIES))
    return families + _rule(errno.EPROTONOSUPPORT, _is_not(0, 1), _is_not(2, *_ALLOWED_PROTOCOLS))


_RULES = {
    "clone": _rule(errno.EPERM, _has(0, _NAMESPACE_FLAGS)),
    "socket": _sockets(),
    "socketpair": _sockets(),
    "ioctl": _rule(errno.EPERM, _is(1, _TIOCSTI, _TIOCLINUX)),
    # Signals of what others do to shared files, a right to stall who writes them, buffers beyond those of the system.
    "fcntl": _rule(errno.EPERM, _is(1, _F_SETLEASE, _F_NOTIFY, _F_SETPIPE_SZ)),
    # A hint to most programs, so that it succeeds. The census counts every socket with the size that it begins with.
    "setsockopt": _rule(0, _is(1, _SOL_SOCKET), _is(2, _SO_SNDBUF, _SO_RCVBUF))
    + _rule(errno.EPERM, _is(1, _SOL_SOCKET), _is(2, _SO_SNDBUFFORCE, _SO_RCVBUFFORCE)),
    # The host's reserved large pages, swap, cache and disk.
    "mmap": _rule(errno.ENOMEM, _has(3, _MAP_HUGETLB)),
    "madvise": _rule(errno.EINVAL, _is(2, _MADV_PAGEOUT)),
    "fadvise64": _rule(0, _is(3, _POSIX_FADV_DONTNEED)),
    "msync": _rule(0, _has(2, _MS_SYNC)),
    # Program and supervisor are the same user to the host, which lets one change the other without any privilege.
    **{
        name: _rule(errno.EPERM, _is(0, _SUPERVISOR))
        for name in ("prlimit64", "sched_setaffinity", "sched_setscheduler", "sched_setparam", "sched_setattr")
    },
    **{
        name: _rule(errno.EPERM, _is(0, everybody)) + _rule(errno.EPERM, _is(1, _SUPERVISOR))
        for name, everybody in _ALL_OF_A_USER.items()
    },
}
"""What ends a call that is allowed with other arguments."""
_CALLS_WITH_RULES = {
    "x86_64": {
        "clone": 56,
        "socket": 41,
        "socketpair": 53,
        "ioctl": 16,
        "fcntl": 72,
        "setsockopt": 54,
        "mmap": 9,
        "madvise": 28,
        "fadvise64": 221,
        "msync": 26,
        "prlimit64": 302,
        "sched_setaffinity": 203,
        "sched_setscheduler": 144,
        "sched_setparam": 142,
        "sched_setattr": 314,
        "setpriority": 141,
        "ioprio_set": 251,
    },
    "aarch64": {
        "clone": 220,
        "socket": 198,
        "socketpair": 199,
        "ioctl": 29,
        "fcntl": 25,
        "setsockopt": 208,
        "mmap": 222,
        "madvise": 233,
        "fadvise64": 223,
        "msync": 227,
        "prlimit64": 261,
        "sched_setaffinity": 122,
        "sched_setscheduler": 119,
        "sched_setparam": 118,
        "sched_setattr": 274,
        "setpriority": 140,
        "ioprio_set": 30,
    },
}


def _only_when_call_is(number: int, body: list[bytes]) -> list[bytes]:
    """`body`, which must end in a return, skipped unless the loaded call is `number`."""
    return [_instruction(_JEQ, number, 0, len(body)), *body]


def assemble(machine: str) -> bytes:
    """The filter for one architecture, 8 bytes an instruction."""
    allow = _instruction(_RET, _ALLOW)
    program = [
        _instruction(_LD_WORD_ABS, _OFFSET_ARCH),
        _instruction(_JEQ, _ARCH[machine], 1, 0),
        _instruction(_RET, _KILL_PROCESS),
        _instruction(_LD_WORD_ABS, _OFFSET_NUMBER),
        _instruction(_JGT, _LAST_KNOWN_CALL, 0, 1),  # x32's numbers, which have bit 30 set, too
        _answer(errno.ENOSYS),
    ]
    for name, number in _CALLS_WITH_RULES[machine].items():
        program += _only_when_call_is(number, [*_RULES[name], allow])
    for calls, answer in (
        (denied_calls(machine), errno.EPERM),
        (_ABSENT[machine], errno.ENOSYS),
        (_WITHOUT_EFFECT[machine], 0),
    ):
        for number in sorted(calls.values()):
            program += _only_when_call_is(number, [_answer(answer)])
    program.append(allow)
    return b"".join(program)
