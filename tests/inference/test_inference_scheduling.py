"""Memory budgets, preemption, chunks, shared prefixes: they change when a token is computed, never which."""

import asyncio
import copy
import gc
import random
import weakref

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from test_inference_architectures import tiny
from test_inference_native import assert_exact, largest_error, talks
from test_inference_sampling import p_value
from wait_stage import until_async

from etude.errors import ConfigError, EngineError
from etude.inference import NativeEngine, NativeEngineOptions, SamplingParams
from etude.inference.kv_cache import KVShape, PrefixStore, SlabCache, capacity_for, most_tokens
from etude.inference.sampling import restrict
from etude.metrics import finish_metrics

SHAPE = KVShape(widths=((2, 8),) * 2, dtype=torch.float32, device=torch.device("cpu"))


def engine_with(model, tokens, **options):
    """An engine whose budget holds `tokens` tokens: less than a MiB, so it is set below the options."""
    engine = NativeEngine(model, NativeEngineOptions(**options))
    engine._budget = tokens * engine._shape.token_bytes
    engine._limit = engine._longest()
    engine._scheduler = engine._new_scheduler()
    return engine


def conversations(engine, rows, max_tokens=90, tool_delay=0.0):
    prompts = [[(7 * (i // 3) + k) % 97 for k in range(24)] for i in range(rows)]
    return talks(engine, prompts, (2,), stop=(), max_tokens=max_tokens, tool_delay=tool_delay)


def assert_same(results, reference):
    """The same tokens, and log-probs within 1e-5."""
    for (ids, probs, mask), (their_ids, their_probs, their_mask) in zip(results, reference, strict=True):
        assert (ids, mask) == (their_ids, their_mask)
        assert torch.allclose(torch.tensor(probs), torch.tensor(their_probs), atol=1e-5, rtol=0)


# -- memory ------------------------------------------------------------------------------------------------------------


@given(st.integers(1, 100_000))
def test_slots_are_at_most_half_as_large_again_as_needed(length):
    capacity = capacity_for(length)
    assert length <= capacity <= max(1.5 * length + 1, 128)
    assert capacity_for(capacity) == capacity


@given(st.lists(st.integers(1, 600), max_size=60), st.integers(0, 4000), st.randoms(use_true_random=False))
@settings(max_examples=60)
def test_slabs_never_pass_the_budget_and_hand_out_no_slot_twice(lengths, budget, rng):
    cache = SlabCache(SHAPE, budget * SHAPE.token_bytes)
    held = []
    for length in lengths:
        slot = cache.take(length)
        assert cache.slab_bytes <= budget * SHAPE.token_bytes
        if slot is not None:
            assert slot.capacity >= length
            held.append(slot)
        if held and rng.random() < 0.4:
            cache.give_back(held.pop(rng.randrange(len(held))))
        places = [(id(slot.slab), slot.index) for slot in held]
        in_use = sum(slab.slots - len(slab.free) for slab in cache._slabs)
        assert len(set(places)) == len(places) == in_use
    for slot in held:
        cache.give_back(slot)
    assert cache.slab_bytes == 0


@given(st.integers(0, 5000), st.integers(1, 5000), st.randoms(use_true_random=False))
def test_a_context_that_is_promised_room_fits_however_it_is_cut(budget, length, rng):
    longest = most_tokens(SHAPE, budget * SHAPE.token_bytes)
    length = min(length, longest)
    if not length:
        return
    cut = rng.randint(1, length)
    cache = SlabCache(SHAPE, budget * SHAPE.token_bytes)
    assert cache.take(cut) is not None
    assert cache.take(max(length - cut, 1)) is not None


@pytest.mark.slow
@pytest.mark.parametrize(
    ("tokens", "options"),
    [
        (700, {}),
        (700, {"max_num_batched_tokens": 7}),
        (800, {"max_num_batched_tokens": 16, "max_num_seqs": 5}),
        (1200, {"deterministic": True, "admit_every": 3}),
        (700, {"enable_prefix_caching": False}),
    ],
)
def test_a_small_budget_preempts_and_changes_nothing(model, tokens, options):
    reference = conversations(NativeEngine(model), 9)
    engine = engine_with(model, tokens, **options)
    results = conversations(engine, 9)
    metrics = finish_metrics(engine.metrics())
    assert_same(results, reference)
    assert metrics["kv_cache_mb"] <= tokens * engine._shape.token_bytes / 2**20
    assert metrics["preemptions"] > 0
    assert largest_error(model, results) <= 2e-5


@pytest.mark.slow
@settings(max_examples=8)
@given(data=st.data())
def test_no_mixture_of_limits_changes_a_token(model_once, references, data):
    rows = data.draw(st.integers(1, 6))
    options = {
        "max_num_seqs": data.draw(st.integers(1, 9)),
        "max_num_batched_tokens": data.draw(st.integers(4, 60)),
        "deterministic": data.draw(st.booleans()),
        "admit_every": data.draw(st.integers(1, 9)),
        "enable_prefix_caching": data.draw(st.booleans()),
    }
    engine = engine_with(model_once, data.draw(st.integers(600, 3000)), **options)
    assert_same(conversations(engine, rows), references[:rows])


@pytest.fixture(scope="module")
def model_once():
    return tiny("qwen3", num_layers=2, initializer_range=0.3).eval()


@pytest.fixture(scope="module")
def references(model_once):
    return conversations(NativeEngine(model_once), 6)


def test_a_preempted_deterministic_run_is_bit_identical_whatever_the_tools_take(model):
    def run(delay):
        engine = engine_with(model, 900, deterministic=True, admit_every=4)
        result = conversations(engine, 9, tool_delay=delay)
        assert engine.metrics()["preemptions"] > 0
        return result

    assert run(0.0) == run(0.02)


def test_a_budget_too_small_for_one_context_is_refused_at_the_start(model, monkeypatch):
    many = NativeEngineOptions(kv_cache_memory_mb=1, max_model_len=256)
    assert NativeEngine(model, many)._limit == 256
    monkeypatch.setattr("etude.inference.kv_cache.key_widths", lambda model: [(2, 8192)] * 2)  # megabytes a token
    with pytest.raises(ConfigError, match=r"rollout\.kv_cache_memory_mb=1 holds a context of at most"):
        NativeEngine(model, many)


def test_without_a_length_the_budget_sets_it(model):
    engine = engine_with(model, 400)
    assert engine._limit == most_tokens(engine._shape, engine._budget) < 256
    out = asyncio.run(engine.generate("a", [1, 2, 3], SamplingParams(max_tokens=500)))
    assert out.stop_reason == "length"
    assert len(out.token_ids) == engine._limit - 3


def test_a_context_that_cannot_be_held_fails_and_the_next_one_runs(model):
    engine = engine_with(model, 300)
    engine._limit = 256  # as if the promise of `most_tokens` were broken
    with pytest.raises(EngineError, match=r"raise rollout\.kv_cache_memory_mb"):
        asyncio.run(asyncio.wait_for(engine.generate("a", [1] * 250, SamplingParams(max_tokens=6)), 30))
    out = asyncio.run(asyncio.wait_for(engine.generate("b", [1] * 25, SamplingParams(max_tokens=6)), 30))
    assert len(out.token_ids) == 6


def test_closed_trajectories_leave_no_memory_to_the_garbage_collector(model, monkeypatch):
    """A rollout creates too few objects for a collection, and too many bytes to wait for one."""
    slabs, add = [], SlabCache._add

    def added(cache, capacity):
        slab = add(cache, capacity)
        slabs.append(weakref.ref(slab))
        return slab

    monkeypatch.setattr(SlabCache, "_add", added)
    gc.collect()
    gc.disable()
    try:
        engine = NativeEngine(model, NativeEngineOptions(enable_prefix_caching=False))
        conversations(engine, 3, max_tokens=20)
        for tokens in (1, 1 << 40):  # each engine thread lets go of its last step
            engine._threads.submit(tokens, int).result()
        assert slabs
        assert [slab() for slab in slabs] == [None] * len(slabs)
    finally:
        gc.enable()


def test_memory_of_trajectories_between_turns_is_lent_out_and_computed_again(model):
    """Tools run for long; meanwhile others need the room."""
    engine = engine_with(model, 600)

    async def main():
        params = SamplingParams(max_tokens=30)
        first = await engine.generate("slow", [1, 2, 3, 4], params)
        context = [1, 2, 3, 4, *first.token_ids, 9]
        others = (engine.generate(f"o{i}", [5 + i] * 60, SamplingParams(max_tokens=100)) for i in range(4))
        await asyncio.gather(*others)
        assert engine._rows["slow"].slot is None
        second = await engine.generate("slow", context, params)
        return context, second

    context, second = asyncio.run(asyncio.wait_for(main(), 60))
    assert_exact(model, context, second)


# -- prompts -----------------------------------------------------------------------------------------------------------


def test_long_prompts_are_cut_and_decoding_goes_on_beside_them(model):
    engine = NativeEngine(model, NativeEngineOptions(max_num_batched_tokens=8))
    fed = []
    compute = engine._compute

    def spy(plan):
        fed.append([len(part.ids) for part in plan.feeds])
        return compute(plan)

    engine._compute = spy

    async def main():
        first = asyncio.create_task(engine.generate("a", [1, 2, 3], SamplingParams(max_tokens=60)))
        await until_async(lambda: engine._metrics.sampled_tokens > 3, pause=0)
        prompt = [k % 97 for k in range(100)]
        return prompt, await engine.generate("b", prompt, SamplingParams(max_tokens=5)), await first

    prompt, out, _ = asyncio.run(main())
    assert max(sum(step) for step in fed) <= 8
    assert [1, 7] in fed  # one decodes while the other's prompt is read
    assert_exact(model, prompt, out)


def prefilled(engine, *prompts, max_tokens=3):
    """Tokens computed for these requests, one after another."""
    counts = []
    for i, prompt in enumerate(prompts):
        engine.metrics()
        name = f"{id(prompt)}-{i}"
        asyncio.run(engine.generate(name, list(prompt), SamplingParams(max_tokens=max_tokens)))
        engine.close(name)
        counts.append(engine.metrics()["prefilled_tokens"])
    return counts


PROMPT = [k * 5 % 97 for k in range(50)]


def test_a_group_admitted_bit_by_bit_computes_its_prompt_once(model):
    engine = NativeEngine(model, NativeEngineOptions(max_num_seqs=2))
    results = talks(engine, [PROMPT] * 6)
    metrics = finish_metrics(engine.metrics())
    assert metrics["prefilled_tokens"] == len(PROMPT) + 4  # later members feed the last token for its logits
    assert metrics["cache_hit_rate"] == pytest.approx(1 - (len(PROMPT) + 4) / (6 * len(PROMPT)))
    assert largest_error(model, results) <= 2e-5


def test_prompts_stay_cached_until_the_weights_change(model):
    engine = NativeEngine(model)
    assert prefilled(engine, PROMPT, PROMPT) == [50, 1]
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(0.9)
    asyncio.run(engine.update_weights(None, 1))
    assert engine._scheduler.cache.slab_bytes == 0
    assert prefilled(engine, PROMPT) == [50]
    out = asyncio.run(engine.generate("new", PROMPT, SamplingParams(max_tokens=5)))
    assert_exact(model, PROMPT, out)
    assert prefilled(NativeEngine(model, NativeEngineOptions(enable_prefix_caching=False)), PROMPT, PROMPT) == [50, 50]


BEGINNING = [k * 7 % 97 for k in range(80)]


@pytest.mark.parametrize("options", [{}, {"deterministic": True}, {"max_num_batched_tokens": 13}, {"max_num_seqs": 2}])
def test_what_all_prompts_begin_with_is_computed_once(model, options):
    """Two rollouts of each of three prompts; one prompt is all that the others begin with."""
    engine = NativeEngine(model, NativeEngineOptions(**options))
    results = talks(engine, [prompt for end in ([1, 2, 3], [], [5]) for prompt in [[*BEGINNING, *end]] * 2])
    repeated = 3 if options.get("max_num_seqs") else 0  # the second of a pair admitted later feeds the last token
    assert engine.metrics()["prefilled_tokens"] <= len(BEGINNING) + 3 + 1 + 1 + repeated
    assert largest_error(model, results) <= 2e-5


def test_a_later_prompt_finds_the_longest_beginning_that_was_computed(model):
    """Of a tree: one system message, with tools or without."""
    system, tools = [k * 5 % 97 for k in range(40)], [k * 3 % 97 for k in range(64)]
    prompts = [
        [*system, 1, 2],
        [*system, *tools, 3, 4, 5],
        [*system, *tools, 6],
        [*system, 7],
        [*system, *tools, 3, 4, 8],
    ]
    engine = NativeEngine(model)
    assert prefilled(engine, *prompts) == [42, 67, 1, 1, 1]
    for prompt in prompts:
        out = asyncio.run(engine.generate("again", prompt, SamplingParams(max_tokens=5)))
        assert_exact(model, prompt, out)


def test_a_beginning_that_prompts_keep_taking_is_not_evicted(model):
    engine = NativeEngine(model, NativeEngineOptions(max_num_seqs=3))
    assert prefilled(engine, *([*BEGINNING, i] for i in range(12))) == [81, *[1] * 11]
    assert len(engine._scheduler.prefixes) == 3


@pytest.mark.slow
@given(st.integers(0, 200), st.integers(2, 40), st.lists(st.integers(0, 96), min_size=1, max_size=4))
@settings(max_examples=15, deadline=None)
def test_common_beginnings_change_no_token(model_once, spare, chunk, ends):
    """Whatever the memory, also where it is too small to keep the prefix that others begin like."""
    prompts = [[*BEGINNING, *range(end)] for end in ends]
    tight = engine_with(model_once, 900 + spare, max_num_batched_tokens=chunk, max_model_len=256)
    alone = NativeEngine(model_once, NativeEngineOptions(max_num_seqs=1, enable_prefix_caching=False))
    assert_same(talks(tight, prompts, (2,)), talks(alone, prompts, (2,)))


def test_in_the_deterministic_mode_nothing_outlives_a_batch(model):
    engine = NativeEngine(model, NativeEngineOptions(deterministic=True))
    assert prefilled(engine, PROMPT, PROMPT) == [50, 50]


def test_the_least_recently_used_prompt_goes_first():
    cache = SlabCache(SHAPE, 3 * 64 * SHAPE.token_bytes)
    store = PrefixStore(cache)
    kept = [store.join([i] * 20) for i in range(3)]
    for prefix in kept:
        store.leave(prefix)
    store.leave(store.join([0] * 20))  # used again
    assert store.join([9] * 20) is None
    assert store.evict()
    assert store.join([9] * 20) is not None
    assert store.join([0] * 20) is kept[0]
    assert not store.evict() or len(store) == 2


def test_without_a_budget_only_so_many_unused_prompts_are_kept(model):
    engine = NativeEngine(model, NativeEngineOptions(max_num_seqs=3))
    prompts = [[i] * 10 for i in range(6)]
    assert prefilled(engine, *prompts) == [10] * 6
    assert len(engine._scheduler.prefixes) == 3
    assert prefilled(engine, *prompts[:2:-1], prompts[0]) == [1, 1, 1, 10]
    assert len(engine._scheduler.prefixes) == 3


def test_a_prompt_changed_within_what_others_share(model):
    engine = NativeEngine(model)

    async def main():
        first = await engine.generate("a", PROMPT, SamplingParams(max_tokens=4))
        same = await engine.generate("b", PROMPT, SamplingParams(max_tokens=4, seed=1))
        edited = [*PROMPT[:30], 1, 2, 3]
        second = await engine.generate("a", edited, SamplingParams(max_tokens=4))
        third = await engine.generate("a", [8, 8, 8], SamplingParams(max_tokens=4))
        context = [*PROMPT, *same.token_ids, 7]
        return (
            [(PROMPT, first), (edited, second), ([8, 8, 8], third)],
            context,
            await engine.generate("b", context, SamplingParams(max_tokens=4)),
        )

    outputs, context, last = asyncio.run(main())
    for prompt, out in [*outputs, (context, last)]:
        assert_exact(model, prompt, out)


def test_a_dropped_carrier_hands_its_half_read_prompt_on(model):
    engine = NativeEngine(model, NativeEngineOptions(max_num_batched_tokens=8))

    async def main():
        tasks = [asyncio.create_task(engine.generate(f"r{i}", PROMPT, SamplingParams(max_tokens=4))) for i in range(3)]
        await until_async(lambda: engine._metrics.steps >= 3, pause=0)
        await engine.abort("r0")
        engine.close("r0")
        return await asyncio.gather(*tasks)

    dropped, out, _ = asyncio.run(asyncio.wait_for(main(), 60))
    assert dropped.token_ids == []
    assert engine.metrics()["prefilled_tokens"] == 50
    assert_exact(model, PROMPT, out)


@settings(max_examples=15)
@given(data=st.data())
def test_whatever_is_dropped_nothing_leaks_and_the_others_are_exact(model_once, data):
    """Aborts, cancellations, closings, pauses and new weights at arbitrary steps, with little memory."""
    engine = engine_with(
        model_once,
        data.draw(st.integers(600, 1500)),
        max_num_seqs=data.draw(st.integers(1, 8)),
        max_num_batched_tokens=data.draw(st.integers(4, 40)),
    )
    rng = random.Random(data.draw(st.integers(0, 10**6)))

    async def ask(name, prompt):
        """Two turns; what was answered, or None where the trajectory was dropped."""
        context, answers = list(prompt), []
        for turn in range(2):
            out = await engine.generate(name, context, SamplingParams(max_tokens=rng.randint(1, 90), seed=turn))
            answers.append((list(context), out))
            context += [*out.token_ids, 3, 1]
        return answers

    async def disturb(names, tasks):
        version = 0
        while not all(task.done() for task in tasks):
            for _ in range(rng.randint(1, 30)):
                await asyncio.sleep(0)
            what, victim = rng.randrange(6), rng.randrange(len(names))
            if what == 0:
                await engine.abort(names[victim])
            elif what == 1 and rng.random() < 0.3:
                tasks[victim].cancel()
            elif what == 2 and rng.random() < 0.3:
                engine.close(names[victim])
            elif what == 3 and version < 5:
                version += 1
                await engine.update_weights(None, version)
            elif what == 4:
                await engine.pause()
                await asyncio.sleep(0)
                await engine.resume()

    async def main():
        names = [f"r{i}" for i in range(8)]
        engine.open(names)
        tasks = [asyncio.create_task(ask(n, [(7 * (i // 3) + k) % 97 for k in range(24)])) for i, n in enumerate(names)]
        await asyncio.gather(asyncio.create_task(disturb(names, tasks)), *tasks, return_exceptions=True)
        for name in list(engine._rows):
            engine.close(name)
        return [task.result() for task in tasks if not task.cancelled()]

    # The reference has another attention, and the engine may be in the middle of a step.
    twin = copy.deepcopy(model_once)
    for answers in asyncio.run(asyncio.wait_for(main(), 120)):
        for context, out in answers:
            assert len(out.log_probs) == len(out.weight_versions) == len(out.token_ids)
            if out.token_ids:
                assert_exact(twin, context, out)
    out = asyncio.run(asyncio.wait_for(engine.generate("last", [1, 2, 3], SamplingParams(max_tokens=3)), 30))
    assert len(out.token_ids) == 3  # although the event loop may have ended in the middle of a step
    engine.close("last")
    engine._scheduler.reclaim()
    engine._scheduler.prefixes.clear_unused()
    assert engine._scheduler.cache.slab_bytes == 0
    assert not engine._scheduler.active
    assert not engine._scheduler.queue


# -- sampling ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("how", [{"temperature": 0.7}, {"top_k": 5}, {"top_p": 0.6, "temperature": 1.3}])
def test_the_engine_draws_from_the_models_distribution(model, how):
    """Chi-square of 4,000 first tokens against a full forward, p > 1e-6; the seeds are fixed."""
    prompt = [5, 4, 3, 2, 1]
    with torch.no_grad():
        twin = copy.deepcopy(model)
        twin.set_attn_implementation("eager")
        logits = twin(input_ids=torch.tensor([prompt])).logits[0, -1:].double()
    expected = restrict(logits / how.get("temperature", 1.0), [SamplingParams(**how)]).softmax(-1)[0]
    engine = NativeEngine(model)

    async def main():
        requests = (engine.generate(f"r{i}", prompt, SamplingParams(max_tokens=1, seed=i, **how)) for i in range(4000))
        return await asyncio.gather(*requests)

    outputs = asyncio.run(main())
    counts = torch.bincount(torch.tensor([out.token_ids[0] for out in outputs]), minlength=97).double()
    assert counts[expected == 0].sum() == 0
    for out in outputs[:50]:
        assert out.log_probs[0] == pytest.approx(float(expected[out.token_ids[0]].log()), abs=1e-5)
    likely = expected * 4000 >= 5  # the rule of thumb for the approximation; the others are one class
    seen = torch.cat([counts[likely], counts[~likely].sum()[None]])
    wanted = torch.cat([expected[likely], expected[~likely].sum()[None]]) * 4000
    seen, wanted = seen[wanted > 0], wanted[wanted > 0]
    statistic = float(((seen - wanted) ** 2 / wanted).sum())
    assert p_value(statistic, len(wanted) - 1) > 1e-6


# -- figures -----------------------------------------------------------------------------------------------------------


def test_metrics_add_up(model):
    engine = NativeEngine(model, NativeEngineOptions(max_num_seqs=4))
    rng = random.Random(0)
    prompts = [[rng.randrange(97) for _ in range(20)] for _ in range(4)]

    async def main():
        params = SamplingParams(max_tokens=10)
        return await asyncio.gather(*(engine.generate(f"r{i}", p, params) for i, p in enumerate(prompts)))

    asyncio.run(main())
    metrics = finish_metrics(engine.metrics())
    assert metrics["sampled_tokens"] == 40
    assert metrics["prefilled_tokens"] == 80
    assert metrics["cache_hit_rate"] == 0.0
    assert metrics["steps"] == 10
    assert metrics["rows_per_step"] == 4
    assert metrics["batch_occupancy"] == 1.0
    spent = {name: value for name, value in metrics.items() if name.startswith("seconds_")}
    assert set(spent) == {f"seconds_{what}" for what in ("prefill", "decode", "sampling", "scheduling")}
    assert all(value > 0 for value in spent.values())
    assert metrics["tokens_per_second"] == pytest.approx(40 / sum(spent.values()))
    assert metrics["kv_cache_mb"] > 0
    assert engine.metrics()["steps"] == 0


def test_requests_under_way_name_the_weights_of_each_token(model):
    engine = engine_with(model, 600)

    async def main():
        params = SamplingParams(max_tokens=40)
        tasks = [asyncio.create_task(engine.generate(f"r{i}", [i, 2, 3], params)) for i in range(6)]
        await until_async(lambda: engine._metrics.sampled_tokens > 60, pause=0)
        await engine.update_weights(None, 5)
        return await asyncio.gather(*tasks)

    for out in asyncio.run(asyncio.wait_for(main(), 60)):
        assert len(out.weight_versions) == len(out.token_ids) == 40
        assert out.weight_versions == sorted(out.weight_versions)
        assert set(out.weight_versions) <= {0, 5}
