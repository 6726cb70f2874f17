"""`judge`: one test of one solution, run in the sandbox.

Invariant: a verdict is about the solution; a sandbox that fails raises. The reference answer never enters the sandbox,
but for asserts, which are code. A program that exits early, whatever its status, has not passed a call or an assert.
"""

from __future__ import annotations

import json
import math
import secrets
from dataclasses import replace
from enum import Enum
from pathlib import Path
from typing import Any

from etude.rewards.code_cases import AssertCase, CallCase, Case, StdioCase
from etude.sandbox import Language, Limits, RunRequest, RunResult, RunStatus, SandboxClient

SOLUTION = ".solution.py"
RELATIVE, ABSOLUTE = 1e-5, 1e-8  # between numbers that are printed, as in verl's prime_code
MIN_ROOM = 1 << 16  # bytes of output beyond the expected ones that are still compared
_HARNESS = Path(__file__).with_name("code_harness_program.py")


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
        failed = _failed(result)
        return failed or _verdict(same_output(result.stdout, case.output))
    secret = secrets.token_hex(16)
    result = await client.run(_harness_request(solution, case, limits, secret))
    failed = _failed(result)
    if failed is not None:
        return failed
    found = _report(result.stdout, secret)
    if found is None:
        return Verdict.RUNTIME_ERROR  # it ended before the test did
    return Verdict.PASSED if isinstance(case, AssertCase) else _verdict(_is_value(found, case.expected))


def _harness_request(solution: str, case: CallCase | AssertCase, limits: Limits, secret: str) -> RunRequest:
    job: dict[str, Any] = {"secret": secret}
    if isinstance(case, AssertCase):
        job |= {"kind": "assert", "statement": case.statement}
    else:
        job |= {"kind": "call", "function": case.function, "arguments": case.arguments}
    return RunRequest(
        code=_HARNESS.read_text(encoding="utf-8"),
        stdin=json.dumps(job) + "\n",
        files={SOLUTION: solution.encode("utf-8", "surrogatepass")},
        limits=limits,
    )


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


def _report(stdout: str, secret: str) -> str | None:
    """The harness's result, as JSON; None if it did not get that far."""
    lines = [line.removeprefix(secret) for line in stdout.splitlines() if line.startswith(secret)]
    return lines[-1] if lines else None


def same_output(printed: str, expected: str) -> bool:
    """Whether two outputs agree, up to whitespace at the ends of lines and of the text, and the last digits of numbers."""
    ours, theirs = _lines(printed), _lines(expected)
    return ours == theirs or (len(ours) == len(theirs) and all(map(_same_line, ours, theirs)))


def _lines(text: str) -> list[str]:
    return [line.rstrip() for line in text.strip().splitlines()]


def _same_line(ours: str, theirs: str) -> bool:
    mine, wanted = ours.split(), theirs.split()
    return len(mine) == len(wanted) and all(a == b or _close(a, b) for a, b in zip(mine, wanted))


def _close(ours: str, theirs: str) -> bool:
    """Whether two numbers agree up to rounding; False for two integers, which must be identical."""
    if max(len(ours), len(theirs)) > 400 or (ours.lstrip("+-").isdigit() and theirs.lstrip("+-").isdigit()):
        return False
    try:
        return math.isclose(float(ours), float(theirs), rel_tol=RELATIVE, abs_tol=ABSOLUTE)
    except (ValueError, OverflowError):
        return False


def same_value(found: Any, expected: Any) -> bool:
    """Whether a function's value is the expected one, or the only element of the list that some data sets wrap it in."""
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
    """Whether two numbers, at least one of them not an integer, agree up to rounding."""
    if not isinstance(a, float) and not isinstance(b, float):
        return False
    try:
        return math.isclose(a, b, rel_tol=RELATIVE, abs_tol=ABSOLUTE)
    except OverflowError:
        return False
