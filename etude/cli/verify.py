"""`etude verify RUN`: makes one step of a run again in float64, and says which term differs, if any does.

Invariant: exit status 0 means that every term that was compared is equal, 1 that one is not.
"""

from __future__ import annotations

from pathlib import Path

import click

from etude.cli.console import open_console


@click.command()
@click.argument("run_dir", type=click.Path(path_type=Path, exists=True, file_okay=False))
@click.option("--step", type=click.IntRange(1), help="Which step; default the last that can be verified.")
@click.option("--device", default="cpu", show_default=True, help="Where to compute, such as cuda.")
@click.option("--json", "as_json", is_flag=True, help="As one JSON object.")
def verify(run_dir: Path, step: int | None, device: str, as_json: bool) -> int:
    """Make one step of a run again, token by token, and compare it with what the run recorded.

    A plain trainer (float64, Hugging Face's model, one sequence at a time, no code shared with the trainer) starts from the
    checkpoint before the step and the step's dump. Then come the terms in the order in which they are computed: mask,
    rewards, log-probs, advantages, ratios, loss, gradient norm, change of the weights. The first that differs is where the
    fault is. The run's folder is enough, also on another machine; it needs trainer.rollout_data_dir, and a checkpoint of the
    step before (trainer.save_freq, or trainer.verify_every). With trainer.rollout_token_values every token is compared,
    else sums.

    \b
    Examples:
      etude verify runs/etude/mine
      etude verify runs/etude/mine --step 50
    """
    from etude.trainer.verify import use_threads_of, verify_step

    use_threads_of(run_dir)
    found = verify_step(run_dir, step, device=device)
    if as_json:
        import json
        from dataclasses import asdict

        from etude.jsonl import json_safe

        equal = {"equal": found.first is None, "explanation": found.explain()}
        click.echo(json.dumps(json_safe(equal | asdict(found)), allow_nan=False))
        return int(found.first is not None)
    console = open_console()
    console.print(f"step {found.step}: {found.rollouts} rollouts, {found.tokens:,} sampled tokens", style="bold")
    for term in found.terms:
        mark, style = ("✓", "green") if term.equal else ("✗", "bold red")
        detail = f"largest difference {term.excess * found.tolerance:.1e}" if term.equal else term.where
        console.print(f"{mark} {term.name:<20}{term.compared:>9,} numbers  {detail}", style=style, markup=False)
    for note in found.notes:
        console.print(f"– {note}", style="bright_black", markup=False)
    console.print(found.explain(), style="bold", markup=False)
    return int(found.first is not None)
