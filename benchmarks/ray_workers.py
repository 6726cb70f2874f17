"""The quickstart's training in this process, and on a Ray cluster with several workers: the same loss, and what it costs.

    python benchmarks/ray_workers.py --output-dir runs/ray --workers 1 2 4 --nodes 1 2 --steps 20

For each: the loss of the first step, the mean reward of the first and last steps, and CPU and wall seconds a step after
start-up (from the third step on): of this process and its descendants, and apart from these of Ray's own processes.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from pathlib import Path
from typing import Any

import psutil

from etude.config import compose
from etude.quickstart.example import CALCULATOR, find_example
from etude.quickstart.stages import Quickstart
from etude.trainer.events import StepFinished
from etude.trainer.run import train

START_UP = 2  # steps that are not measured


def cpu_seconds() -> tuple[float, float]:
    """Returns the CPU seconds of this process and its live descendants: Étude's, and those of Ray's own processes."""
    ours = rays = 0.0
    for process in (psutil.Process(), *psutil.Process().children(recursive=True)):
        try:
            times, command = process.cpu_times(), " ".join(process.cmdline())
        except psutil.Error:
            continue
        if "RankProcess" not in command and (command.startswith("ray::") or "site-packages/ray/" in command):
            rays += times.user + times.system
        else:
            ours += times.user + times.system
    return ours, rays


def measure(config: Any) -> dict[str, float]:
    """Runs a training; returns its losses and rewards, and its time per step."""
    marks: list[tuple[float, ...]] = []
    figures: list[dict[str, float]] = []

    def note(event: object) -> None:
        if isinstance(event, StepFinished) and event.step:
            marks.append((*cpu_seconds(), time.perf_counter()))
            figures.append(dict(event.metrics))

    train(config, note)
    steps, first, last = len(marks) - START_UP, marks[START_UP - 1], marks[-1]
    return {
        "first loss": figures[0]["actor/loss"],
        "first reward": figures[0]["reward/total/mean"],
        "last reward": sum(each["reward/total/mean"] for each in figures[-5:]) / 5,
        "cpu_s/step": (last[0] - first[0]) / steps,
        "ray's own cpu_s/step": (last[1] - first[1]) / steps,
        "wall_s/step": (last[2] - first[2]) / steps,
    }


def on_cluster(nodes: int, config: Any) -> dict[str, float]:
    """Runs `measure` on a cluster of `nodes` raylets on this machine."""
    if nodes == 1:
        return measure(config)
    import ray
    from ray.cluster_utils import Cluster

    cluster = Cluster()
    try:
        for number in range(nodes):
            cluster.add_node(num_cpus=4, **({} if number else {"include_dashboard": False}))
        config.ray.address = cluster.address
        return measure(config)
    finally:
        ray.shutdown()
        cluster.shutdown()


def main() -> None:
    """Parses arguments, runs, prints a table, and writes it as JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output-dir", type=Path, default=Path("runs/ray"))
    parser.add_argument("--workers", type=int, nargs="+", default=[1, 2, 4], help="in total")
    parser.add_argument("--nodes", type=int, nargs="+", default=[1])
    parser.add_argument("--steps", type=int, default=20)
    given = parser.parse_args()
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    start = Quickstart(find_example(CALCULATOR), given.output_dir, 1, (), print)
    start.warm_up()
    data = given.output_dir / "data"
    common = [
        f"data.train_files={data}/train.parquet",
        f"actor_rollout_ref.model.path={given.output_dir}/warm_up/huggingface",
        f"trainer.total_training_steps={given.steps}",
        "trainer.logger=[jsonl]",
        "trainer.resume_mode=disable",
    ]
    shapes = [(0, 1), *((nodes, each) for nodes in given.nodes for each in given.workers if each % nodes == 0)]
    results = {}
    for nodes, workers in shapes:
        place = [] if not nodes else ["trainer.backend=ray", f"trainer.nnodes={nodes}"]
        place += [f"trainer.n_gpus_per_node={workers // nodes}"] if nodes else []
        name = f"{nodes} nodes, {workers} workers" if nodes else "in process"
        folder = given.output_dir / name.replace(", ", "-").replace(" ", "-")
        config = compose("quickstart", [*common, f"trainer.default_local_dir={folder}", *place])
        results[name] = on_cluster(nodes, config) if nodes else measure(config)
        print(name, "; ".join(f"{key} {value:.6g}" for key, value in results[name].items()), flush=True)
    (given.output_dir / "ray_workers.json").write_text(json.dumps(results, indent=1))


if __name__ == "__main__":
    main()
