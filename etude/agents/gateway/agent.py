"""Runs a user's agent: a function `run(client, row)` or `run(base_url, api_key, row)`, sync or async, or a command.

A function gets the parameters that it declares, by name: `row` (the data row), `client` (`openai.AsyncOpenAI`, or
`openai.OpenAI` for a sync function), `base_url`, `api_key`, `model`. It returns None or the reward.

Invariant: an agent is checked when it is configured, not when it first runs. A sync function runs in a thread; a command
runs in its own process group, which does not outlive its trajectory, and inherits only the environment variables that
programs need to start. Nothing that a command prints is a reward: a model's text ends up there.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import fcntl
import importlib.util
import inspect
import json
import os
import re
import shlex
import shutil
import stat
import subprocess
import sys
import tempfile
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any, TypeAlias
from weakref import WeakKeyDictionary

from etude.agents.gateway import reaper
from etude.agents.gateway.command_sandbox import run_in_sandbox
from etude.agents.roles import carriers, check_role
from etude.errors import AgentError, ConfigError, EtudeError, InfrastructureError, MissingExtraError
from etude.options import AgentSandboxOptions
from etude.registry import did_you_mean
from etude.rewards.finite import as_reward
from etude.sandbox.guest.files import entries
from etude.timeouts import BlockingCalls, settle, uninterrupted, within
from etude.trajectory import Trajectory

MODEL = "policy"
PARAMETERS = ("row", "client", "base_url", "api_key", "model")
_INHERITED = ("PATH", "HOME", "LANG", "LC_ALL", "TMPDIR", "VIRTUAL_ENV", "PYTHONPATH", "SYSTEMROOT")
REWARD_FILE = "ETUDE_REWARD_FILE"
"""The environment variable that names the file, without a name on disk, into which a command writes its reward."""
VERIFIER_SECONDS = 120.0
_MOST_OUTPUT = 64 << 10  # maximum bytes kept of a command's output
_LONGEST_NUMBER, _LONGEST_REWARDS = 100, 10_000  # bytes of a reward file: a number, numbers by role
_FIRST_DESCRIPTOR = 100  # of reward files: where a program without the descriptor would have none of its own
_OUT_OF_RESOURCES = (errno.EAGAIN, errno.ENOMEM, errno.EMFILE, errno.ENFILE)  # the machine is out of resources: retried
_POLL_SECONDS = 0.2
_DRAIN_SECONDS = 1.0
# Far more threads than needed: an agent waiting for one would stall a deterministic engine.
_threads = BlockingCalls("etude-agent", limit=1 << 14)


class FunctionAgent:
    """An agent written as a function.

    Raises:
        ConfigError: it is not a function, or has unknown parameters.
    """

    has_verifier = False

    def __init__(self, function: Callable[..., Any]) -> None:
        self.name = getattr(function, "__name__", type(function).__name__)
        if not callable(function):
            raise ConfigError(f"the agent must be a function, got {function!r:.60}")
        self._function = function
        self._is_async = any(map(inspect.iscoroutinefunction, (function, type(function).__call__)))
        self._wanted = _wanted(function, self.name)
        if "client" in self._wanted and importlib.util.find_spec("openai") is None:
            raise MissingExtraError("an agent with an openai client", "openai")

    async def run(self, base_url: str, api_key: str, row: Mapping[str, Any]) -> Any:
        """Returns None or the reward."""
        given: dict[str, Any] = {"row": dict(row), "model": MODEL, "base_url": base_url, "api_key": api_key}
        if "client" in self._wanted:
            shared = Clients.here()
            client = shared.asynchronous if self._is_async else shared.synchronous
            given["client"] = client.copy(base_url=base_url, api_key=api_key)
        arguments = {name: given[name] for name in self._wanted}
        try:
            if self._is_async:
                return await self._function(**arguments)
            return await _threads.run(self._function, **arguments)
        except SystemExit as error:  # would end the whole process
            raise AgentError(f"it called exit({error.code!r:.60})") from error


def _wanted(function: Callable[..., Any], name: str) -> list[str]:
    declared = []
    for parameter in inspect.signature(function).parameters.values():
        if parameter.kind in (parameter.VAR_KEYWORD, parameter.VAR_POSITIONAL):
            continue
        if parameter.name in PARAMETERS and parameter.kind is not parameter.POSITIONAL_ONLY:
            declared.append(parameter.name)
        elif parameter.default is parameter.empty:
            hint = did_you_mean(parameter.name, PARAMETERS)
            raise ConfigError(
                f"agent '{name}' has an unknown parameter '{parameter.name}'{hint} (there are {', '.join(PARAMETERS)})"
            )
    return declared


class WrongReward(AgentError):
    """What an agent gave as its reward is not a finite number."""


def finite_reward(value: object, source: str) -> float:
    """Returns what an agent gave as its reward, as a float; the message of the error begins with `source`.

    Raises:
        WrongReward: see `as_reward`.
    """
    try:
        return as_reward(value, source)
    except InfrastructureError as error:  # a wrong value is not infrastructure
        raise WrongReward(str(error)) from error


Reward: TypeAlias = "float | dict[str, float]"
"""A number for all, or one for each role."""


def read_agent_reward(value: object, source: str, roles: Sequence[str]) -> Reward:
    """Returns what an agent gave as its reward: a number, or numbers by role, without those that are None.

    Raises:
        WrongReward: one is not finite or too large, or there is no such role.
    """
    if not isinstance(value, Mapping):
        return finite_reward(value, source)
    try:
        given = {check_role(role, roles): each for role, each in value.items()}
    except ValueError as error:
        raise WrongReward(f"{source}: {error}") from error
    return {role: finite_reward(each, source) for role, each in given.items() if each is not None}


def give_rewards(sequences: Sequence[Trajectory], reward: Reward | None, *, scored: bool) -> None:
    """Gives each role its reward; a number is that of all. `scored`: a reward manager scores the main sequence, which
    is then the only one that a number goes to.

    Raises:
        WrongReward: a role is left without any.
    """
    main = sequences[-1] if scored and not isinstance(reward, Mapping) else None
    for role, sequence in carriers(sequences).items():
        if main is None or main is sequence:
            sequence.rewards.score = reward.get(role) if isinstance(reward, Mapping) else reward
        if not sequence.rewards.given and sequence is not main:
            raise WrongReward(f"there is a reward, and none for the role '{role}': give one for each role")


class CommandFailed(AgentError):
    """An agent's program exited with a nonzero status; `reward` is what it had written into its file, if anything."""

    def __init__(self, message: str, reward: object) -> None:
        super().__init__(message)
        self.reward = reward


class CommandAgent:
    """An agent written as a program.

    It gets the row as JSON on stdin, and OPENAI_BASE_URL, OPENAI_API_KEY, OPENAI_MODEL, ANTHROPIC_BASE_URL and
    ANTHROPIC_API_KEY in its environment. The number that it writes into the file ETUDE_REWARD_FILE is the reward. Only
    programs that inherit the descriptor can open it, so that no search of the disk finds another rollout's. What it
    started is killed when it exits, before the file is read.

    With a `workspace`, a run's working folder is a copy of that folder. With a `verifier`, a second program, that one alone
    gives the reward: it gets the file and the row's `reward_model`, rewards that are posted are refused, and it runs in the
    same folder when the agent and all that it started have ended, however they did. What the agent left is its own doing: a
    verifier that fails on it twice, and not on the workspace as it was, gives that workspace's reward, at most 0; so does a
    folder that cannot be had back from the sandbox.
    With a `sandbox` the agent runs in there, without a reward file.

    Raises:
        ConfigError: a program or the folder does not exist, or the verifier's code would come from the workspace.
    """

    def __init__(
        self,
        command: Sequence[str],
        workspace: str | None = None,
        verifier: Sequence[str] = (),
        sandbox: AgentSandboxOptions | None = None,
        verifier_seconds: float = VERIFIER_SECONDS,
    ) -> None:
        self._command, self._verifier, self._verifier_seconds = list(command), list(verifier), verifier_seconds
        self._sandbox = sandbox if sandbox is not None and sandbox.enable else None
        self._workspace = None if workspace is None else Path(workspace).expanduser()
        self.name, self.has_verifier = command[0], bool(verifier)
        if workspace is not None and verifier and (word := _within_reach(self._verifier)):
            raise ConfigError(
                f"rollout.agent.openai_agent.verifier: {word} is read from the workspace, which the agent can rewrite",
                key="actor_rollout_ref.rollout.agent.openai_agent.verifier",
                fix="name a file outside by its absolute path, or start Python with -I",
            )
        outside = [] if self._sandbox else [(self.name, "agent")]
        for program, noun in (*outside, *((word, "verifier") for word in verifier[:1])):
            if shutil.which(program) is None:
                raise ConfigError(
                    f"{noun} '{program}' cannot be started: there is no such program, or it is not executable"
                )
        if self._workspace is not None and not self._workspace.is_dir():
            raise ConfigError(
                f"rollout.agent.openai_agent.workspace={workspace} is no folder",
                key="actor_rollout_ref.rollout.agent.openai_agent.workspace",
                fix="name the folder that each rollout gets a copy of",
            )

    async def run(self, base_url: str, api_key: str, row: Mapping[str, Any]) -> Any:
        """Returns None or the reward, of its verifier alone if it has one.

        Raises:
            EtudeError: a program cannot be started.
            CommandFailed: the agent exits with a nonzero status, or left what its verifier fails on.
            WrongReward: what was written into the reward file is not a finite number.
            InfrastructureError: the verifier exits with a nonzero status, writes no reward or takes too long, in the
                workspace as it was, too.
        """
        keys = {
            "OPENAI_BASE_URL": base_url,
            "OPENAI_API_KEY": api_key,
            "OPENAI_MODEL": MODEL,
            "ANTHROPIC_BASE_URL": base_url.removesuffix("/v1"),
            "ANTHROPIC_API_KEY": api_key,
        }
        text = json.dumps(dict(row), default=repr).encode()
        shown = {key: value for key, value in row.items() if not (self.has_verifier and key == "reward_model")}
        asked = json.dumps(shown, default=repr).encode()  # programs that the model wrote can read it
        async with _working_folder(self._workspace) as folder:
            with _reward_file() as descriptor:
                own = None if self.has_verifier else descriptor
                reward: object
                status: int | str
                kept = True
                if self._sandbox is not None:
                    status, output, kept = await run_in_sandbox(self._sandbox, self._command, asked, keys, folder)
                else:
                    status, output = await _execute("agent", self._command, asked, keys, own, folder)
                if self.has_verifier:
                    reward = await self._verify(text, descriptor, folder)
                    if not kept:
                        reward = _at_most_0(reward)
                else:
                    reward = _read_reward(descriptor, f"agent '{self.name}': {REWARD_FILE} (/dev/fd/{descriptor})")
        if status != 0:
            raise CommandFailed(f"agent '{self.name}' ended with status {status}: {output or '(no output)'}", reward)
        return reward

    async def _verify(self, text: bytes, descriptor: int, folder: Path | None) -> float | dict[str, Any]:
        try:
            return await self._verify_once(text, descriptor, folder)
        except (InfrastructureError, WrongReward):
            if folder is None:
                raise
        async with _working_folder(self._workspace) as untouched:
            reward = await self._verify_once(text, descriptor, untouched)
        try:
            return await self._verify_once(text, descriptor, folder)
        except (InfrastructureError, WrongReward) as error:
            raise CommandFailed(f"agent '{self.name}' left what only fails: {error}", _at_most_0(reward)) from None

    async def _verify_once(self, text: bytes, descriptor: int, folder: Path | None) -> float | dict[str, Any]:
        who = f"verifier '{self._verifier[0]}'"
        os.ftruncate(descriptor, 0)
        if folder is not None:
            await _threads.run(_open_up, folder)
        try:
            status, output = await within(
                self._verifier_seconds, _execute, "verifier", self._verifier, text, {}, descriptor, folder
            )
        except TimeoutError:
            raise InfrastructureError(
                f"{who} took more than {self._verifier_seconds:g} s (rollout.agent.openai_agent.verifier_seconds)"
            ) from None
        if status != 0:
            raise InfrastructureError(f"{who} ended with status {status}: {output or '(no output)'}")
        reward = _read_reward(descriptor, f"{who}: {REWARD_FILE} (/dev/fd/{descriptor})")
        if reward is None:
            raise InfrastructureError(f"{who} wrote no reward into {REWARD_FILE}")
        return reward


def _at_most_0(reward: float | dict[str, Any]) -> float | dict[str, Any]:
    if isinstance(reward, dict):
        return {role: min(each, 0.0) if isinstance(each, int | float) else each for role, each in reward.items()}
    return min(reward, 0.0)


_INTERPRETER = re.compile(r"(python|pypy|node|bash|dash|zsh|sh|perl|ruby|php|Rscript|lua)[\d.]*$")
_WRAPPERS = ("env", "exec", "nice", "nohup", "setsid", "stdbuf", "sudo", "time", "timeout", "then", "do", "else", "!")
_TAKES_A_WORD = re.compile(r"-\w*[WXoO]$")  # options of Python and of shells


def _within_reach(command: Sequence[str]) -> str | None:
    """The word of a command whose code comes from the folder it runs in: a program or script with a relative path, or what
    Python imports from there; of a wrapper (`env`, `timeout`) or of a shell's text, that of the commands in it."""
    program, *words = command
    name = Path(program).name
    if "/" in program and not Path(program).is_absolute():
        return program
    if name in _WRAPPERS:
        inner = (n for n, word in enumerate(words) if _INTERPRETER.match(Path(word).name) or word[:2] in ("./", ".."))
        return next((_within_reach(words[n:]) for n in inner), None)
    if not _INTERPRETER.match(name):
        return None
    pairs = zip(["", *words], words)
    at = next(
        (n for n, (last, word) in enumerate(pairs) if word[:1] != "-" and not _TAKES_A_WORD.match(last)), len(words)
    )
    options, script = words[:at], next(iter(words[at:]), None)
    python = name.startswith(("python", "pypy"))
    letters = "cm" if python else "c" if "sh" in name else "e"
    runs = any(re.match(rf"-\w*[{letters}]$", option) for option in options)  # code or a module, not a file
    if runs and "sh" in name and script:
        tokens = shlex.shlex(script, posix=True, punctuation_chars=True)
        with contextlib.suppress(ValueError):  # not closed: the shell will say so
            parts = [list(part) for ends, part in groupby(tokens, lambda token: set(token) <= set(";&|()")) if not ends]
            return next((word for part in parts if (word := _within_reach(part))), None)
    if python and runs:
        return None if any(re.match(r"-\w*[IP]", option) for option in options) else f"what '{options[-1]}' imports"
    return None if runs or script is None or Path(script).is_absolute() else script


@contextlib.asynccontextmanager
async def _working_folder(template: Path | None) -> AsyncIterator[Path | None]:
    """Yields a copy of a folder, deleted afterwards; None without one."""
    if template is None:
        yield None
        return
    parent = tempfile.TemporaryDirectory(prefix="etude-agent-", ignore_cleanup_errors=True)
    try:
        folder = Path(parent.name) / template.name
        await _threads.run(_copy, template, folder)
        yield folder
    finally:
        await uninterrupted(_threads.run(_delete, parent))


def _copy(template: Path, folder: Path) -> None:
    """Copies a folder; a link to an absolute path in it leads into the copy, or each rollout would change the original."""
    shutil.copytree(template, folder, symlinks=True)
    roots = (template.absolute(), template.resolve())
    for link in [entry.path for entry in entries(str(folder)) if entry.is_symlink()]:
        target = Path(os.readlink(link))
        if root := next(filter(target.is_relative_to, roots), None):
            os.unlink(link)
            os.symlink(os.path.relpath(folder / target.relative_to(root), Path(link).parent), link)


def _delete(folder: tempfile.TemporaryDirectory[str]) -> None:
    try:
        folder.cleanup()
    except RecursionError:  # before Python 3.13, of a thousand folders in each other
        subprocess.run(("rm", "-rf", "--", folder.name), check=False)


def _open_up(folder: Path) -> None:
    """Leaves what a program can read to its end: no pipes, sockets or devices, and nothing without permission."""
    if folder.is_symlink() or not folder.is_dir():
        folder.unlink(missing_ok=True)
        folder.mkdir()
    folder.chmod(0o700)
    for entry in entries(str(folder)):
        with contextlib.suppress(OSError):  # a link to nothing, a path that is too long
            mode = entry.stat().st_mode
            if not (stat.S_ISREG(mode) or stat.S_ISDIR(mode)):
                os.unlink(entry.path)
            elif not entry.is_symlink():
                os.chmod(entry.path, 0o700 | mode if stat.S_ISDIR(mode) else 0o400 | mode)


async def _execute(
    noun: str,
    command: Sequence[str],
    text: bytes,
    variables: Mapping[str, str],
    descriptor: int | None,
    folder: Path | None,
) -> tuple[int, str]:
    """Runs a program that no process of its own outlives (`etude.agents.gateway.reaper`), with `text` on stdin and
    `descriptor` as its reward file; returns its status and the end of its output.

    Raises:
        EtudeError: it cannot be started.
    """
    environment = {name: os.environ[name] for name in _INHERITED if name in os.environ} | dict(variables)
    if descriptor is not None:
        environment[REWARD_FILE] = f"/dev/fd/{descriptor}"
    pipe, out_too = asyncio.subprocess.PIPE, asyncio.subprocess.STDOUT
    with tempfile.TemporaryFile() as failed:
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-IS", reaper.__file__, str(failed.fileno()), *command),
            stdin=pipe,
            stdout=pipe,
            stderr=out_too,
            env=environment,
            cwd=folder,
            pass_fds=(failed.fileno(), *(() if descriptor is None else (descriptor,))),
            start_new_session=True,
        )
        output = bytearray()
        pipes = {asyncio.ensure_future(work) for work in (_feed_stdin(process, text), _read_tail(process, output))}
        try:
            status = await _wait_for_exit(process)
        finally:
            await uninterrupted(_terminate(process, pipes))
        if number := os.pread(failed.fileno(), 10, 0):
            error = OSError(int(number), os.strerror(int(number)), command[0])
            if error.errno in _OUT_OF_RESOURCES:
                raise error
            raise EtudeError(f"{noun} '{command[0]}' cannot be started: {error}")
    return status, " ".join(output.decode("utf-8", "replace").split())[-500:]


async def _feed_stdin(process: asyncio.subprocess.Process, text: bytes) -> None:
    assert process.stdin is not None
    with contextlib.suppress(ConnectionError):  # the program may ignore stdin
        process.stdin.write(text)
        await process.stdin.drain()
    process.stdin.close()


async def _read_tail(process: asyncio.subprocess.Process, kept: bytearray) -> None:
    """Keeps the last `_MOST_OUTPUT` bytes that the program prints."""
    assert process.stdout is not None
    while piece := await process.stdout.read(_MOST_OUTPUT):
        kept += piece
        del kept[:-_MOST_OUTPUT]


async def _wait_for_exit(process: asyncio.subprocess.Process) -> int:
    """Like `process.wait()`, which in some Python versions also waits for the pipes to close."""
    waiting = asyncio.ensure_future(process.wait())
    try:
        while process.returncode is None:
            await asyncio.wait({waiting}, timeout=_POLL_SECONDS)
    finally:
        await settle({waiting})
    return process.returncode


async def _terminate(process: asyncio.subprocess.Process, pipes: set[asyncio.Task[None]]) -> None:
    """Ends the program and what it started, then waits until the pipes are drained."""
    if process.returncode is None:
        process.terminate()
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(_wait_for_exit(process), _DRAIN_SECONDS)
    if process.returncode is None:
        process.kill()
        await _wait_for_exit(process)
    await asyncio.wait(pipes, timeout=_DRAIN_SECONDS)  # a process that got away may hold them open forever
    if not all(pipe.done() for pipe in pipes):
        await settle(pipes)
        process._transport.close()  # type: ignore[attr-defined]  # the only way to close pipes that others hold too


@contextlib.contextmanager
def _reward_file() -> Iterator[int]:
    """Opens an empty file that has no name, for one program; yields its descriptor."""
    with tempfile.TemporaryFile() as file:
        descriptor = fcntl.fcntl(file, fcntl.F_DUPFD_CLOEXEC, _FIRST_DESCRIPTOR)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def _read_reward(descriptor: int, source: str) -> float | dict[str, Any] | None:
    """Returns the number in a command's reward file, or the object with one for each role; None if it is empty.

    Raises:
        WrongReward: it does not hold one finite number, or an object.
    """
    text = os.pread(descriptor, _LONGEST_REWARDS + 1, 0)
    if not text:
        return None
    number: float | dict[str, Any] | None = None
    with contextlib.suppress(ValueError, RecursionError):
        if text.lstrip().startswith(b"{") and len(text) <= _LONGEST_REWARDS:
            number = dict(json.loads(text))
        elif len(text) <= _LONGEST_NUMBER and b"_" not in text:  # Python reads 1_0 as 10
            number = float(text)
    if number is None:
        raise WrongReward(f"{source} must hold one number, or an object of one for each role, and holds {text[:40]!r}")
    return number if isinstance(number, dict) else finite_reward(number, source)


_REQUEST_SECONDS = 86_400.0  # request timeout; effectively none, since trajectories have their own time limit


class Clients:
    """`openai` clients for the trajectories of one event loop, with shared connection pools; created by `Clients.here`.

    A pool per trajectory would cost tens of milliseconds of CPU time, mostly to load certificates. TLS is verified as
    usual, since an agent may point a copy of its client at another server (`with_options`). A client has only its own
    trajectory's URL and key, and never retries: a failed request is either rejected for good or fails the trajectory.
    """

    def __init__(self) -> None:
        import openai

        unlimited = type(openai.DEFAULT_CONNECTION_LIMITS)()  # waiting for a connection could block other agents
        pool: dict[str, Any] = {"trust_env": False, "limits": unlimited, "timeout": _REQUEST_SECONDS}
        self._pool, self._thread_pool = openai.DefaultAsyncHttpxClient(**pool), openai.DefaultHttpxClient(**pool)
        given: dict[str, Any] = {
            "api_key": "none",
            "base_url": "http://127.0.0.1",
            "max_retries": 0,
            "timeout": _REQUEST_SECONDS,
        }
        self.asynchronous = openai.AsyncOpenAI(http_client=self._pool, **given)
        self.synchronous = openai.OpenAI(http_client=self._thread_pool, **given)

    @staticmethod
    def here() -> Clients:
        """Returns the clients of the running event loop."""
        loop = asyncio.get_running_loop()
        if loop not in _clients:
            _clients[loop] = Clients()
        return _clients[loop]

    @staticmethod
    def taken() -> list[Clients]:
        """Removes and returns the clients of the running event loop, for closing; the next `here` creates new ones."""
        clients = _clients.pop(asyncio.get_running_loop(), None)
        return [] if clients is None else [clients]

    async def close(self) -> None:
        """Closes the connections."""
        self._thread_pool.close()
        await self._pool.aclose()


_clients: WeakKeyDictionary[asyncio.AbstractEventLoop, Clients] = WeakKeyDictionary()
