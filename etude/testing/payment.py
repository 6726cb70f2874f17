"""What a scorer pays on real rows: the ground truth must earn the most, and an empty, a wrong or a copied answer, a list of
guesses and long nonsense less.

Invariant: answers go through the run's own reward manager, as finished trajectories. What only resembles an answer is tried
on scorers of the user's own: those of the package have tests. A finding needs most of the rows that were tried, since a junk
answer may be right by chance.
"""

from __future__ import annotations

import ast
import asyncio
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from etude.checks.findings import Finding, Result, error, warning
from etude.data.rows import raw_truth
from etude.errors import EtudeError, InfrastructureError
from etude.rewards.code import names_of
from etude.rewards.code_judge import read_cases
from etude.testing import advice
from etude.testing.inspection import Inspection
from etude.trajectory import Provenance, Rewards, Trajectory

_MAX_SOURCES = 8
_ROWS = 3  # of a data source, on which junk is tried
_FORMS = {
    "alone": "{}",
    "after '####'": "#### {}",
    "in \\boxed{}": "\\boxed{{{}}}",
    "in <answer>": "<answer>{}</answer>",
    "after 'Answer:'": "Answer: {}",
}
"""Answers made of the ground truth that scorers commonly look for, tried in this order."""
_TAG = re.compile(r"<(\w{1,30})>(?=.*?</\1>)", re.DOTALL)
_NUMBER = re.compile(r"-?\d{1,15}(\.\d{1,6})?")
_MAX_TRUTH = 200  # characters: longer truths are tests or texts, no answers
_TRUTHS = ("ground_truth", "answer", "answers", "solution", "target", "label")
_NO_TRUTH = "put the truth into reward_model.ground_truth; nothing to do if the scorer needs none"
_DUST = 1e-9
_NONSENSE = "long nonsense"
_CUTS = frozenset({"sub", "subn", "replace", "split", "partition", "rpartition", "removeprefix", "removesuffix"})


class TooSlow(EtudeError):
    """There is no score in time."""


def try_scorer(run: Inspection) -> Result:
    """Scores answers on rows of each data source; `run.reference` gets the text of the one that is paid, by source."""
    found: dict[str, list[dict[str, Any]]] = {}
    for number, source in enumerate(run.train.sources):
        if len(rows := found.setdefault(source, [])) < _ROWS and len(found) <= _MAX_SOURCES:
            rows.append(run.train[number])
    yield from _unseen_tags(run)
    said = []
    for source, rows in [*found.items()][:_MAX_SOURCES]:
        rewards = run.worker._run(_reward(run, rows[0], ""))
        empty = float(rewards.score or 0.0)
        paid, form, lacking = _paid_form(run, rows[0])
        said.append(f"{source}: {paid}")
        if lacking:
            yield replace(lacking, message=f"{source}: {lacking.message}")
        if empty > 0:
            fix = f"let {advice.scorer(run.custom)} return 0 for an answer that is not there"
            yield warning(f"{source}: an empty answer earns {empty:g}", fix)
        elif run.own_scorer and rewards.succeeded(empty):
            yield _success(run, f"{source}: an empty answer earns {empty:g}")
        yield from _try_tests(run, source, rows)
        if form is not None and run.own_scorer:
            yield from _try_kinds(run, source, type(raw_truth(rows[0])))
        if form is not None:
            run.reference[source] = form
            if empty <= 0 and run.own_scorer:
                yield from _try_junk(run, source, rows, form, empty)
                if not rewards.succeeded(empty):
                    yield from _try_acc(run, source, rows, form)
    yield "; ".join(said)


def _success(run: Inspection, what: str) -> Finding:
    fix = f"let {advice.scorer(run.custom)} return acc 1 for right answers only, or no acc"
    return warning(f"{what} and counts as a success, by its acc", fix)


def _try_acc(run: Inspection, source: str, rows: list[dict[str, Any]], form: str) -> Result:
    """Whether a wrong answer that is not paid as the right one counts as a success."""
    right, *others = [str(raw_truth(row)) for row in rows]
    for wrong in [each for each in others if each != right][:1]:
        best = run.worker._run(_score(run, rows[0], form.format(right)))
        rewards = run.worker._run(_reward(run, rows[0], form.format(wrong)))
        earned = float(rewards.score or 0.0)
        if earned < min(best, 1.0) and rewards.succeeded(earned):
            yield _success(run, f"{source}: a wrong answer earns {earned:g}")


def _try_tests(run: Inspection, source: str, rows: list[dict[str, Any]]) -> Result:
    """Whether tests of programs pass one that does nothing: those of `unittest.main(exit=False)`, or without `assert`."""
    for row in rows:
        try:
            cases = read_cases(raw_truth(row))
        except EtudeError:
            return  # they are no tests
        stubs = (f"def {name}(*_, **__): pass\n" for name in sorted(names_of(cases)))
        try:
            earned = run.worker._run(_score(run, row, f"```python\n{''.join(stubs)}pass\n```"))
        except TooSlow:
            return  # tests may wait for the right answer
        if earned >= 1:
            fix = "let the tests compare what it returns or prints, by `assert`"
            yield warning(f"{source}: a program that does nothing earns {earned:g}: {str(raw_truth(row))[:120]}", fix)
            return


def _try_kinds(run: Inspection, source: str, tried: type) -> Result:
    """Whether rows whose ground truth has another type than the first one's are paid as well."""
    for (named, kind), number in run.kinds.items():
        if named == source and kind not in (tried, type(None)):
            lacking = _paid_form(run, run.train[number])[2]
            if lacking:
                yield replace(lacking, message=f"{run.train.locations[number]}: {lacking.message}")


def _unseen_tags(run: Inspection) -> Result:
    """A scorer of the user's that looks for tags which the text that it gets never has; one that cuts them away may."""
    chosen = run.options.reward_model.score_text
    unseen = {"full": (), "assistant": ("<tool_response",), "final_turn": ("<tool_response", "<tool_call")}[chosen]
    for path in (run.custom.path, *(each.get("path") for each in run.custom.rewards)):
        file = Path(str(path)).expanduser()
        if not unseen or not file.is_file():
            continue
        tree = ast.parse(file.read_text("utf-8"))
        if any(isinstance(node, ast.arg) and node.arg == "trajectory" for node in ast.walk(tree)):
            continue  # where all that was said stands
        calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)]
        cuts = {id(part) for call in calls if call.func.attr in _CUTS for part in ast.walk(call)}  # type: ignore[attr-defined]
        said = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}  # docstrings
        for node in ast.walk(tree):
            if not isinstance(node, ast.Constant) or not isinstance(node.value, str) or id(node) in cuts | said:
                continue
            if tag := next((each for each in unseen if each in node.value), ""):
                line = f"{path}:{node.lineno} looks for {tag}>, which its solution_str never has"
                fix = "set reward_model.score_text=full; nothing to do if it looks for it in another text"
                yield warning(f"{line}: reward_model.score_text={chosen}", fix)
                break


def _forms(row: Mapping[str, Any]) -> dict[str, str]:
    """The forms of an answer by name; the last one has the tags that the prompt shows."""
    asked = " ".join(str(message.get("content")) for message in row["raw_prompt"])
    tags = "".join(f"<{tag}>{{0}}</{tag}>" for tag in dict.fromkeys(_TAG.findall(asked)))
    return _FORMS | ({"in the prompt's tags": tags} if tags else {})


def _paid_form(run: Inspection, row: Mapping[str, Any]) -> tuple[str, str | None, Finding | None]:
    """Returns which answer made of the row's ground truth is paid, its form, and what is wrong if the user's own scorer pays
    none of them."""
    truth = raw_truth(row)
    if truth is None:
        places = {"": row, "extra_info.": row.get("extra_info") or {}}
        elsewhere = [f"{place}{key}" for place, held in places.items() for key in _TRUTHS if key in held]
        fix = f"move {elsewhere[0]} to reward_model.ground_truth" if elsewhere else _NO_TRUTH
        lacking = warning("a row has no reward_model.ground_truth, so the scorer gets None", fix)
        return "without a ground truth", None, lacking if run.own_scorer else None
    if isinstance(truth, list) and truth and all(_is_short(each) for each in truth):
        return _paid_of_list(run, row, truth)
    if not _is_short(truth):
        score = run.worker._run(_score(run, row, str(truth)))
        kind = f"a text of {len(truth)} characters" if isinstance(truth, str) else f"of type {type(truth).__name__}"
        unknown = f"no answer that could earn was made of its ground truth ({kind})"
        return f"the ground truth alone earns {score:g}" if score > 0 else unknown, None, None
    forms = _forms(row)
    scores = {}
    for name, form in forms.items():
        scores[name] = run.worker._run(_score(run, row, form.format(truth)))
        if scores[name] > 0:
            return f"the ground truth {name} earns {scores[name]:g}", form, None
    said = "the ground truth earns nothing, " + " or ".join(forms)
    if not run.own_scorer:
        return said, None, None
    best = max(scores, key=lambda name: scores[name])
    other_end = "1" if str(truth).endswith("0") else "0"  # as long as the right one: length may cost
    wrong = run.worker._run(_score(run, row, forms[best].format(f"{str(truth)[:-1]}{other_end}")))
    if wrong < scores[best]:  # a scorer of penalties
        return f"the ground truth {best} earns {scores[best]:g}, a wrong answer {wrong:g}", forms[best], None
    if _is_paid(run, row, f"{truth}0"):
        fix = f"see whether a comparison in {advice.scorer(run.custom)} is turned round"
        return said, None, warning(f"{said}, and a wrong answer is paid: {truth}0", fix)
    other = _as_number(truth) if (is_text := isinstance(truth, str)) else str(truth)
    if other is None:
        return said, None, warning(said, run.try_scorer)
    if not _would_be_paid(run, row, truth, other):
        return said, None, warning(said, run.try_scorer)
    kind, wanted = type(truth).__name__, "number" if is_text else "text"
    line = f"the ground truth is of type {kind}; {advice.scorer(run.custom)} pays only a {wanted} that equals it"
    shown, made = (f"{other}", "float(ground_truth)") if is_text else (f'"{other}"', "str(ground_truth)")
    return said, None, error(line, f"compare with {made}, or write it as {wanted}, {shown}, in {run.rows_file}")


def _is_paid(run: Inspection, row: Mapping[str, Any], answer: object) -> bool:
    """Whether an answer is paid in one of its forms."""
    return any(run.worker._run(_score(run, row, form.format(answer))) > 0 for form in _forms(row).values())


def _would_be_paid(run: Inspection, row: Mapping[str, Any], answer: object, truth: object) -> bool:
    """Whether it would be if `truth` were the ground truth; not if the scorer refuses one of that type."""
    try:
        return _is_paid(run, {**row, "reward_model": {**row["reward_model"], "ground_truth": truth}}, answer)
    except (EtudeError, InfrastructureError):
        return False


def _is_short(truth: object) -> bool:
    return isinstance(truth, str | int | float) and len(str(truth)) <= _MAX_TRUTH


def _paid_of_list(
    run: Inspection, row: Mapping[str, Any], truths: Sequence[str | int | float]
) -> tuple[str, str | None, Finding | None]:
    """The same of a list of ground truths: an answer is the first of them, or all."""
    answers = {
        "the first ground truth": str(truths[0]),
        "all ground truths": ", ".join(map(str, truths)),
        "all ground truths as JSON": json.dumps(truths, ensure_ascii=False),
    }
    forms = _forms(row)
    for of_what, answer in answers.items():
        for name, form in forms.items():
            if (score := run.worker._run(_score(run, row, form.format(answer)))) > 0:
                return f"{of_what} {name} earns {score:g}", None, None
    said = "neither the first ground truth nor all of the list earn anything, " + " or ".join(forms)
    if not run.own_scorer:
        return said, None, None
    if _would_be_paid(run, row, truths[0], [truths[0]]):  # it reads lists, and wants all of one in a form of its own
        return f"{said}; of a list of the first alone, it is paid", None, None
    if not _would_be_paid(run, row, truths[0], truths[0]):
        return said, None, warning(said, f"{run.try_scorer}; nothing to do if no answer is made of them")
    line = f"the ground truth is a list; {advice.scorer(run.custom)} pays only an answer that equals it"
    fix = f"compare with each of ground_truth, or write {json.dumps(truths[0], ensure_ascii=False)} in {run.rows_file}"
    return said, None, error(line, fix)


def _as_number(text: str) -> int | float | None:
    """The number that `text` is, if it is one."""
    if not _NUMBER.fullmatch(text.strip()):
        return None
    return float(text) if "." in text else int(text)


def _try_junk(run: Inspection, source: str, rows: Sequence[Mapping[str, Any]], form: str, empty: float) -> Result:
    scorer, files = advice.scorer(run.custom), run.rows_file
    fixes = {
        "a wrong answer": f"let {scorer} compare the answer with ground_truth, not only look at its form",
        "a longer answer that contains the right one": f"let {scorer} compare the whole answer with ground_truth, not look "
        "for it anywhere",
        "a longer answer that begins with the right one": f"let {scorer} compare all of the answer with ground_truth, "
        "not its beginning",
        "a part of the right answer": f"let {scorer} compare with ground_truth by ==, not look for the answer in it",
        "a list of guesses": f"let {scorer} read one answer, such as the last number, not any that is mentioned",
        _NONSENSE: f"let {scorer} pay for what is right before it pays for length or form",
        "the prompt, copied,": f"leave the ground truth out of the prompts in {files}; or let {scorer} read one answer",
    }
    earned: dict[str, list[tuple[float, float, str]]] = {name: [] for name in fixes}

    async def score_all(row: Mapping[str, Any], texts: Sequence[str]) -> list[float]:
        return list(await asyncio.gather(*(_score(run, row, text) for text in texts)))

    truths = [str(raw_truth(row)) for row in rows]
    for row, truth in zip(rows, truths):
        junk = dict(_junk(run, row, truth, [other for other in truths if other != truth], form))
        best, *scores = run.worker._run(score_all(row, [form.format(truth), *junk.values()]))
        for (name, text), score in zip(junk.items(), scores):
            earned[name].append((score, best, text))
    for name, scores in earned.items():
        paid = [pair for pair in scores if pair[0] > empty + _DUST and pair[0] >= pair[1] - _DUST]
        if name == _NONSENSE:  # which has neither number nor form: also a small part is too much
            paid = [pair for pair in scores if pair[0] > _DUST]
        if 2 * len(paid) > len(scores):
            score, right, text = paid[0]
            line = f"{source}: {name} earns {score:g} in {len(paid)} of {len(scores)} rows, the right one {right:g}"
            yield warning(f"{line}: {text!r:.60}", fixes[name])


def _junk(
    run: Inspection, row: Mapping[str, Any], truth: str, others: Sequence[str], form: str
) -> Iterator[tuple[str, str]]:
    if others:
        yield "a wrong answer", form.format(others[0])
    if truth[:1].isdigit() or (truth[:3].isalpha() and len(truth) > 2):  # 4 March is in 14 March, correct in noncorrect
        yield "a longer answer that contains the right one", form.format(f"{1 if truth[0].isdigit() else 'non'}{truth}")
    if truth.isdigit():
        yield "a longer answer that begins with the right one", form.format(f"{truth}7")
        if len(truth) > 1:
            yield "a part of the right answer", form.format(truth[:-1])
    if _NUMBER.fullmatch(truth):
        yield "a list of guesses", form.format(" ".join([*map(str, range(21)), truth, "1/2", "987654321"]))
    words = min(run.options.rollout.response_length, 1000) // 4
    yield _NONSENSE, "zorp quibble flum drast " * max(1, words // 4)
    asked = [message["content"] for message in row["raw_prompt"] if message["role"] == "user"]
    if asked and isinstance(asked[-1], str):
        yield "the prompt, copied,", asked[-1]


def reference_answer(run: Inspection, row: Mapping[str, Any]) -> str:
    """An answer to `row` made of its ground truth, in the form that the scorer pays, if it pays one."""
    truth = raw_truth(row)
    truth = truth[0] if isinstance(truth, list) and truth else truth
    return "done" if truth is None else run.reference.get(str(row.get("data_source")), "{}").format(truth)[:400]


def try_after_call(run: Inspection, row: Mapping[str, Any], tool: str, call: str, score: float) -> Result:
    """Whether the answer that is paid alone also is after a call, of which a rollout earned `score`: a scorer may read the
    call's own words as the answer. One that judges the call by its trajectory pays the words alone."""
    answer = reference_answer(run, row)
    alone, after = (run.worker._run(_score(run, row, text)) for text in (answer, f"{call}\n{answer}"))
    if 2 * max(after, score) < alone:
        line = f"{row.get('data_source')}: {answer!r:.60} alone earns {alone:g}, and after a call of '{tool}' {score:g}"
        fix = f"set reward_model.score_text=final_turn, or let {advice.scorer(run.custom)} read the end of solution_str"
        yield warning(f"{line}: solution_str begins with the call", f"{fix}: it holds all that the model wrote")


async def _score(run: Inspection, row: Mapping[str, Any], text: str) -> float:
    return float((await _reward(run, row, text)).score or 0.0)


async def _reward(run: Inspection, row: Mapping[str, Any], text: str) -> Rewards:
    """Returns what the reward manager gives an answer consisting of `text`."""
    trajectory = Trajectory("check", list(row["raw_prompt_ids"]), messages=[dict(m) for m in row["raw_prompt"]])
    ids = run.worker.say(text)
    trajectory.append(ids, Provenance.SAMPLED, log_probs=[0.0] * len(ids))
    trajectory.messages.append({"role": "assistant", "content": text})
    trajectory.assistant_turns = 1
    scorer = run.worker.scorer
    assert scorer is not None
    try:
        await asyncio.wait_for(scorer(trajectory, row), run.seconds)
    except (TimeoutError, asyncio.TimeoutError):
        raise TooSlow(f"no score within {run.seconds:g} s (--timeout)") from None
    return trajectory.rewards
