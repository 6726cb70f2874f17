"""`ClusterLimiter`: one limit for a whole Ray cluster, kept by a detached actor whose permits expire unless renewed.

A permit has a *ticket*, a name that its process chooses once. A message, `exchange`, names tickets to ask for, renew and
release, so that it may be sent twice, late or not at all: a lost ask is sent again and finds its place, a lost release
expires. A process has one message under way, and one that waits at the actor for a permit until the next arrives; what its
tasks and threads ask for and release meanwhile gathers for the next.

Invariant: in every process, one name means one limit: opening it with another limit is an error. A permit that its process
has not renewed for `lease_seconds`, because it was killed or stopped, goes to the next waiter, and its ticket means nothing
from then on. A process takes a permit only while its lease is certain to be valid: it counts `lease_seconds` from when it
*sent* the message whose answer grants it, the actor from that answer. While the actor cannot be reached, waiters wait for
`patience` seconds and then fail with `InfrastructureError`. Ray is imported when the first limiter is opened.
"""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import functools
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
_FIND_SECONDS = 10.0  # to get or make an actor waits for no process of its
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
        self._limiter = LocalLimiter(limit, paused=settling)
        self._lease_seconds = lease_seconds
        self._opens_at = time.monotonic() + (lease_seconds if settling else 0.0)
        self._permits: dict[str, Permit] = {}
        self._expiry: dict[str, asyncio.TimerHandle] = {}
        self._untold: dict[str, str] = {}  # tickets of permits that were granted since, and their processes
        self._parked: dict[str, asyncio.Future[None]] = {}  # of each process, what ends the wait of its last message

    async def info(self) -> LimiterInfo:
        """Returns the limiter's current state."""
        return LimiterInfo(self._limiter.limit, self._lease_seconds, self._limiter.held, self._limiter.waiting)

    async def exchange(
        self, process: str, asks: list[str], releases: list[str], renewals: dict[str, bool], seconds: float
    ) -> tuple[list[str], list[str]]:
        """Renews and releases tickets of `process`, and queues for those that it asks for, or keeps their places. Waits for
        a permit, up to `seconds` and no longer than until the next message of `process`. Returns the tickets granted
        to it since its last message, and the held ones that have expired."""
        loop = asyncio.get_running_loop()
        if self._limiter.paused:
            loop.call_later(self._opens_at - time.monotonic(), self._limiter.resume)
        expired = await self.renew(renewals)
        await self.release(releases)
        for ticket in asks:
            new = ticket not in self._permits
            permit = self._permits[ticket] = self._limiter.enter() if new else self._permits[ticket]
            self._renew(ticket)
            if permit.outcome.done():
                self._tell(process, ticket)
            elif new:
                tell = functools.partial(loop.call_soon_threadsafe, self._tell, process, ticket)
                permit.outcome.add_done_callback(tell)
        self._unpark(process)
        if seconds > 0 and process not in self._untold.values():
            news = self._parked[process] = loop.create_future()
            await asyncio.wait({news}, timeout=seconds)
            if self._parked.get(process) is news:
                del self._parked[process]
        granted = [ticket for ticket, owner in self._untold.items() if owner == process]
        for ticket in granted:
            del self._untold[ticket]
            if self._limiter.limit.max_concurrent is None:
                self._drop(ticket)  # a pure rate limit holds no permits
            else:
                self._renew(ticket)
        return granted, expired

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

    def _tell(self, process: str, ticket: str, _: object = None) -> None:
        """Has the next answer to `process` say that its ticket is granted."""
        if ticket in self._permits:
            self._untold[ticket] = process
            self._unpark(process)

    def _unpark(self, process: str) -> None:
        news = self._parked.pop(process, None)
        if news is not None:
            news.set_result(None)

    def _drop(self, ticket: str) -> None:
        self._untold.pop(ticket, None)
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
        self._asks: list[str] = []  # to be sent with the next message, as are `_releases`; used by `_loop` alone
        self._releases: list[str] = []
        self._queued: dict[str, None] = {}  # tickets that wait at the actor, by a message that was answered
        self._messages: set[asyncio.Task[None]] = set()  # under way
        self._renews = self._ticking = False  # whether the next message renews, and whether a timer is set for that
        self._closed = False
        self._reachable = True
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
        self._loop.call_soon_threadsafe(self._post, self._asks, permit.ticket)
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
            # From the thread that sends what was asked, so that it does not overtake it.
            self._loop.call_soon_threadsafe(self._post, self._releases, permit.ticket)

    async def _close(self) -> None:
        permits = list(self._tickets.values())
        self._tickets.clear()
        for permit in permits:
            if not permit.outcome.done():
                permit.outcome.set_result(InfrastructureError("the limiter is gone: it was closed"))
        if self.is_current():
            release = self._actor.release.remote([permit.ticket for permit in permits])
            await asyncio.wrap_future(release.future())

    def _post(self, box: list[str], ticket: str) -> None:
        if not self._asks and not self._releases:
            self._loop.call_soon(self._flush)  # with what others post at this moment
        box.append(ticket)

    def _tick(self) -> None:
        self._ticking, self._renews = False, bool(self._tickets)
        self._flush()

    def _flush(self) -> None:
        """Sends what has gathered; one message may wait at the actor meanwhile, and is answered when the next arrives."""
        if self._tickets and not self._ticking:
            self._ticking = True
            self._loop.call_later(self.lease_seconds / 3, self._tick)
        if len(self._messages) > 1 and self._reachable:
            return  # `_end` sends it
        if self._renews:  # what the actor no longer knows, or granted in an answer that was lost, is asked for again
            self._asks[:0] = self._queued
            self._queued.clear()
        if self._asks or self._releases or self._renews or (self._queued and not self._messages):
            message = self._loop.create_task(self._exchange([*self._asks], [*self._releases], self._renews))
            self._asks.clear()
            self._releases.clear()
            self._renews = False
            self._messages.add(message)
            message.add_done_callback(self._end)

    def _end(self, message: asyncio.Task[None]) -> None:
        self._messages.discard(message)
        self._flush()

    async def _exchange(self, asks: list[str], releases: list[str], renews: bool) -> None:
        """Sends one message, again and again while the actor cannot be reached for up to `patience` seconds, and tells the
        waiters what came of it."""
        lost_at, pause = None, _FIRST_PAUSE
        while True:
            actor, sent_at = self._actor, time.monotonic()
            asks = [ticket for ticket in asks if self._waits(ticket)]
            tickets = list(self._tickets.items())
            renewals = {ticket: permit.outcome.done() for ticket, permit in tickets} if renews else {}
            seconds = self.lease_seconds if any(not permit.outcome.done() for _, permit in reversed(tickets)) else 0.0
            try:
                if not self.is_current():  # a call would start a new Ray cluster, and block the loop meanwhile
                    raise InfrastructureError("this process has left the Ray cluster")
                reply = actor.exchange.remote(self._process, asks, releases, renewals, seconds)
                answer = asyncio.wrap_future(reply.future())
                granted, expired = await asyncio.wait_for(answer, seconds + self.lease_seconds)
                break
            except Exception as error:  # any error means that the actor was not reached
                asks, renews = [*self._queued, *asks], True  # it may not know them any more
                self._queued.clear()
                if not asks and not self._tickets:
                    return  # what it was to release expires
                now, reason = time.monotonic(), f"{type(error).__name__}: {one_line(error)}"
                if self._reachable:
                    self._reachable = False
                    _log.warning("the limiter '%s' cannot be reached: %s", self.name, reason)
                    self._flush()
                lost_at = now if lost_at is None else lost_at
                if now - lost_at >= self._patience:
                    text = f"the limiter is gone: it could not be reached for {self._patience:g} s: {reason}"
                    for ticket in asks:
                        gone = InfrastructureError(text)
                        gone.__cause__ = error
                        self._settle(ticket, gone)
                    return
            await asyncio.sleep(pause)
            pause = min(2 * pause, _MAX_PAUSE)
            async with self._reconnecting:
                if self._actor is actor and self.is_current():
                    with contextlib.suppress(Exception):  # if it is still out of reach, the next call fails
                        self._actor = await asyncio.wait_for(asyncio.to_thread(self._find, True), _FIND_SECONDS)
        self._reachable = True
        self._queued.update(dict.fromkeys(filter(self._waits, asks)))
        valid = time.monotonic() < sent_at + self.lease_seconds
        for ticket in granted:
            self._queued.pop(ticket, None)
            if valid:
                self._settle(ticket)
            elif self._waits(ticket):
                self._asks.append(ticket)
        count = sum(self._tickets.pop(ticket, None) is not None for ticket in expired)
        if count:
            text = "the limiter '%s': %d permits in use expired, as this process sent nothing for %g s"
            _log.warning(text, self.name, count, self.lease_seconds)

    def _waits(self, ticket: str) -> bool:
        permit = self._tickets.get(ticket)
        return permit is not None and not permit.outcome.done()

    def _settle(self, ticket: str, error: Exception | None = None) -> None:
        """Tells the waiter that the permit is granted, or why it never will be."""
        permit = self._tickets.get(ticket)
        if permit is None or permit.outcome.done():
            return
        if error is not None or self.limit.max_concurrent is None:
            self._tickets.pop(ticket, None)
        elif permit.is_abandoned:
            permit.release()
        permit.outcome.set_result(error)

    def _find(self, settling: bool) -> Any:
        """Gets or creates the actor; a new one is `settling` if it replaces one that was lost."""
        options = {
            "name": f"limit:{self.name}",
            "namespace": NAMESPACE,
            "lifetime": "detached",
            "get_if_exists": True,
            "num_cpus": 0,
            "max_restarts": -1,
            "max_concurrency": 100_000,  # every process keeps two calls open
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
