r"""Mathematics with a checkable answer: MATH (and MATH-500), and DAPO's problems.

Invariant: the files keep their rows and order; a row without an answer is an error that names it. MATH's answer is its
`answer`, else the last `\boxed{}` of its `solution`; DAPO's rows may be raw or already in verl's form.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from etude.data.files import Row
from etude.data.prepare.sources import texts, training_row, write_each
from etude.errors import DataError
from etude.rewards.boxed import last_boxed

INTERPRETER = "code_interpreter"
FORMS = {
    "math": ("DigitalLearningGmbH/MATH-lighteval", "Think step by step and put the final answer in \\boxed{}."),
    "dapo": ("math_dapo", "Think step by step. The last line is `Answer: ` and the answer, without quotes or units."),
}
"""Data source, which picks the scorer, and instruction."""
WITH_CODE = f" You may run Python code with the `{INTERPRETER}` tool; print what you want to see."


def make_row(form: str, code: bool, example: Mapping[str, Any], where: str, split: str, index: int) -> Row:
    """Makes one row of the RL row contract.

    Raises:
        DataError: there is no problem or no answer; names `where`.
    """
    data_source, instruction = FORMS[form]
    problem, answer = _problem(example, where), _answer(example)
    if answer is None:
        raise DataError(f"{where}: no answer: needs 'answer', or 'solution' with a \\boxed{{}}")
    tools = {INTERPRETER: {"ground_truth": answer}} if code else {}
    kept = {name: example[name] for name in ("subject", "type", "level") if example.get(name) is not None}
    return training_row(
        data_source,
        [("user", f"{problem}\n\n{instruction}{WITH_CODE if code else ''}")],
        answer,
        tools,
        ability="math",
        extra={"split": split, "index": index, "question": problem, **{key: str(value) for key, value in kept.items()}},
    )


def _problem(example: Mapping[str, Any], where: str) -> str:
    prompt = example.get("prompt")
    if isinstance(prompt, list) and prompt and isinstance(prompt[-1], Mapping):  # verl's form
        return texts(prompt[-1], where, "content")[0]
    name = next((name for name in ("problem", "question", "prompt") if example.get(name)), "problem")
    return texts(example, where, name)[0]


def _answer(example: Mapping[str, Any]) -> str | None:
    held = example.get("reward_model") or {}
    for given in (example.get("answer"), held.get("ground_truth")):
        if isinstance(given, int | float) and not isinstance(given, bool):
            return str(given)
        if isinstance(given, str) and given.strip():
            return last_boxed(given) or given.strip()
    return last_boxed(str(example.get("solution") or ""))


def write(inputs: Sequence[str | Path], output_dir: str | Path, *, form: str, code: bool = False) -> dict[str, Path]:
    """Writes each of `inputs`, as `write_each` does."""
    return write_each(inputs, partial(make_row, form, code), output_dir)
