"""`read_cases` parses verl's ground truths as tests of a program; `judge` runs one test of one solution in the sandbox.

    {"inputs": [...], "outputs": [...]}                   standard input and output
    {"inputs": [...], "outputs": [...], "fn_name": "f"}   arguments and value of a function, or of a method of `Solution`
    {"assert_case": [...]}                                statements that must hold after the solution has run

Invariant: every case can be run; the arguments of a call are a list, or text with one JSON value per line. A verdict is
about the solution; a sandbox failure raises. The verdict comes from a process that never ran the solution: this one, where
the reference answer stays, or for statements the checker in the sandbox (`code_assert_program`). A program that exits
early, with whatever status, has not passed a call or a statement.
"""

from __future__ import annotations

import ast
import json
import math
import re
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from fractions import Fraction
from pathlib import Path
from typing import Any, TypeGuard

from etude.errors import DataError
from etude.rewards.truth import is_missing
from etude.sandbox import Language, Limits, RunRequest, RunResult, RunStatus, SandboxClient

RELATIVE, ABSOLUTE = 1e-5, 1e-8  # tolerances for comparing numbers, as in verl's prime_code
HALF = Fraction(1, 2)
MIN_ROOM = 1 << 16  # bytes of output accepted beyond the expected length
_CALL, _ASSERT = (Path(__file__).with_name(f"code_{name}_program.py") for name in ("harness", "assert"))


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
    """`statement` must run without an exception; the names that it uses and does not define are the solution's."""

    statement: str


Case = StdioCase | CallCase | AssertCase


def read_cases(ground_truth: object) -> list[Case]:
    """Parses the cases of a ground truth: a mapping, or the JSON text of one.

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
    if statements and not any(map(_tests, statements)):
        raise DataError(
            f"ground_truth: 'assert_case' tests nothing, so every program would pass: {statements[-1][:80]!r} asserts and "
            "calls nothing outside of definitions; HumanEval's tests end with check(NAME)"
        )
    return [AssertCase(statement) for statement in statements]


def _tests(statement: str) -> bool:
    """Whether to run `statement` asserts or calls anything: definitions do not, nor does what only a main program runs."""
    try:
        todo: list[ast.AST] = [ast.parse(statement)]
    except (SyntaxError, ValueError, RecursionError):
        return True  # it fails, whatever the solution
    while todo:
        node = todo.pop()
        if isinstance(node, ast.Assert | ast.Call | ast.Raise):
            return True
        main = isinstance(node, ast.If) and "__name__" in ast.unparse(node.test)
        if not main and not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            todo += ast.iter_child_nodes(node)
    return False


def _pairs(tests: Mapping[str, Any]) -> list[Case]:
    inputs, outputs = tests.get("inputs"), tests.get("outputs")
    if not _is_list(inputs) or not _is_list(outputs):
        raise DataError(
            "ground_truth of a programming problem needs the lists 'inputs' and 'outputs', or 'assert_case'"
        )
    if len(inputs) != len(outputs):
        raise DataError(f"ground_truth: there are {len(inputs)} inputs and {len(outputs)} outputs")
    function = tests.get("fn_name")
    if len(inputs) and (all(map(_is_none, outputs)) if function else is_missing(outputs)):
        raise DataError("ground_truth: all outputs are missing or empty, so a program that does nothing would pass")
    if function:
        if not isinstance(function, str) or not function.isidentifier():
            raise DataError(f"ground_truth: fn_name must be the name of a function, not {function!r}")
        return [CallCase(function, _arguments(given), _expected(wanted)) for given, wanted in zip(inputs, outputs)]
    for number, wanted in enumerate(outputs):
        if not isinstance(wanted, str) and not _is_list(wanted) and is_missing(wanted):
            raise DataError(f"ground_truth: output {number} is {wanted}: what the program must print is not known")
    return [StdioCase(_text(given), _text(wanted)) for given, wanted in zip(inputs, outputs)]


def _is_none(wanted: Any) -> bool:
    return wanted is None or (_is_list(wanted) and len(wanted) == 1 and wanted[0] is None)


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
    return wanted.tolist() if hasattr(wanted, "tolist") else wanted


def _text(given: Any) -> str:
    """Returns `given` as text; a list is joined with newlines, since some datasets store a text as its lines."""
    return "\n".join(map(str, given)) if _is_list(given) else str(given)


def _is_list(value: object) -> TypeGuard[Sequence[Any]]:
    """Whether `value` is a list; Parquet returns arrays where JSON had lists."""
    return (isinstance(value, Sequence) and not isinstance(value, str | bytes)) or hasattr(value, "tolist")


class Verdict(str, Enum):
    """Outcome of one test."""

    PASSED = "passed"
    WRONG_ANSWER = "wrong_answer"
    RUNTIME_ERROR = "runtime_error"
    TIMEOUT = "timeout"
    COMPILE_ERROR = "compile_error"


async def judge(client: SandboxClient, solution: str, case: Case, limits: Limits, language: Language) -> Verdict:
    """Runs one test.

    Raises:
        SandboxError: the sandbox failed.
        DataError: a statement gives the solution an argument that cannot be sent to its process.
    """
    if isinstance(case, StdioCase):
        room = max(limits.output_bytes, 2 * len(case.output.encode()) + MIN_ROOM)
        request = RunRequest(
            code=solution,
            language=language,
            stdin=case.input,
            compile_seconds=limits.wall_seconds,
            limits=replace(limits, output_bytes=room),
        )
        result = await client.run(request)
        return _failed(result) or _verdict(same_output(result.stdout, case.output))
    secret = secrets.token_hex(16)
    test = {key: value for key, value in vars(case).items() if key != "expected"}
    program = _CALL if isinstance(case, CallCase) else _ASSERT
    stdin = json.dumps({"secret": secret, "solution": solution, **test}) + "\n"
    result = await client.run(RunRequest(code=program.read_text(encoding="utf-8"), stdin=stdin, limits=limits))
    if (failed := _failed(result)) is not None:
        return failed
    reports = [line.removeprefix(secret) for line in result.stdout.splitlines() if line.startswith(secret)]
    if not reports:
        return Verdict.RUNTIME_ERROR  # it exited before the test finished
    found = reports[-1]
    if isinstance(case, CallCase):
        return _verdict(_is_value(found, case.expected))
    if found != "null":
        raise DataError(
            f"ground_truth: the statement {case.statement[:80]!r} gives the solution an object of class {found}, which "
            "cannot be sent to another process; give it plain values or functions"
        )
    return Verdict.PASSED


def _failed(result: RunResult) -> Verdict | None:
    if result.status is RunStatus.COMPILE_FAILED:
        return Verdict.COMPILE_ERROR
    if result.status is RunStatus.TIME_LIMIT:
        return Verdict.TIMEOUT
    return None if result.status is RunStatus.FINISHED and result.return_code == 0 else Verdict.RUNTIME_ERROR


def _is_value(found: str, expected: Any) -> bool:
    try:
        return same_value(json.loads(found), expected)
    except (ValueError, RecursionError):  # a number with too many digits, or nested too deeply
        return False


def _verdict(right: bool) -> Verdict:
    return Verdict.PASSED if right else Verdict.WRONG_ANSWER


def same_output(printed: str, expected: str) -> bool:
    """Whether two outputs agree, ignoring trailing whitespace of lines and text, and rounding of numbers."""
    ours, theirs = _lines(printed), _lines(expected)
    return ours == theirs or (len(ours) == len(theirs) and all(map(_same_line, ours, theirs)))


def _lines(text: str) -> list[str]:
    return [line.rstrip() for line in text.strip().splitlines()]


def _same_line(ours: str, theirs: str) -> bool:
    mine, wanted = ours.split(), theirs.split()
    return len(mine) == len(wanted) and all(a == b or _close(a, b) for a, b in zip(mine, wanted))


def _close(ours: str, theirs: str) -> bool:
    """Whether two numbers in text agree up to rounding."""
    if max(len(ours), len(theirs)) > 400:
        return False
    try:
        numbers = [int(each) if each.lstrip("+-").isdigit() else float(each) for each in (ours, theirs)]
    except ValueError:
        return False
    too_large = (math.inf in map(abs, numbers)) and re.search(r"\d", ours + theirs)  # 1e400 is not inf
    return not too_large and _near(*numbers)


def same_value(found: Any, expected: Any) -> bool:
    """Whether a function's value equals the expected one, or the only element of the list that some datasets wrap it in."""
    if _equal(found, expected):
        return True
    return isinstance(expected, list) and len(expected) == 1 and _equal(found, expected[0])


def _equal(a: Any, b: Any) -> bool:
    if isinstance(a, int | float) and isinstance(b, int | float):
        return a == b or _near(a, b)
    if isinstance(a, list) and isinstance(b, list):
        return len(a) == len(b) and all(map(_equal, a, b))
    if isinstance(a, dict) and isinstance(b, dict):
        return a.keys() == b.keys() and all(_equal(a[key], b[key]) for key in a)
    return type(a) is type(b) and bool(a == b)


def _near(a: float, b: float) -> bool:
    """Whether two numbers, at least one of them not an integer, agree up to rounding. A float never stands for an integer
    that it does not round to: 1e9 is not 1000000007."""
    if not isinstance(a, float) and not isinstance(b, float):
        return False
    try:
        close = math.isclose(a, b, rel_tol=RELATIVE, abs_tol=ABSOLUTE)
        return close and (isinstance(a, float) == isinstance(b, float) or abs(Fraction(a) - Fraction(b)) < HALF)
    except OverflowError:
        return False
