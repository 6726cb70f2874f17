"""`LoopWatch`: detects tools that block the event loop, and thus every other trajectory of the process.

Invariant: the watch never slows a call down: a thread pings the loop twice a second, only while sessions are open, and
inspects the loop's stack only if there is no reply. A tool is blamed only if a single step of its code lasts
`STALL_SECONDS`; a loop that is merely busy blames no tool. The watch warns once per tool and stops nothing.

Not detected: tasks that a tool starts, and C code that holds the GIL.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import sys
import sysconfig
import threading
import time
import weakref
from types import FrameType
from typing import ClassVar, NamedTuple

from etude.bounded import called
from etude.tools.base import BaseTool

STALL_SECONDS = 2.0
TICK_SECONDS = 0.5

_LIBRARIES = tuple({sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")})

logger = logging.getLogger(__name__)


class _Step(NamedTuple):
    """A call of a tool's method on the loop's stack."""

    frame: int
    """Identity of the frame in which the call began."""
    tool: BaseTool
    method: str
    place: str


class LoopWatch:
    """Watches one event loop; created by `LoopWatch.of_running_loop`."""

    _lock = threading.Lock()
    _watches: ClassVar[dict[asyncio.AbstractEventLoop, LoopWatch]] = {}
    _warned: ClassVar[set[str]] = set()

    @classmethod
    def of_running_loop(cls) -> LoopWatch:
        """Returns the watch of the running loop; call its `close` once for each time it was obtained."""
        loop = asyncio.get_running_loop()
        with cls._lock:
            watch = cls._watches.get(loop)
            if watch is None:
                watch = cls._watches[loop] = cls(loop)
            watch._users += 1
        return watch

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._loop_thread = threading.get_ident()
        self._users = 0
        self._responded = True
        self._stalls: weakref.WeakKeyDictionary[asyncio.Task[object], int] = weakref.WeakKeyDictionary()
        threading.Thread(target=self._run, name="etude-loop-watch", daemon=True).start()

    def close(self, *_: object) -> None:
        """Removes one user; also usable as a done callback."""
        with self._lock:
            self._users -= 1

    def stalls(self, task: asyncio.Task[object]) -> int:
        """Returns how often `task`, which has ended, blocked the loop; the count is removed."""
        return self._stalls.pop(task, 0) if self._stalls else 0

    def _run(self) -> None:
        while True:
            with self._lock:
                if self._loop.is_closed() or not self._users:
                    del self._watches[self._loop]
                    return
            if self._responded:
                self._responded = False
                with contextlib.suppress(RuntimeError):  # closed just now
                    self._loop.call_soon_threadsafe(self._pong)
            time.sleep(TICK_SECONDS)
            self._inspect()

    def _pong(self) -> None:
        self._responded = True

    def _inspect(self) -> None:
        """Polls the stack until the loop responds, and reports a single step of a tool that blocks it."""
        suspect, since, reported = None, 0.0, False
        while not self._responded and self._loop.is_running():
            step, task = self._step(), asyncio.current_task(self._loop)
            if step is None or step.frame != suspect:
                suspect, since, reported = step and step.frame, time.monotonic(), False
            elif not reported and time.monotonic() - since >= STALL_SECONDS:
                reported = True
                if task is not None:
                    self._stalls[task] = self._stalls.get(task, 0) + 1
                self._warn(step)
            time.sleep(TICK_SECONDS)

    def _step(self) -> _Step | None:
        """Returns the tool call that the loop's thread is executing, if any."""
        frame: FrameType | None = sys._current_frames().get(self._loop_thread)
        innermost, place = frame, ""
        while frame is not None:
            code = frame.f_code
            if code is called.__code__:
                method = frame.f_locals.get("function")
                tool = getattr(method, "__self__", None)
                if isinstance(tool, BaseTool) and innermost is not None:
                    return _Step(id(frame), tool, getattr(method, "__name__", "?"), place or _place(innermost))
            if not place and not code.co_filename.startswith((*_LIBRARIES, "<frozen")):
                place = _place(frame)
            frame = frame.f_back
        return None

    def _warn(self, step: _Step) -> None:
        if step.tool.name in self._warned:
            return
        self._warned.add(step.tool.name)
        logger.warning(
            "tool '%s': its %s has blocked the event loop for %g s, and every trajectory of this process waits (%s); "
            "write it as a plain 'def' function, which runs in a thread, or call what blocks by asyncio.to_thread",
            step.tool.name,
            step.method,
            STALL_SECONDS,
            step.place,
        )


def _place(frame: FrameType) -> str:
    return f"{frame.f_code.co_filename}:{frame.f_lineno} in {frame.f_code.co_name}"
