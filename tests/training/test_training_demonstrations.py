"""Demonstrations become batches whose mask is provenance, and are learned by heart."""

import copy
import math

import pytest
import torch
from vision_stage import KINDS, build_vision_stage, image, plain_log_probs

from etude.errors import DataError
from etude.metrics import finish_metrics
from etude.training import OptimizerSet, OptimOptions, PolicyLearner, demonstrations_to_batch, sft_step
from etude.trajectory import Provenance

SAMPLED, TEMPLATE, TOOL, USER = Provenance.SAMPLED, Provenance.TEMPLATE, Provenance.TOOL, Provenance.USER
EXAMPLES = [
    [((1, 2, 3), USER), ((4, 5), SAMPLED), ((6,), TEMPLATE), ((7, 8), TOOL), ((9, 10, 11), SAMPLED), ((12,), TEMPLATE)],
    [((20, 21), TEMPLATE), ((), TOOL), ((22, 23, 24), SAMPLED)],
    [((30,), USER)],
]


def engine_of(model, name="adamw", lr=0.003, max_tokens=64):
    return PolicyLearner(
        model, max_tokens=max_tokens, optimizer=OptimizerSet(model, OptimOptions(name=name, lr=lr), None)
    )


def test_only_sampled_tokens_are_scored():
    columns = demonstrations_to_batch(EXAMPLES, pad_token_id=0).batch
    assert columns["input_ids"].tolist() == [
        list(range(1, 13)),
        [20, 21, 22, 23, 24, *[0] * 7],
        [30, *[0] * 11],
    ]
    assert columns["attention_mask"].sum(dim=1).tolist() == [12, 5, 1]
    assert columns["response_mask"].tolist() == [
        [0, 0, 0, 1, 1, 0, 0, 0, 1, 1, 1, 0],
        [0, 0, 1, 1, 1, *[0] * 7],
        [0] * 12,
    ]


def test_an_empty_demonstration_is_a_row_with_nothing_to_learn():
    columns = demonstrations_to_batch([EXAMPLES[1], []], pad_token_id=9).batch
    assert columns["input_ids"].dtype == torch.long
    assert columns["input_ids"][1].tolist() == [9] * 5
    assert not columns["attention_mask"][1].any()


@pytest.mark.parametrize("max_tokens", [64, 8])  # one micro-batch, and one a row
def test_the_loss_is_the_mean_over_sampled_tokens(model, max_tokens):
    expected = []
    for example in EXAMPLES:
        ids = [t for run, _ in example for t in run]
        scored = [who is SAMPLED for run, who in example for _ in run]
        with torch.no_grad():
            log_probs = model(input_ids=torch.tensor([ids])).logits[0].log_softmax(-1)
        expected += [-float(log_probs[i - 1, ids[i]]) for i in range(len(ids)) if scored[i]]
    batch = demonstrations_to_batch(EXAMPLES, pad_token_id=0)
    figures = finish_metrics(sft_step(engine_of(model, max_tokens=max_tokens), batch))
    assert figures["loss"] == pytest.approx(math.fsum(expected) / len(expected), rel=1e-5)
    assert set(figures) == {"loss", "grad_norm", "lr", "weight_change", "optimizer_steps", "skipped_steps"}


@pytest.mark.parametrize(("name", "lr"), [("adamw", 0.003), ("muon", 0.002)])
def test_a_few_steps_learn_by_heart(model, name, lr):
    engine, batch = engine_of(model, name, lr), demonstrations_to_batch(EXAMPLES, pad_token_id=0)
    losses = [finish_metrics(sft_step(engine, batch))["loss"] for _ in range(40)]
    assert losses[-1] < 0.1 < 2 < losses[0]


def test_a_demonstration_that_opens_with_a_sampled_token_is_refused(model):
    batch = demonstrations_to_batch([EXAMPLES[0], [((5, 6), SAMPLED)]], pad_token_id=0)
    with pytest.raises(DataError, match="row 1"):
        sft_step(engine_of(model), batch)


SMALL, WIDE = (24, 16), (40, 16)


def shown_demonstrations(processor):
    """Two conversations of several turns about images, one about the first's image, and one without any."""

    def build(*parts):
        runs, images = [], []
        for part in parts:
            if isinstance(part, tuple) and isinstance(part[0], tuple):
                images.append(image(processor, *part[0], seed=part[1]))
                runs.append(([processor.image_token_id] * images[-1].tokens, part[2]))
            else:
                runs.append((list(range(part[0], part[1])), part[2]))
        return runs, tuple(images)

    first = (SMALL, 1, TEMPLATE)
    return [
        build((5, 9, TEMPLATE), first, (9, 20, TEMPLATE), (20, 25, SAMPLED), (WIDE, 2, TOOL), (3, 7, SAMPLED)),
        build((5, 9, TEMPLATE), first, (9, 20, TEMPLATE), (40, 44, SAMPLED), (SMALL, 3, USER), (60, 63, SAMPLED)),
        build((5, 9, TEMPLATE), (SMALL, 4, TEMPLATE), (9, 20, TEMPLATE), (20, 25, SAMPLED), (80, 85, TOOL)),
        build((30, 40, TEMPLATE), (50, 54, SAMPLED)),
    ]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("max_tokens", [10_000, 60, 1])
def test_demonstrations_with_images_packed_equal_one_by_one(kind, max_tokens):
    """Loss and gradient, those of the vision tower too, are those of Transformers' own forward of each row."""
    model, processor = build_vision_stage(kind)
    rows = shown_demonstrations(processor)
    twin, losses = copy.deepcopy(model), []
    for runs, images in rows:
        ids = [number for run, _ in runs for number in run]
        learned = torch.tensor([owner is SAMPLED for run, owner in runs for _ in run])[1:]
        losses.append(-plain_log_probs(twin, ids, images)[learned])
    expected = torch.cat(losses).mean()
    expected.backward()
    engine, found = engine_of(model, lr=0.0, max_tokens=max_tokens), {}
    step = engine.optimizer.step
    engine.optimizer.step = lambda: found.update({n: p.grad.clone() for n, p in model.named_parameters()}) or step()
    batch = demonstrations_to_batch([runs for runs, _ in rows], 0, [images for _, images in rows])
    figures = finish_metrics(sft_step(engine, batch))
    assert figures["loss"] == pytest.approx(expected.item(), abs=1e-5)
    assert any("visual" in name for name, gradient in found.items() if gradient.abs().max() > 1e-4)
    for name, parameter in twin.named_parameters():
        gradient = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
        torch.testing.assert_close(found[name], gradient, atol=1e-5, rtol=1e-4, msg=lambda m, name=name: f"{name}: {m}")
