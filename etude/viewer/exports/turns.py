"""`ExportedRollout`: a record as the turns that other programs' formats are made of.

Invariant: the token ids of the turns are those that the policy sampled, in order, with their log-probs, whatever the
messages look like. A dump without segments (verl's) is one turn of text without ids.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import takewhile
from typing import Any

from etude.dumps import sequences_of, trajectory_from_record
from etude.errors import DataError
from etude.trajectory import Provenance, Trajectory
from etude.viewer.index import RolloutIndex
from etude.viewer.rows import Row, as_dict, as_list


@dataclass(frozen=True)
class Call:
    """A tool call: `arguments` as an object, also where the model wrote none."""

    id: str
    name: str
    arguments: dict[str, Any]
    response: str
    error: str | None
    reward: float
    seconds: float


@dataclass
class Turn:
    """What the policy wrote between two inputs. `context` counts the tokens before it; `said` is what a user answered."""

    text: str = ""
    context: int = 0
    token_ids: list[int] = field(default_factory=list)
    log_probs: list[float] = field(default_factory=list)
    weight_versions: list[int] = field(default_factory=list)
    calls: list[Call] = field(default_factory=list)
    said: str = ""


@dataclass(frozen=True)
class ExportedRollout:
    """A record, its turns, and `sequences`: ids, mask and log-probs of each, the main one last.

    `modified` is when its dump was written, in nanoseconds since 1970.
    """

    row: Row
    run: str
    modified: int
    record: dict[str, Any]
    prompt: list[tuple[str, str]]  # (role, text)
    turns: list[Turn]
    sequences: list[dict[str, list[Any]]]

    @property
    def expected(self) -> str:
        """The ground truth as text; empty if there is none."""
        truth = self.record.get("gts")
        return truth if isinstance(truth, str) else "" if truth is None else json.dumps(truth)

    @property
    def facts(self) -> dict[str, Any]:
        """What names and judges the rollout."""
        row = self.row
        return {
            "place": row.place,
            "uid": row.uid,
            "request_id": row.request_id,
            "split": row.split,
            "training_step": row.step,
            "data_source": row.data_source,
            "score": row.score,
            "rewards": dict(row.rewards),
            "expected": self.expected,
            "stop_reason": row.stop_reason,
        }


def read_rollout(index: RolloutIndex, row: Row) -> ExportedRollout:
    """The rollout of `row`.

    Raises:
        DataError: its record is malformed; names its line.
    """
    record = index.read(row)
    modified = (index.root / row.name).stat().st_mtime_ns
    try:
        sequences = [trajectory_from_record(each) for each in sequences_of(record)] if "segments" in record else []
        turns = _turns(record, sequences[-1]) if sequences else [Turn(valid(record.get("output")))]
        for number, call in enumerate(as_list(record.get("tool_calls"))):
            turn = turns[min(max(int(call["turn"]), 0), len(turns) - 1)]
            turn.calls.append(_call(number, call))
    except (DataError, KeyError, TypeError, ValueError, OverflowError) as error:
        raise DataError(f"{row.place}: {error}") from error
    messages = [each for each in as_list(record.get("messages")) if isinstance(each, dict)]
    head = [*takewhile(lambda message: message.get("role") != "assistant", messages)]
    prompt = [(str(each.get("role")), message_text(each)) for each in head] or [("user", valid(record.get("input")))]
    return ExportedRollout(
        row, index.path.resolve().name, modified, record, prompt, turns, [_columns(each) for each in sequences]
    )


def _turns(record: Mapping[str, Any], trajectory: Trajectory) -> list[Turn]:
    """One for each assistant turn of the main sequence; at least one."""
    turns: dict[int, Turn] = {}
    position, last = len(trajectory.prompt_ids), Turn()
    for segment, item in zip(trajectory.segments, record["segments"]):
        if segment.provenance is Provenance.SAMPLED:
            last = turns.setdefault(segment.turn, Turn(context=position))
            last.token_ids += segment.token_ids
            last.log_probs += segment.log_probs or ()
            last.weight_versions += segment.weight_versions or ()
            last.text += valid(item.get("text"))
        elif segment.provenance is Provenance.USER:
            last.said += valid(item.get("text"))
        position += len(segment.token_ids)
    written = [message_text(each) for each in map(as_dict, trajectory.messages) if each.get("role") == "assistant"]
    if len(written) == len(turns):  # as messages: without the template's tokens
        for turn, text in zip(turns.values(), written):
            turn.text = text
    return list(turns.values()) or [last]


def _call(number: int, call: Mapping[str, Any]) -> Call:
    raw = call.get("arguments")
    try:
        arguments = json.loads(raw) if isinstance(raw, str) else raw
    except (ValueError, RecursionError):
        arguments = None
    return Call(
        f"call_{number}",
        valid(call.get("name")),
        arguments if isinstance(arguments, dict) else {"text": valid(raw)},
        valid(call.get("response")),
        valid(call["error"]) if call.get("error") else None,
        float(call.get("reward") or 0.0),
        max(float(call.get("seconds") or 0.0), 0.0),
    )


def _columns(trajectory: Trajectory) -> dict[str, list[Any]]:
    return {
        "prompt_ids": list(trajectory.prompt_ids),
        "response_ids": trajectory.response_ids,
        "response_mask": trajectory.response_mask,
        "response_log_probs": trajectory.response_log_probs,
    }


def message_text(message: Mapping[str, Any]) -> str:
    """The text of a message; `[image]` for a part that is none."""
    content = message.get("content")
    if isinstance(content, list):
        parts = [as_dict(part) for part in content]
        return "".join(valid(part["text"]) if "text" in part else f"[{valid(part.get('type'))}]" for part in parts)
    return valid(content)


def valid(text: object) -> str:
    """`text` without lone surrogates, which UTF-8 cannot hold; empty for None."""
    return "" if text is None else str(text).encode("utf-8", "replace").decode()


def apportion(total: float, weights: Sequence[int]) -> list[float]:
    """`total` in parts proportional to `weights`; equal parts if these are 0."""
    whole = sum(weights)
    return [total * weight / whole if whole else total / len(weights) for weight in weights]
