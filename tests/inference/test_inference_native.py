"""The native engine against full forwards of the same model, under joins, leaves, aborts and failures."""

import asyncio
import random

import pytest
import torch

from etude.errors import ConfigError, EngineError
from etude.inference import NativeEngine, NativeEngineOptions, SamplingParams
from etude.models.packed import CausalSequences, packed_hidden


def full_log_probs(model, ids):
    """Log-probs of ids[1:] by one uncached forward through the eager reference attention."""
    previous = model.config._attn_implementation
    model.set_attn_implementation("eager")
    with torch.no_grad():
        logits = model(input_ids=torch.tensor([ids], device=model.device)).logits[0, :-1].float().cpu()
    model.set_attn_implementation(previous)
    return torch.log_softmax(logits, -1).gather(1, torch.tensor(ids[1:])[:, None])[:, 0]


async def talk(engine, name, prompt, turns, seed, tool_delay=0.0, stop=(5,), max_tokens=12):
    """A trajectory: turns separated by 'tool outputs'; returns ids, log-probs and the mask of sampled positions."""
    context, probs, mask = list(prompt), [0.0] * len(prompt), [0] * len(prompt)
    rng = random.Random(seed)
    for turn in range(turns):
        params = SamplingParams(max_tokens=max_tokens, seed=seed * 100 + turn, stop_token_ids=stop)
        out = await engine.generate(name, context, params)
        context += out.token_ids
        probs += out.log_probs
        mask += [1] * len(out.token_ids)
        if turn < turns - 1:
            await asyncio.sleep(tool_delay * rng.random())
            tool = [rng.randrange(97) for _ in range(rng.randint(1, 9))]
            context, probs, mask = context + tool, probs + [0.0] * len(tool), mask + [0] * len(tool)
    engine.close(name)
    return context, probs, mask


def talks(engine, prompts, turns=(1,), **options):
    """The trajectories of `prompts`, side by side; of one, two … turns in turn."""

    async def main():
        names = [f"r{i}" for i in range(len(prompts))]
        engine.open(names)
        each = (talk(engine, n, p, turns[i % len(turns)], i, **options) for i, (n, p) in enumerate(zip(names, prompts)))
        return await asyncio.gather(*each)

    return asyncio.run(asyncio.wait_for(main(), 120))


def largest_error(model, trajectories):
    """How far a sampled log-prob of `talks` is from that of a full forward, at most."""
    errors = []
    for ids, probs, mask in trajectories:
        sampled = torch.tensor(mask[1:], dtype=torch.bool)
        errors.append((full_log_probs(model, ids)[sampled] - torch.tensor(probs[1:])[sampled]).abs().max())
    return float(max(errors))


def assert_exact(model, context, out, atol=1e-5):
    """The log-probs of an answer are those of a full forward."""
    expected = full_log_probs(model, context + out.token_ids)[-len(out.token_ids) :]
    assert torch.allclose(expected, torch.tensor(out.log_probs), atol=atol)


def run_batch(model, *, deterministic=False, tool_delay=0.0, rows=9, **options):
    engine = NativeEngine(model, NativeEngineOptions(deterministic=deterministic, **options))
    prompts = [[(7 * (i // 3) + k) % 97 for k in range(5 + i // 3)] for i in range(rows)]  # groups of three
    result = talks(engine, prompts, (1, 2, 3), tool_delay=tool_delay)
    scheduler = engine._scheduler
    scheduler.reclaim()
    scheduler.prefixes.clear_unused()
    assert scheduler.cache.slab_bytes == 0  # every slot came back
    return result, engine.metrics()


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"max_num_seqs": 2},
        {"max_num_batched_tokens": 4},
        {"deterministic": True},
        {"deterministic": True, "max_num_seqs": 4},
    ],
)
def test_log_probs_equal_a_full_forward(model, options):
    results, metrics = run_batch(model, **options)
    assert largest_error(model, results) <= 1e-4
    assert metrics["sampled_tokens"] == sum(sum(mask) for _, _, mask in results)


def test_sampled_tokens_do_not_depend_on_the_batch(model):
    alone = [ids for ids, _, _ in run_batch(model, rows=9, max_num_seqs=1)[0]]
    together = [ids for ids, _, _ in run_batch(model, rows=9)[0]]
    assert alone == together


def test_deterministic_mode_is_bit_identical_whatever_the_tools_take(model):
    first, _ = run_batch(model, deterministic=True, tool_delay=0.0)
    second, _ = run_batch(model, deterministic=True, tool_delay=0.03)
    assert first == second  # ids, log-probs to the last bit, masks


def test_greedy_equals_argmax_of_full_forward(model):
    engine = NativeEngine(model)
    prompt = [11, 12, 13]
    out = asyncio.run(engine.generate("a", prompt, SamplingParams(temperature=0, max_tokens=10)))
    ids = list(prompt)
    for token in out.token_ids:
        hidden = packed_hidden(model, torch.tensor(ids), torch.arange(len(ids))[None], CausalSequences([len(ids)]))
        assert int(model.lm_head(hidden[-1]).argmax()) == token
        ids.append(token)
    assert out.log_probs == [0.0] * 10
    assert out.stop_reason == "length"


def test_stop_id_ends_the_turn_and_is_kept(model):
    engine = NativeEngine(model)
    out = asyncio.run(engine.generate("a", [1, 2], SamplingParams(max_tokens=50, stop_token_ids=tuple(range(97)))))
    assert (len(out.token_ids), out.stop_reason) == (1, "stop")


def test_changed_history_recomputes_only_what_changed(model):
    engine = NativeEngine(model)

    async def main():
        await engine.generate("a", [1, 2, 3, 4, 5], SamplingParams(max_tokens=3, seed=1))
        engine.metrics()
        return await engine.generate("a", [1, 2, 3, 40, 50, 60], SamplingParams(max_tokens=4, seed=2))

    assert_exact(model, [1, 2, 3, 40, 50, 60], asyncio.run(main()))
    assert engine.metrics()["prefilled_tokens"] == 3  # 40, 50, 60


def test_new_weights_forget_the_cache_and_change_the_version(model):
    engine = NativeEngine(model)

    async def main():
        first = await engine.generate("a", [1, 2, 3], SamplingParams(max_tokens=3))
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(0.9)
        await engine.update_weights(None, version=7)
        context = [1, 2, 3, *first.token_ids, 8]
        return context, await engine.generate("a", context, SamplingParams(max_tokens=3))

    context, out = asyncio.run(main())
    assert out.weight_versions == [7, 7, 7]
    assert_exact(model, context, out)


def test_pause_update_resume_in_the_middle_of_a_request(model):
    engine = NativeEngine(model)

    async def main():
        task = asyncio.create_task(engine.generate("a", [1, 2, 3], SamplingParams(max_tokens=40)))
        while engine._metrics.sampled_tokens < 5:
            await asyncio.sleep(0)
        await engine.pause()
        before = engine._metrics.sampled_tokens
        await asyncio.sleep(0.05)
        assert engine._metrics.sampled_tokens == before
        await engine.update_weights(None, version=1)
        await engine.resume()
        return await task

    out = asyncio.run(main())
    assert len(out.token_ids) == 40
    assert sorted(set(out.weight_versions)) == [0, 1]
    assert_exact(model, [1, 2, 3], out)


def test_abort_cancel_and_close_leave_the_others_alone(model):
    engine = NativeEngine(model, NativeEngineOptions(max_num_seqs=2))

    async def main():
        params = SamplingParams(max_tokens=60)
        tasks = [asyncio.create_task(engine.generate(f"r{i}", [1, 2, 3], params)) for i in range(5)]
        while engine._metrics.sampled_tokens < 4:
            await asyncio.sleep(0)
        await engine.abort("r0")
        tasks[1].cancel()
        for name in ("r0", "r1", "r2"):  # r2 is still queued; the slots of r0 and r1 go to r3 and r4
            engine.close(name)
        outputs = await asyncio.gather(*tasks, return_exceptions=True)
        for i in range(5):
            engine.close(f"r{i}")
        return outputs

    outputs = asyncio.run(asyncio.wait_for(main(), 60))
    assert outputs[0].stop_reason == "aborted"
    assert 0 < len(outputs[0].token_ids) < 60
    assert isinstance(outputs[1], asyncio.CancelledError)
    assert outputs[2].stop_reason == "aborted"
    assert [len(o.token_ids) for o in outputs[3:]] == [60, 60]


def test_a_failing_step_fails_its_requests_and_the_engine_recovers(model, monkeypatch):
    engine = NativeEngine(model)
    original = model.lm_head.forward
    monkeypatch.setattr(model.lm_head, "forward", lambda *a, **k: (_ for _ in ()).throw(MemoryError("no room")))
    with pytest.raises(EngineError, match="no room"):
        asyncio.run(engine.generate("a", [1, 2, 3], SamplingParams(max_tokens=3)))
    monkeypatch.setattr(model.lm_head, "forward", original)
    assert len(asyncio.run(engine.generate("a", [1, 2, 3], SamplingParams(max_tokens=3))).token_ids) == 3


def test_context_limit_ends_with_length(model):
    engine = NativeEngine(model, NativeEngineOptions(max_model_len=10))
    out = asyncio.run(engine.generate("a", list(range(8)), SamplingParams(max_tokens=50)))
    assert (len(out.token_ids), out.stop_reason) == (2, "length")
    assert asyncio.run(engine.generate("b", list(range(12)), SamplingParams())).stop_reason == "length"
    with pytest.raises(ConfigError, match="max_model_len"):
        NativeEngine(model, NativeEngineOptions(max_model_len=1000))
