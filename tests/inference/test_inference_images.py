"""The native engine with images, against Transformers' own forward and `generate` over the same pixel values."""

import asyncio
import copy
import random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from vision_stage import KINDS, build_vision_stage, image, plain_log_probs

from etude.errors import ConfigError, DataError, EngineError
from etude.inference import NativeEngine, NativeEngineOptions, SamplingParams

STAGES = {kind: build_vision_stage(kind) for kind in KINDS}
SIZES = ((8, 8), (24, 16), (24, 24), (40, 16))
TOLERANCE = 5e-5


@pytest.fixture(params=KINDS)
def stage(request):
    return STAGES[request.param]


class Talk:
    """A trajectory under way: ids, images, and what the engine said of the sampled ones."""

    def __init__(self, processor, seed):
        self.processor, self.rng = processor, random.Random(seed)
        self.ids, self.images, self.sampled = [], [], {}

    def text(self, count):
        self.ids += [self.rng.randrange(200) for _ in range(count)]
        return self

    def show(self, size, seed):
        self.images.append(image(self.processor, *size, seed=seed))
        self.ids += [self.processor.image_token_id] * self.images[-1].tokens
        return self

    async def turn(self, engine, name, max_tokens=6, temperature=1.0):
        params = SamplingParams(max_tokens=max_tokens, seed=self.rng.randrange(2**31), temperature=temperature)
        out = await engine.generate(name, self.ids, params, images=list(self.images))
        for token, log_prob in zip(out.token_ids, out.log_probs):
            self.sampled[len(self.ids)] = log_prob
            self.ids.append(token)
        return out

    @torch.no_grad()
    def error(self, model):
        """The largest difference to Transformers' own forward."""
        plain = plain_log_probs(model, self.ids, self.images)
        return max(abs(float(plain[place - 1]) - log_prob) for place, log_prob in self.sampled.items())


def turn_of_each(engine, talks, **options):
    """One turn of each trajectory, side by side."""

    async def main():
        engine.open([f"t{i}" for i in range(len(talks))])
        await asyncio.gather(*(talk.turn(engine, f"t{i}", **options) for i, talk in enumerate(talks)))

    asyncio.run(asyncio.wait_for(main(), 120))


async def converse(engine, talk, name, delay=0.0):
    """Prompt with images; a tool that shows another; a tool that answers in text; two images at once."""
    rng = random.Random(name)
    await talk.turn(engine, name)
    for n, size in enumerate((SIZES[2], None, SIZES[0])):
        await asyncio.sleep(delay * rng.random())
        talk.text(3)
        if size:
            talk.show(size, seed=rng.randrange(5)).text(1)
        if n == 2:
            talk.show(SIZES[3], seed=rng.randrange(5)).text(1).show(SIZES[3], seed=7).text(2)
        await talk.turn(engine, name)
    engine.close(name)


def run(stage, *, rows=6, delay=0.0, **options):
    """Groups of two with one prompt; every other group's images have the sizes of the group's before it."""
    model, processor = stage
    engine = NativeEngine(model, NativeEngineOptions(**options))
    talks = []
    for i in range(rows):
        talk = Talk(processor, 1).text(4).show(SIZES[1], seed=i // 2).text(20).show(SIZES[i // 4], seed=i // 2).text(3)
        talk.rng = random.Random(i)
        talks.append(talk)

    async def main():
        names = [f"r{i}" for i in range(rows)]
        engine.open(names)
        await asyncio.gather(*(converse(engine, talk, name, delay) for talk, name in zip(talks, names)))

    asyncio.run(asyncio.wait_for(main(), 120))
    return talks, engine


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"max_num_seqs": 2},
        {"max_num_batched_tokens": 3},
        {"deterministic": True, "max_num_batched_tokens": 16},
        {"enable_prefix_caching": False},
    ],
)
def test_log_probs_equal_transformers_own_forward(stage, options):
    talks, _ = run(stage, **options)
    assert max(talk.error(stage[0]) for talk in talks) <= TOLERANCE


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_log_probs_equal_transformers_own_forward_on_a_gpu(stage):
    model = copy.deepcopy(stage[0]).to("cuda")
    talks, _ = run((model, stage[1]), max_num_batched_tokens=16)
    assert max(talk.error(model) for talk in talks) <= 1e-3


def test_a_small_budget_preempts_and_changes_nothing(stage):
    model, processor = stage

    def sampled(budget_tokens):
        engine = NativeEngine(model)
        if budget_tokens is not None:  # less than a MiB, so it is set below the options
            engine._budget = budget_tokens * engine._shape.token_bytes
            engine._scheduler = engine._new_scheduler()
        talks = [Talk(processor, i // 3).text(9).show(SIZES[2], seed=i // 3).text(4) for i in range(9)]
        for i, talk in enumerate(talks):
            talk.rng = random.Random(i)
        turn_of_each(engine, talks, max_tokens=90)
        return talks, engine.metrics()["preemptions"]

    (plenty, none), (talks, some) = sampled(None), sampled(800)
    assert none == 0 < some
    assert [talk.ids for talk in talks] == [talk.ids for talk in plenty]
    assert max(talk.error(model) for talk in talks) <= TOLERANCE


def test_deterministic_mode_is_bit_identical_whatever_the_tools_take(stage):
    first, _ = run(stage, deterministic=True)
    second, _ = run(stage, deterministic=True, delay=0.02)
    assert [(talk.ids, talk.sampled) for talk in first] == [(talk.ids, talk.sampled) for talk in second]


def test_sampled_tokens_do_not_depend_on_the_batch(stage):
    alone, together = run(stage, max_num_seqs=1)[0], run(stage)[0]
    assert [talk.ids for talk in alone] == [talk.ids for talk in together]


def test_greedy_equals_generate(stage):
    model, processor = stage
    engine = NativeEngine(model)
    for seed, sizes in enumerate(((SIZES[1],), (SIZES[3], SIZES[2]), (SIZES[0], SIZES[0]))):
        talk = Talk(processor, seed).text(5)
        for n, size in enumerate(sizes):
            talk.show(size, seed=n).text(4)
        prompt = list(talk.ids)
        asyncio.run(talk.turn(engine, f"p{seed}", max_tokens=12, temperature=0))
        tokens = torch.tensor([prompt])
        theirs = generate(model, processor, tokens, talk.images)
        assert talk.ids[len(prompt) :] == theirs[0, len(prompt) :].tolist()


def generate(model, processor, tokens, images):
    previous = model.config._attn_implementation
    model.set_attn_implementation({"": "eager", "text_config": "eager"})
    try:
        return model.generate(
            input_ids=tokens,
            attention_mask=torch.ones_like(tokens),
            mm_token_type_ids=(tokens == processor.image_token_id).int(),
            pixel_values=torch.cat([each.pixel_values for each in images]),
            image_grid_thw=torch.tensor([each.grid for each in images]),
            suppress_tokens=[processor.image_token_id, processor.video_token_id],
            max_new_tokens=12,
            min_new_tokens=12,
            do_sample=False,
            eos_token_id=None,
        )
    finally:
        model.set_attn_implementation({"": previous, "text_config": previous})


def test_an_image_of_equal_size_is_never_taken_for_another(stage):
    """Prompts of the same ids, one after another and beside each other: prefix cache, own slots."""
    model, processor = stage
    engine = NativeEngine(model)

    def prompt(seed):
        return Talk(processor, 0).text(17).show(SIZES[2], seed=seed).text(24)

    talks = [prompt(seed) for seed in (0, 1, 0, 2)]
    assert talks[0].ids == talks[1].ids

    async def main():
        await talks[0].turn(engine, "a")
        engine.metrics()
        await asyncio.gather(*(talk.turn(engine, f"b{i}") for i, talk in enumerate(talks[1:])))

    asyncio.run(main())
    assert max(talk.error(model) for talk in talks) <= TOLERANCE
    assert engine._images.encoded == 3
    # The two new prompts, and of the known one its last token.
    assert engine.metrics()["prefilled_tokens"] == 2 * len(prompt(0).ids) + 1


def test_a_group_encodes_and_computes_its_prompt_once(stage):
    model, processor = stage
    engine = NativeEngine(model, NativeEngineOptions(deterministic=True))
    talks = [Talk(processor, 0).text(3).show(SIZES[2], seed=1).text(2).show(SIZES[1], seed=2).text(5) for _ in range(8)]
    length = len(talks[0].ids)
    for i, talk in enumerate(talks):
        talk.rng = random.Random(i)
    turn_of_each(engine, talks)
    assert engine.metrics()["prefilled_tokens"] == length
    assert engine._images.encoded == 2
    assert len({tuple(talk.ids) for talk in talks}) > 1


def test_an_image_changed_in_the_history_is_computed_again_and_nothing_before_it(stage):
    model, processor = stage
    engine = NativeEngine(model)
    talk = Talk(processor, 0).text(6).show(SIZES[1], seed=1).text(4).show(SIZES[2], seed=2).text(5)
    other = Talk(processor, 0).text(6).show(SIZES[1], seed=1).text(4).show(SIZES[2], seed=3).text(5)
    prompt = len(talk.ids)

    async def main():
        await talk.turn(engine, "a")
        engine.metrics()
        await other.turn(engine, "a")

    asyncio.run(main())
    assert other.error(model) <= TOLERANCE
    assert engine.metrics()["prefilled_tokens"] == prompt - 6 - 6 - 4


def test_new_weights_forget_features_and_all_that_hangs_on_them(stage):
    kind = stage[0].config.model_type
    model, processor = build_vision_stage(kind, seed=5)
    engine = NativeEngine(model)
    talk = Talk(processor, 0).text(6).show(SIZES[2], seed=1).text(4)
    before = list(talk.ids)

    async def main():
        await talk.turn(engine, "a")
        with torch.no_grad():
            for parameter in model.model.visual.parameters():  # of the tower alone
                parameter.mul_(0.7)
        await engine.update_weights(None, version=3)
        talk.ids, talk.sampled = before, {}
        out = await talk.turn(engine, "a")
        assert set(out.weight_versions) == {3}

    asyncio.run(main())
    assert engine._images.encoded == 2
    assert talk.error(model) <= TOLERANCE


def test_features_are_remembered_within_bounds(stage):
    model, processor = stage
    engine = NativeEngine(model, NativeEngineOptions(max_num_batched_tokens=32, max_num_seqs=1))
    talks = [Talk(processor, 0).text(2).show(SIZES[2], seed=seed).text(2) for seed in range(9)]
    turn_of_each(engine, talks, max_tokens=2)
    assert engine._images.encoded == 9
    assert sum(len(each.embedding) for each in engine._images._known.values()) <= 32
    assert max(talk.error(model) for talk in talks) <= TOLERANCE


def test_an_image_cut_into_chunks_is_encoded_once(stage):
    model, processor = stage
    engine = NativeEngine(model, NativeEngineOptions(max_num_batched_tokens=2))
    talk = Talk(processor, 0).text(3).show(SIZES[2], seed=0).text(1).show(SIZES[3], seed=1).text(2)
    asyncio.run(talk.turn(engine, "a"))
    assert engine._images.encoded == 2
    assert talk.error(model) <= TOLERANCE


def test_another_precision_follows_the_trainers_weights(stage):
    model, processor = stage
    engine = NativeEngine(model, NativeEngineOptions(dtype="bfloat16"))
    talk = Talk(processor, 0).text(6).show(SIZES[2], seed=1).text(4)
    asyncio.run(talk.turn(engine, "a"))
    assert talk.error(model) <= 0.5
    assert next(engine._model.model.visual.parameters()).dtype == torch.bfloat16


def test_a_vision_model_that_is_shown_nothing(stage):
    model, processor = stage
    engine = NativeEngine(model)
    talks = [Talk(processor, i).text(6 + i) for i in range(3)]
    turn_of_each(engine, talks)
    assert max(talk.error(model) for talk in talks) <= TOLERANCE


def test_placeholders_are_never_sampled(stage):
    model, processor = build_vision_stage(stage[0].config.model_type, seed=3)
    held = [processor.image_token_id, processor.video_token_id]
    with torch.no_grad():
        model.lm_head.weight[held] = 50 * model.lm_head.weight[5]  # they would take half of all draws
    for temperature in (0.0, 0.7, 1.0):
        talk = Talk(processor, 0).text(8)
        out = asyncio.run(talk.turn(NativeEngine(model), "a", max_tokens=40, temperature=temperature))
        assert not set(held) & set(out.token_ids)


@settings(max_examples=12)
@given(
    kind=st.sampled_from(KINDS),
    rows=st.lists(
        st.lists(st.one_of(st.integers(1, 20), st.tuples(st.sampled_from(SIZES[:3]), st.integers(0, 1))), max_size=5),
        min_size=1,
        max_size=5,
    ),
    options=st.sampled_from([{}, {"max_num_batched_tokens": 7}, {"max_num_seqs": 2}, {"deterministic": True}]),
)
def test_any_prompts_that_begin_alike_are_exact(kind, rows, options):
    """Text of one source, so that prompts share what they can; few sizes and images, so that they nearly do."""
    model, processor = STAGES[kind]
    engine = NativeEngine(model, NativeEngineOptions(**options))
    talks = []
    for row in rows:
        talk = Talk(processor, 0).text(2)
        for part in row:
            talk = talk.text(part) if isinstance(part, int) else talk.show(part[0], seed=part[1]).text(1)
        talks.append(talk.text(1))

    async def turns(name, talk):
        await talk.turn(engine, name, max_tokens=3)
        await talk.show(SIZES[0], seed=1).text(1).turn(engine, name, max_tokens=3)
        engine.close(name)

    async def main():
        engine.open([f"t{i}" for i in range(len(talks))])
        await asyncio.gather(*(turns(f"t{i}", talk) for i, talk in enumerate(talks)))

    asyncio.run(asyncio.wait_for(main(), 60))
    assert max(talk.error(model) for talk in talks) <= TOLERANCE


# -- what is refused -------------------------------------------------------------------------------------------------


def test_images_that_do_not_fit_their_placeholders_are_a_data_error_and_the_engine_goes_on(stage):
    model, processor = stage
    engine = NativeEngine(model)
    talk = Talk(processor, 0).text(3).show(SIZES[1], seed=0).text(2)
    params = SamplingParams(max_tokens=3)

    async def main():
        for images in ([], talk.images * 2, [image(processor, *SIZES[0])]):
            with pytest.raises(DataError, match=r"the context has 6 image placeholders \(id \d+\) and \d images"):
                await engine.generate("a", talk.ids, params, images=images)
        with pytest.raises(DataError, match="videos are not supported"):
            await engine.generate("a", [1, processor.video_token_id], params)
        await talk.turn(engine, "a")

    asyncio.run(main())
    assert talk.error(model) <= TOLERANCE


def test_nobody_waits_behind_a_refused_request():
    """In deterministic mode requests wait until every open trajectory has asked: a refused one must not stay open."""
    model, processor = STAGES["qwen2_vl"]
    engine = NativeEngine(model, NativeEngineOptions(deterministic=True))

    async def main():
        with pytest.raises(DataError, match="1 image placeholders"):
            await engine.generate("bad", [1, 2, processor.image_token_id], SamplingParams(max_tokens=3))
        with pytest.raises(ConfigError, match="stop texts need a tokenizer"):
            await engine.generate("bad", [1, 2], SamplingParams(max_tokens=3, stop=("x",)))
        return await asyncio.wait_for(engine.generate("good", [1, 2, 3], SamplingParams(max_tokens=3)), 60)

    assert len(asyncio.run(main()).token_ids) == 3


def test_a_text_model_is_shown_no_images(model, stage):
    shown = [image(stage[1])]
    with pytest.raises(ConfigError, match="model type 'qwen3' reads text only: it cannot be shown images"):
        asyncio.run(NativeEngine(model).generate("a", [1, 2], SamplingParams(), images=shown))


def test_a_tower_that_fails_fails_the_requests_and_the_engine_goes_on(stage, monkeypatch):
    model, processor = stage
    engine = NativeEngine(model)
    talks = [Talk(processor, 0).text(3).show(SIZES[1], seed=seed).text(2) for seed in (0, 1)]

    def fails(*_):
        raise MemoryError("no room for the picture")

    async def main():
        with monkeypatch.context() as patched:
            patched.setattr("etude.inference.vision.image_features", fails)
            asked = (talk.turn(engine, f"t{i}") for i, talk in enumerate(talks))
            for failed in await asyncio.gather(*asked, return_exceptions=True):
                assert isinstance(failed, EngineError)
                assert "no room for the picture" in str(failed)
        await asyncio.gather(*(talk.turn(engine, f"t{i}") for i, talk in enumerate(talks)))

    asyncio.run(asyncio.wait_for(main(), 60))
    assert max(talk.error(model) for talk in talks) <= TOLERANCE


def test_a_request_dropped_in_a_step_leaves_nothing_of_its_images_to_the_next(stage):
    """The same trajectory asks again, with other images of the same size, while the step of the first still runs."""
    model, processor = stage
    engine = NativeEngine(model, NativeEngineOptions(max_num_batched_tokens=6))

    async def main():
        beside = Talk(processor, 9).text(30).show(SIZES[3], seed=9).text(9)
        running = asyncio.ensure_future(beside.turn(engine, "beside", max_tokens=60))
        talks = []
        for number in range(12):
            dropped = Talk(processor, 0).text(8).show(SIZES[2], seed=number).text(8)
            task = asyncio.ensure_future(dropped.turn(engine, "a"))
            for _ in range(number):
                await asyncio.sleep(0.001)
            task.cancel()
            await asyncio.wait([task])
            talks.append(Talk(processor, 0).text(8).show(SIZES[2], seed=100 + number).text(8))
            await talks[-1].turn(engine, "a")
        await running
        return [*talks, beside]

    talks = asyncio.run(asyncio.wait_for(main(), 60))
    assert max(talk.error(model) for talk in talks) <= TOLERANCE
