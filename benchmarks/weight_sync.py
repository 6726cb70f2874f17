"""Weight syncs between a training and a rollout worker on Ray, in a run of two steps: what each costs, beside its step.

    python benchmarks/weight_sync.py --model SMOLLM2 [--output-dir runs/sync] [--rounds 9]

A step is 8 prompts × 8 answers of up to 128 tokens, one thread a worker. Each sync is repeated, with the probe and, in a run
of one step, without. CPU seconds: this process and its descendants, Ray's own included. A GB is 10⁹ bytes of weights.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from functools import partial
from pathlib import Path
from typing import Any

from ray_workers import cpu_seconds

from etude.config import compose
from etude.data.files import write_parquet
from etude.trainer.events import StepFinished
from etude.trainer.run import train
from etude.trainer.worker_groups import WorkerGroups

GB = 1e9


def now() -> tuple[float, float]:
    """CPU and wall seconds."""
    return sum(cpu_seconds()), time.perf_counter()


def measure(options: Any, rounds: int) -> None:
    """Runs a training and prints medians."""
    sync, syncs, steps = WorkerGroups.sync_weights, [], []

    def timed(groups: WorkerGroups, version: int) -> Any:
        for _ in range(rounds):
            began = now()
            found = sync(groups, version)
            syncs.append([end - start for start, end in zip(began, now())])
        return found

    def note(event: object) -> None:
        if isinstance(event, StepFinished) and event.step:
            steps.append((*now(), event.metrics))

    WorkerGroups.sync_weights = timed  # type: ignore[method-assign]
    try:
        train(options, note)
    finally:
        WorkerGroups.sync_weights = sync  # type: ignore[method-assign]
    size = sum(file.stat().st_size for file in Path(options.actor_rollout_ref.model.path).glob("*.safetensors")) / GB
    cpu, wall = (statistics.median(each) for each in zip(*syncs[rounds:]))  # but for the first, to engines still cold
    low, *_, high = sorted(each for each, _ in syncs[rounds:])
    probe = "with" if options.actor_rollout_ref.rollout.weight_probe else "without"
    print(
        f"sync {probe} probe: {cpu:.2f} CPU s ({low:.2f} to {high:.2f}), {cpu / size:.2f} a GB; {wall:.2f} s",
        flush=True,
    )
    if len(steps) > 1:
        (before, at, _), (after, then, metrics) = steps[-2:]
        whole = after - before - (rounds - 1) * cpu
        print(
            f"step: {whole:.0f} CPU s, {then - at - (rounds - 1) * wall:.0f} s, "
            f"{metrics['response_length/mean']:.0f} tokens an answer; a sync is {100 * cpu / whole:.1f} % of it"
        )


def main() -> None:
    """Parses arguments and runs."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True, help="its folder, in float32")
    parser.add_argument("--output-dir", type=Path, default=Path("runs/sync"))
    parser.add_argument("--rounds", type=int, default=9, help="syncs in place of each")
    parser.add_argument("--steps", type=int, default=2)
    parser.add_argument("--tokens", type=int, default=128, help="of an answer, at most")
    given = parser.parse_args()
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    given.output_dir.mkdir(parents=True, exist_ok=True)
    row = {"data_source": "etude/arithmetic", "reward_model": {"style": "rule", "ground_truth": "0"}}
    texts = [f"Tell a story about {number} people." for number in range(8)]
    rows = [row | {"prompt": [{"role": "user", "content": text}]} for text in texts]
    write_parquet(rows, str(given.output_dir / "train.parquet"))
    common = partial(compose, "grpo_trainer")
    for probe, steps in ((True, given.steps), (False, 1)):
        options = common(
            [
                f"data.train_files={given.output_dir}/train.parquet",
                "data.train_batch_size=8",
                f"data.max_response_length={given.tokens}",
                f"actor_rollout_ref.model.path={given.model}",
                "actor_rollout_ref.hybrid_engine=false",
                "actor_rollout_ref.rollout.nnodes=1",
                "actor_rollout_ref.rollout.n=8",
                f"actor_rollout_ref.rollout.weight_probe={str(probe).lower()}",
                "trainer.backend=ray",
                "trainer.n_gpus_per_node=1",
                "trainer.device=cpu",
                f"trainer.total_training_steps={steps}",
                f"trainer.default_local_dir={given.output_dir}/{steps}",
                "trainer.logger=[jsonl]",
                "trainer.resume_mode=disable",
                "trainer.save_freq=-1",
                "algorithm.zero_variance=keep",
            ]
        )
        measure(options, given.rounds)


if __name__ == "__main__":
    main()
