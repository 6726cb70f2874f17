"""Every key of the configuration is moved away from its default by some test that sees what it does.

There are three ways to be seen. A drawn key changes what the plain trainer computes, with which the real one agrees on every
draw. A moved key changes what a short run of the real trainer leaves behind. A witnessed key has a test of its own
elsewhere: it is named here, and fails where `hold_key` keeps the key at its default (`make soak` tries them all).
"""

import copy
import functools
from pathlib import Path

import pytest
from draws import ACTOR, CHOICES, GRPO, NEEDS, ROLLOUT
from omegaconf import OmegaConf
from plain_trainer import PlainTrainer
from reference_stage import Shape, arguments, build, run_product

from etude.config import compose

TESTS = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return build(tmp_path_factory.mktemp("keys"))


# -- drawn: the plain trainer computes something else --------------------------------------------------------------

# Drawn, but of the rollouts or of memory: what a step computes from given rollouts does not depend on them.
NOT_OF_THE_STEP = {
    f"{ACTOR}.ppo_max_token_len_per_gpu",
    f"{ACTOR}.policy_loss.loss_mode",
    "critic.ppo_max_token_len_per_gpu",
    "actor_rollout_ref.ref.log_prob_max_token_len_per_gpu",
    "algorithm.filter_groups.max_num_gen_batches",
    f"{ROLLOUT}.mode",
    f"{ROLLOUT}.n",
    f"{ROLLOUT}.top_p",
    f"{ROLLOUT}.top_k",
    "data.train_batch_size",
    "reward_model.enable",
}
DRAWN = sorted(set(CHOICES) - NOT_OF_THE_STEP)

# A configuration in which much matters at once.
BUSY = {
    "algorithm.gamma": 0.99,
    "algorithm.use_kl_in_reward": True,
    "algorithm.kl_ctrl.type": "adaptive",
    "algorithm.kl_ctrl.horizon": 40,
    "algorithm.kl_ctrl.kl_coef": 0.1,
    f"{ACTOR}.ppo_mini_batch_size": 2,
    f"{ACTOR}.ppo_epochs": 2,
    f"{ACTOR}.use_kl_loss": True,
    f"{ACTOR}.kl_loss_coef": 0.1,
    f"{ACTOR}.optim.lr": 0.02,
    "critic.ppo_epochs": 2,
    "critic.optim.lr": 0.02,
    "trainer.total_training_steps": 3,
    "data.train_batch_size": 2,
    f"{ROLLOUT}.n": 2,
}


@pytest.fixture(scope="module")
def busy(folder):
    """A run in the busy configuration, and the plain trainer's figures on its rollouts under others."""
    run = run_product(
        folder,
        folder / "busy",
        Shape(seed=3, levels=(0.1, 3.0), tool_rewards=True),
        [f"{key}={value}" for key, value in BUSY.items()],
    )

    @functools.cache
    def outcome(changes):
        config = copy.deepcopy(run.config)
        for key, value in changes:
            put(config, key, value)
        trainer = PlainTrainer(config)
        figures = [trainer.step(rollouts) for rollouts in run.rollouts]
        return figures, [float(weight.detach().norm()) for _, weight in trainer.named_weights()]

    return outcome


def put(config, key, value):
    *path, last = key.split(".")
    functools.reduce(dict.__getitem__, path, config)[last] = value


@pytest.mark.parametrize("key", DRAWN)
def test_a_drawn_key_changes_what_is_computed(folder, busy, key):
    usual = compose("ppo_trainer", arguments(folder, folder))
    settings = BUSY | NEEDS.get(key, {})
    if key == "algorithm.filter_groups.enable":
        settings["reward_model.tool_reward_weight"] = 0  # few scores, so that some groups have equal ones
    for other in settings:
        if settings[other] is None:
            settings[other] = OmegaConf.select(usual, other)
    given = str(CHOICES[key][0]).format(folder=folder)
    outcomes = [
        busy(tuple((other, parse(str(chosen))) for other, chosen in (settings | {key: value}).items()))
        for value in (given, OmegaConf.select(usual, key))
    ]
    assert outcomes[0] != outcomes[1]


def parse(text):
    value = None if text == "None" else OmegaConf.to_container(OmegaConf.create(f"value: {text}"))["value"]
    return tuple(value) if isinstance(value, list) else value


# -- moved: a run of the real trainer leaves something else behind --------------------------------------------------


def tokens(run):
    return [sequence.response for step in run.rollouts for rollout in step for sequence in rollout.sequences]


def log_probs(run):
    return [s.engine_log_probs for step in run.rollouts for rollout in step for s in rollout.sequences]


def count(run):
    return [len(step) for step in run.rollouts]


def figure(*names):
    return lambda run: [figures.get(name) for figures in run.figures for name in names]


def steps(run):
    return [figures["step"] for figures in run.figures]


VALIDATED = {"data.val_files": "{folder}/rows.parquet"}
# key → (its value, where its effect shows, what it needs beside it)
MOVED = {
    "data.shuffle": ("false", tokens, {}),
    "data.seed": (5, tokens, {}),
    "data.train_batch_size": (2, count, {}),
    "data.max_response_length": (9, tokens, {}),
    "data.val_files": ("{folder}/rows.parquet", steps, {}),
    "data.val_max_samples": (3, figure("val/rollout/sequences/mean", "val/reward/total/mean"), VALIDATED),
    "actor_rollout_ref.model.path": ("{folder}/other", tokens, {}),
    "actor_rollout_ref.model.dtype": ("bfloat16", log_probs, {}),
    "algorithm.filter_groups.max_num_gen_batches": (
        3,
        count,
        GRPO | {"algorithm.filter_groups.enable": "true", f"{ROLLOUT}.n": 2},
    ),
    f"{ROLLOUT}.n": (2, count, {}),
    f"{ROLLOUT}.top_p": (0.5, tokens, {}),
    f"{ROLLOUT}.top_k": (3, tokens, {}),
    f"{ROLLOUT}.seed": (5, tokens, {}),
    f"{ROLLOUT}.dtype": ("bfloat16", log_probs, {}),
    f"{ROLLOUT}.max_model_len": (40, tokens, {}),
    f"{ROLLOUT}.infrastructure_retries": (2, figure("rollout/infrastructure_failures"), {}),
    f"{ROLLOUT}.max_num_seqs": (2, figure("engine/forward_passes", "engine/steps", "engine/batch_size/mean"), {}),
    f"{ROLLOUT}.weight_probe": ("true", figure("weight_sync/largest_difference"), {}),
    f"{ROLLOUT}.val_kwargs.n": (
        2,
        figure("val-core/stage/reward/mean@2"),
        VALIDATED | {f"{ROLLOUT}.val_kwargs.do_sample": "true", f"{ROLLOUT}.val_kwargs.temperature": 1},
    ),
    "reward_model.enable": ("false custom_reward_function.path=null", figure("reward/score/mean"), {}),
    "trainer.seed": (5, tokens, {}),
    "trainer.total_epochs": (2, steps, {"trainer.total_training_steps": "null", "data.train_batch_size": 12}),
    "trainer.val_before_train": ("false", steps, VALIDATED),
    "trainer.test_freq": (1, figure("val/reward/total/mean"), VALIDATED | {"trainer.total_training_steps": 2}),
}


@pytest.fixture(scope="module")
def left(folder, tmp_path_factory):
    """What a run with these settings leaves."""

    @functools.cache
    def run(settings):
        shape = Shape(seed=5, broken=0.6)
        text = " ".join(f"{key}={value}" for key, value in settings)
        return run_product(folder, tmp_path_factory.mktemp("left"), shape, text.format(folder=folder).split())

    return run


@pytest.mark.parametrize("key", sorted(MOVED))
def test_a_moved_key_changes_what_a_run_leaves(left, key):
    value, look, needs = MOVED[key]
    before = tuple((other, given) for other, given in needs.items() if other != key)
    assert look(left((*before, (key, value)))) != look(left(before))
