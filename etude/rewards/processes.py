"""`ScorerProcesses`: scorers in child processes that can be killed, for CPU-bound functions.

Invariant: a call returns or raises within the time limit; a child that exceeds it or dies is killed and replaced, so
there are never more than `count`. Children load the scorer themselves, its file first, and exit with their parent (their
pipe closes). Waiting for a free child does not count against the limit.
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
import subprocess
import sys
from multiprocessing.connection import Connection, Pipe
from typing import Any

from etude.errors import ConfigError, EtudeError, InfrastructureError, describe_error
from etude.registry import USER_MODULE, import_module
from etude.timeouts import BlockingCalls

START_SECONDS = 120.0
_PROGRAM = "import sys; sys.path[:] = {path!r}; from etude.rewards.processes import serve; serve({fd})"


class _Child:
    """One process. Only one thread at a time may call `ask`."""

    def __init__(self, scorer: bytes, memory_mb: int | None) -> None:
        self._pipe, theirs = Pipe()
        program = _PROGRAM.format(path=sys.path, fd=theirs.fileno())
        try:
            self._process = subprocess.Popen(
                [sys.executable, "-c", program], stdin=subprocess.DEVNULL, pass_fds=(theirs.fileno(),)
            )
        except OSError as error:
            raise InfrastructureError(f"cannot start a scorer's process: {error}") from error
        finally:
            theirs.close()
        files = ((name, module.__file__) for name, module in list(sys.modules.items()) if name.startswith(USER_MODULE))
        plugins = [file for name, file in files if name.encode() in scorer]  # files that the pickle refers to
        try:
            self.ask((plugins, scorer, memory_mb), START_SECONDS)
        except BaseException:
            self.kill()
            raise

    def ask(self, question: Any, seconds: float) -> Any:
        """Returns the child's answer.

        Raises:
            EtudeError: the scorer raised it: the user must act.
            InfrastructureError: any other error of the scorer.
            TimeoutError, EOFError, OSError: no answer in time, or the child died; it must then be killed.
        """
        self._pipe.send(question)
        if not self._pipe.poll(seconds):
            raise TimeoutError(f"no answer within {seconds:g} s")
        kind, answer = self._pipe.recv()
        if kind == "user":
            raise ConfigError(answer)
        if kind == "error":
            raise InfrastructureError(answer)
        return answer

    def kill(self) -> None:
        self._pipe.close()
        self._process.kill()
        self._process.wait()


class ScorerProcesses:
    """Up to `count` processes that run the pickled `scorer`, started on demand and reused.

    `memory_mb`: the maximum address space of each; None: no limit.
    """

    def __init__(self, scorer: bytes, count: int, memory_mb: int | None = None) -> None:
        self._scorer, self._memory_mb = scorer, memory_mb
        self._free: queue.LifoQueue[_Child] = queue.LifoQueue()
        self._threads = BlockingCalls("etude-scorer-process", limit=count)
        atexit.register(self.close)

    async def score(self, arguments: dict[str, Any], seconds: float) -> Any:
        """Returns the scorer's result for `arguments`, within `seconds`.

        Raises:
            EtudeError: raised by the scorer: the user must act.
            InfrastructureError: any other error, no result in time, or the process died.
        """
        return await self._threads.run(self.score_blocking, arguments, seconds)

    def score_blocking(self, arguments: dict[str, Any], seconds: float) -> Any:
        """Like `score`, but blocking, for threads."""
        try:
            child = self._free.get_nowait()
        except queue.Empty:
            child = _Child(self._scorer, self._memory_mb)
        whole = False
        try:
            answer = child.ask(arguments, seconds)
            whole = True
            return answer
        except (EtudeError, InfrastructureError):
            whole = True
            raise
        except TimeoutError as error:
            raise InfrastructureError(f"{error}; its process was killed") from error
        except (EOFError, OSError) as error:
            raise InfrastructureError("its process died") from error
        finally:
            if whole:
                self._free.put(child)
            else:
                child.kill()

    def close(self) -> None:
        """Stops the idle processes."""
        with contextlib.suppress(queue.Empty):
            while True:
                self._free.get_nowait().kill()


def serve(descriptor: int) -> None:
    """The child's main loop: loads the scorer, then answers until the pipe closes."""
    pipe: Connection[Any, Any] = Connection(descriptor)
    os.dup2(2, 1)  # a scorer's prints go to standard error, not into the run's output
    scorer: Any = None
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
                    answer = scorer(**question)
                    answer = asyncio.run(_awaited(answer)) if inspect.isawaitable(answer) else answer
                    answer = dict(answer) if hasattr(answer, "keys") else answer
            except (EtudeError, ModuleNotFoundError) as error:
                pipe.send(("user", str(error)))
            except Exception as error:
                pipe.send(("error", describe_error(error)))
            else:
                pipe.send(("result", answer))


async def _awaited(result: Any) -> Any:
    return await result
