"""Verifies that containers confine programs: `look` when an executor opens, `check_isolation` for `etude sandbox check`.

Invariant: `look` returns only if a container was seen to be confined and its memory limit ended a program; anything else
(also a program that does not run) is an error, and the mode is refused. It is cheap, and harmless where nothing is confined:
its first program only inspects its own process. `check_isolation` attempts to break every guarantee of the table in
`docs/sandbox.md` in real containers, and names the first broken one; the host's side (a listener, a secret file, the process
table) is checked as well. Attacking programs start with a guard that exits unless confined, so that they do no harm in a
broken jail, or if run on a host by mistake. A probe shows that a barrier exists, not that it has no holes: the attack suite
in the tests looks for these.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import secrets
import socket
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

from etude.sandbox.guest.settings import PROGRAM_ID
from etude.sandbox.jail import interpreter, jail_scratch
from etude.sandbox.types import Limits, RunRequest, RunResult, RunStatus, SandboxError

Run = Callable[[RunRequest], Awaitable[RunResult]]

SMALL = Limits(wall_seconds=20, cpu_seconds=20, memory_mb=256, processes=16, file_size_mb=1, disk_mb=4, open_files=32)

_ENVIRONMENT = frozenset({"PATH", "LANG", "USER", "HOME", "TMPDIR", "PWD", "PYTHONPATH", "PYTHONDONTWRITEBYTECODE"}) | {
    *("MPLBACKEND", "OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "LC_CTYPE", "PYTHONHASHSEED"),
}
"""Environment variables that a program may have."""

LOOK = r"""
import json, os, resource, socket, sys
status = dict(line.split(":", 1) for line in open("/proc/self/status"))
links = [line.split(":")[0].strip() for line in open("/proc/self/net/dev") if ":" in line]
limits, disk = json.loads(sys.argv[1]), os.statvfs(".")
hard = {name: resource.getrlimit(getattr(resource, f"RLIMIT_{name}"))[1] for name in ("NPROC", "NOFILE", "FSIZE")}
print(json.dumps({
    "a user of its own": [os.getuid(), os.stat("/usr").st_uid == os.getuid()],
    "no privileges": sum(int(status[name], 16) for name in ("CapInh", "CapPrm", "CapEff", "CapAmb")),
    "none to gain": int(status["NoNewPrivs"]),
    "a filter of system calls": int(status["Seccomp"]),
    "a PID namespace of its own": [os.getppid(), sum(name.isdigit() for name in os.listdir("/proc"))],
    "a host name of its own": socket.gethostname(),
    "no files of the host": [path for path in ("/etc/shadow", "/var/log", "/run", "/sys/kernel") if os.path.exists(path)],
    "a scrubbed environment": [name for name in sys.argv[2:] if name in os.environ],
    "no network interface but loopback": links,
    "a read-only system": [path for path in ("/", "/usr", "/etc", "/opt/etude/guest")
                           if not os.statvfs(path).f_flag & os.ST_RDONLY],
    "a limit of processes": 0 <= hard["NPROC"] <= limits["processes"],
    "a limit of open files": 0 <= hard["NOFILE"] <= limits["open_files"],
    "a limit of a file's size": 0 <= hard["FSIZE"] <= limits["file_size_mb"] << 20,
    "a limit of disk": 0 < disk.f_blocks * disk.f_frsize <= limits["disk_mb"] << 20,
}))
"""
"""Inspects its own process, and attempts nothing."""
CONFINED = {
    "a user of its own": [PROGRAM_ID, False],
    "no privileges": 0,
    "none to gain": 1,
    "a filter of system calls": 2,
    "a PID namespace of its own": [1, 2],
    "a host name of its own": "sandbox",
    "no files of the host": [],
    "a scrubbed environment": [],
    "no network interface but loopback": ["lo"],
    "a read-only system": [],
    "a limit of processes": True,
    "a limit of open files": True,
    "a limit of a file's size": True,
    "a limit of disk": True,
}
"""What `LOOK` reports from a container with the limits `SMALL`."""

GUARD = r"""
import os as _os, socket as _socket
_status = dict(line.split(":", 1) for line in open("/proc/self/status"))
if _os.getuid() != 1000 or _os.getppid() != 1 or int(_status["Seccomp"]) != 2 or _socket.gethostname() != "sandbox":
    raise SystemExit("not inside a sandbox: refusing to run")
"""
"""Prefix of every attacking program."""

ATTEMPTS = r"""
import ctypes, json, os, signal, socket, sys, time

goals = json.loads(sys.argv[1])
limits, seen = goals["limits"], {}

def works(attempt):
    try:
        attempt()
        return True
    except OSError:
        return False

def read(path):
    os.listdir(path) if os.path.isdir(path) else open(path).read()

def write(path):
    open(path, "w").close()

def connect(family, address):
    with socket.socket(family) as link:
        link.settimeout(2)
        link.connect(address)

paths = [*goals["paths"], f"/proc/{goals['pid']}/environ", f"/proc/{goals['pid']}/root"]
seen["no files of the host"] = [path for path in paths if works(lambda: read(path))]
system = ["/x", "/usr/x", "/usr/lib/x", "/etc/x", "/opt/etude/guest/x", "/dev/x", "/proc/x"]
system.append(os.path.dirname(os.__file__) + "/x")
seen["a read-only system"] = [path for path in system if works(lambda: write(path))]
seen["a private work directory and /tmp"] = [os.listdir("."), os.listdir("/tmp")]
count = sum(name.isdigit() for name in os.listdir("/proc"))
seen["a PID namespace of its own"] = count <= 3 and not works(lambda: os.kill(goals["pid"], 0))
routes = {
    "loopback": (socket.AF_INET, ("127.0.0.1", goals["port"])),
    "abstract socket": (socket.AF_UNIX, "\0" + goals["abstract"]),
    "public address": (socket.AF_INET, ("192.0.2.1", 80)),
}
seen["no network"] = [name for name, route in routes.items() if works(lambda: connect(*route))]
lines = [line.split(":") for line in open("/proc/self/net/dev")]
seen["no network interface but loopback"] = [line[0].strip() for line in lines if len(line) > 1]
families = {"netlink": 16, "packet": 17, "alg": 38, "vsock": 40}
kinds = [(name, number, socket.SOCK_RAW) for name, number in families.items()] + [("vsock", 40, socket.SOCK_STREAM)]
seen["no other kind of socket"] = [name for name, *kind in kinds if works(lambda: socket.socket(*kind).close())]
libc = ctypes.CDLL(None, use_errno=True)
calls = {
    "unshare": lambda: libc.unshare(0x10000000),
    "mount": lambda: libc.mount(b"none", b"/tmp", b"tmpfs", 0, None),
    "ptrace": lambda: libc.ptrace(0, 0, 0, 0),
    "setuid": lambda: libc.setuid(0),
    "chroot": lambda: libc.chroot(b"/tmp"),
    "personality": lambda: libc.personality(0xFFFFFFFF),
    "memfd_create": lambda: libc.memfd_create(b"x", 0),
    "inotify_init": lambda: libc.inotify_init1(0),
    "vmsplice": lambda: libc.vmsplice(1, None, 0, 0),
}
seen["a filter of system calls"] = [name for name, call in calls.items() if call() >= 0]

children = []
try:
    while len(children) < 200:
        pid = os.fork()
        if pid == 0:
            time.sleep(60)
            os._exit(0)
        children.append(pid)
except OSError:
    pass
seen["a limit of processes"] = len(children) < limits["processes"]
for pid in children:
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)

opened = []
try:
    while len(opened) < 2000:
        opened.append(os.open("/dev/null", os.O_RDONLY))
except OSError:
    pass
seen["a limit of open files"] = len(opened) <= limits["open_files"]
os.closerange(3, 2100)

def fill(name, size):
    done = 0
    try:
        with open(name, "wb", buffering=0) as file:
            while done < size:
                done += file.write(bytes(1 << 16))
    except OSError:
        pass
    return os.stat(name).st_size

size = fill("large", 3 << 20)
seen["a limit of a file's size"] = size <= limits["file_size_mb"] << 20
seen["a limit of disk"] = size + sum(fill(f"/tmp/{n}", 1 << 20) for n in range(8)) <= limits["disk_mb"] << 20
print(json.dumps(seen))
"""
CONTAINED: dict[str, Any] = {
    "no files of the host": [],
    "a read-only system": [],
    "a private work directory and /tmp": [["main.py"], []],
    "a PID namespace of its own": True,
    "no network": [],
    "no network interface but loopback": ["lo"],
    "no other kind of socket": [],
    "a filter of system calls": [],
    "a limit of processes": True,
    "a limit of open files": True,
    "a limit of a file's size": True,
    "a limit of disk": True,
}
"""What `ATTEMPTS` reports from a container."""

_SLEEP = "import time\ntime.sleep(600)\n"

_SPIN = "import os\nos.fork()\nwhile True:\n    pass\n"
"""Two processes, which together would get twice a per-process limit."""

_MEMORY_OF_ONE = "block = bytearray(1 << 30)\n"

_MEMORY_OF_MANY = r"""
import os, time
for _ in range(4):
    if os.fork() == 0:
        block = bytearray(b"x" * (50 << 20))
        time.sleep(60)
time.sleep(60)
"""

_MEMORY_OF_SOCKETS = """
import os, socket, time
for _ in range(7):  # few descriptors each: the host itself may be allowed no more
    if os.fork() == 0:
        break
held = [socket.socket() for _ in range(50)]
time.sleep(60)
"""

_OUTPUT = "import sys\nfor _ in range(100):\n    sys.stdout.write('x' * 10000)\n"

_DAEMON = r"""
import os, sys
reader, writer = os.pipe()
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        os.execv(sys.executable, [sys.executable, "-c", "import time; time.sleep(600)", sys.argv[1]])
    os._exit(0)
os.close(writer)
os.read(reader, 1)  # ends when the daemon runs
print("left")
"""

_LEAVE_TRACES = r"""
import builtins, os, sys, tempfile
builtins.trace = sys.trace = 1
os.environ["TRACE"] = "1"
for folder in (".", "/tmp", "/dev/shm", os.path.dirname(os.__file__), *sys.path):
    try:
        open(os.path.join(folder, "trace"), "w").close()
    except OSError:
        pass
"""

_FIND_TRACES = r"""
import builtins, os, sys
found = [name for name in ("builtins", "sys") if hasattr(sys.modules[name], "trace")]
found += ["TRACE"] if "TRACE" in os.environ else []
for folder in (".", "/tmp", "/dev/shm", os.path.dirname(os.__file__), *sys.path):
    if os.path.exists(os.path.join(folder, "trace")):
        found.append(folder)
print(found)
"""

LIMITS: dict[str, tuple[str, Limits, Callable[[RunResult], bool]]] = {
    "a limit of wall time": (_SLEEP, Limits(wall_seconds=0.2), lambda result: result.status is RunStatus.TIME_LIMIT),
    "a limit of CPU time": (
        _SPIN,
        Limits(cpu_seconds=0.2),
        lambda result: result.status is RunStatus.TIME_LIMIT and result.wall_seconds < 25,
    ),
    "a limit of one process's memory": (
        _MEMORY_OF_ONE,
        Limits(memory_mb=128),
        lambda result: "MemoryError" in result.stderr,
    ),
    "a limit of all processes' memory": (
        _MEMORY_OF_MANY,
        Limits(memory_mb=128),
        lambda result: result.status is RunStatus.MEMORY_LIMIT,
    ),
    "a limit of sockets' memory": (
        _MEMORY_OF_SOCKETS,
        Limits(memory_mb=128),
        lambda result: result.status is RunStatus.MEMORY_LIMIT,
    ),
    "bounded output": (
        _OUTPUT,
        Limits(output_bytes=1000),
        lambda result: result.status is RunStatus.FINISHED and result.stdout_truncated and len(result.stdout) < 2000,
    ),
}
"""Guarantee → (program, limits, predicate that the result must satisfy)."""


class GuaranteeBroken(SandboxError):
    """A forbidden attempt succeeded; the message names the broken guarantee."""


def _demand(holds: bool, guarantee: str, seen: object) -> None:
    if not holds:
        raise GuaranteeBroken(f"{guarantee}: not kept here ({str(seen)[:200]})")


async def look(run: Run) -> None:
    """Looks at a container from inside, and lets it exceed a limit.

    Raises:
        GuaranteeBroken: it is not confined, or the limit did not hold.
        SandboxError: no container was available, or the program did not run.
    """
    names = (name for name in os.environ if name not in _ENVIRONMENT)
    await report(run, LOOK, CONFINED, json.dumps(vars(SMALL)), *names)
    await check_limit(run, "a limit of all processes' memory")


async def check_isolation(run: Run) -> None:
    """Makes every attempt in containers of `run`, after checking that they are confined at all.

    Raises:
        GuaranteeBroken: an attempt succeeded.
        SandboxError: no container was available.
    """
    await look(run)
    with _host() as (goals, listeners):
        await asyncio.gather(
            report(run, GUARD + ATTEMPTS, CONTAINED, json.dumps({**goals, "limits": vars(SMALL)})),
            *(check_limit(run, guarantee) for guarantee in LIMITS),
            check_process_tree(run),
            check_next_run(run),
        )
        for listener in listeners:
            with contextlib.suppress(BlockingIOError):
                listener.accept()[0].close()
                raise GuaranteeBroken("no network: not kept here (a listener of the host was reached)")


async def report(run: Run, program: str, expected: dict[str, Any], *arguments: str) -> None:
    """Runs a program and compares its report with the `expected` one."""
    result = await run(RunRequest(program, args=arguments, limits=SMALL))
    try:
        seen = json.loads(result.stdout)
    except ValueError:
        raise SandboxError(f"a probe did not run: {result.status.value}, {result.stderr[-500:]!r}") from None
    for guarantee, value in expected.items():
        _demand(seen.get(guarantee) == value, guarantee, seen.get(guarantee))


async def check_limit(run: Run, guarantee: str) -> None:
    """Checks the limit `guarantee` with its program from `LIMITS`."""
    program, limits, holds = LIMITS[guarantee]
    result = await run(RunRequest(GUARD + program, limits=limits))
    _demand(holds(result), guarantee, (result.status.value, result.stderr[-100:]))


async def check_process_tree(run: Run) -> None:
    """Checks that a daemon left by a run was killed with it."""
    marker = secrets.token_hex(8)
    result = await run(RunRequest(GUARD + _DAEMON, args=[marker]))
    alive = processes_with(marker)
    _demand(result.stdout == "left\n" and not alive, "the death of the whole process tree", alive or result.stderr)


def processes_with(marker: str) -> list[int]:
    """Returns the PIDs of the host's processes with `marker` on their command line."""
    found = []
    for name in filter(str.isdigit, os.listdir("/proc")):
        with contextlib.suppress(OSError):  # it has ended
            if marker.encode() in Path("/proc", name, "cmdline").read_bytes():
                found.append(int(name))
    return found


async def check_next_run(run: Run) -> None:
    """Checks that a run finds no traces of the previous one."""
    await run(RunRequest(GUARD + _LEAVE_TRACES))
    result = await run(RunRequest(_FIND_TRACES))
    _demand(result.stdout == "[]\n", "a fresh state for every run", result.stdout or result.stderr)


@contextlib.contextmanager
def _host() -> Iterator[tuple[dict[str, Any], tuple[socket.socket, ...]]]:
    """Creates targets on the host: a world-readable file, a TCP listener, an abstract socket."""
    name = f"etude-{secrets.token_hex(8)}"
    with contextlib.ExitStack() as stack:
        scratch = jail_scratch()  # reachable by other users; if this process is killed, a later one removes it
        stack.callback(scratch.remove)
        scratch.folder.chmod(0o755)
        file = scratch.folder / "secret"
        file.write_text("secret", encoding="ascii")
        file.chmod(0o644)
        tcp = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
        abstract = stack.enter_context(socket.socket(socket.AF_UNIX))
        abstract.bind(f"\0{name}")
        abstract.listen()
        for listener in (tcp, abstract):
            listener.setblocking(False)
        paths = [str(file), "/root/.ssh", "/home", "/etc/shadow", "/var/log", "/run", "/sys/kernel"]
        paths = [path for path in paths if not interpreter().startswith(f"{path}/")]  # which may lie in /home
        yield {"paths": paths, "pid": os.getpid(), "port": tcp.getsockname()[1], "abstract": name}, (tcp, abstract)
