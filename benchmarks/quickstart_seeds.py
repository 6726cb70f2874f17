"""Runs `etude quickstart` for several seeds and prints a table for docs/quickstart.md.

    python benchmarks/quickstart_seeds.py --output-dir runs/seeds 1 2 3
    python benchmarks/quickstart_seeds.py --example calculator --output-dir runs/calculators 41 42 43 44 45

Each seed is a fresh process, one after another, so that their times can be compared; a seed whose folder is complete is
read, not run again. Wall times mean something on an otherwise idle machine only; CPU seconds are steadier.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
from pathlib import Path

COLUMNS = ("success_before", "success_after", "greedy_before", "greedy_after", "tool_use_before", "tool_use_after")


def run_seed(example: str, folder: Path, seed: int) -> dict[str, float]:
    """Runs one seed; returns `COLUMNS`, wall seconds and CPU seconds."""
    target = folder / f"seed-{seed}"
    if not (target / "summary.json").exists():
        command = [
            sys.executable,
            "-m",
            "etude.cli.main",
            "quickstart",
            "--example",
            example,
            "--output-dir",
            str(target),
            "--seed",
            str(seed),
        ]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    summary = json.loads((target / "summary.json").read_text())
    figures = {name: summary[name] for name in COLUMNS}
    return figures | {
        "wall": sum(summary["seconds"].values()),
        "cpu": sum(summary["cpu_seconds"].values()),
    }


def table(results: dict[int, dict[str, float]]) -> str:
    """Renders a Markdown table with a row per seed, and the medians."""
    lines = ["| seed | sampled before → after | greedy before → after | tool use before → after | wall s | CPU s |"]
    lines.append("|---|---|---|---|---|---|")
    median = {name: statistics.median(r[name] for r in results.values()) for name in next(iter(results.values()))}
    for label, r in [*((str(seed), r) for seed, r in results.items()), ("median", median)]:
        pairs = [f"{r[a]:.3f} → {r[b]:.3f}" for a, b in zip(COLUMNS[::2], COLUMNS[1::2])]
        lines.append(f"| {label} | {' | '.join(pairs)} | {r['wall']:.0f} | {r['cpu']:.0f} |")
    return "\n".join(lines)


def main() -> None:
    """Parses arguments, runs the seeds, prints the table and whether the claim held."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("seeds", nargs="*", type=int, default=[1, 2, 3])
    parser.add_argument("--example", default="stories")
    parser.add_argument("--output-dir", type=Path, default=Path("runs/seeds"))
    arguments = parser.parse_args()
    results = {seed: run_seed(arguments.example, arguments.output_dir, seed) for seed in arguments.seeds}
    print(f"{os.cpu_count()} cores\n\n{table(results)}")
    held = [
        r[f"{kind}_after"] >= 0.8 and r[f"{kind}_after"] - r[f"{kind}_before"] >= 0.4
        for r in results.values()
        for kind in ("success", "greedy")
    ]
    print(f"\nup by at least 0.4 to at least 0.8: {sum(held)} of {len(held)}")


if __name__ == "__main__":
    main()
