"""The limiter of a process and a real `LeaseActor` beside it, over a way between them that the test breaks and mends."""

import asyncio
import threading
import time

import pytest
from wait_stage import until_async

from etude.bounded import background_loop
from etude.errors import InfrastructureError
from etude.limits import Limit
from etude.limits.cluster import ClusterLimiter, LeaseActor

WAIT = 30


class Way:
    """Leads to `actor` while it is open."""

    def __init__(self, limit, lease):
        self.limit, self.lease = limit, lease
        self.open = True
        self.calls = self.reconnects = 0
        self.hangs = False
        self.actor = self._on_loop(self._new_actor())

    async def _new_actor(self, settling=False):
        return LeaseActor(self.limit, self.lease, settling)

    def _on_loop(self, work):
        return asyncio.run_coroutine_threadsafe(work, background_loop("etude-limits")).result(WAIT)

    def replace(self):
        self.actor = self._on_loop(self._new_actor(settling=True))

    def info(self):
        return self._on_loop(self.actor.info())

    async def _pass(self):
        if self.hangs:
            await asyncio.sleep(WAIT)
        if not self.open:
            raise ConnectionError("the way is closed")

    async def sync(self, report, seconds):
        self.calls += 1
        await self._pass()
        return await self.actor.sync(report, seconds)

    async def reconnect(self):
        self.reconnects += 1
        await self._pass()


@pytest.fixture
def join():
    made = []

    def make(way, patience=WAIT):
        made.append(ClusterLimiter("linked", way.limit, way.lease, patience, way))
        return made[-1]

    yield make
    for limiter in made:
        limiter.close()


async def test_two_processes_share_a_limit_and_recall_each_others_idle_permits(join):
    way = Way(Limit(max_concurrent=2), 5.0)
    first, second = join(way), join(way)
    for limiter in (first, second, first, second):
        permits = [await limiter.acquire(WAIT) for _ in range(2)]
        assert way.info().held == 2
        for permit in permits:
            permit.release()
    assert first.held == second.held == 0


async def test_a_process_with_nothing_to_do_is_silent_and_forgotten(join):
    way = Way(Limit(max_concurrent=2), 0.3)
    limiter = join(way)
    (await limiter.acquire(WAIT)).release()
    await until_async(lambda: way.info().clients == 0, "it still talks")
    calls = way.calls
    await asyncio.sleep(0.5)
    assert way.calls == calls
    (await limiter.acquire(WAIT)).release()


async def test_a_way_that_breaks_and_mends_loses_nothing(join):
    way = Way(Limit(max_concurrent=1), 5.0)
    first, second = join(way), join(way)
    held = await first.acquire(WAIT)
    waiting = asyncio.create_task(second.acquire(WAIT))
    await until_async(lambda: way.info().waiting == 1)
    way.open = False
    held.release()
    await asyncio.sleep(0.1)
    assert not waiting.done()
    way.open = True
    (await waiting).release()
    assert way.reconnects


async def test_waiters_fail_when_patience_ends_and_later_ones_are_served_again(join):
    way = Way(Limit(max_concurrent=1), 5.0)
    limiter = join(way, patience=0.2)
    way.open = False
    with pytest.raises(InfrastructureError, match=r"could not be reached for 0\.2 s: the way is closed"):
        await limiter.acquire(WAIT)
    with pytest.raises(InfrastructureError):
        await asyncio.to_thread(limiter.acquire_blocking, WAIT)
    way.open = True
    (await limiter.acquire(WAIT)).release()


async def test_an_actor_that_does_not_answer_is_lost(join):
    way = Way(Limit(max_concurrent=1), 0.1)
    limiter = join(way, patience=0.1)
    way.hangs = True
    with pytest.raises(InfrastructureError, match="could not be reached"):
        await limiter.acquire(WAIT)


async def test_a_new_actor_takes_over_what_is_held(join):
    way = Way(Limit(max_concurrent=2), 1.5)
    first, second = join(way), join(way)
    held = [await first.acquire(WAIT), await first.acquire(WAIT)]
    way.replace()
    with pytest.raises(TimeoutError):
        await second.acquire(timeout=2.0)
    assert first.held == 2
    assert way.info().held == 2
    held[0].release()
    (await second.acquire(WAIT)).release()
    held[1].release()


async def test_a_stopped_process_loses_its_permits_and_finds_out(join):
    way = Way(Limit(max_concurrent=1), 1.0)
    first, second = join(way), join(way)
    held = await first.acquire(WAIT)
    first._lock.acquire()  # it cannot report: as good as stopped
    releaser = threading.Timer(3.0, first._lock.release)
    releaser.start()
    theirs = await second.acquire(WAIT)
    releaser.join()
    held.release()
    await until_async(lambda: first.held == 0)
    assert way.info().held == 1
    with pytest.raises(TimeoutError):
        await first.acquire(timeout=0.05)
    theirs.release()
    (await first.acquire(WAIT)).release()


async def test_closing_gives_back_and_fails_waiters(join):
    way = Way(Limit(max_concurrent=1), 60.0)
    first, second = join(way), join(way)
    await first.acquire(WAIT)
    waiting = asyncio.create_task(first.acquire(WAIT))
    await asyncio.sleep(0.05)
    await asyncio.to_thread(first.close)
    with pytest.raises(InfrastructureError, match="it was closed"):
        await waiting
    with pytest.raises(InfrastructureError, match="it was closed"):
        await first.acquire(WAIT)
    (await second.acquire(WAIT)).release()


async def test_a_rate_is_shared(join):
    way = Way(Limit(per_second=50, burst=1), 5.0)
    limiters = [join(way), join(way)]
    began = time.monotonic()
    await asyncio.gather(*(limiter.acquire(WAIT) for limiter in limiters for _ in range(5)))
    assert time.monotonic() - began >= 9 / 50
