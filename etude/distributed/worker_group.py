"""`WorkerGroup`: the controller's handle on all ranks of a worker class.

Invariant: a group has exactly the registered methods of its worker class, and each of them divides the call, runs it on its
ranks and gathers the results as `dispatch.py` says, however the ranks are run. Groups differ only in `_run`. An error of a
rank reaches the caller as the same exception, with a note that names the rank and the method (also logged, for the commands
that print an error as one line).

In one process the ranks run one after another, so a worker must not wait for another rank there.
"""

from __future__ import annotations

import functools
import logging
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any

from etude.distributed.dispatch import Dispatch, Registration, divide, registered_methods
from etude.distributed.worker import Worker
from etude.errors import EtudeError, one_line
from etude.protocol import DataProtoFuture
from etude.registry import did_you_mean

_log = logging.getLogger(__name__)


class WorkerGroup(ABC):
    """`world_size` ranks of `worker_cls`, each registered method of which is a method of the group.

    Raises:
        ValueError: `world_size` is less than 1, or a registered method's name clashes with the group's own.
    """

    def __init__(self, worker_cls: type[Worker], world_size: int) -> None:
        if world_size < 1:
            raise ValueError(f"world_size must be at least 1, is {world_size}")
        self.worker_cls = worker_cls
        self.world_size = world_size
        self._methods = registered_methods(worker_cls)
        for name, registration in self._methods.items():
            if hasattr(type(self), name) or name in vars(self):
                raise ValueError(f"{worker_cls.__name__}.{name} cannot be registered: a group has its own '{name}'")
            setattr(self, name, functools.partial(self._call, name, registration))

    def __getattr__(self, name: str) -> Callable[..., Any]:
        if name.startswith("_"):
            raise AttributeError(name)
        raise self._unknown(name)

    def direct(self, name: str, rank: int = 0) -> Callable[..., Any]:
        """The DIRECT_ROLLOUT_METHOD `name` of one rank, to be called without the controller dividing or gathering.

        Raises:
            AttributeError: no registered method has that name.
            ValueError: the method is registered with another mode, or there is no such rank.
        """
        if name not in self._methods:
            raise self._unknown(name)
        if self._methods[name].dispatch_mode is not Dispatch.DIRECT_ROLLOUT_METHOD:
            raise ValueError(f"'{name}' is not a DIRECT_ROLLOUT_METHOD: call it on the group")
        if not 0 <= rank < self.world_size:
            raise ValueError(f"no rank {rank} in a group of {self.world_size}")
        return lambda *args, **kwargs: self._run(name, [args], [kwargs], [rank])[0].result()

    def close(self) -> None:  # noqa: B027  (a group may have nothing to end)
        """Ends the ranks; no method may be called any more."""

    @abstractmethod
    def _run(
        self,
        method_name: str,
        per_rank_args: Sequence[tuple[Any, ...]],
        per_rank_kwargs: Sequence[dict[str, Any]],
        ranks: Sequence[int],
    ) -> list[Future[Any]]:
        """Starts a method on `ranks`, the i-th with the i-th arguments; one future per rank, in that order.

        A failing rank does not stop the others; its future holds the exception, annotated by `note_rank`.
        """

    def _call(self, name: str, registration: Registration, /, *args: Any, **kwargs: Any) -> Any:
        method = f"{self.worker_cls.__name__}.{name}"
        args = tuple(registration.select(method, value) for value in args)
        kwargs = {key: registration.select(method, value) for key, value in kwargs.items()}
        call = divide(registration, self.world_size, args, kwargs)
        pending = DataProtoFuture(self._run(name, call.args, call.kwargs, range(len(call.args))), call.collect)
        return pending.get() if registration.blocking else pending

    def _unknown(self, name: str) -> AttributeError:
        known, hint = ", ".join(sorted(self._methods)) or "none", did_you_mean(name, self._methods)
        return AttributeError(
            f"{self.worker_cls.__name__} has no registered method '{name}'{hint} (there are: {known})"
        )


class InProcessWorkerGroup(WorkerGroup):
    """A group whose ranks live in this process and run one after another, each call as soon as it is made.

    `args` and `kwargs` go to the constructor of every worker, together with `rank` and `world_size`.
    """

    def __init__(self, worker_cls: type[Worker], world_size: int, *args: Any, **kwargs: Any) -> None:
        super().__init__(worker_cls, world_size)
        self._workers = [worker_cls(*args, rank=rank, world_size=world_size, **kwargs) for rank in range(world_size)]

    def close(self) -> None:
        """Ends the workers and drops them."""
        for worker in self._workers:
            worker.close()
        self._workers.clear()

    def _run(
        self,
        method_name: str,
        per_rank_args: Sequence[tuple[Any, ...]],
        per_rank_kwargs: Sequence[dict[str, Any]],
        ranks: Sequence[int],
    ) -> list[Future[Any]]:
        futures = []
        for rank, args, kwargs in zip(ranks, per_rank_args, per_rank_kwargs):
            future: Future[Any] = Future()
            try:
                future.set_result(getattr(self._workers[rank], method_name)(*args, **kwargs))
            except Exception as error:
                note_rank(error, rank, self.world_size, f"{self.worker_cls.__name__}.{method_name}")
                future.set_exception(error)
            futures.append(future)
        return futures


def note_rank(error: BaseException, rank: int, world_size: int, method: str) -> None:
    """Adds a note to `error` with the rank and method that raised it, and logs it.

    A one-line error that the user sees anyway is logged only if the rank adds information.
    """
    note = f"raised on rank {rank} of {world_size} in {method}"
    error.__notes__ = [*getattr(error, "__notes__", []), note]  # what add_note does, on Python 3.10 too
    if world_size > 1 or not isinstance(error, EtudeError):
        _log.error("%s: %s: %s", note, type(error).__name__, one_line(error))
