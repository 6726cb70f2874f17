"""The router: stickiness, least load, health; no trajectory is lost when a replica is killed, hangs or lies."""

import asyncio
import os
import signal
from collections import Counter

import numpy as np
import pytest
from serving_stage import CONTEXT, Process, bigram_score, save_bigram
from wait_stage import until_async

from etude.errors import ConfigError, EngineError
from etude.inference import (
    NativeEngine,
    Router,
    RouterOptions,
    SamplingParams,
    ScriptedEngine,
    WeightMismatch,
    WeightProbe,
)
from etude.inference.http import HttpServer
from etude.inference.sglang import SGLangEngine
from etude.metrics import finish_metrics

FAST = RouterOptions(check_every=0.1, check_timeout=0.5, request_timeout=60.0, sync_timeout=10.0)
PROMPT = [3, 1, 4]


class Replica(ScriptedEngine):
    """Answers with its own number, may be told to fail, and keeps book of what it is asked."""

    def __init__(self, number, latency=0.0):
        super().__init__(lambda request_id, prompt, turn: [number], latency=latency)
        self.number, self.broken, self.well = number, False, True
        self.asked, self.weights, self.running = [], [], True

    async def generate(self, request_id, prompt_ids, sampling_params, *, images=None):
        self.asked.append((request_id, tuple(prompt_ids)))
        if self.broken:
            raise EngineError("broken")
        return await super().generate(request_id, prompt_ids, sampling_params)

    async def check(self):
        if not self.well:
            raise EngineError("not well")

    async def pause(self):
        self.running = False

    async def resume(self):
        self.running = True

    async def update_weights(self, source, version):
        if not self.well:
            raise EngineError("no weights taken")
        self.weights.append((source, version))


def group(count=3, **options):
    replicas = [Replica(number, **options) for number in range(count)]
    return Router({f"r{r.number}": r for r in replicas}, FAST), replicas


def played(scenario):
    return asyncio.run(asyncio.wait_for(scenario, 60))


async def lose_and_find(router, replicas, admit):
    """The first of two replicas breaks; it is well again, and looked at, while a request at the other is under way."""
    router.admit = admit
    await router.update_weights("folder", 1)
    replicas[0].broken, replicas[0].well = True, False
    router.open(["a"])
    await router.generate("a", PROMPT, {})
    replicas[0].broken, replicas[0].well = False, True
    replicas[1]._latency = 6 * FAST.check_every
    await router.generate("b", PROMPT, {})


def test_a_trajectory_stays_where_it_began_and_the_least_busy_gets_the_next():
    router, replicas = group()

    async def scenario():
        router.open([f"t{i}" for i in range(6)])
        for _ in range(3):
            await asyncio.gather(*(router.generate(f"t{i}", PROMPT, {}) for i in range(6)))
        for i in (0, 3):  # both of r0
            router.close(f"t{i}")
        outputs = [await router.generate(f"new{i}", PROMPT, {}) for i in range(2)]
        return [output.token_ids for output in outputs]

    assert played(scenario()) == [[0], [0]]
    homes = [{name for name, _ in replica.asked if name.startswith("t")} for replica in replicas]
    assert homes == [{"t0", "t3"}, {"t1", "t4"}, {"t2", "t5"}]
    assert replicas[0].opened == ["t0", "t3", "new0", "new1"]
    assert replicas[0].closed == ["t0", "t3"]
    assert finish_metrics(router.metrics()) == {"retries": 0, "ejections": 0, "replicas": 3.0, "sampled_tokens": 20.0}


def test_a_failed_replica_is_ejected_its_requests_asked_elsewhere_and_it_comes_back_with_new_weights():
    router, replicas = group(2)

    async def scenario():
        router.open(["a", "b"])
        replicas[0].broken, replicas[0].well = True, False
        outputs = await asyncio.gather(*(router.generate(name, PROMPT, {}) for name in "ab"))
        await router.update_weights("folder", 7)
        during = (list(router.replicas), finish_metrics(router.metrics()))
        replicas[0].broken, replicas[0].well = False, True
        slow = [router.generate(f"s{i}", PROMPT, {}) for i in range(2)]
        replicas[1]._latency = 1.0  # keeps a request under way, and so the watch
        await asyncio.gather(*slow)
        await until_async(lambda: len(router.replicas) == 2)
        return outputs, during

    outputs, (names, metrics) = played(scenario())
    assert [output.token_ids for output in outputs] == [[1], [1]]
    assert names == ["r1"]
    assert (metrics["ejections"], metrics["retries"], metrics["replicas"]) == (1.0, 1.0, 1.0)
    assert replicas[0].asked[0] == ("a", (3, 1, 4))
    assert ("a", (3, 1, 4)) in replicas[1].asked
    assert replicas[0].weights == replicas[1].weights == [("folder", 7)]


def test_a_replica_comes_back_though_no_request_lasts_as_long_as_the_time_between_checks():
    router, replicas = group(2)

    async def scenario():
        await router.update_weights("folder", 1)
        router.open(["a"])
        replicas[0].broken, replicas[0].well = True, False
        await router.generate("a", PROMPT, {})
        router.close("a")
        replicas[0].broken, replicas[0].well = False, True
        replicas[1]._latency = FAST.check_every / 10
        asked = 0
        while len(router.replicas) < 2:
            await router.generate(f"s{asked}", PROMPT, {})
            router.close(f"s{asked}")
            asked += 1
        return asked, router._watcher

    asked, watcher = played(scenario())
    assert asked > 1
    assert watcher is None or watcher.done()


def test_a_group_stays_together_as_long_as_no_replica_idles():
    router, replicas = group(3)

    async def scenario():
        router.open([f"u{i // 8}/{i}/0" for i in range(24)])
        homes = [Counter(name.split("/")[0] for name in replica.opened) for replica in replicas]
        router.close("u0/0/0")
        router.open(["u0/0/1"])
        router.open([f"big/{i}/0" for i in range(24)])
        return homes, [replica.groups.total() for replica in router._replicas]

    homes, loads = played(scenario())
    assert homes == [{"u0": 8}, {"u1": 8}, {"u2": 8}]
    assert replicas[0].opened[8] == "u0/0/1"
    assert max(loads) - min(loads) <= 8


def test_a_replica_that_serves_other_weights_is_warned_of_once(caplog):
    router, replicas = group(2)

    async def admit(engine, version):
        raise WeightMismatch("differs by 3 nats")

    with caplog.at_level("INFO"):
        played(lose_and_find(router, replicas, admit))
    told = [r.levelname for r in caplog.records if "differs by 3 nats" in r.getMessage()]
    assert told[0] == "WARNING"
    assert "WARNING" not in told[1:]


def test_a_replica_that_is_not_admitted_stays_out():
    router, replicas = group(2)
    verdicts = []

    async def admit(engine, version):
        verdicts.append((engine.number, version))
        raise EngineError("serves other weights")

    played(lose_and_find(router, replicas, admit))
    assert list(router.replicas) == ["r1"]
    assert set(verdicts) == {(0, 1)}


def test_a_bad_request_ejects_nobody_who_is_well_and_ends_after_some_attempts():
    router, replicas = group(2)

    async def scenario():
        for replica in replicas:
            replica.broken = True
        with pytest.raises(EngineError, match="given up after 4 attempts; the last: broken"):
            await router.generate("a", PROMPT, {})

    played(scenario())
    assert len(router.replicas) == 2
    assert {name for replica in replicas for name, _ in replica.asked} == {"a"}


def test_with_all_replicas_out_a_request_waits_for_one_or_for_its_limit():
    router, replicas = group(2)
    router.options = RouterOptions(check_every=0.05, check_timeout=0.5, request_timeout=1.0)

    async def scenario():
        for replica in replicas:
            replica.broken, replica.well = True, False
        with pytest.raises(EngineError, match="no replica answered within 1 s"):
            await router.generate("a", PROMPT, {})
        assert not router.replicas
        with pytest.raises(EngineError, match=r"pause: no engine replica is left: r0: .*; r1: "):
            await router.pause()
        router._paused = False  # as after a `resume` that found one
        asked = asyncio.ensure_future(router.generate("b", PROMPT, {}))
        await asyncio.sleep(0.1)
        replicas[1].broken, replicas[1].well = False, True
        return await asked

    assert played(scenario()).token_ids == [1]


def test_pause_resume_and_weights_reach_all_and_one_that_refuses_is_out():
    router, replicas = group(3)

    async def scenario():
        await router.pause()
        assert not any(replica.running for replica in replicas)
        await router.resume()
        assert all(replica.running for replica in replicas)
        replicas[2].well = False
        await router.update_weights("x", 1)
        assert list(router.replicas) == ["r0", "r1"]
        for replica in replicas:
            replica.well = False
        with pytest.raises(EngineError, match="update_weights: no engine replica is left"):
            await router.update_weights("y", 2)

    played(scenario())
    assert [replica.weights for replica in replicas] == [[("x", 1)], [("x", 1)], []]


def test_a_mistake_of_the_configuration_is_nobodys_failure():
    class Wrong(Replica):
        async def update_weights(self, source, version):
            raise ConfigError("wrong folder")

    router = Router({"a": Wrong(0), "b": Wrong(1)}, FAST)
    with pytest.raises(ConfigError, match="wrong folder"):
        played(router.update_weights("x", 1))
    assert len(router.replicas) == 2


def test_an_abort_is_no_failure_but_one_that_the_replica_decided_is():
    class Hesitant(Replica):
        aborts = False

        async def generate(self, request_id, prompt_ids, sampling_params, *, images=None):
            output = await super().generate(request_id, prompt_ids, sampling_params)
            return type(output)(output.token_ids, output.log_probs, "aborted") if self.aborts else output

        async def abort(self, request_id):
            self.aborts = True

    replicas = [Hesitant(0, latency=0.2), Hesitant(1)]
    router = Router({"r0": replicas[0], "r1": replicas[1]}, FAST)

    async def scenario():
        router.open(["a"])
        task = asyncio.ensure_future(router.generate("a", PROMPT, {}))
        await asyncio.sleep(0.05)
        await router.abort("a")
        wished = await task
        router.close("a")
        router.open(["b"])  # at r0, which still aborts everything
        return wished, await router.generate("b", PROMPT, {})

    wished, decided = played(scenario())
    assert (wished.stop_reason, wished.token_ids) == ("aborted", [0])
    assert (decided.stop_reason, decided.token_ids) == ("stop", [1])


def test_a_replica_that_breaks_under_a_test_is_out_and_one_that_is_wrong_stops_everything():
    router, replicas = group(3)

    async def test(engine, name):
        if engine.broken:
            raise EngineError("broken")
        if not engine.well:
            raise WeightMismatch(f"{name} serves other weights")
        return name

    replicas[1].broken = True
    assert played(router.check_all(test)) == ["r0", "r2"]
    assert list(router.replicas) == ["r0", "r2"]
    replicas[2].well = False
    with pytest.raises(WeightMismatch, match="r2 serves other weights"):
        played(router.check_all(test))
    replicas[0].broken = replicas[2].broken = True
    with pytest.raises(EngineError, match="probe: no engine replica is left"):
        played(router.check_all(test))


def test_native_replicas_behind_a_router(model):
    class Dying(NativeEngine):
        dead = False

        async def generate(self, *args, **kwargs):
            if self.dead:
                raise EngineError("dead")
            return await super().generate(*args, **kwargs)

    engines = {f"r{i}": Dying(model) for i in range(3)}
    router, alone = Router(engines, FAST), NativeEngine(model)

    async def scenario():
        names = [f"t{i}" for i in range(12)]
        router.open(names)
        params = [SamplingParams(max_tokens=6, seed=i) for i in range(12)]
        first = await asyncio.gather(*(router.generate(n, PROMPT, p) for n, p in zip(names, params)))
        engines["r1"].dead = True
        contexts = [[*PROMPT, *output.token_ids, 5] for output in first]
        second = await asyncio.gather(*(router.generate(n, c, p) for n, c, p in zip(names, contexts, params)))
        expected = [await alone.generate(f"x{i}", c, p) for i, (c, p) in enumerate(zip(contexts, params))]
        for name in names:
            router.close(name)
        return second, expected

    second, expected = played(scenario())
    assert [output.token_ids for output in second] == [output.token_ids for output in expected]
    assert (
        router.metrics()["ejections"] >= 1
    )  # it may be back already: an engine in this process has no health to check
    assert router.shares_weights


@pytest.mark.slow
@pytest.mark.parametrize("end", [signal.SIGKILL, signal.SIGSTOP], ids=["killed", "hung"])
def test_a_killed_or_hung_server_loses_no_trajectory(tmp_path, end):
    """Three server processes, twelve trajectories of two turns; one process is killed, or stopped, in mid-generation."""
    folder = save_bigram(tmp_path / "v", 1)
    processes = [Process(folder, delay=0.01) for _ in range(3)]
    router = Router({p.url: p.engine() for p in processes}, FAST)
    score = bigram_score(folder)

    async def talk(name, seed):
        context, outputs = list(PROMPT), []
        for turn in range(2):
            output = await router.generate(name, context, SamplingParams(max_tokens=60, seed=seed * 10 + turn))
            outputs.append((list(context), output))
            context += [*output.token_ids, 7]
        router.close(name)
        return outputs

    async def scenario():
        names = [f"t{i}" for i in range(12)]
        await router.update_weights(folder, 1)
        router.open(names)
        tasks = [asyncio.ensure_future(talk(name, i)) for i, name in enumerate(names)]
        await asyncio.sleep(0.4)
        assert Counter(r.groups.total() for r in router._replicas) == {4: 3}
        os.kill(processes[1].popen.pid, end)
        return await asyncio.gather(*tasks)

    try:
        trajectories = played(scenario())
    finally:
        for process in processes:
            process.end()
    assert len(trajectories) == 12
    for trajectory in trajectories:
        for context, output in trajectory:
            assert len(output.token_ids) == 60
            assert output.weight_versions == [1] * 60
            assert np.allclose(output.log_probs, score([(context, output.token_ids)], 1.0)[0], atol=1e-9)
    assert processes[1].url not in router.replicas
    assert router.metrics()["retries"] >= 4


def test_a_server_that_died_comes_back_with_the_newest_weights(tmp_path):
    old, new = (save_bigram(tmp_path / f"v{seed}", seed) for seed in range(2))
    processes = [Process(old, delay=0.005) for _ in range(2)]
    router = Router({p.url: p.engine() for p in processes}, FAST)
    probe = WeightProbe([PROMPT, [9]], bigram_score(new), tolerance=1e-6)

    async def scenario():
        router.admit = probe.check
        await router.update_weights(new, 4)
        processes[0].popen.kill()
        processes[0].popen.wait()
        keep = asyncio.ensure_future(router.generate("long", PROMPT, SamplingParams(max_tokens=CONTEXT)))
        await until_async(lambda: len(router.replicas) == 1)
        processes.append(await asyncio.to_thread(Process, old, 0.005, processes[0].port))  # a new one, with old weights
        while len(router.replicas) < 2:
            await asyncio.sleep(0.05)
            if keep.done():
                keep = asyncio.ensure_future(router.generate("long", PROMPT, SamplingParams(max_tokens=CONTEXT)))
        await keep
        back = SGLangEngine(HttpServer(processes[0].url, timeout=10), CONTEXT)
        return await probe.check(back, 4)

    try:
        result = played(scenario())
    finally:
        for process in processes:
            process.end()
    assert result.largest < 1e-6
