"""What computes in bfloat16 or float16 learns as in float32: displacement, gradients, overflow, continuation."""

import copy
import io
import math

import pytest
import torch

from etude.algorithms import policy_loss
from etude.metrics import finish_metrics
from etude.models import ValueModel
from etude.training import OptimizerSet, OptimOptions, PolicyLearner, ValueLearner, round_weights

EVERYTHING = 10_000
HALF = [torch.bfloat16, torch.float16]


class Recorder(OptimizerSet):
    """Keeps the gradients that a step was given."""

    def step(self):
        factor = 1.0 if self._loss_scale is None else self._loss_scale.value
        self.gradients = torch.cat([p.grad.flatten().double() / factor for p in self._parameters])
        self.types = {p.grad.dtype for p in self._parameters}
        return super().step()


def engine_of(model, dtype, max_tokens=EVERYTHING, **options):
    twin = copy.deepcopy(model)
    exact = round_weights(twin, dtype) if dtype != torch.float32 else None
    options = {"weight_decay": 0.0, **options}
    optimizer = Recorder(twin, OptimOptions(**options), None, exact=exact)
    return PolicyLearner(twin, max_tokens=max_tokens, optimizer=optimizer)


def loss_of(log_probs, _, micro, scale):
    columns = micro.batch
    return policy_loss(
        "vanilla",
        old_log_prob=log_probs.detach(),
        log_prob=log_probs,
        advantages=columns["advantages"],
        response_mask=columns["response_mask"],
        batch_num_tokens=scale.batch_num_tokens,
    )


def moved(engine):
    return torch.cat([p.detach().flatten().double() for p in engine.optimizer._parameters])


def displacement(model, batch, dtype, steps=20, **options):
    engine = engine_of(model, dtype, **options)
    start = moved(engine)
    for _ in range(steps):
        assert finish_metrics(engine.update(batch, loss_of, 1.0))["skipped_steps"] == 0
    return moved(engine) - start


@pytest.mark.parametrize("dtype", HALF)
@pytest.mark.parametrize("options", [{"lr": 1e-6}, {"lr": 1e-4, "name": "muon"}], ids=["adamw", "muon"])
def test_twenty_steps_at_a_small_rate_go_as_far_as_in_float32(model, batch, dtype, options):
    """Almost none of these steps would be seen by weights of 8 or 11 bits."""
    exact, ours = (displacement(model, batch, d, **options) for d in (torch.float32, dtype))
    assert float((ours != 0).double().mean()) > 0.999
    assert float(ours.norm()) == pytest.approx(float(exact.norm()), rel=0.01)
    assert float(ours.abs().max()) == pytest.approx(float(exact.abs().max()), rel=0.05)
    assert float(ours @ exact) > 0.97 * float(ours.norm() * exact.norm())


@pytest.mark.parametrize(("dtype", "bound"), [(torch.bfloat16, 5e-3), (torch.float16, 1e-3)])
def test_gradients_are_added_up_in_float32(model, batch, dtype, bound):
    """Cut into a micro-batch a row, they differ by the rounding of single passes."""
    gradients = []
    for max_tokens in (EVERYTHING, 1):
        engine = engine_of(model, dtype, max_tokens)
        engine.update(batch, loss_of, 1.0)
        gradients.append(engine.optimizer.gradients)
        assert engine.optimizer.types == {torch.float32}
        assert all(p.grad is None for p in engine.model.parameters())
    whole, cut = gradients
    assert float((whole - cut).norm() / whole.norm()) < bound


@pytest.mark.parametrize("dtype", HALF)
def test_the_model_is_the_float32_weights_rounded_and_starts_from_what_was_loaded(model, batch, dtype):
    engine = engine_of(model, dtype, lr=1e-3)
    for loaded, master in zip(model.parameters(), engine.optimizer._parameters):
        assert torch.equal(loaded, master)  # not from what was rounded
    engine.update(batch, loss_of, 1.0)
    for parameter, master in zip(engine.model.parameters(), engine.optimizer._parameters):
        assert parameter.dtype == dtype
        assert torch.equal(parameter, master.to(dtype))
    states = [s for o, _ in engine.optimizer._optimizers for s in o.state.values()]
    assert {tensor.dtype for state in states for tensor in state.values()} == {torch.float32}


@pytest.mark.parametrize(("dtype", "bytes_per_weight"), [(torch.float32, 16), *((each, 18) for each in HALF)])
def test_a_weight_takes_the_bytes_that_the_docs_say(model, batch, dtype, bytes_per_weight):
    engine = engine_of(model, dtype)
    held, step = [], engine.optimizer.step

    def stepping():
        held.extend(p.grad for p in engine.optimizer._parameters)
        return step()

    engine.optimizer.step = stepping
    engine.update(batch, loss_of, 1.0)
    held += [*engine.model.parameters(), *engine.optimizer._parameters]
    held += [s for o, _ in engine.optimizer._optimizers for state in o.state.values() for s in state.values() if s.ndim]
    taken = sum({tensor.data_ptr(): tensor.nbytes for tensor in held}.values())
    assert taken == bytes_per_weight * sum(p.numel() for p in model.parameters())


def test_a_model_that_comes_rounded_is_trained_in_float32_too(model):
    rounded = copy.deepcopy(model).bfloat16()
    optimizer = OptimizerSet(rounded, OptimOptions(), None)
    assert {p.dtype for p in optimizer._parameters} == {torch.float32}
    values = ValueModel(rounded.base_model)
    assert values.head.weight.dtype == torch.float32
    assert OptimizerSet(values, OptimOptions(), None)._masters.of(values.head.weight) is values.head.weight


def test_float16_scales_small_gradients_up_and_backs_off_from_overflow(model, batch):
    engine = engine_of(model, torch.float16, lr=1e-3)
    scale = engine.optimizer._loss_scale
    assert scale.value == 2**16
    before = moved(engine)
    huge = batch.select(deepcopy=True)
    huge.batch["advantages"] = 1e4 * huge.batch["advantages"]
    figures = finish_metrics(engine.update(huge, loss_of, 1.0))
    assert (figures["skipped_steps"], figures["optimizer_steps"]) == (1, 1)
    assert not math.isfinite(figures["grad_norm"])
    assert torch.equal(moved(engine), before)
    assert scale.value == 2**15
    while finish_metrics(engine.update(huge, loss_of, 1.0))["skipped_steps"]:
        assert scale.value >= 1
    assert not torch.equal(moved(engine), before)
    settled, scale.interval = scale.value, 3
    for _ in range(2):
        engine.update(huge, loss_of, 1.0)
    assert scale.value == 2 * settled


def test_float16_learns_from_gradients_below_its_smallest_number(model, batch):
    tiny = batch.select(deepcopy=True)
    tiny.batch["advantages"] = 1e-7 * tiny.batch["advantages"]
    gradients, norms = [], []
    for dtype in (torch.float32, torch.float16):
        engine = engine_of(model, dtype)
        norms.append(finish_metrics(engine.update(tiny, loss_of, 1.0))["grad_norm"])
        gradients.append(engine.optimizer.gradients)
    exact, ours = gradients
    assert float((exact - ours).norm()) < 0.05 * float(exact.norm())
    assert norms[1] == pytest.approx(norms[0], rel=0.05)  # it is clipped, and reported, without the factor


@pytest.mark.parametrize("dtype", HALF)
def test_a_restored_optimizer_goes_on_bit_for_bit(model, batch, dtype):
    engine = engine_of(model, dtype, lr=1e-4)
    for _ in range(2):
        engine.update(batch, loss_of, 1.0)
    file = io.BytesIO()
    torch.save(engine.optimizer.state_dict(), file)
    file.seek(0)
    other = engine_of(model, dtype, lr=1e-4)
    other.optimizer.load_state_dict(torch.load(file, weights_only=True))
    for each in (engine, other):
        each.update(batch, loss_of, 1.0)
    assert torch.equal(moved(engine), moved(other))
    assert all(torch.equal(a, b) for a, b in zip(engine.model.parameters(), other.model.parameters()))
    assert engine.optimizer._loss_scale == other.optimizer._loss_scale


def test_a_state_of_another_precision_is_taken_over(model, batch):
    engine = engine_of(model, torch.float16, lr=1e-3)
    engine.update(batch, loss_of, 1.0)
    saved = copy.deepcopy(engine.optimizer.state_dict())
    for dtype in (torch.bfloat16, torch.float32):
        other = engine_of(model, dtype).optimizer
        other.load_state_dict(saved)
        taken = other.state_dict()
        assert taken.keys() == {name for name in saved if not name.startswith("loss_scale.")}
        assert all(torch.equal(saved[name], tensor) for name, tensor in taken.items())


def test_a_critic_computes_in_bfloat16_under_a_float32_head(model, batch):
    errors = {}
    for dtype in (torch.float32, torch.bfloat16):
        torch.manual_seed(0)
        critic = ValueModel(copy.deepcopy(model).base_model)
        exact = round_weights(critic.backbone, dtype) if dtype != torch.float32 else None
        optimizer = OptimizerSet(critic, OptimOptions(lr=3e-3), None, exact=exact)
        engine = ValueLearner(critic, max_tokens=20, optimizer=optimizer)
        for _ in range(10):
            engine.update(batch, cliprange_value=1e9, loss_agg_mode="token-mean")
        mask = batch.batch["response_mask"]
        difference = (engine.values(batch) - batch.batch["returns"]) * mask
        errors[dtype] = float(difference.square().sum() / mask.sum())
    assert errors[torch.bfloat16] == pytest.approx(errors[torch.float32], rel=0.1)
