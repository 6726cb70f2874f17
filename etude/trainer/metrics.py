"""Metrics of a step: named scalars computed from its data.

Invariant: metric functions are pure; a padding row (`response_mask` all zero) changes no metric, a metric without data is
absent, and metric names are built from the configuration, a tool's code, an agent's requests or fixed words, never from
model output.

Names shared with other frameworks have the same meaning here. Loss and gradient metrics are named where they are computed.
"""

from __future__ import annotations

import logging
import math
import re
import resource
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from shlex import quote
from statistics import fmean
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from etude.algorithms import rollout_mismatch
from etude.errors import TrainingStopped, plural
from etude.metrics import finish_metrics
from etude.run_folder import (
    CONFIG_FILE,
    VALIDATION_CHANGED,
    always_paid,
    chooses_rows,
    metrics_of,
    read_config,
    read_run_record,
    reward_trend,
    role_rewards,
    since_change,
    tell_trend,
    unit_costs,
)
from etude.trainer.learning_signal import component_metrics
from etude.trajectory import Rewards, StopReason, ToolCallRecord, Trajectory

if TYPE_CHECKING:
    from etude.distributed.usage import Usage
    from etude.protocol import DataProto

logger = logging.getLogger(__name__)

Metrics = dict[str, float]

DROPPED = (StopReason.INFRASTRUCTURE, StopReason.CANCELLED)  # infrastructure failed, or that of others
DATA_COLUMNS = (  # that `data_metrics` reads
    *("uid", "main_sequence", "role", "attention_mask", "response_mask", "token_level_scores", "token_level_rewards"),
    *("advantages", "returns", "values", "old_log_probs", "rollout_log_probs"),
)
_OF_AGENTS = ("agent", "unanswered")  # the agent ran the call: nobody knows for how long
_NOT_A_TOOL = ("unknown_tool", "malformed", "not_executed")  # no tool ran: the model may have made up the name
_MAX_OWN_METRICS = 32  # per tool: its author chooses the names; the limit keeps a step's metrics readable
_CLEAR_CHANGE = 0.05  # of success
_FEW = 4  # steps, below which nothing is said of the reward's course
_SUCCESS, _MOSTLY = "reward/success/mean", 0.9  # from which on little is left to gain
_METRIC_NAME = re.compile(r"[A-Za-z0-9_.@-]{1,64}")


def _mean_max_min(name: str, values: torch.Tensor | Sequence[float]) -> Metrics:
    """`{name}/mean|max|min`; empty without values."""
    flat = torch.as_tensor(values, dtype=torch.float64).flatten()
    if flat.numel() == 0:
        return {}
    return {f"{name}/mean": flat.mean().item(), f"{name}/max": flat.max().item(), f"{name}/min": flat.min().item()}


def data_metrics(
    batch: DataProto, max_response_length: int | None = None, longest_sequence: int | None = None
) -> Metrics:
    """Scores, rewards, advantages, returns, values and lengths of a training batch.

    Args:
        batch: columns `response_mask`, `attention_mask` (batch, prompt_len + response_len) and any of
            `token_level_scores, token_level_rewards, advantages, returns, values, old_log_probs, rollout_log_probs`
            (batch, response_len).
        max_response_length: length from which `response_length/clip_ratio` counts a response as clipped; default: the
            columns' width.
        longest_sequence: the same for prompt plus response; None: no such limit.

    `critic/score` and `critic/rewards` are sums per rollout (the latter, with meta_info `episodes`, over its main sequence,
    which comes to the same); token columns are restricted to `response_mask`. The actor's log-probs are compared with the
    engine's, unless meta_info `compare_rollout` leaves that to an update. `response_length` counts all tokens after the
    prompt, tool responses included. If a rollout has several rows (column `main_sequence`), lengths and token columns
    count all rows.
    """
    assert batch.batch is not None
    columns = dict(batch.batch.items())
    valid = columns["response_mask"].bool().any(-1)
    mask = columns["response_mask"].bool()[valid]
    rollouts = valid & columns["main_sequence"].bool() if "main_sequence" in columns else valid
    metrics: Metrics = {}
    for name, key in (("score", "token_level_scores"), ("rewards", "token_level_rewards")):
        if key in columns:
            totals = columns[key].double().sum(-1)
            if "main_sequence" in columns and not (name == "rewards" and batch.meta_info.get("episodes")):
                number = columns["main_sequence"].cumsum(0) - 1
                if (roles := batch.non_tensor_batch.get("role")) is not None:  # others have rewards of their own
                    of_main = roles[columns["main_sequence"].bool().numpy()][number.numpy()]
                    totals = totals * torch.from_numpy((roles == of_main).astype(float))
                totals = torch.zeros_like(totals).index_add(0, number, totals)[number]
            metrics |= _mean_max_min(f"critic/{name}", totals[rollouts])
    for name in ("advantages", "returns", "values"):
        if name in columns:
            metrics |= _mean_max_min(f"critic/{name}", columns[name][valid][mask])
    if {"values", "returns"} <= columns.keys() and mask.any():
        values, returns = (columns[name][valid][mask].double() for name in ("values", "returns"))
        residual, spread = (part.var(unbiased=False) for part in (returns - values, returns))
        rounding = 1e-12 * (returns.square() + values.square()).mean()
        if spread > rounding:  # of equal returns there is nothing to explain
            metrics["critic/vf_explained_var"] = (1.0 - residual / spread).item()
    if {"old_log_probs", "rollout_log_probs"} <= columns.keys() and not batch.meta_info.get("compare_rollout"):
        found = rollout_mismatch(columns["old_log_probs"], columns["rollout_log_probs"], columns["response_mask"])
        metrics |= finish_metrics(found)
    attended, width = columns["attention_mask"][valid], mask.shape[-1]
    prompt, response = (part.sum(-1) for part in attended.tensor_split([attended.shape[-1] - width], dim=-1))
    metrics |= _mean_max_min("response_length", response) | _mean_max_min("prompt_length", prompt)
    if response.numel():
        clipped = response >= (width if max_response_length is None else max_response_length)
        if longest_sequence is not None:
            clipped |= prompt + response >= longest_sequence
        metrics["response_length/clip_ratio"] = clipped.double().mean().item()
    return metrics


def tool_metrics(trajectories: Sequence[Trajectory], broken_calls: Sequence[ToolCallRecord] = ()) -> Metrics:
    """Metrics of tool calls, turns and stop reasons.

    `tool/<name>/{calls,errors,timeouts}` count all calls, failed ones and timeouts; they include `broken_calls`, which ended
    trajectories that were discarded. Latencies are the seconds a trajectory waited, over executed calls (not those with
    invalid arguments, nor those that a gateway's agent ran). `tool/<name>/reward` is the tool's mean reward over
    trajectories that called it or were scored by it;
    `retries`, `cache_hits`, `faults`, `blocked_loop` and `cut` are counts, and `metrics/<key>` are means of numbers that the
    tool returned; each is absent without data. Rates, `num_turns` and `tool_call_counts` are over trajectories that were not
    dropped; stop reasons are over all.
    """
    calls = [call for trajectory in trajectories for call in trajectory.tool_calls]
    groups: dict[str, list[ToolCallRecord]] = defaultdict(list)
    for call in (*calls, *broken_calls):
        if call.error not in _NOT_A_TOOL:
            groups[call.name].append(call)
    metrics: Metrics = {}
    for name, group in sorted(groups.items()):
        metrics |= _call_metrics(name, group)
    if not trajectories:
        return metrics
    kept = [trajectory for trajectory in trajectories if trajectory.stop_reason not in DROPPED]
    metrics |= _tool_rewards(kept)
    metrics |= _mean_max_min("num_turns", [trajectory.num_turns for trajectory in kept])
    metrics |= _mean_max_min("tool_call_counts", [len(trajectory.tool_calls) for trajectory in kept])
    if kept:
        metrics["rollout/tool_use_rate"] = sum(map(used_tool, kept)) / len(kept)
    metrics["rollout/malformed_calls"] = sum(call.error == "malformed" for call in calls)
    metrics["rollout/calls_not_executed"] = sum(call.error == "not_executed" for call in calls)
    metrics["rollout/unknown_tool_calls"] = sum(call.error == "unknown_tool" for call in calls)
    for reason, count in Counter(trajectory.stop_reason for trajectory in trajectories).items():
        metrics[f"rollout/stop_reason/{reason.value}"] = count / len(trajectories)
    return metrics


def used_tool(trajectory: Trajectory) -> bool:
    """Whether one of its calls worked: of those that a gateway's agent ran, one that it answered."""
    return any(call.error is None and call.source != "unanswered" for call in trajectory.tool_calls)


def _call_metrics(name: str, calls: Sequence[ToolCallRecord]) -> Metrics:
    metrics: Metrics = {
        f"tool/{name}/calls": len(calls),
        f"tool/{name}/errors": sum(call.error is not None for call in calls),
        f"tool/{name}/timeouts": sum(max(call.timeouts, int(call.error == "timeout")) for call in calls),
    }
    counts = {
        "retries": sum(call.retries for call in calls),
        "cache_hits": sum(call.source in ("cache", "shared") for call in calls),
        "faults": sum(call.source == "fault" for call in calls),
        "infrastructure": sum(call.error in ("timeout", "infrastructure") for call in calls),
        "blocked_loop": sum(call.blocked_loop for call in calls),
        "cut": sum(call.cut for call in calls),
    }
    metrics |= {f"tool/{name}/{what}": count for what, count in counts.items() if count}
    waited = [call.seconds for call in calls if call.error != "invalid_arguments" and call.source not in _OF_AGENTS]
    if waited:
        p50, p95 = np.percentile(waited, (50, 95))
        metrics |= {f"tool/{name}/latency_p50": float(p50), f"tool/{name}/latency_p95": float(p95)}
    own = _own_metrics(call.metrics for call in calls)
    return metrics | {f"tool/{name}/metrics/{key}": mean for key, mean in own.items()}


def _own_metrics(reported: Iterable[Mapping[str, object]]) -> Metrics:
    """Means of the finite numbers among what a tool or environment reported, for at most `_MAX_OWN_METRICS` names."""
    values: dict[str, list[float]] = {}
    for metrics in reported:
        for key, value in metrics.items():
            if not isinstance(value, (bool, int, float)) or not math.isfinite(value):
                continue
            if key in values or (len(values) < _MAX_OWN_METRICS and _METRIC_NAME.fullmatch(key)):
                values.setdefault(key, []).append(float(value))
    return {key: float(np.mean(given)) for key, given in sorted(values.items())}


def _tool_rewards(trajectories: Sequence[Trajectory]) -> Metrics:
    """Of tools, and of at most `_MAX_OWN_METRICS` other names: an agent calls the rewards that it posts as it likes."""
    given: dict[str, list[float]] = defaultdict(list)
    tools = set[str]()
    for trajectory in trajectories:
        totals = {call.name: 0.0 for call in trajectory.tool_calls if call.error not in _NOT_A_TOOL}
        tools |= totals.keys() | trajectory.rewards.final.keys()
        for _, name, value in trajectory.rewards.steps:
            totals[name] = totals.get(name, 0.0) + value
        for name, value in trajectory.rewards.final.items():
            totals[name] = totals.get(name, 0.0) + value
        for name, total in totals.items():
            given[name].append(total)
    shown = [*sorted(tools), *[name for name in given if name not in tools][:_MAX_OWN_METRICS]]
    return {f"tool/{name}/reward": float(np.mean(given[name])) for name in shown}


def is_success(rewards: Rewards, tool_weight: float = 1.0, score_weight: float = 1.0) -> bool:
    """See `Rewards.succeeded`."""
    return rewards.succeeded(rewards.total(tool_weight, score_weight))


def reward_source_metrics(
    trajectories: Sequence[Trajectory], tool_weight: float = 1.0, score_weight: float = 1.0
) -> Metrics:
    """`reward/{step,final,score,total,success}/mean` over trajectories that were not dropped.

    `step` and `final` are unweighted sums per trajectory, `total` is the weighted total; `score` is present only if a reward
    manager ran. Includes `signal.component_metrics`.
    """
    rewards = [trajectory.rewards for trajectory in trajectories if trajectory.stop_reason not in DROPPED]
    if not rewards:
        return {}
    scores = [reward.score for reward in rewards if reward.score is not None]
    sources: dict[str, Sequence[float]] = {
        "step": [sum(value for _, _, value in reward.steps) for reward in rewards],
        "final": [sum(reward.final.values()) for reward in rewards],
        "score": scores,
        "total": [reward.total(tool_weight, score_weight) for reward in rewards],
        "success": [is_success(reward, tool_weight, score_weight) for reward in rewards],
    }
    means = {f"reward/{name}/mean": float(np.mean(values)) for name, values in sources.items() if values}
    return means | component_metrics(rewards, tool_weight, score_weight)


def environment_metrics(
    trajectories: Sequence[Trajectory], tool_weight: float = 1.0, score_weight: float = 1.0
) -> Metrics:
    """`env/<name>/…` for each environment, over its trajectories that were not dropped: their number (`episodes`), the means
    of total reward, success and turns, and of each number that its steps reported (`metrics/<key>`)."""
    groups: dict[str, list[Trajectory]] = defaultdict(list)
    for trajectory in trajectories:
        if (named := trajectory.extra_fields.get("environment")) and trajectory.stop_reason not in DROPPED:
            groups[named["name"]].append(trajectory)
    metrics: Metrics = {}
    for name, group in sorted(groups.items()):
        means = {
            "reward/mean": [each.rewards.total(tool_weight, score_weight) for each in group],
            "success/mean": [float(is_success(each.rewards, tool_weight, score_weight)) for each in group],
            "num_turns/mean": [float(each.num_turns) for each in group],
        }
        metrics[f"env/{name}/episodes"] = len(group)
        metrics |= {f"env/{name}/{what}": float(np.mean(values)) for what, values in means.items()}
        own = _own_metrics(each.extra_fields["environment"]["metrics"] for each in group)
        metrics |= {f"env/{name}/metrics/{key}": mean for key, mean in own.items()}
    return metrics


class Timings:
    """Measures wall-clock seconds by name, in `seconds`."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = defaultdict(float)

    @contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        """Adds the seconds of a `with` block."""
        started = time.perf_counter()
        try:
            yield
        finally:
            self.seconds[name] += time.perf_counter() - started


class CostMeter:
    """Measures what each step costs, over all processes of a run."""

    def __init__(self, usage: Callable[[], Usage]) -> None:
        self._usage, self._last, self._began = usage, usage(), time.perf_counter()

    def measure(self) -> Metrics:
        """Returns `perf/cpu_seconds`, `perf/gpu_seconds` (GPUs held × seconds) and `perf/joules` since the last call or
        construction; the latter two only where there are GPUs and counters of energy."""
        now, usage = time.perf_counter(), self._usage()
        metrics = {"perf/cpu_seconds": max(usage.total - self._last.total, 0.0)}
        if usage.gpus:
            metrics["perf/gpu_seconds"] = len(usage.gpus) * (now - self._began)
        if (joules := usage.joules_since(self._last)) is not None:
            metrics["perf/joules"] = joules
        self._last, self._began = usage, now
        return metrics


def find_disappointments(run_dir: Path) -> Iterator[str]:
    """Says that a run's last validation was clearly worse than an earlier one, and that its answers did not become better,
    both since what they depend on last changed; nothing without a `metrics.jsonl`."""
    facts, records = read_run_record(run_dir), metrics_of(run_dir)
    steps = since_change(records, facts)
    if steps and role_rewards(steps[-1]):
        return  # a role's loss is another's gain
    whole = [each for each in since_change(records, facts, VALIDATION_CHANGED) if not each.get("val/rollout/dropped")]
    yield from _tell_fall(whole)
    but, validated = "", _validated(whole, "success")
    if validated and validated[-1][0] - validated[0][0] >= _CLEAR_CHANGE:
        (first, early), (last, late) = validated[0], validated[-1]
        but = f", while success of the validation rose from {first:.3f} after step {early} to {last:.3f} after step {late}"
    successes = [each[_SUCCESS] for each in steps if each["step"] > 0 and isinstance(each.get(_SUCCESS), float)]
    why = f"`etude report {quote(str(run_dir))} --why` says what stood in the way, with examples"
    if (always := always_paid(steps)) is not None:
        first, paid = always
        yield f"every answer earned {paid:.3g} from step {first} on; {why}"
    elif chooses_rows(read_config(run_dir) if (run_dir / CONFIG_FILE).is_file() else {}):
        if successes and not any(successes):
            yield f"no answer of {plural(len(successes), 'training step')} succeeded{but}; {why}"
    elif (trend := reward_trend(steps)) is None:
        rewards = [each["reward/total/mean"] for each in steps if each["step"] > 0 and "reward/total/mean" in each]
        if successes and rewards and rewards[-1] <= rewards[0]:
            if not any(successes):
                yield f"no answer of {plural(len(successes), 'training step')} succeeded{but}; {why}"
            elif len(rewards) >= _FEW and fmean(successes) < _MOSTLY:
                yield (
                    f"the reward did not rise: {rewards[0]:.3g} in the first of {len(rewards)} steps, {rewards[-1]:.3g} in "
                    f"the last, which is few to tell{but}; {why}"
                )
    else:
        rose, *_, half = trend
        if not rose and fmean(successes[-half:] or [0.0]) < _MOSTLY:
            yield f"{tell_trend(*trend)}{but}; {why}"


def _tell_fall(whole: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """That a validation's success is clearly lower than it was, by a twentieth; or, where it never was above 0, its reward,
    by a tenth of its largest. `whole` are without validations that lost answers: what is left are other questions."""
    what, told, clear = "success", _validated(whole, "success"), _CLEAR_CHANGE
    if not any(value for value, _ in told):
        what, told = "the reward", _validated(whole, "total")
        clear = max([2 * _CLEAR_CHANGE * abs(value) for value, _ in told] + [1e-9])
    if not told:
        return
    (best, early), (last, late) = max(told), told[-1]
    if best - last >= clear:
        yield (
            f"{what} of the validation fell: {best:.3f} after step {early}, {last:.3f} after step {late}; a lower "
            "actor.optim.lr, or one that decays (lr_scheduler_type=linear), forgets less; save_freq keeps more weights"
        )


def _validated(records: Iterable[Mapping[str, Any]], kind: str) -> list[tuple[float, int]]:
    """The mean of a kind of a validation's reward, and its step, of those that measured it."""
    name = f"val/reward/{kind}/mean"
    return [(record[name], record["step"]) for record in records if isinstance(record.get(name), float)]


def gain_costs(run_dir: Path, record: Metrics, step: int) -> Metrics:
    """`perf/<cost>_per_point`: what a point of success has cost up to `step`, whose metrics are `record` (see `unit_costs`).
    Earlier steps come from `metrics.jsonl`, if the run writes it."""
    records = [*metrics_of(run_dir), {"step": step, **record}]
    costs = unit_costs(records, read_run_record(run_dir)).get("point of success", {})
    return {f"perf/{name}_per_point": value for name, value in costs.items()}


def timing_metrics(timings: Mapping[str, float], num_tokens: int, response_tokens: int) -> Metrics:
    """Timings and throughput of a step.

    Args:
        timings: seconds by activity; `step` is the whole step (default: the sum of the others).
        num_tokens: prompt and response tokens that the step processed.
        response_tokens: response tokens, tool responses included; `timing_per_token_ms/gen` is per response token.

    `perf/throughput` is in tokens per second, `perf/cpu_memory_used_gb` is this process's resident memory in GiB.
    """
    total = timings.get("step", sum(timings.values()))
    metrics: Metrics = {f"timing_s/{name}": seconds for name, seconds in timings.items()}
    metrics |= {"perf/total_num_tokens": num_tokens, "perf/time_per_step": total}
    metrics["perf/cpu_memory_used_gb"] = _resident_bytes() / 2**30
    for name, seconds in timings.items():
        per = response_tokens if name == "gen" else num_tokens
        if per > 0:
            metrics[f"timing_per_token_ms/{name}"] = 1000.0 * seconds / per
    if total > 0:
        metrics["perf/throughput"] = num_tokens / total
    return metrics


def _resident_bytes() -> int:
    statm = Path("/proc/self/statm")
    if statm.exists():
        return int(statm.read_text().split()[1]) * resource.getpagesize()
    unit = 1 if sys.platform == "darwin" else 1024  # falls back to the peak: the current size is not available
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


_MAX_FAILING = 2  # consecutive training steps above trainer.max_infra_failure_share


class SkippedSteps:
    """Stops a run that no longer learns: in `limit` consecutive training steps all gradients of a model were non-finite, or
    in `_MAX_FAILING` more than `failure_share` of the rollouts had an infrastructure failure."""

    def __init__(self, limit: int, failure_share: float | None = None) -> None:
        self._limit, self._failure_share = limit, failure_share
        self._in_a_row = self._failing = 0

    def note(self, metrics: Metrics) -> None:
        """Updates the counts from a training step's metrics; a step without an update does not count for gradients.

        Raises:
            TrainingStopped: a limit was reached.
        """
        self._note_failures(metrics.get("rollout/infrastructure_failure_share", 0.0))
        taken = {name.partition("/")[0]: count for name, count in metrics.items() if name.endswith("/optimizer_steps")}
        if not any(taken.values()):
            return
        skipped = [role for role, count in taken.items() if count and metrics[f"{role}/skipped_steps"] >= count]
        skipped = ["policy" if role in ("sft", "dpo") else role for role in skipped]
        self._in_a_row = self._in_a_row + 1 if skipped else 0
        if self._in_a_row >= self._limit:
            raise TrainingStopped(
                f"the gradients of the {' and the '.join(skipped)} were not finite in the last {self._in_a_row} training "
                "steps (trainer.max_skipped_steps), and nothing was learned; look at rewards, rates and model.dtype"
            )

    def _note_failures(self, share: float) -> None:
        self._failing = self._failing + 1 if self._failure_share is not None and share > self._failure_share else 0
        if not self._failing:
            return
        met = f"{100 * share:.0f} % of rollouts met an infrastructure failure (trainer.max_infra_failure_share)"
        if self._failing >= _MAX_FAILING:
            raise TrainingStopped(
                f"{met}, in {self._failing} training steps in a row; look at the tools and the scorer"
            )
        logger.warning("%s; after another such step the run stops, with a checkpoint", met)
