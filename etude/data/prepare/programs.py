"""Programming problems: HumanEval and MBPP, scored by their own tests in the sandbox.

Invariant: the files keep their rows and order, and no prompt holds a test that is scored, nor a solution.
"""

from __future__ import annotations

import ast
import json
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from etude.data.files import Row
from etude.data.prepare.math import INTERPRETER, WITH_CODE
from etude.data.prepare.sources import texts, training_row, write_each
from etude.errors import DataError

_INSTRUCTION = "Give the whole program in a ```python block."


def humaneval_row(code: bool, example: Mapping[str, Any], where: str, split: str, index: int) -> Row:
    """Makes one row from `{"prompt", "test", "entry_point"}`. Further functions of the prompt belong to the test too: a
    solution that redefines them changes no judgement.

    Raises:
        DataError: a field is missing or of another type; names `where`.
    """
    prompt, test, entry = texts(example, where, "prompt", "test", "entry_point")
    question = f"Complete this function:\n\n```python\n{prompt.rstrip()}\n```"
    tests = [f"{_beside(prompt, entry)}{test}\ncheck({entry})"]
    return _row("openai/openai_humaneval", question, tests, code, example, split, index)


def _beside(prompt: str, entry: str) -> str:
    """Returns the prompt's program without the function `entry`; empty if it has no other function."""
    try:
        nodes = [node for node in ast.parse(prompt).body if getattr(node, "name", None) != entry]
    except SyntaxError:
        return ""
    helped = any(isinstance(node, ast.FunctionDef) for node in nodes)
    return "".join(f"{ast.unparse(node)}\n" for node in nodes) if helped else ""


def mbpp_row(code: bool, example: Mapping[str, Any], where: str, split: str, index: int) -> Row:
    """Makes one row from `{"text" | "prompt", "test_list", "code", "test_setup_code" | "test_imports"}`. The prompt
    names the function, which is read from the first test; all tests are scored.

    Raises:
        DataError: a field is missing or of another type; names `where`.
    """
    text = texts(example, where, "text" if example.get("text") else "prompt")[0]
    tests = example.get("test_list")
    if not isinstance(tests, list) or not tests or not all(isinstance(test, str) for test in tests):
        raise DataError(f"{where}: needs 'test_list', a list of statements (columns: {', '.join(example)})")
    setup = [
        example.get("test_setup_code") or "",
        *(example.get("test_imports") or ()),
        example.get("extra_import") or "",
    ]
    lines = "".join(f"{line}\n" for line in setup if line)
    name = _called(tests[0], str(example.get("code") or ""), where)
    question = f"{text.strip()} The function is called `{name}`."
    source = "google-research-datasets/mbpp"
    return _row(source, question, [lines + test for test in tests], code, example, split, index)


def _called(test: str, solution: str, where: str) -> str:
    """Returns the function under test: the outermost call in `test` of a function that the reference solution defines."""
    try:
        nodes, defined = ast.walk(ast.parse(test)), ast.walk(ast.parse(solution))
    except SyntaxError as error:
        raise DataError(f"{where}: the test {test[:80]!r} or the solution is no Python: {error}") from error
    own = {node.name for node in defined if isinstance(node, ast.FunctionDef | ast.ClassDef)}
    called = (node.func.id for node in nodes if isinstance(node, ast.Call) and isinstance(node.func, ast.Name))
    found = next((name for name in called if name in own), None)
    if found is None:
        raise DataError(f"{where}: the test {test[:80]!r} calls no function of the solution in 'code'")
    return found


def _row(
    source: str, question: str, tests: list[str], code: bool, example: Mapping[str, Any], split: str, index: int
) -> Row:
    return training_row(
        source,
        [("user", f"{question}\n\n{_INSTRUCTION}{WITH_CODE if code else ''}")],
        json.dumps({"assert_case": tests}),
        {INTERPRETER: {"question": question}} if code else {},
        ability="code",
        extra={"split": split, "index": index, "task_id": str(example.get("task_id", index))},
    )


FORMS = {"humaneval": humaneval_row, "mbpp": mbpp_row}


def write(inputs: Sequence[str | Path], output_dir: str | Path, *, form: str, code: bool = False) -> dict[str, Path]:
    """Writes each of `inputs`, as `write_each` does."""
    return write_each(inputs, partial(FORMS[form], code), output_dir)
