"""`ClusterLimiter`: one limit for a whole Ray cluster, kept by a detached actor whose permits expire unless renewed.

A permit has a *ticket*, a name that its process chooses once. `acquire`, `renew` and `release` name tickets, so that each
may be sent twice, late or not at all: a lost `acquire` is sent again and finds its place, a lost `release` expires.

Invariant: in every process, one name means one limit: opening it with another limit is an error. A permit that its process
has not renewed for `lease_seconds`, because it was killed or stopped, goes to the next waiter, and its ticket means nothing
from then on. A process takes a permit only while its lease is certain to be valid: it counts `lease_seconds` from when it
*sent* the last answered message, the actor from when it received it. While the actor cannot be reached, waiters wait for
`patience` seconds and then fail with `InfrastructureError`. Ray is imported when the first limiter is opened.
"""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import importlib.util
import itertools
import logging
import sys
import threading
import time
import uuid
import warnings
from dataclasses import dataclass
from typing import Any

from etude.errors import ConfigError, InfrastructureError, MissingExtraError, one_line
from etude.limits.local import Limit, Limiter, LocalLimiter, Permit, local_limiter, refuse_conflict
from etude.timeouts import background_loop

LEASE_SECONDS = 15.0
"""Seconds for which a permit is valid unless it is renewed: longer than any stall of a healthy process."""
NAMESPACE = "etude-limits"
_START_SECONDS = 60.0  # an actor starts within seconds; a busy cluster may take long to place it
_FIRST_PAUSE, _MAX_PAUSE = 0.05, 2.0  # seconds between attempts to reach the actor

_log = logging.getLogger(__name__)
_open: dict[str, ClusterLimiter] = {}
_open_lock = threading.Lock()


@dataclass(frozen=True)
class LimiterInfo:
    """The limit and the state of a cluster-wide limiter."""

    limit: Limit
    lease_seconds: float
    held: int
    waiting: int


class LimitActor:
    """Keeps the permits of a cluster in a `LocalLimiter`, by ticket. One that replaces a lost actor is `settling`: for
    `lease_seconds` it grants nothing, and takes over the permits that processes renew."""

    def __init__(self, limit: Limit, lease_seconds: float, settling: bool = False) -> None:
        self._limiter = LocalLimiter(limit)
        self._lease_seconds = lease_seconds
        self._opens_at = time.monotonic() + (lease_seconds if settling else 0.0)
        self._permits: dict[str, Permit] = {}
        self._expiry: dict[str, asyncio.TimerHandle] = {}

    async def info(self) -> LimiterInfo:
        """Returns the limiter's current state."""
        return LimiterInfo(self._limiter.limit, self._lease_seconds, self._limiter.held, self._limiter.waiting)

    async def acquire(self, ticket: str, seconds: float) -> bool:
        """Queues for a permit under `ticket`, or keeps its place; returns whether it is granted within `seconds`."""
        closed = self._opens_at - time.monotonic()
        if closed > 0:
            await asyncio.sleep(min(closed, seconds))
            if closed > seconds:
                return False
        permit = self._permits.get(ticket)
        if permit is None:
            permit = self._permits[ticket] = self._limiter.enter()
        self._renew(ticket)
        if not permit.outcome.done():
            await asyncio.wait({asyncio.wrap_future(permit.outcome)}, timeout=seconds)
        if not permit.outcome.done() or self._permits.get(ticket) is not permit:
            return False
        if self._limiter.limit.max_concurrent is None:
            self._drop(ticket)  # a pure rate limit holds no permits
        else:
            self._renew(ticket)
        return True

    async def renew(self, tickets: dict[str, bool]) -> list[str]:
        """Extends the leases of `tickets`, {ticket: whether the process holds its permit}; returns those of held permits
        that have expired."""
        expired = []
        for ticket, held in tickets.items():
            if held and ticket not in self._permits and time.monotonic() < self._opens_at:
                self._permits[ticket] = self._limiter.adopt()
            if ticket in self._permits:
                self._renew(ticket)
            elif held:
                expired.append(ticket)
        return expired

    async def release(self, tickets: list[str]) -> None:
        """Returns permits and gives up places; does nothing for tickets that have expired."""
        for ticket in tickets:
            self._drop(ticket)

    def _renew(self, ticket: str) -> None:
        if ticket in self._expiry:
            self._expiry[ticket].cancel()
        loop = asyncio.get_running_loop()
        self._expiry[ticket] = loop.call_later(self._lease_seconds, self._drop, ticket)

    def _drop(self, ticket: str) -> None:
        permit = self._permits.pop(ticket, None)
        if permit is not None:
            self._expiry.pop(ticket).cancel()
            permit.release()


class _RestartingActor(LimitActor):
    """The actor as started by Ray; after a restart (the loss of its node) it takes over the permits that are out."""

    def __init__(self, limit: Limit, lease_seconds: float, settling: bool) -> None:
        import ray

        with warnings.catch_warnings():  # Ray uses a name here that it deprecated itself
            warnings.simplefilter("ignore")
            restarted = ray.get_runtime_context().was_current_actor_reconstructed
        super().__init__(limit, lease_seconds, settling or restarted)


class ClusterLimiter(Limiter):
    """This process's client of the limiter `name`; opened by `cluster_limiter`. All clients of a process share one thread,
    which alone talks to the actors."""

    def __init__(self, name: str, limit: Limit, lease_seconds: float, patience: float) -> None:
        require_ray("a cluster-wide limit")
        import ray

        if not ray.is_initialized():
            raise ConfigError(f"the cluster-wide limiter '{name}' needs a Ray cluster: call ray.init() first")
        self.name = name
        self.limit = limit
        self.lease_seconds = lease_seconds
        self._patience = patience
        self._ray = ray
        self._job = ray.get_runtime_context().get_job_id()
        self._process, self._numbers = uuid.uuid4().hex, itertools.count()
        self._tickets: dict[str, Permit] = {}  # waiting and held
        self._closed = False
        self._reachable = True
        self._renewed_at = float("-inf")  # when the last answered renewal was sent
        self._renewal: asyncio.Task[None] | None = None
        self._reconnecting = asyncio.Lock()
        self._loop = background_loop("etude-limits")
        self._actor = self._find(settling=False)
        info = self.info()
        _refuse_another(name, info.limit, info.lease_seconds, limit, lease_seconds)

    @property
    def held(self) -> int:
        """The number of permits in use in this process; 0 if only the rate is limited."""
        return sum(permit.outcome.done() for permit in list(self._tickets.values()))

    @property
    def waiting(self) -> int:
        """The number of tasks and threads of this process that are waiting."""
        return sum(not permit.outcome.done() for permit in list(self._tickets.values()))

    def info(self) -> LimiterInfo:
        """Returns the limiter's state in the whole cluster.

        Raises:
            InfrastructureError: the actor does not answer.
        """
        give_up_at = time.monotonic() + _START_SECONDS
        while True:
            try:  # not by `_call`: while Ray unpickles a limiter, it completes no future
                info: LimiterInfo = self._ray.get(self._actor.info.remote(), timeout=_START_SECONDS)
                return info
            except self._ray.exceptions.RayError as error:
                restarting = isinstance(error, self._ray.exceptions.ActorUnavailableError)
                if not restarting or time.monotonic() > give_up_at:
                    raise InfrastructureError(
                        f"the limiter '{self.name}' does not answer: {one_line(error)}"
                    ) from error
            time.sleep(0.1)

    def is_current(self) -> bool:
        """Whether this process is still connected to the cluster that the limiter was opened in."""
        return self._ray.is_initialized() and bool(self._ray.get_runtime_context().get_job_id() == self._job)

    def enter(self, loop: asyncio.AbstractEventLoop | None = None) -> Permit:
        if self._closed:
            raise InfrastructureError("the limiter is gone: it was closed")
        permit = Permit(self, loop, f"{self._process}.{next(self._numbers)}")
        self._tickets[permit.ticket] = permit
        asyncio.run_coroutine_threadsafe(self._obtain(permit), self._loop)
        return permit

    def close(self, seconds: float = 2.0) -> None:
        """Returns this process's permits if the actor can be reached within `seconds`; its waiters fail."""
        with _open_lock:
            if _open.get(self.name) is self:
                del _open[self.name]
        self._closed = True
        closing = asyncio.run_coroutine_threadsafe(self._close(), self._loop)
        with contextlib.suppress(Exception):
            closing.result(seconds)
        closing.cancel()

    def __reduce__(self) -> tuple[Any, ...]:
        """Unpickles in another process as that process's client of the same limiter."""
        return cluster_limiter, (self.name, self.limit, self.lease_seconds)

    def _withdraw(self, permit: Permit) -> None:
        if self._tickets.pop(permit.ticket, None) is not None:
            # From the thread that sends `acquire`, so that it does not overtake it.
            self._loop.call_soon_threadsafe(self._post_release, permit.ticket)

    def _post_release(self, ticket: str) -> None:
        """Sends the message without waiting for its arrival: if it is lost, the lease expires."""
        if self.is_current():
            self._actor.release.remote([ticket])

    async def _close(self) -> None:
        permits = list(self._tickets.values())
        self._tickets.clear()
        for permit in permits:
            if not permit.outcome.done():
                permit.outcome.set_result(InfrastructureError("the limiter is gone: it was closed"))
        if self.is_current():
            release = self._actor.release.remote([permit.ticket for permit in permits])
            await asyncio.wrap_future(release.future())

    async def _obtain(self, permit: Permit) -> None:
        """Asks for the permit until it is granted or withdrawn, or the actor stays out of reach."""
        if self._renewal is None:
            self._renewal = asyncio.create_task(self._renew())
        error: Exception | None = None
        try:
            while permit.ticket in self._tickets:
                sent_at, seconds = time.monotonic(), self.lease_seconds
                granted = await self._call("acquire", permit.ticket, seconds, seconds=seconds)
                if granted and time.monotonic() < max(sent_at, self._renewed_at) + self.lease_seconds:
                    break
        except InfrastructureError as gone:
            error = gone
        if error is not None or self.limit.max_concurrent is None:
            self._tickets.pop(permit.ticket, None)
        elif permit.is_abandoned:
            permit.release()
        if not permit.outcome.done():
            permit.outcome.set_result(error)

    async def _renew(self) -> None:
        """Renews the leases of what this process holds and waits for; ends when that is nothing."""
        try:
            while self._tickets:
                sent_at = time.monotonic()
                tickets = {ticket: permit.outcome.done() for ticket, permit in list(self._tickets.items())}
                with contextlib.suppress(InfrastructureError):  # waiters report it
                    expired = await self._call("renew", tickets)
                    self._renewed_at = sent_at
                    count = sum(self._tickets.pop(ticket, None) is not None for ticket in expired)
                    if count:
                        _log.warning(
                            "the limiter '%s': %d permits in use expired, as this process sent nothing for %g s",
                            self.name,
                            count,
                            self.lease_seconds,
                        )
                await asyncio.sleep(self.lease_seconds / 3)
        finally:
            self._renewal = None

    async def _call(self, method: str, *arguments: Any, seconds: float = 0.0) -> Any:
        """Calls the actor, which may take `seconds`; again and again while it cannot be reached.

        Raises:
            InfrastructureError: it could not be reached for `patience` seconds.
        """
        lost_at, pause = None, _FIRST_PAUSE
        while True:
            actor = self._actor
            try:
                if not self.is_current():  # a call would start a new Ray cluster, and block the loop meanwhile
                    raise InfrastructureError("this process has left the Ray cluster")
                answer = asyncio.wrap_future(getattr(actor, method).remote(*arguments).future())
                reply = await asyncio.wait_for(answer, seconds + self.lease_seconds)
                self._reachable = True
                return reply
            except Exception as error:  # any error means that the actor was not reached
                now, reason = time.monotonic(), f"{type(error).__name__}: {one_line(error)}"
                if self._reachable:
                    self._reachable = False
                    _log.warning("the limiter '%s' cannot be reached: %s", self.name, reason)
                lost_at = now if lost_at is None else lost_at
                if now - lost_at >= self._patience:
                    text = f"the limiter is gone: it could not be reached for {self._patience:g} s: {reason}"
                    raise InfrastructureError(text) from error
            await asyncio.sleep(pause)
            pause = min(2 * pause, _MAX_PAUSE)
            async with self._reconnecting:
                if self._actor is actor and self.is_current():
                    with contextlib.suppress(Exception):  # if it is still out of reach, the next call fails
                        self._actor = await asyncio.wait_for(asyncio.to_thread(self._find, True), _START_SECONDS)

    def _find(self, settling: bool) -> Any:
        """Gets or creates the actor; a new one is `settling` if it replaces one that was lost."""
        options = {
            "name": f"limit:{self.name}",
            "namespace": NAMESPACE,
            "lifetime": "detached",
            "get_if_exists": True,
            "num_cpus": 0,
            "max_restarts": -1,
            "max_concurrency": 100_000,  # every waiter keeps one call open
        }
        actor = self._ray.remote(_RestartingActor).options(**options)
        return actor.remote(self.limit, self.lease_seconds, settling)


def cluster_limiter(
    name: str, limit: Limit, lease_seconds: float = LEASE_SECONDS, patience: float = 30.0
) -> ClusterLimiter:
    """Returns the limiter `name` of the Ray cluster that this process is connected to, and creates it if needed.

    A permit whose process has not renewed it for `lease_seconds` is returned. `patience` is how many seconds waiters of this
    process wait while the actor cannot be reached.

    Raises:
        MissingExtraError: Ray is not installed.
        ConfigError: this process is not connected to Ray, or the name is taken by another limit.
        InfrastructureError: the actor did not start.
    """
    if not lease_seconds > 0:
        raise ConfigError(f"lease_seconds must be above 0, not {lease_seconds}")
    with _open_lock:
        atexit.unregister(_leave)
        atexit.register(_leave)  # registered anew, to run before Ray's own hook, which disconnects
        limiter = _open.get(name)
        left = limiter if limiter is not None and not limiter.is_current() else None
        if limiter is None or left is not None:
            limiter = _open[name] = ClusterLimiter(name, limit, lease_seconds, patience)
    if left is not None:
        left.close()
    _refuse_another(name, limiter.limit, limiter.lease_seconds, limit, lease_seconds)
    return limiter


def open_limiter(name: str, limit: Limit) -> Limiter:
    """Returns the limiter `name` of the Ray cluster that this process is connected to, or of this process if it is not
    connected. Open it again when `is_current` is False.

    Raises:
        ConfigError: the name is taken by another limit.
        InfrastructureError: the limiter's actor did not start.
    """
    return cluster_limiter(name, limit) if is_connected() else local_limiter(name, limit)


def is_connected() -> bool:
    """Whether this process is connected to a Ray cluster; does not import Ray."""
    ray = sys.modules.get("ray")
    return ray is not None and bool(ray.is_initialized())


def require_ray(feature: str) -> None:
    """Raises MissingExtraError, which gives the pip command, if Ray is not installed; does not import Ray."""
    if importlib.util.find_spec("ray") is None:
        raise MissingExtraError(feature, "ray")


def _leave() -> None:
    """Returns the permits at once when the process exits normally."""
    if is_connected():
        for limiter in list(_open.values()):
            limiter.close()


def _refuse_another(name: str, held: Limit, held_seconds: float, asked: Limit, asked_seconds: float) -> None:
    refuse_conflict(name, held, asked)
    if held_seconds != asked_seconds:
        raise ConfigError(f"the limiter '{name}' has leases of {held_seconds:g} s already, not {asked_seconds:g} s")
