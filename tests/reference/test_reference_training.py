"""The real trainer and the plain one, from the same configuration and rollouts, agree in weights and in every figure.

Agreement is that of float32 with float64: to 1e-5, and beyond that to what rounding makes of this very draw, which a second
run of the plain trainer tells, with weights a little off: Adam divides small gradients by their own size, whitening small
advantages, and the errors of both with them.
"""

import ast
import tempfile
from pathlib import Path

import pytest
from draws import allowed, draw
from plain_trainer import PlainTrainer
from reference_stage import build, run_product

HERE = Path(__file__).parent
# What depends on the clock, or is the engine's own affair.
NOT_OF_THE_STEP = ("timing_s", "timing_per_token_ms", "engine", "weight_sync", "perf", "step")
RELATIVE, SMALL = 1e-5, 0.1  # of a figure; smaller ones (a loss whose terms cancel) are held to that of 0.1
CHANGE = 1e-5  # of how far a tensor moved
NOISE, AMPLIFIED, MORE_AMPLIFIED = 1e-7, 20, 1000  # what rounding may do beside: so many times what such an error does


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return build(tmp_path_factory.mktemp("reference"))


# A draw a seed, since Hypothesis repeats itself. In draw 14 the returns of a mini-batch are rounding alone.
@pytest.mark.slow
@pytest.mark.parametrize("seed", [*range(14), *range(15, 31)])
def test_the_step_is_the_plain_step(folder, seed):
    agree(folder, *draw(seed))


@pytest.mark.soak
@pytest.mark.parametrize("seed", range(31, 531))
def test_many_steps_are_plain_steps(folder, seed):
    agree(folder, *draw(seed))


@pytest.mark.parametrize("path", sorted(HERE.glob("plain_*.py")), ids=lambda path: path.name)
def test_the_plain_trainer_stands_alone_and_is_short(path):
    source = path.read_text()
    imported = {
        name.split(".")[0]
        for node in ast.walk(ast.parse(source))
        for name in (
            [alias.name for alias in node.names]
            if isinstance(node, ast.Import)
            else [node.module or "."]
            if isinstance(node, ast.ImportFrom)
            else []
        )
    }
    assert "etude" not in imported
    assert {name for name in imported if (HERE / f"{name}.py").exists()} <= {"plain_rollouts"}
    assert len(source.splitlines()) <= 500


# -- the comparison ----------------------------------------------------------------------------------------------


def agree(folder, chosen, shape):
    found = compare(folder, chosen, shape)
    if not found:
        return
    size = len(chosen)
    while size := size // 2:  # of what was drawn, about what it takes: ever smaller parts are left out
        for start in range(0, len(chosen), size):
            left_out = list(chosen)[start : start + size]
            fewer = allowed({key: value for key, value in chosen.items() if key not in left_out})
            if size < len(chosen) and (still := compare(folder, fewer, shape)):
                chosen, found = fewer, still
    drawn = [f"{key}={value}" for key, value in chosen.items()]
    pytest.fail("\n".join(["", *found, "", *drawn, str(shape)]), pytrace=False)


def compare(folder, chosen, shape):
    """Runs the real trainer and the plain one; every difference as a line."""
    arguments = [f"{key}={str(value).format(folder=folder)}" for key, value in chosen.items()]
    with tempfile.TemporaryDirectory(dir=folder) as run:
        real = run_product(folder, Path(run), shape, arguments)
    plain = Plain(real)
    return differences(real, plain, plain) and differences(real, plain, Plain(real, noise=NOISE))


def differences(real, plain, noisy):
    """Where real and plain are further from each other than rounding explains, which is `noisy` from plain."""
    found = [
        f"step {step}: {line}"
        for step, figures in enumerate(zip(real.figures, plain.figures, noisy.figures, strict=True), 1)
        for line in compare_figures(*map(of_the_step, figures), plain.factor)
    ]
    if real.config["actor_rollout_ref"]["actor"]["policy_loss"]["loss_mode"] == "reference_recorded":
        found += compare_advantages(real.advantages, plain.advantages, noisy.advantages, plain.factor)
    return found + list(compare_weights(real.weights, plain, noisy))


class Plain:
    """What the plain trainer makes of the rollouts of a run."""

    def __init__(self, real, noise=0.0):
        trainer = PlainTrainer(real.config, noise)
        self.start = {name: weight.detach().clone() for name, weight in trainer.named_weights()}
        self.figures = [trainer.step(rollouts) for rollouts in real.rollouts]
        self.advantages = sorted(trainer.trained_advantages)
        self.weights = {name: weight.detach() for name, weight in trainer.named_weights()}
        # Nothing but rounding (the KL of equal policies, alone) where an optimizer or a division makes it as large as any.
        norms = trainer.policy_optimizer.norms + (trainer.critic_optimizer.norms if trainer.has_critic else [])
        charged = trainer.algorithm["use_kl_in_reward"]
        amplified = (norms if trainer.needs_reference else []) + (trainer.spreads if charged else [])
        self.factor = MORE_AMPLIFIED if min(amplified, default=1.0) < 1e-4 else AMPLIFIED


def of_the_step(figures):
    return {name: value for name, value in figures.items() if name.split("/")[0] not in NOT_OF_THE_STEP}


def is_close(theirs, ours, noise, scale):
    return abs(theirs - ours) <= RELATIVE * scale + abs(noise)


def compare_figures(theirs, ours, noisy, factor):
    for name in sorted(theirs.keys() | ours.keys()):
        if name not in theirs or name not in ours:
            yield f"{name}: {theirs.get(name)}, plainly {ours.get(name)}"
        elif "clipfrac" in name and factor > AMPLIFIED:
            continue  # whether a token is clipped is the sign of an advantage that is rounding alone
        elif not is_close(theirs[name], ours[name], factor * (noisy[name] - ours[name]), max(abs(ours[name]), SMALL)):
            yield f"{name}: {theirs[name]}, plainly {ours[name]}"


def compare_advantages(theirs, ours, noisy, factor):
    if len(theirs) != len(ours):
        return [f"advantages of {len(theirs)} tokens, plainly {len(ours)}"]
    triples = zip(sorted(theirs), ours, noisy)
    return [
        f"advantage {one}, plainly {two}"
        for one, two, three in triples
        if not is_close(one, two, factor * (three - two), 1 + abs(two))
    ]


def compare_weights(theirs, plain, noisy):
    """What the run changed, tensor by tensor."""
    for name, ours in plain.weights.items():
        role, _, bare = name.partition(" ")
        gap = float((theirs[role][bare.removeprefix("backbone.")].double() - ours).norm())
        change, noise = float((ours - plain.start[name]).norm()), float((noisy.weights[name] - ours).norm())
        if gap > CHANGE * change + plain.factor * noise:
            yield f"{name}: {gap:.2e} away, of a change of {change:.2e} (noise: {noise:.2e})"
