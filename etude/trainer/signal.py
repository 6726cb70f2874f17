"""Why is my loss zero? Metrics of the learning signal: what removed it from a step, and which rewards it comes from.

Invariant: pure functions, apart from `JudgeBudget`; a metric without data is absent. Component names come from the
configuration and from tools, never from a model's output.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np

from etude.algorithms import equal_scores
from etude.errors import TrainingStopped
from etude.rewards import COMPONENTS
from etude.trajectory import TRUNCATED, Rewards, Rollout

if TYPE_CHECKING:
    from etude.protocol import DataProto

JUDGE = "reward/judge"


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

    def __init__(self, limit: float | None, spent: float = 0.0) -> None:
        self._limit, self.spent = limit, spent

    def note(self, metrics: Mapping[str, float]) -> None:
        """Adds the judge cost in the `metrics` of a step or a validation."""
        self.spent += sum(value for name, value in metrics.items() if name.endswith(f"{JUDGE}/cost"))

    def check(self) -> None:
        """Raises TrainingStopped if the budget is spent."""
        if self._limit is not None and self.spent > self._limit:
            raise TrainingStopped(
                f"judges have cost {self.spent:.4g}, more than reward_model.budget={self._limit:g}: raise it, and the same "
                "command goes on from the last checkpoint"
            )


def equal_group_metrics(batch: DataProto) -> dict[str, float]:
    """`rollout/equal_groups_share`: of the groups (same `uid`) of two or more rollouts, the share whose rewards are all
    equal (see `equal_scores`); a group-relative estimator learns nothing from them. Reads `token_level_scores` and
    `response_mask` (batch, response_len)."""
    assert batch.batch is not None
    if "token_level_scores" not in batch.batch.keys() or "uid" not in batch.non_tensor_batch:  # noqa: SIM118
        return {}
    main = batch.batch.get("main_sequence", None)
    rows = batch.batch["response_mask"].bool().any(-1) & (True if main is None else main.bool())
    totals, groups = batch.batch["token_level_scores"].double().sum(-1), defaultdict[object, list[int]](list)
    for row in rows.nonzero().flatten().tolist():
        groups[batch.non_tensor_batch["uid"][row]].append(row)
    equal = [equal_scores(totals[group]) for group in groups.values() if len(group) > 1]
    return {"rollout/equal_groups_share": sum(equal) / len(equal)} if equal else {}


def reward_components(rewards: Rewards, tool_weight: float = 1.0, score_weight: float = 1.0) -> dict[str, float]:
    """The weighted parts of a total reward: `step/{source}`, `final/{tool}` and `score`, or `score/{label}` for each of
    several scoring functions."""
    parts: dict[str, float] = defaultdict(float)
    for _, source, value in rewards.steps:
        parts[f"step/{source}"] += tool_weight * value
    for tool, value in rewards.final.items():
        parts[f"final/{tool}"] += tool_weight * value
    own = rewards.score_info.get(COMPONENTS)
    if isinstance(own, Mapping):
        for name, value in own.items():
            parts[f"score/{name}"] += score_weight * value
    elif rewards.score is not None:
        parts["score"] += score_weight * rewards.score
    return parts


def component_metrics(
    rewards: Sequence[Rewards], tool_weight: float = 1.0, score_weight: float = 1.0
) -> dict[str, float]:
    """`reward/score/{label}/mean`: the unweighted mean of each of several scoring functions. `reward/spread/{component}`: a
    component's share of the variance of the total reward, Cov(component, total) / Var(total), if two or more components
    vary. The shares sum to 1; a component near 1 dominates training."""
    metrics: dict[str, float] = {}
    labels = dict.fromkeys(name for each in rewards for name in each.score_info.get(COMPONENTS) or ())
    for label in labels:
        values = [each.score_info[label] for each in rewards if label in each.score_info]
        metrics[f"reward/score/{label}/mean"] = float(np.mean(values))
    parts = [reward_components(each, tool_weight, score_weight) for each in rewards]
    columns = {
        name: np.array([part.get(name, 0.0) for part in parts]) for name in dict.fromkeys(n for p in parts for n in p)
    }
    varying = {name: column for name, column in columns.items() if np.ptp(column) > 0}
    total = np.sum([*varying.values()], axis=0)
    if len(varying) < 2 or not np.var(total) > 0:
        return metrics
    for name, column in varying.items():
        covariance = np.mean((column - column.mean()) * (total - total.mean()))
        metrics[f"reward/spread/{name}"] = float(covariance / np.var(total))
    return metrics
