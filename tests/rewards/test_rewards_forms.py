"""Right answers to real questions, in other forms than the reference's, and wrong ones in the same forms."""

import json
import re
from pathlib import Path
from types import SimpleNamespace

import pytest

from etude.rewards import bfcl, compute_score
from etude.rewards.answers import answers_equal
from etude.rewards.boxed import last_boxed

DATA = Path(__file__).parents[3] / "shared" / "data"
ASKED = re.compile(
    r"(?:[Ff]ind|[Cc]ompute|[Ww]hat is|[Ee]valuate)(?: the (?:value|sum|product) of)? \$([^$=]+?)[.,?]?\$"
)


def rows(path):
    if not (DATA / path).exists():
        pytest.skip("needs the data sets")
    return [json.loads(line) for line in (DATA / path).open()]


def score(source, text, truth, question=""):
    asked = SimpleNamespace(prompt=[{"role": "user", "content": question}], tool_calls=[])
    found = compute_score(source, text, truth, None, asked)
    return found["acc"] if isinstance(found, dict) else found


FORMS = [
    lambda truth: re.sub(r" (?![a-zA-Z])", "", truth),  # \begin{pmatrix}-7\\16\\5\end{pmatrix}
    lambda truth: re.sub(r"(\d+)/(\d+)", r"\\frac{\1}{\2}", truth),
    lambda truth: re.sub(r"\\sqrt\{(\w+)\}", r"√\1", truth),
    lambda truth: re.sub(r"\A(-?\d+)\Z", r"\\text{\1 apples}", truth),
    lambda truth: re.sub(r"\A(-?\d+)\Z", r"\1~\\text{units}", truth),
    lambda truth: re.sub(r"\A(-?\d+)\Z", r"\\boldsymbol{\1}", truth),
]


def test_math_500_in_other_forms():
    wrong = []
    for row in rows("math500/test.jsonl"):
        truth, question = row["answer"], row["problem"]
        answers = {form(truth) for form in FORMS}
        answers |= {f"{asked} = {truth}" for asked in ASKED.findall(question)[-1:]}  # "a + b = 17"
        for answer in answers - {truth}:
            text = rf"So it is $\boxed{{{answer}}}$."
            if score("HuggingFaceH4/MATH-500", text, truth, question) != 1.0:
                wrong.append((answer, truth))
    assert wrong == []


@pytest.mark.parametrize(
    ("answer", "truth", "right"),
    [
        (r"m+n = 29", "29", True),
        (r"P(\text{red}) = \frac{1}{2}", r"\frac12", True),
        (r"\frac{a}{b} = 29", "29", True),
        (r"P(X = 2) = \frac14", "0.25", True),
        (r"\(m+n=29\)", "29", True),
        (r"\mathbf{\frac{\sqrt{3}}{2}}", r"\frac{\sqrt{3}}{2}", True),
        (r"\boldsymbol{3, 5, 7}", "3, 5, 7", True),
        (r"\textcolor{red}{29}", "29", True),
        (r"\color{blue} 29", "29", True),
        (r"\bf 29", "29", True),
        (r"\textcolor{blue}{x + 1}", "x+1", True),
        (r"\underline{\sqrt{x}}", r"\sqrt{x}", True),
        (r"\mathbf{\frac{a}{b}}", r"\frac{a}{b}", True),
        (r"\underline{29} \text{ or } 30", "29", False),
        (r"\textcolor{red}{29 \text{ or } 30}", "29", False),
        (r"29 = \infty", "29", False),
        ("m+n = 28", "29", False),
        ("m+n = 28 = 29", "29", False),
        ("28 = 29", "29", False),
        ("m = 28, n = 29", "29", False),
        (r"\begin{pmatrix}5\\16\\-7\end{pmatrix}", r"\begin{pmatrix} -7 \\ 16 \\ 5 \end{pmatrix}", False),
        (r"\begin{pmatrix} -7 & 5 \\ 16 & 1 \end{pmatrix}", r"\begin{pmatrix} -7 & 16 \\ 5 & 1 \end{pmatrix}", False),
        (
            r"\begin{pmatrix}1\\2\end{pmatrix}+\begin{pmatrix}1\\2\end{pmatrix}",
            r"\begin{pmatrix}2\\4\end{pmatrix}",
            False,
        ),
        (r"137.5", r"137 \frac{1}{2}", True),
        ("3½", "3.5", True),
        (r"\text{18 or 19 apples}", "18", False),
        (r"\text{less than } 18", "18", False),
        (r"\text{not 18}", "18", False),
        ("52_9", "52_8", False),
        ("x = 52_9", "52_8", False),
        ("The answer is $52_9$", "52_8", False),
        ("x = 52_{8}", "52_8", True),
        ("x = -2, x = 1", "-2,1", True),
        ("$3$ and $4$", "4, 3", True),
        ("5 or $7$", "7", False),
        ("$7$ / 5", "7", False),
        (r"7 apples, or maybe \text{5}", "7", False),
        (r"\text{7} \lor \(5\)", "7", False),
        ("7 dollars and 50 cents", "7", False),
        ("7 apples and 2.5 pears", "7", False),
        ("1,000 dollars", "1000", True),
        (r"7 \frac{\text{m}}{\text{s}}", "7", True),
        (r"7\frac{\text{1}}{\text{2}}", "7", False),
    ],
)
def test_forms_of_mathematics(answer, truth, right):
    assert answers_equal(answer, truth) is right


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        (r"\boxed{1} and \boxed{-2}", "1, -2"),
        (r"\[ \boxed{(2, 2)} \quad \text{and} \quad \boxed{(6, 2)} \]", "(2, 2), (6, 2)"),
        (r"$y_1 = \boxed{x}$ and $y_2 = \boxed{2x}$", "x, 2x"),
        (r"$\boxed{5}$ or $\boxed{7}$", "5, 7"),
        ("\\boxed{5},\n\\boxed{7}", "5, 7"),
        ("\\boxed{5}\n\\boxed{7}", "7"),  # another turn
        (r"\boxed{7}, so \boxed{5}", "5"),
        (r"\boxed{7}, \boxed{7}", "7"),
        (r"\boxed{\boxed{7}}", "7"),
        (r"\boxed{5 or \boxed{7}}", "5 or {7}"),
        (r"\boxed{1 and \boxed{2}", "2"),
        (r"\boxed{1} and \boxed{2", None),
    ],
)
def test_boxes_that_are_joined_are_one_answer(text, answer):
    assert last_boxed(text) == answer


@pytest.mark.parametrize("answer", ["x + 5 = 12", "5 + x = 12", "a + b = 12", "y = a + b = 12", "7 = 12"])
def test_an_equation_of_the_question_names_no_value(answer):
    assert (
        score(
            "HuggingFaceH4/MATH-500",
            rf"\boxed{{{answer}}}",
            "12",
            "If $x + 5 = 12$, $a + b = 12$ and 7 = y, what is $xy + 5$?",
        )
        == 0.0
    )


@pytest.mark.parametrize(
    ("source", "text", "truth"),
    [
        ("math_dapo", "Answer:\n18", "18"),
        ("math_dapo", "**Answer**: 18", "18"),
        ("math_dapo", "Answer:\n\\[\n\\boxed{18}\n\\]", "18"),
        ("math_dapo", "Answer: 18\nAnswer:", "18"),
        ("math_dapo", "Answer: $18$, since there are 2 cases.", "18"),
        ("math_dapo", r"Answer: \(18\). This matches the question.", "18"),
        ("math_dapo", "Answer: 18 (from 2 cases)", "18"),
        ("lighteval/MATH", r"\boxed{11:30 \text{ PM}}", r"11:30\text{ p.m.}"),
        ("lighteval/MATH", r"\boxed{11:30}", r"11:30\text{ p.m.}"),
        ("lighteval/MATH", r"\boxed{\text{The answer is } (C)}", r"\text{(C)}"),
        ("lighteval/MATH", r"\boxed{\text{The answer is } p - q}", "p - q"),
        ("math_dapo", "Answer: $18$, since there are 2 cases and 3 colours, each with 3 shades.", "18"),
        ("numina_cn_k12", r"The answer is $18$. $\blacksquare$", "18"),
        ("numina_cn_k12", r"The answer is \(18\). \qed", "18"),
        ("lighteval/MATH", r"\boxed{\text{Answer: } 18\ }", "18"),
        ("math_dapo", "Answer: 5, since 1, 2, 4, 7 and 14 divide it. That is all of them.", "5"),
        ("math_dapo", "Answer: 18, because 9 + 9 = 18, so 18 is right.", "18"),
        ("math_dapo", "Answer: the ratio of both is 7/3 ≈ 2.33 in the end", r"\frac{7}{3}"),
        ("math_dapo", "Answer: $(1,2)$, because $3$ is prime", "(1,2)"),
        ("math_dapo", "Answer: **18**, as 9 divides it", "18"),
        ("math_dapo", "Answer: With 7 of them, there are 18.", "18"),
        ("math_dapo", "Answer: $n$, the number of cases, is 18", "18"),
        ("numina_cn_k12", "The answer is $18$, as $x = 3$ is no root.", "18"),
        ("numina_cn_k12", "The answer is **18**.", "18"),
        ("numina_cn_k12", "**Answer:** 18", "18"),
        ("numina_cn_k12", "The answer is:\n\\[\n18\n\\]", "18"),
        ("numina_cn_k12", "The answer is:\n$$\n18\n$$", "18"),
        (
            "numina_cn_k12",
            "The answer is:\n\\[\n\\begin{pmatrix}\n1 \\\\ 2\n\\end{pmatrix}\n\\]",
            r"\begin{pmatrix} 1 \\ 2 \end{pmatrix}",
        ),
        ("numina_cn_k12", "The answer is: with 2 circles the area ≈ 3.14.", "3.14"),
        ("numina_cn_k12", "The answer is $18$. This completes the solution.", "18"),
        ("numina_cn_k12", "The answer is 18. This completes the solution.", "18"),
        ("numina_cn_k12", "The answer is $18$. These two cases are all.", "18"),
        ("numina_cn_k12", "The answer is **18**, since the other root is negative.", "18"),
        ("numina_cn_k12", "The answer is 18. Checking: 9 + 9 = 18.", "18"),
        ("numina_cn_k12", "The answer is $18$, given 3 trials.", "18"),
        ("numina_cn_k12", r"The answer is $\frac{1}{3}$ (approximately 0.33).", r"\frac{1}{3}"),
        ("etude/arithmetic", r"\boxed{1{,}080}", "1080"),
        ("etude/arithmetic", r"\boxed{$-18$}", "-18"),
        ("openai/gsm8k", "#### **18**", "18"),
        ("openai/gsm8k", "#### Final Answer\n18", "18"),
        ("openai/gsm8k", "#### Final Answer\n\\[\\boxed{-18}\\]", "-18"),
        ("openai/gsm8k", "#### Final Answer:\n\n\\[\n\\boxed{18}\n\\]", "18"),
        ("openai/gsm8k", "#### $\\$18$", "18"),
        ("openai/gsm8k", "#### *18*", "18"),
        ("openai/gsm8k", "#### Final Answer\n$$\\boxed{18}$$", "18"),
        ("openai/gsm8k", "#### 18\n\n#### Final Answer\nJanet makes $18 a day for 5 days.", "18"),
        ("openai/gsm8k", "#### **Answer:**\n\n$\\boxed{18}$", "18"),
        ("openai/gsm8k", r"#### \boxed{18}", "18"),
        ("openai/gsm8k", r"#### \$18", "18"),
        ("etude/pictures", "**Answer:** C", "C"),
        ("etude/pictures", r"\boxed{C. Paris}", "C"),
        ("etude/pictures", r"\boxed{\textbf{(C) Paris}}", "C"),
        ("etude/pictures", "<answer>C. A cat</answer>", "C"),
        ("etude/pictures", r"\boxed{\text{(C) A cat}}", "C"),
        ("etude/pictures", "<answer>C. Yes or no</answer>", "C"),
        ("etude/pictures", "The answer is C. It is not A or B.", "C"),
        ("etude/pictures", "The answer is (C). We can rule out A or B. So it is.", "C"),
        ("etude/pictures", "<answer>C. Vitamin C or D.</answer>", "C"),
        ("numina_cn_k12", "The answer is $18$ because two cases exist.", "18"),
        ("math_dapo", "Answer: $18$ for two people", "18"),
        ("etude/pictures", 'The answer is "C".', "C"),
        ("etude/pictures", "The answer is $C$", "C"),
        ("etude/pictures", "The answer must be C.", "C"),
        ("etude/pictures", "<answer>C - Paris</answer>", "C"),
        ("etude/pictures", "正确选项是C", "C"),
        ("etude/pictures", "故选C。", "C"),
        ("etude/pictures", "The answer is C. Option A shows a cat, and option D is wrong.", "C"),
        ("etude/pictures", "<think>So the answer is A.</think>C", "C"),
        ("etude/pictures", "<think>It looks red, or <answer>blue</answer>.</think>\nRed.", "red"),
        ("etude/pictures", "Is A correct? C is correct.", "C"),
        ("etude/pictures", "Therefore, **C** is the answer.", "C"),
        ("searchR1_nq", "<answer>Ain’t “Misbehavin’”, 1939–1945</answer>", "\"Ain't Misbehavin'\", 1939-1945"),
    ],
)
def test_right_answers(source, text, truth):
    assert score(source, text, truth) == 1.0


@pytest.mark.parametrize(
    ("source", "text", "truth"),
    [
        ("math_dapo", "Answer: 18\nAnswer: 19", "18"),
        ("math_dapo", "Answer:\n19\n18", "18"),
        ("etude/arithmetic", r"\boxed{1,8}", "18"),
        ("numina_cn_k12", "The answer is 2 ≈ 18 is another.", "18"),
        ("numina_cn_k12", "The answer is $2$, since there are 18 cases.", "18"),
        ("numina_cn_k12", "The answer is 2. This matches the 18 cases.", "18"),
        ("numina_cn_k12", "The answer is 2 (from 18 cases).", "18"),
        ("numina_cn_k12", "The answer is **2**, as 18 divides it.", "18"),
        ("numina_cn_k12", "The answer is $(1,2)$, since 18 fails.", "18"),
        ("numina_cn_k12", "The answer is 18 (multiplicity 2), 5.", "18"),
        ("numina_cn_k12", "The answer is 18 (mod 19).", "18"),
        ("numina_cn_k12", "The answer is $18$, but also $19$.", "18"),
        ("numina_cn_k12", "The answer is:\n\\[\n18\n\\]\nor\n\\[\n19\n\\]", "18"),
        ("numina_cn_k12", "The answer is:\n$$\n18\n$$\nor\n$$\n19\n$$", "18"),
        ("numina_cn_k12", "The answer is:\n\\[\n18\n+1\n\\]", "18"),
        ("numina_cn_k12", "The answer is $18$ as well as $19$.", "18"),
        ("numina_cn_k12", "The answer is 18, sorry, 19.", "18"),
        ("numina_cn_k12", "The answer is 18. Correction: 19.", "18"),
        ("numina_cn_k12", "The answer is 18. Another is 19.", "18"),
        ("numina_cn_k12", "The answer is 18, either that or 19.", "18"),
        ("numina_cn_k12", "The answer is 18 (could be 19).", "18"),
        ("numina_cn_k12", "The answer is 18. Checking: 19.", "18"),
        ("lighteval/MATH", r"\boxed{11:30\text{ a.m.}}", r"11:30\text{ p.m.}"),
        ("lighteval/MATH", r"\boxed{5 AM}", r"5\text{ PM}"),
        ("etude/pictures", "<answer>C. Paris or A. Rome</answer>", "C"),
        ("etude/pictures", "<answer>C. A cat and D. A dog</answer>", "C"),
        ("etude/pictures", r"\boxed{C. A cat, D a dog}", "C"),
        ("etude/pictures", "Answer: C. Or A.", "C"),
        ("numina_cn_k12", "The answer is $18$ and a half.", "18"),
        ("openai/gsm8k", "#### 18 and a half", "18"),
        ("openai/gsm8k", "#### 18 hours and a half", "18"),
        ("openai/gsm8k", "#### 18 ½", "18"),
        ("openai/gsm8k", "#### 18 hours 30 minutes", "18"),
        ("openai/gsm8k", "#### 18 feet 5 inches", "18"),
        ("lighteval/MATH", r"\boxed{\text{all but } \frac{3}{2}}", r"\frac{3}{2}"),
        ("numina_cn_k12", "The answer is 18. Let me check: it is 19.", "18"),
        ("numina_cn_k12", "The answer is 18. This may also be 19.", "18"),
        ("numina_cn_k12", "The answer is 18. It may also be -18.", "18"),
        ("numina_cn_k12", "The answer is $x$. Another is $y$.", "x"),
        ("numina_cn_k12", "The answer is 18, as 9 + 10 = 19, so 19.", "18"),
        ("numina_cn_k12", "The answer is 18, because I erred: 19.", "18"),
        ("numina_cn_k12", "The answer is 18 from the first case, 19 from the second.", "18"),
        ("numina_cn_k12", "The answer is 18 as the lower bound and 19 as the upper one.", "18"),
        ("numina_cn_k12", "The answer is 18 (approximately 19).", "18"),
        ("numina_cn_k12", "The answer is 18, squared.", "18"),
        ("numina_cn_k12", "The answer is 18, multiplied by 2.", "18"),
        ("numina_cn_k12", "The answer is 18 hours, forty 5 minutes.", "18"),
        ("etude/arithmetic", r"\boxed{1 8}", "18"),
        ("openai/gsm8k", "#### 18²", "18"),
        ("openai/gsm8k", "#### Final Answer\n18 or 19", "18"),
        ("openai/gsm8k", "#### 18\n#### Final Answer\n$\\boxed{19}$", "18"),
        ("openai/gsm8k", "#### 18 squared", "18"),
        ("openai/gsm8k", "#### 18K", "18"),
        ("openai/gsm8k", "#### **18 or 19**", "18"),
        ("etude/pictures", r"\boxed{C. D}", "C"),
        ("etude/pictures", 'The answer is "C" or "D"', "C"),
        ("etude/pictures", "C\nD\nE", "C"),
        ("etude/pictures", "答案是C，D", "C"),
        ("etude/pictures", "答案是C还是D", "C"),
        ("etude/pictures", "不选C", "C"),
        ("etude/pictures", "Neither B nor C is correct.", "C"),
        ("etude/pictures", "Neither B nor C is the answer.", "C"),
        ("etude/pictures", "If D is right, C is the answer.\nSo the answer is D.", "C"),
        ("etude/pictures", "C is the one that is not correct.", "C"),
        ("etude/pictures", "<think>The answer is C.</think>I cannot say.", "C"),
        ("etude/pictures", "<think>Perhaps <answer>red</answer>?</think>Blue.", "red"),
        ("openai/gsm8k", "#### 18 apples, or maybe 19", "18"),
        ("openai/gsm8k", "#### The answer is $18$ or \\boxed{19}", "18"),
        ("openai/gsm8k", "#### The answer is less than 18", "18"),
        ("openai/gsm8k", "#### x = 18, y = 19", "18"),
    ],
)
def test_wrong_answers(source, text, truth):
    assert score(source, text, truth) == 0.0


def test_a_call_without_the_brackets_of_its_list():
    """As on the leaderboard; it is also a call where none is expected."""
    for row in rows("bfcl/simple_python.jsonl")[:100]:
        ((name, accepted),) = row["ground_truth"][0].items()
        given = {key: values[0] for key, values in accepted.items() if "" not in values}
        call = f"{name}({', '.join(f'{key}={value!r}' for key, value in given.items())})"
        for text in (call, f"`{call}`", f"```python\n{call}\n```"):
            if "{" not in call:  # its values would be tables of accepted ones
                assert bfcl.compute_score(text, row["ground_truth"])["score"] == 1.0, text
            assert bfcl.compute_score(text, [])["score"] == 0.0
    assert bfcl.compute_score("I cannot (sorry)", [])["score"] == 1.0
