"""`etude scale RUN_DIR`: predicts a run's speed on other numbers of ranks, from the files in its folder.

The rollout dumps give the lengths of turns and the latencies of tools and scoring (whole trajectories are drawn, so that
long turns and slow tools stay correlated); `metrics.jsonl` gives the cost of an engine step, of a trained token and of a
weight sync. A rank has the hardware of that run's.

An engine takes t₀ + t₁·b seconds to decode one token for each of b running sequences, and t₂ seconds per prefilled token,
during which decoding stalls. Training takes c₀ + c₁·tokens/ranks, plus a ring all-reduce of the gradients,
2·bytes·(ranks-1)/ranks / bandwidth. A weight sync takes its measured time, plus bytes / bandwidth.

A synchronous step is the sum of its parts, and waits for the slowest engine. Where staleness is allowed, 1 + ⌈staleness / 2⌉
batches are in flight, and a step takes as long as the slower of rolling out a batch and training on one. Not modelled:
memory, failures, network contention, groups that wait for a step because they would be too stale
(`benchmarks/cluster_simulator.py` models those), and driver time beyond what the run measured.
"""

from __future__ import annotations

import heapq
import itertools
import math
import random
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import click
import numpy as np

from etude.dumps import list_dump_steps, read_rollouts
from etude.errors import DataError
from etude.run_folder import CONFIG_FILE, METRICS_FILE, read_metrics

_TRAINING = ("old_log_prob", "ref", "teacher", "values", "update_critic", "update_actor")
_ENGINE = ("prefill", "decode", "sampling", "scheduling")
_MAX_DUMPS = 50  # dumps read: those of the last steps
_SPLITS = 8  # with separate ranks, 1/8 to 7/8 of them are tried as trainers


class Turn(NamedTuple):
    """One turn: tokens prefilled, tokens sampled, seconds until its tool calls return."""

    prefilled: int
    sampled: int
    tools: float


class Trajectory(NamedTuple):
    """A rollout as simulated; `scoring` is in seconds."""

    turns: tuple[Turn, ...]
    scoring: float

    @property
    def tokens(self) -> int:
        """Number of prompt and response tokens."""
        return sum(turn.prefilled + turn.sampled for turn in self.turns)


@dataclass(frozen=True)
class Costs:
    """Costs in seconds: an engine step (`step`, plus `row` per sequence in it), a prefilled token, a training step (`train`,
    plus `token` per token on one rank), a weight sync, and the rest of a step on the driver. `weights` and `gradients` are
    in bytes, `bandwidth` is in bytes per second between two ranks (None: transfers are free)."""

    step: float
    row: float
    prefill: float
    train: float
    token: float
    sync: float
    driver: float
    weights: float = 0.0
    gradients: float = 0.0
    bandwidth: float | None = None

    def slowed(self, factor: float) -> Costs:
        """Scales the compute costs by `factor`, for ranks that share processors."""
        names = ("step", "row", "prefill", "train", "token")
        return replace(self, **{name: factor * getattr(self, name) for name in names})

    def training(self, tokens: float, ranks: int) -> float:
        """Seconds to train on `tokens` divided evenly among `ranks`."""
        reduced = 2 * self.gradients * (ranks - 1) / ranks / self.bandwidth if self.bandwidth else 0.0
        return self.train + self.token * tokens / ranks + reduced

    def syncing(self) -> float:
        """Seconds to send the weights to the engines."""
        return self.sync + (self.weights / self.bandwidth if self.bandwidth else 0.0)


@dataclass(frozen=True)
class Measured:
    """Measurements of a run: costs, trajectories to sample from, and batch size."""

    costs: Costs
    trajectories: Sequence[Trajectory]
    prompts: int
    n: int
    slots: int


@dataclass(frozen=True)
class Placement:
    """How many ranks train and how many roll out; if `colocated`, the same ranks alternate between both."""

    trains: int
    rolls_out: int
    colocated: bool
    staleness: int = 0


@dataclass(frozen=True)
class Prediction:
    """Predicted speed of a placement: seconds per step, rollouts per second, and utilization of engines and trainers."""

    placement: Placement
    step_seconds: float
    samples_per_second: float
    engines_busy: float
    trainers_busy: float


# -- measuring a run -----------------------------------------------------------------------------------------------------


def measure(run_dir: Path | str, rollouts: Path | str | None = None) -> Measured:
    """Reads the measurements of the run in `run_dir`.

    Args:
        rollouts: its dump folder; defaults to RUN_DIR/rollouts.

    Raises:
        DataError: there are no dumps, or metrics of fewer than 3 training steps.
    """
    from omegaconf import OmegaConf

    run_dir = Path(run_dir)
    records = [record for record in read_metrics(run_dir / METRICS_FILE) if "timing_s/gen" in record]
    if len(records) < 3:
        raise DataError(f"{run_dir / METRICS_FILE}: {len(records)} training steps; a fit of costs needs at least 3")
    config: Any = OmegaConf.load(run_dir / CONFIG_FILE)
    rollout = config.actor_rollout_ref.rollout
    folder = Path(rollouts or run_dir / "rollouts")
    dumps = list_dump_steps(folder)[-_MAX_DUMPS:]
    drawn = [_trajectory(record) for step in dumps for record in read_rollouts(folder / f"{step}.jsonl")]
    if not any(trajectory.turns for trajectory in drawn):
        raise DataError(
            f"no rollouts in {folder}: run with trainer.rollout_data_dir={run_dir / 'rollouts'}, or name theirs"
        )
    return Measured(
        fit_costs(records[1:]),  # without the first step, which compiles, allocates and warms up caches
        [trajectory for trajectory in drawn if trajectory.turns],
        prompts=int(config.data.train_batch_size),
        n=int(rollout.n),
        slots=int(rollout.max_num_seqs),
    )


def fit_costs(records: Sequence[dict[str, Any]]) -> Costs:
    """Fits the costs to training steps by non-negative least squares."""

    def column(*names: str) -> np.ndarray:
        return np.array([sum(float(record.get(name) or 0.0) for name in names) for record in records])

    engine = column(*(f"engine/seconds_{part}" for part in _ENGINE))
    if not engine.any():  # a remote engine does not report its own timings: use the wall time of generation
        engine = column("timing_s/gen")
    steps, sampled, prefilled = (column(f"engine/{name}") for name in ("steps", "sampled_tokens", "prefilled_tokens"))
    step, row, prefill = _nonnegative_fit([steps, sampled, prefilled], engine)
    trained, tokens = column(*(f"timing_s/{part}" for part in _TRAINING)), column("perf/total_num_tokens")
    train, token = _nonnegative_fit([np.ones(len(records)), tokens], trained)
    sync = column("timing_s/update_weights")
    rest = column("timing_s/step") - column("timing_s/gen") - trained - sync
    return Costs(step, row, prefill, train, token, float(np.median(sync)), max(0.0, float(np.median(rest))))


def _nonnegative_fit(features: Sequence[np.ndarray], target: np.ndarray) -> list[float]:
    """Non-negative least squares, by trying every subset of the few features."""
    best, error = [0.0] * len(features), float((target**2).sum())
    for size in range(1, len(features) + 1):
        for chosen in itertools.combinations(range(len(features)), size):
            matrix = np.stack([features[i] for i in chosen], axis=1)
            coefficients = np.linalg.lstsq(matrix, target, rcond=None)[0]
            residual = float(((matrix @ coefficients - target) ** 2).sum())
            if (coefficients >= 0).all() and residual < error * (1 - 1e-9):
                best, error = [0.0] * len(features), residual
                for i, value in zip(chosen, coefficients.tolist()):
                    best[i] = value
    return best


def _trajectory(record: dict[str, Any]) -> Trajectory:
    """Parses a dumped record. The calls of a turn run concurrently, so its tool time is that of the slowest call."""
    tools: dict[int, float] = {}
    for call in record["tool_calls"]:
        tools[call["turn"]] = max(tools.get(call["turn"], 0.0), float(call["seconds"]))
    turns: list[Turn] = []
    prefilled, sampled, turn = len(record["prompt_ids"]), 0, 0
    for segment in record["segments"]:
        if segment["provenance"] != "sampled":
            if sampled:
                turns.append(Turn(prefilled, sampled, tools.get(turn, 0.0)))
                prefilled, sampled = 0, 0
            prefilled += len(segment["token_ids"])
        else:
            sampled, turn = sampled + len(segment["token_ids"]), segment["turn"]
    if sampled:
        turns.append(Turn(prefilled, sampled, tools.get(turn, 0.0)))
    return Trajectory(tuple(turns), float(record["timings"].get("compute_score", 0.0)))


def with_tools(measured: Measured, seconds: float) -> Measured:
    """Scales tool latencies so that turns with tool calls wait `seconds` on average.

    Raises:
        DataError: no turn of the run waited for a tool.
    """
    waits = [turn.tools for trajectory in measured.trajectories for turn in trajectory.turns if turn.tools]
    if not waits:
        raise DataError("no tool was called in the dumps that were read: there is no latency to scale")
    factor = seconds / float(np.mean(waits))
    slowed = [
        trajectory._replace(turns=tuple(turn._replace(tools=turn.tools * factor) for turn in trajectory.turns))
        for trajectory in measured.trajectories
    ]
    return replace(measured, trajectories=slowed)


# -- predicting ----------------------------------------------------------------------------------------------------------


def roll_out(costs: Costs, trajectories: Sequence[Trajectory], slots: int, in_flight: int) -> tuple[float, float]:
    """Runs `trajectories` through one engine, at most `in_flight` at a time; returns (seconds until the last is scored,
    seconds that the engine was busy)."""
    order, waiting = itertools.count(), deque(trajectories)
    ready: list[tuple[float, int, Trajectory, int]] = []  # heap of (time at which a turn may start, …, its number)
    running: list[tuple[float, int, Trajectory, int]] = []  # heap of (`decoded` at the turn's end, …)
    queue: deque[tuple[Trajectory, int]] = deque()
    now = end = busy = decoded = 0.0  # `decoded`: tokens of a sequence that runs from the start
    alive = 0
    while True:
        while waiting and alive < in_flight:
            alive += 1
            queue.append((waiting.popleft(), 0))
        while ready and ready[0][0] <= now:
            queue.append(heapq.heappop(ready)[2:])
        while queue and len(running) < slots:
            trajectory, number = queue.popleft()
            turn = trajectory.turns[number]
            now, busy = now + turn.prefilled * costs.prefill, busy + turn.prefilled * costs.prefill
            heapq.heappush(running, (decoded + turn.sampled, next(order), trajectory, number))
        if not running:
            if not ready:
                return max(end, now), busy
            now = ready[0][0]
            continue
        pace = costs.step + costs.row * len(running)
        left = running[0][0] - decoded
        tokens = min(left, max(ready[0][0] - now, 0.0) / pace) if ready and pace else left
        now, busy, decoded = now + tokens * pace, busy + tokens * pace, decoded + tokens
        while running and running[0][0] <= decoded + 1e-6:
            _, _, trajectory, number = heapq.heappop(running)
            after = now + trajectory.turns[number].tools
            if number + 1 < len(trajectory.turns):
                heapq.heappush(ready, (after, next(order), trajectory, number + 1))
            else:
                alive, end = alive - 1, max(end, after + trajectory.scoring)


def predict(measured: Measured, placement: Placement, *, steps: int = 6, seed: int = 0) -> Prediction:
    """Predicts the speed of a placement from `steps` batches.

    Raises:
        ValueError: `steps` is below 1, or no rank trains or rolls out.
    """
    if min(steps, placement.trains, placement.rolls_out) < 1:
        raise ValueError(f"at least 1 step, and 1 rank of each kind: {steps} steps, {placement}")
    costs, draw = measured.costs, random.Random(seed)
    batch = measured.prompts * measured.n
    drawn = [draw.choices(measured.trajectories, k=batch) for _ in range(steps)]
    training = costs.training(sum(each.tokens for part in drawn for each in part) / steps, placement.trains)
    after = training + costs.driver + costs.syncing()
    # whole groups, as the trainer divides a batch
    share = math.ceil(measured.prompts / placement.rolls_out) * measured.n
    if not placement.staleness:
        chunks = [[part[at : at + share] for at in range(0, batch, share)] for part in drawn]
        runs = [[roll_out(costs, chunk, measured.slots, share) for chunk in part] for part in chunks]
        generation = sum(max(seconds for seconds, _ in part) for part in runs) / steps
        busy = sum(busy for part in runs for _, busy in part) / steps / placement.rolls_out
        seconds = generation + after
    else:
        mine = list(itertools.chain.from_iterable(drawn))[:: placement.rolls_out]
        in_flight = math.ceil((1 + math.ceil(placement.staleness / 2)) * batch / placement.rolls_out)
        whole, worked = roll_out(costs, mine, measured.slots, in_flight)
        generation, busy = whole / steps + costs.syncing(), worked / steps
        seconds = max(generation, after)
    return Prediction(placement, seconds, batch / seconds, busy / seconds, training / seconds)


def placements(ranks: int, staleness: int) -> Iterator[Placement]:
    """Yields the placements to try: colocated for staleness 0, otherwise separate ranks in several proportions."""
    if not staleness:
        yield Placement(ranks, ranks, colocated=True)
    else:
        for trains in sorted({max(1, ranks * share // _SPLITS) for share in range(1, _SPLITS)}):
            if trains < ranks:
                yield Placement(trains, ranks - trains, colocated=False, staleness=staleness)


def recommend(measured: Measured, ranks: int, staleness: int, *, steps: int = 6) -> Prediction | None:
    """Returns the fastest placement of `ranks`; None if there is none (one rank cannot be split for asynchronous runs)."""
    predictions = [predict(measured, placement, steps=steps) for placement in placements(ranks, staleness)]
    return max(predictions, key=lambda prediction: prediction.samples_per_second, default=None)


@click.command()
@click.argument("run_dir", type=click.Path(path_type=Path))
@click.option("--ranks", default="1,2,4,8", show_default=True, help="Numbers of ranks, comma-separated.")
@click.option("--staleness", default="0,1,4", show_default=True, help="Values of trainer.max_staleness to compare.")
@click.option("--prompts", type=click.IntRange(1), help="data.train_batch_size; default the run's.")
@click.option("--n", type=click.IntRange(1), help="Rollouts per prompt; default the run's.")
@click.option("--slots", type=click.IntRange(1), help="rollout.max_num_seqs; default the run's.")
@click.option(
    "--slower", type=click.FloatRange(0, min_open=True), default=1.0, help="Factor on the run's compute times."
)
@click.option("--tool-seconds", type=click.FloatRange(0), help="Mean seconds of a turn's tools; default as measured.")
@click.option("--weights-gib", type=click.FloatRange(0), default=0.0, help="Weights that cross at a sync.")
@click.option("--gradients-gib", type=click.FloatRange(0), default=0.0, help="Gradients that training ranks reduce.")
@click.option("--bandwidth", type=click.FloatRange(0, min_open=True), help="GiB per second between two ranks.")
@click.option("--rollouts", type=click.Path(path_type=Path), help="Rollout dumps; default RUN_DIR/rollouts.")
@click.option("--steps", type=click.IntRange(1), default=6, show_default=True, help="Steps to simulate.")
def scale(
    run_dir: Path,
    ranks: str,
    staleness: str,
    prompts: int | None,
    n: int | None,
    slots: int | None,
    slower: float,
    tool_seconds: float | None,
    weights_gib: float,
    gradients_gib: float,
    bandwidth: float | None,
    rollouts: Path | None,
    steps: int,
) -> None:
    """Predict throughput and utilisation on other numbers of ranks.

    A rank is one of the kind that RUN_DIR ran on. Needs its metrics.jsonl and
    its rollout dumps (trainer.rollout_data_dir).
    """
    measured = measure(run_dir, rollouts)
    if tool_seconds is not None:
        measured = with_tools(measured, tool_seconds)
    costs = replace(
        measured.costs.slowed(slower),
        weights=weights_gib * 2**30,
        gradients=gradients_gib * 2**30,
        bandwidth=None if bandwidth is None else bandwidth * 2**30,
    )
    measured = replace(
        measured, costs=costs, prompts=prompts or measured.prompts, n=n or measured.n, slots=slots or measured.slots
    )
    click.echo(
        f"{'ranks':>6} {'staleness':>9}  {'placement':22} {'s/step':>9} {'samples/s':>10} {'engines':>8} {'training':>8}"
    )
    for number in _numbers(ranks, "--ranks", 1):
        for stale in _numbers(staleness, "--staleness", 0):
            prediction = recommend(measured, number, stale, steps=steps)
            if prediction is None:
                continue
            place = prediction.placement
            words = "all do both" if place.colocated else f"{place.trains} train, {place.rolls_out} roll out"
            click.echo(
                f"{number:6d} {stale:9d}  {words:22} {prediction.step_seconds:9.2f} {prediction.samples_per_second:10.2f} "
                f"{prediction.engines_busy:8.0%} {prediction.trainers_busy:8.0%}"
            )


def _numbers(text: str, option: str, least: int) -> list[int]:
    try:
        numbers = [int(part) for part in text.split(",")]
    except ValueError:
        numbers = []
    if not numbers or min(numbers) < least:
        raise click.BadParameter(f"whole numbers of at least {least}, comma-separated, not '{text}'", param_hint=option)
    return numbers
