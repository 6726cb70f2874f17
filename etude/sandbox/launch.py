"""The command lines that start a fork server, one per isolation mode.

Invariant: no shell is involved, and the new process gets an empty environment; everything it needs is on its command
line, where nothing is secret.
"""

from __future__ import annotations

import json
import os
import shutil

from etude.sandbox.guest.settings import GUEST, Settings
from etude.sandbox.jail import GUEST_SOURCE, Plan, interpreter
from etude.sandbox.types import SandboxError

BUBBLEWRAP_HINT = "install bubblewrap (Debian, Ubuntu: apt install bubblewrap)"

UNPRIVILEGED_ID = 65533
"""User and group that a root host switches to before it runs anything: unused on most systems."""

_BOOT = (
    "import importlib.util as u, sys; folder, name = sys.argv[1:3]; "
    "spec = u.spec_from_file_location('guest', folder + '/__init__.py', submodule_search_locations=[folder]); "
    "sys.modules['guest'] = module = u.module_from_spec(spec); spec.loader.exec_module(module); "
    "import importlib; importlib.import_module('guest.' + name).main(sys.argv[3:])"
)


def _interpreted(folder: str, module: str, *arguments: str) -> list[str]:
    """`module.main(arguments)` of the guest's modules in `folder`, by the bare interpreter."""
    return [interpreter(), "-s", "-S", "-B", "-c", _BOOT, folder, module, *arguments]


def bubblewrap(plan: Plan, control: int, settings: Settings) -> list[str]:
    """bwrap building the plan around the fork server."""
    return _as_nobody(plan, "execute", _bubblewrap(plan, control, settings))


def _bubblewrap(plan: Plan, control: int, settings: Settings) -> list[str]:
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
    command += ["--proc", "/proc", "--remount-ro", "/", "--chdir", "/", "--"]
    return command + _fork_server(control, settings)


def namespaces(plan: Plan, control: int, settings: Settings) -> list[str]:
    """Our own launcher building the plan around the fork server."""
    arguments = [json.dumps(plan.as_dict()), *_fork_server(control, settings)]
    if os.geteuid() == 0:
        return _as_nobody(plan, "namespaces", arguments)
    return _interpreted(str(GUEST_SOURCE), "launch", *arguments)


def _as_nobody(plan: Plan, kind: str, arguments: list[str]) -> list[str]:
    """`arguments` wrapped in a root host's first step; unchanged for any other user."""
    if os.geteuid() != 0:
        return arguments
    staging = json.dumps({"host_id": UNPRIVILEGED_ID, "binds": plan.staged})
    return _interpreted(str(GUEST_SOURCE), "stage", staging, kind, *arguments)


def bare(control: int, settings: Settings) -> list[str]:
    """The fork server on the host itself."""
    return _interpreted(str(GUEST_SOURCE), "fork_server", str(control), settings.encode())


def _fork_server(control: int, settings: Settings) -> list[str]:
    return _interpreted(f"{GUEST}/guest", "fork_server", str(control), settings.encode())
