"""The system-call filter of a run: classic BPF, assembled by hand.

Invariant: a call is allowed only if its number is one the kernels of the table's day had, and it is not on the list of
those that reach beyond the process's own files, memory and children. Newer calls do not exist for the program, nor do
those of another architecture. The filter is a second wall: what it denies is out of reach by namespaces and missing
capabilities too, except for what namespaces do not cover (`AF_VSOCK`, kernel keyrings, memory that belongs to no process).
"""

from __future__ import annotations

import errno
import struct

from . import kernel

_LD_WORD_ABS, _JEQ, _JGT, _JSET, _RET = 0x20, 0x15, 0x25, 0x45, 0x06
_KILL_PROCESS, _ERRNO, _ALLOW = 0x80000000, 0x00050000, 0x7FFF0000
_OFFSET_NUMBER, _OFFSET_ARCH, _OFFSET_ARGUMENTS = 0, 4, 16
_X32_BIT = 0x40000000
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
_ALLOWED_FAMILIES = (1, 2, 10)  # AF_UNIX, AF_INET, AF_INET6: AF_VSOCK, AF_ALG, AF_NETLINK, AF_PACKET … are not there
_TIOCSTI, _TIOCLINUX = 0x5412, 0x541C

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
"""By architecture, the calls that fail with EPERM. The last four make memory that belongs to no process's resident set,
so that no supervisor would see it grow."""

_CALLS_WITH_ARGUMENTS = {
    "x86_64": {"clone": 56, "clone3": 435, "socket": 41, "ioctl": 16},
    "aarch64": {"clone": 220, "clone3": 435, "socket": 198, "ioctl": 29},
}

_SUPERVISOR = 1
_CALLS_ON_A_PROCESS = {
    "x86_64": {
        "prlimit64": 302,
        "sched_setaffinity": 203,
        "sched_setscheduler": 144,
        "sched_setparam": 142,
        "sched_setattr": 314,
    },
    "aarch64": {
        "prlimit64": 261,
        "sched_setaffinity": 122,
        "sched_setscheduler": 119,
        "sched_setparam": 118,
        "sched_setattr": 274,
    },
}
"""Calls that change another process of the same user, their first argument, without asking for privileges. The program and
its supervisor are the same user to the host, so that process 1 is denied by name."""
_CALLS_ON_MANY = {
    "x86_64": {"setpriority": (141, 2), "ioprio_set": (251, 3)},
    "aarch64": {"setpriority": (140, 2), "ioprio_set": (30, 3)},
}
"""The same by kind (first argument) and number (second): the call, and the kind that means all processes of a user."""


def denied_calls(machine: str) -> dict[str, int]:
    """The names and numbers of the calls that are denied whatever their arguments."""
    return {**_SAME_NUMBER_EVERYWHERE, **_DENIED[machine]}


def _instruction(code: int, value: int, if_true: int = 0, if_false: int = 0) -> bytes:
    return struct.pack("=HBBI", code, if_true, if_false, value)


def _refuse(number: int) -> bytes:
    return _instruction(_RET, _ERRNO | number)


def _argument(index: int) -> bytes:
    """Loads the low word of an argument (both architectures are little-endian)."""
    return _instruction(_LD_WORD_ABS, _OFFSET_ARGUMENTS + 8 * index)


def _only_when_call_is(number: int, body: list[bytes]) -> list[bytes]:
    """`body`, which must end in a return, skipped unless the loaded call is `number`."""
    return [_instruction(_JEQ, number, 0, len(body)), *body]


def assemble(machine: str) -> bytes:
    """The filter for one architecture, 8 bytes an instruction."""
    allow = _instruction(_RET, _ALLOW)
    calls = _CALLS_WITH_ARGUMENTS[machine]
    program = [
        _instruction(_LD_WORD_ABS, _OFFSET_ARCH),
        _instruction(_JEQ, _ARCH[machine], 1, 0),
        _instruction(_RET, _KILL_PROCESS),
        _instruction(_LD_WORD_ABS, _OFFSET_NUMBER),
        _instruction(_JGT, _LAST_KNOWN_CALL, 0, 1),  # x32's numbers, which have bit 30 set, too
        _refuse(errno.ENOSYS),
    ]
    # A structure in memory cannot be inspected: without clone3 the C library falls back to clone.
    program += _only_when_call_is(calls["clone3"], [_refuse(errno.ENOSYS)])
    namespaces = [_argument(0), _instruction(_JSET, _NAMESPACE_FLAGS, 0, 1), _refuse(errno.EPERM), allow]
    program += _only_when_call_is(calls["clone"], namespaces)
    families = [_instruction(_JEQ, family, len(_ALLOWED_FAMILIES) - i) for i, family in enumerate(_ALLOWED_FAMILIES)]
    program += _only_when_call_is(calls["socket"], [_argument(0), *families, _refuse(errno.EAFNOSUPPORT), allow])
    injections = [_instruction(_JEQ, _TIOCSTI, 1), _instruction(_JEQ, _TIOCLINUX, 0, 1), _refuse(errno.EPERM), allow]
    program += _only_when_call_is(calls["ioctl"], [_argument(1), *injections])
    for number in _CALLS_ON_A_PROCESS[machine].values():
        one = [_argument(0), _instruction(_JEQ, _SUPERVISOR, 0, 1), _refuse(errno.EPERM), allow]
        program += _only_when_call_is(number, one)
    for number, all_of_user in _CALLS_ON_MANY[machine].values():
        many = [_argument(0), _instruction(_JEQ, all_of_user, 2, 0), _argument(1)]
        many += [_instruction(_JEQ, _SUPERVISOR, 0, 1), _refuse(errno.EPERM), allow]
        program += _only_when_call_is(number, many)
    for number in sorted(denied_calls(machine).values()):
        program += _only_when_call_is(number, [_refuse(errno.EPERM)])
    program.append(allow)
    return b"".join(program)
