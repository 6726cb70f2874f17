"""`etude report RUN_DIR`: rewrites a run's report page from the files in its folder."""

from __future__ import annotations

from pathlib import Path

import click

from etude.viewer.conversations import sanitize_text


@click.command()
@click.argument("run_dir", type=click.Path(path_type=Path))
@click.option("--title", default="", help="Heading of the page; default the folder's name.")
@click.option("--rollouts", type=click.Path(path_type=Path), help="Rollout dumps; default RUN_DIR/rollouts.")
@click.option("--validation", type=click.Path(path_type=Path), help="Validation dumps; default RUN_DIR/validation.")
@click.option(
    "--why", is_flag=True, help="Print instead what stood in the way of learning in the last step, with examples."
)
def report(run_dir: Path, title: str, rollouts: Path | None, validation: Path | None, why: bool) -> None:
    """Write RUN_DIR/report.html and print its path."""
    from etude.viewer import answers
    from etude.viewer.page import write_report
    from etude.viewer.runs import RunView

    if not why:
        click.echo(write_report(run_dir, title=title, rollouts=rollouts, validation=validation))
        return
    run = RunView("", run_dir, named={} if rollouts is None else {"train": rollouts}, ends=True)
    run.index.refresh()
    found = answers.why(run)
    verdict = found["verdict"]
    lines = [f"step {found['step']}: {verdict['text']}", verdict["fix"] and f"→ {verdict['fix']}"]
    lines.insert(0 if " rose:" in verdict["trend"] else 2, verdict["trend"])
    for example in verdict["examples"][:1]:
        file, _, line = example["place"].rpartition(":")
        lines.append(file and f"read one: etude explain {run_dir / file} --row {int(line) - 1}")
    for cause in found["causes"]:
        examples = ", ".join(example["name"] for example in cause["examples"])
        lines.append(f"{cause['text']} {cause['what']}{examples and f'; such as {examples}'}")
        lines.append(cause["fix"] and cause["fix"] != verdict["fix"] and f"  → {cause['fix']}")
    for line in filter(None, [*lines, *(f"! {problem}" for problem in found["problems"])]):
        click.echo(sanitize_text(line))
