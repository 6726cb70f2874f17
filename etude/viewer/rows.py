"""`Row`: the index entry of a trajectory, parsed from its line in a dump.

Invariant: any line yields a row of bounded size or a `DataError`. Étude's and verl's dumps (`input, output, gts, score,
step`) are supported; fields that a dump lacks are 0 or empty.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from numbers import Real
from pathlib import Path
from typing import Any, Literal, TypeGuard, cast

from etude.errors import DataError, one_line
from etude.trajectory import TRUNCATED, StopReason

_MAX_NAME = 120  # characters of a tool, source or id
_MAX_NAMES = 32
_MAX_LINE = 160  # characters of a question or a last line
_TOKEN = re.compile(r"<[|｜/]?[\w▁ ]{1,40}[|｜]?>|\[/?INST\]")  # special tokens of templates
NUMBER = re.compile(r"\d+(?:[.,]\d+)*")
"""A number as texts write it."""
_ARRAY = re.compile(
    rb'"(response_ids|response_mask|response_log_probs|prompt_ids|token_ids|log_probs|weight_versions|advantages|old_log_probs'
    rb'|entropys|ref_log_prob|values)":\s?\[([^\[\]{}"]*)\]'
)
"""Token arrays, about 90 % of a dump, are cut out before JSON parsing. This is safe: a key in unescaped quotes is never
inside a JSON string."""


@dataclass(frozen=True, slots=True)
class Row:
    """Location of a trajectory, and the fields that lists and filters use. Unknown numbers are 0, unknown names empty.

    `name` is the file, relative to the index's root; `line` counts from 1. `uid` is shared by the rollouts of one prompt in
    one step; `prompt` is a digest of the task, equal across steps and runs. `turns` are the policy's; turns, calls and
    response tokens are summed over a rollout's sequences. `question` is the first line of what was asked last, `answer` the
    last line of the response. `rewards` are unweighted, by source: "score" is the reward manager's, the others come from
    tools. `flags` are keys of `FLAGS`. `found_answer`: whether the scorer found an answer; None if it does not say.
    """

    name: str
    line: int
    offset: int
    length: int  # bytes
    split: str  # "train", "validation", "evaluation/…", "eval-…", or "" for dumps outside a run's folder
    step: int
    uid: str
    prompt: str
    question: str
    answer: str
    request_id: str
    score: float | None
    rewards: Mapping[str, float]
    stop_reason: str
    data_source: str
    tools: tuple[str, ...]
    calls: int
    call_errors: int
    turns: int
    response_tokens: int
    sampled_tokens: int
    seconds: float
    flags: tuple[str, ...]
    found_answer: bool | None

    @property
    def place(self) -> str:
        """Identifies the row in messages and URLs, such as `rollouts/12.jsonl:3`."""
        return f"{self.name}:{self.line}"

    @property
    def group(self) -> tuple[str, int, str]:
        """Group key: equal for the rollouts of one prompt in one step."""
        return self.split, self.step, self.uid


FLAGS = {
    "truncated": "cut for length",
    "tool_error": "a tool call failed",
    "lost_call": "a tool call was not run: a length limit ended its turn",
    "malformed": "a tool call could not be parsed",
    "unread": "a tool call in a format that multi_turn.format does not read",
    "no_answer": "the scorer found no answer",
    "retried": "retried after an infrastructure failure",
}


def parse_line(line: bytes, place: str = "") -> dict[str, Any]:
    """Parses a line; raises a DataError that names `place` if it is not a JSON object."""
    where = f"{place}: " if place else ""
    try:
        record = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise DataError(f"{where}not JSON ({one_line(error, 120)}); was it cut, edited or replaced?") from error
    if not isinstance(record, dict):
        raise DataError(f"{where}expected a JSON object, found {type(record).__name__}")
    return record


def parse_light(line: bytes, place: str = "") -> tuple[dict[str, Any], list[tuple[int, int]]]:
    """Parses a line without its token arrays; also returns (length, number of ones) of each response mask."""
    masks: list[tuple[int, int]] = []

    def count(found: re.Match[bytes]) -> bytes:
        if found[1] == b"response_mask":
            masks.append((found[2].count(b",") + 1 if found[2].strip() else 0, found[2].count(b"1")))
        return b'"":0'

    return parse_line(_ARRAY.sub(count, line), place), masks


def parse_row(line: bytes, *, name: str, number: int, offset: int, split: str) -> Row:
    """Parses line `number` of the dump `name`, which starts at byte `offset`.

    Raises:
        DataError: the line is not a rollout; says why.
    """
    record, masks = parse_light(line)
    if "input" not in record and "output" not in record and "segments" not in record:
        raise DataError(f"no rollout: neither 'input' nor 'output' (keys: {', '.join(list(record)[:6])[:_MAX_NAME]})")
    prompt = _prompt(record)
    calls = calls_of(record)
    errors = {str(call["error"]) for call in calls if call.get("error")}
    rewards = as_dict(record.get("rewards"))
    info = as_dict(rewards.get("score_info"))
    found = info["pred"] is not None if "pred" in info else None
    stem = Path(name).stem
    return Row(
        name=name,
        line=number,
        offset=offset,
        length=len(line),
        split=split,
        step=_whole(record.get("step"), int(stem) if stem.isdecimal() and len(stem) < 16 else 0),
        uid=_name(record.get("uid")) or prompt,
        prompt=prompt,
        question=sys.intern(_question(record)),
        answer=_line(record.get("output"), -1),
        request_id=_name(record.get("request_id")),
        score=_finite(record.get("score")),
        rewards=_rewards_by_source(rewards),
        stop_reason=_name(stop_reason := record.get("stop_reason")),
        data_source=_name(record.get("data_source")),
        tools=tuple(sorted({_name(call.get("name")) for call in calls}))[:_MAX_NAMES],
        calls=len(calls),
        call_errors=sum(bool(call.get("error")) for call in calls),
        turns=assistant_turns(record),
        response_tokens=sum(length for length, _ in masks),
        sampled_tokens=sum(ones for _, ones in masks),
        seconds=_finite(sum(max(_finite(value) or 0.0, 0.0) for value in as_dict(record.get("timings")).values()))
        or 0.0,
        flags=_flags(stop_reason, errors, found, record),
        found_answer=found,
    )


def _prompt(record: Mapping[str, Any]) -> str:
    """Digest of the input, and of what the same words may ask for: another truth, other data of tools, another game."""
    info = as_dict(record.get("extra_info"))
    asked = [record.get("input"), record.get("gts"), info.get("task"), info.get("env_seed")]
    asked += [record.get("tools_kwargs"), record.get("interaction_kwargs")]
    return hashlib.blake2b(json.dumps(asked, sort_keys=True).encode(), digest_size=8).hexdigest()


def _flags(
    stop_reason: object, errors: set[str], found_answer: bool | None, record: Mapping[str, Any]
) -> tuple[str, ...]:
    signs = {
        "truncated": stop_reason in TRUNCATED,
        "tool_error": bool(errors),
        "lost_call": stop_reason in TRUNCATED and _lost_call(record),
        "malformed": "malformed" in errors
        or stop_reason in (StopReason.MALFORMED_CALL, StopReason.MAX_MALFORMED_CALLS),
        "unread": bool(as_dict(record.get("metrics")).get("unread_calls")),
        "no_answer": found_answer is False,
        "retried": _whole(record.get("attempt"), 0) > 0,
    }
    return tuple(name for name, is_set in signs.items() if is_set)


def _lost_call(record: Mapping[str, Any]) -> bool:
    """Whether a call of the last turn was not run; those of earlier ones were too many at once."""
    last = _whole(record.get("assistant_turns"), 0) - 1
    return any((call.get("error"), call.get("turn")) == ("not_executed", last) for call in calls_of(record))


def _rewards_by_source(rewards: Mapping[str, Any]) -> dict[str, float]:
    sums: dict[str, float] = {}
    steps = [entry[1:3] for entry in as_list(rewards.get("steps")) if isinstance(entry, list) and len(entry) == 3]
    for source, value in [*steps, *as_dict(rewards.get("final")).items(), ("score", rewards.get("score"))]:
        name, number = _name(source), _finite(value)
        if number is not None and (name in sums or len(sums) < _MAX_NAMES):
            sums[name] = _finite(sums.get(name, 0.0) + number) or 0.0
    return sums


def first_response(record: Mapping[str, Any]) -> int:
    """The index in a record's `messages` of the first that the policy wrote, or their number."""
    turns = [
        at for at, message in enumerate(as_list(record.get("messages"))) if as_dict(message).get("role") == "assistant"
    ]
    written = len(message_turns(record))
    return turns[-written:][0] if turns and written > 0 else len(as_list(record.get("messages")))


def message_turns(record: Mapping[str, Any]) -> list[int]:
    """The turn numbers of the policy's messages in a record (`Trajectory.message_turns`)."""
    kept = [turn for turn in as_list(record.get("kept_turns")) if isinstance(turn, int)]
    return [*kept, *range(_whole(record.get("first_turn"), 0), _whole(record.get("assistant_turns"), 0))]


def own_turns(sequence: Mapping[str, Any]) -> int:
    """How many turns the policy wrote in a sequence; half of `num_turns`, which counts messages, if it only has that."""
    last = _whole(sequence.get("assistant_turns"), _whole(sequence.get("num_turns"), 0) // 2)
    return last - _whole(sequence.get("first_turn"), 0)


def assistant_turns(record: Mapping[str, Any]) -> int:
    """How many turns the policy wrote in all sequences of a rollout's record."""
    return sum(map(own_turns, _sequences(record)))


def calls_of(record: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The tool calls of all sequences of a rollout's record, in time order."""
    found = (call for each in _sequences(record) for call in as_list(each.get("tool_calls")))
    return [call for call in found if isinstance(call, dict)]


def _sequences(record: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    return [*map(as_dict, as_list(record.get("earlier"))), record]


def message_text(message: Mapping[str, Any]) -> str:
    """The text of a message; other parts, such as images, by their type in brackets, on the line of what follows."""
    content, said = message.get("content"), ""
    for part in content if isinstance(content, list) else [content]:
        if isinstance(part, Mapping) and "text" not in part:
            said += f"[{part.get('type')}] "
        elif (text := part["text"] if isinstance(part, Mapping) else part) is not None:
            said += f"{text}\n"
    return said[:-1]


def exchange(record: Mapping[str, Any]) -> dict[str, str]:
    """The first line of what was asked, the last line of the answer, and the ground truth, on a line; without empty ones."""
    truth = "" if record.get("gts") is None else str(record["gts"])
    told = {"asked": _question(record), "answered": _line(record.get("output"), -1), "ground truth": _line(truth, 0)}
    return {name: text for name, text in told.items() if text}


def _question(record: Mapping[str, Any]) -> str:
    asked = [as_dict(each) for each in as_list(record.get("messages"))[: first_response(record)]]
    users = [message_text(each) for each in asked if each.get("role") == "user"]
    return _line(users[-1], 0) if users else _line(record.get("input"), -1, ("assistant", "model"))


def _line(text: object, at: Literal[0, -1], but: Sequence[str] = ()) -> str:
    """The first or last line of `text` that is neither blank without special tokens nor in `but`."""
    lines = text.splitlines() if isinstance(text, str) else []
    for line in lines if at == 0 else reversed(lines):
        if (shown := " ".join(_TOKEN.sub(" ", line).split())) and shown not in but:
            return shown[:_MAX_LINE]
    return ""


def texts_of(record: Mapping[str, Any]) -> Iterator[str]:
    """Yields the prompt and response text of every sequence of a record."""
    for each in [record, *as_list(record.get("earlier"))]:
        if isinstance(each, dict):
            yield from (text for key in ("input", "output") if isinstance(text := each.get(key), str))


def is_number(value: object) -> TypeGuard[float]:
    """Whether `value` is a finite number in the range of a float; booleans do not count."""
    return isinstance(value, Real) and not isinstance(value, bool) and abs(cast(float, value)) <= sys.float_info.max


def numbers_of(record: Mapping[str, Any]) -> dict[str, float]:
    """The finite numbers of a step's metrics."""
    return {name: float(value) for name, value in record.items() if is_number(value)}


def as_dict(value: object) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}


def as_list(value: object) -> list[Any]:
    return value if isinstance(value, list) else []


def _finite(value: object) -> float | None:
    if (
        not isinstance(value, int | float)
        or (isinstance(value, int) and abs(value) > 2**53)
        or not math.isfinite(value)
    ):
        return None
    return float(value)


def _whole(value: object, default: int) -> int:
    return default if (number := _finite(value)) is None or abs(number) > 2**53 else int(number)


def _name(value: object) -> str:
    return "" if value is None else sys.intern(str(value)[:_MAX_NAME])
