"""Training with images: log-probs, gradients and values against Transformers' own forward over the same pixel values."""

import copy
from dataclasses import replace

import numpy as np
import pytest
import torch
from vision_stage import KINDS, build_vision_stage, image, plain_log_probs, plain_logits

from etude.errors import ConfigError, DataError
from etude.models import ValueModel
from etude.models.vision import Vision
from etude.protocol import DataProto
from etude.training import OptimizerSet, OptimOptions, PolicyLearner, ValueLearner, microbatches, packing
from etude.training.images import COLUMN
from etude.training.microbatches import micro_batches
from etude.training.packing import needed_tokens, pack

CPU = torch.device("cpu")
MANY = 10_000
SMALL, WIDE = (24, 16), (40, 16)
STAGES = {kind: build_vision_stage(kind) for kind in KINDS}

# Text counts tokens of one source; (size, seed) is an image; a response's "s3" are three sampled tokens.
ROWS = (
    ((4, (SMALL, 1), 12), ("s5", 4, (WIDE, 3), 3, "s4")),
    ((4, (SMALL, 1), 12), ("s7", 1, (WIDE, 3), 3, "s2")),  # the first row's prompt, the same image by a tool
    ((4, (SMALL, 2), 12), ("s5", 4, (WIDE, 3), 3, "s4")),  # its ids throughout, another image
    ((4, (SMALL, 1), 12), ("s5", 4, (WIDE, 4), 3, "s4")),  # another image by the tool
    ((9,), ("s4",)),  # text alone
    ((2, (SMALL, 1), 1, (SMALL, 1), 2), ("s3", 5)),  # one image twice; nothing is learned behind its answer
    ((6,), ("s2", 1, (WIDE, 5), 2)),  # an image behind all that is learned
    ((6,), ()),  # dropped
)


def build_batch(processor, rows=ROWS):
    """Padded on both sides; the sampled tokens of a row depend on its number alone, but rows 0, 2 and 3 have the same."""
    prompts, responses, masks, images = [], [], [], []
    for number, (prompt, response) in enumerate(rows):
        seed = 0 if number in (0, 2, 3) else number
        source = torch.randint(0, 200, (100,), generator=torch.Generator().manual_seed(17)).tolist()
        sampled = torch.randint(0, 200, (40,), generator=torch.Generator().manual_seed(seed)).tolist()
        shown, made, mask = [], [], []
        for part in (*prompt, None, *response):
            if part is None:
                prompts.append(made)
                made, mask = [], []
            elif isinstance(part, tuple):
                shown.append(image(processor, *part[0], seed=part[1]))
                made += [processor.image_token_id] * shown[-1].tokens
                mask += [0] * shown[-1].tokens
            elif isinstance(part, str):
                count = int(part[1:])
                made, sampled, mask = made + sampled[:count], sampled[count:], mask + [1] * count
            else:
                made, source, mask = made + source[:part], source[part:], mask + [0] * part
        responses.append(made)
        masks.append(mask)
        images.append(tuple(shown))
    before, after = max(map(len, prompts)), max(map(len, responses))
    ids = torch.zeros(len(rows), before + after, dtype=torch.long)
    attention, response_mask = torch.zeros_like(ids), torch.zeros(len(rows), after, dtype=torch.long)
    for i, (prompt, response) in enumerate(zip(prompts, responses)):
        real = slice(before - len(prompt), before + len(response))
        ids[i, real] = torch.tensor(prompt + response)
        attention[i, real] = 1
        response_mask[i, : len(response)] = torch.tensor(masks[i])
    generator = torch.Generator().manual_seed(3)
    column = np.empty(len(rows), dtype=object)
    column[:] = images
    return DataProto.from_single_dict(
        {
            "input_ids": ids,
            "attention_mask": attention,
            "response_mask": response_mask,
            "advantages": torch.randn(len(rows), after, generator=generator),
            "values": torch.randn(len(rows), after, generator=generator) * response_mask,
            "returns": torch.randn(len(rows), after, generator=generator) * response_mask,
            COLUMN: column,
        }
    )


@pytest.fixture(params=KINDS)
def stage(request):
    """(a copy of the model, the batch)."""
    model, processor = STAGES[request.param]
    return copy.deepcopy(model), build_batch(processor)


def real_ids(batch, row):
    return batch.batch["input_ids"][row][batch.batch["attention_mask"][row].bool()].tolist()


def plain(model, batch):
    """(rows, response_len) by Transformers' own forward of each row; differentiable."""
    mask = batch.batch["response_mask"]
    rows = []
    for row in range(len(batch)):
        width = batch.batch["input_ids"].shape[1] - mask.shape[1]
        prompt = int(batch.batch["attention_mask"][row, :width].sum())
        log_probs = plain_log_probs(model, real_ids(batch, row), batch.non_tensor_batch[COLUMN][row])[prompt - 1 :]
        rows.append(torch.nn.functional.pad(log_probs, (0, mask.shape[1] - len(log_probs))))
    return torch.where(mask.bool(), torch.stack(rows), 0.0)


def weighted(log_probs, entropy, micro, _):
    return (log_probs * micro.batch["advantages"]).sum(), {}


def gradients(model, batch, loss=weighted, max_tokens=MANY, entropy_grad=False):
    """Of one update, by parameter's name; the weights stay."""
    twin = copy.deepcopy(model)
    optimizer = OptimizerSet(twin, OptimOptions(lr=0.0, weight_decay=0.0, clip_grad=None), None)
    found = {}
    step = optimizer.step
    optimizer.step = lambda: found.update({n: p.grad.clone() for n, p in twin.named_parameters()}) or step()
    figures = PolicyLearner(twin, max_tokens=max_tokens, optimizer=optimizer).update(batch, loss, 1.0, entropy_grad)
    return found, figures


@pytest.mark.parametrize("max_tokens", [MANY, 30, 1])
def test_log_probs_equal_transformers_own_forward(stage, max_tokens):
    model, batch = stage
    with torch.no_grad():
        expected = plain(model, batch)
    log_probs, entropy = PolicyLearner(model, max_tokens=max_tokens).log_probs(batch, 1.0)
    torch.testing.assert_close(log_probs, expected, rtol=0, atol=5e-5)
    assert bool((entropy[batch.batch["response_mask"].bool()] > 0).all())


@pytest.mark.parametrize("max_tokens", [MANY, 30])
def test_gradients_equal_transformers_own_and_reach_the_vision_tower(stage, max_tokens):
    model, batch = stage
    model.zero_grad()
    (plain(model, batch) * batch.batch["advantages"]).sum().backward()
    expected = {name: parameter.grad for name, parameter in model.named_parameters()}
    found, figures = gradients(model, batch, max_tokens=max_tokens)
    assert set(found) == set(expected)
    for name, gradient in found.items():
        scale = float(expected[name].abs().max())
        assert scale > 0, name  # the tower's too: nothing is frozen
        torch.testing.assert_close(gradient, expected[name], rtol=1e-3, atol=1e-4 * max(scale, 1.0), msg=name)
    assert figures["skipped_steps"] == 0


def test_an_entropy_bonus_has_a_finite_gradient(stage):
    model, batch = stage

    def loss(log_probs, entropy, micro, _):
        return entropy.sum(), {}

    found, figures = gradients(model, batch, loss, entropy_grad=True)
    assert figures["skipped_steps"] == 0
    assert all(bool(gradient.isfinite().all()) for gradient in found.values())
    assert float(found["model.visual.patch_embed.proj.weight"].abs().max()) > 0


def test_rows_share_their_beginnings_up_to_the_first_image_that_differs(stage):
    model, batch = stage
    vision = Vision.of(model.config)
    together = len(pack(batch, [0, 1, 2, 3], CPU, vision).token_ids)
    lengths = [len(ids) for ids in needed_tokens(batch, [0, 1, 2, 3], vision)]
    prompt = 4 + 6 + 12
    # Row 1 shares the prompt; row 2 nothing (4 tokens are too few to be worth it); row 3 all before the tool's image.
    assert together == sum(lengths) - prompt - (prompt + 5 + 4)
    packed = pack(batch, [0, 1, 2, 3], CPU, vision)
    assert len(packed.images.images) == 4
    assert sorted(packed.images.places.tolist()) == sorted(set(packed.images.places.tolist()))
    assert bool((packed.token_ids >= 0).all())


def test_sharing_changes_only_rounding(stage, monkeypatch):
    model, batch = stage
    shared, _ = gradients(model, batch)
    probs = PolicyLearner(model, max_tokens=MANY).log_probs(batch, 1.0)[0]
    monkeypatch.setattr(packing, "MIN_SHARED", 10**6)
    alone, _ = gradients(model, batch)
    torch.testing.assert_close(PolicyLearner(model, max_tokens=MANY).log_probs(batch, 1.0)[0], probs, rtol=0, atol=5e-5)
    for name in shared:
        scale = max(float(shared[name].abs().max()), 1.0)
        torch.testing.assert_close(alone[name], shared[name], rtol=1e-3, atol=1e-4 * scale, msg=name)


def test_images_behind_all_that_is_learned_are_not_computed(stage):
    model, batch = stage
    assert pack(batch, [6], CPU, Vision.of(model.config)).images is None


def test_an_image_counts_its_placeholders_against_the_budget(stage):
    model, batch = stage
    vision = Vision.of(model.config)
    lone = [len(needed_tokens(batch, [row], vision)[0]) for row in (0, 2)]
    two = batch.select_idxs([0, 2])
    assert micro_batches(two, sum(lone), vision) == [[0, 1]]
    assert micro_batches(two, sum(lone) - 1, vision) == [[0], [1]]  # equal ids, but nothing to share


def test_labels_of_masked_tokens_change_nothing(stage, monkeypatch):
    model, batch = stage
    expected, figures = gradients(model, batch)

    def with_other_labels(batch, rows, device, vision, team):
        packed = pack(batch, rows, device, vision, team)
        other = copy.deepcopy(batch)
        kept = torch.nn.functional.pad(
            batch.batch["response_mask"].bool(),
            (batch.batch["input_ids"].shape[1] - batch.batch["response_mask"].shape[1], 0),
        )
        junk = torch.randint(0, 200, kept.shape, generator=torch.Generator().manual_seed(5))
        other.batch["input_ids"] = torch.where(kept, batch.batch["input_ids"], junk)
        return replace(packed, labels=pack(other, rows, device).labels)

    monkeypatch.setattr(microbatches, "pack", with_other_labels)
    found, again = gradients(model, batch)
    assert again == figures
    assert all(torch.equal(found[name], expected[name]) for name in expected)


def test_values_and_their_gradient_equal_transformers_own(stage):
    model, batch = stage
    critic = ValueModel(model.model)
    torch.nn.init.normal_(critic.head.weight, generator=torch.Generator().manual_seed(2))
    mask = batch.batch["response_mask"]
    expected = torch.zeros(mask.shape)
    outputs = []
    hook = model.model.language_model.register_forward_hook(lambda *given: outputs.append(given[2].last_hidden_state))
    with torch.no_grad():
        for row in range(len(batch)):
            plain_logits(model, real_ids(batch, row), batch.non_tensor_batch[COLUMN][row])
            width = batch.batch["input_ids"].shape[1] - mask.shape[1]
            prompt = int(batch.batch["attention_mask"][row, :width].sum())
            values = critic.values_of(outputs.pop()[0])[prompt - 1 : -1]
            expected[row, : len(values)] = values
    hook.remove()
    optimizer = OptimizerSet(critic, OptimOptions(lr=1e-3), None)
    engine = ValueLearner(critic, max_tokens=60, optimizer=optimizer)
    torch.testing.assert_close(engine.values(batch), torch.where(mask.bool(), expected, 0.0), rtol=1e-4, atol=1e-4)
    before = critic.backbone.visual.patch_embed.proj.weight.clone()
    figures = engine.update(batch, cliprange_value=0.5, loss_agg_mode="token-mean")
    assert figures["critic/skipped_steps"] == 0
    assert not torch.equal(critic.backbone.visual.patch_embed.proj.weight, before)


def test_gradient_checkpointing_changes_nothing(stage):
    model, batch = stage
    expected, _ = gradients(model, batch)
    model.gradient_checkpointing_enable()
    found, _ = gradients(model, batch)
    for name in expected:
        torch.testing.assert_close(found[name], expected[name], msg=name)


def test_a_batch_survives_its_travels(stage, tmp_path):
    """Selected, repeated, joined, saved and read again."""
    model, batch = stage
    expected = PolicyLearner(model, max_tokens=MANY).log_probs(batch, 1.0)[0]
    again = DataProto.concat([batch.select_idxs([3, 0]), batch.select_idxs([5])])
    again.save_to_disk(tmp_path / "batch")
    again = DataProto.load_from_disk(tmp_path / "batch")
    found = PolicyLearner(model, max_tokens=MANY).log_probs(again, 1.0)[0]
    torch.testing.assert_close(found, expected[[3, 0, 5]], rtol=0, atol=5e-5)


def test_a_row_whose_images_do_not_fit_is_named(stage):
    model, batch = stage
    batch.non_tensor_batch[COLUMN][2] = batch.non_tensor_batch[COLUMN][2][:1]
    engine = PolicyLearner(model, max_tokens=MANY)
    with pytest.raises(DataError, match="row 2: the context has 16 image placeholders"):
        engine.log_probs(batch, 1.0)
    batch.non_tensor_batch.pop(COLUMN)
    with pytest.raises(DataError, match=r"row 0: .* and 0 images, which stand for none"):
        engine.log_probs(batch, 1.0)


def test_a_text_model_learns_from_no_images(model, stage):
    _, batch = stage
    optimizer = OptimizerSet(model, OptimOptions(), None)
    engine = PolicyLearner(model, max_tokens=MANY, optimizer=optimizer)
    for compute in (lambda: engine.log_probs(batch, 1.0), lambda: engine.update(batch, weighted, 1.0)):
        with pytest.raises(ConfigError, match="model type 'qwen3' reads text only"):
            compute()
    batch.non_tensor_batch[COLUMN][:] = [()] * len(batch)
    batch.batch["input_ids"] %= 97
    engine.log_probs(batch, 1.0)
