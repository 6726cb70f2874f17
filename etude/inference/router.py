"""The router: several replicas of an engine behind the one interface.

A trajectory goes to the replica with the fewest trajectories and stays there, where its earlier turns are in the prefix
cache; the others of its group (whose ids differ only in the last two parts, as in `uid/7/0`) follow it, to share their
prompt, as long as no other replica has much less to do. A replica that fails a request and then its health check, or that
fails a check while it should be answering, is ejected: its requests are retried on another one, from the prompt's ids. It
returns once a check succeeds, after it has got the newest weights, because a server that died has lost them. One that this
process started is started again when it has died.

Invariant: a request returns one replica's complete answer, or raises EngineError after `request_timeout`; no replica
answers with weights older than the last `update_weights`.
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

from etude.bounded import settle, within
from etude.errors import EngineError, EtudeError, one_line
from etude.inference.engine_setup import EngineSetup
from etude.inference.http import HttpServer
from etude.inference.server_process import ServerProcess
from etude.inference.types import Engine, OnTokens, SamplingParams, TokenOutput, streams_tokens
from etude.metrics import Mean, Metrics, add_metrics

logger = logging.getLogger(__name__)

R = TypeVar("R")
_START_POLL = 0.25  # seconds between two looks at a server that starts


@dataclass(frozen=True)
class RouterOptions:
    """Seconds: between two rounds of health checks, for one check, for a request with all its attempts, and for sending
    weights to a replica that returns; `attempts` per request; `group_lead`: how many trajectories more than the least
    busy one a replica may have and still get the next of a group that it has."""

    check_every: float = 2.0
    check_timeout: float = 10.0
    request_timeout: float = 600.0
    sync_timeout: float = 600.0
    attempts: int = 4
    group_lead: int = 8


@dataclass(eq=False)
class _Replica:
    name: str
    engine: Engine
    process: ServerProcess | None = None
    groups: Counter[str] = field(default_factory=Counter)  # of its trajectories
    cause: str = ""  # why it is out; empty while it is in
    misfit: bool = False  # whether it answers, but not with the trainer's weights
    ejected: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def up(self) -> bool:
        return not self.cause

    def drop(self, request_id: str) -> None:
        self.groups -= Counter([_group_of(request_id)])  # keeps no zeros


class Router:
    """The interface is `etude.inference.Engine`.

    Attributes:
        admit: awaited as `admit(engine, version)` before an ejected replica gets requests again; it raises if the replica
            is not fit (the weight probe is such a test).
    """

    def __init__(
        self,
        replicas: Mapping[str, Engine],
        options: RouterOptions | None = None,
        processes: Mapping[str, ServerProcess] | None = None,
    ) -> None:
        """`processes`: by name, those of replicas that are to be started here, at the first `update_weights`."""
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
        """The replicas that take requests, by name."""
        return {replica.name: replica.engine for replica in self._replicas if replica.up}

    async def check_all(self, test: Callable[[Engine, str], Awaitable[R]]) -> list[R]:
        """The result of `test(engine, name)` for each replica; one with an infrastructure failure is ejected.

        Raises:
            EngineError: none is left.
            EtudeError: a test found that the replica is wrong, not broken.
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
        """Assigns each trajectory a replica, in row order."""
        opened: dict[_Replica, list[str]] = {}
        for request_id in request_ids:
            if replica := self._settle_at(request_id):
                opened.setdefault(replica, []).append(request_id)
        for replica, ids in opened.items():
            replica.engine.open(ids)

    def close(self, request_id: str) -> None:
        """Tells the trajectory's replica."""
        replica = self._home.pop(request_id, None)
        self._aborted.discard(request_id)
        if replica is not None:
            replica.drop(request_id)
            replica.engine.close(request_id)
        if not self._in_use and self._watcher is not None:  # a stopped loop would leave it hanging
            self._watcher.cancel()
            self._watcher = None

    async def generate(
        self,
        request_id: str,
        prompt_ids: Sequence[int],
        sampling_params: SamplingParams | Mapping[str, Any],
        *,
        images: Sequence[Any] | None = None,
        on_tokens: OnTokens | None = None,
    ) -> TokenOutput:
        """See `etude.inference.Engine.generate`; a request that fails on one replica is retried on another, unless tokens of
        it were told of, which nobody can take back."""
        params = SamplingParams.of(sampling_params)
        self._under_way += 1
        self._watch()
        self._aborted.discard(request_id)
        try:
            return await within(
                self.options.request_timeout, self._attempts, request_id, list(prompt_ids), params, images, on_tokens
            )
        except TimeoutError as error:
            raise EngineError(f"no replica answered within {self.options.request_timeout:g} s") from error
        finally:
            self._under_way -= 1
            if not self._in_use:
                await self._end_watch()

    async def _attempts(
        self, request_id: str, prompt: list[int], params: SamplingParams, images: Any, on_tokens: Any
    ) -> TokenOutput:
        failure, tried = EngineError("no replica was asked"), set[_Replica]()
        told = False

        def tell(ids: Sequence[int]) -> None:
            nonlocal told
            told = True
            on_tokens(ids)

        for attempt in range(self.options.attempts):
            self._counters["retries"] += bool(attempt)
            replica = await self._replica_of(request_id, tried)
            tried.add(replica)
            try:
                extra = {"images": images} if images else {}
                if on_tokens is not None and streams_tokens(replica.engine):
                    extra["on_tokens"] = tell
                output = await self._ask(replica, request_id, prompt, params, extra)
                if output.stop_reason != "aborted" or request_id in self._aborted or request_id not in self._home:
                    return output
                failure = EngineError(f"{replica.name} aborted a request on its own")
            except EngineError as error:
                failure = error
                await self._suspect(replica, error)
            self._leave(request_id)
            if told:
                raise EngineError(f"failed after tokens of it had gone out: {one_line(failure)}") from failure
        raise EngineError(
            f"given up after {self.options.attempts} attempts; the last: {one_line(failure)}"
        ) from failure

    async def _ask(
        self,
        replica: _Replica,
        request_id: str,
        prompt: list[int],
        params: SamplingParams,
        extra: Mapping[str, Any],
    ) -> TokenOutput:
        """One replica's answer; EngineError as soon as it is ejected."""
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
        """The trajectory's replica, or a new one; waits for one to return if all are out."""
        while True:
            home = self._home.get(request_id)
            if home is not None and home.up:
                return home
            self._leave(request_id)
            replica = self._settle_at(request_id, tried)
            if replica is not None:
                replica.engine.open([request_id])
                return replica
            self._back.clear()
            await self._back.wait()

    def _settle_at(self, request_id: str, tried: AbstractSet[_Replica] = frozenset()) -> _Replica | None:
        """Assigns the trajectory a replica, if possible one that has not failed its request: its group's, or the one with
        the fewest others."""
        up = [replica for replica in self._replicas if replica.up]
        if not up:
            return None
        fewest, group = min(replica.groups.total() for replica in up), _group_of(request_id)

        def cost(replica: _Replica) -> tuple[bool, bool, int]:
            taken = replica.groups.total()
            follows = group in replica.groups and taken < fewest + self.options.group_lead
            return replica in tried, not follows, taken

        chosen = min(up, key=cost)
        chosen.groups[group] += 1
        self._home[request_id] = chosen
        return chosen

    def _leave(self, request_id: str) -> None:
        """Unassigns the trajectory: its next request goes to the least busy replica then."""
        home = self._home.pop(request_id, None)
        if home is not None:
            home.drop(request_id)
            home.engine.close(request_id)

    async def abort(self, request_id: str) -> None:
        """Ends the trajectory's request; it is not retried on another replica."""
        self._aborted.add(request_id)
        if home := self._home.get(request_id):
            await home.engine.abort(request_id)

    # -- health --------------------------------------------------------------------------------------------------

    @property
    def _in_use(self) -> bool:
        return bool(self._under_way or self._home)

    def _watch(self) -> None:
        if self._watcher is None:
            self._watcher = asyncio.ensure_future(self._rounds())

    async def _end_watch(self) -> None:
        watcher, self._watcher = self._watcher, None
        if watcher is not None:
            await settle({watcher})

    async def _rounds(self) -> None:
        """Checks all replicas periodically while trajectories are open; a new watch keeps the schedule of the last."""
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
        if check is None:  # an engine in this process: it fails by failing requests
            return True
        try:
            await within(self.options.check_timeout, check)
        except Exception as error:
            if not self._paused:  # a paused server may fail its health check
                self._eject(replica, error)
            return False
        return True

    async def _suspect(self, replica: _Replica, error: EngineError) -> None:
        """After a failed request: ejects the replica unless its health check succeeds."""
        if replica.up and (not hasattr(replica.engine, "check") or not await self._check(replica)):
            self._eject(replica, error)

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
            logger.warning("engine replica %s has ended, and is started again: %s", replica.name, process.last_words())
            process.start()
        try:
            if hasattr(engine, "check"):
                await within(self.options.check_timeout, engine.check)
            if weights is not None:
                await within(self.options.sync_timeout, engine.update_weights, *weights)
                if self.admit is not None:
                    await within(self.options.sync_timeout, self.admit, engine, weights[1])
        except Exception as error:
            # Logged once, since a restart will not fix it: the replica answers, but not with the trainer's weights.
            misfit = isinstance(error, EtudeError) and not isinstance(error, EngineError)
            level = logging.WARNING if misfit and not replica.misfit else logging.INFO
            logger.log(level, "engine replica %s stays out: %s", replica.name, one_line(error))
            replica.misfit |= misfit
            return
        if weights is not self._weights:  # newer ones were sent meanwhile: the next round sends it those
            return
        self._readmit(replica)
        logger.warning("engine replica %s is back", replica.name)

    def _readmit(self, replica: _Replica) -> None:
        replica.cause, replica.misfit, replica.ejected = "", False, asyncio.Event()
        self._back.set()

    async def _start(self, replica: _Replica, process: ServerProcess) -> None:
        """Has a server of ours answer, so that it can take weights; one that does not, or not in time, is ejected."""
        if not process.is_alive:
            process.start()

        async def answer() -> None:
            while True:
                try:
                    return await within(self.options.check_timeout, replica.engine.check)  # type: ignore[attr-defined]
                except Exception:
                    if not process.is_alive:
                        raise EngineError(f"the server has ended: {process.last_words()}") from None
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
        """Pauses every replica; one that cannot be paused is ejected."""
        self._paused = True
        await self._all("pause")

    async def resume(self) -> None:
        """Resumes every replica."""
        await self._all("resume")
        self._paused = False

    async def update_weights(self, source: Any, version: int) -> None:
        """Sends the weights to every replica; one that does not take them is ejected.

        Raises:
            EngineError: none took them.
        """
        self._weights = (source, version)
        await asyncio.gather(
            *(self._start(r, r.process) for r in self._replicas if r.process and not r.process.is_alive)
        )
        if not self._paused:  # a replica that hangs must not hold up the others until the sync's own limit
            await asyncio.gather(*(self._check(replica) for replica in self._replicas if replica.up))
        was_paused, self._paused = self._paused, True
        try:
            await self._all("update_weights", source, version)
        finally:
            self._paused = was_paused

    async def sleep(self) -> None:
        """Has every replica that can release its memory."""
        await self._all("sleep")

    async def wake(self) -> None:
        """Has every replica reallocate its memory."""
        await self._all("wake")

    async def shutdown(self) -> None:
        """Ends the watch, and the processes that replicas started."""
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
        """The replicas' metrics since the last call, added up; retried requests, ejections, active replicas."""
        counters, self._counters = self._counters, _fresh_counters()
        parts = [replica.engine.metrics() for replica in self._replicas]
        return add_metrics([counters, *parts]) | {"replicas": Mean(len(self.replicas), 1)}


def _group_of(request_id: str) -> str:
    return request_id.rsplit("/", 2)[0]


def connect(setup: EngineSetup, engine_of: Callable[[HttpServer], Engine]) -> Engine:
    """The engine of the one configured address, or a router over several, or over the server that is started here."""
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
