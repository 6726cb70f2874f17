"""`harbor:FOLDER`: tasks in Harbor's format (one, or a folder of them), in Étude's sandbox: no Docker, no image, no network.

Arguments: `val` (a folder of tasks to validate on), `skip` (true: leave out tasks that need an image, instead of refusing
them), `command_timeout` (60 seconds) and `sandbox_url` (default: a sandbox of its own). The model has the tool `bash`; a
turn without a call ends the episode. The task's tests are copied in then, after all of the model's processes are killed.
"""

from __future__ import annotations

import ast
import base64
import contextlib
import hashlib
import importlib.metadata
import io
import json
import logging
import math
import os
import re
import shlex
import sys
import tarfile
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

from etude.environments.base import Environment, Step, tool
from etude.errors import ConfigError, InfrastructureError, ToolError, one_line
from etude.sandbox import CellResult, Limits, RunStatus, SandboxClient

_BASES = ("ubuntu", "debian", "python")  # images without anything that a task could miss here
_INSTALLED = frozenset({"curl", "pip", "pytest", "pytest-json-ctrf", "uv"})  # by test scripts; the shims stand for them
_SHIMS = {
    **dict.fromkeys(("apt-get", "apt", "curl", "pip", "pip3", "uv"), "exit 0"),
    "pytest": 'args=(); while (($#)); do [[ $1 == --ctrf ]] && shift || args+=("$1"); shift; done; '
    'PYTEST_DISABLE_PLUGIN_AUTOLOAD=1 exec python3 -c \'import sys; sys.path.remove(""); import pytest; '
    'sys.exit(pytest.main())\' -p no:cacheprovider "${args[@]}"',
    "uvx": 'while (($#)) && [[ $1 != pytest ]]; do shift; done; exec "$@"',
}
_ASIDE = """import os, uuid
for path in ('/sandbox/tests', '/sandbox/logs', os.path.expanduser('~/.local')):
    if os.path.lexists(path):
        os.rename(path, f'{path}-{uuid.uuid4().hex}')"""
"""Moves away what the model put where the tests and their programs go: a folder, a link, whatever its mode."""
_PREPARE = """import ctypes, os, sys
ctypes.CDLL(None).prctl(4, 0, 0, 0, 0)
sys.path.remove(os.getcwd())
os.makedirs('/sandbox{}', exist_ok=True)"""
"""Once for a session: what our cells import later must not be a file of the model's in the working folder, and no program of
the model's may write into the memory of the process that runs them (PR_SET_DUMPABLE), which then reads the reward."""
_KILL = "import os, contextlib, signal\nwith contextlib.suppress(OSError): os.kill(-1, signal.SIGKILL)"
_REWARDS = (
    f"{_KILL}\n"  # a program that the tests started may write for as long as it lives
    "{n: open(p).read() for n in ('txt', 'json') if os.path.isfile(p := f'/logs/verifier/reward.{n}')}"
)

logger = logging.getLogger(__name__)


class _Spoiled(InfrastructureError):
    """A cell of ours failed within the sandbox. After a command of the model's, that is its own doing: it filled the disk,
    took away a folder, interrupted the interpreter."""


class _NoReward(InfrastructureError):
    """The tests gave no reward; where they give one in an untouched sandbox, this is the model's own doing, too."""


@dataclass(frozen=True)
class Task:
    """A folder of a task, as far as it is needed here. `files`: path below the work directory → content."""

    folder: Path
    instruction: str
    workdir: str
    files: Mapping[str, bytes]
    agent_seconds: float
    test_seconds: float
    memory_mb: int
    disk_mb: int
    environment: Mapping[str, str] = field(default_factory=dict)


class Session(Environment):
    """One task in a sandbox of its own. Tests that give no reward, in an untouched one neither, are infrastructure."""

    times_itself = True
    limit = 64  # one process's sandbox has room for 128

    def __init__(self, tasks: Mapping[str, Mapping[str, Task]], sandbox: SandboxClient, timeout: float) -> None:
        self._tasks, self._sandbox, self._timeout = tasks, sandbox, timeout
        self._id: str | None = None
        self._acted, self._lost = False, False  # lost: the model's own code ended or spoiled the sandbox

    def tasks(self, split: str) -> Iterable[Mapping[str, Any]]:
        return [{"task": name} for name in self._tasks[split]]

    async def reset(self, task: Mapping[str, Any], seed: int) -> Step:
        """Opens a sandbox with the task's files."""
        self._task = found = next(tasks[task["task"]] for tasks in self._tasks.values() if task["task"] in tasks)
        self._left = found.agent_seconds
        cpu = found.agent_seconds + found.test_seconds
        limits = Limits(wall_seconds=cpu, cpu_seconds=cpu, memory_mb=found.memory_mb, disk_mb=found.disk_mb)
        self._id = await self._sandbox.session(limits, found.files)
        await self._cell(_PREPARE.format(found.workdir))
        return Step(found.instruction)

    @tool
    async def bash(self, command: str) -> Step:
        """Runs a command with bash in the work directory. Files stay; variables and the directory do not.

        Args:
            command: the command line.
        """
        self._acted = True
        try:
            result = await self._run(command, min(self._timeout, self._left))
        except _Spoiled as error:  # too long, no text for a program, or the work directory is gone
            raise ToolError(f"The command was not run: {error}") from error
        self._left -= result.wall_seconds
        ended = "" if result.status is RunStatus.FINISHED else f"[ended: {result.status.value}]"
        code = f"[exit code {result.text}]" if result.text not in (None, "0") else ""
        return Step("\n".join(filter(None, [result.stdout, ended or code])), done=self._lost or self._left <= 0)

    async def score(self) -> dict[str, Any]:
        """Runs the tests and returns their reward; 0 if the model's own code ended the sandbox, or left it so that they
        cannot be run, or twice give no reward, and give one in an untouched sandbox (at most that one's).

        Raises:
            InfrastructureError: they gave none there either, or did not end in time.
        """
        least = 0.0
        try:
            if not self._lost:
                return await self._test()
        except _NoReward:
            if not self._acted:
                raise
            least = min(await self._untouched(), 0.0)
            with contextlib.suppress(_NoReward, _Spoiled):
                if not self._lost:
                    return await self._test()
        except _Spoiled as error:
            if not self._acted:
                raise InfrastructureError(f"{self._task.folder}: {error}") from error
        return {"score": least, "sandbox_lost": 1}

    async def _untouched(self) -> float:
        """What the tests give in a sandbox in which no command ran."""
        fresh = Session(self._tasks, self._sandbox, self._timeout)
        try:
            await fresh.reset({"task": str(self._task.folder)}, 0)
            return float((await fresh.score())["score"])
        finally:
            await fresh.close()

    async def _test(self) -> dict[str, Any]:
        await self._cell(_KILL)
        await self._cell(_ASIDE)
        await self._copy("tests")
        names = " ".join(_SHIMS)
        shims = "\n".join(f"printf '#!/bin/bash\\n%s\\n' {shlex.quote(text)} > {name}" for name, text in _SHIMS.items())
        folders = "mkdir -p /sandbox/logs/verifier ~/.local/bin && cd ~/.local/bin && touch env"
        await self._run(f"{folders}\n{shims}\nchmod +x {names}", 10.0)
        ran = await self._run('PATH="$HOME/.local/bin:$PATH" bash /tests/test.sh', self._task.test_seconds)
        failure = f"{self._task.folder}: its tests gave no reward: {ran.status.value}: {ran.stdout[-300:]}"
        try:
            return _rewards((await self._cell(_REWARDS)).text if ran.session_alive else None, failure)
        except _Spoiled as error:  # what the tests wrote is no text
            raise _NoReward(failure) from error

    async def solve(self) -> None:
        """Runs the task's own solution, which must earn 1; for `etude env check`."""
        await self._copy("solution")
        await self._run("bash /solution/solve.sh", self._task.agent_seconds)

    async def close(self) -> None:
        if self._id is not None:
            await self._sandbox.close_session(self._id)

    async def _run(self, command: str, seconds: float) -> CellResult:
        exported = "".join(f"export {name}={shlex.quote(value)}; " for name, value in self._task.environment.items())
        given = f"['bash', '-c', {exported + command!r}], cwd={self._task.workdir!r}, stdin=subprocess.DEVNULL"
        cell = f"import subprocess\nsubprocess.run({given}, stderr=subprocess.STDOUT).returncode"
        return await self._execute(cell, seconds)

    async def _cell(self, code: str, seconds: float = 10.0) -> CellResult:
        """Runs a cell of ours; raises `_Spoiled` also if it ended the session."""
        result = await self._execute(code, seconds)
        if not result.session_alive:
            raise _Spoiled(f"the sandbox ended: {result.status.value}")
        return result

    async def _execute(self, code: str, seconds: float) -> CellResult:
        assert self._id is not None
        result = await self._sandbox.run_cell(self._id, code, seconds)
        self._lost = not result.session_alive
        if result.error is not None and result.status is RunStatus.FINISHED:
            raise _Spoiled(f"{result.error.name}: {result.error.value}".rstrip(": "))
        return result

    async def _copy(self, name: str) -> None:
        """Copies a folder of the task to where Harbor has it."""
        packed = io.BytesIO()
        with tarfile.open(fileobj=packed, mode="w:gz") as archive:
            archive.add(self._task.folder / name, name)
        data = base64.b64encode(packed.getvalue()).decode()
        code = "import base64, io, tarfile\n"
        code += f"with tarfile.open(fileobj=io.BytesIO(base64.b64decode('{data}'))) as t: t.extractall('/sandbox')"
        await self._cell(code, 60.0)


def _rewards(written: str | None, failure: str) -> dict[str, Any]:
    """The numbers of the two files. If there are both, Harbor reads reward.json alone; here the lower reward counts, as a
    program that the tests run can write the file that they do not."""
    try:
        files: dict[str, str] = ast.literal_eval(written or "{}")
        found = [float(files["txt"])] if "txt" in files else []
        given = json.loads(files["json"]) if "json" in files else {}
        numbers = {
            key: float(value) for key, value in (given if isinstance(given, dict) else {"reward": given}).items()
        }
        if "json" in files:
            found.append(numbers.pop("reward"))
        if not all(map(math.isfinite, (*found, *numbers.values()))):
            raise ValueError
        return numbers | {"score": min(found)}  # whatever else the tests call a score
    except (LookupError, TypeError, ValueError, SyntaxError, OverflowError, RecursionError):
        raise _NoReward(failure) from None


def read_task(folder: Path) -> Task:
    """Reads a task.

    Raises:
        ConfigError: it is no task, or it needs an image or something else that the sandbox has not; says what.
    """
    try:
        given = tomllib.loads((folder / "task.toml").read_text())
        instruction, script = ((folder / name).read_text() for name in ("instruction.md", "tests/test.sh"))
        docker = folder / "environment/Dockerfile"
        lines = re.sub(r"\\\n", " ", docker.read_text() if docker.exists() else "").splitlines()
    except (OSError, ValueError) as error:
        raise ConfigError(f"{folder}: is no task of Harbor's: {one_line(error)}") from error
    wants, tests, agent = (given.get(section, {}) for section in ("environment", "verifier", "agent"))
    for name in ("docker_image", "gpus", "tpu", "mcp_servers", "healthcheck"):
        if wants.get(name):
            raise _needs(folder, f"environment.{name}")
    if given.get("steps") or tests.get("environment") or tests.get("environment_mode") == "separate":
        raise _needs(folder, "steps" if given.get("steps") else "a container of its own for its tests")
    if (folder / "environment/docker-compose.yaml").exists() or str(wants.get("os", "linux")).lower() != "linux":
        raise _needs(folder, "docker-compose.yaml, or another system")
    for name in _installs(script):
        if name not in _INSTALLED and not any(importlib.metadata.distributions(name=name)):
            raise _needs(folder, f"tests/test.sh needs {name}, which is not installed here")
    workdir, files, variables = "/app", dict[str, bytes](), dict[str, str]()
    for line in filter(str.strip, lines):
        word, _, rest = line.strip().partition(" ")
        if word == "WORKDIR" and rest.strip().rstrip("/") in ("/app", "/workspace"):
            workdir = rest.strip().rstrip("/")
        elif word == "COPY" and not rest.startswith("--"):
            if (copied := _copied(folder / "environment", shlex.split(rest), workdir)) is None:
                raise _needs(folder, line.strip())
            files |= copied
        elif word == "ENV" and "=" in rest:
            variables |= dict(each.partition("=")[::2] for each in shlex.split(rest))
        elif not (word.startswith("#") or (word == "FROM" and re.split("[:/]", rest.strip())[0] in _BASES)):
            raise _needs(folder, line.strip())
    variables |= wants.get("env", {})
    limits = float(agent.get("timeout_sec") or 900), float(tests.get("timeout_sec", 600))
    sizes = int(wants.get("memory_mb") or 2048), int(wants.get("storage_mb") or 1024)
    return Task(folder, instruction.strip(), workdir, files, *limits, *sizes, variables)


def _installs(script: str) -> Iterator[str]:
    """The packages that a test script installs, and the programs that it installs them with, unless a shim stands for it."""
    for line in re.split(r"[;\n|]|&&", script.replace("\\\n", " ")):
        words = [word for word in line.split() if word not in ("if", "then", "else", "!", "sudo")]
        program, *rest = words or [""]
        if program in ("wget", "git", "npm", "conda", "cargo") or (program == "uv" and rest[:1] != ["pip"]):
            yield " ".join(words[:2])
        elif program == "uvx":
            yield from (_name(rest[n + 1]) for n, word in enumerate(rest[:-1]) if word in ("-w", "--with", "--from"))
            if "pytest" not in rest:
                yield line.strip()
        elif "install" in rest and program in ("apt", "apt-get", "pip", "pip3", "uv"):
            yield from (_name(word) for word in rest[rest.index("install") + 1 :] if not word.startswith("-"))


def _name(requirement: str) -> str:
    return re.split(r"[=<>~!\[]", requirement.strip("'\""))[0]


def _needs(folder: Path, what: str) -> ConfigError:
    return ConfigError(f"{folder.name} needs an image: {what}", fix="leave it out, or set args.skip=true")


def _copied(source: Path, words: list[str], workdir: str) -> dict[str, bytes] | None:
    """What `COPY SOURCE… TARGET` brings into the work directory: path below the sandbox's folder → content. None if a source
    is not there, or outside the task's folder, which others may have made; or the target is outside the work directory."""
    *names, target = words
    place = Path(os.path.normpath(Path("/", workdir, target)))
    found: dict[Path, Path] = {}
    for path in (source / name for name in names):
        if path.is_dir():
            found |= {place / file.relative_to(path): file for file in path.rglob("*") if not file.is_dir()}
        else:
            is_folder = len(names) > 1 or target.endswith(("/", ".")) or target == workdir
            found[place / path.name if is_folder else place] = path
    within = all(file.is_file() and file.resolve().is_relative_to(source.resolve()) for file in found.values())
    if not within or not place.is_relative_to(workdir):
        return None
    return {str(name.relative_to("/")): file.read_bytes() for name, file in found.items()}


def _tasks(folder: str, skip: bool) -> Iterator[tuple[str, Task]]:
    root = Path(folder).expanduser()
    folders = [root] if (root / "task.toml").exists() else sorted(file.parent for file in root.glob("*/task.toml"))
    if not folders:
        raise ConfigError(f"harbor:{folder}: there is no task.toml in it, nor in its folders")
    for each in folders:
        try:
            yield str(each), read_task(each)
        except ConfigError as error:
            if not skip:
                raise
            logger.warning("harbor: left out: %s", error.message)


def open_environment(
    folder: str,
    *,
    val: str | None = None,
    skip: bool = False,
    command_timeout: float = 60.0,
    sandbox_url: str | None = None,
) -> tuple[partial[Session], str]:
    """See the package; also returns a digest of the tasks as their version.

    Raises:
        ConfigError: there is no task, or one needs an image.
    """
    tasks = {"train": dict(_tasks(folder, skip)), "val": dict(_tasks(val, skip)) if val else {}}
    digest = hashlib.sha256()
    for name in (*tasks["train"], *tasks["val"]):
        for file in sorted(path for path in Path(name).rglob("*") if path.is_file()):
            digest.update(f"{file.relative_to(name)} {hashlib.sha256(file.read_bytes()).hexdigest()} ".encode())
    return partial(Session, tasks, SandboxClient(sandbox_url), command_timeout), digest.hexdigest()[:12]
