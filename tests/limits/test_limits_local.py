"""Limits in one process: tasks, threads, both at once, several event loops, cancellation in every moment."""

import asyncio
import gc
import random
import threading

import pytest

from etude.limits import ConcurrencyLimit, Limit, LocalLimiter, RateLimit


class Gauge:
    """How many are inside at once, and the most there ever were."""

    def __init__(self):
        self.now = self.most = 0
        self.lock = threading.Lock()

    def __enter__(self):
        with self.lock:
            self.now += 1
            self.most = max(self.most, self.now)

    def __exit__(self, *_):
        with self.lock:
            self.now -= 1


def test_tasks_of_several_loops_and_threads_share_a_limit():
    limiter, gauge = ConcurrencyLimit(2), Gauge()

    async def task():
        for _ in range(10):
            async with limiter.permit():
                with gauge:
                    await asyncio.sleep(0)

    async def tasks():
        await asyncio.gather(*(task() for _ in range(5)))

    def plain():
        for _ in range(20):
            with limiter.permit(), gauge:
                pass

    targets = [lambda: asyncio.run(tasks())] * 3 + [plain] * 4
    threads = [threading.Thread(target=target) for target in targets]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert 1 <= gauge.most <= 2
    assert limiter.held == limiter.waiting == 0


async def test_permits_go_out_in_the_order_of_asking():
    limiter, served = ConcurrencyLimit(1), []
    first = await limiter.acquire()

    async def worker(number):
        async with limiter.permit():
            served.append(number)

    tasks = []
    for number in range(20):
        tasks.append(asyncio.create_task(worker(number)))
        await asyncio.sleep(0)
    assert limiter.try_acquire() is None
    first.release()
    assert limiter.try_acquire() is None, "a free permit belongs to who waits"
    await asyncio.gather(*tasks)
    assert served == list(range(20))


@pytest.mark.parametrize("seed", range(5))
async def test_waiters_cancelled_at_any_moment_lose_no_permit(seed):
    chance = random.Random(seed)
    limiter, gauge = ConcurrencyLimit(2), Gauge()

    async def worker():
        async with limiter.permit(timeout=chance.choice([None, 0.0, 0.001])):
            with gauge:
                await asyncio.sleep(chance.choice([0, 0, 0.0005]))

    tasks = []
    for _ in range(200):
        tasks.append(asyncio.create_task(worker()))
        if chance.random() < 0.5:
            chance.choice(tasks).cancel()
        if chance.random() < 0.5:
            await asyncio.sleep(0)
    ends = await asyncio.gather(*tasks, return_exceptions=True)
    assert {type(end) for end in ends} <= {type(None), asyncio.CancelledError, TimeoutError, asyncio.TimeoutError}
    assert gauge.most == 2
    assert limiter.held == limiter.waiting == 0


async def test_a_waiter_cancelled_in_the_moment_of_its_grant_passes_it_on():
    limiter = ConcurrencyLimit(1)
    first = await limiter.acquire()
    unlucky = asyncio.create_task(limiter.acquire())
    lucky = asyncio.create_task(limiter.acquire())
    await asyncio.sleep(0)
    first.release()  # grants to `unlucky`, which has not run since
    unlucky.cancel()
    permit = await asyncio.wait_for(lucky, 5)
    with pytest.raises(asyncio.CancelledError):
        await unlucky
    permit.release()
    assert limiter.held == 0


async def test_an_error_inside_the_block_releases():
    limiter = ConcurrencyLimit(1)
    with pytest.raises(ZeroDivisionError):
        async with limiter.permit():
            raise ZeroDivisionError
    with pytest.raises(ZeroDivisionError), limiter.permit():
        raise ZeroDivisionError
    assert limiter.held == 0


async def test_waiting_ends_after_its_timeout():
    limiter = ConcurrencyLimit(1)
    async with limiter.permit():
        with pytest.raises(TimeoutError, match=r"no permit within 0\.01 s"):
            await limiter.acquire(timeout=0.01)
        with pytest.raises(TimeoutError, match=r"no permit within 0\.01 s"):
            await asyncio.to_thread(limiter.acquire_blocking, 0.01)
        assert limiter.waiting == 0
    assert limiter.held == 0


@pytest.fixture
def dead_waiters():
    """Leaves `n` tasks waiting for `limiter` on a loop that is closed under them."""
    tasks = []

    def leave(limiter, n):
        loop = asyncio.new_event_loop()
        loop.set_exception_handler(lambda *_: None)  # they are destroyed while pending, on purpose
        tasks.extend(loop.create_task(limiter.acquire()) for _ in range(n))
        loop.run_until_complete(asyncio.sleep(0))
        assert n - 100 < limiter.waiting <= n  # a rate may have granted some meanwhile
        loop.close()

    yield leave
    tasks.clear()
    gc.collect()


def test_a_waiter_whose_loop_is_closed_is_passed_over(dead_waiters):
    limiter = ConcurrencyLimit(1)
    first = limiter.acquire_blocking()
    dead_waiters(limiter, 3)
    first.release()
    limiter.acquire_blocking(timeout=5).release()
    assert limiter.held == limiter.waiting == 0


def test_many_dead_waiters_of_a_rate_are_passed_over(dead_waiters):
    limiter = RateLimit(10, burst=1)
    limiter.acquire_blocking()
    dead_waiters(limiter, 3000)
    limiter.acquire_blocking(timeout=5)
    assert limiter.waiting == 0


async def test_a_rate_holds_for_tasks_and_threads_alike():
    limiter = RateLimit(200, burst=1)
    loop = asyncio.get_running_loop()
    began = loop.time()
    await asyncio.gather(
        *(limiter.acquire() for _ in range(10)),
        *(asyncio.to_thread(limiter.acquire_blocking, 5) for _ in range(10)),
    )
    assert loop.time() - began >= 19 / 200  # a bound that no busy machine can break
    assert limiter.waiting == limiter.held == 0


async def test_who_leaves_the_head_of_a_rates_queue_hands_the_clock_on():
    limiter = RateLimit(20, burst=1)
    await limiter.acquire()
    head, next_ = asyncio.create_task(limiter.acquire()), asyncio.create_task(limiter.acquire())
    await asyncio.sleep(0)
    head.cancel()
    await asyncio.wait_for(next_, 5)
    assert limiter.waiting == 0


async def test_both_limits_hold_together():
    limiter, gauge = LocalLimiter(Limit(max_concurrent=2, per_second=500, burst=5)), Gauge()
    loop = asyncio.get_running_loop()
    began = loop.time()

    async def worker():
        async with limiter.permit():
            with gauge:
                await asyncio.sleep(0.001)

    await asyncio.gather(*(worker() for _ in range(25)))
    assert gauge.most <= 2
    assert loop.time() - began >= 20 / 500
    assert limiter.held == limiter.waiting == 0


async def test_one_holder_object_serves_one_block_after_another():
    limiter = ConcurrencyLimit(1)
    holding = limiter.permit()
    for _ in range(3):
        async with holding as permit:
            assert limiter.held == 1
        permit.release()
    assert limiter.held == 0
