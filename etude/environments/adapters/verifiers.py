"""`verifiers:TASKSET`: a taskset of verifiers 0.4, whose harness asks the policy through the gateway.

It runs in the interpreter that the entry's `python` names, in one process for each of ours. Arguments: `taskset` and `agent`
(sections of verifiers' configuration: `agent.harness.id`, `agent.max_turns`), `val_samples` (how many of the last tasks are
for validation; 0). The runtime is verifiers' subprocess. A trace with errors has the reward 0 there; here it has none.
"""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import itertools
import json
import os
import shutil
import signal
import subprocess
import threading
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Future
from functools import partial
from pathlib import Path
from typing import Any

from etude.environments.base import Environment, Step
from etude.errors import AgentError, ConfigError, InfrastructureError, one_line

_BRIDGE = Path(__file__).with_name("verifiers_bridge.py")
_STARTS, _ENDS = 180.0, 10.0  # seconds
_BROKEN = ("SandboxError", "InterceptionError", "TunnelError", "ToolsetError", "ProviderError")
_lock = threading.Lock()
_bridges: dict[tuple[str, str], Bridge] = {}


class Failed(AgentError):
    """A trace has an error; `status` is that of a request which failed."""

    def __init__(self, text: str, status: int | None) -> None:
        super().__init__(text)
        self.status = status


class Bridge:
    """The process of an interpreter that runs one taskset; `tasks`: how many it has."""

    def __init__(self, python: str, config: str) -> None:
        path = os.pathsep.join((str(Path(python).parent), os.environ.get("PATH", "")))
        self._process = subprocess.Popen(
            # -P: the modules beside the program have the names of packages
            [python, "-P", str(_BRIDGE), config],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "PATH": path},
            start_new_session=True,
        )
        atexit.register(self.end)
        self._numbers, self._asked = itertools.count(), dict[str, Future[dict[str, Any]]]()
        self._ready: Future[dict[str, Any]] = Future()
        threading.Thread(target=self._read, daemon=True).start()
        try:
            self.tasks = int(self._ready.result(_STARTS)["tasks"])
        except BaseException:
            self.end()
            raise

    def end(self) -> None:
        """Ends the process, and what it started."""
        assert self._process.stdin is not None
        with contextlib.suppress(OSError):
            self._process.stdin.close()
        try:
            self._process.wait(_ENDS)
        except subprocess.TimeoutExpired:
            os.killpg(self._process.pid, signal.SIGKILL)

    @property
    def is_alive(self) -> bool:
        return self._process.poll() is None

    async def run(self, **asked: Any) -> dict[str, Any]:
        """Runs a rollout; cancels it there if it is cancelled here.

        Raises:
            InfrastructureError: the process ended, or wrote what is no answer.
        """
        id = f"ETUDE_{next(self._numbers)}"
        future = self._asked[id] = Future()
        try:
            self._write({"id": id, **asked})
            return await asyncio.wrap_future(future)
        except BaseException:
            with contextlib.suppress(InfrastructureError):
                self._write({"cancel": id})
            raise
        finally:
            self._asked.pop(id, None)

    def _write(self, line: Mapping[str, Any]) -> None:
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps(line) + "\n")
            self._process.stdin.flush()
        except OSError as error:
            raise InfrastructureError(f"verifiers' process ended: {one_line(error)}") from error

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            try:
                answer = json.loads(line)
                future = self._asked.get(answer["id"]) if "tasks" not in answer else self._ready
            except (ValueError, TypeError, KeyError, RecursionError):  # whose answer it was is unknown
                self._fail(f"wrote what is no answer: {one_line(Exception(line), 80)}")
                continue
            if future is not None and not future.done():
                future.set_result(answer)
        self._fail(f"ended with status {self._process.wait()}; see its output")

    def _fail(self, why: str) -> None:
        for future in [self._ready, *self._asked.values()]:
            if not future.done():
                future.set_exception(InfrastructureError(f"verifiers' process {why}"))


class Session(Environment):
    """One rollout of verifiers."""

    times_itself = True

    def __init__(self, bridge: Callable[[], Bridge], val_samples: int) -> None:
        self._bridge, self._val = bridge, val_samples

    def tasks(self, split: str) -> Iterable[Mapping[str, Any]]:
        count = self._bridge().tasks
        cut = count - self._val
        return [{"task": number} for number in (range(cut) if split == "train" else range(cut, count))]

    def reset(self, task: Mapping[str, Any], seed: int) -> Step:
        self._task = task["task"]
        return Step()

    async def drive(self, base_url: str, api_key: str) -> dict[str, Any]:
        """Runs the rollout, and returns its reward and metrics.

        Raises:
            InfrastructureError: the trace says that a part of verifiers or a server failed.
            AgentError: it has another error.
        """
        bridge = await asyncio.to_thread(self._bridge)
        found = await bridge.run(task=self._task, base_url=base_url, api_key=api_key)
        for error in found.get("errors") or ():
            text, status = f"{error.get('type')}: {one_line(Exception(error.get('message')))}", error.get("status_code")
            if error.get("type") in _BROKEN and status != 400:
                raise InfrastructureError(f"verifiers: {text}")
            raise Failed(text, status)
        if found.get("reward") is None:
            raise InfrastructureError("verifiers: the rollout ended without a trace")
        return {**(found.get("metrics") or {}), "score": found["reward"]}


def _open(python: str, config: str) -> Bridge:
    with _lock:
        if (bridge := _bridges.get((python, config))) is None or not bridge.is_alive:
            bridge = _bridges[python, config] = Bridge(python, config)
        return bridge


def open_environment(
    taskset_id: str,
    *,
    python: str,
    taskset: Mapping[str, Any] | None = None,
    agent: Mapping[str, Any] | None = None,
    val_samples: int = 0,
) -> tuple[partial[Session], str]:
    """See the package; also returns the version of verifiers in that interpreter.

    Raises:
        ConfigError: there is no such interpreter, verifiers is not in it, or it has no such taskset.
    """
    found = shutil.which(os.path.expanduser(python))
    if found is None:
        raise ConfigError(f"verifiers:{taskset_id}: python: there is no program {python}")
    program = os.path.abspath(found)  # not resolved: the link in a virtual environment is what makes it one
    runtime = {"type": "subprocess", **(agent or {}).get("runtime", {})}
    if runtime["type"] != "subprocess":
        raise ConfigError(f"verifiers:{taskset_id}: args.agent.runtime.type must be subprocess, not {runtime['type']}")
    config = {"taskset": {**(taskset or {}), "id": taskset_id}, "agent": {**(agent or {}), "runtime": runtime}}
    asked = "from importlib.metadata import version; print(version('verifiers'))"
    answer = subprocess.run([program, "-c", asked], capture_output=True, text=True, check=False)
    if answer.returncode != 0:
        raise ConfigError(f"verifiers:{taskset_id}: verifiers is not installed in {program}")
    open_bridge = partial(_open, program, json.dumps(config))
    try:
        open_bridge()
    except (InfrastructureError, TimeoutError) as error:
        raise ConfigError(
            f"verifiers:{taskset_id}: it does not start: {one_line(error)}", fix="see the lines above"
        ) from error
    return partial(Session, open_bridge, val_samples), answer.stdout.strip()
