"""What may happen to the native engine while a step is being computed, and the order in which it serves."""

import asyncio
import gc

import pytest
from test_inference_native import assert_exact
from wait_stage import until_async

from etude.errors import EngineError
from etude.inference import NativeEngine, NativeEngineOptions, SamplingParams

PROMPT = [3, 1, 4, 1, 5]


@pytest.mark.parametrize("how", ["abort", "cancel"])
@pytest.mark.parametrize("others", [0, 2])
def test_asking_again_while_the_step_of_a_dropped_request_runs(model, how, others):
    """No token of the old request may end up in the new one, nor may its keys and values."""
    engine = NativeEngine(model)

    async def main():
        params = SamplingParams(max_tokens=30)
        more = [asyncio.create_task(engine.generate(f"o{i}", PROMPT, params)) for i in range(others)]
        first = asyncio.create_task(engine.generate("a", PROMPT, params))
        enough = 3 * (others + 1)
        await until_async(lambda: engine._metrics.sampled_tokens >= enough and engine._stepping is not None, pause=0)
        if how == "abort":
            await engine.abort("a")
        else:
            first.cancel()
            await asyncio.sleep(0)
        assert engine._stepping is not None
        context = [9, 2, 6, 5, 3, 5]
        second = await engine.generate("a", context, SamplingParams(max_tokens=6, seed=1))
        await asyncio.gather(first, return_exceptions=True)
        return context, second, await asyncio.gather(*more)

    context, second, more = asyncio.run(main())
    assert len(second.token_ids) == 6
    assert_exact(model, context, second)
    for out in more:
        assert len(out.token_ids) == 30
        assert_exact(model, PROMPT, out)


def test_a_follower_dropped_in_the_prefilling_step_may_ask_again(model):
    engine = NativeEngine(model)

    async def main():
        params = SamplingParams(max_tokens=5)
        tasks = [asyncio.create_task(engine.generate(name, PROMPT, params)) for name in ("a", "b")]
        await until_async(lambda: engine._stepping is not None, pause=0)
        await engine.abort("b")
        again = await engine.generate("b", [7, 8, 9, 10, 11, 12, 13], params)
        return (await asyncio.gather(*tasks)), again

    (leader, dropped), again = asyncio.run(main())
    assert dropped.token_ids == []
    assert_exact(model, PROMPT, leader)
    assert_exact(model, [7, 8, 9, 10, 11, 12, 13], again)


def test_new_weights_in_the_middle_of_a_step(model):
    engine = NativeEngine(model)

    async def main():
        task = asyncio.create_task(engine.generate("a", PROMPT, SamplingParams(max_tokens=20)))
        await until_async(lambda: engine._metrics.sampled_tokens >= 5 and engine._stepping is not None, pause=0)
        await engine.update_weights(None, version=3)
        assert engine._stepping is None
        return await task

    out = asyncio.run(asyncio.wait_for(main(), 30))
    assert sorted(set(out.weight_versions)) == [0, 3]
    assert out.weight_versions == sorted(out.weight_versions)
    assert_exact(model, PROMPT, out)


def test_an_error_of_the_scheduler_fails_requests_instead_of_leaving_them_waiting(model, monkeypatch):
    engine = NativeEngine(model)
    with monkeypatch.context() as patch:
        patch.setattr(engine._scheduler, "plan", lambda: 1 / 0)
        with pytest.raises(EngineError, match="ZeroDivisionError"):
            asyncio.run(asyncio.wait_for(engine.generate("a", PROMPT, SamplingParams(max_tokens=3)), 30))
    out = asyncio.run(asyncio.wait_for(engine.generate("a", PROMPT, SamplingParams(max_tokens=3)), 30))
    assert_exact(model, PROMPT, out)


@pytest.mark.parametrize("late", [["x", "y", "z"], ["z", "x", "y"]])
def test_the_deterministic_order_does_not_depend_on_who_was_announced_first(model, late, monkeypatch):
    """Between two scheduling points, which lane becomes free first is the clock's doing."""
    engine = NativeEngine(model, NativeEngineOptions(deterministic=True))
    served = []
    compute = engine._compute

    def spy(plan):
        served.append([part.row.rank[2] for part in plan.feeds])
        return compute(plan)

    monkeypatch.setattr(engine, "_compute", spy)

    async def rest(name):
        await engine.generate(name, [*PROMPT, ord(name) % 90], SamplingParams(max_tokens=2))
        engine.close(name)

    async def main():
        engine.open(["q", "b", "a"])
        first = [engine.generate(n, [*PROMPT, i], SamplingParams(max_tokens=2)) for i, n in enumerate("qba")]
        await asyncio.gather(*first)
        for old, new in zip("qba", late):
            engine.close(old)
            engine.open([new])
        await asyncio.gather(*(rest(name) for name in late))

    asyncio.run(asyncio.wait_for(main(), 30))
    assert served == [["q", "b", "a"]] * 2 + [["x", "y", "z"]] * 2


def test_a_model_left_in_training_mode_is_sampled_in_evaluation_mode(model):
    engine = NativeEngine(model)

    async def main():
        task = asyncio.create_task(engine.generate("a", PROMPT, SamplingParams(max_tokens=30)))
        await until_async(lambda: engine._stepping is not None, pause=0)
        model.train()
        await engine.generate("b", PROMPT, SamplingParams(max_tokens=2))
        assert not model.training
        await task

    asyncio.run(main())


@pytest.mark.parametrize("closed", [False, True])
def test_an_event_loop_that_ends_in_the_middle_of_a_step_leaves_no_task(model, closed):
    """And the next one goes on, whether or not the first was closed."""
    engine, complaints = NativeEngine(model), []

    async def begin():
        asking = asyncio.ensure_future(engine.generate("a", PROMPT, SamplingParams(max_tokens=50)))
        await until_async(lambda: engine._metrics.sampled_tokens >= 3 and engine._stepping is not None, pause=0)
        asking.cancel()
        await asyncio.wait({asking})

    loop = asyncio.new_event_loop()
    loop.set_exception_handler(lambda _, context: complaints.append(context["message"]))
    loop.run_until_complete(begin())
    assert not asyncio.all_tasks(loop)
    if closed:
        loop.close()
    out = asyncio.run(asyncio.wait_for(engine.generate("a", [*PROMPT, 9], SamplingParams(max_tokens=6)), 30))
    assert_exact(model, [*PROMPT, 9], out)
    loop.close()
    del loop
    gc.collect()
    assert complaints == []
