"""Children: programs in processes of their own that answer questions and can be killed. `ChildPool` starts and reuses them;
`ScorerProcesses` has them run a scorer, for CPU-bound functions.

Invariant: a call returns or raises within its time limit; a child that exceeds it or dies is killed and replaced, so that
there are never more children than calls at once. Children exit with their parent (their pipe closes), and import what they
need themselves: `multiprocessing` would run the user's script again in each, and take seconds to replace one that is killed.
"""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import inspect
import os
import pickle
import queue
import resource
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping
from multiprocessing.connection import Connection, Pipe
from typing import Any

from etude.errors import ConfigError, EtudeError, InfrastructureError, describe_error
from etude.registry import USER_MODULE, import_module
from etude.rewards import usage
from etude.timeouts import BlockingCalls, awaited, end_fork

START_SECONDS = 120.0  # imports on a busy machine
_LOOK_SECONDS = 0.5  # between two looks at whether a child that owes an answer is alive
_PROGRAM = "import sys; sys.path[:] = {path!r}; from etude.rewards.processes import serve; serve(int(sys.argv[1]))"


Answer = tuple[str, Any]
"""("result", a scorer's result); "user" or "error" comes with the message of an error."""


class Used(dict[str, float]):
    """What judges used, which a scorer's child sends as it is counted: the child may be killed before it answers."""


class _Told(Counter[str]):
    """Sends what is added to it through `pipe`, from the process that made it alone."""

    def __init__(self, pipe: Connection[Any, Any]) -> None:
        self._pipe, self._lock, self._process = pipe, threading.Lock(), os.getpid()

    def update(self, amounts: Mapping[str, float]) -> None:  # type: ignore[override]
        if os.getpid() == self._process:
            self.send(Used(amounts))

    def send(self, message: object) -> None:
        with self._lock:  # a scorer's threads may count
            self._pipe.send(message)


class Child:
    """`python *arguments FD`, which answers one question at a time through the pipe FD. Only one thread at a time may call
    `ask`. `forks`: whether it has forks, which are killed with it."""

    def __init__(self, *arguments: str, forks: bool = False) -> None:
        self._forks = forks
        self._pipe, theirs = Pipe()
        try:
            self._process = subprocess.Popen(
                [sys.executable, *arguments, str(theirs.fileno())],
                stdin=subprocess.DEVNULL,
                pass_fds=(theirs.fileno(),),
                start_new_session=forks,
            )
        except OSError as error:
            raise InfrastructureError(f"cannot start a process for scoring: {error}") from error
        finally:
            theirs.close()

    def ask(self, question: Any, seconds: float) -> Any:
        """Returns the child's answer, after counting what it `Used` until then.

        Raises:
            TimeoutError, EOFError, OSError: no answer in time, or the child died; it must then be killed.
        """
        self._pipe.send(question)
        deadline = time.monotonic() + seconds
        while True:
            while not self._pipe.poll(max(0.0, min(_LOOK_SECONDS, deadline - time.monotonic()))):
                if self._process.poll() is not None and not self._pipe.poll():
                    raise EOFError  # a fork may hold the pipe of a dead child open
                if time.monotonic() >= deadline:
                    raise TimeoutError(f"no answer within {seconds:g} s")
            answer = self._pipe.recv()
            if not isinstance(answer, Used):
                return answer
            usage.count(**answer)

    def kill(self) -> None:
        self._pipe.close()
        self.end()
        self._process.wait()

    def end(self) -> None:
        """Ends the process, for a thread other than the one that asks, which then sees the end of the pipe."""
        with contextlib.suppress(ProcessLookupError):
            (os.killpg if self._forks else os.kill)(self._process.pid, signal.SIGKILL)


class ChildPool:
    """Children that `start` returns on demand, as many as are asked at once."""

    def __init__(self, start: Callable[[], Child]) -> None:
        self._start = start
        self._free: queue.LifoQueue[Child] = queue.LifoQueue()
        self._busy: set[Child] = set()
        atexit.register(self.close)

    def ask(self, question: Any, seconds: float) -> Any:
        """Asks a free child, or a new one; raises as `start` and `Child.ask`, when the child is killed."""
        try:
            child = self._free.get_nowait()
        except queue.Empty:
            child = self._start()
        self._busy.add(child)
        try:
            answer = child.ask(question, seconds)
        except BaseException:
            self._busy.discard(child)
            child.kill()
            raise
        self._busy.discard(child)
        self._free.put(child)
        return answer

    def close(self) -> None:
        """Stops the children; calls that wait for one fail."""
        for child in list(self._busy):
            child.end()
        with contextlib.suppress(queue.Empty):
            while True:
                self._free.get_nowait().kill()


class ScorerProcesses:
    """Up to `count` processes that run the pickled `scorer`.

    `memory_mb`: the maximum address space of each; None: no limit.
    """

    def __init__(self, scorer: bytes, count: int, memory_mb: int | None = None) -> None:
        self._scorer, self._memory_mb = scorer, memory_mb
        self._children = ChildPool(self._start)
        self._threads = BlockingCalls("etude-scorer-process", limit=count)
        self.close = self._children.close

    async def score(self, arguments: dict[str, Any], seconds: float) -> Any:
        """Returns the scorer's result for `arguments`, within `seconds`; waiting for a free child does not count.

        Raises:
            EtudeError: raised by the scorer: the user must act.
            InfrastructureError: any other error, no result in time, or the process died.
        """
        return result_in(await self._threads.run(self.answer, arguments, seconds))

    def answer(self, arguments: dict[str, Any], seconds: float) -> Answer:
        """Like `score`, for a thread; what it would raise is in the answer."""
        try:
            answer: Answer = self._children.ask(arguments, seconds)
            return answer
        except EtudeError as error:
            return "user", str(error)
        except TimeoutError as error:
            return "error", f"{error}; its process was killed"
        except InfrastructureError as error:
            return "error", str(error)
        except (EOFError, OSError):
            return "error", "its process died"

    def _start(self) -> Child:
        child = Child("-c", _PROGRAM.format(path=sys.path), forks=True)
        files = ((name, module.__file__) for name, module in list(sys.modules.items()) if name.startswith(USER_MODULE))
        plugins = [file for name, file in files if name.encode() in self._scorer]  # files that the pickle refers to
        try:
            result_in(child.ask((plugins, self._scorer, self._memory_mb), START_SECONDS))
        except BaseException:
            child.kill()
            raise
        return child


def result_in(answer: Answer) -> Any:
    """Returns the result in an answer, or raises the error."""
    kind, content = answer
    if kind == "user":
        raise ConfigError(content)
    if kind == "error":
        raise InfrastructureError(content)
    return content


def serve(descriptor: int) -> None:
    """The main loop of a scorer's child: loads the scorer, then answers until the pipe closes."""
    pipe: Connection[Any, Any] = Connection(descriptor)
    os.dup2(2, 1)  # a scorer's prints go to standard error, not into the run's output
    scorer: Any = None
    process, told = os.getpid(), _Told(pipe)
    with contextlib.suppress(EOFError, OSError):
        while True:
            question = pipe.recv()
            try:
                if scorer is None:
                    plugins, pickled, memory_mb = question
                    for path in plugins:
                        import_module(path)
                    scorer = pickle.loads(pickled)
                    if memory_mb is not None:
                        resource.setrlimit(resource.RLIMIT_AS, (memory_mb << 20, memory_mb << 20))
                    answer = None
                else:
                    with usage.counting(told):
                        answer = scorer(**question)
                        answer = asyncio.run(awaited(answer)) if inspect.isawaitable(answer) else answer
                    answer = dict(answer) if hasattr(answer, "keys") else answer
                answer = "result", answer
            except (EtudeError, ModuleNotFoundError) as error:
                answer = "user", str(error)
            except Exception as error:
                answer = "error", describe_error(error)
            end_fork(process)  # its answer would be read as that to the next question
            told.send(answer)
