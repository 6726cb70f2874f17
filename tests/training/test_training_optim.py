"""Schedules by hand, clipping and skipping, exact continuation, and Muon against its formula."""

import copy
import io
import math

import numpy as np
import pytest
import torch
from torch import nn

from etude.errors import CheckpointError, ConfigError
from etude.metrics import finish_metrics
from etude.training import OptimizerSet, OptimOptions
from etude.training.muon import Muon
from etude.training.optim import step_metrics


class Net(nn.Module):
    """Two blocks under `.layers.`, as Hugging Face names them, and parameters of other kinds around them."""

    def __init__(self) -> None:
        super().__init__()
        self.model = nn.Module()
        self.model.layers = nn.ModuleList([nn.Linear(4, 6), nn.Linear(6, 4)])
        self.head = nn.Linear(4, 2)

    def forward(self, x):
        for layer in self.model.layers:
            x = torch.tanh(layer(x))
        return self.head(x)


@pytest.fixture
def net():
    torch.manual_seed(1)
    return Net()


def set_gradients(net, seed, scale=1.0):
    generator = torch.Generator().manual_seed(seed)
    for parameter in net.parameters():
        parameter.grad = scale * torch.randn(parameter.shape, generator=generator)


def weights(net):
    return [p.detach().clone() for p in net.parameters()]


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, [1, 1, 1, 1, 1, 1]),
        ({"lr_warmup_steps": 4}, [0.25, 0.5, 0.75, 1, 1, 1]),
        ({"lr_scheduler_type": "linear"}, [1, 0.75, 0.5, 0.25, 0, 0]),
        ({"lr_scheduler_type": "linear", "min_lr_ratio": 0.2}, [1, 0.8, 0.6, 0.4, 0.2, 0.2]),
        ({"lr_scheduler_type": "linear", "lr_decay_ratio": 0.5}, [1, 1, 1, 0.5, 0, 0]),
        ({"lr_scheduler_type": "linear", "lr_warmup_steps": 2}, [0.5, 1, 1, 0.5, 0, 0]),
        ({"lr_scheduler_type": "linear", "lr_warmup_steps": 2, "lr_decay_ratio": 0.25}, [0.5, 1, 1, 1, 0, 0]),
        ({"lr_scheduler_type": "linear", "lr_warmup_steps": 2, "lr_decay_ratio": 0.75}, [0.5, 1, 1, 0.5, 0, 0]),
        ({"lr_scheduler_type": "cosine", "lr_warmup_steps": 9}, [i / 9 for i in range(1, 7)]),
        ({"lr_scheduler_type": "cosine"}, [1, (1 + math.sqrt(0.5)) / 2, 0.5, (1 - math.sqrt(0.5)) / 2, 0, 0]),
        (
            {"lr_scheduler_type": "cosine", "min_lr_ratio": 0.5},
            [1, (3 + math.sqrt(0.5)) / 4, 0.75, 0.5732233, 0.5, 0.5],
        ),
    ],
)
def test_schedules_by_hand(net, options, expected):
    optimizer = OptimizerSet(net, OptimOptions(lr=0.01, **options), total_steps=4)
    seen = []
    for step in range(6):
        optimizer.training_step = step
        for _ in range(step):  # however many optimizer steps it takes, one rate
            set_gradients(net, 0)
            optimizer.step()
        seen.append(optimizer.lr / 0.01)
    assert seen == pytest.approx(expected, abs=1e-7)


@pytest.mark.parametrize("kind", ["linear", "cosine"])
def test_after_its_warm_up_a_schedule_is_that_of_transformers(net, kind):
    """Shifted by one: the first step of theirs has the rate 0."""
    import transformers

    theirs = torch.optim.SGD(net.parameters(), lr=1.0)
    schedule = getattr(transformers, f"get_{kind}_schedule_with_warmup")(theirs, 10, 20)
    ours = OptimizerSet(net, OptimOptions(lr=1.0, lr_scheduler_type=kind, lr_warmup_steps=10), total_steps=20)
    seen, expected = [], []
    for step in range(20):
        ours.training_step = step
        seen.append(ours.lr)
        expected.append(theirs.param_groups[0]["lr"])
        theirs.step()
        schedule.step()
    assert max(seen) == 1
    assert seen[10:] == pytest.approx(expected[10:])
    assert seen[:9] == pytest.approx(expected[1:10])


def test_a_schedule_that_begins_late_has_its_whole_shape_in_what_remains(net):
    options = OptimOptions(lr=1.0, lr_scheduler_type="linear", lr_warmup_steps=2, min_lr_ratio=0.1)
    late, whole = OptimizerSet(net, options, 11, first_step=5), OptimizerSet(net, options, 6)
    for step in range(6):
        late.training_step, whole.training_step = step + 5, step
        assert late.lr == whole.lr


@pytest.mark.parametrize("name", ["adamw", "muon"])
def test_the_schedule_reaches_the_weights(net, name):
    """A step at learning rate 0 moves nothing; the one before did."""
    optimizer = OptimizerSet(net, OptimOptions(name=name, lr=0.01, lr_scheduler_type="linear"), total_steps=1)
    steps = [weights(net)]
    for optimizer.training_step in range(2):
        set_gradients(net, 0)
        optimizer.step()
        steps.append(weights(net))
    assert not any(torch.equal(a, b) for a, b in zip(steps[0], steps[1]))
    assert all(torch.equal(a, b) for a, b in zip(steps[1], steps[2]))


def adamw_reference(start, gradients, o):
    """Algorithm 2 of arXiv 1711.05101 in float64."""
    w, m, v = start.astype(np.float64), 0.0, 0.0
    for t, g in enumerate(gradients, start=1):
        m = o.betas[0] * m + (1 - o.betas[0]) * g
        v = o.betas[1] * v + (1 - o.betas[1]) * g * g
        step = (m / (1 - o.betas[0] ** t)) / (np.sqrt(v / (1 - o.betas[1] ** t)) + 1e-8)
        w = w - o.lr * o.weight_decay * w - o.lr * step
    return w


@pytest.mark.parametrize("clip", [None, 0.5, 1e9])
def test_adamw_with_clipping_is_its_formula(net, clip):
    options = OptimOptions(lr=0.02, betas=(0.8, 0.95), weight_decay=0.1, clip_grad=clip)
    optimizer = OptimizerSet(net, options, None)
    start, history = weights(net), []
    for seed, scale in enumerate((100.0, 1.0, 0.01)):  # what is clipped matters to what follows
        set_gradients(net, seed, scale)
        gradients = [p.grad.double().numpy() for p in net.parameters()]
        norm = math.sqrt(sum(float((g * g).sum()) for g in gradients))
        factor = min(1.0, clip / norm) if clip else 1.0
        history.append([g * factor for g in gradients])
        assert optimizer.step() == pytest.approx(norm, rel=1e-5)
    for first, now, *gradients in zip(start, net.parameters(), *history):
        expected = adamw_reference(first.numpy(), gradients, options)
        np.testing.assert_allclose(now.detach().numpy(), expected, rtol=1e-4, atol=1e-6)


def test_what_adam_was_set_to_holds_from_the_next_step_and_its_moments_stay(net):
    other = copy.deepcopy(net)
    first, second = OptimOptions(lr=0.01), OptimOptions(lr=0.02, betas=(0.8, 0.95), weight_decay=0.1, clip_grad=None)
    changed, continued = OptimizerSet(net, first, None), OptimizerSet(other, first, None)
    for each, optimizer in ((net, changed), (other, continued)):
        set_gradients(each, 0)
        optimizer.step()
    changed.set_adam(lr=0.02, betas=(0.8, 0.95), eps=1e-8, weight_decay=0.1, clip_grad=None)
    expected = OptimizerSet(other, second, None)
    expected.load_state_dict(continued.state_dict())
    for each, optimizer in ((net, changed), (other, expected)):
        set_gradients(each, 1)
        optimizer.step()
    assert all(torch.equal(one, two) for one, two in zip(net.parameters(), other.parameters()))


@pytest.mark.parametrize(("name", "rate"), [("adamw", 0.01), ("muon", 0.02)])
def test_weights_without_a_gradient_decay_at_the_rate_of_their_optimizer(net, name, rate):
    optimizer = OptimizerSet(net, OptimOptions(name=name, lr=0.01, muon_lr_multiplier=2.0, weight_decay=0.3), None)
    matrices = [p for layer in net.model.layers for p in layer.parameters() if p.ndim == 2]
    start = weights(net)
    set_gradients(net, 0, scale=0.0)
    optimizer.step()
    for before, now in zip(start, net.parameters()):
        expected = rate if any(now is matrix for matrix in matrices) else 0.01
        torch.testing.assert_close(now.detach(), before * (1 - expected * 0.3), rtol=1e-6, atol=0)


@pytest.mark.parametrize("name", ["adamw", "muon"])
@pytest.mark.parametrize("poison", [math.inf, math.nan])
def test_a_gradient_that_is_not_finite_moves_nothing_and_shows(net, name, poison):
    optimizer = OptimizerSet(net, OptimOptions(name=name, lr=0.01), None)
    set_gradients(net, 0)
    optimizer.step()
    before, state = weights(net), copy.deepcopy(optimizer.state_dict())
    set_gradients(net, 1)
    net.head.bias.grad[0] = poison
    assert not math.isfinite(optimizer.step())
    assert all(torch.equal(a, b) for a, b in zip(before, weights(net)))
    assert str(optimizer.state_dict()) == str(state)
    assert all(p.grad is None for p in net.parameters())
    set_gradients(net, 2)
    assert math.isfinite(optimizer.step())
    assert not torch.equal(before[0], weights(net)[0])


@pytest.mark.parametrize("name", ["adamw", "muon"])
def test_a_saved_and_restored_run_ends_with_the_same_bits(net, name):
    options = OptimOptions(name=name, lr=0.01, lr_warmup_steps=3, lr_scheduler_type="cosine")

    def train(net, optimizer, seeds):
        for seed in seeds:
            optimizer.training_step = seed
            set_gradients(net, seed)
            optimizer.step()

    optimizer = OptimizerSet(net, options, total_steps=8)
    train(net, optimizer, range(3))
    resumed, forgetful = copy.deepcopy(net), copy.deepcopy(net)
    file = io.BytesIO()
    torch.save(optimizer.state_dict(), file)
    file.seek(0)
    restored, fresh = (OptimizerSet(n, options, total_steps=8) for n in (resumed, forgetful))
    restored.load_state_dict(torch.load(file, weights_only=True))
    for each in ((net, optimizer), (resumed, restored), (forgetful, fresh)):
        train(*each, range(3, 6))
    assert all(torch.equal(a, b) for a, b in zip(weights(net), weights(resumed)))
    assert not any(torch.equal(a, b) for a, b in zip(weights(net), weights(forgetful)))  # the state does matter


@pytest.mark.parametrize(("saved", "used"), [("adamw", "muon"), ("muon", "adamw")])
def test_the_state_of_another_optimizer_is_refused(net, saved, used):
    first = OptimizerSet(net, OptimOptions(name=saved), None)
    set_gradients(net, 0)
    first.step()
    state = copy.deepcopy(first.state_dict())
    optimizer, before = OptimizerSet(net, OptimOptions(name=used), None), weights(net)
    with pytest.raises(CheckpointError, match=f"optim.name={used}: it has optimizer."):
        optimizer.load_state_dict({name: 2 * tensor for name, tensor in state.items()})
    assert all(torch.equal(a, b) for a, b in zip(before, weights(net)))


def test_the_state_of_another_model_is_refused(net):
    state = OptimizerSet(nn.Linear(2, 2), OptimOptions(), None).state_dict()
    with pytest.raises(CheckpointError, match="this model"):
        OptimizerSet(net, OptimOptions(), None).load_state_dict(state)


def test_frozen_parameters_stay_and_an_optimizer_needs_something(net):
    for parameter in net.model.parameters():
        parameter.requires_grad_(False)
    optimizer = OptimizerSet(net, OptimOptions(name="muon", lr=0.01), None)  # no matrix in the blocks is left to Muon
    before = weights(net.model)
    set_gradients(net.head, 0)
    optimizer.step()
    assert all(torch.equal(a, b) for a, b in zip(before, weights(net.model)))
    for parameter in net.parameters():
        parameter.requires_grad_(False)
    with pytest.raises(ConfigError, match="no trainable parameters"):
        OptimizerSet(net, OptimOptions(), None)


def test_muon_alone_is_enough_where_only_matrices_of_blocks_learn(net):
    for name, parameter in net.named_parameters():
        parameter.requires_grad_("layers" in name and parameter.ndim == 2)
    optimizer = OptimizerSet(net, OptimOptions(name="muon", lr=0.01), None)
    before = net.model.layers[0].weight.detach().clone()
    set_gradients(net, 0)
    optimizer.step()
    assert not torch.equal(before, net.model.layers[0].weight)


@pytest.mark.parametrize("name", ["adamw", "muon", "adamw_schedule_free"])
@pytest.mark.parametrize("width", [3, 700])
def test_the_change_of_weights_is_that_of_all_of_them(name, width):
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(width, width), nn.Linear(width, 2))
    optimizer = OptimizerSet(net, OptimOptions(name=name, lr=0.01), None)
    with optimizer.training():
        for seed in range(2):
            before = torch.cat([p.detach().flatten() for p in net.parameters()])
            set_gradients(net, seed)
            optimizer.step()
            after = torch.cat([p.detach().flatten() for p in net.parameters()])
            exact = float((after - before).norm() / after.norm())
            assert optimizer.weight_change == pytest.approx(exact, rel=1e-4 if width == 3 else 0.02)
        set_gradients(net, 2, math.inf)
        assert finish_metrics(step_metrics(optimizer)).keys() == {"grad_norm", "lr", "optimizer_steps", "skipped_steps"}


@pytest.mark.parametrize("name", ["adamw", "muon"])
def test_a_step_without_gradients_moves_nothing(net, name):
    before = weights(net)
    assert OptimizerSet(net, OptimOptions(name=name, lr=0.1), None).step() == 0
    assert all(torch.equal(a, b) for a, b in zip(before, weights(net)))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"name": "sgd"}, "^name must"),
        ({"lr_scheduler_type": "step"}, "^lr_scheduler_type must"),
        ({"lr_decay_ratio": 0.0}, "^lr_decay_ratio must"),
        ({"clip_grad": -1}, "^clip_grad must"),
    ],
)
def test_wrong_options_name_their_key(options, message):
    with pytest.raises(ConfigError, match=message):
        OptimOptions(**options)


def test_a_decaying_schedule_needs_a_length(net):
    with pytest.raises(ConfigError, match="total_training_steps"):
        OptimizerSet(net, OptimOptions(lr_scheduler_type="cosine"), None)


def muon_reference(start, gradients, lr, decay):
    """One matrix at a time in float64: Nesterov momentum, five Newton–Schulz steps, scaled update."""
    w, buffer = start.astype(np.float64), np.zeros(start.shape)
    a, b, c = 3.4445, -4.775, 2.0315
    for g in gradients:
        buffer = 0.95 * buffer + 0.05 * g
        x = 0.05 * g + 0.95 * buffer
        transposed = x.shape[0] > x.shape[1]
        x = x.T if transposed else x
        x = x / np.linalg.norm(x)
        for _ in range(5):
            gram = x @ x.T
            x = a * x + (b * gram + c * gram @ gram) @ x
        x = x.T if transposed else x
        w = w * (1 - lr * decay) - lr * math.sqrt(max(1.0, w.shape[0] / w.shape[1])) * x
    return w


def test_muon_is_its_formula_and_close_to_torch():
    generator = torch.Generator().manual_seed(0)
    shapes = [(4, 6), (6, 4), (4, 6), (5, 5)]  # two of one shape: they share a batch
    ours = [nn.Parameter(torch.randn(s, generator=generator)) for s in shapes]
    theirs = [nn.Parameter(p.detach().clone()) for p in ours]
    start = [p.detach().numpy().copy() for p in ours]
    options = {"lr": 0.02, "weight_decay": 0.1, "momentum": 0.95}
    optimizers = [Muon(ours, **options), torch.optim.Muon(theirs, **options)]
    history = []
    for _ in range(3):
        gradients = [torch.randn(s, generator=generator) for s in shapes]
        history.append([g.double().numpy() for g in gradients])
        for parameters, optimizer in zip((ours, theirs), optimizers):
            for parameter, gradient in zip(parameters, gradients):
                parameter.grad = gradient.clone()
            optimizer.step()
    for first, mine, torchs, *gradients in zip(start, ours, theirs, *history):
        expected = muon_reference(first, gradients, 0.02, 0.1)
        np.testing.assert_allclose(mine.detach().numpy(), expected, rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(mine, torchs, rtol=0, atol=0.01)  # theirs is bfloat16 inside
