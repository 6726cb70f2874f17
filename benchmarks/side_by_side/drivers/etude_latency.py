"""Étude: a rollout whose tool calls take time, held against what it would take at best.

The same rollout is played three times: with the calls' latencies; with the same calls at no latency, which is the work
alone; and its longest trajectory by itself, with its latencies. The first should take little more than the sum of the
other two.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
from pathlib import Path
from typing import Any

from side_by_side import etude_run, task
from side_by_side.meter import Meter, report


def main() -> None:
    """Measures `--runs` rollouts, after a warm-up without latency that is not counted."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--checkpoint", type=Path, required=True)
    parser.add_argument("--system")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--tool-seconds", type=float, required=True, help="median latency of a tool call")
    parser.add_argument("--tool-failures", type=float, default=0.0, help="share of calls that fail")
    parser.add_argument("--runs", type=int, default=1)
    options = parser.parse_args()
    import torch

    from etude.trainer.rollouts import rollout_batch

    torch.set_num_threads(options.threads)
    system = task.system_prompt(options.checkpoint, options.system)
    slow = task.Latency(options.tool_seconds, failures=options.tool_failures)
    instant = task.Latency(0.0, failures=options.tool_failures)
    with tempfile.TemporaryDirectory() as folder:
        config = etude_run.configuration(Path(folder), options.checkpoint, system, threads=options.threads)
        trainer = etude_run.built(config)
        rows = next(iter(trainer.loader))

        def rolled(latency: task.Latency, seed: int, only: list[int] | None = None) -> tuple[dict[str, float], Any]:
            etude_run.latency = latency
            batch = rollout_batch(rows, n=8, label="latency", seed=seed, validate=False)
            meter = Meter()
            made, _ = trainer.rollouts.generate(batch if only is None else batch.select_idxs(only))
            return meter.read(), [r.trajectory for r in made.non_tensor_batch["rollout"].tolist()]

        rolled(instant, 0)
        parts = []
        for seed in range(1, options.runs + 1):
            whole, trajectories = rolled(slow, seed)
            work, replayed = rolled(instant, seed)
            if [t.response_ids for t in trajectories] != [t.response_ids for t in replayed]:
                raise SystemExit("the replay sampled other tokens: the comparison means nothing")
            spans = [t.timings["generate_sequences"] + t.timings.get("tool_calls", 0.0) for t in trajectories]
            alone, _ = rolled(slow, seed, [spans.index(max(spans))])
            parts.append(
                {
                    "rollout_wall": whole["wall"],
                    "rollout_cpu": whole["cpu"],
                    "work_wall": work["wall"],
                    "alone_wall": alone["wall"],
                    "over_bound": whole["wall"] / (work["wall"] + alone["wall"]),
                    "tool_calls": float(sum(len(t.tool_calls) for t in trajectories)),
                    "sampled_tokens": float(sum(sum(t.response_mask) for t in trajectories)),
                }
            )
    report({name: statistics.median(part[name] for part in parts) for name in parts[0]})


if __name__ == "__main__":
    main()
