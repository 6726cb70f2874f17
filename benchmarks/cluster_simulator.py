"""A discrete-event simulation of rollout, scoring, training and weight sync, with SimPy (`pip install 'etude[scale]'`): what
`etude scale` predicts, with the groups that wait for a step because they would be too stale.

    python benchmarks/cluster_simulator.py RUN_DIR [--ranks 1,2,4,8] [--staleness 0,1,4] [--steps 6]

prints the seconds per step of the fastest placement, by this simulation and by `etude scale`. Costs, trajectories and
placements are `etude.cli.scale`'s; see there for the model of an engine and of training.

Invariant: groups are started and trained on by the rules of `trainer.max_staleness` (docs/async.md): 1 + ⌈staleness / 2⌉
batches are in flight; a step takes finished groups in the order in which they started, and waits for a group that would be
too stale for a later step. Staleness 0 is the synchronous loop.

Not modelled: memory, failures, network contention, and driver time beyond what the run measured.
"""

from __future__ import annotations

import argparse
import heapq
import itertools
import random
from collections import deque
from collections.abc import Generator
from dataclasses import dataclass
from typing import Any

import simpy

from etude.cli.scale import Costs, Measured, Placement, Prediction, Trajectory, measure, placements
from etude.cli.scale import predict as predict_plainly


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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run_dir")
    parser.add_argument("--ranks", default="1,2,4,8")
    parser.add_argument("--staleness", default="0,1,4")
    parser.add_argument("--steps", type=int, default=6)
    options = parser.parse_args()
    measured = measure(options.run_dir)
    print("| ranks | staleness | simulated s/step | etude scale s/step |\n|---|---|---|---|")
    for ranks in map(int, options.ranks.split(",")):
        for staleness in map(int, options.staleness.split(",")):
            tried = [*placements(ranks, staleness)]
            found = [
                min((way(measured, each, steps=options.steps).step_seconds for each in tried), default=None)
                for way in (predict, predict_plainly)
            ]
            if None not in found:
                print(f"| {ranks} | {staleness} | {found[0]:.2f} | {found[1]:.2f} |", flush=True)


if __name__ == "__main__":
    main()
