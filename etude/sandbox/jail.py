"""The contents of a jail, and the command lines that start a fork server in it, for each isolation mode.

Invariant: the plan lists everything of the host that a program can see, all of it read-only: the system's programs and
libraries (`/usr` and its companions), the interpreter, its third-party libraries, harmless devices, and an `/etc`
written here with a few files of the host's. Home folders, `/root`, `/var`, `/run`, `/sys` and the host's `/tmp` and `/proc`
are not in it. No shell is involved in starting a fork server; its arguments, which contain no secrets, are all on its
command line.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
import sysconfig
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path

from etude.sandbox.guest.settings import FILES, GUEST, SHM, TMP, WORK, Settings
from etude.sandbox.types import Isolation, SandboxError
from etude.scratch import Scratch

UNPRIVILEGED_ID = 65533
"""User and group id, unused on most systems, that a host running as root switches to before it runs anything."""

_BOOT = (
    "import importlib.util as u, sys; folder, name = sys.argv[1:3]; "
    "spec = u.spec_from_file_location('guest', folder + '/__init__.py', submodule_search_locations=[folder]); "
    "sys.modules['guest'] = module = u.module_from_spec(spec); spec.loader.exec_module(module); "
    "import importlib; importlib.import_module('guest.' + name).main(sys.argv[3:])"
)
GUEST_SOURCE = Path(__file__).parent / "guest"
_SYSTEM = ("/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64", "/libx32", "/nix/store")
_DEVICES = ("/dev/null", "/dev/full", "/dev/random", "/dev/urandom")
_DEVICE_LINKS = (
    # It reads alike and cannot be mapped; a shared mapping of the real one has pages that no process holds.
    ("full", "/dev/zero"),
    ("/proc/self/fd", "/dev/fd"),
    *((f"/proc/self/fd/{n}", f"/dev/std{s}") for n, s in enumerate(("in", "out", "err"))),
)
_WORK_LINKS = tuple((f"{WORK}/{name}", f"/{name}") for name in ("app", "workspace", "tests", "solution", "logs"))
"""Where tasks in Harbor's format look for their files: folders of the work directory, if there are."""
_ETC = {
    "passwd": "root:x:0:0:root:/:/usr/sbin/nologin\nsandbox:x:1000:1000:sandbox:/tmp:/bin/bash\n",
    "group": "root:x:0:\nsandbox:x:1000:\n",
    "hosts": "127.0.0.1 localhost sandbox\n::1 localhost\n",
    "nsswitch.conf": "passwd: files\ngroup: files\nhosts: files\n",
    "resolv.conf": "",
}
_ETC_OF_HOST = ("ld.so.cache", "ld.so.conf", "ld.so.conf.d", "alternatives", "mime.types", "fonts")


@dataclass(frozen=True)
class Plan:
    """What to mount where in a jail."""

    root: str
    """An empty folder of the host in which the jail is built."""
    folders: tuple[str, ...]
    """Folders to create empty."""
    links: tuple[tuple[str, str], ...]
    """Symbolic links to create: (target, link)."""
    binds: tuple[tuple[str, str], ...]
    """Read-only bind mounts: (path on the host, path in the jail)."""
    devices: tuple[str, ...]
    staged: tuple[tuple[str, str], ...]
    """(path on the host, place to bind it to first), for paths that an unprivileged user may not be able to reach."""


def interpreter() -> str:
    """Returns the path of the base interpreter of this virtual environment."""
    base = getattr(sys, "_base_executable", "") or sys.executable
    found = Path(base).resolve()
    named = Path(sys.base_prefix, "bin", f"python{sys.version_info.major}.{sys.version_info.minor}")
    return str(named.resolve() if named.exists() else found)


def library_folders() -> tuple[str, ...]:
    """Returns the folders of this environment's third-party packages."""
    paths = (sysconfig.get_path("purelib"), sysconfig.get_path("platlib"))
    return tuple(dict.fromkeys(str(Path(path).resolve()) for path in paths if os.path.isdir(path)))


def libraries_in_jail(libraries: tuple[str, ...]) -> tuple[str, ...]:
    """Returns the paths of these folders in the jail."""
    return tuple(f"{GUEST}/libraries-{i}" for i in range(len(libraries)))


def plan_of(scratch: Path, libraries: tuple[str, ...], folders: tuple[str, ...] = ()) -> Plan:
    """Plans a jail on this machine; `scratch`: a private folder for the jail's files on disk; `folders` keep their paths.

    Raises:
        SandboxError: the interpreter or a folder lies where a run has folders of its own.
    """
    scratch.chmod(0o711)
    root, etc = scratch / "root", scratch / "etc"
    root.mkdir()
    _write_etc(etc)
    links: list[tuple[str, str]] = [*_DEVICE_LINKS, *_WORK_LINKS]
    binds: list[tuple[str, str]] = []
    for path in _SYSTEM:
        if os.path.islink(path):
            links.append((os.readlink(path), path))
        elif os.path.isdir(path):
            binds.append((path, path))
    for path in (str(Path(sys.base_prefix).resolve()), str(Path(interpreter()).parent.parent), *folders):
        if hidden(path):
            what = path if path in folders else f"the interpreter lies in {path}, which"
            raise SandboxError(f"{what} would be hidden by a run's own /{path.split('/')[1]}")
        if not any(path == inside or path.startswith(f"{inside}/") for _, inside in binds):
            binds.append((path, path))
    binds += [(path, libraries_in_jail(libraries)[i]) for i, path in enumerate(libraries)]
    binds.append((str(etc), "/etc"))
    binds += [(f"/etc/{name}", f"/etc/{name}") for name in _ETC_OF_HOST if os.path.exists(f"/etc/{name}")]
    binds.append((str(GUEST_SOURCE), f"{GUEST}/guest"))
    devices = tuple(device for device in _DEVICES if os.path.exists(device))
    staged: list[tuple[str, str]] = []
    if os.geteuid() == 0:
        binds = [(_staged(scratch, source, staged), target) for source, target in binds]
    return Plan(str(root), ("/dev", "/proc", FILES, WORK, TMP, SHM), tuple(links), tuple(binds), devices, tuple(staged))


def hidden(path: str) -> bool:
    """Whether a run's own folders hide this path of the host."""
    return any(path == own or path.startswith(f"{own}/") for own in (WORK, TMP, SHM, FILES))


def _staged(scratch: Path, source: str, staged: list[tuple[str, str]]) -> str:
    """Returns the path to bind `source` from, which is added to `staged` if it differs from `source`."""
    if source in _SYSTEM or source.startswith("/etc/"):
        return source
    place = scratch / f"staged-{len(staged)}"
    if os.path.isdir(source):
        place.mkdir(mode=0o755)
    else:
        place.touch()
    staged.append((source, str(place)))
    return str(place)


def _write_etc(etc: Path) -> None:
    etc.mkdir()
    etc.chmod(0o755)  # regardless of the umask: another user must read it
    for name, text in _ETC.items():
        (etc / name).write_text(text, encoding="ascii")
        (etc / name).chmod(0o644)
    for name in _ETC_OF_HOST:  # mount points
        source = Path("/etc", name)
        if source.is_dir():
            (etc / name).mkdir(mode=0o755)
        elif source.exists():
            (etc / name).touch(mode=0o644)


def command_line(
    isolation: Isolation,
    scratch: Path,
    libraries: tuple[str, ...],
    control: int,
    settings: Settings,
    folders: tuple[str, ...] = (),
) -> list[str]:
    """Returns the command that starts a fork server, which inherits its socket to the host as descriptor `control`.

    Raises:
        SandboxError: a jail cannot be built on this machine, or bubblewrap is not installed.
    """
    if isolation is Isolation.NONE:
        return _interpret(str(GUEST_SOURCE), "fork_server", str(control), settings.encode())
    plan = plan_of(scratch, libraries, folders)
    command = _interpret(f"{GUEST}/guest", "fork_server", str(control), settings.encode())
    if isolation is Isolation.BUBBLEWRAP:
        command = _bubblewrap(plan) + command
        if os.geteuid() != 0:
            return command
    host_id = UNPRIVILEGED_ID if os.geteuid() == 0 else -1
    return _interpret(str(GUEST_SOURCE), "launch", json.dumps(asdict(plan)), str(host_id), isolation.value, *command)


def _interpret(folder: str, module: str, *arguments: str) -> list[str]:
    """Returns the command that calls `module.main(arguments)` of the guest package in `folder`, in a bare interpreter."""
    return [interpreter(), "-s", "-S", "-B", "-c", _BOOT, folder, module, *arguments]


def _bubblewrap(plan: Plan) -> list[str]:
    program = shutil.which("bwrap")
    if program is None:
        raise SandboxError("'bwrap' is not installed")
    command = [program, "--unshare-pid", "--unshare-net", "--unshare-ipc", "--unshare-uts", "--unshare-cgroup-try"]
    command += ["--as-pid-1", "--new-session", "--cap-drop", "ALL"]
    for folder in plan.folders:
        command += ["--dir", folder]
    for target, link in plan.links:
        command += ["--symlink", target, link]
    for source, target in plan.binds:
        command += ["--ro-bind", source, target]
    for device in plan.devices:
        command += ["--dev-bind", device, device]
    return [*command, "--proc", "/proc", "--remount-ro", "/", "--chdir", "/", "--"]


def jail_scratch() -> Scratch:
    """Creates a folder for one executor or fork server, which the unprivileged user who builds the jail can traverse.

    Raises:
        SandboxError: the host runs as root, and no folder for temporary files is open to other users.
    """
    for base in (tempfile.gettempdir(), "/tmp", "/var/tmp", "/run", "/dev/shm"):
        if os.geteuid() != 0 or _passable(Path(base).resolve()):
            return Scratch.make("etude-jail-", base)
    raise SandboxError("no folder for temporary files is open to other users; set TMPDIR to one that is")


def _passable(folder: Path) -> bool:
    return folder.is_dir() and all(path.stat().st_mode & 0o001 for path in (folder, *folder.parents))
