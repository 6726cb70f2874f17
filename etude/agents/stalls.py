"""`StallWatch`: watchdog that detects when rollouts make no progress, logs what they wait for, and triggers a retry.

Progress is the end of a generation, tool call, scoring or trajectory, or a step of an engine that counts its steps. After
`seconds` without progress, one warning names what the trajectories wait for; then each attempt and scoring in flight is
cancelled with a `Stalled` error. The manager retries it once, regardless of `infrastructure_retries`, and drops it the
second time; both are counted (`rollout/stalled`).

Invariant: a watch acts only while trajectories are in flight and not suspended, at most once per `seconds`. A thread checks;
tasks are cancelled in the event loop.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections import defaultdict
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from etude.errors import Stalled

if TYPE_CHECKING:
    from etude.agents.manager import AgentLoopManager

logger = logging.getLogger(__name__)

_CHECKS = 10  # per `seconds`
_LISTED = 5  # maximum kinds of waits in a report


class StallWatch:
    """Watches `manager`, whose event loop is `loop`, from a separate thread until `close`."""

    def __init__(self, manager: AgentLoopManager, loop: asyncio.AbstractEventLoop, seconds: float) -> None:
        self._manager, self._loop, self._seconds = manager, loop, seconds
        self._closed, self._suspended = threading.Event(), 0
        self._thread = threading.Thread(target=self._watch, name="etude-stalls", daemon=True)
        self._thread.start()

    @contextmanager
    def suspended(self) -> Iterator[None]:
        """Disables stall detection during the block, for callers that pause the engine themselves."""
        self._suspended += 1
        try:
            yield
        finally:
            self._suspended -= 1

    def close(self) -> None:
        """Stops the thread."""
        self._closed.set()
        self._thread.join()

    def _watch(self) -> None:
        seen, since = self._state(), time.monotonic()
        while not self._closed.wait(self._seconds / _CHECKS):
            state, now = self._state(), time.monotonic()
            if state != seen or self._suspended or not self._manager.open_spans:
                seen, since = state, now
            elif now - since >= self._seconds:
                since = now
                logger.warning("%s", self._report(now))
                error = Stalled(f"nothing had progressed for {self._seconds:g} s (trainer.stall_timeout)")
                self._loop.call_soon_threadsafe(self._manager.cancel_stalled, error)

    def _state(self) -> tuple[int, ...]:
        spans = list(self._manager.open_spans.values())
        return (*self._manager.progress, self._manager.steps_done(), len(spans), sum(each.ended for each in spans))

    def _report(self, now: float) -> str:
        """Builds the warning: the longest wait of each kind, sorted by length."""
        waits: dict[str, list[tuple[float, str]]] = defaultdict(list)
        for name, spans in list(self._manager.open_spans.items()):
            for what, since in spans.open() or [("its agent's own code", spans.began)]:
                waits[what].append((now - since, name))
        done, total = self._manager.progress
        kinds = sorted(waits.items(), key=lambda kind: -max(kind[1])[0])
        lines = [_line(what, found) for what, found in kinds[:_LISTED]]
        lines += [f"{len(kinds) - _LISTED} other kinds of waits"] if len(kinds) > _LISTED else []
        if (queued := total - done - len(self._manager.open_spans)) > 0:
            lines.append(f"{queued} wait for a place (rollout.max_concurrent_trajectories)")
        lines += [] if self._answers() else ["the event loop does not answer: something blocks it"]
        return f"nothing has progressed for {self._seconds:g} s: {'; '.join(lines)}; all of these are tried again, once"

    def _answers(self) -> bool:
        answered = threading.Event()
        self._loop.call_soon_threadsafe(answered.set)
        return answered.wait(min(1.0, self._seconds))


def _line(what: str, waits: Iterable[tuple[float, str]]) -> str:
    (seconds, name), *others = sorted(waits, reverse=True)
    return f"trajectory {name} has waited {seconds:.0f} s for {what}" + (f", {len(others)} more" if others else "")
