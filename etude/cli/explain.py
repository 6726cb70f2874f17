"""`etude explain ROLLOUTS.jsonl`: prints a trajectory token by token, and checks that it is token-exact.

Invariant: exit status 0 means that no check failed, 1 that at least one did.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any

import click
from rich.console import Console
from rich.table import Table
from rich.text import Text

from etude.cli.console import open_console
from etude.dumps import sequences_of, trajectory_from_record
from etude.errors import DataError, plural
from etude.trajectory import StopReason
from etude.viewer.conversations import PROVENANCE_COLOURS, sanitize_text
from etude.viewer.explain import (
    Check,
    Token,
    Verdict,
    Weights,
    check_overlap,
    check_sequence,
    list_tokens,
    read_row,
    weight_versions_of,
)
from etude.viewer.rows import assistant_turns, calls_of, exchange

_MAX_RESPONSE = 160  # characters of a tool's answer in the head
_MARKS = {Verdict.HOLDS: ("✓", "green"), Verdict.FAILS: ("✗", "bold red"), Verdict.SKIPPED: ("–", "bright_black")}


@click.command()
@click.argument("rollouts", type=click.Path(path_type=Path))
@click.option("--row", type=click.IntRange(min=0), default=0, show_default=True, help="Which trajectory, from 0.")
@click.option(
    "--model",
    type=click.Path(exists=True, file_okay=False, path_type=Path),
    help="Folder of the weights that sampled it; default the run's own checkpoint of that version, if it was kept.",
)
@click.option("--tolerance", type=float, default=1e-4, show_default=True, help="Largest log-prob difference, in nats.")
@click.option("--tokens/--no-tokens", default=True, help="Whether to print the table of tokens.")
def explain(rollouts: Path, row: int, model: Path | None, tolerance: float, tokens: bool) -> int:
    """Print trajectory ROW of a rollout dump (of a folder: its newest) token by token, and verify it.

    First come question, tool calls, answer, ground truth and reward, then the tokens. Each response token comes with its
    mask, turn, log-prob and reward, and with what the trainer had of it where the dump
    says (trainer.rollout_token_values); green was sampled by the policy, cyan came from a
    tool, yellow from a user, grey from the chat template. Then come the checks: that the ids trained on are those of the
    context, that the mask is provenance, that log-probs and rewards are on the right tokens, and, with the weights, that a
    full forward pass gives the engine's log-probs. Where the agent rewrote its history, every sequence is printed and
    verified, in time order; the last carries the rewards.
    """
    console = open_console()
    if not rollouts.exists():
        raise DataError(f"{rollouts}: no such file or folder; {_name_nearest(rollouts)}")
    if rollouts.is_dir():
        rollouts = _newest_dump(rollouts)
    record = read_row(rollouts, row)
    sequences = sequences_of(record)
    _print_head(console, rollouts, row, record)
    decode = _decoder(rollouts, model) if tokens else None
    checked, load = list[Check](), lru_cache(maxsize=1)(Weights)  # sequences may have one model
    for number, sequence in enumerate(sequences):
        folder = model or _own_checkpoint(rollouts, weight_versions_of(trajectory_from_record(sequence)))
        if len(sequences) > 1:
            _print_sequence(console, number, len(sequences), sequence)
        if tokens:
            _print_tokens(console, list_tokens(sequence, decode, sequences))
        checks = check_sequence(sequence, load(folder) if folder else None, tolerance)
        _print_checks(console, checks)
        checked += checks
    if (claims := check_overlap(record)) is not None:
        console.print()
        _print_checks(console, [claims])
        checked.append(claims)
    return int(any(check.verdict is Verdict.FAILS for check in checked))


def _name_nearest(path: Path) -> str:
    """Names a dump of rollouts near a `path` that does not exist: the one of its name, else the newest."""
    near = next(folder for folder in path.parents if folder.is_dir())
    places = ("[0-9]*.jsonl", "rollouts/*.jsonl", "*/rollouts/*.jsonl", "*/*/rollouts/*.jsonl")
    found = next(filter(None, (list(start.glob(place)) for start in (near, Path()) for place in places)), [])
    if not found:
        return "a run writes dumps into trainer.rollout_data_dir"
    return f"did you mean {max(found, key=lambda each: (each.name == path.name, each.stat().st_mtime))}?"


def _newest_dump(folder: Path) -> Path:
    """Returns the dump of the last step in a run folder or a dump folder."""
    places = (folder / "rollouts", folder)
    found = [path for place in places for path in place.glob("*.jsonl") if path.stem.isdecimal()]
    if not found:
        raise DataError(f"{folder}: there is no dump of rollouts; set trainer.rollout_data_dir in the run")
    return max(found, key=lambda path: int(path.stem))


def _own_checkpoint(rollouts: Path, versions: list[int]) -> Path | None:
    """Returns the run's checkpoint of the weights that sampled the trajectory; None if several versions did, or if it was
    not kept."""
    if len(versions) != 1:
        return None
    folder = rollouts.absolute().parent.parent / f"global_step_{versions[0]}" / "actor" / "huggingface"
    return folder if folder.is_dir() else None


def _decoder(rollouts: Path, model: Path | None) -> Callable[[list[int]], str] | None:
    """Decodes with the tokenizer of `model`, else of some checkpoint of the run: all have the same."""
    from etude.models import load_tokenizer

    checkpoints = rollouts.absolute().parent.parent.glob("global_step_*/actor/huggingface")
    folder = model or min(checkpoints, default=None)
    return None if folder is None else load_tokenizer(folder).decode


def _print_head(console: Console, rollouts: Path, row: int, record: dict[str, Any]) -> None:
    facts = {
        "step": record.get("step"),
        "stop": record.get("stop_reason"),
        "prompt": plural(len(record.get("prompt_ids", [])), "token"),
        "images": ", ".join(f"{image['tokens']} tokens" for image in record.get("images") or ()) or None,
        "score": record.get("score"),
    }
    console.print(Text(f"{rollouts} row {row}", style="bold"))
    told = [f"{name} {value}" for name, value in facts.items() if value is not None]
    console.print(Text(" · ".join([*told, plural(assistant_turns(record), "assistant turn")])))
    exchanged = exchange(record)
    if record.get("stop_reason") == StopReason.TOOL_RESPONSE_OVERFLOW.value:
        exchanged.pop("answered", None)  # it is the call
    lines = [
        ("asked", exchanged.pop("asked", "")),
        *_list_calls(record),
        *exchanged.items(),
        ("reward", _reward_of(record)),
    ]
    for name, text in lines:
        if text:
            console.print(Text(f"{name}: {sanitize_text(text)}"))


def _list_calls(record: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    calls = calls_of(record)
    for call in calls:
        response = " ".join(str(call.get("response")).split())[:_MAX_RESPONSE]
        yield "called", f"{call.get('name')} {call.get('arguments')} → {response}"
    if calls and record.get("stop_reason") == StopReason.TOOL_RESPONSE_OVERFLOW.value:
        yield "unanswered", "the model did not see what the last turn's calls said: no room in data.max_response_length"


def _reward_of(record: Mapping[str, Any]) -> str:
    """What was paid, by source, and what else the scorer said of the answer."""
    rewards = trajectory_from_record(record).rewards
    paid = [(tool, value) for _, tool, value in rewards.steps if value]
    paid += [(f"{tool} at the end", value) for tool, value in rewards.final.items()]
    score = [] if rewards.score is None else [("score", rewards.score)]
    said = [(name, value) for name, value in rewards.score_info.items() if name != "score"]
    return ", ".join(
        f"{name} {value:g}" if isinstance(value, float) else f"{name} {value!s:.{_MAX_RESPONSE}}"
        for name, value in score + paid + said
    )


def _print_sequence(console: Console, number: int, count: int, sequence: Mapping[str, Any]) -> None:
    kind = "main" if number == count - 1 else "earlier"
    console.print()
    role = f", {sanitize_text(str(sequence['role']))}" if sequence.get("role") else ""
    console.print(Text(f"sequence {number} of {count} ({kind}{role})", style="bold"), end="")
    console.print(Text(f" · prompt {len(sequence['prompt_ids'])} tokens · stop {sequence.get('stop_reason')}"))


_COLUMNS = {"advantages": "advantage", "old_log_probs": "trainer", "log_probs": "in update", "entropys": "entropy"}


def _print_tokens(console: Console, tokens: Iterable[Token]) -> None:
    listed = list(tokens)
    values = [name for name in _COLUMNS if any(name in token.values for token in listed[:1])]
    table = Table(box=None, pad_edge=False, header_style="bold")
    for name in ("token", "id", "mask", "turn", "log-prob", *map(_COLUMNS.__getitem__, values), "reward"):
        table.add_column(name, justify="right")
    for name in ("from", "text"):
        table.add_column(name, overflow="fold")
    for token in listed:
        numbers = [token.log_prob, *(token.values[name] for name in values)]
        table.add_row(
            str(token.position),
            str(token.id),
            str(token.mask),
            str(token.turn),
            *("" if number is None else f"{number:.4f}" for number in numbers),
            f"{token.reward:g}" if token.reward else "",
            token.provenance.value,
            Text(sanitize_text(token.text).replace("\n", "⏎").replace("\t", "⇥")),
            style=PROVENANCE_COLOURS[token.provenance],
        )
    console.print(table)


def _print_checks(console: Console, checks: list[Check]) -> None:
    for check in checks:
        mark, colour = _MARKS[check.verdict]
        console.print(Text.assemble((f"{mark} {check.statement}", colour), (f"  {check.evidence}", "default")))
