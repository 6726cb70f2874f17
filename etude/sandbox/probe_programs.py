"""The programs of `etude.sandbox.probes`: hostile programs that report what they managed to do.

Invariant: `LOOK` only inspects its own process. All others start with a guard that exits unless confined, so that they do
no harm in a broken jail, or if run on a host by mistake.
"""

from __future__ import annotations

ENVIRONMENT = frozenset({"PATH", "LANG", "USER", "HOME", "TMPDIR", "PWD", "PYTHONPATH", "PYTHONDONTWRITEBYTECODE"}) | {
    *("MPLBACKEND", "OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "LC_CTYPE", "PYTHONHASHSEED"),
}
"""Variables that a program may have."""

LOOK = r"""
import json, os, socket
status = dict(line.split(":", 1) for line in open("/proc/self/status"))
print(json.dumps({
    "user": os.getuid(),
    "system_owner": os.stat("/usr").st_uid,
    "capabilities": sum(int(status[name], 16) for name in ("CapInh", "CapPrm", "CapEff", "CapAmb")),
    "no_new_privileges": int(status["NoNewPrivs"]),
    "filter": int(status["Seccomp"]),
    "parent": os.getppid(),
    "host_name": socket.gethostname(),
    "environment": sorted(os.environ),
}))
"""

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
seen = {}

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
seen["readable"] = [path for path in paths if works(lambda: read(path))]
system = ["/x", "/usr/x", "/usr/lib/x", "/etc/x", "/opt/etude/guest/x", "/dev/x", "/proc/x"]
system.append(os.path.dirname(os.__file__) + "/x")
seen["written"] = [path for path in system if works(lambda: write(path))]
seen["private"] = [os.listdir(".") == ["main.py"], os.listdir("/tmp") == []]
seen["processes"] = sum(name.isdigit() for name in os.listdir("/proc"))
seen["signalled"] = works(lambda: os.kill(goals["pid"], 0))
routes = {
    "loopback": (socket.AF_INET, ("127.0.0.1", goals["port"])),
    "abstract socket": (socket.AF_UNIX, "\0" + goals["abstract"]),
    "public address": (socket.AF_INET, ("192.0.2.1", 80)),
}
seen["connected"] = [name for name, route in routes.items() if works(lambda: connect(*route))]
seen["interfaces"] = [line.split(":")[0].strip() for line in open("/proc/self/net/dev") if ":" in line]
families = {"netlink": 16, "packet": 17, "alg": 38, "vsock": 40}
seen["families"] = [
    name for name, number in families.items() if works(lambda: socket.socket(number, socket.SOCK_RAW).close())
]
seen["families"] += ["vsock stream"] if works(lambda: socket.socket(40, socket.SOCK_STREAM).close()) else []
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
seen["calls"] = [name for name, call in calls.items() if call() >= 0]

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
seen["forks"] = len(children)
for pid in children:
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)

opened = []
try:
    while len(opened) < 2000:
        opened.append(os.open("/dev/null", os.O_RDONLY))
except OSError:
    pass
seen["open_files"] = len(opened)
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

seen["file_bytes"] = fill("large", 3 << 20)
seen["disk_bytes"] = seen["file_bytes"] + sum(fill(f"/tmp/{n}", 1 << 20) for n in range(8))
print(json.dumps(seen))
"""

SLEEP = "import time\ntime.sleep(600)\n"

SPIN = "import os\nos.fork()\nwhile True:\n    pass\n"
"""Two processes, which together would get twice a per-process limit."""

MEMORY_OF_ONE = "block = bytearray(1 << 30)\n"

MEMORY_OF_MANY = r"""
import os, time
for _ in range(4):
    if os.fork() == 0:
        block = bytearray(b"x" * (50 << 20))
        time.sleep(60)
time.sleep(60)
"""

MEMORY_OF_SOCKETS = """
import os, socket, time
for _ in range(7):  # few descriptors each: the host itself may be allowed no more
    if os.fork() == 0:
        break
held = [socket.socket() for _ in range(50)]
time.sleep(60)
"""

OUTPUT = "import sys\nfor _ in range(100):\n    sys.stdout.write('x' * 10000)\n"

DAEMON = r"""
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

LEAVE_TRACES = r"""
import builtins, os, sys, tempfile
builtins.trace = sys.trace = 1
os.environ["TRACE"] = "1"
for folder in (".", "/tmp", "/dev/shm", os.path.dirname(os.__file__), *sys.path):
    try:
        open(os.path.join(folder, "trace"), "w").close()
    except OSError:
        pass
"""

FIND_TRACES = r"""
import builtins, os, sys
found = [name for name in ("builtins", "sys") if hasattr(sys.modules[name], "trace")]
found += ["TRACE"] if "TRACE" in os.environ else []
for folder in (".", "/tmp", "/dev/shm", os.path.dirname(os.__file__), *sys.path):
    if os.path.exists(os.path.join(folder, "trace")):
        found.append(folder)
print(found)
"""
