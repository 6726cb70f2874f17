"""`etude rescore`: rescores dumped trajectories with another reward; `etude reward`: runs scorers by hand.

Invariant: nothing is trained, rolled out or written. Exit status 1 means that the scorer failed on a row.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Collection, Iterable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from rich.console import Console
from rich.table import Table
from rich.text import Text

from etude.cli.console import open_console
from etude.errors import ConfigError, DataError
from etude.viewer.conversations import sanitize_text

if TYPE_CHECKING:
    from etude.trajectory import Trajectory

_SHOWN = 200  # maximum characters printed of an answer or a ground truth
_reward_option = click.option(
    "--reward", metavar="FILE.py:NAME", help="Your function (a file or dotted module); default the built-in scorers."
)
_kwargs_option = click.option(
    "--reward-kwargs", metavar="JSON", default="{}", help="Extra keyword arguments of every call."
)
_score_text_option = click.option(
    "--score-text",
    type=click.Choice(["assistant", "final_turn", "full"]),
    default="assistant",
    show_default=True,
    help="What the scorer gets as solution_str of a dump's answers, as reward_model.score_text.",
)
_timeout_option = click.option("--timeout", type=float, default=60.0, show_default=True, help="Seconds for one score.")


def _load(reward: str | None, reward_kwargs: str) -> Any:
    from etude.rewards import load_named

    try:
        extra = json.loads(reward_kwargs)
    except ValueError as error:
        raise ConfigError(f"--reward-kwargs is not JSON: {error}") from error
    if not isinstance(extra, dict):
        raise ConfigError('--reward-kwargs must be an object, such as {"bonus": 0.1}')
    if reward is None:
        if extra:
            raise ConfigError("--reward-kwargs are those of --reward")
        return None
    return load_named(reward, "--reward", extra)


@click.command()
@click.argument("rollouts", nargs=-1, required=True, type=click.Path(exists=True, path_type=Path))
@_reward_option
@_kwargs_option
@_timeout_option
@_score_text_option
@click.option(
    "--model",
    type=click.Path(exists=True, file_okay=False, path_type=Path),
    help="Folder whose tokenizer decodes the answers; default: the dump's text without what looks like special tokens.",
)
@click.option("--examples", type=click.IntRange(min=0), default=5, show_default=True, help="Changed rows to show.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def rescore(
    rollouts: tuple[Path, ...],
    reward: str | None,
    reward_kwargs: str,
    timeout: float,
    score_text: Any,
    model: Path | None,
    examples: int,
    as_json: bool,
) -> int:
    """Score dumped trajectories again and compare.

    ROLLOUTS are .jsonl files of trainer.rollout_data_dir, folders of them, or runs. Printed are the means of the reward
    manager's score then and now, how many rows changed, who was right and who is, and examples.

    \b
    Example:
      etude rescore outputs/rollouts/10.jsonl --reward my_reward.py:compute_score
    """
    from etude.dumps import list_dump_steps, read_rollouts
    from etude.rewards.rescore import compare, rescore

    places = [path / "rollouts" if (path / "rollouts").is_dir() else path for path in rollouts]
    files = [
        file
        for path in places
        for file in ([path / f"{step}.jsonl" for step in list_dump_steps(path)] if path.is_dir() else [path])
    ]
    if not files:
        raise DataError(f"there are no dumps in {', '.join(map(str, rollouts))}")
    records = (record for file in files for record in read_rollouts(file))
    scorer, decode = _load(reward, reward_kwargs), None
    if model is not None:
        from etude.models import load_tokenizer

        decode = partial(load_tokenizer(model).decode, skip_special_tokens=True)
    comparison = compare(rescore(records, scorer, timeout=timeout, score_text=score_text, decode=decode), examples)
    if as_json:
        click.echo(json.dumps(comparison, ensure_ascii=False, default=str))
    else:
        _print_comparison(open_console(), comparison)
    return int(comparison["failed"] > 0)


def _print_comparison(console: Console, comparison: Mapping[str, Any]) -> None:
    means = [comparison["old_mean"], comparison["new_mean"]]
    table = _table("rows", "changed", "failed", "old mean", "new mean", "change")
    cells = ["–" if mean is None else f"{mean:.4f}" for mean in means]
    change = "–" if None in means else f"{means[1] - means[0]:+.4f}"
    table.add_row(*(str(comparison[name]) for name in ("rows", "changed", "failed")), *cells, change)
    console.print(table)
    confusion = _table("", "now right", "now wrong")
    for was in ("right", "wrong"):
        confusion.add_row(f"was {was}", *(str(comparison["confusion"][f"{was}->{now}"]) for now in ("right", "wrong")))
    console.print(confusion)
    for each in comparison["examples"]:
        scores = f"{_number(each['old'])} → {_number(each['new'])}"
        console.print(Text(f"{each['uid']} (row {each['index']}, {each['data_source']}): {scores}", style="bold"))
        if each["error"]:
            console.print(Text(f"  {sanitize_text(each['error'])}", style="red"))
        console.print(Text("  …" + sanitize_text(each["text"][-_SHOWN:]).replace("\n", "⏎")))


def _table(*names: str) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold")
    for name in names:
        table.add_column(name, justify="right")
    return table


def _number(value: float | None) -> str:
    return "no score" if value is None else f"{value:g}"


@click.group()
def reward() -> None:
    """Run scorers by hand."""


@reward.command("list")
def list_scorers() -> None:
    """List the built-in scorers: data source and function."""
    from etude.rewards.default import FAMILIES, SCORERS

    named = {name: SCORERS.get(name) for name in SCORERS.names()} | {f"{name}*": f for name, f in FAMILIES.items()}
    for name, function in sorted(named.items()):
        click.echo(f"{name}  {function.__module__}.{function.__name__}")


@reward.command("try")
@click.argument("rows", type=click.Path(exists=True, dir_okay=False, path_type=Path))
@_reward_option
@_kwargs_option
@_timeout_option
@_score_text_option
@click.option("--row", "chosen", type=click.IntRange(min=0), multiple=True, help="Which rows, from 0; default 0.")
@click.option("--answer", help="The answer to score; '-' reads standard input. Default: asks for it.")
@click.option(
    "--dump",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="Score the answers of this dump to the rows instead, matched by data_source (if they share one) and index.",
)
def try_scorer(
    rows: Path,
    reward: str | None,
    reward_kwargs: str,
    timeout: float,
    score_text: Any,
    chosen: tuple[int, ...],
    answer: str | None,
    dump: Path | None,
) -> int:
    """Score answers to data rows.

    ROWS is a .parquet, .jsonl or .json file of rows. Each score is printed with its details and time.

    \b
    Example:
      etude reward try gsm8k/test.parquet --row 3 --answer "It is 18. #### 18"
    """
    from etude.data import read_rows

    scorer, table = _load(reward, reward_kwargs), read_rows(rows)
    numbers = chosen or (0,)
    if (missing := [number for number in numbers if number >= len(table)]) and dump is None:
        raise DataError(f"{rows} has no row {missing[0]}: it has {len(table)}")
    console, failed = open_console(), False
    if dump is None:
        answers = _typed(table, numbers, answer)
    else:
        answers = _dumped(table, chosen or range(len(table)), dump, score_text)
    for number, text, trajectory, opened in answers:
        failed |= _try_one(console, number, table[number], text, trajectory, opened, scorer, timeout)
    return int(failed)


Answers = Iterable[tuple[int, str, "Trajectory", str]]
"""The number of a row, an answer to it, its trajectory, and the tag that the prompt ends with."""


def _typed(table: list[dict[str, Any]], numbers: Iterable[int], answer: str | None) -> Answers:
    """Answers from --answer or a prompt."""
    from etude.trajectory import Trajectory

    for number in numbers:
        text = sys.stdin.read() if answer == "-" else answer
        if text is None:
            prompted: Any = click.prompt(f"answer to row {number}", default="", show_default=False)
            text = str(prompted)
        messages = [*(table[number].get("prompt") or ()), {"role": "assistant", "content": text}]
        yield number, text, Trajectory("typed", [], messages=messages, assistant_turns=1), ""


def _dumped(table: list[dict[str, Any]], numbers: Collection[int], dump: Path, score_text: Any) -> Answers:
    """Answers of a dump, whose trajectories the scorer sees as in training."""
    from etude.dumps import read_rollouts, trajectory_from_record
    from etude.rewards.rescore import solution_text
    from etude.rewards.view import opening_of

    sources = {row.get("data_source") for row in table}
    shared = any(record.get("data_source") in sources for record in read_rollouts(dump))  # else they were renamed
    key = "data_source and extra_info.index" if shared else "extra_info.index"
    places: dict[Any, list[int]] = {}
    for number, row in enumerate(table):
        place = (row.get("data_source") if shared else None, (row.get("extra_info") or {}).get("index", number))
        places.setdefault(place, []).append(number)
    foreign = 0
    for record in read_rollouts(dump):
        index = (record.get("extra_info") or {}).get("index", record.get("index"))
        found = places.get((record.get("data_source") if shared else None, index), [])
        if others := [number for number in found[1:] if repr(table[number]) != repr(table[found[0]])]:
            raise DataError(
                f"rows {found[0]} and {others[0]} have the same {key} ({index}): which of them an answer of the dump "
                "belongs to is not known",
                fix="number the rows from 0 on",
            )
        foreign += not found
        if matched := [number for number in found if number in numbers]:
            texts, trajectory = [each.get("text") for each in record["segments"]], trajectory_from_record(record)
            opened = opening_of(str(record.get("input") or ""))
            yield matched[0], solution_text(trajectory, texts, score_text), trajectory, opened
    if foreign:
        click.echo(f"answers of {dump} whose {key} no row has: {foreign}", err=True)


def _try_one(
    console: Console,
    number: int,
    row: Mapping[str, Any],
    text: str,
    trajectory: Trajectory,
    opened: str,
    scorer: Any,
    timeout: float,
) -> bool:
    """Scores one answer and prints the result; returns whether the scorer failed."""
    import asyncio

    from etude.errors import InfrastructureError, one_line
    from etude.rewards.default import score_row
    from etude.rewards.manager import BoundedScorer, read_result
    from etude.rewards.scoring import scored_extra_info
    from etude.rewards.view import TrajectoryView

    truth = (row.get("reward_model") or {}).get("ground_truth")
    arguments = {"data_source": row.get("data_source"), "solution_str": text, "ground_truth": truth}
    view = replace(TrajectoryView.of(trajectory), opened=opened)
    arguments |= {"extra_info": scored_extra_info(trajectory, row), "trajectory": view}
    started = time.perf_counter()
    try:
        result = asyncio.run(BoundedScorer(scorer or score_row, timeout)(**arguments))
        found = read_result(result, "the scorer")
    except InfrastructureError as error:
        console.print(Text(f"row {number}: {one_line(error)}", style="red"))
        return True
    details = {key: value for key, value in found["reward_extra_info"].items() if key != "score"}
    seconds = time.perf_counter() - started
    line = f"row {number}: score {found['reward_score']:g} ({seconds:.3f} s), ground truth {str(truth)[:_SHOWN]!r}"
    console.print(Text(sanitize_text(f"{line}, {details}")))
    return False
