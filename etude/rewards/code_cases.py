"""The tests of a programming problem: verl's ground truths as plain data.

    {"inputs": [...], "outputs": [...]}                   standard input and output
    {"inputs": [...], "outputs": [...], "fn_name": "f"}   arguments and value of a function, or of a method of `Solution`
    {"assert_case": [...]}                                statements that must hold after the solution has run

Invariant: a case that exists can be run. The arguments of a call are a list, or a text with one JSON value per line.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from etude.errors import DataError


@dataclass(frozen=True)
class StdioCase:
    """The program must print `output` when it reads `input`."""

    input: str
    output: str


@dataclass(frozen=True)
class CallCase:
    """`function(*arguments)` must return `expected` (JSON values)."""

    function: str
    arguments: list[Any]
    expected: Any


@dataclass(frozen=True)
class AssertCase:
    """`statement` must run without an exception."""

    statement: str


Case = StdioCase | CallCase | AssertCase


def read_cases(ground_truth: object) -> list[Case]:
    """The cases of a ground truth: a mapping, or the JSON text of one.

    Raises:
        DataError: it has none of the three forms, or no case.
    """
    tests = _mapping(ground_truth)
    cases = _asserts(tests) if "assert_case" in tests else _pairs(tests)
    if not cases:
        raise DataError("ground_truth of a programming problem: there is no test in it")
    return cases


def _mapping(ground_truth: object) -> Mapping[str, Any]:
    if isinstance(ground_truth, str):
        try:
            ground_truth = json.loads(ground_truth)
        except (ValueError, RecursionError) as error:
            raise DataError(f"ground_truth of a programming problem: not JSON: {error}") from error
    if not isinstance(ground_truth, Mapping):
        kind = type(ground_truth).__name__
        raise DataError(
            f"ground_truth of a programming problem must be a mapping or the JSON text of one, not a {kind}"
        )
    return ground_truth


def _asserts(tests: Mapping[str, Any]) -> list[Case]:
    given = tests["assert_case"]
    statements = [given] if isinstance(given, str) else given
    if not _is_list(statements) or not all(isinstance(each, str) and each.strip() for each in statements):
        raise DataError("ground_truth: 'assert_case' must be a list of statements")
    return [AssertCase(statement) for statement in statements]


def _pairs(tests: Mapping[str, Any]) -> list[Case]:
    inputs, outputs = tests.get("inputs"), tests.get("outputs")
    if not _is_list(inputs) or not _is_list(outputs):
        raise DataError(
            "ground_truth of a programming problem needs the lists 'inputs' and 'outputs', or 'assert_case'"
        )
    assert inputs is not None
    assert outputs is not None
    if len(inputs) != len(outputs):
        raise DataError(f"ground_truth: there are {len(inputs)} inputs and {len(outputs)} outputs")
    function = tests.get("fn_name")
    if function:
        if not isinstance(function, str) or not function.isidentifier():
            raise DataError(f"ground_truth: fn_name must be the name of a function, not {function!r}")
        return [CallCase(function, _arguments(given), _expected(wanted)) for given, wanted in zip(inputs, outputs)]
    return [StdioCase(_text(given), _text(wanted)) for given, wanted in zip(inputs, outputs)]


def _arguments(given: Any) -> list[Any]:
    if isinstance(given, str):
        try:
            return [json.loads(line) for line in given.splitlines() if line.strip()]
        except ValueError:
            try:
                return [json.loads(given)]
            except ValueError as error:
                raise DataError(f"ground_truth: the arguments {given[:80]!r} are not JSON: {error}") from error
    return list(given) if _is_list(given) else [given]


def _expected(wanted: Any) -> Any:
    if isinstance(wanted, str):
        try:
            return json.loads(wanted)
        except ValueError:
            return wanted
    return _plain(wanted)


def _text(given: Any) -> str:
    """A list is its lines, as some data sets write them."""
    return "\n".join(map(str, given)) if _is_list(given) else str(given)


def _is_list(value: object) -> bool:
    """Parquet gives arrays where JSON had lists."""
    return (isinstance(value, Sequence) and not isinstance(value, str | bytes)) or hasattr(value, "tolist")


def _plain(value: Any) -> Any:
    return value.tolist() if hasattr(value, "tolist") else value
