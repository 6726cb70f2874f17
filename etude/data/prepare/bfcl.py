"""The Berkeley Function-Calling Leaderboard: one question, the functions in the system prompt, calls written as Python.

Invariant: the files keep their rows and order. A row's ground truth is JSON text of BFCL's accepted calls; `[]` if no
call is expected (irrelevance), `any` if any call is accepted (relevance). Multi-turn rows need BFCL's simulators and are
refused.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from etude.data.files import Row
from etude.data.prepare.sources import training_row, write_each
from etude.errors import DataError

_SYSTEM = (
    "You are given functions. Answer with the calls that the question needs, as one Python list and nothing else: "
    "[f(a=1, b='x'), g()]. If no function fits, or a required argument is missing, say so in words and write no call.\n\n"
    "Functions as JSON:\n"
)
_TYPES = {"dict": "object", "float": "number", "tuple": "array", "String": "string", "any": None}


def make_row(example: Mapping[str, Any], where: str, split: str, index: int) -> Row:
    """Makes one row of the RL row contract from `{"id", "question", "function", "ground_truth"}`.

    Raises:
        DataError: a field is missing or of another type, or the row has several turns; names `where`.
    """
    turns, functions = example.get("question"), example.get("function")
    if not isinstance(turns, list) or not turns or not isinstance(functions, list) or not functions:
        raise DataError(
            f"{where}: needs 'question', a list of turns, and 'function', a list (columns: {', '.join(example)})"
        )
    if len(turns) > 1:
        raise DataError(f"{where}: several turns need BFCL's simulators; leave its multi_turn files out")
    try:
        messages = [(str(message["role"]), str(message["content"])) for message in turns[0]]
    except (KeyError, TypeError) as error:
        raise DataError(f"{where}: a turn of 'question' must be a list of messages {{role, content}}") from error
    schemas = json.dumps([json_schema(function) for function in functions], ensure_ascii=False)
    inner = "\n\n".join(content for role, content in messages if role == "system")
    prompt = [("system", "\n\n".join(filter(None, (inner, _SYSTEM + schemas))))]
    return training_row(
        f"bfcl_{split}",
        [*prompt, *(pair for pair in messages if pair[0] != "system")],
        _ground_truth(example, where, split),
        {},
        ability="function-calling",
        extra={"split": split, "index": index, "id": str(example.get("id", index))},
    )


def _ground_truth(example: Mapping[str, Any], where: str, split: str) -> str:
    given = example.get("ground_truth")
    if given is not None:
        return json.dumps(given, ensure_ascii=False)
    if "irrelevance" in split:
        return "[]"
    if "relevance" in split:
        return "any"
    raise DataError(f"{where}: needs 'ground_truth' (join BFCL's possible_answer file by id)")


def json_schema(value: Any) -> Any:
    """Returns a function description with JSON Schema's type names instead of BFCL's, at any depth."""
    if isinstance(value, list):
        return [json_schema(member) for member in value]
    if not isinstance(value, Mapping):
        return value
    found = {key: json_schema(member) for key, member in value.items()}
    kind = found.get("type")
    if isinstance(kind, str) and kind in _TYPES:
        named = _TYPES[kind]
        found = {key: member for key, member in found.items() if key != "type"} | ({"type": named} if named else {})
    return found


def write(inputs: Sequence[str | Path], output_dir: str | Path) -> dict[str, Path]:
    """Writes each of `inputs`, as `write_each` does."""
    return write_each(inputs, make_row, output_dir)
