"""The packed critic against an unpacked forward, and its way towards the returns."""

import copy

import pytest
import torch

from etude.algorithms import LOSS_AGG_MODES, value_loss
from etude.metrics import finish_metrics
from etude.models import ValueModel
from etude.models.value import SharedValueHead
from etude.training import OptimizerSet, OptimOptions, ValueLearner


@pytest.fixture
def critic(model):
    critic = ValueModel(model.base_model)
    with torch.no_grad():
        critic.head.weight.normal_(generator=torch.Generator().manual_seed(3))
        critic.head.bias.fill_(0.5)
    return critic


def engine_of(critic, max_tokens=10_000, lr=0.003):
    return ValueLearner(critic, max_tokens=max_tokens, optimizer=OptimizerSet(critic, OptimOptions(lr=lr), None))


def reference_values(critic, batch, row_ids):
    """(rows, response_len): the value at the position before each scored token, one unpadded forward a row."""
    critic.backbone.set_attn_implementation("eager")
    mask = batch.batch["response_mask"]
    values = torch.zeros(mask.shape)
    for i in range(len(batch)):
        ids, prompt = row_ids(i)
        of_row = critic(input_ids=ids[None])[0]
        for column in mask[i].nonzero().flatten().tolist():
            values[i, column] = of_row[prompt + column - 1]
    return values


@pytest.mark.parametrize("max_tokens", [1, 20, 10_000])
def test_values_are_those_of_unpadded_rows(critic, batch, row_ids, max_tokens):
    with torch.no_grad():
        expected = reference_values(copy.deepcopy(critic), batch, row_ids)
    values = engine_of(critic, max_tokens).values(batch)
    torch.testing.assert_close(values, expected, rtol=1e-5, atol=1e-5)
    assert values.unique().numel() > 5
    assert not values[batch.batch["response_mask"] == 0].any()


def test_values_by_a_head_on_the_policys_trunk_are_computed_without_dropout(model, batch):
    head = SharedValueHead(model)
    head.backbone.train()  # as an update leaves it
    engine_of(head).values(batch)
    assert not any(module.training for module in model.modules())


@pytest.mark.parametrize("mode", LOSS_AGG_MODES)
@pytest.mark.parametrize("max_tokens", [1, 10_000])
def test_an_update_is_one_adamw_step_on_the_value_loss(critic, batch, row_ids, mode, max_tokens):
    reference = copy.deepcopy(critic)
    columns = batch.batch
    loss, _ = value_loss(
        vpreds=reference_values(reference, batch, row_ids),
        values=columns["values"],
        returns=columns["returns"],
        response_mask=columns["response_mask"],
        cliprange_value=0.4,
        loss_agg_mode=mode,
    )
    loss.backward()
    norm = float(torch.stack([p.grad.norm() for p in reference.parameters()]).norm())
    figures = finish_metrics(engine_of(critic, max_tokens).update(batch, cliprange_value=0.4, loss_agg_mode=mode))
    assert figures["critic/vf_loss"] == pytest.approx(loss.item(), rel=1e-4)
    assert figures["critic/grad_norm"] == pytest.approx(norm, rel=1e-4)
    assert figures["critic/lr"] == 0.003
    assert {"critic/vf_clipfrac", "critic/vpred_mean"} <= set(figures)


def test_masked_columns_change_no_bit(critic, batch):
    masked = batch.batch["response_mask"] == 0
    weights = []
    for junk in (0.0, 1e6, float("nan")):
        for name in ("values", "returns"):
            batch.batch[name] = batch.batch[name].masked_fill(masked, junk)
        twin = copy.deepcopy(critic)
        engine_of(twin).update(batch, cliprange_value=0.5, loss_agg_mode="seq-mean-token-mean")
        weights.append(list(twin.parameters()))
    for clean, *dirty in zip(*weights):
        assert all(torch.equal(clean, other) for other in dirty)


def test_a_batch_with_nothing_to_learn_moves_nothing(critic, batch):
    before = [p.detach().clone() for p in critic.parameters()]
    metrics = engine_of(critic, lr=0.1).update(
        batch.select_idxs([1, 2]), cliprange_value=0.5, loss_agg_mode="token-mean"
    )
    figures = finish_metrics(metrics)
    assert "critic/vf_loss" not in figures  # a mean of nothing
    assert figures["critic/grad_norm"] == 0
    assert all(torch.equal(a, b) for a, b in zip(before, critic.parameters()))


def test_gradients_left_by_a_failure_do_not_count(critic, batch):
    clean, stained = copy.deepcopy(critic), copy.deepcopy(critic)
    for parameter in stained.parameters():
        parameter.grad = torch.ones_like(parameter)
    for twin in (clean, stained):
        engine_of(twin).update(batch, cliprange_value=0.5, loss_agg_mode="token-mean")
    assert all(torch.equal(a, b) for a, b in zip(clean.parameters(), stained.parameters()))
