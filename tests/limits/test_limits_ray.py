"""The limiter on a real cluster: two raylets, several processes, a holder that is killed, one that is stopped."""

import asyncio
import contextlib
import functools
import itertools
import os
import pickle
import signal
import subprocess
import sys
import textwrap
import threading
import time
from types import SimpleNamespace

import pytest
from ray_stage import ray_cluster
from wait_stage import WAIT, until

from etude.errors import ConfigError, InfrastructureError
from etude.limits import (
    ExecutionWorker,
    Limit,
    PoolMode,
    TokenBucketWorker,
    cluster_limiter,
    init_execution_pool,
    open_limiter,
)
from etude.limits.cluster import NAMESPACE, ClusterLimiter
from etude.schemas import FunctionCall, OpenAIFunctionToolSchema, ToolResponse
from etude.tools import BaseTool, ToolSession

ray = pytest.importorskip("ray")


@pytest.fixture(scope="module")
def cluster():
    """Two nodes, each a raylet of its own; the resources `node-0` and `node-1` choose between them."""
    ray.cloudpickle.register_pickle_by_value(sys.modules[__name__])  # workers cannot import tests
    with ray_cluster(2, 2) as nodes:
        yield nodes


class Witness:
    """An actor that counts who is inside at once."""

    def __init__(self):
        self.inside = self.most = self.seen = 0

    def enter(self):
        self.inside += 1
        self.seen += 1
        self.most = max(self.most, self.inside)

    def leave(self):
        self.inside -= 1

    def report(self):
        return self.most, self.seen, self.inside


@pytest.fixture
def witness(cluster):
    actor = ray.remote(Witness).options(num_cpus=0).remote()
    yield actor
    ray.kill(actor)


def watched(witness, seconds=0.01):
    """A function that a pool can run: is seen, and stays a moment."""

    def visit(value):
        ray.get(witness.enter.remote())
        time.sleep(seconds)
        ray.get(witness.leave.remote())
        return value

    return visit


class HeldPermit:
    """An actor that holds permits until it is told otherwise, or killed."""

    def __init__(self):
        self.permits = []

    def open(self, name, n, lease_seconds):
        self.limiter = cluster_limiter(name, Limit(max_concurrent=n), lease_seconds)

    def take(self, count):
        self.permits += [self.limiter.acquire_blocking(WAIT) for _ in range(count)]
        return os.getpid()

    def give(self):
        while self.permits:
            self.permits.pop().release()

    def node(self):
        return ray.get_runtime_context().get_node_id()

    def info(self):
        return self.limiter.info()


class Rollouts:
    """An actor that has trajectories call a tool whose calls are limited in the whole cluster."""

    def __init__(self, witness):
        class Watched(BaseTool):
            async def execute(self, instance_id, parameters, **kwargs):
                await witness.enter.remote()
                await asyncio.sleep(parameters.get("seconds", 0.01))
                await witness.leave.remote()
                return ToolResponse(text="done"), 0.0, {}

        function = {"type": "function", "function": {"name": "watched"}}
        config = {"max_concurrent_calls": {"limit": 3, "scope": "cluster"}, "timeout": WAIT}
        self.tool = Watched(config, OpenAIFunctionToolSchema.model_validate(function))

    async def call(self, count, seconds=0.01):
        """What the answers of one turn were; [] if it was given up."""
        async with ToolSession({"watched": self.tool}, request_id="r") as session:
            calls = [FunctionCall(name="watched", arguments=f'{{"seconds": {seconds}}}')] * count
            self.turn = asyncio.ensure_future(session.execute(calls, 0))
            try:
                return [outcome.response.text for outcome in await self.turn]
            except asyncio.CancelledError:
                return []

    async def give_up(self):
        self.turn.cancel()


@pytest.fixture(scope="module")
def actors(cluster):
    """One process on each node, for all tests that do not kill it."""
    return {node: start_holding(node) for node in ("node-0", "node-1")}


def start_holding(node):
    return ray.remote(HeldPermit).options(num_cpus=0, resources={node: 1}).remote()


@pytest.fixture
def holding(actors):
    """Has the process of a node open a limiter, and give back at the end what it took."""
    used = []

    def take_part(name, n, lease_seconds=15.0, node="node-0", actor=None):
        actor = actor or actors[node]
        ray.get(actor.open.remote(name, n, lease_seconds))
        used.append(actor)
        return actor

    yield take_part
    for actor in used:
        with contextlib.suppress(ray.exceptions.RayActorError):
            ray.get(actor.give.remote())


def test_one_name_is_one_limit_in_every_process(cluster):
    limiter = cluster_limiter("one", Limit(max_concurrent=2))
    assert cluster_limiter("one", Limit(max_concurrent=2)) is limiter
    assert open_limiter("one", Limit(max_concurrent=2)) is limiter
    assert pickle.loads(pickle.dumps(limiter)) is limiter
    with pytest.raises(ConfigError, match="the limiter 'one' allows 2 at once already; 3 at once is asked for"):
        cluster_limiter("one", Limit(max_concurrent=3))
    with pytest.raises(ConfigError, match=r"leases of 15 s already, not 3 s"):
        cluster_limiter("one", Limit(max_concurrent=2), lease_seconds=3)
    with pytest.raises(ConfigError, match="lease_seconds must be above 0"):
        cluster_limiter("two", Limit(max_concurrent=2), lease_seconds=0)

    @ray.remote(num_cpus=0, resources={"node-1": 1}, max_retries=0)
    def elsewhere(theirs, limit):
        mine = cluster_limiter("one", Limit(max_concurrent=2))
        cluster_limiter("one", limit)
        return type(theirs).__name__, theirs is mine

    assert ray.get(elsewhere.remote(limiter, Limit(max_concurrent=2))) == ("ClusterLimiter", True)
    with pytest.raises(ConfigError, match="2 at once already"):
        ray.get(elsewhere.remote(limiter, Limit(max_concurrent=3)))


def test_the_actor_is_detached_and_keeps_no_idle_worker(cluster):
    """The process that made it has ended, which an open call to the actor would prevent; it still keeps the limit."""

    @ray.remote(num_cpus=0, max_calls=1, resources={"node-1": 1})
    def make():
        cluster_limiter("left", Limit(max_concurrent=1), lease_seconds=1.5).acquire_blocking(WAIT).release()
        return os.getpid()

    pid = ray.get(make.remote())
    until(lambda: not os.path.exists(f"/proc/{pid}"), "the worker did not end")
    limiter = cluster_limiter("left", Limit(max_concurrent=1), lease_seconds=1.5)
    limiter.acquire_blocking(WAIT).release()
    assert ray.get_actor("limit:left", namespace=NAMESPACE)
    with pytest.raises(ConfigError):
        cluster_limiter("left", Limit(max_concurrent=2), lease_seconds=1.5)


class TestMultiNodeRateLimiterCase:
    """Seed 003's case: workers on two nodes stay within one limit."""

    def test_rate_limiter(self, cluster, witness):
        workers = [
            ray.remote(ExecutionWorker)
            .options(num_cpus=0, max_concurrency=4, resources={node: 1})
            .remote(rate_limit=3, name="across")
            for node in ("node-0", "node-1")
        ]
        assert ray.get([worker.ping.remote() for worker in workers]) == [True, True]
        visit = watched(witness)
        values = ray.get([workers[i % 2].execute.remote(visit, i) for i in range(24)])
        assert values == list(range(24))
        most, seen, inside = ray.get(witness.report.remote())
        assert (most <= 3, seen, inside) == (True, 24, 0)
        assert most >= 2, "they do run beside each other"

    def test_the_workers_are_on_different_nodes(self, holding):
        first, second = holding("where", 1, node="node-0"), holding("where", 1, node="node-1")
        assert ray.get(first.node.remote()) != ray.get(second.node.remote())

    def test_a_holder_that_is_killed_gives_its_permits_back_within_its_lease(self, holding):
        lease = 2.0
        victim = holding("killed", 3, lease, actor=start_holding("node-0"))
        heir = holding("killed", 3, lease, "node-1")
        pid = ray.get(victim.take.remote(3))
        waiting = heir.take.remote(3)
        assert not ray.wait([waiting], timeout=0.2)[0]
        os.kill(pid, signal.SIGKILL)
        killed_at = time.monotonic()
        ray.get(waiting, timeout=WAIT)
        assert time.monotonic() - killed_at < lease + 10  # what a busy machine may need
        assert ray.get(heir.info.remote()).held == 3

    def test_a_holder_that_was_stopped_cannot_release_what_others_hold_now(self, holding):
        lease = 2.0
        victim, heir = holding("stopped", 2, lease, "node-0"), holding("stopped", 2, lease, "node-1")
        pid = ray.get(victim.take.remote(2))
        os.kill(pid, signal.SIGSTOP)
        try:
            ray.get(heir.take.remote(2), timeout=WAIT)
        finally:
            os.kill(pid, signal.SIGCONT)
        ray.get(victim.give.remote(), timeout=WAIT)
        assert ray.get(heir.info.remote()).held == 2
        again = victim.take.remote(1)
        assert not ray.wait([again], timeout=0.2)[0], "both permits are the heir's"
        ray.get(heir.give.remote())
        ray.get(again, timeout=WAIT)

    def test_a_waiter_that_was_stopped_until_it_lost_its_place_asks_again(self, holding):
        limiter = cluster_limiter("paused", Limit(max_concurrent=1), 2.0)
        held = limiter.acquire_blocking(WAIT)
        victim = holding("paused", 1, 2.0, "node-1")
        pid = ray.get(victim.take.remote(0))
        waiting = victim.take.remote(1)
        until(lambda: limiter.info().waiting == 1, "it does not wait")
        os.kill(pid, signal.SIGSTOP)
        try:
            until(lambda: limiter.info().waiting == 0, "it keeps its place")
        finally:
            os.kill(pid, signal.SIGCONT)
        held.release()
        ray.get(waiting, timeout=WAIT)


def test_a_tools_calls_are_limited_in_the_whole_cluster(cluster, witness):
    """From two nodes; the calls of a turn that is given up, running and waiting ones, leave no permit behind."""
    first, second = (
        ray.remote(Rollouts).options(num_cpus=0, resources={node: 1}).remote(witness) for node in ("node-0", "node-1")
    )
    given_up = first.call.remote(8, WAIT)
    until(lambda: ray.get(witness.report.remote())[1] == 3, "no call began")
    ray.get(first.give_up.remote())
    answers = ray.get([second.call.remote(6), first.call.remote(6), second.call.remote(6)], timeout=WAIT)
    assert answers == [["done"] * 6] * 3
    assert ray.get(given_up) == []
    most, seen, _ = ray.get(witness.report.remote())
    assert (most <= 3 + 3, seen) == (True, 18 + 3)  # the three given up never said that they left
    limiter = cluster_limiter("tool:watched", Limit(max_concurrent=3))
    permits = [limiter.acquire_blocking(WAIT) for _ in range(3)]
    with pytest.raises(TimeoutError):
        limiter.acquire_blocking(0.2)
    for permit in permits:
        permit.release()


class TestSingleNodeRateLimiterCase:
    """Seed 003's case: one worker with more threads than permits."""

    def test_rate_limiter(self, cluster, witness):
        with init_execution_pool(8, rate_limit=3, name="single") as pool:
            visit = watched(witness)
            assert ray.get([pool.execute.remote(visit, i) for i in range(18)]) == list(range(18))
        most, seen, inside = ray.get(witness.report.remote())
        assert (most <= 3, seen, inside) == (True, 18, 0)

    def test_rotten_execution(self, cluster):
        """A function that fails gives its permit back, and its error reaches the caller."""

        def rotten(value):
            if value % 2:
                raise ZeroDivisionError(f"rotten {value}")
            return value

        with init_execution_pool(4, rate_limit=1, name="rotten") as pool:
            references = [pool.execute.remote(rotten, i) for i in range(10)]
            assert ray.get(references[::2]) == [0, 2, 4, 6, 8]
            for reference in references[1::2]:
                with pytest.raises(ZeroDivisionError, match="rotten"):
                    ray.get(reference)

    def test_without_a_limit(self, cluster, witness):
        with init_execution_pool(4, enable_global_rate_limit=False, rate_limit=1, name="rotten") as pool:
            ray.get([pool.execute.remote(watched(witness, 0.2), i) for i in range(4)])
        assert ray.get(witness.report.remote())[0] > 1


def test_basic_multi_process_init(cluster):
    """Seed 003's case: however many processes ask at once, there is one actor."""

    @ray.remote(num_cpus=0)
    def worker_of(_):
        bucket = TokenBucketWorker(7, name="basic")
        bucket.acquire(WAIT)
        count = bucket.get_current_count()
        bucket.release()
        return count, bucket.get_current_count(), ray.get_actor("limit:basic", namespace=NAMESPACE)._actor_id.hex()

    results = ray.get([worker_of.remote(i) for i in range(4)])
    assert {result[:2] for result in results} == {(1, 0)}
    assert len({result[2] for result in results}) == 1


async def test_a_pool_of_processes(cluster, witness):
    with init_execution_pool(2, rate_limit=1, mode=PoolMode.ProcessMode, name="processes") as pool:
        visit = watched(witness)

        def who(value):
            visit(value)
            return os.getpid()

        pids = await asyncio.gather(*(pool.execute.remote(who, i) for i in range(6)))
        assert await pool.ping.remote()
    assert len(set(pids)) == 2
    assert ray.get(witness.report.remote()) == (1, 6, 0)


def test_closing_a_pool_gives_its_permits_back_before_any_lease_runs_out(cluster):
    with init_execution_pool(1, rate_limit=1, name="closed") as pool:
        assert ray.get(pool.execute.remote(int)) == 0
    limiter = cluster_limiter("closed", Limit(max_concurrent=1))
    until(lambda: limiter.info().held == 0, "the permit was not given back")


async def test_waiters_are_cancelled_and_time_out_without_losing_a_permit(holding):
    limiter = cluster_limiter("cancel", Limit(max_concurrent=2))
    other = holding("cancel", 2, node="node-1")
    await other.take.remote(2)
    tasks = [asyncio.create_task(limiter.acquire()) for _ in range(6)]
    await asyncio.sleep(0.05)
    with pytest.raises(TimeoutError, match=r"no permit within 0\.05 s"):
        await limiter.acquire(timeout=0.05)
    with pytest.raises(TimeoutError):
        await asyncio.to_thread(limiter.acquire_blocking, 0.05)
    for task in tasks[:4]:
        task.cancel()
    await other.give.remote()
    for permit in await asyncio.wait_for(asyncio.gather(*tasks[4:]), WAIT):
        permit.release()
    await asyncio.wait_for(other.take.remote(2), WAIT)


class Messenger:
    """Stands before a limiter's actor: notes how many tickets each message asks for and releases, and has the thread that
    sends wait, after it has sent, until it `may_go_on`."""

    def __init__(self, actor):
        self.actor, self.sent = actor, []
        self.may_go_on = threading.Event()
        self.may_go_on.set()

    def __getattr__(self, method):
        return SimpleNamespace(remote=functools.partial(self.send, getattr(self.actor, method)))

    def send(self, method, *arguments):
        reply = method.remote(*arguments)
        if len(arguments) == 5:
            self.sent.append((len(arguments[1]), len(arguments[2])))
        assert self.may_go_on.wait(WAIT)
        return reply

    @contextlib.contextmanager
    def under_way(self, count):
        """Has the next message stay under way: until `count` were sent in all, then meanwhile."""
        self.may_go_on.clear()
        yield lambda: until(lambda: len(self.sent) == count, "no message was sent")
        self.may_go_on.set()


@pytest.fixture
def messages(monkeypatch):
    def of(limiter):
        monkeypatch.setattr(limiter, "_actor", Messenger(limiter._actor))
        return limiter._actor

    return of


def test_what_is_asked_and_released_while_a_message_is_under_way_goes_with_the_next(cluster, messages):
    limiter = cluster_limiter("gathered", Limit(max_concurrent=64))
    messenger = messages(limiter)
    with messenger.under_way(1) as is_sent:
        permits = [limiter.enter()]
        is_sent()
        permits += [limiter.enter() for _ in range(49)]
    assert [permit.outcome.result(WAIT) for permit in permits] == [None] * 50
    assert messenger.sent == [(1, 0), (49, 0)]
    with messenger.under_way(3) as is_sent:
        permits.pop().release()
        is_sent()
        for permit in permits:
            permit.release()
        permits = [limiter.enter() for _ in range(7)]
    assert [permit.outcome.result(WAIT) for permit in permits] == [None] * 7
    assert messenger.sent[2:] == [(0, 1), (7, 49)]
    assert limiter.info().held == limiter.held == 7
    for permit in permits:
        permit.release()
    until(lambda: limiter.info().held == 0, "not all were released")


def test_a_pure_rate_costs_one_message_for_those_who_ask_at_once_and_none_to_release(cluster, messages):
    limiter = cluster_limiter("rates", Limit(per_second=0.01, burst=20))
    messenger = messages(limiter)
    with messenger.under_way(1) as is_sent:
        permits = [limiter.enter()]
        is_sent()
        permits += [limiter.enter() for _ in range(19)]
    for permit in permits:
        assert permit.outcome.result(WAIT) is None
        permit.release()
    with pytest.raises(TimeoutError):
        limiter.acquire_blocking(0.1)
    assert messenger.sent[:3] == [(1, 0), (19, 0), (1, 0)]


def test_one_ask_of_a_message_is_cancelled_while_it_is_under_way(cluster, messages):
    limiter = cluster_limiter("one-of-three", Limit(max_concurrent=3))
    messenger = messages(limiter)
    with messenger.under_way(1) as is_sent:
        permits = [limiter.enter() for _ in range(3)]
        is_sent()
        count, _ = messenger.sent[0]
        permits[0].release()
    permits.append(limiter.enter())
    assert [permit.outcome.result(WAIT) for permit in permits[1:]] == [None] * 3
    assert 1 <= count <= 3
    assert not permits[0].outcome.done() or limiter.held == 3
    for permit in permits:
        permit.release()
    until(lambda: limiter.info().held == limiter.info().waiting == 0, "a permit was lost")


def test_waiters_of_a_process_are_served_in_order_beside_another_process(holding):
    limiter = cluster_limiter("order", Limit(max_concurrent=1))
    other = holding("order", 1, node="node-1")
    held = limiter.acquire_blocking(WAIT)
    first = [limiter.enter() for _ in range(3)]
    until(lambda: limiter.info().waiting == 3, "they do not wait")
    theirs = other.take.remote(1)
    until(lambda: limiter.info().waiting == 4, "the other does not wait")
    last = limiter.enter()
    held.release()
    for number, permit in enumerate(first):
        assert permit.outcome.result(WAIT) is None
        assert not any(later.outcome.done() for later in [*first[number + 1 :], last])
        assert not ray.wait([theirs], timeout=0.05)[0]
        permit.release()
    ray.get(theirs, timeout=WAIT)
    assert not last.outcome.done()
    ray.get(other.give.remote())
    assert last.outcome.result(WAIT) is None
    last.release()


def test_threads_and_tasks_of_one_process_share_its_permits(cluster):
    limiter = cluster_limiter("shared", Limit(max_concurrent=3))
    inside, most, lock = 0, 0, threading.Lock()

    def thread():
        nonlocal inside, most
        for _ in range(50):
            with limiter.permit(WAIT):
                with lock:
                    inside, most = inside + 1, max(most, inside + 1)
                with lock:
                    inside -= 1

    async def tasks():
        async def task():
            for _ in range(20):
                async with limiter.permit(WAIT):
                    await asyncio.sleep(0)

        await asyncio.gather(*(task() for _ in range(8)))

    threads = [threading.Thread(target=thread) for _ in range(8)]
    threads.append(threading.Thread(target=lambda: asyncio.run(tasks())))
    for each in threads:
        each.start()
    for each in threads:
        each.join()
    assert most <= 3
    assert (limiter.held, limiter.waiting) == (0, 0)


async def test_a_rate_holds_across_processes(cluster):
    limit = Limit(per_second=20, burst=1)
    limiter = cluster_limiter("rate", limit)

    @ray.remote(num_cpus=0)
    def take(limit):
        cluster_limiter("rate", limit)
        for _ in range(3):
            cluster_limiter("rate", limit).acquire_blocking(WAIT)

    began = time.monotonic()
    await asyncio.gather(take.remote(limit), take.remote(limit), *(limiter.acquire(WAIT) for _ in range(3)))
    assert time.monotonic() - began >= 8 / 20  # a bound that no busy machine can break


def test_the_actor_starts_again_with_the_leases_that_are_out(holding):
    """The actor's process dies; Ray starts it anew; who held still holds, nobody else gets in meanwhile."""
    limiter = cluster_limiter("reborn", Limit(max_concurrent=1), lease_seconds=6)
    permit = limiter.acquire_blocking(WAIT)
    actor = ray.get_actor("limit:reborn", namespace=NAMESPACE)
    ray.kill(actor, no_restart=False)
    other = holding("reborn", 1, 6, "node-1")
    waiting = other.take.remote(1)
    until(lambda: limiter.info().waiting == 1, "the other's request did not arrive")
    assert not ray.wait([waiting], timeout=8)[0]
    assert limiter.info().held == 1
    permit.release()
    ray.get(waiting, timeout=WAIT)


def test_an_actor_that_was_removed_is_made_again(cluster):
    limiter = cluster_limiter("removed", Limit(max_concurrent=1), lease_seconds=1, patience=WAIT)
    limiter.acquire_blocking(WAIT).release()
    ray.kill(ray.get_actor("limit:removed", namespace=NAMESPACE))
    limiter.acquire_blocking(WAIT).release()


def test_waiters_fail_while_the_actor_does_not_answer_and_are_served_again_when_it_does(cluster):
    limiter = cluster_limiter("stuck", Limit(max_concurrent=1), lease_seconds=1, patience=1)
    pid = ray.get(ray.get_actor("limit:stuck", namespace=NAMESPACE).__ray_call__.remote(lambda _: os.getpid()))
    os.kill(pid, signal.SIGSTOP)
    try:
        with pytest.raises(InfrastructureError, match="the limiter is gone: it could not be reached for 1 s"):
            limiter.acquire_blocking(WAIT)
        assert limiter.waiting == 0
    finally:
        os.kill(pid, signal.SIGCONT)
    limiter.acquire_blocking(WAIT).release()


@pytest.mark.parametrize("dies", [True, False], ids=["dies", "hangs"])
def test_an_actor_that_is_lost_fails_all_asks_of_a_message(cluster, monkeypatch, dies):
    limiter = cluster_limiter(f"lost-{dies}", Limit(max_concurrent=1), lease_seconds=1, patience=1)
    limiter.acquire_blocking(WAIT)
    waiting = [limiter.enter() for _ in range(3)]
    until(lambda: limiter.info().waiting == 3, "they do not wait")
    actor = ray.get_actor(f"limit:lost-{dies}", namespace=NAMESPACE)
    pid = ray.get(actor.__ray_call__.remote(lambda _: os.getpid()))
    with monkeypatch.context() as patch:
        patch.setattr(limiter, "_find", lambda settling: actor)  # no other is made
        if dies:
            ray.kill(actor)
        else:
            os.kill(pid, signal.SIGSTOP)
        try:
            for permit in waiting:
                with pytest.raises(InfrastructureError, match="the limiter is gone: it could not be reached for 1 s"):
                    raise permit.outcome.result(WAIT)
            assert limiter.waiting == 0
        finally:
            if not dies:
                os.kill(pid, signal.SIGCONT)
    limiter.close()


def test_an_actor_that_dies_and_is_made_again_serves_all_asks_of_a_message(cluster):
    limiter = cluster_limiter("remade", Limit(max_concurrent=1), lease_seconds=1, patience=WAIT)
    held = limiter.acquire_blocking(WAIT)
    waiting = [limiter.enter() for _ in range(3)]
    until(lambda: limiter.info().waiting == 3, "they do not wait")
    ray.kill(ray.get_actor("limit:remade", namespace=NAMESPACE))
    held.release()
    for permit in waiting:
        assert permit.outcome.result(WAIT) is None
        permit.release()


def test_a_search_for_the_actor_that_hangs_is_begun_again(cluster, monkeypatch):
    monkeypatch.setattr("etude.limits.cluster._FIND_SECONDS", 0.5)
    limiter = cluster_limiter("found", Limit(max_concurrent=1), lease_seconds=1, patience=WAIT)
    held = limiter.acquire_blocking(WAIT)
    waiting = limiter.enter()
    until(lambda: limiter.info().waiting == 1, "it does not wait")
    find, hangs, searches = limiter._find, threading.Event(), itertools.count()

    def find_or_hang(settling):
        if next(searches) == 0:
            hangs.wait()
        return find(settling)

    monkeypatch.setattr(limiter, "_find", find_or_hang)
    ray.kill(ray.get_actor("limit:found", namespace=NAMESPACE))
    held.release()
    try:
        assert waiting.outcome.result(WAIT) is None
    finally:
        hangs.set()
    waiting.release()


def test_waiters_fail_when_the_limiter_is_closed(cluster):
    limiter = cluster_limiter("closing", Limit(max_concurrent=1))
    permit = limiter.acquire_blocking(WAIT)
    errors = []

    def wait():
        try:
            limiter.acquire_blocking(WAIT)
        except InfrastructureError as error:
            errors.append(str(error))

    thread = threading.Thread(target=wait)
    thread.start()
    until(lambda: limiter.waiting == 1, "nobody waits")
    limiter.close()
    thread.join(WAIT)
    assert errors == ["the limiter is gone: it was closed"]
    permit.release()
    again = cluster_limiter("closing", Limit(max_concurrent=1))
    assert again is not limiter
    again.acquire_blocking(WAIT).release()


def test_a_driver_that_ends_gives_its_permits_back_at_once(cluster):
    """In good order, that is: it need not wait for the lease."""
    program = """
        import sys
        from etude.limits import Limit, cluster_limiter
        import ray
        ray.init(address=sys.argv[1], log_to_driver=False)
        cluster_limiter("driver", Limit(max_concurrent=1), lease_seconds=600).acquire_blocking(60)
    """
    command = [sys.executable, "-c", textwrap.dedent(program), cluster.address]
    subprocess.run(command, check=True, timeout=2 * WAIT, capture_output=True)
    limiter = cluster_limiter("driver", Limit(max_concurrent=1), lease_seconds=600)
    limiter.acquire_blocking(WAIT).release()


def test_a_tool_follows_its_process_out_of_a_cluster_and_into_another(cluster):
    """Its calls are limited wherever the process is now: in no cluster, by itself."""
    program = """
        import asyncio, sys
        import ray
        from etude.schemas import FunctionCall
        from etude.tools import FunctionTool, ToolSession

        def say() -> str:
            return "said"

        tool = FunctionTool(say, config={"max_concurrent_calls": {"limit": 1, "scope": "cluster"}})

        async def ask() -> None:
            async with ToolSession({"say": tool}, request_id="t") as session:
                [outcome] = await session.execute([FunctionCall(name="say", arguments="{}")], 0)
                print(outcome.response.text)

        for address in (sys.argv[1], None, sys.argv[1]):
            if address:
                ray.init(address=address, log_to_driver=False)
            asyncio.run(ask())
            ray.shutdown()
    """
    command = [sys.executable, "-c", textwrap.dedent(program), cluster.address]
    ended = subprocess.run(command, timeout=2 * WAIT, capture_output=True, text=True)
    assert ended.stdout.splitlines().count("said") == 3, ended.stderr[-2000:]  # Ray prints, too


def test_the_class_cannot_be_left_half_open(cluster):
    with pytest.raises(ConfigError, match="whole number"):
        ClusterLimiter("bad", Limit(max_concurrent=0), 1.0, 1.0)
    with pytest.raises(ConfigError, match="num_workers must be a whole number from 1"):
        init_execution_pool(0)
