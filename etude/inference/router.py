"""The router: load-balances trajectories over several replicas of an engine and retries failed requests.

A trajectory goes to the replica with the fewest trajectories and stays there, where its earlier turns are in the prefix
cache. The other trajectories of its group (whose ids differ only in the last two parts, as in `uid/7/0`) go to the same
replica to share the prompt, unless another replica is much less busy. A replica is ejected if it fails a request and then
its health check, or a periodic health check: its requests are retried on another replica, from the prompt's ids. It is
readmitted once a health check succeeds and it has received the newest weights, because a restarted server has lost them. A
server that this process started is restarted when it dies.

Invariant: a request returns one replica's complete answer, or raises EngineError, at the latest after `request_timeout`; no
replica answers with weights older than the last `update_weights`.
"""

from __future__ import annotations

import asyncio
import logging
import weakref
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field
from typing import Any, TypeVar

from etude.errors import EngineError, EtudeError, one_line
from etude.inference.engine_setup import EngineSetup
from etude.inference.http import HttpServer
from etude.inference.server_process import ServerProcess
from etude.inference.types import Engine, SamplingParams, TokenOutput
from etude.metrics import Mean, Metrics, add_metrics
from etude.timeouts import settle, within

logger = logging.getLogger(__name__)

R = TypeVar("R")
_ATTEMPTS = 4  # of a request
_GROUP_LEAD = 8  # more trajectories than the least busy replica has, up to which one gets the next of its groups
_START_POLL = 0.25  # seconds between health checks of a server that is starting


@dataclass(frozen=True)
class RouterOptions:
    """Times are in seconds: `check_every` between two rounds of health checks, `check_timeout` for one check,
    `request_timeout` for a request with all its retries, `sync_timeout` for sending weights."""

    check_every: float = 2.0
    check_timeout: float = 10.0
    request_timeout: float = 600.0
    sync_timeout: float = 600.0


@dataclass(eq=False)
class _Replica:
    name: str
    engine: Engine
    process: ServerProcess | None = None
    groups: Counter[str] = field(default_factory=Counter)  # group → number of its trajectories here
    cause: str = ""  # why it was ejected; empty while it takes requests
    wrong_weights: bool = False  # whether it answers, but not with the trainer's weights
    ejected: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def up(self) -> bool:
        return not self.cause

    def drop(self, request_id: str) -> None:
        self.groups -= Counter([_group_of(request_id)])  # `-=` removes zero counts


class Router:
    """Implements `etude.inference.Engine` over several replicas.

    Attributes:
        admit: awaited as `admit(engine, version)` before an ejected replica gets requests again; raises if the replica
            must stay out (for example, the weight probe).
    """

    def __init__(
        self,
        replicas: Mapping[str, Engine],
        options: RouterOptions | None = None,
        processes: Mapping[str, ServerProcess] | None = None,
    ) -> None:
        """`processes`: by name, the servers to be started here, at the first `update_weights`."""
        own = processes or {}
        self._replicas = [_Replica(name, engine, own.get(name)) for name, engine in replicas.items()]
        self.options = options or RouterOptions()
        self.admit: Callable[[Engine, int], Awaitable[object]] | None = None
        self.shares_weights = all(getattr(r.engine, "shares_weights", True) for r in self._replicas)
        self._home: dict[str, _Replica] = {}
        self._weights: tuple[Any, int] | None = None
        self._aborted: set[str] = set()
        self._under_way = 0
        self._paused = False
        self._watcher: asyncio.Task[None] | None = None
        self._next_round = 0.0
        self._back = asyncio.Event()
        self._counters = _fresh_counters()

    @property
    def replicas(self) -> dict[str, Engine]:
        """The engines of the replicas that take requests, by name."""
        return {replica.name: replica.engine for replica in self._replicas if replica.up}

    async def check_all(self, test: Callable[[Engine, str], Awaitable[R]]) -> list[R]:
        """Returns the result of `test(engine, name)` for each replica; ejects replicas for which it raises EngineError.

        Raises:
            EngineError: no replica is left.
            EtudeError: a test failed for another reason than the infrastructure.
        """
        results = []
        for replica in [replica for replica in self._replicas if replica.up]:
            try:
                results.append(await test(replica.engine, replica.name))
            except EngineError as error:
                self._eject(replica, error)
        self._require("probe")
        return results

    # -- requests ------------------------------------------------------------------------------------------------

    def open(self, request_ids: Sequence[str]) -> None:
        """Assigns each trajectory to a replica, in row order."""
        opened: dict[_Replica, list[str]] = {}
        for request_id in request_ids:
            if replica := self._assign(request_id):
                opened.setdefault(replica, []).append(request_id)
        for replica, ids in opened.items():
            replica.engine.open(ids)

    def close(self, request_id: str) -> None:
        """Closes the trajectory on its replica."""
        self._aborted.discard(request_id)
        self._unassign(request_id)
        if not self._in_use and self._watcher is not None:  # it must not outlive the event loop
            self._watcher.cancel()
            self._watcher = None

    async def generate(
        self,
        request_id: str,
        prompt_ids: Sequence[int],
        sampling_params: SamplingParams | Mapping[str, Any],
        *,
        images: Sequence[Any] | None = None,
    ) -> TokenOutput:
        """See `etude.inference.Engine.generate`. A request that fails on one replica is retried on another."""
        params = SamplingParams.of(sampling_params)
        self._under_way += 1
        self._watcher = self._watcher or asyncio.ensure_future(self._rounds())
        self._aborted.discard(request_id)
        try:
            return await within(
                self.options.request_timeout, self._attempts, request_id, list(prompt_ids), params, images
            )
        except TimeoutError as error:
            raise EngineError(f"no replica answered within {self.options.request_timeout:g} s") from error
        finally:
            self._under_way -= 1
            if not self._in_use:
                await self._end_watch()

    async def _attempts(self, request_id: str, prompt: list[int], params: SamplingParams, images: Any) -> TokenOutput:
        failure, tried = EngineError("no replica was asked"), set[_Replica]()
        for attempt in range(_ATTEMPTS):
            self._counters["retries"] += bool(attempt)
            replica = await self._replica_of(request_id, tried)
            tried.add(replica)
            try:
                extra = {"images": images} if images else {}
                output = await self._ask(replica, request_id, prompt, params, extra)
                if output.stop_reason != "aborted" or request_id in self._aborted or request_id not in self._home:
                    return output
                failure = EngineError(f"{replica.name} aborted a request on its own")
            except EngineError as error:
                failure = error
                if replica.up and (not hasattr(replica.engine, "check") or not await self._check(replica)):
                    self._eject(replica, error)
            self._unassign(request_id)
        raise EngineError(f"given up after {_ATTEMPTS} attempts; the last: {one_line(failure)}") from failure

    async def _ask(
        self,
        replica: _Replica,
        request_id: str,
        prompt: list[int],
        params: SamplingParams,
        extra: Mapping[str, Any],
    ) -> TokenOutput:
        """Returns the replica's answer; raises EngineError as soon as the replica is ejected."""
        answer = asyncio.ensure_future(replica.engine.generate(request_id, prompt, params, **extra))
        ejected = asyncio.ensure_future(replica.ejected.wait())
        try:
            await asyncio.wait({answer, ejected}, return_when=asyncio.FIRST_COMPLETED)
            if not answer.done():
                raise EngineError(f"{replica.name} was ejected: {replica.cause}")
        finally:
            ejected.cancel()
            await settle({answer})
        return answer.result()

    async def _replica_of(self, request_id: str, tried: set[_Replica]) -> _Replica:
        """Returns the trajectory's replica, or a new one; if all are ejected, waits until one is readmitted."""
        while True:
            home = self._home.get(request_id)
            if home is not None and home.up:
                return home
            self._unassign(request_id)
            replica = self._assign(request_id, tried)
            if replica is not None:
                replica.engine.open([request_id])
                return replica
            self._back.clear()
            await self._back.wait()

    def _assign(self, request_id: str, tried: AbstractSet[_Replica] = frozenset()) -> _Replica | None:
        """Assigns the trajectory to a replica: its group's or the least busy one, if possible not one in `tried`. Returns
        None if all are ejected."""
        up = [replica for replica in self._replicas if replica.up]
        if not up:
            return None
        fewest, group = min(replica.groups.total() for replica in up), _group_of(request_id)

        def cost(replica: _Replica) -> tuple[bool, bool, int]:
            taken = replica.groups.total()
            follows = group in replica.groups and taken < fewest + _GROUP_LEAD
            return replica in tried, not follows, taken

        chosen = min(up, key=cost)
        chosen.groups[group] += 1
        self._home[request_id] = chosen
        return chosen

    def _unassign(self, request_id: str) -> None:
        """Unassigns the trajectory and closes it on its replica; its next request is assigned again."""
        home = self._home.pop(request_id, None)
        if home is not None:
            home.drop(request_id)
            home.engine.close(request_id)

    async def abort(self, request_id: str) -> None:
        """Aborts the trajectory's request; it is not retried on another replica."""
        self._aborted.add(request_id)
        if home := self._home.get(request_id):
            await home.engine.abort(request_id)

    # -- health --------------------------------------------------------------------------------------------------

    @property
    def _in_use(self) -> bool:
        return bool(self._under_way or self._home)

    async def _end_watch(self) -> None:
        watcher, self._watcher = self._watcher, None
        if watcher is not None:
            await settle({watcher})

    async def _rounds(self) -> None:
        """Health-checks all replicas periodically while the router is in use; a new watch keeps the last one's schedule."""
        clock = asyncio.get_running_loop().time
        while True:
            if self._next_round < clock():
                self._next_round = clock() + self.options.check_every
            await asyncio.sleep(self._next_round - clock())
            self._next_round = clock() + self.options.check_every
            if not self._paused:
                await asyncio.gather(*(self._check(r) if r.up else self._bring_back(r) for r in self._replicas))

    async def _check(self, replica: _Replica) -> bool:
        check = getattr(replica.engine, "check", None)
        if check is None:  # an engine in this process: only its requests can fail
            return True
        try:
            await within(self.options.check_timeout, check)
        except Exception as error:
            if not self._paused:  # a paused server may fail its health check
                self._eject(replica, error)
            return False
        return True

    def _eject(self, replica: _Replica, error: BaseException) -> None:
        if not replica.up:
            return
        replica.cause = one_line(error, 200) or "failed"
        self._counters["ejections"] += 1
        logger.warning("engine replica %s is out: %s", replica.name, replica.cause)
        replica.ejected.set()

    async def _bring_back(self, replica: _Replica) -> None:
        engine, weights, process = replica.engine, self._weights, replica.process
        if process is not None and not process.is_alive:
            logger.warning("engine replica %s has ended, and is started again: %s", replica.name, process.log_tail())
            process.start()
        try:
            if hasattr(engine, "check"):
                await within(self.options.check_timeout, engine.check)
            if weights is not None:
                await within(self.options.sync_timeout, engine.update_weights, *weights)
                if self.admit is not None:
                    await within(self.options.sync_timeout, self.admit, engine, weights[1])
        except Exception as error:
            # Warned of once, since a restart will not fix it: the replica answers, but not with the trainer's weights.
            wrong_weights = isinstance(error, EtudeError) and not isinstance(error, EngineError)
            level = logging.WARNING if wrong_weights and not replica.wrong_weights else logging.INFO
            logger.log(level, "engine replica %s stays out: %s", replica.name, one_line(error))
            replica.wrong_weights |= wrong_weights
            return
        if weights is not self._weights:  # newer weights were sent meanwhile: the next round sends them
            return
        self._readmit(replica)
        logger.warning("engine replica %s is back", replica.name)

    def _readmit(self, replica: _Replica) -> None:
        replica.cause, replica.wrong_weights, replica.ejected = "", False, asyncio.Event()
        self._back.set()

    async def _start(self, replica: _Replica, process: ServerProcess) -> None:
        """Starts a server and waits until it can take weights; ejects it if it ends or does not answer in time."""
        if not process.is_alive:
            process.start()

        async def answer() -> None:
            while True:
                try:
                    return await within(self.options.check_timeout, replica.engine.check)  # type: ignore[attr-defined]
                except Exception:
                    if not process.is_alive:
                        raise EngineError(f"the server has ended: {process.log_tail()}") from None
                    await asyncio.sleep(_START_POLL)

        try:
            await within(self.options.sync_timeout, answer)
        except Exception as error:
            self._eject(replica, error)
        else:
            if not replica.up:
                self._readmit(replica)

    # -- all replicas --------------------------------------------------------------------------------------------

    async def pause(self) -> None:
        """Pauses every replica; ejects those that cannot be paused."""
        self._paused = True
        await self._all("pause")

    async def resume(self) -> None:
        """Resumes every replica."""
        await self._all("resume")
        self._paused = False

    async def update_weights(self, source: Any, version: int) -> None:
        """Sends the weights to every replica; ejects those that do not take them.

        Raises:
            EngineError: no replica took them.
        """
        self._weights = (source, version)
        await asyncio.gather(
            *(self._start(r, r.process) for r in self._replicas if r.process and not r.process.is_alive)
        )
        if not self._paused:  # a replica that hangs must not hold up the others until `sync_timeout`
            await asyncio.gather(*(self._check(replica) for replica in self._replicas if replica.up))
        was_paused, self._paused = self._paused, True
        try:
            await self._all("update_weights", source, version)
        finally:
            self._paused = was_paused

    async def sleep(self) -> None:
        """Releases the device memory of every replica that supports it."""
        await self._all("sleep")

    async def wake(self, *parts: str) -> None:
        """Reallocates the memory that `sleep` released: see `ServedEngine.wake`."""
        await self._all("wake", *parts)

    async def shutdown(self) -> None:
        """Ends the health checks, the processes that engines started, and the servers started here."""
        await self._end_watch()
        for replica in self._replicas:
            if hasattr(replica.engine, "shutdown"):
                await replica.engine.shutdown()
            if replica.process is not None:
                replica.process.end()

    async def _all(self, method: str, *args: Any) -> None:
        up = [replica for replica in self._replicas if replica.up and hasattr(replica.engine, method)]
        calls = (within(self.options.sync_timeout, getattr(r.engine, method), *args) for r in up)
        results = await asyncio.gather(*calls, return_exceptions=True)
        failed = [(r, error) for r, error in zip(up, results) if isinstance(error, BaseException)]
        for _, error in failed:
            if isinstance(error, EtudeError) or not isinstance(error, Exception):
                raise error
        for replica, error in failed:
            self._eject(replica, error)
        self._require(method)

    def _require(self, purpose: str) -> None:
        if not self.replicas:
            causes = "; ".join(f"{replica.name}: {replica.cause}" for replica in self._replicas)
            raise EngineError(f"{purpose}: no engine replica is left: {causes}")

    def metrics(self) -> Metrics:
        """Returns the sum of the replicas' metrics since the last call, with retries, ejections and active replicas."""
        counters, self._counters = self._counters, _fresh_counters()
        parts = [replica.engine.metrics() for replica in self._replicas]
        return add_metrics([counters, *parts]) | {"replicas": Mean(len(self.replicas), 1)}


def _group_of(request_id: str) -> str:
    return request_id.rsplit("/", 2)[0]


def connect(setup: EngineSetup, engine_of: Callable[[HttpServer], Engine]) -> Engine:
    """Returns the engine of the only configured address, else a router over several, or over the server started here."""
    process = ServerProcess(setup.server_command, setup.model_path) if setup.server_command else None
    servers = setup.servers([process.url] if process else setup.own_urls())
    engines = {server.url: engine_of(server) for server in servers}
    if len(setup.server_urls) == 1:
        return next(iter(engines.values()))
    options = RouterOptions(request_timeout=2 * setup.server_timeout, sync_timeout=setup.weight_sync_timeout)
    router = Router(engines, options, {process.url: process} if process else None)
    if process is not None:
        weakref.finalize(router, process.end)
    return router


def _fresh_counters() -> dict[str, float]:
    return {"retries": 0.0, "ejections": 0.0}
