"""Values against declarations in a whole configuration: refused with the key named, or accepted; what has no effect is
said; and what is written from the declarations is current."""

import itertools
import logging
import math

import pytest
import torch
from omegaconf import OmegaConf

from etude.algorithms import agg_loss, kl_penalty
from etude.checks.settings import check_names, check_records, effective_keys, problems_with
from etude.checks.start import start_problems
from etude.config import compose, compose_with_sources
from etude.errors import ConfigError
from etude.inference.engine_setup import kind_of
from etude.models.loading import DTYPES
from etude.options import SFTOptions, TrainOptions, declarations
from etude.options.rollout import BUILTIN
from etude.options.types import choices
from etude.options.validate import flatten, plain
from etude.registry import import_object, load_plugins

_RATE = "1e-06 is usual for billions of weights, more for fewer"
ACTOR, ROLLOUT = "actor_rollout_ref.actor", "actor_rollout_ref.rollout"
CORRECTION = "algorithm.rollout_correction"
LOSS = f"{ACTOR}.policy_loss.loss_mode"
GRPO = ("algorithm.adv_estimator=grpo",)
TREES = {"ppo_trainer": TrainOptions, "sft": SFTOptions}
COMMANDS = {"ppo_trainer": "train", "sft": "sft"}
HOSTILE = [
    *(None, True, False, 0, 1, -1, -2, 10**30, -(10**30), 0.5, -0.5, math.nan, math.inf, -math.inf, 1e308),
    *("", " ", "nan", "no such name", "1e-3", "a\0b", "x" * 5000, "\ud800", "../.."),
    *([], [0], ["", "b"], [None], [[1]], {}),
]


def refusal(*overrides: str, root: str = "ppo_trainer") -> str:
    with pytest.raises(ConfigError) as caught:
        compose(root, list(overrides))
    return str(caught.value)


# -- hostile values ---------------------------------------------------------------------------------------------------


def changed(tree: dict, key: str, value: object) -> dict:
    section, _, rest = key.partition(".")
    return {**tree, section: changed(tree[section], rest, value) if rest else value}


@pytest.mark.slow
@pytest.mark.parametrize("root", TREES)
def test_a_hostile_value_is_refused_with_its_key_or_accepted(root):
    tree = plain(compose(root))
    raw, sources = dict(flatten(tree)), dict.fromkeys(declarations(TREES[root]), "command line")
    for key in declarations(TREES[root]):
        for value in HOSTILE:
            options, faults = problems_with(TREES[root], changed(tree, key, value), raw, sources)
            lines = [str(fault) for fault in faults.values()]
            assert all("\n" not in str(fault) for fault in start_problems(options, COMMANDS[root]))
            assert all(key.rpartition(".")[2] in line and "\n" not in line for line in lines[:1]), (key, value, lines)
            numbers = value if isinstance(value, list) else [value]
            unbounded = any(n in (10**30, "\ud800", "a\0b", math.inf, -math.inf) or n != n for n in numbers)
            huge = value == 10**30 and "float" in str(declarations(TREES[root])[key].hint)
            assert lines or not unbounded or huge, (key, value)


@pytest.mark.parametrize(
    "value", ["null", "nan", "inf", "-1", "0", "''", "' '", "[]", "[[1]]", "x", "1e400", "true", "{a: 1}"]
)
def test_a_hostile_value_on_the_command_line_is_one_message(value):
    keys = [key for key in declarations(TrainOptions) if key not in ("actor_rollout_ref.rollout.engine_kwargs",)]
    try:
        compose("ppo_trainer", [f"{key}={value}" for key in keys])
    except ConfigError as error:
        lines = str(error).splitlines()[1:]
        assert len(lines) > 20
        assert all("command line" in line for line in lines)


# -- what is refused --------------------------------------------------------------------------------------------------


def faults(*overrides: str, root: str = "ppo_trainer") -> dict[str, ConfigError]:
    """What is wrong with a configuration, by key."""
    return {fault.key: fault for fault in compose_with_sources(root, list(overrides), collect=True).faults}


OUT_OF_RANGE = f"""
algorithm.gamma=1.1 algorithm.lam=-0.1 algorithm.kl_ctrl.kl_coef=-1 algorithm.kl_ctrl.horizon=0
algorithm.kl_ctrl.target_kl=0 critic.cliprange_value=-1 {ACTOR}.clip_ratio=-1 {ACTOR}.clip_ratio_low=-1
{ACTOR}.clip_ratio_high=-1 {ACTOR}.kl_loss_coef=-1 {ACTOR}.loss_scale_factor=-1 {ACTOR}.data_loader_seed=-1
{ACTOR}.optim.lr=-1 {ACTOR}.optim.weight_decay=-1 {ACTOR}.optim.lr_warmup_steps=-1 {ACTOR}.optim.clip_grad=0
{ACTOR}.optim.betas=[1,2] {ACTOR}.optim.min_lr_ratio=2 actor_rollout_ref.ref.log_prob_max_token_len_per_gpu=0
actor_rollout_ref.model.dtype=float64 {ROLLOUT}.dtype=half {ROLLOUT}.trace.backend=jason
{ROLLOUT}.multi_turn.format=hermez {ROLLOUT}.temperature=0 {ROLLOUT}.top_k=0 {ROLLOUT}.top_p=0
{ROLLOUT}.val_kwargs.n=0 {ROLLOUT}.seed=-1 actor_rollout_ref.env.name= trainer.logger=[csv] trainer.test_freq=0
trainer.save_freq=0 trainer.max_actor_ckpt_to_keep=0 trainer.num_threads=10000 trainer.device=gpu trainer.seed=-1
data.val_max_samples=0 data.prompt_key='' trainer.total_training_steps=0 trainer.total_epochs=0
trainer.min_valid_fraction=2 {ACTOR}.loss_agg_mode=token {ACTOR}.kl_loss_type=low_var algorithm.kl_penalty=kll
algorithm.adv_estimator=grop {LOSS}=vanila {ACTOR}.optim.name=sgd
"""


@pytest.mark.parametrize(
    ("overrides", "root"),
    [
        (OUT_OF_RANGE, "ppo_trainer"),
        (f"algorithm.gamma=nan {ACTOR}.optim.lr=inf {ACTOR}.optim.clip_grad=-1", "ppo_trainer"),
        ("optim.lr=-1 target_success.every=0 target_success.samples=0 model.dtype=x", "sft"),
    ],
)
def test_what_cannot_be_meant_is_refused_where_it_was_set(overrides, root):
    found = faults(*overrides.split(), root=root)
    assert set(found) == {override.partition("=")[0] for override in overrides.split()}
    assert all("(command line)" in str(fault) and "\n" not in str(fault) for fault in found.values())


GDPO = "algorithm.adv_estimator=gdpo algorithm.gdpo_reward_keys=[score]"
HINTED = "distillation.teachers={x:self} distillation.hint=Hm data.max_response_length=4000"
BYPASS = f"{CORRECTION}.bypass_mode=true"
RANKED = "custom_reward_function.path=etude.rewards.judge custom_reward_function.name=rank_group"
DOES_NOT_GO_TOGETHER = f"""
{ROLLOUT}.n | algorithm.adv_estimator=grpo {ROLLOUT}.n=1
{ROLLOUT}.val_kwargs.n | {ROLLOUT}.val_kwargs.n=2 {ROLLOUT}.val_kwargs.do_sample=false
{ROLLOUT}.max_model_len | {ROLLOUT}.max_model_len=1024
algorithm.filter_groups.enable | algorithm.filter_groups.enable=true
algorithm.zero_variance | algorithm.zero_variance=mask
algorithm.zero_variance | algorithm.adv_estimator=grpo algorithm.zero_variance=refill
algorithm.zero_variance | algorithm.adv_estimator=grpo algorithm.zero_variance=keep algorithm.filter_groups.enable=true
algorithm.adv_estimator | algorithm.adv_estimator=gdpo
{ROLLOUT}.agent.roles | {GDPO} {ROLLOUT}.agent.roles=[white]
algorithm.use_kl_in_reward | {GDPO} algorithm.use_kl_in_reward=true
algorithm | {GDPO} algorithm.gdpo_reward_weights=[1,2]
algorithm.adv_estimator_kwargs | algorithm.adv_estimator=gigpo algorithm.adv_estimator_kwargs={{step_advantage_w:high}}
algorithm.adv_estimator_kwargs | algorithm.adv_estimator_kwargs={{alpha:1}}
distillation | distillation.teachers={{x:3}}
distillation.hint | {HINTED} {ROLLOUT}.multi_turn.compact.at_tokens=3000 {ROLLOUT}.multi_turn.max_assistant_turns=9
{CORRECTION}.rollout_is | {BYPASS} {CORRECTION}.rollout_is=token
{CORRECTION}.rollout_is_batch_normalize | {BYPASS} {CORRECTION}.rollout_is_batch_normalize=true
{CORRECTION}.rollout_is | {LOSS}=vespo {CORRECTION}.rollout_is=sequence
{CORRECTION}.rollout_is_batch_normalize | {LOSS}=vespo {CORRECTION}.rollout_is=token {CORRECTION}.rollout_is_batch_normalize=true
{CORRECTION} | {CORRECTION}.rollout_rs=token_k2 {CORRECTION}.rollout_rs_threshold=0.5_2.0
{CORRECTION} | {CORRECTION}.rollout_rs=[token_k1,seq_sum_k1,token_k2] {CORRECTION}.rollout_rs_threshold=[2,3]
{CORRECTION} | {CORRECTION}.rollout_rs=seq_mean_k1 {CORRECTION}.rollout_rs_threshold=0.5
{CORRECTION} | {CORRECTION}.rollout_is_threshold=5.0_2.0
{CORRECTION} | {CORRECTION}.rollout_is_threshold=0.5_5
trainer.validation_data_dir | trainer.rollout_data_dir=a trainer.validation_data_dir=./a
trainer.resume_from_path | trainer.resume_from_path=a
trainer.resume_mode | trainer.resume_mode=resume_path
custom_reward_function.path | reward_model.enable=false custom_reward_function.path=a.py
reward_model.reward_manager | reward_model.reward_manager=parallel
{ROLLOUT}.multi_turn.max_seconds | trainer.deterministic=true {ROLLOUT}.multi_turn.max_seconds=3
{ROLLOUT}.multi_turn.compact.at_tokens | {ROLLOUT}.multi_turn.compact.at_tokens=1280 {ROLLOUT}.max_turns=9
{ROLLOUT}.multi_turn.compact.at_tokens | {ROLLOUT}.multi_turn.compact.at_tokens=2816 {ROLLOUT}.max_turns=9
{ROLLOUT}.multi_turn.compact.at_tokens | {ROLLOUT}.multi_turn.compact.at_tokens=2000
trainer.max_staleness | trainer.deterministic=true trainer.max_staleness=1
{ROLLOUT}.mode | trainer.max_staleness=1 {ROLLOUT}.mode=sync
{ROLLOUT}.mode | {RANKED} {ROLLOUT}.mode=async
reward_model.reward_kwargs | {RANKED} {ROLLOUT}.mode=sync reward_model.reward_kwargs.batch_size=4
{ROLLOUT}.n | {RANKED} {ROLLOUT}.mode=sync {ROLLOUT}.n=1 algorithm.adv_estimator=reinforce_plus_plus
reward_model.budget | reward_model.budget=1 custom_reward_function.path=etude.rewards.judge
reward_model.budget | reward_model.budget=1 custom_reward_function.rewards=[{{path:etude.rewards.judge}}]
{ROLLOUT}.val_kwargs.n | {RANKED} {ROLLOUT}.mode=sync {ROLLOUT}.val_kwargs.n=1 data.val_files=[val.jsonl]
{ROLLOUT}.weight_transfer | {ROLLOUT}.weight_transfer=cuda_ipc
{ROLLOUT}.weight_transfer | trainer.backend=ray {ROLLOUT}.name=vllm {ROLLOUT}.weight_transfer=cuda_ipc {ACTOR}.strategy=fsdp2
{ROLLOUT}.engine_kwargs | trainer.backend=ray {ROLLOUT}.name=vllm {ROLLOUT}.engine_kwargs.vllm.tensor_parallel_size=2
{ROLLOUT}.weight_transfer | {ROLLOUT}.name=vllm {ROLLOUT}.server_urls=[http://127.0.0.1:9] {ROLLOUT}.weight_transfer=adapter
{ACTOR}.clip_ratio | {LOSS}=sapo {ACTOR}.clip_ratio=0.2
{ACTOR}.clip_ratio_c | {LOSS}=gspo {ACTOR}.clip_ratio_c=3
{ACTOR}.tau_pos | {ACTOR}.tau_pos=2
{ACTOR}.policy_loss.dro_beta | {ACTOR}.policy_loss.dro_beta=1
{ACTOR}.policy_loss.dro_beta | {LOSS}=dro
{ACTOR}.policy_loss | {LOSS}=clip_cov {ACTOR}.policy_loss.clip_cov_lb=6
{ACTOR}.policy_loss.loss_kwargs | {LOSS}=vespo {ACTOR}.policy_loss.loss_kwargs={{k_pos:high}}
{ACTOR}.policy_loss.loss_kwargs | {ACTOR}.policy_loss.loss_kwargs={{clip_ratio:1}}
"""  # noqa: E501
"""Key | overrides: a row for each rule."""


@pytest.mark.parametrize("row", DOES_NOT_GO_TOGETHER.strip().splitlines())
def test_what_does_not_go_together_is_refused(row):
    key, _, overrides = row.partition(" | ")
    [fault] = faults(*overrides.split()).values()
    assert fault.key == key
    assert str(fault).startswith(key)
    assert "(command line)" in str(fault) or "must be set" in str(fault)


def test_a_budget_may_be_for_what_the_sentinel_uses():
    judge = "custom_reward_function.path=etude.rewards.judge"
    assert faults("reward_model.budget=1", judge, "trainer.sentinel=a.py:f") == {}


@pytest.mark.parametrize("length", ["prompt", "response"])
def test_two_names_of_a_length_are_not_set_apart(length):
    text = refusal(f"data.max_{length}_length=9", f"{ROLLOUT}.{length}_length=8")
    assert text.startswith(f"data.max_{length}_length (command line) and ")


@pytest.mark.parametrize(
    ("override", "fault"),
    [
        (
            "reward_model.reward_kwargs={a: {b: [1, nan]}, c: inf}",
            "reward_model.reward_kwargs.a.b[1] must be a finite number, got nan; "
            "reward_model.reward_kwargs.c must be a finite number, got inf",
        ),
        (
            "custom_reward_function.reward_kwargs.x.y=-inf",
            "custom_reward_function.reward_kwargs.x.y must be a finite number, got -inf",
        ),
        ("data.apply_chat_template_kwargs.x=nan", "data.apply_chat_template_kwargs.x must be a finite number, got nan"),
        (
            f"{ROLLOUT}.engine_kwargs.vllm.share=nan",
            f"{ROLLOUT}.engine_kwargs.vllm.share must be a finite number, got nan",
        ),
        (f"{ROLLOUT}.engine_kwargs.vllm=3", f"{ROLLOUT}.engine_kwargs.vllm must be a section of key: value, got 3"),
    ],
)
def test_an_entry_of_a_free_form_section_is_refused_by_its_full_key(override, fault):
    assert refusal(override) == f"{fault} (command line)"


def test_a_window_that_holds_nothing_is_refused():
    text = refusal("target_success.low=0.5", root="sft")
    assert text.startswith("target_success.low=0.5 (command line): is above target_success.high=0.4")


def test_everything_wrong_is_in_one_message(tmp_path):
    (tmp_path / "mine.yaml").write_text("algorithm: {gamma: 5}\ndata: {trian_files: a}\n")
    with pytest.raises(ConfigError) as caught:
        compose("mine", [f"{ACTOR}.optim.lr=-1", f"{ROLLOUT}.name=vlm", "trainer.resume_from_path=x"], tmp_path)
    first, *lines = str(caught.value).splitlines()
    assert first.startswith("5 settings")
    assert [line.split()[0].partition("=")[0] for line in lines] == [
        "unknown",
        f"{ACTOR}.optim.lr",
        "algorithm.gamma",
        f"{ROLLOUT}.name",
        "trainer.resume_from_path",
    ]
    assert str(tmp_path / "mine.yaml") in lines[2]


def test_a_borrowed_value_is_refused_where_it_was_written():
    assert refusal("trainer.seed=-1").startswith("trainer.seed must be")
    assert "\n" not in refusal("trainer.seed=-1")


def test_a_shared_length_has_one_value():
    config = compose("ppo_trainer", [f"{ROLLOUT}.prompt_length=8"])
    assert (config.data.max_prompt_length, config.actor_rollout_ref.rollout.prompt_length) == (8, 8)
    config = compose(
        "ppo_trainer", ["data.max_response_length=9", f"{ROLLOUT}.response_length=${{data.max_response_length}}"]
    )
    assert config.actor_rollout_ref.rollout.response_length == 9


# -- names ------------------------------------------------------------------------------------------------------------


def test_names_of_plugins_are_judged_once_these_are_imported():
    options = compose_with_sources("ppo_trainer", ["algorithm.adv_estimator=mine", "plugins=[mine.py]"]).options
    with pytest.raises(ConfigError, match=r"algorithm\.adv_estimator: nothing is registered as 'mine'"):
        check_names(options)


def test_a_name_that_another_key_takes_is_sent_there():
    with pytest.raises(ConfigError) as told:
        compose("ppo_trainer", ["algorithm.adv_estimator=gspo"])
    assert "write actor_rollout_ref.actor.policy_loss.loss_mode=gspo" in str(told.value)


@pytest.mark.parametrize("key", [key for key, each in declarations(TrainOptions).items() if each.about.names])
def test_a_rooms_own_names_are_those_that_are_registered(key):
    names = declarations(TrainOptions)[key].about.names
    registry = import_object(names.registry)
    held = {name: registry.get(name) for name in registry.names()}
    # What another test's YAML declared has no name of its own.
    ours = [name for name, item in held.items() if hasattr(item, "__name__") and item.__module__.startswith("etude.")]
    assert not names.builtin or sorted(names.builtin) == ours


def test_what_is_declared_of_an_engine_is_what_it_says_of_itself():
    assert {name: kind_of(name) for name in BUILTIN} == BUILTIN


OWN = """
from etude.algorithms import register_estimator, register_policy_loss

@register_estimator("checks_{number}", needs={{"values"}}, min_group=3, ties_teach=True)
def estimator(*, token_level_rewards, values, lam, alpha=1.0):
    return token_level_rewards, values

@register_policy_loss("checks_{number}", needs={{"ref_log_prob"}})
def loss(*, log_prob, clip_ratio_c):
    return log_prob.sum(), {{}}
"""
NUMBERS = itertools.count()


def loaded(tmp_path, *overrides: str) -> tuple[str, list[str], TrainOptions]:
    """The name of an estimator and a loss that only plugins register, what is said once they have, and the options."""
    name = next(NUMBERS)
    (tmp_path / f"own{name}.py").write_text(OWN.format(number=name))
    chosen = (f"plugins=[{tmp_path}/own{name}.py]", f"algorithm.adv_estimator=checks_{name}")
    options = compose_with_sources("ppo_trainer", [*chosen, *overrides]).options
    effective = effective_keys(options)
    load_plugins(options.plugins)
    return f"checks_{name}", check_records(options, effective), options


@pytest.mark.parametrize(
    ("overrides", "key", "why"),
    [
        (
            (f"{ROLLOUT}.n=2",),
            f"{ROLLOUT}.n=2",
            "compares answers to one prompt; set actor_rollout_ref.rollout.n to 3 or more",
        ),
        (("algorithm.filter_groups.enable=true",), "algorithm.filter_groups.enable=true", "do have gradients with"),
        (
            ("algorithm.adv_estimator_kwargs={alhpa:2}",),
            "algorithm.adv_estimator_kwargs=",
            "estimator has no option 'alhpa'; did you mean 'alpha'? (known: alpha)",
        ),
        (("algorithm.adv_estimator_kwargs={lam:1}",), "algorithm.adv_estimator_kwargs=", "'lam' is a key of its own"),
    ],
)
def test_settings_are_held_against_an_estimator_of_ones_own_once_it_is_there(tmp_path, overrides, key, why):
    with pytest.raises(ConfigError) as caught:
        loaded(tmp_path, *overrides)
    assert str(caught.value).startswith(key)
    assert why in str(caught.value)


def test_corrections_are_held_against_a_loss_of_ones_own_once_it_is_there(tmp_path):
    own = f"{LOSS}=checks_{next(NUMBERS) + 1}"  # the next one's name
    correction = (f"{CORRECTION}.bypass_mode=true", f"{CORRECTION}.rollout_is=token")
    with pytest.raises(
        ConfigError, match=rf"{CORRECTION}\.rollout_is=token: with bypass_mode=true the loss's own ratio"
    ):
        loaded(tmp_path, own, f"{ACTOR}.clip_ratio_c=2", *correction)


def test_what_records_of_ones_own_need_and_read_is_known_once_they_are_there(tmp_path, caplog):
    name, lines, options = loaded(tmp_path, "algorithm.gamma=0.9", "algorithm.lam=0.9", "critic.ppo_epochs=2")
    assert [line.partition(" ")[0] for line in lines] == ["algorithm.gamma=0.9"]
    assert "it applies with estimators that read it (adv_estimator=gae, " in lines[0]
    assert caplog.messages == []  # before it was there, each might have had an effect
    assert options.needs == {"values"}
    chosen = [f"algorithm.adv_estimator={name}", f"{ACTOR}.policy_loss.loss_mode={name}", f"{ACTOR}.ppo_epochs=2"]
    text = refusal(*chosen, f"{ACTOR}.clip_ratio=0.1", f"{ACTOR}.clip_ratio_c=2")
    assert text.startswith(f"{ACTOR}.clip_ratio=0.1 (command line): policy_loss.loss_mode={name} does not read it (")
    text = refusal(*chosen)
    assert text == f"{ACTOR}.clip_ratio_c must be set: policy_loss.loss_mode={name} has no default for it"
    chosen.append(f"{ACTOR}.clip_ratio_c=2")
    said = notices(caplog, *chosen, "algorithm.gamma=0.9")
    assert [line.partition("=")[0] for line in said] == ["algorithm.gamma"]
    assert compose_with_sources("ppo_trainer", chosen).options.needs == {"values", "ref_log_prob"}


def test_a_loss_has_its_own_defaults_and_aggregation_until_they_are_set(caplog):
    def chosen(*overrides):
        actor = compose_with_sources("ppo_trainer", list(overrides)).options.actor_rollout_ref.actor
        return actor.aggregation, actor.loss_options()

    assert chosen() == ("token-mean", {})
    assert chosen(f"{LOSS}=gspo") == ("seq-mean-token-mean", {})
    given = (
        f"{LOSS}=gspo",
        f"{ACTOR}.ppo_epochs=2",
        f"{ACTOR}.clip_ratio_low=0.1",
        f"{ACTOR}.loss_agg_mode=token-mean",
    )
    assert chosen(*given) == ("token-mean", {"clip_ratio_low": 0.1})
    [line] = notices(caplog, *given)
    assert line.startswith(
        f"{ACTOR}.loss_agg_mode=token-mean (command line) is not how policy_loss.loss_mode=gspo is defined"
    )
    assert line.endswith("that is seq-mean-token-mean")
    assert notices(caplog, f"{ACTOR}.loss_agg_mode=seq-mean-token-sum") == []  # every mode suits a loss per token


def test_several_samples_with_the_default_estimator_are_remarked_on(caplog):
    [line] = notices(caplog, "actor_rollout_ref.rollout.n=4")
    assert line.startswith("actor_rollout_ref.rollout.n=4 (command line), but algorithm.adv_estimator=gae (")
    assert line.endswith("put `defaults: [grpo_trainer, _self_]` into your YAML, or set algorithm.adv_estimator")
    for chosen in ("gae", "grpo"):
        assert notices(caplog, "actor_rollout_ref.rollout.n=4", f"algorithm.adv_estimator={chosen}") == []


def test_closed_choices_are_those_that_the_code_knows():
    declared = {key: choices(each.hint) for key, each in declarations(TrainOptions).items()}
    ones = torch.ones(1, 1)
    for mode in declared[f"{ACTOR}.loss_agg_mode"]:
        agg_loss(ones, ones, mode)
    for kind in declared["algorithm.kl_penalty"]:
        kl_penalty(ones, ones, kind)
    assert set(declared["algorithm.kl_penalty"]) - set(declared[f"{ACTOR}.kl_loss_type"]) == {"kl", "k1"}
    assert set(declared["actor_rollout_ref.model.dtype"]) == {*DTYPES, "auto"}


# -- no effect --------------------------------------------------------------------------------------------------------


FSDP = f"{ACTOR}.fsdp_config"


def notices(caplog, *overrides: str, root: str = "ppo_trainer") -> list[str]:
    caplog.clear()
    with caplog.at_level(logging.WARNING, "etude.config"):
        compose(root, list(overrides))
    return caplog.messages


@pytest.mark.parametrize(
    ("overrides", "key"),
    [
        ((*GRPO, "algorithm.gamma=0.9"), "algorithm.gamma"),
        ((*GRPO, "algorithm.lam=0.9"), "algorithm.lam"),
        (("algorithm.norm_adv_by_std_in_grpo=false",), "algorithm.norm_adv_by_std_in_grpo"),
        *(
            ((*GRPO, f"critic.{name}"), f"critic.{name.partition('=')[0]}")
            for name in ("ppo_epochs=2", "optim.lr=1", "model.path=x")
        ),
        ((f"{ACTOR}.clip_ratio=0.1",), f"{ACTOR}.clip_ratio"),
        ((f"{ACTOR}.optim.muon_lr_multiplier=2",), f"{ACTOR}.optim.muon_lr_multiplier"),
        ((f"{ACTOR}.optim.min_lr_ratio=0.1",), f"{ACTOR}.optim.min_lr_ratio"),
        ((f"{ACTOR}.kl_loss_coef=0.1",), f"{ACTOR}.kl_loss_coef"),
        ((f"{ROLLOUT}.server_timeout=3",), f"{ROLLOUT}.server_timeout"),
        ((f"{ROLLOUT}.val_kwargs.temperature=0.5",), f"{ROLLOUT}.val_kwargs.temperature"),
        (("algorithm.kl_ctrl.horizon=5",), "algorithm.kl_ctrl.horizon"),
        (("trainer.test_freq=5",), "trainer.test_freq"),
        ((f"{ACTOR}.strategy=fsdp2", f"{FSDP}.fsdp_size=2"), f"{FSDP}.fsdp_size"),
        (("data.truncation=drop",), "data.truncation"),
        (("trainer.critic_warmup=5", *GRPO), "trainer.critic_warmup"),
    ],
)
def test_what_has_no_effect_is_said_in_one_line(caplog, overrides, key):
    [line] = notices(caplog, *overrides)
    assert line.startswith(f"{key}=")
    assert "(command line) has no effect here: it applies " in line


def test_nothing_is_said_of_what_has_an_effect(caplog):
    assert notices(caplog, "algorithm.gamma=0.9", "critic.ppo_epochs=2") == []
    assert notices(caplog, f"{ACTOR}.clip_ratio=0.1", f"{ACTOR}.ppo_epochs=2") == []
    assert notices(caplog, *GRPO, "algorithm.gamma=1.0") == []  # what it is anyway
    for root in ("quickstart", "quickstart_pretrained", "quickstart_sft", "gsm8k_tool", "grpo_trainer", "sft"):
        assert notices(caplog, root=root) == []


def test_what_muon_does_not_take_of_betas_is_said(caplog):
    [line] = notices(caplog, f"{ACTOR}.optim.name=muon", f"{ACTOR}.optim.betas=[0.8,0.9]")
    assert line.startswith(f"{ACTOR}.optim.betas=[0.8, 0.9] (command line) has no effect on weight matrices")
    assert len(notices(caplog, "optim.name=muon", "optim.betas=[0.8,0.9]", root="sft")) == 1
    assert notices(caplog, f"{ACTOR}.optim.betas=[0.8,0.9]") == []


@pytest.mark.parametrize("root", ["ppo_trainer", "sft"])
def test_a_run_that_keeps_no_metrics_is_said(caplog, root):
    [line] = notices(caplog, "trainer.logger=[console,mlflow]", root=root)
    assert line.startswith("trainer.logger=['console', 'mlflow'] (command line) keeps no metrics.jsonl")
    assert line.endswith("add jsonl")
    assert notices(caplog, "trainer.logger=file", root=root) == []


def test_a_mini_batch_beyond_the_batch_is_said(caplog):
    [line] = notices(caplog, "data.train_batch_size=8", f"{ACTOR}.ppo_mini_batch_size=16")
    assert line.startswith(f"{ACTOR}.ppo_mini_batch_size=16 (command line) is more than data.train_batch_size=8")
    assert notices(caplog, "data.train_batch_size=8") == []


@pytest.mark.parametrize(
    ("key", "extreme", "fine", "usual", "more"),
    [
        (f"{ACTOR}.optim.lr", ["0", "1e-9", "3e-8", "0.1", "1"], "1e-7", _RATE, ()),
        ("critic.optim.lr", ["0", "1"], "1e-3", "1e-05", ()),
        (f"{ACTOR}.optim.weight_decay", ["50"], "1", "0.01", ()),
        (f"{ACTOR}.optim.clip_grad", ["1e-12"], "1e-3", "1", ()),
        (f"{ACTOR}.clip_ratio", ["0", "20"], "4", "0.2", (f"{ACTOR}.ppo_epochs=2",)),
        (f"{ACTOR}.clip_ratio_low", ["0"], "0.1", "0.2", (f"{ACTOR}.ppo_epochs=2",)),
        (f"{ACTOR}.clip_ratio_high", ["0"], "0.1", "0.2", (f"{ACTOR}.ppo_epochs=2",)),
        (f"{ACTOR}.kl_loss_coef", ["1e4", "10"], "1", "0.001", (f"{ACTOR}.use_kl_loss=true",)),
        ("algorithm.kl_ctrl.kl_coef", ["1e4", "10"], "1", "0.001", ("algorithm.use_kl_in_reward=true",)),
    ],
)
def test_a_value_that_stops_learning_is_said_with_a_usual_one(caplog, key, extreme, fine, usual, more):
    for value in extreme:
        caplog.clear()
        [line] = notices(caplog, f"{key}={value}", *more)
        assert line.startswith(f"{key}={float(value):g} (command line) ")
        assert line.endswith(f": {usual} is usual" if usual != _RATE else f": {_RATE}")
        remarks = compose_with_sources("ppo_trainer", [f"{key}={value}", *more], collect=True).remarks
        assert remarks == (line,)  # as `etude check` prints it
    caplog.clear()
    assert notices(caplog, f"{key}={fine}", *more) == []


def test_the_rate_of_fine_tuning_is_said_too(caplog):
    [line] = notices(caplog, "optim.lr=1", root="sft")
    assert line.startswith("optim.lr=1 (command line) ")


# -- what is made of the declarations ----------------------------------------------------------------------------------


@pytest.mark.parametrize("root", TREES)
def test_the_tree_has_the_declared_keys_and_defaults(root):
    composition = compose_with_sources(root)
    assert set(dict(flatten(OmegaConf.to_container(composition.config)))) == set(declarations(TREES[root]))
    assert composition.sources.keys() == declarations(TREES[root]).keys()
