"""Étude: training steps on the task; CPU and wall seconds of the rollout, of the update and of the whole step."""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
from pathlib import Path
from typing import Any

from side_by_side import etude_run, task
from side_by_side.meter import Meter, peak_mib, report, resident_mib


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--checkpoint", type=Path, required=True)
    parser.add_argument("--system")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--steps", type=int, default=4, help="the first is not counted, unless it is the only one")
    parser.add_argument("--prompts", type=int, default=8, help="prompts a step, of 8 answers each")
    parser.add_argument("--endless", type=int, default=0, help="one turn of so many tokens instead of the task's turns")
    parser.add_argument("--rollout-only", action="store_true")
    parser.add_argument("overrides", nargs="*", help="configuration keys")
    return parser.parse_args()


def main() -> None:
    """Runs the steps; the first one warms up caches and is not counted."""
    options = arguments()
    if options.endless:
        os.environ["BENCHMARK_TURN_TOKENS"] = str(options.endless)
    system = task.system_prompt(options.checkpoint, options.system)
    import torch
    from transformers import AutoModelForCausalLM

    from etude.trainer.interrupts import Interrupts
    from etude.trainer.ppo import PPOTrainer

    torch.set_num_threads(options.threads)
    # every contender has the model in memory before it builds a trainer
    AutoModelForCausalLM.from_pretrained(options.checkpoint)
    before = resident_mib()
    with tempfile.TemporaryDirectory() as folder:
        config = etude_run.configuration(
            Path(folder),
            options.checkpoint,
            system,
            threads=options.threads,
            prompts=options.prompts,
            agent="endless_agent" if options.endless else "capped_tool_agent",
            overrides=[*_widths(options.endless), *options.overrides],
        )
        trainer: PPOTrainer = etude_run.built(config)
        parts = [_measured(trainer, options.rollout_only, Interrupts) for _ in range(options.steps)]
    counted = parts[1:] or parts
    medians = {name: statistics.median(part[name] for part in counted) for name in counted[0]}
    report({**medians, "memory": peak_mib() - before})


def _widths(tokens: int) -> list[str]:
    return [f"data.max_response_length={tokens}"] if tokens > 512 else []


def _measured(trainer: Any, rollout_only: bool, interrupts: Any) -> dict[str, float]:
    """Runs one step; returns seconds by part, and what it sampled."""
    readings: dict[str, dict[str, float]] = {}
    held: dict[str, Any] = {}
    take, update = trainer.feed.take, trainer._update_actor

    def timed(name: str, work: Any) -> Any:
        def run(*args: Any) -> Any:
            meter = Meter()
            try:
                held[name] = work(*args)
                return held[name]
            finally:
                readings[name] = meter.read()

        return run

    trainer.feed.take, trainer._update_actor = timed("rollout", take), timed("update", update)
    try:
        if rollout_only:
            trainer.feed.take(trainer.global_step + 1, trainer.total_steps)
        else:
            with interrupts(lambda _: None) as guard:
                meter = Meter()
                trainer.training_step(guard)
                readings["step"] = meter.read()
    finally:
        trainer.feed.take, trainer._update_actor = take, update
    if rollout_only:
        trainer.global_step += 1
    else:
        # Everything after the rollout, as for the peers: log-probs, advantages, loss, optimizer.
        readings["update"] = {k: readings["step"][k] - readings["rollout"][k] for k in ("wall", "cpu")}
    batch = held["rollout"].batch
    results = [r.trajectory for r in batch.non_tensor_batch["rollout"].tolist()]
    return {
        **{f"{name}_{kind}": seconds for name, r in readings.items() for kind, seconds in r.items()},
        "sampled_tokens": float(batch.batch["response_mask"].sum()),
        "context_tokens": float(batch.batch["attention_mask"].sum()),
        "tool_calls": float(sum(len(t.tool_calls) for t in results)),
        "turns": float(sum(t.assistant_turns for t in results)),
        "reward": float(batch.batch["token_level_scores"].sum(dim=1).mean()),
    }


if __name__ == "__main__":
    main()
