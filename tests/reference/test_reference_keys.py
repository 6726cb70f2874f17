"""Every key of `etude train` is moved away from its default by some test that sees what it does.

There are three ways to be seen. A drawn key changes what the plain trainer computes, with which the real one agrees on every
draw. A moved key changes what a short run of the real trainer leaves behind. A witnessed key has a test of its own
elsewhere: it is named here, and fails where `hold_key` keeps the key at its default (`make soak` tries them all).
"""

import ast
import copy
import functools
from pathlib import Path

import pytest
from draws import ACTOR, CHOICES, GRPO, NEEDS, ROLLOUT
from hold_key import run_held
from omegaconf import OmegaConf
from reference_stage import Shape, arguments, build, run_product
from witnesses import UNSEEN, WITNESSES

from etude.config import compose
from etude.inference import ENGINES
from etude.options import TrainOptions, declarations
from etude.options.validate import plain
from etude.plain.trainer import PlainTrainer
from etude.trainer.setup import prepare
from etude.workers.engine_link import build_engine

TESTS = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return build(tmp_path_factory.mktemp("keys"))


def keys_of(root):
    config = plain(compose(root, [], root=root))

    def leaves(section, prefix):
        for name, value in section.items():
            if isinstance(value, dict) and value:
                yield from leaves(value, f"{prefix}{name}.")
            else:
                yield prefix + name

    return list(leaves(config, ""))


# -- drawn: the plain trainer computes something else --------------------------------------------------------------

# Drawn, but of the rollouts or of memory: what a step computes from given rollouts does not depend on them.
NOT_OF_THE_STEP = {
    f"{ACTOR}.ppo_max_token_len_per_gpu",
    "critic.ppo_max_token_len_per_gpu",
    "actor_rollout_ref.ref.log_prob_max_token_len_per_gpu",
    "algorithm.filter_groups.max_num_gen_batches",
    "algorithm.singleton_advantage",
    f"{ROLLOUT}.mode",
    f"{ROLLOUT}.n",
    f"{ROLLOUT}.top_p",
    f"{ROLLOUT}.top_k",
    f"{ROLLOUT}.dtype",
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
    f"{ROLLOUT}.dtype": "bfloat16",
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
            put(config, key, parse(value))
        trainer = PlainTrainer(config)
        figures = [trainer.step(rollouts) for rollouts in run.rollouts]
        return figures, [float(weight.detach().norm()) for _, weight in trainer.named_weights()]

    return outcome


def put(config, key, value):
    *path, last = key.split(".")
    functools.reduce(dict.__getitem__, path, config)[last] = value


@pytest.mark.parametrize("key", DRAWN)
def test_a_drawn_key_changes_what_is_computed(folder, busy, key):
    usual = OmegaConf.create(plain(compose("ppo_trainer", arguments(folder, folder))))
    settings = BUSY | NEEDS.get(key, {})
    if key in ("algorithm.filter_groups.enable", "algorithm.zero_variance"):
        settings["reward_model.tool_reward_weight"] = 0  # few scores, so that some groups have equal ones
    if key == "algorithm.filter_groups.metric":
        settings["reward_model.score_weight"] = 0  # rewards are those of tools alone, of which some groups have none
    for other in settings:
        if settings[other] is None:
            settings[other] = OmegaConf.select(usual, other)
    settings = {other: str(chosen).format(folder=folder) for other, chosen in settings.items()}
    given = str(CHOICES[key][0]).format(folder=folder)
    outcomes = [busy(tuple((settings | {key: str(value)}).items())) for value in (given, OmegaConf.select(usual, key))]
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
SAMPLED = VALIDATED | {f"{ROLLOUT}.val_kwargs.do_sample": "true"}
# key → (its value, where its effect shows, what it needs beside it)
MOVED = {
    "data.shuffle": ("false", tokens, {}),
    "data.seed": (5, tokens, {}),
    "data.sampler.class_name": ("curriculum", tokens, {}),
    "data.train_batch_size": (2, count, {}),
    "data.max_response_length": (9, tokens, {}),
    "data.max_prompt_length": (25, tokens, {}),
    "data.val_files": ("{folder}/rows.parquet", steps, {}),
    "data.val_max_samples": (3, figure("val/rollout/sequences/mean", "val/reward/total/mean"), VALIDATED),
    "actor_rollout_ref.model.path": ("{folder}/other", tokens, {}),
    "actor_rollout_ref.model.dtype": ("bfloat16", log_probs, {}),
    "algorithm.filter_groups.max_num_gen_batches": (
        3,
        count,
        GRPO | {"algorithm.filter_groups.enable": "true", f"{ROLLOUT}.n": 2},
    ),
    "algorithm.singleton_advantage": ("raw", figure("critic/advantages/max"), GRPO | {f"{ROLLOUT}.n": 2}),
    f"{ROLLOUT}.n": (2, count, {}),
    f"{ROLLOUT}.top_p": (0.5, tokens, {}),
    f"{ROLLOUT}.top_k": (3, tokens, {}),
    f"{ROLLOUT}.seed": (5, tokens, {}),
    f"{ROLLOUT}.dtype": ("bfloat16", log_probs, {}),
    f"{ROLLOUT}.infrastructure_retries": (2, figure("rollout/infrastructure_failures"), {}),
    f"{ROLLOUT}.weight_probe": ("true", figure("weight_sync/largest_difference"), {}),
    f"{ROLLOUT}.val_kwargs.n": (
        2,
        figure("val-core/stage/reward/mean@2"),
        SAMPLED,
    ),
    "reward_model.enable": ("false custom_reward_function.path=null", figure("reward/score/mean"), {}),
    "trainer.seed": (5, tokens, {}),
    f"{ROLLOUT}.val_kwargs.temperature": (0.1, figure("val/reward/score/mean"), SAMPLED),
    f"{ROLLOUT}.val_kwargs.top_p": (0.5, figure("val/reward/score/mean"), SAMPLED),
    f"{ROLLOUT}.val_kwargs.top_k": (2, figure("val/reward/score/mean"), SAMPLED),
    "reward_model.score_text": ("full", figure("reward/score/mean"), {}),
    "custom_reward_function.rewards": (
        "[{{path:{folder}/sevens.py,weight:2}}] custom_reward_function.path=null",
        figure("reward/score/mean"),
        {},
    ),
    "custom_reward_function.path": ("{folder}/sevens.py", figure("reward/score/mean"), {}),
    "custom_reward_function.name": ("other_score", figure("reward/score/mean"), {}),
    "custom_reward_function.reward_kwargs": ("{{bonus:2}}", figure("reward/score/mean"), {}),
    "data.apply_chat_template_kwargs": ("{{loud:true}}", figure("prompt_length/mean"), {}),
    "trainer.total_epochs": (2, steps, {"trainer.total_training_steps": "null", "data.train_batch_size": 12}),
    "trainer.val_before_train": ("false", steps, VALIDATED),
    "trainer.test_freq": (1, figure("val/reward/total/mean"), VALIDATED | {"trainer.total_training_steps": 2}),
}


# What must only reach the engine, whose own tests see its effect: key → value, or several settings.
NATIVE = {
    f"{ROLLOUT}.max_num_seqs": 3,
    f"{ROLLOUT}.max_num_batched_tokens": 77,
    f"{ROLLOUT}.max_model_len": 100,
    f"{ROLLOUT}.kv_cache_memory_mb": 5,
    f"{ROLLOUT}.enable_prefix_caching": "false",
    "trainer.deterministic": "true",
}
SERVED = {
    f"{ROLLOUT}.server_urls": "[http://127.0.0.1:9]",
    f"{ROLLOUT}.server_command": "[serve]",
    f"{ROLLOUT}.server_model": "named",
    f"{ROLLOUT}.server_api_key_env": "PATH",
    f"{ROLLOUT}.server_timeout": 7,
    f"{ROLLOUT}.weight_sync_timeout": 8,
    f"{ROLLOUT}.engine_kwargs": "{reference_served:{a:1}}",
    "actor_rollout_ref.model.trust_remote_code": "true",
}


@ENGINES.register("reference_native")
def native(model, options):
    return options


@ENGINES.register("reference_served")
class Served:
    servers = "optional"
    from_setup = staticmethod(lambda setup: setup)
    check_installed = staticmethod(lambda given: None)


@pytest.mark.parametrize(("name", "key"), [("native", key) for key in NATIVE] + [("served", key) for key in SERVED])
def test_a_key_reaches_the_engine(folder, name, key):
    moved = f"{key}={(NATIVE if name == 'native' else SERVED)[key]}"
    owner = declarations(TrainOptions)[key].about.alias_of or key
    base = [each for each in arguments(folder, folder) if not each.startswith(f"{owner}=")]
    made = []
    for given in ([], [moved]):
        config = compose("grpo_trainer", [*base, f"{ROLLOUT}.name=reference_{name}", *given])
        setup, _ = prepare(config)
        made.append(vars(build_engine(setup.options, None, None)))
    assert made[0] != made[1]


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


# -- witnessed: a test elsewhere sees it ---------------------------------------------------------------------------

WITNESSED = {key: (path, name) for path, tests in WITNESSES.items() for key, name in tests.items()}
CONVERSATIONS = [  # the keys of rollout.multi_turn and rollout.agent have such a test of their own
    key for key in keys_of("ppo_trainer") if key.startswith((f"{ROLLOUT}.multi_turn.", f"{ROLLOUT}.agent."))
]


def test_every_key_is_seen_by_some_test():
    keys, seen = set(keys_of("ppo_trainer")), {*DRAWN, *MOVED, *NATIVE, *SERVED, *WITNESSED, *CONVERSATIONS}
    assert "\n".join(sorted(keys - seen - set(UNSEEN))) == ""
    assert "\n".join(sorted((seen | set(UNSEEN)) - keys)) == ""  # of keys that are no more
    assert seen.isdisjoint(UNSEEN)


@pytest.mark.parametrize("key", sorted(WITNESSED))
def test_a_witness_exists(key):
    path, name = WITNESSED[key]
    functions = [n.name for n in ast.walk(ast.parse((TESTS / path).read_text())) if isinstance(n, ast.FunctionDef)]
    assert name in functions


@pytest.mark.soak
@pytest.mark.parametrize("key", sorted(WITNESSED))
def test_a_witness_fails_where_the_key_is_held_at_its_default(key, tmp_path):
    held = run_held(key, "::".join(WITNESSED[key]), tmp_path)
    assert held.returncode == 1, held.stdout[-2000:]  # 1: tests ran, and failed
