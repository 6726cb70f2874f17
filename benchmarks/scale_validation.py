"""What `etude scale` predicts beside what runs do: from one run in this process, its own speed and that of others.

    python benchmarks/scale_validation.py [--workers 1,2,4] [--staleness 1,4] [--steps 10] [--median 2] [--sigma 0.5]

The runs train a tiny model whose every answer calls a calculator that takes a log-normal time (`slow_calculator.py`), 8
prompts a step, 4 answers each. The first, synchronous and in this process, is what the predictions are made from; the others
have as many workers on Ray, or a staleness, as the row says. Medians of the steps after the first two.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent / "tests"))

from async_training import _TOOLS as TOOLS  # noqa: E402
from house_stage import ACTOR, ROLLOUT, Tiny, metrics  # noqa: E402

from etude.cli.scale import Placement, measure, predict  # noqa: E402
from etude.trainer.run import train  # noqa: E402

WARM_UP = 2  # steps that are not measured


def seconds(folder: Path) -> float:
    """Returns the median seconds per step of a run."""
    return statistics.median(record["timing_s/step"] for record in metrics(folder)[WARM_UP:])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workers", default="1,2,4")
    parser.add_argument("--staleness", default="1,4")
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--median", type=float, default=2.0, help="of a tool call, in seconds")
    parser.add_argument("--sigma", type=float, default=0.5, help="of its logarithm")
    options = parser.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="etude-scale-"))
    tiny = Tiny.build(folder)
    tools = folder / "tools.yaml"
    tools.write_text(TOOLS.format(here=HERE, median=options.median, sigma=options.sigma))

    def run(name: str, *keys: str) -> float:
        common = (
            f"{ROLLOUT}.multi_turn.tool_config_path={tools}",
            "data.train_batch_size=8",
            f"trainer.total_training_steps={options.steps}",
            "trainer.deterministic=false",
            "trainer.save_freq=-1",
            f"{ACTOR}.optim.lr=1e-9",  # a higher rate would teach it to skip the calculator
        )
        train(tiny.config(folder / name, *common, *keys))
        return seconds(folder / name)

    def row(name: str, took: float, placement: Placement) -> None:
        found = predict(measured, placement, steps=20).step_seconds
        print(f"| {name} | {took:.2f} | {found:.2f} | {found / took - 1:+.0%} |", flush=True)

    took = run("here")
    measured = measure(folder / "here")
    print("| run | s/step | predicted | error |\n|---|---|---|---|")
    row("in this process", took, Placement(1, 1, colocated=True))
    for level in filter(None, options.staleness.split(",")):
        took = run(f"stale-{level}", f"trainer.max_staleness={level}")
        row(f"in this process, max_staleness={level}", took, Placement(1, 1, colocated=False, staleness=int(level)))
    for workers in filter(None, options.workers.split(",")):
        took = run(f"ray-{workers}", "trainer.backend=ray", f"trainer.n_gpus_per_node={workers}")
        row(f"{workers} on Ray", took, Placement(int(workers), int(workers), colocated=True))


if __name__ == "__main__":
    main()
