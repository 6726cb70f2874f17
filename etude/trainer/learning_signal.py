"""Why is my loss zero? Metrics of the learning signal: what removed it from a step, and which rewards it comes from.

Invariant: pure functions, apart from `JudgeBudget` and `EmptySteps`; a metric without data is absent. Component names come
from the configuration and from tools, never from a model's output.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch

from etude.algorithms import equal_scores
from etude.checks.step_warnings import find_problems
from etude.errors import TrainingStopped
from etude.rewards import COMPONENTS
from etude.trajectory import TRUNCATED, Rewards, Rollout

JUDGE = "reward/judge"
_MAX_EMPTY = 3  # consecutive steps without spread, or without a token to train on
_SOLVED = 0.9  # mean reward over such steps, from the lowest (0) to the highest (1) of the run


def loss_metrics(results: Sequence[Rollout]) -> dict[str, float]:
    """Shares of rollouts. `rollout/infrastructure_failure_share`: had a failure, retried or not; `rollout/truncated_share`:
    of the kept ones, truncated; `rollout/unparsed_share`: of those whose scorer reports the answer it extracted (`pred`),
    had none."""
    if not results:
        return {}
    kept = [each.trajectory for each in results if each.trajectory is not None]
    metrics = {"rollout/infrastructure_failure_share": sum(each.failures > 0 for each in results) / len(results)}
    if kept:
        metrics["rollout/truncated_share"] = sum(each.stop_reason in TRUNCATED for each in kept) / len(kept)
    read = [each.rewards.score_info["pred"] for each in kept if "pred" in each.rewards.score_info]
    if read:
        metrics["rollout/unparsed_share"] = sum(answer is None for answer in read) / len(read)
    return metrics


def judge_metrics(results: Sequence[Rollout]) -> dict[str, float]:
    """`reward/judge/{requests,cached,prompt_tokens,completion_tokens,cost}`: judge usage over all rollouts, including
    dropped ones; `cost` is in the currency of the configured prices."""
    used: Counter[str] = sum((each.judge_usage for each in results), Counter())
    return {f"{JUDGE}/{name}": float(amount) for name, amount in sorted(used.items())}


class JudgeBudget:
    """Stops a run whose judges have cost more than `limit` (None: no limit); `spent` is saved in checkpoints."""

    def __init__(self, limit: float | None) -> None:
        self._limit, self.spent = limit, 0.0

    def note(self, metrics: Mapping[str, float]) -> None:
        """Adds the judge cost in the `metrics` of a step or a validation."""
        self.spent += sum(value for name, value in metrics.items() if name.endswith(f"{JUDGE}/cost"))

    def check(self) -> None:
        """Raises TrainingStopped if the budget is spent."""
        if self._limit is not None and self.spent > self._limit:
            raise TrainingStopped(
                f"judges have cost {self.spent:.4g}, more than reward_model.budget={self._limit:g}: raise it, and the same "
                "command goes on where this one stopped"
            )


_READ_THEM = (
    "read the step's answers (`etude report RUN --why`), and try the reward on them (`etude check`): if none "
    "earns more than another, put a worked example in the prompt, take easier rows, or warm up with `etude sft`"
)


class EmptySteps:
    """Consecutive training steps in which nothing could be learned, because no group's rewards differed or no token was left
    to train on. After `_MAX_EMPTY` of them the task is solved, or the run is broken.

    Solved: the rewards of this run have differed, and over these steps their mean is in the top tenth of the run's range, or
    nine in ten rollouts are a success. So a scorer that always returns 1 is no solved task.
    """

    def __init__(self, batch_size: int, *, ends_run: bool) -> None:
        """`ends_run`: whether a solved task does (`trainer.on_solved`)."""
        self._batch_size, self._ends_run = batch_size, ends_run
        self._range: list[float] = []  # lowest and highest reward of the run
        # (mean reward, success) of the last steps, in which no group's rewards differed
        self._equal: list[list[float]] = []
        self._unlearned, self._why = 0, ""  # number of the last steps without a token to train on

    def note(self, metrics: Mapping[str, float]) -> None:
        """Takes in the metrics of a training step."""
        unlearned = metrics.get("training/filter_groups/kept") == 0.0
        self._unlearned = self._unlearned + 1 if unlearned else 0
        self._why = "; ".join(problem.what for problem in find_problems(metrics).values())
        if "critic/score/mean" not in metrics:
            self._equal = []
            return
        low, mean, high = (metrics[f"critic/score/{each}"] for each in ("min", "mean", "max"))
        self._range = [min([low, *self._range[:1]]), max([high, *self._range[1:]])]
        share = metrics.get("rollout/equal_groups_share", float(low == high))
        equal = share == 1 or metrics.get("training/filter_groups/missing_samples") == self._batch_size
        self._equal = [*self._equal, [mean, metrics.get("reward/success/mean", 0.0)]] if equal else []

    @property
    def solved(self) -> bool:
        """Whether the last steps had nothing to learn because the task is solved."""
        if len(self._equal) < _MAX_EMPTY or self._range[0] == self._range[1]:
            return False
        (low, high), (mean, success) = self._range, np.mean(self._equal, axis=0)
        return bool(max((mean - low) / (high - low), success) >= _SOLVED)

    @property
    def ends_run(self) -> bool:
        """Whether the run ends here, as solved."""
        return self.solved and self._ends_run

    def explain(self) -> str:
        """Says in one line what `solved` rests on."""
        (low, high), (mean, success) = self._range, np.mean(self._equal, axis=0)
        what = (
            "solved" if success else "nothing more to earn, though no answer is a success (an acc, or a reward, of 1)"
        )
        return (
            f"{what}: in the last {len(self._equal)} training steps the answers to each prompt earned the same, "
            f"{mean:.3g} on average; rewards of this run: {low:.3g} to {high:.3g}"
        )

    def check(self) -> None:
        """Raises TrainingStopped if no token was trained on in `_MAX_EMPTY` consecutive steps of an unsolved task."""
        if self._unlearned >= _MAX_EMPTY and not self.solved:
            why = f"no token was trained on in the last {self._unlearned} training steps: {self._why}"
            raise TrainingStopped(why, fix=_READ_THEM)

    def state(self) -> dict[str, list[Any]]:
        """Returns the state for `restore`: plain numbers."""
        return {"range": self._range, "equal": self._equal}

    def restore(self, state: Mapping[str, list[Any]]) -> None:
        """Continues from the `state` of a checkpoint."""
        self._range, self._equal = state.get("range", []), state.get("equal", [])


def reward_components(rewards: Rewards, tool_weight: float = 1.0, score_weight: float = 1.0) -> dict[str, float]:
    """The weighted parts of a total reward: `step/{source}`, `final/{tool}` and `score`, or `score/{label}` for each of
    several scoring functions."""
    parts: dict[str, float] = defaultdict(float)
    for _, source, value in rewards.steps:
        parts[f"step/{source}"] += tool_weight * value
    for tool, value in rewards.final.items():
        parts[f"final/{tool}"] += tool_weight * value
    own = _components(rewards)
    for name, value in own.items():
        parts[f"score/{name}"] += score_weight * value
    if not own and rewards.score is not None:
        parts["score"] += score_weight * rewards.score
    return parts


def _components(rewards: Rewards) -> Mapping[str, float]:
    """The parts that the score is the sum of, by label; empty if the scorer named none, or others than it summed."""
    own = rewards.score_info.get(COMPONENTS)
    if (
        rewards.score is None
        or not isinstance(own, Mapping)
        or not all(isinstance(v, int | float) for v in own.values())
    ):
        return {}
    return own if math.isclose(math.fsum(own.values()), rewards.score, rel_tol=1e-6, abs_tol=1e-9) else {}


def component_metrics(
    rewards: Sequence[Rewards], tool_weight: float = 1.0, score_weight: float = 1.0
) -> dict[str, float]:
    """`reward/score/{label}/mean`: the unweighted mean of each of several scoring functions. `reward/spread/{component}`: a
    component's share of the variance of the total reward, Cov(component, total) / Var(total), if two or more components
    vary. The shares sum to 1; a component near 1 dominates training."""
    metrics: dict[str, float] = {}
    for label in dict.fromkeys(name for each in rewards for name in _components(each)):
        if values := [each.score_info[label] for each in rewards if label in each.score_info]:
            metrics[f"reward/score/{label}/mean"] = float(np.mean(values))
    parts = [reward_components(each, tool_weight, score_weight) for each in rewards]
    columns = {
        name: np.array([part.get(name, 0.0) for part in parts]) for name in dict.fromkeys(n for p in parts for n in p)
    }
    varying = {name: column for name, column in columns.items() if np.ptp(column) > 0}
    total = np.sum([*varying.values()], axis=0)
    # What rounding leaves of parts that cancel is no share.
    if len(varying) < 2 or equal_scores(torch.from_numpy(total)):
        return metrics
    for name, column in varying.items():
        covariance = np.mean((column - column.mean()) * (total - total.mean()))
        metrics[f"reward/spread/{name}"] = float(covariance / np.var(total))
    return metrics
