"""`ClusterLimiter`: one limit for a whole Ray cluster, kept by a detached actor that bears the limiter's name.

Invariant: whichever process asks, one name means one limit: asking for it with another limit is an error. The actor
outlives whoever made it; a process that dies, however it dies, gives its permits back when its lease runs out. Ray is
imported when the first limiter is opened.
"""

from __future__ import annotations

import asyncio
import atexit
import threading
import time
import uuid
import warnings
from typing import Any

from etude.errors import ConfigError, InfrastructureError, MissingExtraError, one_line
from etude.limits.holder import Holder
from etude.limits.keeper import Keeper, KeeperInfo
from etude.limits.limit import Limit
from etude.limits.limiter import Limiter, Ticket
from etude.limits.link import Link
from etude.limits.messages import Reply, Turn

LEASE_SECONDS = 15.0
"""How long a silent process keeps its permits: longer than a process is ever stalled in good health."""
NAMESPACE = "etude-limits"
CONNECT_SECONDS = 60.0  # an actor starts within seconds; a busy cluster may take long to find it a place

_open: dict[str, ClusterLimiter] = {}
_open_lock = threading.Lock()


class ClusterLimiter(Limiter):
    """This process's part of the limiter `name`; made by `cluster_limiter`."""

    def __init__(self, name: str, limit: Limit, lease_seconds: float, patience: float) -> None:
        self.name = name
        self.limit = limit
        self.lease_seconds = lease_seconds
        self._holder: Holder[Ticket] = Holder(limit, lease_seconds, lambda: uuid.uuid4().hex)
        super().__init__(self._holder, time.monotonic)
        self._link: Link | None = None
        self._transport = _RayTransport(name, limit, lease_seconds)
        self._link = Link(self._holder, self._lock, self._deliver, self._transport, lease_seconds, patience)

    @property
    def held(self) -> int:
        """How many permits this process uses."""
        return self._holder.held

    @property
    def waiting(self) -> int:
        """How many tasks and threads of this process wait."""
        return self._holder.waiting

    def info(self) -> KeeperInfo:
        """How the limiter stands in the whole cluster; permits that a process keeps for its next call count as held."""
        return self._transport.info()

    def close(self) -> None:
        """Gives back what this process holds; its waiters fail."""
        with _open_lock:
            if _open.get(self.name) is self:
                del _open[self.name]
        if self._link is not None:
            self._link.close()

    def usable(self) -> bool:
        """False after `close`, and when this process has left the cluster it was opened in."""
        return self._transport.is_connected()

    def __reduce__(self) -> tuple[Any, ...]:
        """Another process gets its own part of the same limiter."""
        return cluster_limiter, (self.name, self.limit, self.lease_seconds)

    def _after(self) -> None:
        if self._link is not None and self._holder.has_mail:
            self._link.post()


def cluster_limiter(
    name: str, limit: Limit, lease_seconds: float = LEASE_SECONDS, patience: float = 30.0
) -> ClusterLimiter:
    """The limiter `name` of the Ray cluster this process is connected to; made if there is none of that name.

    `lease_seconds`: after how long a silent holder's permits return. `patience`: how long waiters of this process wait
    while the actor cannot be reached.

    Raises:
        MissingExtraError: Ray is not installed.
        ConfigError: this process is not connected to Ray, or the name is taken by another limit.
        InfrastructureError: the actor did not come up.
    """
    if not lease_seconds > 0:
        raise ConfigError(f"lease_seconds must be above 0, not {lease_seconds}")
    with _open_lock:
        atexit.unregister(_leave)
        atexit.register(_leave)  # anew, so that it runs before the hook with which Ray, imported by now, disconnects
        limiter = _open.get(name)
        left = limiter if limiter is not None and not limiter.usable() else None
        if limiter is None or left is not None:
            limiter = _open[name] = ClusterLimiter(name, limit, lease_seconds, patience)
    if left is not None:
        left.close()
    _refuse_conflict(name, limiter.limit, limit, limiter.lease_seconds, lease_seconds)
    return limiter


def is_connected() -> bool:
    """Whether this process is connected to a Ray cluster; never imports Ray."""
    import sys

    ray = sys.modules.get("ray")
    return ray is not None and bool(ray.is_initialized())


def _refuse_conflict(name: str, held: Limit, asked: Limit, held_lease: float, asked_lease: float) -> None:
    if held != asked:
        raise ConfigError(
            f"the limiter '{name}' allows {held} already; {asked} is asked for: use one limit or two names"
        )
    if held_lease != asked_lease:
        raise ConfigError(f"the limiter '{name}' has leases of {held_lease:g} s already, not {asked_lease:g} s")


def _ray() -> Any:
    try:
        import ray
    except ImportError as error:
        raise MissingExtraError("a cluster-wide limit", "ray") from error
    return ray


class _RayTransport:
    """Calls of the limiter's actor."""

    def __init__(self, name: str, limit: Limit, lease_seconds: float) -> None:
        ray = _ray()
        if not ray.is_initialized():
            raise ConfigError(f"the cluster-wide limiter '{name}' needs a Ray cluster: call ray.init() first")
        self._name = name
        self._limit = limit
        self._lease_seconds = lease_seconds
        self._job = ray.get_runtime_context().get_job_id()
        self._actor = self._connect(settling=False)
        info = self.info()
        _refuse_conflict(name, info.limit, limit, info.lease_seconds, lease_seconds)

    def is_connected(self) -> bool:
        ray = _ray()
        return bool(ray.is_initialized()) and ray.get_runtime_context().get_job_id() == self._job

    def info(self) -> KeeperInfo:
        ray = _ray()
        give_up_at = time.monotonic() + CONNECT_SECONDS
        while True:
            try:
                info: KeeperInfo = ray.get(self._actor.info.remote(), timeout=CONNECT_SECONDS)
                return info
            except ray.exceptions.RayError as error:
                restarting = isinstance(error, ray.exceptions.ActorUnavailableError)
                if not restarting or time.monotonic() > give_up_at:
                    raise InfrastructureError(
                        f"the limiter '{self._name}' does not answer: {one_line(error)}"
                    ) from error
                time.sleep(0.1)

    async def turn(self, turn: Turn) -> Reply:
        self._check_connected()
        reply: Reply = await self._answer(self._actor.turn.remote(turn))
        return reply

    async def listen(self, owner: str, heard: int, seconds: float) -> Reply:
        self._check_connected()
        reply: Reply = await self._answer(self._actor.listen.remote(owner, heard, seconds))
        return reply

    async def reconnect(self) -> None:
        self._check_connected()
        self._actor = await asyncio.to_thread(self._connect, True)

    def _check_connected(self) -> None:
        """Ray would start a cluster of its own for a call after `ray.shutdown()`, and hold the loop up meanwhile."""
        if not self.is_connected():
            raise InfrastructureError("this process has left the Ray cluster")

    @staticmethod
    async def _answer(reference: Any) -> Any:
        return await asyncio.wrap_future(reference.future())

    def _connect(self, settling: bool) -> Any:
        """The actor of that name; one that is made anew after a loss is `settling`."""
        options = {
            "name": f"limit:{self._name}",
            "namespace": NAMESPACE,
            "lifetime": "detached",
            "get_if_exists": True,
            "num_cpus": 0,
            "max_restarts": -1,
            "max_concurrency": 100_000,  # every holder keeps a call open
        }
        return _ray().remote(_KeeperActor).options(**options).remote(self._limit, self._lease_seconds, settling)


class _KeeperActor(Keeper):
    """The keeper as Ray starts it: again after its node was lost, when it takes over the leases that are out."""

    def __init__(self, limit: Limit, lease_seconds: float, settling: bool) -> None:
        with warnings.catch_warnings():  # Ray's own use of a name that it has deprecated
            warnings.simplefilter("ignore")
            restarted = _ray().get_runtime_context().was_current_actor_reconstructed
        super().__init__(limit, lease_seconds, settling or restarted)


def _leave() -> None:
    """A process that ends in good order gives its permits back at once."""
    if is_connected():
        for limiter in list(_open.values()):
            limiter.close()
