"""`run_in_sandbox`: a command agent inside the walls of `etude.sandbox`.

Invariant: the program sees its own copy of the workspace, the system's programs, this environment's packages and the folders
that were named; it connects to nothing but the gateway, and it and all that it started have ended when the call returns.
What it leaves in its copy comes back as plain files, folders, and links that stay in it.
"""

from __future__ import annotations

import asyncio
import errno
import functools
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from urllib.parse import urlsplit

from etude.errors import ConfigError
from etude.options import AgentSandboxOptions
from etude.sandbox import CommandRequest, Limits, SandboxClient, SandboxUnavailableError
from etude.sandbox.guest.files import FOLDER_BYTES, pack, unpack
from etude.sandbox.jail import hidden

KEY = "actor_rollout_ref.rollout.agent.openai_agent.sandbox"
_CONCURRENT = 1 << 12  # far more than needed: an agent that waited for a place would stall a deterministic engine
_PROCESSES = 256


def check_sandbox(options: AgentSandboxOptions) -> None:
    """Tries the walls, and looks at the folders.

    Raises:
        ConfigError: this machine has no walls, or a folder is not there or would be hidden.
    """
    for folder in options.folders:
        if not Path(folder).is_dir() or hidden(str(Path(folder).resolve())):
            raise ConfigError(
                f"{KEY}.folders: {folder} is no folder, or below one of which each rollout has its own (/tmp, /dev/shm, "
                "/sandbox)",
                key=f"{KEY}.folders",
                fix="name folders that are there, such as /opt/agents",
            )
    try:
        asyncio.run(_client(*options.folders).run(CommandRequest(command=("true",))))
    except SandboxUnavailableError as error:
        raise ConfigError(
            f"{KEY}.enable=true: {error}",
            key=f"{KEY}.enable",
            fix="run `etude doctor`, which says what each mode lacks; or set it to false, and run the agent as another user "
            "or in a container",
        ) from error


async def run_in_sandbox(
    options: AgentSandboxOptions,
    command: Sequence[str],
    text: bytes,
    variables: Mapping[str, str],
    folder: Path | None,
) -> tuple[int | str, str, bool]:
    """Runs a command with `text` on stdin in a copy of `folder`, which what is left of the copy then replaces; returns its
    status, or the limit that ended it, the end of its output, and whether what it left is there: else `folder` is as it was.

    Raises:
        SandboxError: the sandbox failed.
        SandboxRequestError: there is no such program in the sandbox.
        ConfigError: the folder is too large.
    """
    packed = None if folder is None else await asyncio.to_thread(pack, str(folder), FOLDER_BYTES)
    if folder is not None and packed is None:
        raise ConfigError(
            f"the workspace {folder.name} has more than {FOLDER_BYTES >> 20} MiB, too much for a sandbox",
            key="actor_rollout_ref.rollout.agent.openai_agent.workspace",
            fix=f"put what agents only read into {KEY}.folders",
        )
    request = CommandRequest(
        command=command,
        environment=variables,
        folder=packed,
        port=urlsplit(variables["OPENAI_BASE_URL"]).port,
        stdin=text.decode(),
        limits=Limits(
            wall_seconds=options.wall_seconds,
            cpu_seconds=options.wall_seconds * 64,  # of all its processes: the wall time is the limit
            memory_mb=options.memory_mb,
            disk_mb=options.disk_mb,
            file_size_mb=options.disk_mb,
            processes=_PROCESSES,
            open_files=1024,
            output_bytes=64 << 10,
        ),
    )
    result = await _client(*options.folders).run(request)
    status: int | str = f"{result.status.value} ({KEY})" if result.return_code is None else result.return_code
    kept = True
    if folder is not None and result.folder is None:
        kept = False
        status = f"{status}; its working folder is lost, or above {FOLDER_BYTES >> 20} MiB"
    elif folder is not None and result.folder is not None:
        try:
            await asyncio.to_thread(_replace, folder, result.folder)
        except OSError as error:
            if error.errno == errno.ENOSPC:
                raise
            kept = False
            status = f"{status}; its working folder cannot be copied: {error}"  # names that are too long, for instance
    return status, " ".join(f"{result.stdout} {result.stderr}".split())[-500:], kept


def _replace(folder: Path, packed: bytes) -> None:
    shutil.rmtree(folder)
    folder.mkdir()
    unpack(str(folder), packed)


@functools.cache
def _client(*folders: str) -> SandboxClient:
    """The process's client for these folders, closed when it exits. A run is never tried twice: the gateway heard it."""
    return SandboxClient(
        attempts=1, workers=_CONCURRENT, folders=tuple(str(Path(folder).resolve()) for folder in folders)
    )
