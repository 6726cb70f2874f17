"""The share of right answers that are rewarded, over real questions, in the forms in which models write them; no answer that
is another number, sign or order is. docs/rewards.md has the shares; the floors here are below them by a row or two."""

import json
import re
from fractions import Fraction
from pathlib import Path
from types import SimpleNamespace

import pytest

from etude.rewards import compute_score

DATA = Path(__file__).parents[3] / "shared" / "data"
pytestmark = pytest.mark.skipif(not DATA.is_dir(), reason="the data sets are not beside this checkout")
NUMBER = r"-?\d+"


def thousands(separator):
    return lambda truth: f"{int(truth):,}".replace(",", separator) if re.fullmatch(r"\d{4,}", truth) else truth


def rewritten(pattern, spelling):
    return lambda truth: re.sub(pattern, spelling, truth)


def decimal(truth):
    if not (found := re.fullmatch(r"\\frac\{(\d+)\}\{(\d+)\}", truth)):
        return truth
    value = Fraction(int(found[1]), int(found[2]))
    return str(float(value)) if Fraction(str(float(value))) == value else truth


ANSWERS = [
    *map(thousands, (",", "{,}", r",\!", r"\,")),
    rewritten(rf"\A({NUMBER})\Z", r"\1.00"),
    rewritten(r"\A(\d+(?:\.\d+)?)\Z", r"\\$\1"),
    rewritten(rf"\A({NUMBER})\Z", r"\1 \\text{ apples}"),
    rewritten(rf"\A({NUMBER})\Z", r"\1\\,\\text{cm}^2"),
    rewritten(rf"\A({NUMBER})\Z", r"\1 \\frac{\\text{m}}{\\text{s}}"),
    rewritten(rf"\A({NUMBER})\Z", r"\\mathbf{\1}"),
    rewritten(rf"\A({NUMBER}|\\frac.*)\Z", r"x = \1"),
    rewritten(r"\\frac", r"\\dfrac"),
    rewritten(r"\\frac\{(\d+)\}\{(\d+)\}", r"\1/\2"),
    rewritten(r"\\frac\{(\d)\}\{(\d)\}", r"\\frac\1\2"),
    decimal,
    rewritten(r"\\(?:left|right)", ""),
    rewritten(r"(?<=[\w}])([+,=])(?=[\w\\])", r" \1 "),
    rewritten(r" (?![a-zA-Z])", ""),
    rewritten(r"\Z", "."),
    rewritten(r"\A(.*)\Z", r"$\1$"),
    rewritten(r"\\%", "%"),
    rewritten(r"\^\{?\\circ\}?", r"\\text{ degrees}"),
    rewritten(r"\\sqrt\{(\w+)\}", r"√\1"),
    rewritten(r"\\pi", "π"),
    rewritten(r"-", "−"),
    rewritten(r"\\text\{([^{}]*)\}", r"\1"),
    rewritten(r"\A(-?\w+), ?(-?\w+)\Z", r"x = \1 \\text{ or } x = \2"),
]
BOXED = [
    r"So it is $\boxed{{{}}}$.",
    "Thus\n\\[\n\\boxed{{ {} }}\n\\]\n",
    r"The answer is \boxed{{{}}}. I hope it is correct.",
    r"\boxed{{\text{{The answer is }} {}}}",
]
STATED = [
    r"The answer is \({}\).",
    r"So the answer is **${}$**.",
    "Final Answer: The final answer is ${}$. I hope it is correct.",
]
LINES = ["Answer: ${}$", "**Answer:** {}", "**Answer: {}**", "Answer:\n$$\n{}\n$$", r"Answer: \(\boxed{{{}}}\)"]
MARKED = [
    "#### {}",
    "####{}",
    r"#### \${}",
    "#### ${}",
    "#### {} dollars.",
    "#### **{}**",
    r"#### $\boxed{{{}}}$",
    "#### ${}$",
]
MARKED += [
    "#### {}.00",
    "#### {}%",
    "#### Answer: {}",
    "#### The answer is {}.",
    "####\n{}",
    "#### x = {}",
    "#### {} miles/h",
]
MARKED += ["**#### {}**", "#### **Final Answer:** {}", r"#### \({}\)", "####: {}", r"#### {}\text{{ apples}}"]
CHOSEN = [
    "The answer is ({}).",
    "{}",
    "**{}**",
    "**({}) Paris**",
    "<answer>{}. Paris</answer>",
    "Answer: {}",
    "{} is correct.",
]
CHOSEN += [
    r"\boxed{{\text{{{}}}}}",
    "Option {} is correct. Option D is not.",
    "I would choose {}.",
    "答案是{}。",
    "`{}`",
]
CHOSEN += [
    "<think>The answer is D</think>\n{}",
    "The correct option is **{}**",
    r"The answer is \({}\)",
    "So {} is the best answer",
]
FOUND = [
    "<answer>{}</answer>",
    "<think>x</think><answer> **{}** </answer>",
    "<answer>“{}.”</answer>",
    "<answer>The {}</answer>",
]


def score(source, text, truth, question):
    asked = SimpleNamespace(prompt=[{"role": "user", "content": question}], tool_calls=[])
    found = compute_score(source, text, truth, None, asked)
    return found["acc"] if isinstance(found, dict) else found


def others(truth):
    """Answers in which the last number is another, the sign is, or two parts are swapped."""
    if numbers := list(re.finditer(r"\d+", truth)):
        start, end = numbers[-1].span()
        yield from (
            f"{truth[:start]}{value}{truth[end:]}" for value in (int(truth[start:end]) + 1, int(truth[start:end]) - 1)
        )
    yield truth[1:] if truth.startswith("-") else f"-{truth}"
    yield rewritten(r"\A(\\frac)(\{\w+\})(\{\w+\})\Z", r"\1\3\2")(truth)
    yield rewritten(r"\A\(([^,()]+),([^,()]+)\)\Z", r"(\2,\1)")(truth)


def unlike(one, other):
    return one not in (other, "-0") and "--" not in one and not re.search(r"\binches|mbox", other)


def rows(name, step):
    return [json.loads(line) for line in (DATA / name).open()][::step]


def mathematics(source, forms):
    for number, row in enumerate(rows("math500/test.jsonl", 16)):
        truth = row["answer"]
        for turn, rewrite in enumerate((str, str, str, *ANSWERS)):
            form = forms[(turn + number) % len(forms)]
            if rewrite is not str and rewrite(truth) == truth:
                continue
            yield source, form.format(rewrite(truth)), truth, row["problem"], True
            if wrong := [each for each in others(truth) if unlike(each, truth)]:
                yield source, form.format(rewrite(wrong[(turn + number) % len(wrong)])), truth, row["problem"], False


def grade_school(name, key, step):
    for row in rows(name, step):
        truth = row[key].replace(",", "")
        for form in MARKED:
            yield "openai/gsm8k", form.format(truth), truth, row["question"], True
            for wrong in others(truth):
                if unlike(wrong, truth):
                    yield "openai/gsm8k", form.format(wrong), truth, row["question"], False


def choices():
    for form in CHOSEN:
        for truth in "ABC":
            yield "etude/pictures", form.format(truth), truth, "", True
            yield "etude/pictures", form.format(chr(ord(truth) + 1)), truth, "", False


def answers(name):
    for row, other in zip(found := rows(name, 20), found[1:]):
        for form in FOUND:
            truth = {"target": row["answers"]}
            yield "searchR1_nq", form.format(row["answers"][0]), truth, row["question"], True
            if not set(row["answers"]) & set(other["answers"]):
                yield "searchR1_nq", form.format(other["answers"][0]), truth, row["question"], False


TABLES = {
    "MATH-500, boxed": (lambda: mathematics("HuggingFaceH4/MATH-500", BOXED), 0.997),
    "MATH-500, stated": (lambda: mathematics("numina_olympiads", STATED), 0.997),
    "MATH-500, DAPO": (lambda: mathematics("math_dapo", LINES), 0.997),
    "GSM8K": (lambda: grade_school("gsm8k/test.jsonl", "final", 13), 1.0),
    "SVAMP": (lambda: grade_school("svamp/svamp.jsonl", "answer", 13), 1.0),
    "a letter": (choices, 1.0),
    "NQ, exact match": (lambda: answers("nq_open/nq_open_dev.jsonl"), 0.99),
}


@pytest.mark.parametrize("name", TABLES)
def test_right_answers_are_rewarded_and_others_are_not(name):
    table, floor = TABLES[name]
    rewarded, missed, lucky = 0, [], []
    for source, text, truth, question, right in table():
        earned = score(source, text, truth, question) == 1.0
        rewarded += earned and right
        if earned is not right:
            (missed if right else lucky).append((text, truth))
    assert lucky == []
    assert rewarded / (rewarded + len(missed)) >= floor, missed
