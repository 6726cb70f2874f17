"""Predicts a run's throughput on other numbers of ranks: a discrete-event simulation of rollout, scoring, training and
weight sync.

All inputs come from the folder of a finished run. The rollout dumps give the lengths of turns and the latencies of tools
and scoring (whole trajectories are sampled, so that long turns and slow tools stay correlated); `metrics.jsonl` gives the
cost of an engine step, of a trained token and of a weight sync. A simulated rank has the same hardware as that run's;
ranks wait for each other, for tools and for weights as real ones do.

An engine takes t₀ + t₁·b seconds to decode one token for each of b running sequences, and t₂ seconds per prefilled token,
during which decoding stalls. Training takes c₀ + c₁·tokens/ranks, plus a ring all-reduce of the gradients,
2·bytes·(ranks-1)/ranks / bandwidth. A weight sync takes its measured time, plus bytes / bandwidth.

Invariant: groups are started and trained on by the rules of `trainer.max_staleness` (docs/async.md): 1 + ⌈staleness / 2⌉
batches are in flight; a step takes finished groups in the order in which they started, and waits for a group that would be
too stale for a later step. Staleness 0 is the synchronous loop.

Not modelled: memory, failures, network contention, and driver time beyond what the run measured.
"""

from __future__ import annotations

import heapq
import itertools
import random
from collections import deque
from collections.abc import Generator, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from etude.dumps import list_dump_steps, read_rollouts
from etude.errors import DataError, MissingExtraError
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
    """Measurements of a run: costs, trajectories to sample from, batch size and step time."""

    costs: Costs
    trajectories: Sequence[Trajectory]
    prompts: int
    n: int
    slots: int
    step_seconds: float


@dataclass(frozen=True)
class Placement:
    """How many ranks train and how many roll out; if `colocated`, the same ranks alternate between both."""

    trains: int
    rolls_out: int
    colocated: bool
    staleness: int = 0

    @property
    def ranks(self) -> int:
        """Total number of ranks."""
        return self.trains if self.colocated else self.trains + self.rolls_out


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
        step_seconds=float(np.median([record["timing_s/step"] for record in records[1:]])),
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

    def scaled(trajectory: Trajectory) -> Trajectory:
        turns = tuple(turn._replace(tools=turn.tools * factor) for turn in trajectory.turns)
        return trajectory._replace(turns=turns)

    return replace(measured, trajectories=[scaled(trajectory) for trajectory in measured.trajectories])


# -- the simulation ------------------------------------------------------------------------------------------------------


class Engine:
    """Continuous batching: each engine step decodes one token for every running sequence."""

    def __init__(self, env: Any, costs: Costs, slots: int) -> None:
        self._env, self._costs, self._slots = env, costs, slots
        self._decoded = 0.0  # engine steps so far: the tokens of a sequence running from the start
        self._running: list[tuple[float, int, Any]] = []  # heap of (`_decoded` at its end, arrival order, its event)
        self._waiting: deque[tuple[int, int, Any]] = deque()
        self._stalled = 0.0  # seconds of prefill and weight sync before the next token
        self._order = itertools.count()
        self._woken = env.event()
        self.busy = 0.0
        self.groups = 0  # groups in flight on this rank
        env.process(self._run())

    def generate(self, prefilled: int, sampled: int) -> Any:
        """Queues a turn; returns the event that fires when its `prefilled` and `sampled` tokens are done."""
        done = self._env.event()
        self._waiting.append((prefilled, sampled, done))
        self._wake()
        return done

    def stall(self, seconds: float) -> None:
        """Stops decoding for `seconds`, while new weights arrive."""
        self._stalled += seconds
        self._wake()

    def _wake(self) -> None:
        if not self._woken.triggered:
            self._woken.succeed()

    def _run(self) -> Generator[Any, Any, None]:
        env, costs = self._env, self._costs
        while True:
            while self._waiting and len(self._running) < self._slots:
                prefilled, sampled, done = self._waiting.popleft()
                self._stalled += prefilled * costs.prefill
                heapq.heappush(self._running, (self._decoded + sampled, next(self._order), done))
            self._woken = env.event()
            if not self._running and not self._stalled:
                yield self._woken
                continue
            began = env.now
            if self._stalled:
                self._stalled, spent = 0.0, self._stalled
                yield env.timeout(spent)
            else:  # decode until the next sequence ends, or a new one arrives
                pace = costs.step + costs.row * len(self._running)
                left = self._running[0][0] - self._decoded
                yield env.timeout(left * pace) | self._woken
                self._decoded += min(left, (env.now - began) / pace) if pace else left
            self.busy += env.now - began
            while self._running and self._running[0][0] <= self._decoded + 1e-6:
                heapq.heappop(self._running)[2].succeed()


@dataclass
class _Group:
    """A group in flight: the last step that may train on it, and its token count once it has finished."""

    deadline: int
    tokens: int | None = None


class _Run:
    """One simulated run."""

    def __init__(self, measured: Measured, placement: Placement, steps: int, seed: int) -> None:
        try:
            import simpy
        except ImportError as error:
            raise MissingExtraError("predicting throughput", "scale") from error
        self.env = simpy.Environment()
        self.measured, self.placement, self.steps, self.costs = measured, placement, steps, measured.costs
        self.engines = [Engine(self.env, measured.costs, measured.slots) for _ in range(placement.rolls_out)]
        self.draw = random.Random(seed)
        self.version = 0
        self.groups: list[_Group] = []  # in flight, in start order
        self.group_ended = self.env.event()
        self.trained = 0.0  # busy seconds
        self.ends: list[
            tuple[float, float, float]
        ] = []  # at the end of each step: (time, busy seconds of the engines, of the trainers)

    def run(self) -> None:
        self.env.run(self.env.process(self._train()))

    def _begin_groups(self) -> None:
        staleness, batch = self.placement.staleness, self.measured.prompts
        batches = min(1 + -(-staleness // 2), self.steps - self.version)
        for number in range(batches * batch - len(self.groups)):
            group = _Group(self.version + 1 + staleness)
            self.groups.append(group)
            self.env.process(self._roll_out(group, number))

    def _choose(self) -> list[_Group] | None:
        """Takes the groups that the next step trains on; None if it must wait."""
        batch, step = self.measured.prompts, self.version + 1
        chosen = [group for group in self.groups if group.tokens is not None][:batch]
        if len(chosen) < batch:
            return None
        taken = set(map(id, chosen))
        left = [group for group in self.groups if id(group) not in taken]
        for place, group in enumerate(left, start=1):
            if group.tokens is None and place > (group.deadline - step) * batch:
                return None  # this group would miss its deadline
        self.groups = left
        return chosen

    def _roll_out(self, group: _Group, number: int) -> Generator[Any, Any, None]:
        drawn = [self.draw.choice(self.measured.trajectories) for _ in range(self.measured.n)]
        if self.placement.staleness:
            engine = min(self.engines, key=lambda engine: engine.groups)
        else:  # contiguous chunks of whole groups, as the trainer divides a batch among ranks
            engine = self.engines[number * len(self.engines) // self.measured.prompts]
        engine.groups += 1
        yield self.env.all_of([self.env.process(self._trajectory(engine, each)) for each in drawn])
        engine.groups -= 1
        group.tokens = sum(each.tokens for each in drawn)
        self.group_ended.succeed()
        self.group_ended = self.env.event()

    def _trajectory(self, engine: Engine, trajectory: Trajectory) -> Generator[Any, Any, None]:
        for turn in trajectory.turns:
            yield engine.generate(turn.prefilled, turn.sampled)
            if turn.tools:
                yield self.env.timeout(turn.tools)
        if trajectory.scoring:
            yield self.env.timeout(trajectory.scoring)

    def _train(self) -> Generator[Any, Any, None]:
        for _ in range(self.steps):
            self._begin_groups()
            while (chosen := self._choose()) is None:
                yield self.group_ended
            tokens = sum(group.tokens or 0 for group in chosen)
            seconds = self.costs.training(tokens, self.placement.trains)
            self.trained += seconds
            yield self.env.timeout(seconds + self.costs.driver)
            for engine in self.engines:
                engine.stall(self.costs.syncing())
            yield self.env.timeout(self.costs.syncing())
            self.ends.append((self.env.now, sum(engine.busy for engine in self.engines), self.trained))
            self.version += 1


def predict(measured: Measured, placement: Placement, *, steps: int = 6, seed: int = 0) -> Prediction:
    """Simulates a placement for `steps` steps, after the warm-up steps that fill the pipeline.

    Raises:
        ValueError: `steps` is below 1, or no rank trains or rolls out.
        MissingExtraError: SimPy is not installed.
    """
    if min(steps, placement.trains, placement.rolls_out) < 1:
        raise ValueError(f"at least 1 step, and 1 rank of each kind: {steps} steps, {placement}")
    run = _Run(measured, placement, steps + placement.staleness + 1, seed)
    run.run()
    before, after = run.ends[placement.staleness], run.ends[-1]
    seconds, engines, trainers = (end - start for start, end in zip(before, after))
    stalled = run.costs.syncing() * steps  # engines count weight syncs as busy, but generate nothing then
    return Prediction(
        placement,
        step_seconds=seconds / steps,
        samples_per_second=measured.prompts * measured.n * steps / seconds,
        engines_busy=(engines / placement.rolls_out - stalled) / seconds,
        trainers_busy=trainers / seconds,
    )


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
