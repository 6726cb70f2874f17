"""Validates a composed configuration and finds keys without effect.

Invariant: all faults that can be found from the values alone are reported here, together, each with its key, value, where it
was set, and what is allowed. Checks that need files are in `preflight`.
"""

from __future__ import annotations

import dataclasses
import os
import sys
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from typing import Any

from etude.algorithms.records import POLICY_LOSSES, PolicyLoss
from etude.config.layers import is_users
from etude.errors import ConfigError, raise_faults
from etude.options import SFTOptions, TrainOptions, declarations
from etude.options.declare import Names
from etude.options.distillation import is_address
from etude.options.reward import WeightedFunction
from etude.options.types import format_value
from etude.options.validate import build, value_of
from etude.registry import Registry, did_you_mean, import_object

Options = TrainOptions | SFTOptions
Problem = tuple[str, str]
"""(key, why its value is invalid)."""

_POLICY, _ROLLOUT = "actor_rollout_ref", "actor_rollout_ref.rollout"


def problems_with(
    tree: type[Options],
    values: Mapping[str, Any],
    raw: Mapping[str, Any],
    sources: Mapping[str, str],
    more: Callable[[Options], Iterable[Problem]] = lambda options: (),
) -> tuple[Options, dict[str, str]]:
    """Returns (`values` as options of the class `tree`, the faults: key → line).

    `raw` are the leaves before interpolation; `more` finds further faults of options whose types are right.
    """
    options, wrong = build(tree, values)
    assert options is not None  # in a complete configuration every key has a default
    lines = {
        key: f"{text}{_where(key, text, sources)}" for key, text in wrong.items() if not _repeats_fault(key, raw, wrong)
    }
    # In `options`, values of the wrong type are replaced by their defaults.
    problems = (*unknown_names(options), *_contradictions(options), *more(options))
    for key, text in problems:
        if key not in wrong and not _repeats_fault(key, raw, lines):
            is_unset = value_of(options, key) in (None, ())
            place = "" if is_unset else f"={format_option(options, key)}{_where(key, text, sources)}:"
            lines.setdefault(key, f"{key}{place} {text}")
    return options, lines


def format_option(options: Any, key: str) -> str:
    """The value as messages show it: strings without quotes."""
    value = value_of(options, key)
    if isinstance(value, bool):
        return str(value).lower()
    return value if isinstance(value, str) else format_value(list(value) if isinstance(value, tuple) else value)


def remarks(options: Options, keys: Collection[str], sources: Mapping[str, str]) -> Iterator[str]:
    """Yields a line for each of the user's `keys` without effect, and for settings that are valid but likely unintended."""
    yield from inert(options, keys, sources)
    yield from _extreme(options, keys, sources)
    for key in keys:
        section, _, name = key.rpartition(".")
        if name == "betas" and value_of(options, section).name == "muon":
            setting = f"{key}={format_option(options, key)} ({sources[key]})"
            yield f"{setting} has no effect on weight matrices: {section}.name=muon"
        elif name == "ppo_mini_batch_size" and value_of(options, key) > (prompts := options.data.train_batch_size):
            more = f"is more than data.train_batch_size={prompts}: each batch is one update"
            yield f"{key}={value_of(options, key)} ({sources[key]}) {more}"
        elif key == f"{_POLICY}.rollout.n" and isinstance(options, TrainOptions):
            yield from _default_estimator(key, options, sources)
        elif name == "loss_agg_mode" and isinstance(options, TrainOptions) and section == f"{_POLICY}.actor":
            yield from _foreign_aggregation(key, options, sources)


_EXTREME: tuple[tuple[str, Callable[[float], bool], str], ...] = (
    ("optim.lr", lambda value: value < 1e-8, "hardly moves the weights"),
    ("optim.lr", lambda value: value >= 0.1, "moves weights by their own size in few steps"),
    ("optim.clip_grad", lambda value: value < 1e-6, "leaves almost nothing of any gradient"),
    ("actor.clip_ratio", lambda value: value == 0, "clips every token whose probability an update has moved"),
    ("actor.clip_ratio_low", lambda value: value == 0, "clips every token that an update has made less likely"),
    ("actor.clip_ratio_high", lambda value: value == 0, "clips every token that an update has made more likely"),
    ("actor.kl_loss_coef", lambda value: value > 10, "lets the KL term outweigh the reward"),
    ("kl_ctrl.kl_coef", lambda value: value > 10, "lets the KL penalty outweigh the reward"),
)
"""(end of a key, when its value stops learning, what it then does)."""


def _extreme(options: Options, keys: Iterable[str], sources: Mapping[str, str]) -> Iterator[str]:
    """Yields a line for each of `keys` whose value is valid, but leaves weights where they are or takes them far away."""
    for key in keys:
        value = value_of(options, key) if key in declarations(type(options)) else None
        for end, is_extreme, what in _EXTREME:
            if value is None or not f".{key}".endswith(f".{end}") or not is_extreme(value):
                continue
            if not inert_reason(options, key):
                usual = declarations(type(options))[key].default or 0.2  # clip ratios: null, the loss's own
                yield f"{key}={value:g} ({sources[key]}) {what}: {usual:g} is usual"


def _default_estimator(key: str, run: TrainOptions, sources: Mapping[str, str]) -> Iterator[str]:
    """A file without a `defaults` list is a PPO run, as in the documents; several samples per prompt suggest another one."""
    estimator, name = run.algorithm.estimator, "algorithm.adv_estimator"
    if estimator and estimator.min_group == 1 and value_of(run, key) > 1 and not is_users(sources[name]):
        yield (
            f"{key}={value_of(run, key)} ({sources[key]}), but {name}={run.algorithm.adv_estimator} ({sources[name]}) does "
            f"not compare a prompt's answers: put `defaults: [grpo_trainer, _self_]` into your YAML, or set {name}"
        )


def _foreign_aggregation(key: str, run: TrainOptions, sources: Mapping[str, str]) -> Iterator[str]:
    loss = run.actor_rollout_ref.actor.policy_loss
    own, given = loss.record and loss.record.loss_agg_mode, run.actor_rollout_ref.actor.loss_agg_mode
    if own and given not in (None, own) and own != PolicyLoss.loss_agg_mode:
        yield f"{key}={given} ({sources[key]}) is not how policy_loss.loss_mode={loss.loss_mode} is defined: that is {own}"


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
    raise_faults([f"{key}={format_option(run, key)}: {text}" for rule in _OF_RECORDS for key, text in rule(run)])
    return list(inert(run, effective, {}))


def _repeats_fault(key: str, raw: Mapping[str, Any], wrong: Mapping[str, str]) -> bool:
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


def unknown_names(options: Any, *, late: bool = False, imported: bool = False) -> Iterator[Problem]:
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
                few = ", ".join(known[:_MAX_NAMES]) + (", …" if len(known) > _MAX_NAMES else "")
                yield key, f"nothing is registered as '{name}'{did_you_mean(name, known)} (known: {few})"
                break


def check_names(options: Any) -> None:
    """Rejects unregistered names, after the plugins have been imported.

    Raises:
        ConfigError: a name is not registered; the message has every such key, with the closest name.
    """
    raise_faults([f"{key}: {text}" for key, text in unknown_names(options, late=True, imported=True)])


def known_names(names: Names) -> list[str]:
    """The registered names, as far as they are known without importing torch."""
    module, _, _ = names.registry.partition(":")
    if names.builtin and module not in sys.modules:
        return list(names.builtin)
    registry: Registry[Any] = import_object(names.registry)
    return registry.names()


# -- settings that contradict each other --------------------------------------------------------------------------------


def _contradictions(options: Options) -> Iterator[Problem]:
    if isinstance(options, TrainOptions):
        for rule in _RULES:
            yield from rule(options)
    elif options.target_success.low > options.target_success.high:
        yield (
            "target_success.low",
            f"is above target_success.high={options.target_success.high:g}: nothing lies between",
        )


def _sampling(run: TrainOptions) -> Iterator[Problem]:
    rollout = run.actor_rollout_ref.rollout
    val = rollout.val_kwargs
    if val.n > 1 and not (val.do_sample and val.temperature > 0):
        yield (
            f"{_ROLLOUT}.val_kwargs.n",
            "without sampling, all answers are the same: set val_kwargs.n=1, or val_kwargs.do_sample=true and a "
            "val_kwargs.temperature above 0",
        )
    needed = rollout.prompt_length + 1
    if rollout.max_model_len is not None and rollout.max_model_len < needed:
        yield (
            f"{_ROLLOUT}.max_model_len",
            f"leaves no room for an answer after data.max_prompt_length; set {needed} or more",
        )


def _groups(run: TrainOptions) -> Iterator[Problem]:
    algorithm, n, distillation = run.algorithm, run.actor_rollout_ref.rollout.n, run.distillation
    name, estimator = algorithm.adv_estimator, algorithm.estimator
    if estimator and n < algorithm.min_group and not distillation.alone:
        yield (
            f"{_ROLLOUT}.n",
            f"algorithm.adv_estimator={name} compares answers to one prompt: set it to {estimator.min_group} or more",
        )
    key = "algorithm.filter_groups.enable" if algorithm.zero_variance is None else "algorithm.zero_variance"
    if algorithm.drops_equal_groups and estimator and estimator.ties_teach:
        yield key, f"groups of equal rewards do have gradients with adv_estimator={name}"
    elif algorithm.drops_equal_groups and distillation.teachers:
        yield key, "groups of equal rewards do have gradients with distillation.teachers"
    elif algorithm.drops_equal_groups and n < 2:
        yield key, "a single answer is always its group's mean: set rollout.n to 2 or more"
    if algorithm.zero_variance == "refill" and algorithm.max_gen_batches < 2:
        yield key, "needs algorithm.filter_groups.max_num_gen_batches of 2 or more, such as 10"
    if algorithm.zero_variance in ("keep", "mask") and algorithm.filter_groups.enable:
        yield key, "algorithm.filter_groups.enable=true says otherwise: set one of them"


def _components(run: TrainOptions) -> Iterator[Problem]:
    estimator, name = run.algorithm.estimator, run.algorithm.adv_estimator
    if not estimator or "reward_components" not in estimator.needs:
        return
    if "gdpo_reward_keys" in (estimator.option_names or ()) and not run.algorithm.gdpo_reward_keys:
        yield (
            "algorithm.adv_estimator",
            "needs the names of reward components: algorithm.gdpo_reward_keys=[score], or keys of the scorer's dict",
        )
    if run.algorithm.use_kl_in_reward:
        yield (
            "algorithm.use_kl_in_reward",
            f"adv_estimator={name} judges the components of the reward, which no penalty reaches: use actor.use_kl_loss",
        )


def _distillation(run: TrainOptions) -> Iterator[Problem]:
    needed = (run.algorithm.estimator, run.actor_rollout_ref.actor.policy_loss.record)
    if not run.distillation.teachers and any("teacher_log_probs" in record.needs for record in needed if record):
        yield "distillation.teachers", "the estimator or the loss needs a teacher's log-probs: name a teacher"
    servers = [name for name in run.distillation.teachers.values() if is_address(name)]
    rollout, wide = run.actor_rollout_ref.rollout, [f"the teacher {name} scores" for name in servers[:1]]
    if run.distillation.topk:
        wide.append("forward_kl_topk learns")
    if servers and rollout.temperature != 1:
        yield f"{_ROLLOUT}.temperature", f"the teacher {servers[0]} scores at temperature 1 only: set it to 1"
    for name, off in (("top_p", 1), ("top_k", -1)):
        if wide and getattr(rollout, name) != off:
            yield f"{_ROLLOUT}.{name}", f"{wide[0]} over the whole vocabulary: set it to {off}"


def _own_options(run: TrainOptions) -> Iterator[Problem]:
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
            yield key, str(error)


def _correction(run: TrainOptions) -> Iterator[Problem]:
    correction, loss_mode = run.algorithm.rollout_correction, run.actor_rollout_ref.actor.policy_loss.loss_mode
    loss, default = run.actor.policy_loss, type(run.actor.policy_loss)().loss_mode
    key = "algorithm.rollout_correction"
    if correction.bypass_mode and correction.rollout_is_batch_normalize:
        yield (
            f"{key}.rollout_is_batch_normalize",
            "needs the whole batch's weights, and with bypass_mode=true these are known only as it is learned from",
        )
    if correction.bypass_mode and correction.rollout_is and loss.record is not None and loss.record.has_ratio:
        yield (
            f"{key}.rollout_is",
            "with bypass_mode=true the loss's own ratio is to the engine's log-probs, and is the correction: set "
            "loss_type=reinforce, or rollout_is=null",
        )
    if loss.record is not None and loss.record.multiplies_weights:
        reason = f"policy_loss.loss_mode={loss.loss_mode} multiplies the weights of a sequence's tokens"
        if correction.rollout_is == "sequence":
            yield f"{key}.rollout_is", f"{reason}, and the sequence's would count once for each: set it to token"
        if correction.rollout_is is not None and correction.rollout_is_batch_normalize:
            yield f"{key}.rollout_is_batch_normalize", f"{reason}, whose product a mean of tokens does not normalise"
    if loss_mode not in (default, loss.loss_mode):
        yield f"{key}.loss_type", f"picks another loss than actor.policy_loss.loss_mode={loss_mode}"


def _weighted_loss(run: TrainOptions) -> Iterator[Problem]:
    correction, loss = run.algorithm.rollout_correction, run.actor.policy_loss
    in_loss = correction.bypass_mode and correction.rollout_rs
    if loss.record is None or loss.record.takes("rollout_is_weights"):
        return
    if correction.rollout_is or in_loss or correction.off_policy_mask_threshold is not None:
        yield (
            f"{_POLICY}.actor.policy_loss.loss_mode",
            "takes no rollout_is_weights, by which algorithm.rollout_correction corrects it: add the parameter, and "
            "multiply the loss of each token by it",
        )


def _loss_options(run: TrainOptions) -> Iterator[Problem]:
    """Finds policy-loss options that the chosen loss does not read, and required ones that are missing. Defaults belong to
    the loss, so a value in the configuration was set deliberately."""
    actor, section = run.actor_rollout_ref.actor, f"{_POLICY}.actor"
    name, record = actor.policy_loss.loss_mode, actor.policy_loss.record
    for prefix, options in ((section, actor), (f"{section}.policy_loss", actor.policy_loss)):
        for option in (each.name for each in dataclasses.fields(options)):
            readers, given = POLICY_LOSSES.readers(option), getattr(options, option) is not None
            if readers and given and not actor.reads(option):
                yield (
                    f"{prefix}.{option}",
                    f"policy_loss.loss_mode={name} does not read it (read by {', '.join(readers)})",
                )
            elif readers and not given and record is not None and record.needs_value(option):
                yield f"{prefix}.{option}", f"must be set: policy_loss.loss_mode={name} has no default for it"


def _determinism(run: TrainOptions) -> Iterator[Problem]:
    rollout = run.actor_rollout_ref.rollout
    if not run.trainer.deterministic:
        return
    if rollout.multi_turn.max_seconds is not None:
        yield (
            f"{_ROLLOUT}.multi_turn.max_seconds",
            "ends trajectories by the clock, which trainer.deterministic forbids",
        )
    if rollout.mode == "sync" and run.actor_rollout_ref.env.chosen:
        yield (
            f"{_ROLLOUT}.mode",
            "steps environments together, for which trajectories wait for each other; trainer.deterministic does not go "
            "with that: set rollout.mode=async",
        )


def _staleness(run: TrainOptions) -> Iterator[Problem]:
    if run.trainer.max_staleness and run.trainer.deterministic:
        yield (
            "trainer.max_staleness",
            "when weights reach a rollout depends on the clock then: set trainer.deterministic=false",
        )
    if run.trainer.max_staleness and run.actor_rollout_ref.rollout.mode == "sync":
        yield (
            f"{_ROLLOUT}.mode",
            "scores a step's rollouts together; trainer.max_staleness streams them: set it to async",
        )


def _rewards(run: TrainOptions) -> Iterator[Problem]:
    custom = run.custom_reward_function
    for key in ("path", "rewards"):
        if getattr(custom, key) and not run.reward_model.enable:
            yield f"custom_reward_function.{key}", "reward_model.enable=false never calls it"
    if run.reward_model.model.path and not run.reward_model.enable:
        yield "reward_model.model.path", "reward_model.enable=false never calls it"
    if custom.path and custom.rewards:
        yield (
            "custom_reward_function.rewards",
            "and custom_reward_function.path are two ways to say it: write the one in rewards",
        )
    weights = []
    for number, entry in enumerate(custom.rewards):
        made, wrong = build(WeightedFunction, entry, f"custom_reward_function.rewards[{number}].")
        for text in wrong.values():
            yield "custom_reward_function.rewards", text
        weights.append(1.0 if wrong or made is None else made.weight)
    components = (
        run.algorithm.estimator and "reward_components" in run.algorithm.estimator.needs
    )  # reads them unweighted
    if weights and not any(weights) and not components and not run.reward_model.model.path:
        yield "custom_reward_function.rewards", "every weight is 0, so the score is, too: give one a weight"
    if run.reward_model.reward_manager == "parallel" and not run.actor_rollout_ref.env.chosen:
        yield "reward_model.reward_manager", "is the environment's score: set actor_rollout_ref.env.name"


def _folders(run: TrainOptions) -> Iterator[Problem]:
    folders = run.trainer.validation_data_dir, run.trainer.rollout_data_dir
    if all(folders) and len({os.path.abspath(os.path.expanduser(str(folder))) for folder in folders}) == 1:
        yield "trainer.validation_data_dir", "is trainer.rollout_data_dir, too: one would overwrite the other's files"


def _resuming(run: TrainOptions) -> Iterator[Problem]:
    by_path, path = run.trainer.resume_mode == "resume_path", run.trainer.resume_from_path
    if by_path and not path:
        yield "trainer.resume_mode", "needs trainer.resume_from_path"
    if path and not by_path:
        yield "trainer.resume_from_path", "is read only with trainer.resume_mode=resume_path: set that, too"


def _serving(run: TrainOptions) -> Iterator[Problem]:
    rollout = run.actor_rollout_ref.rollout
    on_cpu = run.trainer.device == "cpu"
    if rollout.weight_transfer == "cuda_ipc" and (rollout.name != "vllm" or rollout.has_servers or on_cpu):
        yield (
            f"{_ROLLOUT}.weight_transfer",
            "shares the trainer's GPU tensors with vLLM in this process: it needs rollout.name=vllm without server_urls, "
            "and a GPU; use folder",
        )
    model = run.actor_rollout_ref.model
    if rollout.weight_transfer == "adapter" and not (
        rollout.has_servers and model.lora_rank and not model.quantization
    ):
        yield (
            f"{_ROLLOUT}.weight_transfer",
            "sends LoRA's adapters to servers of model.path: it needs rollout.server_urls and model.lora_rank, and no "
            "model.quantization; use folder",
        )


def _rollout_group(run: TrainOptions) -> Iterator[Problem]:
    if not run.has_rollout_group:
        return
    if not run.actor_rollout_ref.rollout.nnodes:
        yield f"{_ROLLOUT}.nnodes", "is on how many nodes hybrid_engine=false rolls out: at least 1"
    if run.actor_rollout_ref.rollout.weight_transfer == "cuda_ipc":
        yield (
            f"{_ROLLOUT}.weight_transfer",
            "shares tensors within a process: hybrid_engine=false needs folder or adapter",
        )


def _shared_trunk(run: TrainOptions) -> Iterator[Problem]:
    policy, key = run.actor_rollout_ref, "critic.share_trunk"
    if not run.critic.share_trunk or not run.may_need("values"):
        return
    if policy.actor.strategy != "ddp":
        yield key, f"needs actor.strategy=ddp, not {policy.actor.strategy}: the head is no part of a sharded model"
    if policy.model.dtype in ("float16", "fp16"):
        yield key, "needs model.dtype=float32 or bfloat16: the loss scale of float16 is the policy's own"
    if policy.rollout.enable_rollout_routing_replay:
        yield (
            key,
            "does not go with rollout.enable_rollout_routing_replay: old values are those of the model's own routers",
        )


_OF_RECORDS = (_groups, _components, _distillation, _own_options, _loss_options, _correction, _weighted_loss)
"""Checks that depend on the records of estimator and loss; repeated after the plugins have been imported."""
_RULES: tuple[Callable[[TrainOptions], Iterator[Problem]], ...] = (
    *_OF_RECORDS,
    _sampling,
    _determinism,
    _staleness,
    _rewards,
    _folders,
    _resuming,
    _serving,
    _rollout_group,
    _shared_trunk,
)
