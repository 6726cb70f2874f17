"""`etude report RUN_DIR`: rewrites a run's report page from the files in its folder."""

from __future__ import annotations

from pathlib import Path
from shlex import quote

import click

from etude.errors import ConfigError, DataError
from etude.viewer.conversations import sanitize_text


@click.command()
@click.argument("run_dir", type=click.Path(path_type=Path))
@click.option("--title", default="", help="Heading of the page; default the folder's name.")
@click.option("--rollouts", type=click.Path(path_type=Path), help="Rollout dumps; default RUN_DIR/rollouts.")
@click.option("--validation", type=click.Path(path_type=Path), help="Validation dumps; default RUN_DIR/validation.")
@click.option(
    "--why", is_flag=True, help="Print instead what stood in the way of learning in the last step, with examples."
)
@click.option("--step", type=click.IntRange(0), help="With --why: this step, as if the run had ended there.")
def report(
    run_dir: Path, title: str, rollouts: Path | None, validation: Path | None, why: bool, step: int | None
) -> None:
    """Write RUN_DIR/report.html and print its path."""
    from etude.viewer import answers
    from etude.viewer.page import write_report
    from etude.viewer.runs import Runs, RunView

    if (first := Runs(run_dir).all()[0].folder) != run_dir:
        raise DataError(f"{run_dir} is a folder of runs: name one, such as {first}")
    if step is not None and not why:
        raise ConfigError("--step is a question of --why: give both")
    if not why:
        click.echo(write_report(run_dir, title=title, rollouts=rollouts, validation=validation))
        return
    run = RunView("", run_dir, named={} if rollouts is None else {"train": rollouts}, ends=step is None)
    run.index.refresh()
    found = answers.why(run, step)
    if step is not None and step not in found["steps"]:
        kept = ", ".join(map(str, found["steps"])) or "none"
        raise DataError(f"{run_dir}: step {step} has no dump of rollouts; these have: {kept}")
    verdict = found["verdict"]
    lines = [f"step {found['step']}: {verdict['text']}", verdict["fix"] and f"→ {verdict['fix']}"]
    lines.insert(0 if verdict["rose"] else 2, verdict["trend"])
    for example in verdict["examples"]:
        file, _, line = example["place"].rpartition(":")
        lines.append(file and f"read one: etude explain {quote(str(run_dir / file))} --row {int(line) - 1}")
    for cause in found["causes"]:
        if (said := f"{cause['text']} of {cause['what']}") == verdict["text"]:
            continue
        rows = ", ".join(str(int(example["place"].rpartition(":")[2]) - 1) for example in cause["examples"])
        lines.append(f"{said}{rows and f'; such as --row {rows}'}")
        lines.append(cause["fix"] and cause["fix"] != verdict["fix"] and f"  → {cause['fix']}")
    for line in filter(None, [*lines, *(f"! {problem}" for problem in found["problems"])]):
        click.echo(sanitize_text(line))
