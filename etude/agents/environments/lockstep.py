"""`LockStep`: synchronous environment steps: all trajectories in flight step together, in one batch.

As in RL-Factory's `generate_sequences_loop`, all trajectories generate, the environment steps once with all responses, and
all generate again. `rollout.mode=sync` selects this, although trajectories then wait for each other.

Invariant: a batch is stepped once every trajectory that has joined and not left has submitted its turn; each gets its own
entry of the result, or the exception that the step raised.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from etude.timeouts import set_outcome

Steps = Callable[[Sequence[Any]], Awaitable[Sequence[Any]]]


class LockStep:
    """A barrier for the trajectories of one event loop at a time."""

    def __init__(self) -> None:
        self._members = 0
        self._waiting: list[tuple[Any, asyncio.Future[Any]]] = []
        self._steps: Steps | None = None
        self._running: set[asyncio.Task[None]] = set()

    def join(self) -> None:
        """Adds a trajectory; from now on, a step waits for its turn."""
        self._members += 1

    def leave(self) -> None:
        """Removes a trajectory; steps the others if they were only waiting for it."""
        self._members -= 1
        self._go_if_complete()

    async def step(self, turn: Any, steps: Steps) -> Any:
        """Submits a turn and waits for its entry of `await steps(all turns)`."""
        future: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        entry = (turn, future)
        self._waiting.append(entry)
        self._steps = steps
        self._go_if_complete()
        try:
            return await future
        finally:
            if entry in self._waiting:  # cancelled before the batch was complete
                self._waiting.remove(entry)

    def _go_if_complete(self) -> None:
        if not self._waiting or len(self._waiting) < self._members or self._steps is None:
            return
        batch, self._waiting = self._waiting, []
        task = asyncio.ensure_future(self._run(batch, self._steps))
        self._running.add(task)
        task.add_done_callback(self._running.discard)

    async def _run(self, batch: list[tuple[Any, asyncio.Future[Any]]], steps: Steps) -> None:
        try:
            results = await steps([turn for turn, _ in batch])
        except BaseException as error:
            for _, future in batch:
                set_outcome(future, error if isinstance(error, Exception) else RuntimeError(repr(error)))
            if not isinstance(error, Exception):
                raise
            return
        for (_, future), result in zip(batch, results):
            set_outcome(future, result)
