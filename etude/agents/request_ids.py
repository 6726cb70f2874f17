"""`RequestIds`: the names that one trajectory's requests have at the engine, one or several at a time.

The engine knows a trajectory by one id and serves one request a name; it keeps that id's keys and values from turn to turn,
and in its deterministic mode waits for its next request. A request made while another is under way gets a name of the
moment, which is closed with its answer.

Invariant: no name has two requests under way. Nobody waits for a trajectory that waits itself: while only names of the
moment are under way the trajectory's own is closed, and it is open again when none is.
"""

from __future__ import annotations

from etude.inference import Engine


class RequestIds:
    """`own` is the trajectory's id, which somebody else opens before its first request and closes after its last."""

    def __init__(self, engine: Engine, own: str) -> None:
        self._engine, self.own = engine, own
        self._under_way: set[str] = set()
        self._made = 0
        self._own_is_open = True
        self._ended = False

    def end(self) -> None:
        """The own id is not opened again."""
        self._ended = True

    def enter(self) -> str:
        """A name for one request, which ends with `leave`."""
        if not self._under_way:
            name = self.own
        else:
            self._made += 1
            name = f"{self.own}#{self._made}"
            self._engine.open([name])
        self._under_way.add(name)
        return name

    def leave(self, name: str) -> None:
        """The request of that name has ended, well or not."""
        self._under_way.discard(name)
        if name != self.own:
            self._engine.close(name)
        elif self._under_way:
            self._engine.close(name)
            self._own_is_open = False
        if not self._under_way and not self._own_is_open and not self._ended:
            self._engine.open([self.own])
            self._own_is_open = True
