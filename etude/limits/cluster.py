"""`ClusterLimiter`: one limit for a whole Ray cluster, enforced by a detached actor named after the limiter.

Invariant: in every process, one name means one limit: opening it with another limit is an error. The actor outlives its
creator; the permits of a process that dies, however it dies, are returned when its lease expires. While the actor is
unreachable, waiters wait for `patience` seconds and then fail with `InfrastructureError`; the limiter keeps trying to
reconnect, and the leases of held permits expire. Ray is imported when the first limiter is opened. The protocol is in
`lease`.
"""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import importlib.util
import logging
import sys
import threading
import time
import uuid
import warnings
from typing import Any

from etude.bounded import background_loop
from etude.errors import ConfigError, InfrastructureError, MissingExtraError, one_line
from etude.limits.lease import LeaseClient, LeaseServer, LimiterInfo, Reply, Report
from etude.limits.limit import Limit
from etude.limits.limiter import Limiter, Ticket, local_limiter, refuse_conflict

LEASE_SECONDS = 15.0
"""The lease of a process that sends no reports: longer than any stall of a healthy process."""
NAMESPACE = "etude-limits"
_CONNECT_SECONDS = 60.0  # an actor starts within seconds; a busy cluster may take long to place it
_FIRST_PAUSE, _MAX_PAUSE = 0.05, 2.0  # seconds between attempts to reach the actor

_log = logging.getLogger(__name__)
_open: dict[str, ClusterLimiter] = {}
_open_lock = threading.Lock()


class LeaseActor:
    """Runs a `LeaseServer` in an event loop. Clients long-poll: a reply is sent as soon as there is news, so that a returned
    permit reaches the next waiter within one message. Only an incoming report renews leases."""

    def __init__(self, limit: Limit, lease_seconds: float, settling: bool = False) -> None:
        self._server = LeaseServer(limit, lease_seconds, time.monotonic(), settling)
        self._polls: dict[str, tuple[int, asyncio.Future[None]]] = {}  # client → (version that it knows, poll)
        self._timer: asyncio.TimerHandle | None = None

    async def info(self) -> LimiterInfo:
        """Returns the limiter's current state."""
        self._advance()
        return self._server.info()

    async def sync(self, report: Report, seconds: float) -> Reply:
        """Applies a report; replies as soon as there is news for the client, or after `seconds`."""
        reply = self._server.receive(report, time.monotonic())
        self._publish()
        if seconds and reply.known and reply.version == report.version:
            poll: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            self._polls[report.client] = report.version, poll
            await asyncio.wait({poll}, timeout=seconds)
            if self._polls.get(report.client) == (report.version, poll):
                del self._polls[report.client]
            reply = self._server.reply(report.client)
        return reply

    def _advance(self) -> None:
        self._server.advance(time.monotonic())
        self._publish()

    def _publish(self) -> None:
        """Answers the polls of clients that have news, and schedules `_advance` for the server's next event."""
        for name, (version, poll) in list(self._polls.items()):
            reply = self._server.reply(name)
            if not poll.done() and not (reply.known and reply.version == version):
                poll.set_result(None)
        if self._timer is not None:
            self._timer.cancel()
        due = self._server.next_event()
        if due is not None:
            delay = max(0.0, due - time.monotonic())
            self._timer = asyncio.get_running_loop().call_later(delay, self._advance)


class ClusterLimiter(Limiter):
    """This process's client of the limiter `name`; created by `cluster_limiter`. All clients of a process share one thread.

    `connection` calls the `LeaseActor`; any exception that it raises means that the actor was not reached.
    """

    def __init__(self, name: str, limit: Limit, lease_seconds: float, patience: float, connection: Any = None) -> None:
        self.name = name
        self.limit = limit
        self.lease_seconds = lease_seconds
        self._patience = patience
        self._client: LeaseClient[Ticket] = LeaseClient(limit, lease_seconds, lambda: uuid.uuid4().hex)
        super().__init__(self._client)
        self._connection: _RayConnection = connection or _RayConnection(name, limit, lease_seconds)
        self._closed = self._posted = False
        self._lost_at: float | None = None
        self._pause = _FIRST_PAUSE
        self._news, self._known = asyncio.Event(), asyncio.Event()
        self._loop = background_loop("etude-limits")
        self._running = asyncio.run_coroutine_threadsafe(self._run(), self._loop)

    def info(self) -> LimiterInfo:
        """Returns the limiter's state in the whole cluster; permits that a process keeps for its next call count as held."""
        return self._connection.info()

    def is_current(self) -> bool:
        """Whether this process is still connected to the cluster that the limiter was opened in."""
        return self._connection.is_connected()

    def close(self, seconds: float = 2.0) -> None:
        """Returns this process's permits if the actor can be reached within `seconds`; its waiters fail."""
        with _open_lock:
            if _open.get(self.name) is self:
                del _open[self.name]
        if self._closed:
            return
        self._closed = True
        self._running.cancel()
        with self._lock:
            last = self._client.leave(time.monotonic())
        leaving = asyncio.run_coroutine_threadsafe(self._connection.sync(last, 0.0), self._loop)
        with contextlib.suppress(Exception):
            leaving.result(seconds)
        leaving.cancel()
        with self._lock:
            self._fail("it was closed")

    def __reduce__(self) -> tuple[Any, ...]:
        """Unpickles in another process as that process's client of the same limiter."""
        return cluster_limiter, (self.name, self.limit, self.lease_seconds)

    def _after(self) -> None:
        super()._after()
        if self._closed:
            self._fail("it was closed")
        elif self._client.has_changes and not self._posted:
            self._posted = True
            self._loop.call_soon_threadsafe(self._news.set)

    def _fail(self, reason: str) -> None:
        for ticket in self._client.fail():
            ticket.error = InfrastructureError(f"the limiter is gone: {reason}")
            ticket.wake()

    async def _run(self) -> None:
        try:
            await asyncio.gather(self._send_reports(), self._poll())
        except Exception as error:  # nothing awaits this task, so log its failure
            _log.exception("the limiter '%s' broke", self.name)
            self._closed = True
            with self._lock:
                self._fail(f"{type(error).__name__}: {one_line(error)}")

    async def _send_reports(self) -> None:
        """Reports changes, one report at a time."""
        while True:
            await self._news.wait()
            self._news.clear()
            self._posted = False
            await self._exchange(0.0)

    async def _poll(self) -> None:
        """Long-polls the actor for news, which also renews the leases, unless there is nothing to renew or wait for."""
        while True:
            await self._known.wait()
            with self._lock:
                last = self._client.leave(time.monotonic()) if self._client.is_quiet else None
            if last is None:
                await self._exchange(self.lease_seconds / 3)
                continue
            self._known.clear()  # a pending call would keep an idle Ray worker from exiting
            with contextlib.suppress(Exception):
                await asyncio.wait_for(self._connection.sync(last, 0.0), self.lease_seconds)

    async def _exchange(self, seconds: float) -> None:
        """Sends a report and applies the reply; after a failure, backs off and schedules another report."""
        sent_at = time.monotonic()
        with self._lock:
            report = self._client.report(sent_at)
        try:
            reply = await asyncio.wait_for(self._connection.sync(report, seconds), seconds + self.lease_seconds)
        except Exception as error:  # any error means that the actor was not reached
            await self._recover(error)
            self._news.set()
            return
        self._lost_at = None
        with self._lock:
            self._deliver(self._client.receive(reply, sent_at, time.monotonic()))
            known = self._client.known
        if known:
            self._known.set()
        else:
            self._known.clear()

    async def _recover(self, error: Exception) -> None:
        now = time.monotonic()
        if self._lost_at is None:
            self._lost_at = now
            self._pause = _FIRST_PAUSE
            _log.warning("the limiter '%s' cannot be reached: %s: %s", self.name, type(error).__name__, one_line(error))
        if now - self._lost_at >= self._patience:
            with self._lock:
                self._fail(f"it could not be reached for {self._patience:g} s: {one_line(error)}")
        await asyncio.sleep(self._pause)
        self._pause = min(2 * self._pause, _MAX_PAUSE)
        try:
            await asyncio.wait_for(self._connection.reconnect(), self.lease_seconds)
        except Exception as again:  # if the actor is still unreachable, the next report fails
            _log.debug("no new way to the limiter '%s': %s", self.name, one_line(again))


def cluster_limiter(
    name: str, limit: Limit, lease_seconds: float = LEASE_SECONDS, patience: float = 30.0
) -> ClusterLimiter:
    """Returns the limiter `name` of the Ray cluster that this process is connected to, and creates it if needed.

    After `lease_seconds` without a report, the permits of a process are returned. `patience` is how many seconds waiters of
    this process wait while the actor is unreachable.

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


def _leave() -> None:
    """Returns the permits at once when the process exits normally."""
    if is_connected():
        for limiter in list(_open.values()):
            limiter.close()


def _refuse_another(name: str, held: Limit, held_seconds: float, asked: Limit, asked_seconds: float) -> None:
    refuse_conflict(name, held, asked)
    if held_seconds != asked_seconds:
        raise ConfigError(f"the limiter '{name}' has leases of {held_seconds:g} s already, not {asked_seconds:g} s")


def require_ray(feature: str) -> None:
    """Raises MissingExtraError, which gives the pip command, if Ray is not installed; does not import Ray."""
    if importlib.util.find_spec("ray") is None:
        raise MissingExtraError(feature, "ray")


class _RayConnection:
    """Creates or finds the limiter's actor, and calls it."""

    def __init__(self, name: str, limit: Limit, lease_seconds: float) -> None:
        require_ray("a cluster-wide limit")
        import ray

        self._ray = ray
        if not ray.is_initialized():
            raise ConfigError(f"the cluster-wide limiter '{name}' needs a Ray cluster: call ray.init() first")
        self._name = name
        self._limit = limit
        self._lease_seconds = lease_seconds
        self._job = ray.get_runtime_context().get_job_id()
        self._actor = self._find(settling=False)
        info = self.info()
        _refuse_another(name, info.limit, info.lease_seconds, limit, lease_seconds)

    def is_connected(self) -> bool:
        return self._ray.is_initialized() and bool(self._ray.get_runtime_context().get_job_id() == self._job)

    def info(self) -> LimiterInfo:
        give_up_at = time.monotonic() + _CONNECT_SECONDS
        while True:
            try:
                info: LimiterInfo = self._ray.get(self._actor.info.remote(), timeout=_CONNECT_SECONDS)
                return info
            except self._ray.exceptions.RayError as error:
                restarting = isinstance(error, self._ray.exceptions.ActorUnavailableError)
                if not restarting or time.monotonic() > give_up_at:
                    raise InfrastructureError(
                        f"the limiter '{self._name}' does not answer: {one_line(error)}"
                    ) from error
                time.sleep(0.1)

    async def sync(self, report: Report, seconds: float) -> Reply:
        self._check_connected()
        reply: Reply = await asyncio.wrap_future(self._actor.sync.remote(report, seconds).future())
        return reply

    async def reconnect(self) -> None:
        self._check_connected()
        self._actor = await asyncio.to_thread(self._find, True)

    def _check_connected(self) -> None:
        """Raises after `ray.shutdown()`, when a call would start a new Ray cluster and block the loop meanwhile."""
        if not self.is_connected():
            raise InfrastructureError("this process has left the Ray cluster")

    def _find(self, settling: bool) -> Any:
        """Gets or creates the actor; a new one is `settling` if it replaces one that was lost."""
        options = {
            "name": f"limit:{self._name}",
            "namespace": NAMESPACE,
            "lifetime": "detached",
            "get_if_exists": True,
            "num_cpus": 0,
            "max_restarts": -1,
            "max_concurrency": 100_000,  # every client keeps one call open
        }
        actor = self._ray.remote(_RestartingActor).options(**options)
        return actor.remote(self._limit, self._lease_seconds, settling)


class _RestartingActor(LeaseActor):
    """The actor as started by Ray; after a restart (the loss of its node) it takes over the outstanding leases."""

    def __init__(self, limit: Limit, lease_seconds: float, settling: bool) -> None:
        import ray

        with warnings.catch_warnings():  # Ray uses a name here that it deprecated itself
            warnings.simplefilter("ignore")
            restarted = ray.get_runtime_context().was_current_actor_reconstructed
        super().__init__(limit, lease_seconds, settling or restarted)
