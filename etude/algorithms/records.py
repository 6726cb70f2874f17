"""The registries of advantage estimators and policy losses: one record per name, with what it needs.

Records keep estimator and loss names out of the rest of the system: a record says which columns to compute beyond those of a
rollout (values need a critic, reference log-probs a reference model), the minimum group size, whether a sequence is an
episode, and which options are read. The kinds of KL and of loss aggregation are defined here, too.

Invariant: nothing here imports torch, so that configurations can be checked without it; built-in functions are named as
`module:name` and imported when first called. The computation is in `advantages`, `returns`, `turn_credit` and `losses`.
"""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar, Literal, TypeVar

from etude.errors import ConfigError
from etude.registry import Registry, did_you_mean, import_object

KLLossKind = Literal["abs", "mse", "k2", "low_var_kl", "k3", "kl+", "k1+", "abs+", "mse+", "k2+", "low_var_kl+", "k3+"]
KLKind = Literal["kl", "k1", KLLossKind]
Singleton = Literal["zero", "raw"]
TimestepUnit = Literal["token", "turn"]
LossAggMode = Literal["token-mean", "token-sum", "seq-mean-token-sum", "seq-mean-token-sum-norm", "seq-mean-token-mean"]

COLUMNS = {
    "values": "the critic's values",
    "ref_log_prob": "log-probs of the reference policy",
    "old_log_probs": "the trainer's own log-probs of the policy that rolled out",
    "entropys": "entropies of that policy, in nats",
    "sum_pi_squared": "sums of that policy's squared probabilities over the vocabulary",
    "rollout_log_probs": "the engine's log-probs",
    "token_level_scores": "rewards before any penalty",
    "turns": "the number of each token's turn: it grows along a row",
    "observations": "a number for what each token's turn answered: equal for equal tokens since the turn before",
    "teacher_log_probs": "a teacher's log-probs of the sampled tokens (distillation.teachers)",
    "reward_baselines": "the total score of one greedy rollout of the row's prompt",
    "role_baselines": "the running mean of the rewards of the row's role, before the row",
    "reward_components": "the numbers that the scorer returned, and the rewards by source, by name",
}
"""Columns that a record may need: (batch, response_len) each, except `reward_baselines` and `role_baselines`, (batch,), and
`reward_components`, a mapping from name to (batch,), NaN for rows without it. If a function has a default for a column,
`compute_advantage` and `policy_loss` can be called without it."""

OF_ROLLOUTS = frozenset({"turns", "observations", "reward_baselines", "reward_components", "role_baselines"})
"""Columns that only estimators may need."""
RAE_DECAY = 0.95
"""SPIRAL's, of the running mean of a role's rewards."""

F = TypeVar("F", bound=Callable[..., Any])
Result = TypeVar("Result", bound="Record")


@dataclass(frozen=True)
class Record:
    """A function and what it needs.

    Args:
        fn: called with keyword arguments: those common to its kind, the columns in `needs`, and its options. It gets those
            that its signature names, or all if it has `**kwargs`. `module:name` is imported at the first call.
        needs: names from `COLUMNS`.
        options: names of the options that it reads; or a mapping from names to defaults (None: no default, a value is
            required); or a dataclass with the options as fields, which also checks values; or None: the remaining
            parameters of its signature. An option that is a key of the configuration section takes that key's value,
            unless it is null; others come from the section's free-form `…_kwargs`.

    Raises:
        ConfigError: `needs` names a column that nothing computes, or lacks one that the signature requires.
    """

    fn: Callable[..., Any] | str
    needs: Collection[str] = frozenset()
    options: Collection[str] | Mapping[str, Any] | type | None = None

    offered: ClassVar[frozenset[str]] = frozenset()
    columns: ClassVar[frozenset[str]] = frozenset(COLUMNS)

    def __post_init__(self) -> None:
        if isinstance(self.fn, Record):
            raise ConfigError(f"{self.fn._name} is the record of something else than {type(self).__name__}")
        needs = frozenset({self.needs} if isinstance(self.needs, str) else self.needs)
        object.__setattr__(self, "needs", needs)
        for name in sorted(needs - self.columns):
            raise ConfigError(
                f"{self._name} needs '{name}', which nothing computes{did_you_mean(name, self.columns)} (known: "
                f"{', '.join(sorted(self.columns))})"
            )
        if not isinstance(self.fn, str):
            for name in sorted(self._required & set(COLUMNS) - needs - self.offered):
                raise ConfigError(f"{self._name} takes '{name}' without declaring it: needs={{'{name}'}}")

    def __call__(self, **arguments: Any) -> Any:
        """Calls the function with the arguments that its signature takes; options without a value get their default."""
        for name, default in self.defaults.items():
            value = arguments.pop(name, None)
            if name in self._parameters:  # the other options belong to the loss's token selection
                arguments[name] = default if value is None else value
        if not self._is_open:
            unasked = (self.offered | set(COLUMNS)) - self._parameters.keys()
            arguments = {name: value for name, value in arguments.items() if name not in unasked}
        return self.__wrapped__(**arguments)

    @cached_property
    def __wrapped__(self) -> Callable[..., Any]:
        """The function."""
        function: Callable[..., Any] = import_object(self.fn) if isinstance(self.fn, str) else self.fn
        return function

    @property
    def _name(self) -> str:
        return self.fn if isinstance(self.fn, str) else getattr(self.fn, "__qualname__", repr(self.fn))

    @cached_property
    def _parameters(self) -> Mapping[str, inspect.Parameter]:
        return inspect.signature(self.__wrapped__).parameters

    @property
    def _is_open(self) -> bool:
        return any(each.kind is each.VAR_KEYWORD for each in self._parameters.values())

    @property
    def _required(self) -> set[str]:
        named = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
        return {n for n, each in self._parameters.items() if each.default is each.empty and each.kind in named}

    def requires(self, column: str) -> bool:
        """Whether the needed `column` has no default, so that a call must pass it."""
        parameter = self._parameters.get(column)
        return parameter is None or parameter.default is parameter.empty

    @property
    def defaults(self) -> Mapping[str, Any]:
        """Defaults of the options, if the record states them."""
        return self.options if isinstance(self.options, Mapping) else {}

    def needs_value(self, option: str) -> bool:
        """Whether `option` has no default and must be set."""
        if isinstance(self.fn, str):
            return option in self.defaults and self.defaults[option] is None
        return option in self._required - self.offered - set(COLUMNS)

    @cached_property
    def option_names(self) -> frozenset[str] | None:
        """Names of the options that it reads; None: any."""
        if not (self.options is None or isinstance(self.options, type)):
            return frozenset(self.options)
        if self.options is None and self._is_open:
            return None
        fields = [] if self.options is None else [each.name for each in dataclasses.fields(self.options)]
        named = {name for name, each in self._parameters.items() if each.kind is not each.VAR_KEYWORD}
        return frozenset({*fields, *named} - self.offered - set(COLUMNS))

    def takes(self, argument: str) -> bool:
        """Whether its signature names `argument`; always true for built-in functions, which are not imported to check."""
        return isinstance(self.fn, str) or self._is_open or argument in self._parameters

    def reads(self, option: str) -> bool:
        """Whether `option` has an effect."""
        return self.option_names is None or option in self.option_names

    def own_options(self, given: Mapping[str, Any], elsewhere: Collection[str]) -> dict[str, Any]:
        """Validates and returns the free-form options `given`; `elsewhere` are the options with configuration keys.

        Raises:
            ConfigError: an option is unknown or missing, or its dataclass rejects a value.
        """
        own = None if self.option_names is None else self.option_names - set(elsewhere)
        for name in given:
            if name in elsewhere:
                raise ConfigError(f"'{name}' is a key of its own, beside this section")
            if own is not None and name not in own:
                known = f" (known: {', '.join(sorted(own))})" if own else ", and has none of its own"
                raise ConfigError(f"{self._name} has no option '{name}'{did_you_mean(name, own)}{known}")
        if isinstance(self.options, type):
            return self._as_declared(self.options, given)
        if isinstance(self.fn, str):
            for name in self.defaults.keys() & given.keys():
                truth = isinstance(self.defaults[name], bool)
                if isinstance(given[name], bool) != truth or not isinstance(given[name], int | float):
                    kind = "true or false" if truth else "a number"
                    raise ConfigError(f"{self._name}: option '{name}' must be {kind}, not {given[name]!r}")
            return dict(given)
        for name in sorted(self._required - self.offered - set(COLUMNS) - set(elsewhere) - given.keys()):
            raise ConfigError(f"{self._name} needs a value of its option '{name}'")
        return dict(given)

    def _as_declared(self, declared: type, given: Mapping[str, Any]) -> dict[str, Any]:
        import pydantic

        try:
            made: Any = pydantic.TypeAdapter(declared).validate_python(dict(given))
        except pydantic.ValidationError as error:
            faults = [f"'{'.'.join(map(str, e['loc']))}': {e['msg']}" for e in error.errors(include_url=False)]
            raise ConfigError(f"{self._name}: option {'; '.join(faults)}") from error
        return {each.name: getattr(made, each.name) for each in dataclasses.fields(declared)}


@dataclass(frozen=True)
class Estimator(Record):
    """An advantage estimator: (batch, response_len) rewards and mask → advantages and returns of that shape.

    It is called with `token_level_rewards`, `response_mask`, `index` (batch,) group ids, and `values`, which is None unless
    needed; `gamma` and `lam` are ordinary options.

    Args:
        min_group: minimum number of surviving rollouts per prompt; a smaller group is not trained on.
        ties_teach: whether a group of equal scores may have a training signal; if not, `algorithm.zero_variance` may drop
            it.
        episodes: whether each sequence of a rollout is an episode with the rollout's total at its end; if not, credit is
            per rollout. None: true if it needs values, which are conditioned on a context.
        siblings: whether the agents NAME/NUMBER of a rollout are compared with each other, not with other rollouts'.
    """

    min_group: int = 1
    ties_teach: bool = False
    episodes: bool | None = None
    siblings: bool = False

    offered: ClassVar[frozenset[str]] = frozenset({"token_level_rewards", "response_mask", "index", "values"})

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.min_group < 1:
            raise ConfigError(f"{self._name}: min_group must be at least 1, not {self.min_group}")
        if self.episodes is None:
            object.__setattr__(self, "episodes", "values" in self.needs)


@dataclass(frozen=True)
class PolicyLoss(Record):
    """A policy loss: (batch, response_len) log-probs, advantages and mask → scalar loss and named metrics.

    It is called with `old_log_prob`, `log_prob`, `advantages`, `response_mask`, `loss_agg_mode`, and the counts for
    `agg_loss`: `dp_size`, `batch_num_tokens`, `global_batch_size`, `rollout_tokens`, `loss_scale_factor`; and, if there are
    any, `rollout_is_weights`, which multiply the loss per token. A loss with the option `clip_ratio_low` also reads
    `clip_ratio`, which sets both bounds.

    Args:
        loss_agg_mode: the aggregation mode of its paper, used if the configuration names none.
        selects: function (or `module:name`) that is called once per mini-batch, before this is split over ranks and
            micro-batches. Of `advantages`, `response_mask`, the columns that the loss needs and its options, it gets those
            that it names; its result, (batch, response_len), is passed to the loss as `selected_tokens`.
        has_ratio: whether the policy's ratio to `old_log_prob` weighs the loss; if the old log-probs are the engine's,
            importance weights would then correct twice.
        multiplies_weights: whether the `rollout_is_weights` of a sequence's tokens are multiplied together, so that only
            token-level weights are meaningful.
    """

    loss_agg_mode: LossAggMode = "token-mean"
    selects: Callable[..., Any] | str | None = None
    has_ratio: bool = True
    multiplies_weights: bool = False

    offered: ClassVar[frozenset[str]] = frozenset(
        {"old_log_prob", "log_prob", "advantages", "response_mask", "loss_agg_mode", "rollout_is_weights"}
        | {"dp_size", "batch_num_tokens", "global_batch_size", "rollout_tokens", "loss_scale_factor", "selected_tokens"}
    )
    columns: ClassVar[frozenset[str]] = frozenset(COLUMNS) - OF_ROLLOUTS

    def __call__(self, **arguments: Any) -> Any:
        for column in self.needs - self._parameters.keys() if self.selects else ():
            arguments.pop(column, None)  # read only by the token selection
        return super().__call__(**self._with_bounds(arguments))

    def reads(self, option: str) -> bool:
        return super().reads(option) or (option == "clip_ratio" and "clip_ratio_low" in self.defaults)

    def select_tokens(self, **arguments: Any) -> Any:
        """Returns the mini-batch's `selected_tokens`; None if the loss selects no tokens."""
        if self.selects is None:
            return None
        function: Callable[..., Any] = import_object(self.selects) if isinstance(self.selects, str) else self.selects
        given = {**self.defaults, **{name: value for name, value in arguments.items() if value is not None}}
        return function(**{name: given[name] for name in inspect.signature(function).parameters if name in given})

    def _with_bounds(self, arguments: dict[str, Any]) -> dict[str, Any]:
        if "clip_ratio_low" not in self.defaults:
            return arguments
        both = arguments.pop("clip_ratio", None)
        for bound in ("clip_ratio_low", "clip_ratio_high") if both is not None else ():
            arguments[bound] = both if arguments.get(bound) is None else arguments[bound]
        return arguments


class Records(Registry[Result]):
    """A registry of records; a plain function is registered as a record without needs."""

    def __init__(self, kind: str, record: type[Result], built_in: Mapping[str, Result]) -> None:
        super().__init__(kind)
        self._record, self._built_in = record, dict(built_in)
        self._items |= self._built_in

    def register(self, *names: str) -> Callable[[F], F]:
        """Decorator that registers a record, or a plain function, under one or more names; see `Registry.register`."""

        def enter(item: F) -> F:
            super(Records, self).register(*names)(item if isinstance(item, self._record) else self._record(item))
            return item

        return enter

    def find(self, name: str) -> Result | None:
        """Returns the record of `name`; None if nothing is registered (yet)."""
        return self._items.get(name)

    def reads(self, name: str, option: str) -> bool:
        """Whether `name` reads `option`; true for unknown names, which a plugin may still register."""
        record = self.find(name)
        return record is None or record.reads(option)

    @property
    def built_in(self) -> Mapping[str, Result]:
        """The built-in records, by name."""
        return self._built_in

    def readers(self, option: str) -> list[str]:
        """Returns the built-in names that read `option`."""
        return [name for name, record in self._built_in.items() if record.reads(option)]

    def needing(self, column: str) -> list[str]:
        """Returns the built-in names that need `column`."""
        return [name for name, record in self._built_in.items() if column in record.needs]

    def settings(self, name: str, *sections: Any, own: Mapping[str, Any]) -> dict[str, Any]:
        """Returns the options to call `name` with: the keys of the configuration `sections` that it reads, and its `own`
        free-form options. A function with `**kwargs` gets every key that any built-in reads; null keys are left out.

        Raises:
            ConfigError: a free-form option is invalid; the message does not name its section.
        """
        record = self.get(name)
        keys = {each.name: getattr(section, each.name) for section in sections for each in dataclasses.fields(section)}
        is_read = self.readers if record.option_names is None else record.reads
        read = {key: value for key, value in keys.items() if value is not None and is_read(key)}
        return read | record.own_options(own, keys)


def _estimators() -> dict[str, Estimator]:
    outcome, returns, turns = (f"etude.algorithms.{name}" for name in ("advantages", "returns", "turn_credit"))
    single, std = "singleton_advantage", "norm_adv_by_std_in_grpo"
    of_turns = {"gamma": 1.0, std: True, single: "zero", "step_advantage_w": 1.0}
    of_tokens = {"gamma", "lam", "gae_timestep_unit"}
    of_rewards = {"gdpo_reward_keys", "gdpo_reward_weights", std, single}
    of_tail = {single: "zero", "handle_zero_tail": True}

    def grouped(fn: str, needs: Collection[str] = (), options: Any = (single,), ties_teach: bool = False) -> Estimator:
        return Estimator(fn, needs, options, min_group=2, ties_teach=ties_teach)

    grpo, rloo = grouped(f"{outcome}:grpo", options={std, single}), grouped(f"{outcome}:rloo")
    baseline = grouped(f"{returns}:optimal_token_baseline", {"old_log_probs", "sum_pi_squared"}, of_tail)
    return {
        "gae": Estimator(f"{returns}:gae", {"values", "turns"}, of_tokens, ties_teach=True),
        "grpo": grpo,
        "grpo_vectorized": grpo,
        "hierarchical_grpo": dataclasses.replace(grpo, min_group=1, ties_teach=True, siblings=True),
        "grpo_passk": grouped(f"{outcome}:grpo_passk", options={std, single}),
        "rloo": rloo,
        "rloo_vectorized": rloo,
        "reinforce_plus_plus": Estimator(f"{returns}:reinforce_plus_plus", options={"gamma"}, ties_teach=True),
        "reinforce_plus_plus_baseline": grouped(f"{outcome}:reinforce_plus_plus_baseline"),
        "remax": Estimator(f"{returns}:remax", {"reward_baselines"}, (), ties_teach=True),
        "rae": Estimator(f"{outcome}:rae", {"role_baselines"}, {"decay": RAE_DECAY}, ties_teach=True),
        "opo": grouped(f"{outcome}:opo"),
        "gpg": grouped(f"{outcome}:gpg", options={single: "zero", "f_norm": 1.0}),
        "gdpo": grouped(f"{outcome}:gdpo", {"reward_components"}, of_rewards, ties_teach=True),
        "max_rl": grouped(f"{outcome}:max_rl"),
        "optimal_token_baseline": baseline,
        "tir_optimal_token_baseline": baseline,
        "turn_grpo": grouped(f"{turns}:turn_grpo", {"turns"}, of_turns, ties_teach=True),
        "gigpo": grouped(f"{turns}:gigpo", {"turns", "observations"}, of_turns, ties_teach=True),
    }


ADVANTAGE_ESTIMATORS: Records[Estimator] = Records("advantage estimator", Estimator, _estimators())


def _loss(name: str, loss_agg_mode: LossAggMode = "token-mean", **options: Any) -> PolicyLoss:
    fn, has_ratio = f"etude.algorithms.losses:{name}", name != "reinforce"
    return PolicyLoss(
        fn, options=options, loss_agg_mode=loss_agg_mode, has_ratio=has_ratio, multiplies_weights=name == "vespo"
    )


def _selecting_loss(name: str, **options: Any) -> PolicyLoss:
    home = "etude.algorithms.losses"
    return PolicyLoss(f"{home}:{name}", {"old_log_probs"}, options, selects=f"{home}:select_{name}")


# Sources of the losses' defaults. GSPO, LUSPO: their papers, section 5.1; GMPO: its paper, section 4 (all three also in
# TRL's paper index); VESPO: TRL 1.16; clip_cov and kl_cov: verl 0.9.1's functions, with the bounds of 1 from the authors'
# scripts; DPPO: δ from SkyRL, c from verl's function; CISPO: AReaL's recommendation.
POLICY_LOSSES: Records[PolicyLoss] = Records(
    "policy loss",
    PolicyLoss,
    {
        "vanilla": _loss("vanilla", clip_ratio_low=0.2, clip_ratio_high=0.2, clip_ratio_c=3.0),
        "gspo": _loss("gspo", "seq-mean-token-mean", clip_ratio_low=3e-4, clip_ratio_high=4e-4),
        "luspo": _loss("gspo", "seq-mean-token-sum", clip_ratio_low=2e-3, clip_ratio_high=2.5e-3),
        "geo_mean": _loss("geo_mean", "seq-mean-token-mean", clip_ratio_low=0.4, clip_ratio_high=0.4),
        "cispo": _loss("cispo", clip_ratio_low=1.0, clip_ratio_high=4.0),
        "sapo": _loss("sapo", "seq-mean-token-mean", tau_pos=1.0, tau_neg=1.05),
        "dppo_tv": _loss("dppo_tv", clip_ratio_low=0.2, clip_ratio_high=0.2, clip_ratio_c=20.0),
        "dppo_kl": _loss("dppo_kl", clip_ratio_low=0.05, clip_ratio_high=0.05, clip_ratio_c=20.0),
        "vespo": _loss("vespo", k_pos=2.0, lambda_pos=3.0, k_neg=3.0, lambda_neg=2.0),
        "clip_cov": _selecting_loss(
            "clip_cov",
            clip_ratio_low=1.0,
            clip_ratio_high=1.0,
            clip_cov_ratio=2e-4,
            clip_cov_lb=1.0,
            clip_cov_ub=5.0,
        ),
        "kl_cov": _selecting_loss("kl_cov", kl_cov_ratio=2e-4, ppo_kl_coef=1.0),
        "dro": _loss("dro", dro_beta=None),
        "gpg": _loss("reinforce"),
        "reinforce": _loss("reinforce"),
    },
)


def register_estimator(*names: str, **record: Any) -> Callable[[F], F]:
    """Decorator that registers an advantage estimator under `names`; `record`: the other fields of `Estimator`."""
    return _register(ADVANTAGE_ESTIMATORS, Estimator, names, record)


def register_policy_loss(*names: str, **record: Any) -> Callable[[F], F]:
    """Decorator that registers a policy loss under `names`; `record`: the other fields of `PolicyLoss`."""
    return _register(POLICY_LOSSES, PolicyLoss, names, record)


def _register(
    registry: Records[Any], kind: type[Record], names: tuple[str, ...], record: dict[str, Any]
) -> Callable[[F], F]:
    def enter(function: F) -> F:
        registry.register(*names)(kind(function, **record))
        return function

    return enter
