"""Scoring of programs: a solution's code is run against the problem's tests in the sandbox.

Invariant: a score is about the program. A sandbox failure never yields a score: it raises `SandboxError`, an
infrastructure failure. Tests of one solution run in parallel; after repeated timeouts the remaining tests are skipped.

The sandbox is the embedded one, or the server named by the environment variable `ETUDE_SANDBOX_URL`
(`ETUDE_SANDBOX_TOKEN`: its bearer token). To set other options, name this function in the configuration:
`custom_reward_function.path=etude.rewards.code` with `custom_reward_function.reward_kwargs`.
"""

from __future__ import annotations

import asyncio
import builtins
import os
import re
import textwrap
import threading
from collections.abc import Sequence
from keyword import iskeyword
from typing import Any

from etude.errors import ConfigError
from etude.rewards.code_judge import CallCase, Case, StdioCase, Verdict, judge, read_cases
from etude.rewards.truth import reads_truth, require_truth
from etude.sandbox import Language, Limits, SandboxClient
from etude.timeouts import background_loop, gather

TIMEOUT = 10.0
MAX_CASES = 10
"""Default number of tests in a fraction: some problems have thousands."""
MAX_TIMEOUTS = 3
"""After this many timeouts, the remaining tests count as timed out."""
MAX_CODE_CHARS = 200_000
CASES_AT_ONCE = 4
"""Concurrent tests per solution, so that no solution blocks the others."""

URL_VARIABLE, TOKEN_VARIABLE = "ETUDE_SANDBOX_URL", "ETUDE_SANDBOX_TOKEN"
_FENCE = re.compile(r"(?:(?m:^)([ \t]{1,16}))?```([^\n`]*)\n(.*?)(?:```|\Z)", re.DOTALL)
_PYTHON = {"python", "py", "python3"}
_DEFINED = re.compile(r"^[ \t]*(?:(?:async[ \t]+)?def|class)[ \t]+(\w+)|^(\w+)[ \t]*=[ \t]*lambda\b", re.MULTILINE)
_TEXT = re.compile(  # texts and comments; one that is not closed goes on to its end, so that time is linear
    r"(\'{3}|\"{3})(?:\\.|(?!\1)[^\\])*(?:\1|\Z)|\'(?:\\.|[^\'\\\n])*\'?|\"(?:\\.|[^\"\\\n])*\"?|#[^\n]*", re.DOTALL
)
_READS = re.compile(r"\b(?:input\s*\(|stdin\b|fileinput\b|(?:open|read)\s*\(\s*0\b)")

_clients: dict[tuple[str | None, str | None], SandboxClient] = {}
_clients_lock = threading.Lock()


def extract_code(text: str, cases: Sequence[Case] = ()) -> str:
    """Returns the last fenced block after `</think>` that can pass `cases`: one that defines a name they take from the
    solution, or reads the input they give. Blocks fenced as Python go before others; without such a block, the last one
    counts, and without any, the whole text."""
    text = text.rpartition("</think>")[2]
    blocks = [
        (name.strip(" \t{.}").lower().partition(" ")[0], textwrap.dedent(code) if indented else code)
        for indented, name, code in _FENCE.findall(text)
    ]
    if not blocks:
        return "" if "```" in text else text
    programs = [code for name, code in blocks if name in _PYTHON] or [code for _, code in blocks]
    names, reads = _needs(cases)
    able = [code for code in programs if names & _defined(code) or (reads and _READS.search(code))]
    return (able or programs)[-1]


def names_of(cases: Sequence[Case]) -> set[str]:
    """Returns the names of functions that `cases` may take from a solution."""
    return {
        name for name in _needs(cases)[0] if name.isidentifier() and not (iskeyword(name) or hasattr(builtins, name))
    }


def _needs(cases: Sequence[Case]) -> tuple[set[str], bool]:
    """Returns the names that `cases` may take from a solution, and whether it must read input."""
    names, reads = set[str](), False
    for case in cases:
        if isinstance(case, StdioCase):
            reads = reads or bool(case.input.strip())
        elif isinstance(case, CallCase):
            names.add(case.function)
        else:
            names |= set(re.findall(r"\w+", _TEXT.sub("", case.statement))) - _defined(case.statement)
    return names, reads


def _defined(code: str) -> set[str]:
    return {name for found in _DEFINED.findall(code) for name in found if name}


async def score_code(
    solution_str: str,
    ground_truth: Any,
    *,
    client: SandboxClient,
    mode: str = "fraction",
    timeout: float = TIMEOUT,
    memory_limit_mb: int = 1024,
    max_cases: int | None = None,
    language: str = "python",
) -> dict[str, Any]:
    """Returns `score` (0 to 1), `acc` (1.0 if every test passed), `passed` and `total`, and `verdict`, the first one
    that is not `passed`, if any.

    `mode`: "fraction" of the first `max_cases` (default 10) tests, or "all" of them (default: of all) or nothing.
    `timeout`: seconds for each test.

    Raises:
        SandboxError: the sandbox failed.
        DataError: the ground truth has no tests.
        ConfigError: an option is invalid.
    """
    if mode not in ("fraction", "all"):
        raise ConfigError(f"the code reward's mode must be 'fraction' or 'all', not {mode!r}")
    try:
        written_in = Language(language)
    except ValueError as error:
        raise ConfigError(f"the code reward's language: {error}") from error
    cases = read_cases(ground_truth)
    if written_in is not Language.PYTHON and not all(isinstance(case, StdioCase) for case in cases):
        raise ConfigError(f"tests of functions are for Python, not for {written_in.value}")
    cases = cases[: max_cases or (MAX_CASES if mode == "fraction" else None)]
    limits = Limits(wall_seconds=timeout, cpu_seconds=4 * timeout, memory_mb=memory_limit_mb)
    code = extract_code(solution_str, cases)
    if not code.strip() or len(code) > MAX_CODE_CHARS:
        verdicts = [Verdict.COMPILE_ERROR] * len(cases)
    else:
        verdicts = await _judge_all(client, code, cases, limits, written_in, stop_at_first=mode == "all")
    passed = sum(verdict is Verdict.PASSED for verdict in verdicts)
    complete = passed == len(cases)
    return {
        "score": float(complete) if mode == "all" else passed / len(cases),
        "acc": float(complete),
        "passed": passed,
        "total": len(cases),
        "verdict": next((verdict for verdict in verdicts if verdict is not Verdict.PASSED), Verdict.PASSED).value,
    }


async def _judge_all(
    client: SandboxClient, code: str, cases: list[Case], limits: Limits, language: Language, stop_at_first: bool
) -> list[Verdict]:
    """Returns the verdict of each case, in order; a skipped case gets the verdict that made it unnecessary."""
    slots = asyncio.Semaphore(CASES_AT_ONCE)
    enough: list[Verdict] = []

    async def one(case: Case) -> Verdict:
        async with slots:
            if len(enough) >= (1 if stop_at_first else MAX_TIMEOUTS):
                return enough[-1]
            verdict = await judge(client, code, case, limits, language)
            if verdict is Verdict.TIMEOUT or (stop_at_first and verdict is not Verdict.PASSED):
                enough.append(verdict)
            return verdict

    return await gather(one(case) for case in cases)


def _read_truth(ground_truth: Any) -> list[Case]:
    return read_cases(require_truth(ground_truth))


@reads_truth(_read_truth)
def compute_score(
    solution_str: str,
    ground_truth: Any,
    *,
    url: str | None = None,
    token: str | None = None,
    mode: str = "fraction",
    timeout: float = TIMEOUT,
    memory_limit_mb: int = 1024,
    max_cases: int | None = None,
    language: str = "python",
) -> dict[str, Any]:
    """Like `score_code`, for threads without an event loop. `url`: the sandbox server; None for `ETUDE_SANDBOX_URL`, or
    the embedded sandbox if that is not set."""
    url = url or os.environ.get(URL_VARIABLE) or None
    work = score_code(
        solution_str,
        ground_truth,
        client=_client(url, token or os.environ.get(TOKEN_VARIABLE) or None),
        mode=mode,
        timeout=timeout,
        memory_limit_mb=memory_limit_mb,
        max_cases=max_cases,
        language=language,
    )
    return asyncio.run_coroutine_threadsafe(work, background_loop("etude-code-reward")).result()


@reads_truth(_read_truth)
def score_all_tests(solution_str: str, ground_truth: Any) -> dict[str, Any]:
    """Like `compute_score`, all tests or nothing: how HumanEval and MBPP are scored."""
    return compute_score(solution_str, ground_truth, mode="all")


def _client(url: str | None, token: str | None) -> SandboxClient:
    with _clients_lock:
        if (url, token) not in _clients:
            workers = None if url else max(4, 2 * (os.cpu_count() or 1))  # they mostly wait for programs to time out
            _clients[url, token] = SandboxClient(url, token=token if url else None, workers=workers)
        return _clients[url, token]
