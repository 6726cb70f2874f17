"""Where a step's rollouts come from: `DirectFeed` rolls out synchronously, when the step asks; `StreamingFeed` keeps prompts
in flight at the rollout workers while the policy trains (asynchronous RL, `trainer.max_staleness`).

Invariant: every prompt of the plan (the loader's order) belongs to exactly one step's rollouts, however these ended, or is
still pending. A checkpoint lists the pending prompts, finished or not, and a resumed run rolls all of them out again. So
killing a run does not favour short rollouts over long ones.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from etude.checks.step_warnings import find_evidence
from etude.data import ResumableLoader
from etude.data.files import Row
from etude.data.samplers import ROW_COLUMN
from etude.distributed import reads
from etude.metrics import Metrics as MetricParts
from etude.metrics import add_metrics, finish_metrics
from etude.options import TrainOptions
from etude.protocol import DataProto
from etude.trainer.accounting import RolloutOutcome, list_rollouts
from etude.trainer.group_filter import count_spread
from etude.trainer.learning_signal import JUDGE
from etude.trainer.metrics import Metrics
from etude.trainer.rollouts import (
    Batch,
    Rollouts,
    check_survivors,
    engine_metrics,
    rollout_metrics,
    rollouts_of,
    survivor_rows,
)
from etude.trainer.staleness import Group, Place, Window

_POLL_SECONDS = 1.0  # how long to wait for finished rollouts before polling again
UNTRAINED = "untrained"  # key in a checkpoint's state


@dataclass(frozen=True)
class StepRollouts:
    """What a step trains on. `rolled`: all rollouts of its prompts (see `list_rollouts`); `batch`: those that can be trained
    on; `has_several_sequences`: whether any rollout has more than one; `evidence`: see `find_evidence`; `stale`: uids of
    prompts too old to train on."""

    rolled: list[RolloutOutcome]
    batch: Batch
    metrics: Metrics
    has_several_sequences: bool
    evidence: Mapping[str, tuple[str, str]]
    stale: frozenset[str] = frozenset()


@reads("rollout", "response_mask", "reward_baselines", "uid", "index")
def inspect_rollouts(
    made: Sequence[DataProto], baselines: Sequence[DataProto], options: TrainOptions
) -> tuple[list[RolloutOutcome], list[list[int]], Metrics, bool, Mapping[str, tuple[str, str]]]:
    """Inspects the batches of a step and their greedy baselines. Returns all rollouts, each batch's rows that can be trained
    on, the metrics, whether any rollout has several sequences, and what they say about problems (see `find_evidence`).

    Raises:
        TrainingStopped: infrastructure failures dropped too large a share.
    """
    fraction = options.trainer.min_valid_fraction
    rows = [survivor_rows(batch, fraction) for batch in made]
    there = [rollout for batch in made for rollout in rollouts_of(batch)]
    several = any(len(each.sequences) > 1 or any(sequence.role for sequence in each.sequences) for each in there)
    rolled = [rollout for batch in made for rollout in list_rollouts(batch)]
    read = (whole for each in there if (whole := each.whole()) is not None)
    evidence = find_evidence(
        {
            "tool_calls": [vars(call) for call in each.tool_calls],
            "stop_reason": each.stop_reason.value,
            "response_ids": each.response_ids,
            "metrics": each.metrics,
        }
        for each in read
    )
    metrics = rollout_metrics(there, options.reward_model)
    if greedy := [rollout for batch in baselines for rollout in rollouts_of(batch)]:
        check_survivors(greedy, fraction)
        metrics |= rollout_metrics(greedy, options.reward_model, "baseline")
    return rolled, rows, metrics, several, evidence


class PromptQueue:
    """Rows in the planned order, each with the number of its batch in the plan (from 1) and its index in that batch.
    `epochs`: passes over the rows; None: no limit."""

    def __init__(self, loader: ResumableLoader, epochs: int | None) -> None:
        self._loader, self._epochs = loader, epochs
        self._batches = loader.cycle()
        self._next: deque[Place] = deque()

    @property
    def exhausted(self) -> bool:
        """Whether the plan has no rows left."""
        return not self._next and self._epochs is not None and self._loader.epoch >= self._epochs

    def take(self, count: int) -> list[Place]:
        """Returns the next `count` rows, fewer at the end of the plan."""
        found: list[Place] = []
        while len(found) < count and not self.exhausted:
            if not self._next:
                number = self._loader.number + 1
                self._next.extend((number, place, row) for place, row in enumerate(next(self._batches)))
            found.append(self._next.popleft())
        return found

    def state_dict(self, taken: Iterable[Place] = ()) -> dict[str, Any]:
        """Returns the state for `restore`; the rows in `taken` will come first again."""
        drawn = self._loader.sampler is not None  # without a sampler, `ROW_COLUMN` may be a column of the user's data
        untrained = [
            [number, place, *([row[ROW_COLUMN]] if drawn else [])] for number, place, row in (*taken, *self._next)
        ]
        return {"loader": self._loader.state_dict()} | ({UNTRAINED: untrained} if untrained else {})

    def restore(self, state: Mapping[str, Any]) -> None:
        """Restores the queue; the loader's own state must already be restored.

        Raises:
            ValueError: the state names a row that the plan does not have.
        """
        batches: dict[int, list[Row]] = {}
        for number, place, *drawn in state.get(UNTRAINED, ()):
            if not 1 <= number <= self._loader.number or not 0 <= place < self._loader.batch_size:
                raise ValueError(f"no row {place} in batch {number} of the plan")
            if drawn:  # the sampler's row number
                self._next.append((number, place, self._loader.numbered_row(drawn[0])))
                continue
            rows = batches.setdefault(number, self._loader.batch(number - 1) if number not in batches else [])
            self._next.append((number, place, rows[place]))


class DirectFeed:
    """Rolls out a step's prompts synchronously, when the step asks for them."""

    def __init__(self, options: TrainOptions, rollouts: Rollouts, prompts: PromptQueue) -> None:
        self._options, self._rollouts, self._prompts = options, rollouts, prompts

    def take(self, step: int, total_steps: int) -> StepRollouts:
        """Rolls out `train_batch_size` prompts; with group filtering (dynamic sampling), repeats until enough groups have
        differing scores or `max_gen_batches` is reached."""
        options, algorithm = self._options, self._options.algorithm
        all_made: list[Batch] = []
        baselines: list[Batch] = []
        engine, spread = [], 0
        wanted = options.data.train_batch_size
        for attempt in range(algorithm.max_gen_batches):
            rows = [row for *_, row in self._prompts.take(wanted)]
            made, sampling = self._rollouts.generate(self._rollouts.training_prompts(rows, step, attempt))
            engine.append(sampling)
            if "reward_baselines" in options.needs:
                greedy, sampling = self._rollouts.generate(
                    self._rollouts.baseline_prompts(rows, step, attempt, len(rows) * options.rollout.n)
                )
                made = self._rollouts.with_baselines(made, greedy)
                baselines.append(greedy)
                engine.append(sampling)
            all_made.append(made)
            if attempt + 1 == algorithm.max_gen_batches or self._prompts.exhausted:
                break
            spread += self._rollouts.run(count_spread, made, options, options.trainer.min_valid_fraction)
            if spread >= wanted:
                break
        rolled, kept, metrics, several, evidence = self._rollouts.run(inspect_rollouts, all_made, baselines, options)
        metrics |= finish_metrics(add_metrics(engine))
        if algorithm.drops_equal_groups:
            metrics["training/filter_groups/num_gen_batches"] = float(len(all_made))
        batch = self._rollouts.join([made.select_idxs(rows) for made, rows in zip(all_made, kept)])
        return StepRollouts(rolled, batch, metrics, several, evidence)

    def end_step(self, version: int, total_steps: int) -> None:
        """Does nothing: no prompts are in flight between steps."""

    def judged(self) -> Metrics:
        """Nothing: what judges used is among the metrics of `take`."""
        return {}

    @property
    def exhausted(self) -> bool:
        """Whether no prompts are left."""
        return self._prompts.exhausted

    def state_dict(self) -> dict[str, Any]:
        """The plan's state, for `PromptQueue.restore`."""
        return self._prompts.state_dict()


class StreamingFeed:
    """Keeps as many prompts in flight as `Window` admits; a step trains on the groups that the window chooses."""

    def __init__(self, options: TrainOptions, rollouts: Rollouts, prompts: PromptQueue) -> None:
        self._options, self._rollouts, self._prompts = options, rollouts, prompts
        self._policy = rollouts.policy
        self._window = Window(options.data.train_batch_size, options.trainer.max_staleness)
        self._by_key: dict[str, Group] = {}
        self._evicted: list[Group] = []  # groups with equal scores that finished since the last step
        self._engine: list[MetricParts] = []
        self._judged: Counter[str] = Counter()

    def take(self, step: int, total_steps: int) -> StepRollouts:
        """Waits for the next `train_batch_size` finished groups. With dynamic sampling, groups with equal scores are
        replaced; they are returned in addition to these."""
        self.end_step(step - 1, total_steps)
        while (chosen := self._choose(step)) is None:
            self._collect(_POLL_SECONDS)
            self.end_step(step - 1, total_steps)
        groups, self._evicted = [*chosen, *self._evicted], []
        made = [next(iter(group.rolled.values())) for group in groups]
        baselines = [part for group in groups for part in [*group.rolled.values()][1:]]
        rolled, engine, self._engine = self._rollouts.join(made), self._engine, []
        stale = frozenset(next(iter(group.requests)) for group in groups if group.deadline < step)
        inspected = self._rollouts.run(inspect_rollouts, [rolled], baselines, self._options)
        found, (rows,), metrics, several, evidence = inspected
        metrics = {name: value for name, value in metrics.items() if JUDGE not in name}  # see `judged`
        metrics |= finish_metrics(add_metrics(engine))
        metrics["rollout/prompts_in_flight"] = float(len(self._window.groups))
        fresh = [row for row in rows if found[row][0] not in stale]
        return StepRollouts(found, rolled.select_idxs(fresh), metrics, several, evidence, stale)

    def end_step(self, version: int, total_steps: int) -> None:
        """Starts further prompts, now that the workers have the weights of `version`."""
        for place in self._prompts.take(self._window.room(version, total_steps)):
            self._begin(place, version)

    @property
    def exhausted(self) -> bool:
        """Whether no prompts are left."""
        return self._prompts.exhausted and not self._window.groups and not self._evicted

    def state_dict(self) -> dict[str, Any]:
        """The plan's state, for `PromptQueue.restore`."""
        return self._prompts.state_dict(group.place for group in self._window.groups)

    def _begin(self, place: Place, version: int) -> None:
        number, index, row = place
        n, batch_size = self._options.rollout.n, self._options.data.train_batch_size
        requests = [self._rollouts.training_prompts([row], number, 0, first=index * n)]
        if "reward_baselines" in self._options.needs:
            requests.append(self._rollouts.baseline_prompts([row], number, 0, batch_size * n + index, index))
        ranks = range(self._policy.world_size)
        rank = min(ranks, key=[group.rank for group in self._window.groups if not group.finished].count)
        group = Group(place, {str(each.non_tensor_batch["uid"][0]): each for each in requests}, rank)
        self._window.admit(group, version)
        for key, prompts in group.requests.items():
            self._by_key[key] = group
            self._policy.direct("submit", rank)(key, prompts)

    def judged(self) -> Metrics:
        """What judges used since the last call, for rollouts of whichever step: a run that stops rolls out again, and pays
        again, what it has not trained on."""
        self._collect(0.0)
        used, self._judged = self._judged, Counter()
        return dict(used)

    def _collect(self, seconds: float) -> None:
        """Collects and scores the rollouts that have finished at the workers; waits up to `seconds` for the first."""
        for found, sampling in self._policy.collect(seconds):
            judged = {name: value for name, value in sampling.items() if name.startswith("judge/")}
            self._judged.update({f"reward/{name}": value for name, value in judged.items()})
            self._engine.append(engine_metrics({name: sampling[name] for name in sampling.keys() - judged.keys()}))
            for key, rolled in found:
                group = self._by_key.pop(key)
                group.rolled[key] = self._rollouts.score(group.requests[key], rolled)
                if group.finished:
                    self._end(group)

    def _end(self, group: Group) -> None:
        group.rolled = {key: group.rolled[key] for key in group.requests}  # in the order of the requests
        made, *greedy = group.rolled.values()
        for each in greedy:
            made = group.rolled[next(iter(group.requests))] = self._rollouts.with_baselines(made, each)
        if self._options.algorithm.max_gen_batches > 1 and not self._rollouts.run(count_spread, made, self._options):
            self._window.take([group])
            self._evicted.append(group)

    def _choose(self, step: int) -> list[Group] | None:
        batch_size, max_batches = self._options.data.train_batch_size, self._options.algorithm.max_gen_batches
        finished = [group for group in self._window.groups if group.finished]
        if max_batches > 1 and len(self._evicted) + len(finished) >= max_batches * batch_size:
            self._window.take(finished[:batch_size])
            return finished[:batch_size]
        return self._window.choose(step)
