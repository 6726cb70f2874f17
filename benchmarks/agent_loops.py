"""Agent loops in one process and in several: CPU a call, and throughput, of `RolloutWorker`s that roll out side by side.

    python benchmarks/agent_loops.py [--processes 2] [--pairs 3] [--prompts 64] [--threads 1]

Each worker has its own native engine, tools and scorer, and rolls out its own rows: questions that an untrained model
answers with two calls of the calculator before it ends. Runs of one and of several processes take turns. `calls/s` is wall
time's, and means something on idle cores alone; `calls/CPU s` divides the calls of all processes by the CPU seconds of the
busiest: what idle cores would give, since a process computes in one thread.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from multiprocessing import get_context
from multiprocessing.synchronize import Barrier
from pathlib import Path
from typing import Any

from etude.chat import ParsedResponse, ToolParser
from etude.schemas import FunctionCall

SETTINGS = (
    "actor_rollout_ref.rollout.n=4",
    "actor_rollout_ref.rollout.multi_turn.format=agent_loops",
    "actor_rollout_ref.rollout.multi_turn.max_assistant_turns=3",
    "actor_rollout_ref.rollout.weight_probe=false",
    "data.max_prompt_length=256",
    "data.max_response_length=192",
    "trainer.device=cpu",
)


@ToolParser.register("agent_loops")
class EveryTurnCalls(ToolParser):
    """Parses a call for a sum from any text the model generates."""

    @property
    def stop_token_ids(self) -> tuple[int, ...]:
        """Every eighth token id ends a turn."""
        return tuple(range(10, 1000, 8))

    def parse(self, text: str, tools: Any = None) -> ParsedResponse:
        """Returns one call, whose sum depends on the text."""
        arguments = json.dumps({"expression": f"{len(text)} + 1"})
        return ParsedResponse(text, [FunctionCall(name="calculator", arguments=arguments)], [])


def roll_out(folder: str, prompts: int, threads: int, number: int, ready: Barrier, answers: Any) -> None:
    """A worker's process: runs a warm-up batch, then a measured one."""
    from etude.config import compose
    from etude.quickstart.prepare import TOOLS
    from etude.trainer.rollouts import rollout_batch
    from etude.trainer.setup import prepare
    from etude.workers import RolloutWorker

    config = compose(
        "grpo_trainer",
        [
            f"data.train_files={folder}/data/train.parquet",
            f"actor_rollout_ref.model.path={folder}/model",
            f"actor_rollout_ref.rollout.multi_turn.tool_config_path={TOOLS}",
            f"trainer.default_local_dir={folder}/run-{number}",
            f"trainer.num_threads={threads}",
            *SETTINGS,
        ],
    )
    setup, _ = prepare(config)
    rows = list(setup.dataset([f"{folder}/data/train.parquet"]))
    worker = RolloutWorker(setup.options, rank=0, world_size=1)
    worker.init_model()
    worker.update_weights(0)
    for step, chosen in enumerate((rows[:8], rows[8 : 8 + prompts])):
        batch = rollout_batch(chosen, n=4, label=f"{number}.{step}", seed=number, validate=False)
        if step:
            ready.wait()
        wall, cpu = time.perf_counter(), time.process_time()
        found = worker.generate_sequences(batch)
    spent = time.process_time() - cpu, time.perf_counter() - wall
    calls = sum(len(r.trajectory.tool_calls) for r in found.non_tensor_batch["rollout"] if r.trajectory is not None)
    answers.put((calls, *spent))


def measure(folder: str, prompts: int, threads: int, processes: int) -> dict[str, float]:
    """Runs all processes at once, each with the same number of rows."""
    context = get_context("spawn")
    ready, answers = context.Barrier(processes), context.Queue()
    started = [
        context.Process(target=roll_out, args=(folder, prompts, threads, number, ready, answers))
        for number in range(processes)
    ]
    for process in started:
        process.start()
    found = [answers.get(timeout=1200) for _ in started]
    for process in started:
        process.join()
    calls = sum(each[0] for each in found)
    return {
        "calls": calls,
        "cpu_ms/call": 1e3 * sum(each[1] for each in found) / calls,
        "calls/CPU s": calls / max(each[1] for each in found),
        "calls/s": calls / max(each[2] for each in found),
    }


def main() -> None:
    """Measures, and prints medians and their ratios."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--pairs", type=int, default=3)
    parser.add_argument("--prompts", type=int, default=64, help="rows of a worker, with four answers each")
    parser.add_argument("--threads", type=int, default=1, help="of PyTorch, in each process")
    options = parser.parse_args()
    from etude.quickstart.example import Rows
    from etude.quickstart.prepare import prepare

    with tempfile.TemporaryDirectory(prefix="etude-loops-") as folder:
        prepare(Path(folder), 1, Rows(train=8 + options.prompts, val=3, test=3, demonstrations=8))
        found: dict[int, list[dict[str, float]]] = {1: [], options.processes: []}
        for pair in range(options.pairs):
            for processes in sorted(found, reverse=bool(pair % 2)):
                found[processes].append(measure(folder, options.prompts, options.threads, processes))
                print(processes, {name: round(value, 3) for name, value in found[processes][-1].items()}, flush=True)
    for name in found[1][0]:
        one, several = (statistics.median(each[name] for each in found[n]) for n in (1, options.processes))
        print(f"{name}: {one:.3f}, {several:.3f}: {several / one:.2f} times")


if __name__ == "__main__":
    main()
