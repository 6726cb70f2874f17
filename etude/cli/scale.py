"""`etude scale RUN_DIR`: predicts a run's speed on other numbers of ranks, from the files in its folder."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import click


@click.command()
@click.argument("run_dir", type=click.Path(path_type=Path))
@click.option("--ranks", default="1,2,4,8", show_default=True, help="Numbers of ranks, comma-separated.")
@click.option("--staleness", default="0,1,4", show_default=True, help="Values of trainer.max_staleness to compare.")
@click.option("--prompts", type=click.IntRange(1), help="data.train_batch_size; default the run's.")
@click.option("--n", type=click.IntRange(1), help="Rollouts per prompt; default the run's.")
@click.option("--slots", type=click.IntRange(1), help="rollout.max_num_seqs; default the run's.")
@click.option(
    "--slower", type=click.FloatRange(0, min_open=True), default=1.0, help="Factor on the run's compute times."
)
@click.option("--tool-seconds", type=click.FloatRange(0), help="Mean seconds of a turn's tools; default as measured.")
@click.option("--weights-gib", type=click.FloatRange(0), default=0.0, help="Weights that cross at a sync.")
@click.option("--gradients-gib", type=click.FloatRange(0), default=0.0, help="Gradients that training ranks reduce.")
@click.option("--bandwidth", type=click.FloatRange(0, min_open=True), help="GiB per second between two ranks.")
@click.option("--rollouts", type=click.Path(path_type=Path), help="Rollout dumps; default RUN_DIR/rollouts.")
@click.option("--steps", type=click.IntRange(1), default=6, show_default=True, help="Steps to simulate.")
def scale(
    run_dir: Path,
    ranks: str,
    staleness: str,
    prompts: int | None,
    n: int | None,
    slots: int | None,
    slower: float,
    tool_seconds: float | None,
    weights_gib: float,
    gradients_gib: float,
    bandwidth: float | None,
    rollouts: Path | None,
    steps: int,
) -> None:
    """Predict throughput and utilisation on other numbers of ranks.

    A rank is one of the kind that RUN_DIR ran on. Needs its metrics.jsonl and
    its rollout dumps (trainer.rollout_data_dir).
    """
    from etude.viewer.scale import measure, recommend, with_tools  # imports NumPy: not for `etude --help`

    measured = measure(run_dir, rollouts)
    if tool_seconds is not None:
        measured = with_tools(measured, tool_seconds)
    costs = replace(
        measured.costs.slowed(slower),
        weights=weights_gib * 2**30,
        gradients=gradients_gib * 2**30,
        bandwidth=None if bandwidth is None else bandwidth * 2**30,
    )
    measured = replace(
        measured, costs=costs, prompts=prompts or measured.prompts, n=n or measured.n, slots=slots or measured.slots
    )
    click.echo(
        f"{'ranks':>6} {'staleness':>9}  {'placement':22} {'s/step':>9} {'samples/s':>10} {'engines':>8} {'training':>8}"
    )
    for number in _numbers(ranks, "--ranks", 1):
        for stale in _numbers(staleness, "--staleness", 0):
            prediction = recommend(measured, number, stale, steps=steps)
            if prediction is None:
                continue
            place = prediction.placement
            words = "all do both" if place.colocated else f"{place.trains} train, {place.rolls_out} roll out"
            click.echo(
                f"{number:6d} {stale:9d}  {words:22} {prediction.step_seconds:9.2f} {prediction.samples_per_second:10.2f} "
                f"{prediction.engines_busy:8.0%} {prediction.trainers_busy:8.0%}"
            )


def _numbers(text: str, option: str, least: int) -> list[int]:
    try:
        numbers = [int(part) for part in text.split(",")]
    except ValueError:
        numbers = []
    if not numbers or min(numbers) < least:
        raise click.BadParameter(f"whole numbers of at least {least}, comma-separated, not '{text}'", param_hint=option)
    return numbers
