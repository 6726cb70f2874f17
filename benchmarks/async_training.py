"""Asynchronous against synchronous training, where tools are slow: the table of docs/async.md.

    python benchmarks/async_training.py                           staleness 0, 1 and 4, three seeds each: an hour
    python benchmarks/async_training.py --staleness 0,1 --seeds 1 some; the others stay as they are
    python benchmarks/async_training.py --publish                 the table goes into docs/async.md

Each run is the quickstart from the warmed-up model of its seed, with a calculator whose answers take a log-normal time (see
`slow_calculator.py`). A run that has finished is read, not run again. Samples a second count the steps' own time: neither
start-up nor validation. Wall times mean something on an idle machine only; where the tools wait, that matters less.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
from pathlib import Path

from learning_curves import GREEDY, SAMPLED, finished, metrics, spread, warm_up

_HERE = Path(__file__).resolve().parent
_PAGE = _HERE.parent / "docs" / "async.md"
_BEGIN, _END = "<!-- async training: begin -->", "<!-- async training: end -->"
_TOOLS = """
tools:
  - class_name: {here}/slow_calculator.py:SlowCalculator
    config: {{type: native, timeout: 600, max_expression_chars: 40, median_seconds: {median}, sigma: {sigma}}}
    tool_schema:
      type: function
      function:
        name: calculator
        parameters: {{type: object, properties: {{expression: {{type: string}}}}, required: [expression]}}
"""


def main() -> None:
    """Runs the requested runs, then prints the table of everything measured so far."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--staleness", default="0,1,4")
    parser.add_argument("--seeds", default="1,2,3")
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--median", type=float, default=0.5, help="of a tool call, in seconds")
    parser.add_argument("--sigma", type=float, default=1.0, help="of its logarithm")
    parser.add_argument("--work", type=Path, default=Path("build/async_training"))
    parser.add_argument("--publish", action="store_true", help="the table goes into docs/async.md")
    arguments = parser.parse_args()
    seeds = [int(seed) for seed in arguments.seeds.split(",")]
    levels = [int(level) for level in arguments.staleness.split(",")]
    arguments.work.mkdir(parents=True, exist_ok=True)
    tools = arguments.work.resolve() / "tools.yaml"
    tools.write_text(_TOOLS.format(here=_HERE, median=arguments.median, sigma=arguments.sigma))
    for seed in seeds:
        for level in levels:
            run(arguments.work, tools, level, seed, arguments.steps)
    text = table(arguments.work, levels, seeds)
    print(text)
    if arguments.publish:
        before, _, rest = _PAGE.read_text(encoding="utf-8").partition(_BEGIN)
        _PAGE.write_text(f"{before}{_BEGIN}\n\n{text}\n\n{_END}{rest.partition(_END)[2]}", encoding="utf-8")


def folder_of(work: Path, level: int, seed: int) -> Path:
    """Returns the folder of a run."""
    return work / f"staleness-{level}" / f"seed-{seed}"


def run(work: Path, tools: Path, level: int, seed: int, steps: int) -> None:
    """Runs one training, unless it has finished."""
    folder = folder_of(work, level, seed)
    if finished(folder, steps):
        return
    start = warm_up(work, seed)
    print(f"max_staleness={level}, seed {seed}", flush=True)
    folder.mkdir(parents=True, exist_ok=True)
    command = [
        *(sys.executable, "-m", "etude.cli.main", "train", "--config-name=quickstart"),
        f"data.train_files={start}/data/train.parquet",
        f"data.val_files={start}/data/val.parquet",
        f"actor_rollout_ref.model.path={start}/warm_up/huggingface",
        f"actor_rollout_ref.rollout.multi_turn.tool_config_path={tools}",
        f"trainer.default_local_dir={folder}",
        f"trainer.seed={seed}",
        f"trainer.total_training_steps={steps}",
        "trainer.deterministic=false",
        "trainer.save_freq=-1",
        f"trainer.test_freq={steps}",
        "trainer.logger=[jsonl]",
        f"trainer.max_staleness={level}",
    ]
    with (folder / "output.txt").open("a") as output:
        made = subprocess.run(command, stdout=output, stderr=subprocess.STDOUT)
    if made.returncode:
        raise SystemExit(f"max_staleness={level}, seed {seed}: see {folder}/output.txt")


def rate(work: Path, level: int, seed: int) -> float:
    """Returns samples per second: the rollouts of all steps over the steps' time."""
    steps = [row for row in metrics(folder_of(work, level, seed)) if row["step"]]
    config = (folder_of(work, level, seed) / "config.yaml").read_text()
    n = next(int(line.split()[1]) for line in config.splitlines() if line.startswith("    n: "))
    return n * sum(row["prompts/planned"] for row in steps) / sum(row["timing_s/step"] for row in steps)


def table(work: Path, levels: list[int], seeds: list[int]) -> str:
    """Renders a Markdown table with a row per staleness: medians over seeds with the range."""
    lines = [
        "| `max_staleness` | samples/s | against 0 | mean age of a token, steps | greedy success: before → after | "
        "sampled, last five steps | seeds |",
        "|---|---|---|---|---|---|---|",
    ]
    for level in levels:
        done = [
            seed
            for seed in seeds
            if any(GREEDY in row and row["step"] for row in metrics(folder_of(work, level, seed)))
        ]
        runs = [metrics(folder_of(work, level, seed)) for seed in done]
        greedy = [[row[GREEDY] for row in rows if GREEDY in row] for rows in runs]
        sampled = [statistics.fmean(row[SAMPLED] for row in rows[-5:]) for rows in runs]
        ages = [statistics.fmean(row.get("staleness/mean", 0.0) for row in rows if row["step"]) for rows in runs]
        against = [rate(work, level, seed) / rate(work, 0, seed) for seed in done if metrics(folder_of(work, 0, seed))]
        cells = [
            spread([rate(work, level, seed) for seed in done]),
            spread(against),
            spread(ages),
            f"{spread([g[0] for g in greedy])} → {spread([g[-1] for g in greedy])}",
            spread(sampled),
            str(len(done)),
        ]
        lines.append(f"| {level} | {' | '.join(cells)} |")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
