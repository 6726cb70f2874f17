"""`etude runs list|show|compare|rm` and `etude reproduce RUN`: manage and repeat runs from the files in their folders."""

from __future__ import annotations

import json
import shlex
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from etude.cli.config import PLAIN_SETTINGS

if TYPE_CHECKING:
    from etude.viewer.runs import Run

_FOLDER = click.Path(path_type=Path, exists=True, file_okay=False)
_MAX_SHOWN = 200  # characters of one value
_MAX_COMMAND = 4000
_COST_FACTS = ("totals", "per step", "per point of success")


@click.group()
def runs() -> None:
    """List, show, compare and remove runs."""


@runs.command("list")
@click.argument("folder", type=_FOLDER, default=Path())
@click.option("--json", "as_json", is_flag=True, help="One JSON object a line.")
def list_runs(folder: Path, as_json: bool) -> None:
    """List the runs in FOLDER (default: here) and how they stand."""
    from etude.viewer.runs import brief_cost, find_runs, read_run

    found = [read_run(each) for each in find_runs(folder)]
    if as_json:
        for run in found:
            _print_json(_brief(run))
        return
    if not found:
        click.echo(f"no runs in {folder}", err=True)
        return
    from rich.table import Table

    from etude.cli.console import open_console

    table = Table("run", "kind", "status", "step", "reward", "model", "began", "cost", box=None, pad_edge=False)
    for run in found:
        steps = f"{run.step}/{run.total_steps}" if run.total_steps else str(run.step)
        reward = "" if run.reward is None else f"{run.reward:.3f}"
        began = "" if run.started is None else run.started.astimezone().strftime("%Y-%m-%d %H:%M")
        cost = brief_cost(run)
        table.add_row(_safe(run.folder), _safe(run.kind), run.status, steps, reward, _safe(run.model), began, cost)
    open_console().print(table, markup=False)


@runs.command()
@click.argument("run_dir", type=_FOLDER)
@click.option("--json", "as_json", is_flag=True, help="As one JSON object.")
def show(run_dir: Path, as_json: bool) -> None:
    """Show what a run was made from, how it stands and what it cost."""
    from etude.run_folder import metrics_of, unit_costs
    from etude.viewer.runs import read_run

    run = read_run(run_dir)
    if as_json:
        _print_json(_brief(run) | {"costs": unit_costs(metrics_of(run.folder), run.record), "record": run.record})
        return
    for name, value in _facts(run):
        click.echo(f"{name:<20} {_safe(value)}")


@runs.command()
@click.argument("left", type=_FOLDER)
@click.argument("right", type=_FOLDER)
def compare(left: Path, right: Path) -> None:
    """Show the keys, code and files in which two runs differ, and what each reached."""
    from etude.run_folder import read_config
    from etude.viewer.runs import MISSING, diff_configs, read_run

    sides = read_run(left), read_run(right)
    first, second = (dict(_fact_lines(run)) for run in sides)
    always = ("run", "status", "steps", "reward", "validation")
    shown = [name for name in first | second if name in always or first.get(name) != second.get(name)]
    width = max(len(name) for name in shown if not name.startswith("file "))
    for name in shown:
        _print_pair(name, first.get(name, MISSING), second.get(name, MISSING), width + 1)
    for each in diff_configs(read_config(left), read_config(right)):
        _print_pair(each.key, each.left, each.right)


@runs.command()
@click.argument("run_dirs", type=click.Path(path_type=Path), nargs=-1, required=True)
@click.option("--yes", is_flag=True, help="Do not ask.")
def rm(run_dirs: tuple[Path, ...], yes: bool) -> None:
    """Remove runs with everything in their folders, checkpoints included. One that is running, or has a running one in its
    folder, is refused."""
    from etude.errors import ConfigError
    from etude.viewer.runs import find_runs, is_run, read_run

    for folder in run_dirs:
        if folder.is_symlink() or not is_run(folder):
            raise ConfigError(f"{folder} is no run's folder: nothing was removed")
        for each in find_runs(folder):  # includes nested runs, such as evaluations
            if read_run(each).status == "running":
                raise ConfigError(f"{each} is running: end it first; nothing was removed")
    for folder in run_dirs:
        run = read_run(folder)
        size = sum(each.lstat().st_size for each in folder.rglob("*") if not each.is_symlink())
        question = f"remove {_safe(folder)} ({run.status}, step {run.step}, {size / 2**20:,.1f} MiB)?"
        if yes or click.confirm(question):
            shutil.rmtree(folder)
            click.echo(f"removed {_safe(folder)}")


@click.command(context_settings=PLAIN_SETTINGS)
@click.argument("run_dir", type=_FOLDER)
@click.argument("overrides", nargs=-1, type=click.UNPROCESSED)
@click.option("--output", type=click.Path(path_type=Path), help="Folder of the new run; default RUN_DIR-again.")
@click.option("--check", "steps", type=click.IntRange(1), metavar="STEPS", help="Run and compare only the first STEPS.")
@click.option(
    "--from-step", type=click.IntRange(1), metavar="STEP", help="Go back to the checkpoint of STEP, and branch."
)
def reproduce(
    run_dir: Path, overrides: tuple[str, ...], output: Path | None, steps: int | None, from_step: int | None
) -> int:
    """Run a run's configuration again into a new folder, and compare the metrics bit for bit.

    First says what is not as it was: code, packages, machine, data. OVERRIDES are key=value arguments: secrets that the run
    does not keep, or what should differ. With --check and no --output nothing is kept. Exit status 1: metrics differ.

    With --from-step the new run goes on from a checkpoint of the old one, and records it as its parent: without OVERRIDES
    the same steps again, bit for bit, with them a branch, which `etude view` compares with its parent.

    \b
    Examples:
      etude reproduce runs/etude/mine
      etude reproduce runs/etude/mine --check 2
      etude reproduce runs/etude/mine --from-step 50 actor_rollout_ref.actor.optim.lr=1e-6
    """
    from etude.run_folder import read_config
    from etude.trainer.reproduce import reproduce as run_again
    from etude.viewer.display import Display

    def note(line: str) -> None:
        click.echo(f"differs: {_safe(line)}", err=True)

    with tempfile.TemporaryDirectory(prefix="etude-reproduce-") as scratch:
        old, ending = run_dir.resolve(), f"from-{from_step}" if from_step else "again"
        kept = output or (Path(scratch) / "run" if steps else old.with_name(f"{old.name}-{ending}"))
        show = Display(kept=not kept.is_relative_to(scratch))
        result = run_again(run_dir, kept, overrides, steps=steps, from_step=from_step, emit=show, note=note)
    for step, name, then, now in result.differences[:20]:
        click.echo(f"step {step}: {_safe(name)} {_safe(then)}, now {_safe(now)}")
    if from_step and overrides:
        compare = shlex.join(["etude", "runs", "compare", str(run_dir), str(kept)])
        click.echo(f"branched at step {from_step} into {kept}: {compare}")
        return 0
    if result.differences or not result.steps:
        bits = read_config(old)["trainer"].get("deterministic")
        why = "" if bits else "; bits are promised with trainer.deterministic=true, which this run did not have"
        click.echo(f"not reproduced: {len(result.differences)} metrics differ in {result.steps} steps{why}", err=True)
        return 1
    click.echo(f"reproduced: the metrics of {result.steps} steps are the same, bit for bit")
    return 0


def _brief(run: Run) -> dict[str, Any]:
    names = ("status", "why", "kind", "model", "step", "total_steps", "reward", "validation")
    return {"run": str(run.folder)} | {name: getattr(run, name) for name in names}


def _facts(run: Run) -> Iterator[tuple[str, Any]]:
    """Yields (name, value) of each fact that `show` and `compare` print."""
    from etude.run_folder import metrics_of
    from etude.viewer.runs import cost_facts, told_validation

    record = run.record
    yield "run", run.folder
    yield "status", f"{run.status}: {run.why}" if run.why else run.status
    if run.branch:
        yield "branch of", run.branch
    if run.model:
        yield "model", run.model
    yield "steps", f"{run.step} of {run.total_steps}" if run.total_steps else run.step
    if run.reward is not None:
        yield "reward", f"{run.reward:.4g}"
    if run.validation or run.missing:
        yield "validation", told_validation(run)
    yield from cost_facts(metrics_of(run.folder), record).items()
    if record.get("started"):
        resumed = f", resumed {record['resumed']}" if record.get("resumed") else ""
        yield "began", f"{record['started']}{resumed}, ended {record.get('ended_at') or 'not yet'}"
    if isinstance(command := record.get("command"), list):
        yield "command", shlex.join(str(each) for each in command)
    for name in ("working_folder", "versions", "hardware", "platform"):
        if record.get(name):
            yield name.partition("_")[0], record[name]
    code = record.get("code")
    for name, state in code.items() if isinstance(code, Mapping) else ():
        if isinstance(state, Mapping):
            changed = " with changes" if state.get("dirty") else ""
            yield f"code {name}"[:12], f"commit {state.get('commit')}{changed}"
    if isinstance(seeds := record.get("seeds"), Mapping):
        yield "seeds", ", ".join(f"{key}={value}" for key, value in seeds.items())
    files = record.get("files")
    for name, each in files.items() if isinstance(files, Mapping) else ():
        if isinstance(each, Mapping):
            yield f"file {each.get('key')} {Path(name).name}", f"{name} (sha256 {str(each.get('sha256'))[:12]})"


def _fact_lines(run: Run) -> Iterator[tuple[str, Any]]:
    """The facts, with each cost as one of its own."""
    for name, value in _facts(run):
        if name not in _COST_FACTS:
            yield name, value
            continue
        for cost in value.split(", "):
            number, _, unit = cost.partition(" ")
            yield f"{name}, {unit}", number


def _print_pair(name: str, left: Any, right: Any, width: int = 0) -> None:
    if name == "command" and left != right:  # each whole, on a line that can be pasted
        click.echo(f"command:\n  {_safe(left, _MAX_COMMAND)}\n→\n  {_safe(right, _MAX_COMMAND)}")
        return
    same = left == right
    click.echo(f"{_safe(name) + ':':<{width}} {_safe(left)}" + ("" if same else f" → {_safe(right)}"))


def _print_json(value: Any) -> None:
    from etude.jsonl import json_safe

    click.echo(json.dumps(json_safe(value), allow_nan=False))


def _safe(value: Any, limit: int = _MAX_SHOWN) -> str:
    """Formats a value as one line of limited length without control characters, since a run's files may contain anything."""
    from etude.viewer.conversations import sanitize_text

    text = " ".join(sanitize_text(str(value)).split())
    return text if len(text) <= limit else text[: limit - 1] + "…"
