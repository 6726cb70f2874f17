"""Optimizers of other packages behind the same interface: what they compute, where the weights are outside of an update, and
exact continuation."""

import copy

import pytest
import torch
from torch import nn

from etude.errors import ConfigError, MissingExtraError
from etude.options import ActorOptions, OptimOptions, has_several_updates
from etude.training import OptimizerSet

PACKAGES = {"adamw_schedule_free": "schedulefree", "adamw_8bit": "bitsandbytes"}
BETAS, LR, DECAY = (0.9, 0.95), 0.05, 0.1


@pytest.fixture(params=PACKAGES)
def name(request):
    pytest.importorskip(PACKAGES[request.param])
    return request.param


def net(dtype=torch.float32):
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(6, 80), nn.Tanh(), nn.Linear(80, 80)).to(dtype)


def optimizer_of(model, name, **options):
    given = {"lr": LR, "betas": BETAS, "weight_decay": DECAY, "clip_grad": None, **options}
    return OptimizerSet(model, OptimOptions(name=name, **given), None)


def update(model, optimizer, step, factor=1.0):
    """One update towards a target; returns the weights that its gradient was taken at."""
    generator = torch.Generator().manual_seed(step)
    kind = next(model.parameters()).dtype
    x, y = torch.randn(12, 6, generator=generator).to(kind), torch.randn(12, 80, generator=generator).to(kind)
    with optimizer.training():
        where = [p.detach().clone() for p in model.parameters()]
        optimizer.backward(factor * (model(x) - y).square().mean())
        optimizer.step()
    return where


def test_schedule_free_is_its_formula():
    """y = (1 - β) z + β x; z ← z - lr (g / √v̂ + λ y); x ← the mean of all z with weights lr² (here equal)."""
    pytest.importorskip("schedulefree")
    model, shadow = net(), net()
    optimizer = optimizer_of(model, "adamw_schedule_free")
    x = [p.detach().double() for p in net().parameters()]
    z, v = [p.clone() for p in x], [torch.zeros_like(p) for p in x]
    for step in range(4):
        where = update(model, optimizer, step)
        y = [BETAS[0] * a + (1 - BETAS[0]) * b for a, b in zip(x, z)]
        for parameter, point, at in zip(shadow.parameters(), y, where):
            torch.testing.assert_close(at.double(), point, atol=1e-5, rtol=0)
            parameter.data.copy_(point)
            parameter.grad = None
        generator = torch.Generator().manual_seed(step)
        inputs, target = torch.randn(12, 6, generator=generator), torch.randn(12, 80, generator=generator)
        (shadow(inputs) - target).square().mean().backward()
        for i, parameter in enumerate(shadow.parameters()):
            g = parameter.grad.double()
            v[i] = BETAS[1] * v[i] + (1 - BETAS[1]) * g * g
            z[i] = z[i] - LR * (g / ((v[i] / (1 - BETAS[1] ** (step + 1))).sqrt() + 1e-8) + DECAY * y[i])
            x[i] = x[i] + (z[i] - x[i]) / (step + 1)
        for parameter, average in zip(model.parameters(), x):
            torch.testing.assert_close(parameter.detach().double(), average, atol=1e-4, rtol=0)


def test_outside_of_an_update_the_weights_are_the_average():
    pytest.importorskip("schedulefree")
    model = net(torch.bfloat16)
    optimizer = optimizer_of(model, "adamw_schedule_free")
    for step in range(3):
        where = update(model, optimizer, step)
    assert not all(torch.equal(a, b) for a, b in zip(where, model.parameters()))
    before = [p.detach().clone() for p in model.parameters()]
    with pytest.raises(MemoryError), optimizer.training():
        raise MemoryError  # an update that fails half-way
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters()))
    update(model, optimizer, 3, factor=float("nan"))  # skipped: back to the average, up to rounding
    for a, b in zip(before, model.parameters()):
        torch.testing.assert_close(a, b, rtol=1e-2, atol=1e-3)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_restored_state_goes_on_bit_for_bit(name, dtype):
    model = net(dtype)
    optimizer = optimizer_of(model, name)
    for step in range(3):
        update(model, optimizer, step)
    state = {key: tensor.clone() for key, tensor in optimizer.state_dict().items()}
    other = net(dtype)
    restored = optimizer_of(other, name)
    restored.load_state_dict(state)
    for step in range(3, 5):
        update(model, optimizer, step)
        update(other, restored, step)
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), other.parameters()))


def test_moments_of_8_bits_lead_where_exact_ones_do():
    pytest.importorskip("bitsandbytes")
    models = [net(), net()]
    start = copy.deepcopy(models[0])
    optimizers = [optimizer_of(model, name) for model, name in zip(models, ("adamw", "adamw_8bit"))]
    for step in range(5):
        for model, optimizer in zip(models, optimizers):
            update(model, optimizer, step)
    assert any(t.dtype == torch.uint8 for t in optimizers[1].state_dict().values())
    for exact, rough, first in zip(*(model.parameters() for model in models), start.parameters()):
        assert float((exact - rough).detach().norm()) < 0.1 * float((exact - first).detach().norm())


@pytest.mark.parametrize("missing", PACKAGES)
def test_a_missing_package_is_one_line(missing, monkeypatch):
    package = PACKAGES[missing]
    for module in (package, f"{package}.optim"):
        monkeypatch.setitem(__import__("sys").modules, module, None)
    with pytest.raises(MissingExtraError, match=rf"optim.name={missing} .*pip install 'etude\[{package}\]'"):
        optimizer_of(net(), missing)


def test_what_schedule_free_needs():
    with pytest.raises(ConfigError, match="lr_scheduler_type=constant"):
        OptimOptions(name="adamw_schedule_free", lr_scheduler_type="linear")
    with pytest.raises(ConfigError, match="above 0"):
        OptimOptions(name="adamw_schedule_free", betas=(0.0, 0.9))
    own = ActorOptions(ppo_mini_batch_size=4)
    assert not has_several_updates(own, 4)  # an update's own log-probs are the old ones …
    assert has_several_updates(ActorOptions(ppo_mini_batch_size=4, optim=OptimOptions(name="adamw_schedule_free")), 4)
