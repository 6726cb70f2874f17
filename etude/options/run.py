"""Options of the training loop: `algorithm` and `trainer`."""

from __future__ import annotations

import math
from typing import Annotated, Any, Literal

from annotated_types import Le
from pydantic import AfterValidator, BeforeValidator

from etude.algorithms.records import ADVANTAGE_ESTIMATORS, Estimator, KLKind, Singleton, TimestepUnit
from etude.options.declare import Names, When, key, options
from etude.options.types import (
    Count,
    CountOrOff,
    Flag,
    FreeForm,
    Natural,
    NonNegative,
    Numbers,
    Positive,
    Share,
    Text,
    Texts,
)

KL_REWARD = When("with algorithm.use_kl_in_reward=true", lambda own, run: run.algorithm.use_kl_in_reward)
ADAPTIVE = When(
    "with algorithm.use_kl_in_reward=true and type=adaptive",
    lambda own, run: run.algorithm.use_kl_in_reward and own.type == "adaptive",
)
CRITIC = When(
    f"with estimators that need a critic (algorithm.adv_estimator={', '.join(ADVANTAGE_ESTIMATORS.needing('values'))})",
    lambda own, run: run.may_need("values"),
)
DUMPED = When("where rollout_data_dir is set", lambda own, run: own.rollout_data_dir is not None)
VALIDATED = When("where data.val_files or env is set", lambda own, run: bool(run.data.val_files or run.env))


def _estimator_reads(option: str) -> When:
    """Where the estimator reads `option`."""
    readers = ", ".join(ADVANTAGE_ESTIMATORS.readers(option))
    return When(
        f"with estimators that read it (adv_estimator={readers})",
        lambda own, run: ADVANTAGE_ESTIMATORS.reads(own.adv_estimator, option),
    )


@options
class KLCtrlOptions:
    """Weight of that penalty."""

    type: Literal["fixed", "adaptive"] = key(
        "adaptive steers the KL distance towards target_kl.", default="fixed", when=KL_REWARD
    )
    kl_coef: NonNegative = key("The weight; where adaptive, its start.", default=0.001, when=KL_REWARD)
    horizon: Count = key("Samples over which the weight adjusts.", default=10_000, when=ADAPTIVE)
    target_kl: Positive = key("Target KL distance.", default=0.1, unit="nats", when=ADAPTIVE)


@options
class FilterGroupsOptions:
    """verl's keys for zero_variance."""

    enable: Flag = key(
        "True: as zero_variance=mask, or =refill where max_num_gen_batches is more than 1.",
        default=False,
        when=When("with zero_variance=null", lambda own, run: run.algorithm.zero_variance is None),
    )
    metric: Text | None = key(
        "What the answers of a group must differ in: reward (their total rewards, as seq_reward and seq_final_reward too), "
        "score (the reward manager's), or a number that the scorer reports, such as acc. Null: reward.",
        default=None,
        when=When("where groups of equal scores leave the batch", lambda own, run: run.algorithm.drops_equal_groups),
    )
    max_num_gen_batches: Count = key(
        "Most batches generated for a step, the first included; where they are not enough, the step trains on what it has "
        "(training/filter_groups/missing_samples).",
        default=1,
        when=When(
            "with enable=true or zero_variance=refill",
            lambda own, run: own.enable or run.algorithm.zero_variance == "refill",
        ),
        unit="batches",
        verl_default="0",
        verl_meaning="0 is no bound",
    )


def _parts(value: object) -> object:
    """A list may be written as text with commas, and a number stands for itself."""
    if isinstance(value, str):
        return tuple(part.strip() for part in value.split(",") if part.strip())
    if isinstance(value, list | tuple):
        return tuple(str(part) if isinstance(part, int | float) else part for part in value)
    return (str(value),) if isinstance(value, int | float) and not isinstance(value, bool) else value


def _threshold(value: object) -> object:
    return str(float(value)) if isinstance(value, int | float) and not isinstance(value, bool) else value


_Criterion = Literal[
    "token_k1",
    "token_k2",
    "token_k3",
    "seq_sum_k1",
    "seq_sum_k2",
    "seq_sum_k3",
    "seq_mean_k1",
    "seq_mean_k2",
    "seq_mean_k3",
    "seq_max_k2",
    "seq_max_k3",
]

_LARGEST = 1e9  # a ratio is at most exp(20), a k2 200
_PAIR = "LOW_HIGH, both with a decimal point (0.5_5.0; 0.5_5 is the number 0.55)"
WEIGHED = When("with rollout_is", lambda own, run: own.rollout_is is not None)
REJECTING = When("with rollout_rs", lambda own, run: bool(own.rollout_rs))
BYPASS = When("with bypass_mode=true", lambda own, run: own.bypass_mode)


@options
class RolloutCorrectionOptions:
    """Mismatch between the engine that sampled and the model that trains: measured in every step, corrected on request."""

    rollout_is: Literal["token", "sequence"] | None = key(
        "Multiply the loss by importance weights, the trainer's probability over the engine's: of each token, or of whole "
        "sequences (all those of a rollout together). Null: no weights. By default token where rollouts are stale "
        "(trainer.max_staleness) and bypass_mode is off.",
        default=None,
        written="${etude.correction:${trainer.max_staleness},${.bypass_mode}}",
    )
    rollout_is_threshold: Annotated[Text, BeforeValidator(_threshold)] = key(
        "Largest weight; larger ones are cut to it. As LOW_HIGH, both with a decimal point (0.5_5.0), IcePop: a weight "
        "outside is 0.",
        default="2.0",
        when=WEIGHED,
    )
    rollout_is_batch_normalize: Flag = key(
        "Divide the weights by their mean over the batch.", default=False, when=WEIGHED
    )
    rollout_rs: Annotated[tuple[_Criterion, ...], BeforeValidator(_parts)] | None = key(
        "Leave out tokens (token_*) or whole sequences (seq_*) that are too far from what the engine sampled from, by all "
        "of these estimators of the KL distance: its sum, mean or maximum over a sequence. Null: none.",
        default=None,
    )
    rollout_rs_threshold: Annotated[tuple[Text, ...], BeforeValidator(_parts)] | None = key(
        "Their bounds, one for each or one for all. For k1 on the probability ratio, LOW_HIGH, or HIGH alone for 1/HIGH; "
        "for k2 and k3 the largest value, in nats.",
        default=None,
        when=REJECTING,
    )
    off_policy_mask_threshold: Positive | None = key(
        "Leave sequences of negative advantage out of the loss whose mean log-prob at the engine is this much above that "
        "of the policy as it learns (DeepSeek-V3.2; 0.5 is usual). Null: none.",
        default=None,
        unit="nats",
    )
    score_centering_topk: Natural = key(
        "Score centering: subtract from a token's score, ∇ log π, its mean over what the engine could have sampled, so "
        "that the mismatch does not add up over steps. The mean is over this many of the most probable tokens (128 in the "
        "paper), and an estimate for the others. 0: off.",
        default=0,
        unit="tokens",
    )
    alarm_threshold: Positive | None = key(
        "Warn, naming likely causes, when the KL distance a token (rollout_corr/k3_kl) is above this, and again at each "
        "tenfold. Null: never.",
        default=0.01,
        unit="nats",
    )
    bypass_mode: Flag = key("True: the old log-probs are the engine's own, with no extra forward pass.", default=False)
    loss_type: Literal["ppo_clip", "reinforce"] = key(
        "ppo_clip: the loss's own ratio to the engine's log-probs is the correction. reinforce: actor.policy_loss is "
        "reinforce, with the weights of rollout_is.",
        default="ppo_clip",
        when=BYPASS,
    )

    def __post_init__(self) -> None:
        _ = self.is_bounds, self.criteria

    @property
    def corrects(self) -> bool:
        """Whether weights or rejection are computed."""
        return self.rollout_is is not None or bool(self.rollout_rs)

    @property
    def is_bounds(self) -> tuple[float, float] | float:
        """`rollout_is_threshold` as a number, or as the pair of IcePop.

        Raises:
            ValueError: it is neither, or no range of positive numbers.
        """
        low, high = _bounds("rollout_is_threshold", self.rollout_is_threshold)
        if low is None and high < 1:
            raise ValueError(f"rollout_is_threshold must be at least 1, or {_PAIR}, not {high}")
        return high if low is None else (low, high)

    @property
    def criteria(self) -> list[tuple[str, tuple[float, float]]]:
        """The names in `rollout_rs`, each with its bounds.

        Raises:
            ValueError: there is not a threshold for each, or one does not fit its estimator.
        """
        names, given = self.rollout_rs or (), self.rollout_rs_threshold or ()
        if names and len(given) not in (1, len(names)):
            raise ValueError(f"rollout_rs_threshold needs a bound for each of {', '.join(names)}, or one for all")
        bounds = [_bounds("rollout_rs_threshold", text) for text in given]
        made: list[tuple[str, tuple[float, float]]] = []
        for name, (low, high) in zip(names, bounds * len(names) if len(bounds) == 1 else bounds):
            of_ratio = name.endswith("k1")
            if low is not None and not of_ratio:
                raise ValueError(f"rollout_rs_threshold: {name} takes one bound, not {low}_{high}")
            if low is None and of_ratio and high < 1:
                raise ValueError(f"rollout_rs_threshold: {name} takes a HIGH of at least 1, or {_PAIR}, not {high}")
            made.append((name, (low or (1 / high if of_ratio else 0.0), high)))
        return made


def _bounds(name: str, text: str) -> tuple[float | None, float]:
    """(low or None, high) of "LOW_HIGH" or "HIGH"."""
    low, _, high = text.rpartition("_")
    try:
        found = float(low) if low else None, float(high)
    except ValueError:
        found = None, math.nan
    if not 0 < (found[1] if found[0] is None else found[0]) <= found[1] <= _LARGEST:
        raise ValueError(f"{name} must be a positive number (at most {_LARGEST:g}), or {_PAIR}, not {text}")
    return found


@options
class AlgorithmOptions:
    """From rewards to advantages."""

    adv_estimator: Text = key(
        "A registered advantage estimator (docs/algorithms.md lists them), or one of yours.",
        default="gae",
        names=Names("etude.algorithms.records:ADVANTAGE_ESTIMATORS"),
    )
    adv_estimator_kwargs: FreeForm = key(
        "Options that the estimator has and that are no keys here; any keys.", default_factory=dict
    )
    gamma: Share = key(
        "Discount a token (or turn, where the estimator says so). 1.0: a reward at the end counts in full at the start.",
        default=1.0,
        when=_estimator_reads("gamma"),
    )
    lam: Share = key("GAE's trade of bias for variance. 1.0: no bias.", default=1.0, when=_estimator_reads("lam"))
    gae_timestep_unit: TimestepUnit = key(
        "What gamma and lam count: tokens, or turns (within one nothing is discounted).",
        default="token",
        when=_estimator_reads("gae_timestep_unit"),
    )
    norm_adv_by_std_in_grpo: Flag = key(
        "Divide group-relative advantages by the group's standard deviation. False: Dr.GRPO.",
        default=True,
        when=_estimator_reads("norm_adv_by_std_in_grpo"),
    )
    singleton_advantage: Singleton = key(
        "Advantage of an answer that is its prompt's only one. raw: its score, and such prompts are trained on.",
        default="zero",
        when=_estimator_reads("singleton_advantage"),
    )
    zero_variance: Literal["keep", "mask", "refill"] | None = key(
        "Prompts whose answers all score the same: keep them (advantage 0), mask them out of the loss and its counts, or "
        "refill: replace them by further prompts, up to filter_groups.max_num_gen_batches. Null: as filter_groups.enable "
        "says.",
        default=None,
    )
    gdpo_reward_keys: Texts = key(
        "Reward components that are normalised one by one: numbers in the scorer's dict, or step, final, score.",
        default=(),
        when=_estimator_reads("gdpo_reward_keys"),
        verl_default="null",
    )
    gdpo_reward_weights: Numbers | None = key(
        "Their weights. Null: 1 each.",
        default=None,
        when=_estimator_reads("gdpo_reward_weights"),
    )
    use_kl_in_reward: Flag = key(
        "Subtract the KL distance from the reference policy from each token's reward.", default=False
    )
    kl_penalty: KLKind = key("Its estimator: kl (k1), abs, mse (k2), low_var_kl (k3).", default="kl", when=KL_REWARD)
    kl_ctrl: KLCtrlOptions = key("", default_factory=KLCtrlOptions)
    filter_groups: FilterGroupsOptions = key("", default_factory=FilterGroupsOptions)
    rollout_correction: RolloutCorrectionOptions = key("", default_factory=RolloutCorrectionOptions)

    def __post_init__(self) -> None:
        keys, weights = self.gdpo_reward_keys, self.gdpo_reward_weights
        if weights is not None and len(weights) != len(keys):
            raise ValueError(f"gdpo_reward_weights: {len(weights)} for the {len(keys)} of gdpo_reward_keys")

    @property
    def estimator(self) -> Estimator | None:
        """The record of `adv_estimator`; None where nothing is registered under that name, or nothing yet."""
        return ADVANTAGE_ESTIMATORS.find(self.adv_estimator)

    @property
    def min_group(self) -> int:
        """Minimum number of surviving answers per prompt that are trained on."""
        estimator = ADVANTAGE_ESTIMATORS.get(self.adv_estimator)
        raw = self.singleton_advantage == "raw" and estimator.reads("singleton_advantage")
        return 1 if raw else estimator.min_group

    @property
    def drops_equal_groups(self) -> bool:
        """Whether groups of equal scores leave the batch."""
        return self.filter_groups.enable if self.zero_variance is None else self.zero_variance != "keep"

    @property
    def max_gen_batches(self) -> int:
        """Batches that may be generated for one step."""
        refills = self.drops_equal_groups and self.zero_variance != "mask"
        return self.filter_groups.max_num_gen_batches if refills else 1

    def estimator_options(self) -> dict[str, Any]:
        """What the estimator is called with beside columns.

        Raises:
            ConfigError: `adv_estimator_kwargs` are not its own.
        """
        return ADVANTAGE_ESTIMATORS.settings(self.adv_estimator, self, own=self.adv_estimator_kwargs)


def _device(name: str) -> str:
    kind, _, number = name.partition(":")
    if name not in ("auto", "cpu", "cuda") and not (kind == "cuda" and number.isascii() and number.isdigit()):
        raise ValueError
    return name


ON_RAY = When("with trainer.backend=ray", lambda own, run: run.trainer.backend == "ray")


@options
class RayOptions:
    """The Ray cluster of a run with trainer.backend=ray."""

    address: Text | None = key(
        "Address of a running cluster (HOST:PORT, or auto: the one of this machine). Null: that of the environment's "
        "RAY_ADDRESS, or else one is started here, for the run.",
        default=None,
    )
    init_kwargs: FreeForm = key(
        "Further arguments of ray.init, such as num_cpus, object_store_memory or runtime_env; any keys.",
        default_factory=dict,
    )
    call_timeout: Positive = key(
        "Limit for one call of a worker: a rollout of a whole batch, an update, a checkpoint. Whoever exceeds it is lost.",
        default=3600.0,
        unit="s",
    )
    node_timeout: Natural = key(
        "After a loss (trainer.max_restarts): how long to wait for nodes of the run to come back.",
        default=300,
        unit="s",
    )
    data_plane: Literal["objects", "transferqueue"] = key(
        "Where batches stay between workers. objects: Ray objects, slices of a column each, on the node that wrote them. "
        "transferqueue: the storage units of TransferQueue, which sends single rows; takes 3 CPUs.",
        default="objects",
    )


Device = Annotated[Text, AfterValidator(_device)]
Threads = Annotated[Count, Le(1024)]


@options
class RunOptions:
    """What every run has: its length, its place, its seed."""

    total_epochs: Count = key(
        "Passes over the training files; a step that generates further prompts (algorithm.filter_groups) takes several of a "
        "pass's batches.",
        default=1,
        when=When("with total_training_steps=null", lambda own, run: own.total_training_steps is None),
        verl_default="30",
    )
    total_training_steps: Count | None = key(
        "Length of the run. Null: as long as total_epochs makes it.", default=None, unit="steps"
    )
    project_name: Text = key("First part of the run's name.", default="etude", verl_default="verl_examples")
    experiment_name: Text = key(
        "Second part of the run's name. By default it ends in eight digits that stand for model, data, tools, reward, "
        "estimator and seed, so that two experiments do not share a folder.",
        default="default",
        written="${etude.experiment:default}",
        verl_default="gsm8k",
    )
    default_local_dir: Text = key(
        "Folder of everything the run leaves: metrics, checkpoints, dumps, report.",
        default="runs/etude/default",
        written="runs/${trainer.project_name}/${trainer.experiment_name}",
        path="output",
        verl_default="checkpoints/verl_examples/gsm8k",
    )
    logger: Texts = key(
        "Where metrics go: console, jsonl (or file), tensorboard; with the extras of their names wandb, mlflow, swanlab, "
        "trackio, clearml.",
        default=("console", "jsonl", "tensorboard"),
        names=Names("etude.trainer.tracking:TRACKERS"),
        verl_default="[console, wandb]",
    )
    save_freq: CountOrOff = key(
        "Steps between checkpoints. -1: only at the end.",
        default=-1,
        unit="steps",
        verl_meaning="-1: no checkpoint at all",
    )
    resume_mode: Literal["auto", "disable", "resume_path"] = key(
        "auto: from the last checkpoint in default_local_dir, if any; resume_path: from resume_from_path.",
        default="auto",
    )
    resume_from_path: Text | None = key("Checkpoint folder for resume_path.", default=None, path="checkpoint")
    max_actor_ckpt_to_keep: CountOrOff | None = key(
        "Checkpoints kept, newest first. Null or -1: all.", default=2, verl_default="null"
    )
    async_save: Flag = key(
        "Write checkpoints in the background, from a copy of weights and optimizer states in the CPU's memory; the next one "
        "waits for it.",
        default=False,
    )
    deterministic: Flag = key("Bit-identical repeats at a fixed thread count, at some cost in speed.", default=False)
    seed: Natural = key("Seed of everything random that has no seed of its own.", default=1)
    num_threads: Threads | None = key("Torch threads within an operation. Null: torch's own choice.", default=None)
    device: Device = key(
        "auto (a GPU if there is one), cpu, cuda or cuda:N.",
        default="auto",
        verl_default="cuda",
        verl_meaning="cuda or npu",
    )
    backend: Literal["local", "ray"] = key(
        "local: everything in this process; ray: nnodes x n_gpus_per_node worker processes of a Ray cluster.",
        default="local",
    )
    nnodes: Count = key("Nodes of the cluster that the workers are on.", default=1, when=ON_RAY)
    min_nnodes: Count | None = key(
        "Go on with fewer nodes, at least these, where the cluster does not have nnodes (any more). Null: nnodes.",
        default=None,
        when=ON_RAY,
    )
    max_restarts: Natural = key(
        "After the loss of a worker: how often in a row, without a new checkpoint, the workers start again from the last "
        "one, before the run ends.",
        default=3,
        when=ON_RAY,
    )
    n_gpus_per_node: Count = key(
        "Worker processes on each node: one for each of its GPUs, or on CPUs as many as they should be.",
        default=1,
        when=ON_RAY,
        verl_default="8",
    )
    max_skipped_steps: Count = key(
        "Training steps in a row whose every gradient was not finite, after which the run stops, with a checkpoint.",
        default=5,
        unit="steps",
    )

    @property
    def ranks(self) -> int:
        """The number of processes that train."""
        return self.nnodes * self.n_gpus_per_node if self.backend == "ray" else 1


@options
class TrainerOptions(RunOptions):
    """The training loop."""

    on_solved: Literal["continue", "stop"] = key(
        "What follows when the task is solved: in 3 steps in a row the answers to each prompt earn the same, on average in "
        "the top tenth of the rewards that the run has seen. stop: the run ends there, complete, with a validation and a "
        "checkpoint. By default it goes on, since later prompts may be harder, and steps without spread cost only rollouts.",
        default="continue",
    )
    test_freq: CountOrOff = key(
        "Steps between validations. -1: only before and after training, as far as val_before_train and val_files say.",
        default=-1,
        unit="steps",
        when=VALIDATED,
        verl_meaning="-1: none but that of val_before_train",
    )
    val_before_train: Flag = key(
        "Validate before the first step, so that there is a figure to compare with.", default=True, when=VALIDATED
    )
    max_staleness: Natural = key(
        "Rollouts go on while the policy learns, and none is trained on that is more than this many steps older than the "
        "weights it trains. 0: a step rolls out, then learns; 1: one step off. See docs/async.md.",
        default=0,
        unit="steps",
    )
    stall_timeout: Positive | None = key(
        "If no token, tool answer or score has come for this long, say what waits for what, and try what is in flight "
        "again, once; what stalls twice is dropped (rollout/stalled). Longer than any one call may take (the timeout of a "
        "tool, rollout.server_timeout), and shorter than rollout.trajectory_timeout, or it has no effect. Null: never.",
        default=400.0,
        unit="seconds",
    )
    critic_warmup: Natural = key(
        "Steps in which only the critic learns.",
        default=0,
        unit="steps",
        when=CRITIC,
        verl_meaning="the first step in which the policy learns: 1 is no warm-up",
    )
    rollout_data_dir: Text | None = key(
        "Folder for one JSON-lines file of rollouts a step. Null: none is written.", default=None, path="output"
    )
    rollout_token_values: Flag = key(
        "Whether these files also say what the trainer had of each token: advantage, log-probs and entropy, for "
        "`etude view` and `etude explain`. About 40 bytes a token.",
        default=False,
        when=DUMPED,
    )
    verify_every: Natural = key(
        "Every so many steps, make the step again as `etude verify` does, in float64 from its dump and the checkpoint "
        "before it, which is written for this; verify/equal is 1, or a warning names the term that differs. Left out while "
        "it has taken more than 2 % of the run's time. 0: never.",
        default=0,
        unit="steps",
        when=DUMPED,
    )
    validation_data_dir: Text | None = key(
        "The same for validation. Null: none is written.",
        default="validation",
        written="${trainer.default_local_dir}/validation",
        path="output",
        when=VALIDATED,
        verl_default="null",
    )
    sentinel: Text | None = key(
        "An independent scorer of validation answers beside the reward, which never trains: file.py:function, as "
        "custom_reward_function. val/sentinel/wrong is the share of what the reward calls right that is wrong to it. "
        "Null: none. Echoes, hedges, copied tool outputs and other hacks are looked for wherever rollouts are dumped.",
        default=None,
        path="code",
        when=VALIDATED,
    )
    min_valid_fraction: Share = key(
        "Smallest share of trajectories that must survive failures of infrastructure and of agents; below it, the run stops "
        "with a checkpoint.",
        default=0.5,
    )
    max_infra_failure_share: Share | None = key(
        "Largest share of a step's trajectories that may meet infrastructure failures, retried ones included; above it the "
        "step warns, and a second one in a row stops the run with a checkpoint. Null: no limit.",
        default=None,
    )
    report: Flag = key("Write report.html at the end.", default=True)
