"""Validates a composed configuration and finds keys without effect.

Invariant: all faults that can be found from the values alone are reported here, together, each with its key, value, where it
was set, and what is allowed. Checks that need files are in `start`.
"""

from __future__ import annotations

import dataclasses
import os
import sys
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from etude.algorithms.records import POLICY_LOSSES, PolicyLoss
from etude.checks.findings import check, faults_of
from etude.errors import ConfigError, raise_faults
from etude.options import Options, SFTOptions, TrainOptions, declarations
from etude.options.declare import Names
from etude.options.distillation import is_address
from etude.options.environments import EnvironmentOptions
from etude.options.reward import WeightedFunction
from etude.options.types import format_value
from etude.options.validate import build, value_of
from etude.registry import Registry, import_object, unknown_name

Faults = Iterator[ConfigError]
COMMAND_LINE = "command line"

_POLICY, _ROLLOUT = "actor_rollout_ref", "actor_rollout_ref.rollout"


def fault(key: str, why: str, fix: str = "") -> ConfigError:
    """Why the value of `key` is invalid; `problems_with` puts the key and its value before it."""
    return ConfigError(why, key=key, fix=fix)


def is_users(source: str) -> bool:
    """Whether a layer with this source is the user's; package files have relative paths."""
    return source == COMMAND_LINE or Path(source).is_absolute()


def problems_with(
    tree: type[Options],
    values: Mapping[str, Any],
    raw: Mapping[str, Any],
    sources: Mapping[str, str],
    more: Callable[[Options], Iterable[ConfigError]] = lambda options: (),
) -> tuple[Options, dict[str, ConfigError]]:
    """Returns (`values` as options of the class `tree`, the faults by key).

    `raw` are the leaves before interpolation; `more` finds further faults of options whose types are right.
    """
    options, wrong = build(tree, values)
    assert options is not None  # in a complete configuration every key has a default
    found = {
        key: ConfigError(f"{text}{_where(key, text, sources)}", key=key)
        for key, text in wrong.items()
        if not _repeats_fault(key, raw, wrong)
    }
    # In `options`, values of the wrong type are replaced by their defaults.
    if isinstance(options, TrainOptions):
        rules = (*faults_of("estimator and loss", options), *faults_of("training", options))
    else:
        rules = tuple(faults_of("fine-tuning", options))
    for each in (*unknown_names(options), *rules, *more(options)):
        key = each.key
        if key not in wrong and not _repeats_fault(key, raw, found):
            is_unset = value_of(options, key) in (None, ())
            place = "" if is_unset else f"={format_option(options, key)}{_where(key, str(each), sources)}:"
            found.setdefault(key, fault(key, f"{key}{place} {each.message}", each.fix))
    return options, found


def format_option(options: Any, key: str) -> str:
    """The value as messages show it: strings without quotes."""
    value = value_of(options, key)
    if isinstance(value, bool):
        return str(value).lower()
    return value if isinstance(value, str) else format_value(list(value) if isinstance(value, tuple) else value)


def remarks(options: Options, keys: Collection[str], sources: Mapping[str, str]) -> Iterator[str]:
    """Yields a line for each of the user's `keys` without effect, and for settings that are valid but likely unintended."""
    yield from inert(options, keys, sources)
    declared = declarations(type(options))
    for key in keys:
        section, _, name = key.rpartition(".")
        value: Any = value_of(options, key) if key in declared else None
        setting = f"{key}={value:g} ({sources[key]})" if isinstance(value, float) else f"{key}={value} ({sources[key]})"
        for end, is_extreme, what in _EXTREME:
            named = value is not None and f".{key}".endswith(f".{end}")
            if named and is_extreme(value) and not inert_reason(options, key):
                default = declared[key].default  # of clip ratios null: the loss's own
                usual = 0.2 if default is None else default
                size = " for billions of weights, more for fewer" if key == f"{_POLICY}.actor.optim.lr" else ""
                yield f"{setting} {what}: {usual:g} is usual{size}"
        if name == "betas" and value_of(options, section).name == "muon":
            setting = f"{key}={format_option(options, key)} ({sources[key]})"
            yield f"{setting} has no effect on weight matrices: {section}.name=muon"
        elif key == "trainer.logger" and not {"jsonl", "file"} & {*value}:
            setting = f"{key}={format_option(options, key)} ({sources[key]})"
            yield (
                f"{setting} keeps no metrics.jsonl of training, from which `etude runs`, `report`, `view` and `verify` "
                "read: add jsonl"
            )
        elif name == "ppo_mini_batch_size" and value_of(options, key) > (prompts := options.data.train_batch_size):
            yield f"{setting} is more than data.train_batch_size={prompts}: each batch is one update"
        elif isinstance(options, TrainOptions):
            yield from _training_remarks(options, key, setting, sources)


def _training_remarks(run: TrainOptions, key: str, setting: str, sources: Mapping[str, str]) -> Iterator[str]:
    """What `remarks` says of a key of RL's, written as `setting`."""
    rollout, actor = run.actor_rollout_ref.rollout, run.actor_rollout_ref.actor
    algorithm, group = run.algorithm, run.algorithm.estimator.min_group if run.algorithm.estimator else 0
    if key == "algorithm.gamma" and _fades(run):
        longest = rollout.response_length
        yield (
            f"{setting} discounts per sampled token: the reward at the end of an answer of {longest} tokens reaches its "
            f"first as {algorithm.gamma**longest:.1g} of itself: 1 is usual"
        )
    elif key == f"{_ROLLOUT}.temperature" and group > 1 and 0.1 <= rollout.temperature <= 0.3:
        yield f"{setting} leaves a group's answers much alike, and algorithm.adv_estimator compares them: 1 is usual"
    elif key == f"{_ROLLOUT}.n" and group == 1 and rollout.n > 1:
        # A file without a `defaults` list is a PPO run, as in the documents; several samples suggest another one.
        if not is_users(source := sources["algorithm.adv_estimator"]):
            yield (
                f"{setting}, but algorithm.adv_estimator={algorithm.adv_estimator} ({source}) does not compare a prompt's "
                "answers: put `defaults: [grpo_trainer, _self_]` into your YAML, or set algorithm.adv_estimator"
            )
    elif key == f"{_POLICY}.actor.loss_agg_mode":
        loss, given = actor.policy_loss, actor.loss_agg_mode
        own = loss.record and loss.record.loss_agg_mode
        if own and given not in (None, own) and own != PolicyLoss.loss_agg_mode:
            yield f"{setting} is not how policy_loss.loss_mode={loss.loss_mode} is defined: that is {own}"


def _fades(options: TrainOptions) -> bool:
    """Whether a discount per token leaves hardly anything of the reward at the end for the beginning of an answer."""
    algorithm, estimator = options.algorithm, options.algorithm.estimator
    if estimator is None or algorithm.gamma >= 0.9 or inert_reason(options, "algorithm.gamma"):
        return False
    if estimator.reads("gae_timestep_unit"):
        return algorithm.gae_timestep_unit == "token"
    return "turns" not in estimator.needs


_EXTREME: tuple[tuple[str, Callable[[float], bool], str], ...] = (
    ("optim.lr", lambda value: value < 1e-7, "hardly moves the weights"),
    ("optim.lr", lambda value: value >= 0.1, "moves weights by their own size in few steps"),
    ("optim.weight_decay", lambda value: value > 1, "shrinks the weights faster than rewards move them"),
    ("optim.clip_grad", lambda value: value < 1e-6, "leaves almost nothing of any gradient"),
    ("actor.clip_ratio", lambda value: value == 0, "clips every token whose probability an update has moved"),
    ("actor.clip_ratio", lambda value: value > 5, "clips hardly any token"),
    ("actor.clip_ratio_low", lambda value: value == 0, "clips every token that an update has made less likely"),
    ("actor.clip_ratio_high", lambda value: value == 0, "clips every token that an update has made more likely"),
    ("actor.entropy_coeff", lambda value: abs(value) > 0.3, "lets the entropy term outweigh the reward"),
    ("rollout.top_p", lambda value: value < 0.5, "leaves so few candidates that answers hardly differ"),
    ("rollout.temperature", lambda value: value < 0.1, "leaves so few candidates that answers hardly differ"),
    ("rollout.temperature", lambda value: value > 3, "makes answers noise"),
    ("actor.kl_loss_coef", lambda value: value > 1, "lets the KL term outweigh the reward"),
    ("kl_ctrl.kl_coef", lambda value: value > 1, "lets the KL penalty outweigh the reward"),
)
"""(end of a key, when its value stops learning, what it then does)."""


def inert(options: Options, keys: Iterable[str], sources: Mapping[str, str]) -> Iterator[str]:
    """Yields a line for each of `keys` that has no effect in this configuration."""
    for key in keys:
        if condition := inert_reason(options, key):
            place = f" ({sources[key]})" if key in sources else ""
            yield f"{key}={format_option(options, key)}{place} has no effect here: it applies {condition}"


def inert_reason(options: Options, key: str) -> str:
    """If `key` has no effect in this configuration, the condition under which it applies; else empty."""
    declared = declarations(type(options)).get(key)
    if declared is None:
        return ""
    missing = [when.condition for section, when in declared.when if not when.holds(value_of(options, section), options)]
    return missing[0] if missing else ""


def effective_keys(run: TrainOptions) -> list[str]:
    """The non-default keys that have an effect, as far as is known: with an estimator or loss that a plugin has not
    registered yet, any key may have one."""
    declared = declarations(TrainOptions).items()
    chosen = [key for key, each in declared if value_of(run, key) != each.default and not each.about.written]
    return [key for key in chosen if not inert_reason(run, key)]


def check_records(run: TrainOptions, effective: Iterable[str]) -> list[str]:
    """Checks `run` against its estimator and loss, after the plugins have been imported; returns a line for each of the
    `effective` keys that has no effect after all.

    Raises:
        ConfigError: settings do not fit the estimator or the loss.
    """
    raise_faults(
        fault.at(f"{fault.key}={format_option(run, fault.key)}") for fault in faults_of("estimator and loss", run)
    )
    return list(inert(run, effective, {}))


def _repeats_fault(key: str, raw: Mapping[str, Any], wrong: Collection[str]) -> bool:
    """Whether `key` merely interpolates another faulty key."""
    link = raw.get(key)
    return isinstance(link, str) and any(f"${{{other}}}" in link for other in wrong)


def _where(key: str, text: str, sources: Mapping[str, str]) -> str:
    """Where `key` was set; for a section, where the keys that `text` names were set."""
    if key in sources:
        return f" ({sources[key]})"
    names = [name for name in sources if name.startswith(f"{key}.") and is_users(sources[name])]
    meant = [name for name in names if name.rpartition(".")[2] in text]
    places = dict.fromkeys(sources[name] for name in meant or names)
    return f" ({', '.join(places)})" if places else ""


# -- names of registered things ----------------------------------------------------------------------------------------

_ALSO_VALID = {"reward_model.reward_manager": ("parallel",)}
"""Names that are valid although nothing is registered under them."""
_MAX_NAMES = 12
_TEST_ENGINES = ("scripted",)
"""The engine that replays a script, for tests."""


def unknown_names(options: Any, *, late: bool = False, imported: bool = False) -> Faults:
    """Yields the keys whose value is not a registered name; the message lists the registered ones.

    `late` includes keys that are only checked when a run starts. `imported`: the user's own code has been imported; before
    that, only names that it cannot register are rejected.
    """
    if options.plugins and not imported:
        return
    own_loops = hasattr(options, "actor_rollout_ref") and options.actor_rollout_ref.rollout.agent.agent_loop_config_path
    for key, declared in declarations(type(options)).items():
        value = value_of(options, key)
        if declared.about.names is None or value in (None, declared.default):
            continue
        may_come = own_loops and key.endswith("default_agent_loop") and not imported
        if may_come or (declared.about.names.late and not late):
            continue
        known = [name for name in known_names(declared.about.names) if name not in _TEST_ENGINES]
        known += _ALSO_VALID.get(key, ())
        for name in value if isinstance(value, tuple) else (value,):
            if name not in known:
                listed = f"(known: {', '.join(known[:_MAX_NAMES])}{', …' if len(known) > _MAX_NAMES else ''})"
                found = unknown_name(ConfigError, f"nothing is registered as '{name}'", name, known, listed)
                yield fault(key, found.message, _place_of(name, options) or found.fix)
                break


def _place_of(name: Any, options: Any) -> str:
    """The key that takes `name`, as the remedy where it was given to another; empty if there is none."""
    for key, declared in declarations(type(options)).items():
        if declared.about.names is not None and name in known_names(declared.about.names):
            return f"write {key}={name}"
    return ""


def check_names(options: Any) -> None:
    """Rejects unregistered names, after the plugins have been imported.

    Raises:
        ConfigError: a name is not registered; the message has every such key, with the closest name.
    """
    raise_faults(fault.at(fault.key) for fault in unknown_names(options, late=True, imported=True))


def known_names(names: Names) -> list[str]:
    """The registered names, as far as they are known without importing torch."""
    module, _, _ = names.registry.partition(":")
    if names.builtin and module not in sys.modules:
        return list(names.builtin)
    registry: Registry[Any] = import_object(names.registry)
    return registry.names()


# -- settings that contradict each other --------------------------------------------------------------------------------


@check("fine-tuning")
def _window(run: SFTOptions) -> Faults:
    low, high = run.target_success.low, run.target_success.high
    if low > high:
        yield fault("target_success.low", f"is above target_success.high={high:g}: nothing lies between")


@check("estimator and loss")
def _groups(run: TrainOptions) -> Faults:
    algorithm, n, distillation = run.algorithm, run.actor_rollout_ref.rollout.n, run.distillation
    name, estimator = algorithm.adv_estimator, algorithm.estimator
    if estimator and n < algorithm.min_group and not distillation.alone:
        yield fault(
            f"{_ROLLOUT}.n",
            f"algorithm.adv_estimator={name} compares answers to one prompt",
            f"set {_ROLLOUT}.n to {estimator.min_group} or more",
        )
    key = "algorithm.filter_groups.enable" if algorithm.zero_variance is None else "algorithm.zero_variance"
    if algorithm.drops_equal_groups and estimator and estimator.ties_teach:
        yield fault(key, f"groups of equal rewards do have gradients with adv_estimator={name}")
    elif algorithm.drops_equal_groups and distillation.teachers:
        yield fault(key, "groups of equal rewards do have gradients with distillation.teachers")
    elif algorithm.drops_equal_groups and n < 2:
        yield fault(key, "a single answer is always its group's mean", "set rollout.n to 2 or more")
    if algorithm.zero_variance == "refill" and algorithm.max_gen_batches < 2:
        yield fault(key, "needs algorithm.filter_groups.max_num_gen_batches of 2 or more, such as 10")
    if algorithm.zero_variance in ("keep", "mask") and algorithm.filter_groups.enable:
        yield fault(key, "algorithm.filter_groups.enable=true says otherwise", "set one of them")


@check("estimator and loss")
def _roles(run: TrainOptions) -> Faults:
    estimator, name = run.algorithm.estimator, run.algorithm.adv_estimator
    of_rollouts = {"reward_baselines", "reward_components"}
    if run.actor_rollout_ref.rollout.agent.roles and estimator and of_rollouts & {*estimator.needs}:
        why = f"adv_estimator={name} reads the rewards of whole rollouts, not those of roles"
        yield fault(f"{_ROLLOUT}.agent.roles", why, "use grpo, rloo or rae")


@check("estimator and loss")
def _components(run: TrainOptions) -> Faults:
    estimator, name = run.algorithm.estimator, run.algorithm.adv_estimator
    if not estimator or "reward_components" not in estimator.needs:
        return
    if "gdpo_reward_keys" in (estimator.option_names or ()) and not run.algorithm.gdpo_reward_keys:
        example = "algorithm.gdpo_reward_keys=[score], or keys of the scorer's dict"
        yield fault("algorithm.adv_estimator", f"needs the names of reward components: {example}")
    if run.algorithm.use_kl_in_reward:
        why = f"adv_estimator={name} judges the components of the reward, which no penalty reaches"
        yield fault("algorithm.use_kl_in_reward", why, "use actor.use_kl_loss")


@check("estimator and loss")
def _distillation(run: TrainOptions) -> Faults:
    needed = (run.algorithm.estimator, run.actor_rollout_ref.actor.policy_loss.record)
    if not run.distillation.teachers and any("teacher_log_probs" in record.needs for record in needed if record):
        yield fault(
            "distillation.teachers", "the estimator or the loss needs a teacher's log-probs", "name a teacher's model"
        )
    talks = run.actor_rollout_ref.rollout.multi_turn
    if run.distillation.teachers and run.distillation.hint and talks.enable and talks.compact.at_tokens is not None:
        why = f"has no place in a sequence that begins with a summary ({_ROLLOUT}.multi_turn.compact.at_tokens)"
        yield fault("distillation.hint", why, "leave one of them out")
    servers = [name for name in run.distillation.teachers.values() if is_address(name)]
    rollout, wide = run.actor_rollout_ref.rollout, [f"the teacher {name} scores" for name in servers[:1]]
    if run.distillation.topk:
        wide.append("forward_kl_topk learns")
    if servers and rollout.temperature != 1:
        yield fault(
            f"{_ROLLOUT}.temperature",
            f"the teacher {servers[0]} scores at temperature 1 only",
            f"set {_ROLLOUT}.temperature to 1",
        )
    for name, off in (("top_p", 1), ("top_k", -1)):
        if wide and getattr(rollout, name) != off:
            yield fault(f"{_ROLLOUT}.{name}", f"{wide[0]} over the whole vocabulary", f"set {_ROLLOUT}.{name} to {off}")


@check("estimator and loss")
def _own_options(run: TrainOptions) -> Faults:
    """Checks the free-form options of estimator and loss, if these are already registered."""
    algorithm, actor = run.algorithm, run.actor
    for key, record, options in (
        ("algorithm.adv_estimator_kwargs", algorithm.estimator, algorithm.estimator_options),
        (f"{_POLICY}.actor.policy_loss.loss_kwargs", actor.policy_loss.record, actor.loss_options),
    ):
        try:
            if record:
                options()
        except ConfigError as error:
            yield fault(key, error.message, error.fix)


@check("estimator and loss")
def _loss_options(run: TrainOptions) -> Faults:
    """Finds policy-loss options that the chosen loss does not read, and required ones that are missing. Defaults belong to
    the loss, so a value in the configuration was set deliberately."""
    actor, section = run.actor_rollout_ref.actor, f"{_POLICY}.actor"
    name, record = actor.policy_loss.loss_mode, actor.policy_loss.record
    for prefix, options in ((section, actor), (f"{section}.policy_loss", actor.policy_loss)):
        for option in (each.name for each in dataclasses.fields(options)):
            key, readers = f"{prefix}.{option}", POLICY_LOSSES.readers(option)
            given = getattr(options, option) is not None
            if readers and given and not actor.reads(option):
                yield fault(key, f"policy_loss.loss_mode={name} does not read it (read by {', '.join(readers)})")
            elif readers and not given and record is not None and record.needs_value(option):
                yield fault(key, f"must be set: policy_loss.loss_mode={name} has no default for it")


@check("estimator and loss")
def _correction(run: TrainOptions) -> Faults:
    correction, loss_mode = run.algorithm.rollout_correction, run.actor_rollout_ref.actor.policy_loss.loss_mode
    loss, default = run.actor.policy_loss, type(run.actor.policy_loss)().loss_mode
    key = "algorithm.rollout_correction"
    if correction.bypass_mode and correction.rollout_is_batch_normalize:
        why = "needs the whole batch's weights, and with bypass_mode=true these are known only as it is learned from"
        yield fault(f"{key}.rollout_is_batch_normalize", why)
    if correction.bypass_mode and correction.rollout_is and loss.record is not None and loss.record.has_ratio:
        yield fault(
            f"{key}.rollout_is",
            "with bypass_mode=true the loss's own ratio is to the engine's log-probs, and is the correction",
            "set loss_type=reinforce, or rollout_is=null",
        )
    if loss.record is not None and loss.record.multiplies_weights:
        reason = f"policy_loss.loss_mode={loss.loss_mode} multiplies the weights of a sequence's tokens"
        if correction.rollout_is == "sequence":
            why = f"{reason}, and the sequence's would count once for each"
            yield fault(f"{key}.rollout_is", why, f"set {key}.rollout_is to token")
        if correction.rollout_is is not None and correction.rollout_is_batch_normalize:
            why = f"{reason}, whose product a mean of tokens does not normalise"
            yield fault(f"{key}.rollout_is_batch_normalize", why)
    reweighed = correction.rollout_is and (correction.rollout_is == "sequence" or correction.rollout_is_batch_normalize)
    if correction.score_centering_topk and reweighed:
        why = "needs each token's own weight, also of tokens that were not sampled"
        fix = f"set {key}.rollout_is=token and rollout_is_batch_normalize=false"
        yield fault(f"{key}.score_centering_topk", why, fix)
    if correction.score_centering_topk and correction.bypass_mode and loss.record is not None and loss.record.has_ratio:
        why = "with bypass_mode=true the loss's own ratio is to the engine's log-probs, and leaves nothing to centre"
        yield fault(f"{key}.score_centering_topk", why, "set loss_type=reinforce, or bypass_mode=false")
    if loss_mode not in (default, loss.loss_mode):
        yield fault(f"{key}.loss_type", f"picks another loss than actor.policy_loss.loss_mode={loss_mode}")


@check("estimator and loss")
def _weighted_loss(run: TrainOptions) -> Faults:
    correction, loss = run.algorithm.rollout_correction, run.actor.policy_loss
    in_loss = correction.bypass_mode and correction.rollout_rs
    if loss.record is None or loss.record.takes("rollout_is_weights"):
        return
    if correction.rollout_is or in_loss or correction.off_policy_mask_threshold is not None:
        yield fault(
            f"{_POLICY}.actor.policy_loss.loss_mode",
            "takes no rollout_is_weights, by which algorithm.rollout_correction corrects it",
            "add the parameter, and multiply the loss of each token by it",
        )


@check("training")
def _sampling(run: TrainOptions) -> Faults:
    rollout = run.actor_rollout_ref.rollout
    val, needed = rollout.val_kwargs, rollout.prompt_length + 1
    if val.n > 1 and not (val.do_sample and val.temperature > 0):
        yield fault(
            f"{_ROLLOUT}.val_kwargs.n",
            "without sampling, all answers are the same",
            "set val_kwargs.n=1, or val_kwargs.do_sample=true and a val_kwargs.temperature above 0",
        )
    if rollout.max_model_len is not None and rollout.max_model_len < needed:
        why = "leaves no room for an answer after data.max_prompt_length"
        yield fault(f"{_ROLLOUT}.max_model_len", why, f"set {needed} or more")


JUDGE = "etude.rewards.judge"
_COMPARED = [(JUDGE, name) for name in ("rank_group", "order_group")]


@check("training")
def _comparison(run: TrainOptions) -> Faults:
    custom, mode = run.custom_reward_function, f"{_ROLLOUT}.mode"
    if not run.scores or (custom.path, custom.name) not in _COMPARED:
        return
    why = f"{custom.name} compares the answers to a prompt: it would see those that end together, and a lone one scores 0.5"
    if run.actor_rollout_ref.rollout.mode != "sync":
        yield fault(mode, why, f"set {mode}=sync")
    if run.reward_model.reward_kwargs.get("batch_size") is not None:
        yield fault("reward_model.reward_kwargs", f"batch_size: {why}", "leave batch_size out")
    if run.actor_rollout_ref.rollout.n == 1:
        alone = f"{custom.name} compares the answers to a prompt: one answer scores 0.5, whatever it says"
        yield fault(f"{_ROLLOUT}.n", alone, "set 2 or more")
    if run.data.val_files and run.actor_rollout_ref.rollout.val_kwargs.n == 1:
        alone = (
            f"{custom.name} compares the answers to a prompt: a validation of one answer scores 0.5, whatever it says"
        )
        fix = "set 2 or more with val_kwargs.do_sample=true, or leave data.val_files empty"
        yield fault(f"{_ROLLOUT}.val_kwargs.n", alone, fix)


@check("training")
def _compaction(run: TrainOptions) -> Faults:
    rollout, key = run.actor_rollout_ref.rollout, f"{_ROLLOUT}.multi_turn.compact.at_tokens"
    talks = rollout.multi_turn
    at, summary = talks.compact.at_tokens, talks.compact.summary_tokens
    if at is None or not talks.enable:
        return
    longest = rollout.max_model_len or rollout.prompt_length + rollout.response_length
    if at <= (least := rollout.prompt_length + summary):
        why = f"no more than data.max_prompt_length and compact.summary_tokens ({least}), with which a sequence begins"
        yield fault(key, why, f"set {least + 1} or more, or lower one of these")
    elif at + summary >= longest:
        why = f"leaves no room for the summary: prompt and response may have {longest} tokens"
        yield fault(key, why, "lower it, or raise data.max_response_length or rollout.max_model_len")
    ends = (talks.max_assistant_turns, talks.max_user_turns, talks.max_trajectory_tokens, talks.max_seconds)
    if all(limit is None for limit in ends):
        yield fault(key, "lets a conversation go on without end", f"set {_ROLLOUT}.multi_turn.max_assistant_turns")


@check("training")
def _determinism(run: TrainOptions) -> Faults:
    rollout, deterministic, stale = run.actor_rollout_ref.rollout, run.trainer.deterministic, run.trainer.max_staleness
    if deterministic and rollout.multi_turn.max_seconds is not None:
        why = "ends trajectories by the clock, which trainer.deterministic forbids"
        yield fault(f"{_ROLLOUT}.multi_turn.max_seconds", why)
    if deterministic and rollout.mode == "sync" and run.actor_rollout_ref.env.chosen:
        yield fault(
            f"{_ROLLOUT}.mode",
            "steps environments together, for which trajectories wait for each other; trainer.deterministic does not go "
            "with that",
            "set rollout.mode=async",
        )
    if stale and deterministic:
        why = "when weights reach a rollout depends on the clock then"
        yield fault("trainer.max_staleness", why, "set trainer.deterministic=false")
    if stale and rollout.mode == "sync":
        why = "scores a step's rollouts together; trainer.max_staleness streams them"
        yield fault(f"{_ROLLOUT}.mode", why, "set rollout.mode=async")


@check("training")
def _environments(run: TrainOptions) -> Faults:
    policy, weights = run.actor_rollout_ref, []
    for number, entry in enumerate(run.env):
        made, wrong = build(EnvironmentOptions, entry, f"env[{number}].")
        for text in wrong.values():
            yield fault("env", text)
        weights.append(1.0 if wrong or made is None else made.weight)
    if weights and not any(weights):
        yield fault("env", "every weight is 0", "give one a weight")
    if run.env and policy.env.chosen:
        yield fault("env", "and actor_rollout_ref.env are two ways to choose an environment", "set one of them")
    if run.env and not policy.rollout.multi_turn.enable:
        yield fault("env", "multi_turn.enable=false switches environments off", "set multi_turn.enable=true")


@check("training")
def _rewards(run: TrainOptions) -> Faults:
    custom, reward = run.custom_reward_function, run.reward_model
    for key, value in (
        ("custom_reward_function.path", custom.path),
        ("custom_reward_function.rewards", custom.rewards),
        ("reward_model.model.path", reward.model.path),
    ):
        if value and not reward.enable:
            yield fault(key, "reward_model.enable=false never calls it")
    if custom.path and custom.rewards:
        why = "and custom_reward_function.path are two ways to say it"
        yield fault("custom_reward_function.rewards", why, "write the one in rewards")
    weights = []
    for number, entry in enumerate(custom.rewards):
        made, wrong = build(WeightedFunction, entry, f"custom_reward_function.rewards[{number}].")
        for text in wrong.values():
            yield fault("custom_reward_function.rewards", text)
        weights.append(1.0 if wrong or made is None else made.weight)
    estimator = run.algorithm.estimator
    unweighted = estimator and "reward_components" in estimator.needs
    if weights and not any(weights) and not unweighted and not reward.model.path:
        yield fault("custom_reward_function.rewards", "every weight is 0, so the score is, too", "give one a weight")
    named: list[Any] = [each for each in custom.rewards if isinstance(each, Mapping)]
    named += [{"path": custom.path, "reward_kwargs": custom.reward_kwargs}] if custom.path else []
    prices = [each.get("reward_kwargs") or {} for each in named if each.get("path") == JUDGE]
    unpriced = not any(kwargs.get("prompt_price") or kwargs.get("completion_price") for kwargs in prices)
    alone = len(prices) == len(named) > 0 and run.trainer.sentinel is None  # others may count what they use
    if reward.enable and reward.budget is not None and alone and unpriced:
        why = "what the judge uses has no price, so it costs nothing"
        yield fault("reward_model.budget", why, "set prompt_price and completion_price in its reward_kwargs")
    if reward.reward_manager == "parallel" and not run.actor_rollout_ref.env.chosen:
        why = "is the environment's score, and there is none"
        yield fault("reward_model.reward_manager", why, "set actor_rollout_ref.env.name")


@check("training")
def _folders(run: TrainOptions) -> Faults:
    folders = run.trainer.validation_data_dir, run.trainer.rollout_data_dir
    if all(folders) and len({os.path.abspath(os.path.expanduser(str(folder))) for folder in folders}) == 1:
        why = "is trainer.rollout_data_dir, too: one would overwrite the other's files"
        yield fault("trainer.validation_data_dir", why)
    by_path, path = run.trainer.resume_mode == "resume_path", run.trainer.resume_from_path
    if by_path and not path:
        yield fault("trainer.resume_mode", "needs trainer.resume_from_path")
    if path and not by_path:
        why = "is read only with trainer.resume_mode=resume_path"
        yield fault("trainer.resume_from_path", why, "set trainer.resume_mode, too")


@check("training")
def _serving(run: TrainOptions) -> Faults:
    rollout, model, key = run.actor_rollout_ref.rollout, run.actor_rollout_ref.model, f"{_ROLLOUT}.weight_transfer"
    on_cpu = run.trainer.device == "cpu"
    if rollout.weight_transfer == "cuda_ipc" and (rollout.name != "vllm" or rollout.has_servers or on_cpu):
        yield fault(
            key,
            "shares the trainer's GPU tensors with vLLM in this process: it needs rollout.name=vllm without server_urls, "
            "and a GPU",
            "use folder",
        )
    on_ray = run.trainer.backend == "ray"
    if rollout.weight_transfer == "cuda_ipc" and on_ray and run.actor_rollout_ref.actor.strategy != "ddp":
        why = "maps whole tensors, and with actor.strategy=fsdp2 a rank has parts of them"
        yield fault(key, why, "use folder, or actor.strategy=ddp")
    parallel = rollout.engine_kwargs.get("vllm") or {}
    for name in ("tensor_parallel_size", "pipeline_parallel_size", "data_parallel_size"):
        if rollout.name == "vllm" and on_ray and (parallel.get(name) or 1) != 1:
            yield fault(
                f"{_ROLLOUT}.engine_kwargs",
                f"vllm.{name}={parallel[name]} needs several GPUs, and with trainer.backend=ray a rank has one",
                "start servers with it, and name them in server_urls",
            )
    if rollout.weight_transfer == "adapter" and not (
        rollout.has_servers and model.lora_rank and not model.quantization
    ):
        yield fault(
            key,
            "sends LoRA's adapters to servers of model.path: it needs rollout.server_urls and model.lora_rank, and no "
            "model.quantization",
            "use folder",
        )
    if run.has_rollout_group and not rollout.nnodes:
        yield fault(f"{_ROLLOUT}.nnodes", "is on how many nodes hybrid_engine=false rolls out: at least 1")
    if run.has_rollout_group and rollout.weight_transfer == "cuda_ipc":
        yield fault(key, "shares tensors within a process: hybrid_engine=false needs folder or adapter")


@check("training")
def _shared_trunk(run: TrainOptions) -> Faults:
    policy, key = run.actor_rollout_ref, "critic.share_trunk"
    if not run.critic.share_trunk or not run.may_need("values"):
        return
    if policy.actor.strategy != "ddp":
        why = f"needs actor.strategy=ddp, not {policy.actor.strategy}: the head is no part of a sharded model"
        yield fault(key, why)
    if policy.model.dtype in ("float16", "fp16"):
        yield fault(key, "needs model.dtype=float32 or bfloat16: the loss scale of float16 is the policy's own")
    if policy.rollout.enable_rollout_routing_replay:
        why = "does not go with rollout.enable_rollout_routing_replay: old values are those of the model's own routers"
        yield fault(key, why)
