"""`ExportedRollout`: a dumped record split into turns, the common input of all exporters.

Invariant: the token ids of the turns are exactly those that the policy sampled, in order, with their log-probs, whatever
the messages look like. A record without segments (from verl) becomes one turn of text without ids.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from etude.dumps import sequences_of, trajectory_from_record
from etude.errors import DataError
from etude.trajectory import Provenance, Trajectory
from etude.viewer.index import RolloutIndex
from etude.viewer.rows import Row, as_dict, as_list, first_response


@dataclass(frozen=True)
class Call:
    """A tool call; `arguments` is always an object, even if the model did not write one."""

    id: str
    name: str
    arguments: dict[str, Any]
    response: str
    error: str | None
    reward: float
    seconds: float


@dataclass
class Turn:
    """An assistant turn. `context` is the number of tokens before it; `said` is the user message that follows."""

    text: str = ""
    context: int = 0
    token_ids: list[int] = field(default_factory=list)
    log_probs: list[float] = field(default_factory=list)
    weight_versions: list[int] = field(default_factory=list)
    calls: list[Call] = field(default_factory=list)
    said: str = ""


@dataclass(frozen=True)
class ExportedRollout:
    """A record, its turns, and its `sequences` (ids, mask and log-probs of each, the main one last).

    `modified` is the modification time of its dump, in nanoseconds since the epoch.
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
    """Reads the rollout of `row`.

    Raises:
        DataError: its record is malformed; names its line.
    """
    record = index.read(row)
    modified = (index.root / row.name).stat().st_mtime_ns
    try:
        sequences = [trajectory_from_record(each) for each in sequences_of(record)] if "segments" in record else []
        turns = _turns(record, sequences[-1]) if sequences else {0: Turn(valid(record.get("output")))}
        for number, call in enumerate(as_list(record.get("tool_calls"))):
            turn = turns.get(int(call["turn"])) if sequences else turns[0]
            if turn is not None:  # else it belongs to an earlier sequence
                turn.calls.append(_call(number, call))
    except (DataError, KeyError, TypeError, ValueError, OverflowError) as error:
        raise DataError(f"{row.place}: {error}") from error
    head = as_list(record.get("messages"))[: first_response({**record, "kept_turns": []})]  # kept turns are its prompt
    prompt = [(str(each.get("role")), message_text(each)) for each in map(as_dict, head)]
    prompt = prompt or [("user", valid(record.get("input")))]
    return ExportedRollout(
        row,
        index.path.resolve().name,
        modified,
        record,
        prompt,
        list(turns.values()),
        [_columns(each) for each in sequences],
    )


def _turns(record: Mapping[str, Any], trajectory: Trajectory) -> dict[int, Turn]:
    """The assistant turns of the main sequence by their numbers; at least one."""
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
    texts = dict(zip(reversed(trajectory.message_turns), reversed(written)))
    for number, turn in turns.items():  # prefer message contents, which lack the template's special tokens
        turn.text = texts.get(number, turn.text)
    return turns or {0: last}


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
    """Returns the text of a message; a part that is not text becomes its type, such as `[image]`."""
    content = message.get("content")
    if isinstance(content, list):
        parts = [as_dict(part) for part in content]
        return "".join(valid(part["text"]) if "text" in part else f"[{valid(part.get('type'))}]" for part in parts)
    return valid(content)


def valid(text: object) -> str:
    """Converts to a string without lone surrogates, which UTF-8 cannot encode; empty for None."""
    return "" if text is None else str(text).encode("utf-8", "replace").decode()
