"""The real trainer and the plain one, from the same configuration and rollouts, agree in weights and in every figure.

Both compute in float64, whose rounding three steps amplify to 1e-8 at most: what differs is defined otherwise. In float32,
as it is used, rounding decides some draws (Adam divides small gradients by their own size, whitening small advantages, and
the errors of both with them), but not most.
"""

import ast
import tempfile
from contextlib import nullcontext
from pathlib import Path

import pytest
from draws import ACTOR, CLIP_COV, CORRECTION, ESTIMATORS, KL_COV, ROLLOUT, allowed, draw
from reference_stage import Shape, build, in_float64, run_product

import etude.plain
from etude.plain.losses import LOSSES
from etude.plain.trainer import PlainTrainer

# What depends on the clock, is the engine's own affair, or an account of rollouts that tests of its own see.
NOT_OF_THE_STEP = ("timing_s", "timing_per_token_ms", "engine", "weight_sync", "perf", "step", "prompts")
ACCOUNTS = (
    "reward/spread/",
    "rollout/stalled",
    "rollout/equal_groups",
    "rollout/truncated",
    "rollout/infrastructure_failure_",
)
AGREES = 3e-8  # of a figure or an advantage, and of how far a tensor moved
AGREES_IN_FLOAT32 = 1e-4
SMALL = 0.1  # a smaller figure (a loss whose terms cancel) is held to what this one is
DIFFERENCE = 1.0  # likewise, where it is a difference of log-probs, whose rounding it has
# Where the policy is still its reference, the KL in the reward is 0 plainly, and 1e-16 in batches packed otherwise. Where
# that is all there is, its sign says whether a clipped loss is the larger one, and an optimizer makes a step of it.
NO_ADVANTAGE = NO_GRADIENT = 1e-12
NO_CHANGE = 1e-4  # a tensor that moved less (its gradient is 0, but for rounding) is held to what this change is


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return build(tmp_path_factory.mktemp("reference"))


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(31))  # a draw each, since Hypothesis repeats itself
def test_the_step_is_the_plain_step(folder, seed):
    agree(folder, *draw(seed))


@pytest.mark.soak
@pytest.mark.parametrize("seed", range(31, 531))
def test_many_steps_are_plain_steps(folder, seed):
    agree(folder, *draw(seed))


SELDOM = {  # what few draws have
    "a critic whose head is new": {"critic.model.path": "{folder}/headless", "trainer.total_training_steps": 2},
    "a critic on the policy's trunk, which first warms up": {
        "critic.share_trunk": "true",
        "critic.vf_coef": 0.7,
        "critic.optim.lr": 1e-2,
        "critic.cliprange_value": 0.02,
        "critic.loss_agg_mode": "seq-mean-token-mean",
        "trainer.critic_warmup": 1,
        "trainer.total_training_steps": 3,
        f"{ACTOR}.ppo_epochs": 2,
        f"{ACTOR}.optim.lr": 1e-2,
    },
    "a single update, whose log-probs are the old ones": {f"{ROLLOUT}.top_p": 0.8},
    "optimizers without a schedule": {
        "critic.optim.name": "adamw_schedule_free",
        f"{ACTOR}.optim.name": "adamw_schedule_free",
        f"{ACTOR}.optim.weight_decay": 0.3,
        f"{ACTOR}.optim.lr_warmup_steps": 2,
        f"{ACTOR}.ppo_epochs": 2,
        "trainer.total_training_steps": 3,
    },
    "scores centred, of a restricted distribution": {
        f"{CORRECTION}.score_centering_topk": 12,
        f"{CORRECTION}.rollout_is": "token",
        f"{CORRECTION}.rollout_is_threshold": "1.002",
        f"{ROLLOUT}.dtype": "bfloat16",
        f"{ROLLOUT}.top_k": 20,
        f"{ACTOR}.ppo_epochs": 2,
        f"{ACTOR}.optim.lr": 1e-2,
    },
    "groups of which those with one reward are drawn anew": {
        "algorithm.adv_estimator": "grpo",
        "algorithm.filter_groups.enable": "true",
        "algorithm.filter_groups.max_num_gen_batches": 3,
        "trainer.total_training_steps": 2,
    },
    "the engine's log-probs for the old ones": {
        "algorithm.adv_estimator": "grpo",
        f"{CORRECTION}.bypass_mode": "true",
        f"{ROLLOUT}.dtype": "bfloat16",
        f"{ACTOR}.ppo_epochs": 2,
        f"{ACTOR}.optim.lr": 1e-2,
    },
    "several epochs, the first of which moves the policy": {f"{ACTOR}.ppo_epochs": 2, f"{ACTOR}.optim.lr": 1e-2},
}


@pytest.mark.slow
@pytest.mark.parametrize("what", SELDOM)
def test_what_is_seldom_drawn_is_plain_too(folder, what):
    agree(folder, SELDOM[what], Shape(seed=1, levels=(0.25, 1.25)))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["gae", "gae by turn", "grpo", *ESTIMATORS])
def test_every_estimator_is_plain_for_three_steps(folder, name):
    chosen = {
        "algorithm.adv_estimator": name,
        "algorithm.gamma": 0.9,
        "algorithm.lam": 0.8,
        "algorithm.use_kl_in_reward": "true",
        f"{ACTOR}.policy_loss.loss_mode": "reference_recorded",
        "trainer.total_training_steps": 3,
    }
    if name.startswith("gae"):  # the default
        del chosen["algorithm.adv_estimator"]
        chosen["algorithm.gae_timestep_unit"] = "turn" if "turn" in name else "token"
    shape = Shape(seed=2, sequences=3, holes=0.3, silent=0.2, broken=0.4, tool_rewards=True)
    agree(folder, allowed(chosen), shape)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["gae", "grpo", "rae", "hierarchical_grpo"])
def test_roles_are_plain_for_two_steps(folder, name):
    """Each with rewards of its own, or the rollout's; some are one of several under a name."""
    chosen = {
        "algorithm.adv_estimator": name,
        "algorithm.use_kl_in_reward": "true",
        "reward_model.tool_reward_weight": 0.5,
        "trainer.total_training_steps": 2,
    }
    if name == "gae":
        del chosen["algorithm.adv_estimator"]
    roles = ("white", "black/1", "black/2", "")
    agree(folder, allowed(chosen), Shape(seed=2, sequences=4, holes=0.3, silent=0.2, roles=roles))


@pytest.mark.slow
@pytest.mark.parametrize("loss", LOSSES)
def test_three_steps_with_each_loss_are_plain_steps(folder, loss):
    """Four updates a step, so that ratios differ from 1; rollouts have several sequences, and holes."""
    chosen = {f"{ACTOR}.policy_loss.loss_mode": loss, "algorithm.adv_estimator": "grpo"}
    chosen |= {f"{ACTOR}.ppo_epochs": 2, f"{ACTOR}.ppo_mini_batch_size": 2, f"{ACTOR}.optim.lr": 1e-2}
    chosen |= {"trainer.total_training_steps": 3, f"{ACTOR}.ppo_max_token_len_per_gpu": 40}
    if loss in ("cispo", "dppo_tv", "dppo_kl"):  # within few steps, no token leaves their own bounds
        chosen |= {f"{ACTOR}.clip_ratio": 0.01, **({} if loss == "cispo" else {f"{ACTOR}.clip_ratio_c": 1.05})}
    chosen |= {"clip_cov": CLIP_COV, "kl_cov": KL_COV}.get(loss, {})
    agree(folder, allowed(chosen), Shape(seed=2, sequences=3, holes=0.3))


def test_dropped_rollouts_hide_no_sequences_of_others(folder):
    """As many are dropped as the others have sequences beyond their first."""
    chosen = {"algorithm.adv_estimator": "grpo", f"{ROLLOUT}.n": 2, "data.train_batch_size": 2}
    shape = Shape(seed=151, sequences=3, silent=0.2, broken=0.4, levels=(0.0, 0.1, 0.7, 3.0))
    agree(folder, allowed(chosen), shape)


@pytest.mark.slow
def test_most_steps_are_plain_steps_in_float32_too(folder):
    far = [seed for seed in range(12) if compare(folder, *draw(seed), float64=False)]
    assert len(far) <= 4, far


@pytest.mark.parametrize("path", sorted(Path(etude.plain.__file__).parent.glob("*.py")), ids=lambda path: path.name)
def test_the_plain_trainer_stands_alone_and_is_short(path):
    source = path.read_text()
    imported = {
        name
        for node in ast.walk(ast.parse(source))
        for name in (
            [alias.name for alias in node.names]
            if isinstance(node, ast.Import)
            else [node.module or "."]
            if isinstance(node, ast.ImportFrom)
            else []
        )
    }
    assert [name for name in imported if name.startswith("etude") and not name.startswith("etude.plain.")] == []
    assert len(source.splitlines()) <= 520


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


def compare(folder, chosen, shape, float64=True):
    """Runs the real trainer and the plain one; every difference as a line."""
    arguments = [f"{key}={str(value).format(folder=folder)}" for key, value in chosen.items()]
    with in_float64() if float64 else nullcontext(), tempfile.TemporaryDirectory(dir=folder) as run:
        real = run_product(folder, Path(run), shape, arguments)
        return list(differences(real, AGREES if float64 else AGREES_IN_FLOAT32))


def differences(real, agrees):
    plain = PlainTrainer(real.config)
    start = {name: weight.detach().clone() for name, weight in plain.named_weights()}
    rounds, steps, undecided = real.config["algorithm"]["use_kl_in_reward"], [], []
    for rollouts in real.rollouts:
        before = len(plain.trained_advantages)
        steps.append(plain.step(rollouts))
        trained = plain.trained_advantages[before:]
        none = sum(abs(advantage) < NO_ADVANTAGE for advantage in trained)
        undecided.append(none / len(trained) if rounds and trained else 0.0)
    for number, (theirs, ours, share) in enumerate(zip(real.figures, steps, undecided, strict=True), 1):
        if rounds and has_rounded_gradient(theirs, ours):
            return
        for line in compare_figures(of_the_step(theirs), of_the_step(ours), agrees, share):
            yield f"step {number}: {line}"
    is_solved = real.figures[-1].get("reward/success/mean", 0.0) >= 0.9  # nothing left to learn
    if real.stopped != ([figures["training/filter_groups/kept"] for figures in steps] == 3 * [0] and not is_solved):
        yield f"stopped for want of tokens to train on: {real.stopped}"
    if real.config["actor_rollout_ref"]["actor"]["policy_loss"]["loss_mode"] == "reference_recorded":
        yield from compare_advantages(sorted(real.advantages), sorted(plain.trained_advantages), agrees)
    for name, ours in plain.named_weights():  # what the run changed, tensor by tensor
        role, _, bare = name.partition(" ")
        gap = float((real.weights[role][bare.removeprefix("backbone.")].double() - ours.detach()).norm())
        change = float((ours.detach() - start[name]).norm())
        if gap > agrees * max(change, NO_CHANGE):
            yield f"{name}: {gap:.2e} away, of a change of {change:.2e}"


def has_rounded_gradient(theirs, ours):
    norms = [(theirs.get(name, 0.0), value) for name, value in ours.items() if name.endswith("/grad_norm")]
    return any(plainly < NO_GRADIENT and 0 < norm < 1e-7 for norm, plainly in norms)


def of_the_step(figures):
    own = {name: value for name, value in figures.items() if name.split("/")[0] not in NOT_OF_THE_STEP}
    return {name: value for name, value in own.items() if not name.removeprefix("baseline/").startswith(ACCOUNTS)}


def compare_figures(theirs, ours, agrees, undecided=0.0):
    """`undecided`: the share of tokens without an advantage, which rounding may count as clipped or not."""
    for name in sorted(theirs.keys() | ours.keys()):
        if name not in theirs or name not in ours:
            yield f"{name}: {theirs.get(name)}, plainly {ours.get(name)}"
            continue
        allowance = agrees * max(abs(ours[name]), DIFFERENCE if "_corr/" in name else SMALL)
        if abs(theirs[name] - ours[name]) > allowance + undecided * ("pg_clipfrac" in name):
            yield f"{name}: {theirs[name]}, plainly {ours[name]}"


def compare_advantages(theirs, ours, agrees):
    if len(theirs) != len(ours):
        yield f"advantages of {len(theirs)} tokens, plainly {len(ours)}"
    for one, two in zip(theirs, ours):
        if abs(one - two) > agrees * (1 + abs(two)):
            yield f"advantage {one}, plainly {two}"
