"""Compares scoring each trajectory as it ends with scoring a batch once its slowest has ended.

    python benchmarks/reward_overlap.py [--trajectories 64] [--rollout 0.2 1.0] [--score 0.2 2.0] [--seed 0]

Trajectories end at random times, and a synchronous scorer sleeps for random seconds on each. `critical_path` is the
latest of end + score: a lower bound. `naive` scores each trajectory the moment it ends; `naive_lock_step` scores all at
once when the last has ended (`rollout.mode=sync`); `batch` calls a batch function that scores the rows one by one, as
verl's manager of that name does. One run of each, in sequence, reported with its ratio to the critical path.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import tempfile
import time
from pathlib import Path
from typing import Any

from etude.rewards import TrajectoryScorer, build_manager, load_compute_score
from etude.trajectory import Provenance, Trajectory

SCORERS = """
import time
def each(solution_str):
    time.sleep(float(solution_str))
    return 1.0
def whole(solution_strs):
    return [each(text) for text in solution_strs]
"""


class Letters:
    """A tokenizer whose ids are code points."""

    def decode(self, ids: Any, *, skip_special_tokens: bool = False) -> str:
        return "".join(map(chr, ids))


def trajectory(text: str) -> Trajectory:
    made = Trajectory("r", [1])
    made.append([ord(letter) for letter in text], Provenance.SAMPLED)
    return made


async def run(ends: list[float], scores: list[float], scorer: TrajectoryScorer, lock_step: bool) -> float:
    """Returns the seconds until the last score."""
    row = {"data_source": "x", "reward_model": {"ground_truth": ""}}
    began = time.perf_counter()

    async def one(end: float, score: float) -> None:
        await asyncio.sleep(max(ends) if lock_step else end)
        await scorer(trajectory(f"{score}"), row)

    await asyncio.gather(*(one(end, score) for end, score in zip(ends, scores)))
    return time.perf_counter() - began


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--trajectories", type=int, default=64)
    parser.add_argument("--rollout", type=float, nargs=2, default=(0.2, 1.0))
    parser.add_argument("--score", type=float, nargs=2, default=(0.2, 2.0))
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    dice = random.Random(given.seed)
    ends = [dice.uniform(*given.rollout) for _ in range(given.trajectories)]
    scores = [dice.uniform(*given.score) for _ in range(given.trajectories)]
    path = max(end + score for end, score in zip(ends, scores))
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "scorers.py"
        file.write_text(SCORERS)
        found: dict[str, Any] = {"trajectories": given.trajectories, "critical_path": round(path, 3)}
        for name, manager, function, lock_step in (
            ("naive", "naive", "each", False),
            ("naive_lock_step", "naive", "each", True),
            ("batch", "batch", "whole", True),
        ):
            scorer = TrajectoryScorer(
                build_manager(
                    manager,
                    config=None,
                    tokenizer=Letters(),
                    compute_score=load_compute_score(str(file), function),
                    reward_kwargs={"timeout": 600},
                )
            )
            asyncio.run(run([0.0], [0.0], scorer, False))  # warm-up: imports what a score needs
            seconds = asyncio.run(run(ends, scores, scorer, lock_step))
            found[name] = {"seconds": round(seconds, 3), "of_critical_path": round(seconds / path, 3)}
    print(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
