"""Equality of answers: spellings that mean the same, near misses that do not, and hostile ones that must end."""

import contextlib
import os
import re
import signal
import threading
import time

import psutil
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from wait_stage import is_running, until

from etude.errors import InfrastructureError
from etude.rewards import algebra, answers
from etude.rewards.algebra import AlgebraProcesses
from etude.rewards.answers import answers_equal
from etude.rewards.numeral import read_numeral


def pairs(text):
    """Of each line, the pairs that stand apart by two spaces or more: what was answered, and the answer."""
    return [tuple(re.split(" [≡≢] ", pair)) for pair in re.split(r"\n| {2,}", text.strip())]


EQUAL = [
    *pairs(r"""
\text{all real numbers} ≡ \mathbb{R}    all reals ≡ (-\infty,\infty)    5^{th} ≡ 5    3^{\text{rd}} ≡ 3    about 5 ≡ 5
\approx 3.5 ≡ 7/2    so we get x = 5 ≡ 5    so we get x = 5 ≡ x=5    5 million ≡ 5000000
5 \text{ million dollars} ≡ 5,000,000    1.5 billion people ≡ 1500000000    The answer is negative 5 ≡ -5
minus \frac{1}{2} ≡ -0.5    1010_2 ≡ 1010_{2}    5 meters squared ≡ 5    12 red apples ≡ 12    60 km/h ≡ 60
9.8 m/s^2 ≡ 9.8    90\degree ≡ 90    1/2 ≡ 0.5    0,5 ≡ 0.5    1,5 ≡ 1.5    1{,}000 ≡ 1000    1,000,000 ≡ 10^6
1 000 000 ≡ 1000000    1\,000 ≡ 1000    The answer is 5 ≡ 5    The answer is $\frac{1}{2}$ ≡ 0.5
so we get $x = 5$. ≡ 5    x=5 ≡ 5    5 ≡ x=5    x \geq 5 ≡ x>=5    x \ge 5 ≡ 5 \le x    x < 5 ≡ x \lt 5
x \gt 5 ≡ 5 < x    -x > -1 ≡ x < 1    [5,\infty) ≡ x \geq 5    x \geq 5 ≡ [5,\infty)    1 < x < 2 ≡ (1,2)
x \in (1,2) ≡ (1,2)    (1,2) ≡ x \in (1,2)    [1,2) ≡ [1,2)    (-\infty,-2]\cup[2,\infty) ≡ (-\infty,-2]\cup[2,\infty)
[2,\infty)\cup(-\infty,-2] ≡ (-\infty,-2]\cup[2,\infty)    \{1,2,3\} ≡ \{3,2,1\}    1,2,3 ≡ \{1,2,3\}    3,1,2 ≡ 1,2,3
1, 2 and 3 ≡ 1,2,3    $1$, $2$ and $3$ ≡ \{1,2,3\}    1 \text{ and } 2 ≡ 1,2    1 or 2 ≡ 1,2    x=1 or x=2 ≡ 1,2
5 cm ≡ 5    5 \text{ cm} ≡ 5    5\,\mathrm{cm} ≡ 5    5 \text{ cm}^2 ≡ 5    5 ≡ 5 \text{ cm}    \$5 ≡ 5    $5 ≡ 5
5 dollars ≡ 5    5\% ≡ 5    5\% ≡ 0.05    5% ≡ 0.05    5 percent ≡ 5\%    0.05 ≡ 5\%    50\% ≡ \frac{1}{2}
45^\circ ≡ 45    45 degrees ≡ 45^\circ    \frac12 ≡ 1/2    \frac 12 ≡ 1/2    \dfrac{1}{2} ≡ \tfrac12
\sqrt2 ≡ \sqrt{2}    \sqrt[3]{8} ≡ 2    2\sqrt{3} ≡ \sqrt{12}    \frac{1}{\sqrt{2}} ≡ \frac{\sqrt{2}}{2}
1\frac{1}{2} ≡ 3/2    1 1/2 ≡ 3/2    1/3 ≡ 0.333333    0.\overline{3} ≡ 1/3    \pi ≡ 3.141593    2\pi ≡ 2*pi
2 \cdot 3 ≡ 6    2 \times 10^{3} ≡ 2000    2e3 ≡ 2000    (x+1)^2 ≡ x^2+2x+1    (x+1)(x-1) ≡ x^2-1    y=2x+3 ≡ y = 3+2x
2x+3 ≡ y=2x+3    y=2x+3 ≡ 2x-y+3=0    f(x)=x^2 ≡ x^2    2i+1 ≡ 1+2i
\begin{pmatrix}1\\2\end{pmatrix} ≡ \begin{pmatrix}1\\2\end{pmatrix}
\begin{pmatrix}1&2\\3&4\end{pmatrix} ≡ \begin{bmatrix}1&2\\3&4\end{bmatrix}    \binom{5}{2} ≡ 10    5! ≡ 120
\log_2 8 ≡ 3    \ln e ≡ 1    \sin(\pi/2) ≡ 1    e^{i\pi} ≡ -1    \text{even} ≡ even    \text{(A)} ≡ A
\textbf{(A)} ≡ A    (A) ≡ A    \text{yes} ≡ Yes    \infty ≡ \infty    \varnothing ≡ \emptyset    3:2 ≡ 3:2
10:30 ≡ 10:30    \frac{3}{4} cup ≡ 3/4    \boxed{5} ≡ 5    $\boxed{\frac{1}{2}}$ ≡ .5    \[ x = 3 \] ≡ 3
\( 3 \) ≡ 3    +5 ≡ 5    −5 ≡ -5    5.0 ≡ 5    5. ≡ 5    05 ≡ 5    a+b ≡ b+a    \frac{a}{b} ≡ a/b    k\pi ≡ \pi k
2^{10} ≡ 1024    2**10 ≡ 1024    x^{-1} ≡ 1/x    |x| ≡ \left|x\right|    \lfloor 2.5 \rfloor ≡ 2    100_{8} ≡ 100_8
\frac{\pi}{4} \text{ radians} ≡ \pi/4    10 \text{ or } 12 ≡ \{10,12\}    \pm 2 ≡ 2,-2
1 \pm \sqrt{2} ≡ 1+\sqrt2, 1-\sqrt2    n \in \mathbb{Z} ≡ n \in \mathbb{Z}    \mathbb{R} ≡ (-\infty,\infty)
\mathbb R ≡ \mathbb{R}    \mathbb{R} ≡ \mathbb R    (-\infty,\infty) ≡ \mathbb R
\mathbb R\setminus\{0\} ≡ \mathbb{R}\setminus\{0\}
x \neq 2 ≡ x \ne 2    x \ne 2 ≡ (-\infty,2)\cup(2,\infty)    x\leq 5 ≡ x \le 5    0 \le x \le 1 ≡ [0,1]
(1,2,3) ≡ (1,2,3)    (0.5, 2) ≡ (\frac12, 2)    (1/3, 2) ≡ (0.333333,2)
x=\frac{-1\pm\sqrt{5}}{2} ≡ \frac{-1\pm\sqrt{5}}{2}    I think it's 12. ≡ 12    12 apples ≡ 12
33\frac{1}{3}\% ≡ 1/3    1.5\times10^8 ≡ 150000000    $18.50 ≡ 18.5    \$18.50 ≡ 18.5    18.50 ≡ $18.50    1,22 ≡ 1.22
12,34 ≡ 12.34    2,50 € ≡ 2.5    2<x<3 ≡ (2,3)    \frac{x}{2} ≡ x/2    500\% ≡ 5    5 ≡ 500\%    ab ≡ ba
\text{Tuesday} ≡ Tuesday    Evelyn ≡ \text{Evelyn}    \text{June 20} ≡ June 20    6 - 5i ≡ 6-5i    p - q ≡ p-q
x^3 + 3x - 6 ≡ x^3+3x-6    \left( 3, \frac{\pi}{2} \right) ≡ (3,\pi/2)    \dfrac{9}{7} ≡ 9/7    42^\circ ≡ 42
1 \pm \sqrt{19} ≡ 1-\sqrt{19}, 1+\sqrt{19}    11,\! 111,\! 111,\! 100 ≡ 11111111100    864 \mbox{ inches}^2 ≡ 864
\$32,\!348 ≡ 32348    15\mbox{ cm}^2 ≡ 15    5.4 \text{ cents} ≡ 5.4    10\text{ and }20 ≡ 10,20
x \in [-2,7] ≡ [-2,7]    -2 \le x \le 7 ≡ x \in [-2,7]    \text{(C)} ≡ C    C ≡ \text{(C)}    3R^2 ≡ 3 R^2
2k ≡ k\cdot 2    1/2 ≡ 1:2    i^2 ≡ -1    (x-1)(x+1) = x^2-1 ≡ x^2-1    {1,2} ≡ \{1,2\}    y = 2x + 3 ≡ 2x-y+3=0
= 5 ≡ 5    x = 5 \text{ m} ≡ 5    \sqrt{16} ≡ 4    a, b ≡ b, a    ≈5 ≡ 5    12​ ≡ 12    12_{10} ≡ 12
\infty ≡ infinity    r^2\pi ≡ \pi r^2    2 b a ≡ 2ab    a*b*c ≡ abc    V = abc ≡ abc    a b c ≡ abc    P \cdot V ≡ PV
The answer is $IX$ ≡ IX    X I ≡ XI    A B C D ≡ ABCD    It is odd ≡ odd    \angle CBA ≡ \angle ABC    1 2 3 ≡ 1 2 3
x<1 \text{ or } x>2 ≡ (-\infty,1)\cup(2,\infty)    x \leqslant -2 \lor x \geqslant 2 ≡ (-\infty,-2]\cup[2,\infty)
x \in (-\infty,1)\cup(2,\infty) ≡ x>2 \text{ or } x<1    \{x \mid x>3\} ≡ \{t|t>3\}    x>3 ≡ \left\{x \mid x>3\right\}
(1,\frac32] ≡ \{x|1<x\le\frac{3}{2}\}    \{x \in \mathbb{R} : 3 \leq x\} ≡ [3,\infty)
7 \text{ R } 2 ≡ 7R2    \triangle ACB ≡ \triangle ABC
R - r ≡ -r+R    \sqrt{R^2-r^2} ≡ \sqrt{(R-r)(R+r)}    (M+m)g ≡ Mg+mg    2K ≡ 2k    r \in \mathbb{R} ≡ r\in\mathbb R
5 m ≡ 5    5m ≡ 5    5 ≡ 5 m    5.0 m ≡ 5 m    5 meters ≡ 5 m    \frac{3}{2} m ≡ 1.5    2x\text{ cm} ≡ 2x
2x ≡ 2x\,\mathrm{cm}    \frac13\pi r^2 h ≡ \frac{\pi r^2 h}{3}    k\pi + 2m ≡ 2m + k\pi    2ab ≡ 2 b a    5kg ≡ 5
9.8 ≡ 9.8 \mathrm{~m} / \mathrm{s}^{2}    9.8 \mathrm{~m} \cdot \mathrm{s}^{-2} ≡ 9.8    5 ≡ 5 \text{ s}^{-1}
0.2 ≡ 0.2~\mathrm{s^{-1}}    3 \mathrm{~J} \mathrm{K}^{-1} ≡ 3    \text{C-A-B} ≡ C-A-B    H-T ≡ \text{H-T}
x<-1, x>3 ≡ x<-1 \text{ or } x>3    x<-1 \text{ or } x>3 ≡ x<-1; x>3
3 ≡ 3 m/s    3 m/s ≡ 3    2x units ≡ 2x    x+1 cm ≡ 1+x    12\pi ≡ 12\pi square units    2x\text{ m}/\text{s} ≡ 2x
"""),
    (" $18$ ", "18"),
    ("1/0", "1/0 "),
    ("(3, pi/2)", r"\left(3,\frac{\pi}{2}\right)"),
]

DIFFERENT = [
    *pairs(r"""
$7$ (or $5$) ≢ 5    It is $7$. It is $5$. ≢ 5    \boxed{7} \boxed{5} ≢ 5    not $5$ ≢ 5    7 = 5 ≢ 5
\frac{3}{11} = 5 ≢ 5    x+1 = 5 ≢ 5    $7$, possibly $x+1$ ≢ x+1    \text{all real numbers except 2} ≢ \mathbb{R}
\text{all real numbers} ≢ 5    5^{t} ≢ 5    5^{th} root ≢ 5    x^{th} ≢ x    not about 5 ≢ 5    about 5 or 6 ≢ 5
so we get y = 5 ≢ x=5    so we get x = 5 or x = 6 ≢ 5    The answer is negative 5 ≢ 5    It is less than 5 ≢ 5
x is at most 5 ≢ 5    more than 5 apples ≢ 5    Less than $5$ ≢ 5    half of 10 ≢ 10    The square root of 25 ≢ 25
5 thousand ≢ 5    5 hundredths ≢ 5    2 thirds ≢ 2    5 squared ≢ 5    5 factorial ≢ 5    3 sin ≢ 3    5 xy ≢ 5
1010_2 ≢ 1010_3    x=5 ≢ y=5    x > 5 ≢ x \geq 5    (5,\infty) ≢ x \geq 5    (1,2) ≢ (2,1)    (1,2) ≢ [1,2]
IX ≢ XI    Army ≢ Mary    THH ≢ HHT    BDAC ≢ ABCD    BA ≢ A B    1*BDAC ≢ ABCD    \frac{ABCDBDAC}{BDAC} ≢ ABCD
\angle BAC ≢ \angle ABC    4 3 2 1 ≢ 1 2 3 4    6 ≢ 1 2 3    1 2 3 ≢ 6    14R ≢ 7 R 2    live ≢ evil    12_8 ≢ 12
10_2 ≢ 10    x = 12_{8} ≢ 12
1,2 ≢ 1,2,3    1 \text{ or } 2 ≢ 2    1 or 2 ≢ 2    5\% ≢ 0.5    1/3 ≢ 0.33    0.333 ≢ 1/3    3.14 ≢ \pi
x^2+2x+1 ≢ x^2+2x    y=2x+3 ≢ y=2x+4    1+2i ≢ 1-2i
\begin{pmatrix}1\\2\end{pmatrix} ≢ \begin{pmatrix}2\\1\end{pmatrix}    A ≢ B    -\infty ≢ \infty    -5 ≢ 5
a-b ≢ b-a    1001_2 ≢ 9    0 \leq x < 1 ≢ [0,1]    (1,2,3) ≢ (3,2,1)    7 and some words 8 ≢ 7
5 apples and 7 oranges ≢ 7    1,234 ≢ 1.234    1.234 ≢ 1234    it is not 5 ≢ 5    5 is wrong ≢ 5
I don't think it is 5 ≢ 5    The answer is not 5 ≢ 5    5, 7 ≢ 7    5; 7 ≢ 7    5/7 ≢ 7    5 7 ≢ 57    1 2 ≢ 12
11/2 ≢ 1 1/2    2x-4 \geq 6 ≢ [5,\infty)    x^2-5x+6<0 ≢ (2,3)    0 ≢ 0.\overline{3}    0.\overline{3} ≢ 0.3
5\% ≢ 500\%    x ≢ y    1:2 ≢ 2:1    x^2-1 = 0 ≢ x = 1    \infty ≢ 10^{100}    \frac{1}{0} ≢ \infty    [1,2] ≢ \{1,2\}
x \le 1 \text{ or } x>2 ≢ (-\infty,1)\cup(2,\infty)    x>1 or x<2 ≢ (-\infty,1)\cup(2,\infty)    \{x|1<x<2\} ≢ [1,2]
y<1 or y>2 ≢ x<1 or x>2    \{x|2x>6\} ≢ (3,\infty)    \{3\} ≢ \{x|x>3\}    x>3 or x<5 ≢ 3    \{x|x^2<1\} ≢ (-1,1)
R - r ≢ r - R    \frac{R}{r} ≢ \frac{r}{R}    \frac{R}{r} ≢ 1    \frac{M}{M+m} ≢ \frac{m}{M+m}    mg+Mg ≢ 2mg
2 ≢ 2m    2 ≢ 2ab    a+2 ≢ a+2ab    a+2ab ≢ a+2    2ab ≢ 2bc    \frac12 ≢ \frac{1}{2}ab    \pi r^2 ≢ \pi r^2 h    5 s ≢ 5 m
\pi r^2 h ≢ \pi r^2    x^2 ≢ x^2 m    \sqrt{2} ≢ \sqrt{2}h    1+3 ≢ 1+3m    4 ≢ 4st
0.999 ≢ 1    1e400 ≢ 1    1 + ≢ 1    \sqrt{16} ≢ \pm 4    (a,b) ≢ (b,a)    2x=4 ≢ x=2
"""),
    ("7 \n \\frac{3}{2}", "\\frac{3}{2}"),
    *(("1/0", "5"), ("", "5"), ("1" * 2000, "1" * 2000), ("\\frac{", "3x"), ('"\n0\n1', "x")),
]


@pytest.mark.parametrize(("prediction", "reference"), EQUAL)
def test_spellings_of_one_answer(prediction, reference):
    assert answers_equal(prediction, reference)


@pytest.mark.parametrize(("prediction", "reference"), DIFFERENT)
def test_another_answer(prediction, reference):
    assert not answers_equal(prediction, reference)


@pytest.mark.parametrize(
    "hedge", ["{}, {}", "{} or {}", "{} and {}", r"{} \text{{ or }} {}", r"\{{{}, {}\}}", "{};{}", "{} {}"]
)
@pytest.mark.parametrize("answer", ["5", r"\frac{1}{2}", "0.25", r"\sqrt{2}", "x+1", "12,000"])
def test_several_candidates_are_not_one_answer(hedge, answer):
    assert not answers_equal(hedge.format("7", answer), answer)
    assert not answers_equal(hedge.format(answer, "7"), answer)


@given(st.fractions(max_denominator=999), st.integers(1, 999))
def test_a_number_is_itself_however_it_is_written(number, step):
    spelled = [f"{number}", rf"\frac{{{number.numerator}}}{{{number.denominator}}}", f"${number}$", f"x = {number}"]
    assert all(answers_equal(each, spelled[0]) for each in spelled)
    assert not any(answers_equal(each, f"{number + step}") for each in spelled)


@given(st.integers(0, 10**12))
def test_thousands(number):
    for mark in (",", " ", "'", r"\,", "{,}", r",\!"):
        assert answers_equal(f"{number:,}".replace(",", mark), str(number))


@given(st.text(max_size=60))
@settings(max_examples=300)
def test_no_text_is_too_odd_to_be_read(text):
    read_numeral(text)


HOSTILE = [
    "10^{10^{10}}",
    "9^{9^{9^{9}}}",
    r"\sum_{n=1}^{10^{30}} \frac{1}{n}",
    r"\int_0^{1} e^{e^{e^{x^x}}} dx",
    "(x+1)^{100000}",
    r"\frac{" * 120,
    "{" * 400 + "}" * 400,
    "(" * 450 + "1" + ")" * 450,
    r"\sqrt{" * 90 + "2" + "}" * 90,
    "1+" * 450 + "1!" * 20,
    "10000000!!!",
    "a" * 900,
    "$" * 999,
    r"\left(" * 100,
    "1e999999999",
    "\x00\ud800\U0001f600" * 100,
]


@pytest.mark.parametrize("text", HOSTILE)
def test_hostile_answers_are_wrong_in_bounded_time(text, monkeypatch):
    monkeypatch.setattr(answers._algebra, "seconds", 0.2)
    assert not answers_equal(text, "3x")


def algebra_children():
    """Pids of this process's children for symbolic algebra."""
    found = set()
    for child in psutil.Process().children():
        with contextlib.suppress(psutil.Error):
            if any("algebra_child" in word for word in child.cmdline()):
                found.add(child.pid)
    return found


@pytest.fixture
def pool():
    """Makes pools, and returns for each the pids of its children; closes them at the end."""
    made, before = [], algebra_children()

    def make(**options):
        made.append(AlgebraProcesses(**options))
        return made[-1], lambda: sorted(algebra_children() - before)

    yield make
    for processes in made:
        processes.close()


def forks_of(pid):
    with open(f"/proc/{pid}/task/{pid}/children") as file:
        return [int(each) for each in file.read().split()]


def fork_of(pid, other_than=None):
    """The fork of a child that answers its questions."""
    while not (forks := [each for each in forks_of(pid) if each != other_than]):
        time.sleep(0.001)
    return forks[0]


@pytest.mark.parametrize("count", [60, pytest.param(1000, marks=pytest.mark.soak)])
def test_hostile_answers_leave_the_pool_its_size(pool, count):
    processes, children = pool(limit=2, seconds=0.02)
    questions = [([f"${HOSTILE[n % len(HOSTILE)]} + {n}$"], ["$x$"]) for n in range(count)]
    threads = [
        threading.Thread(target=lambda part=part: [processes.equal(*each) for each in questions[part::2]])
        for part in range(2)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    pids = children()
    assert len(pids) == 2
    assert [len(forks_of(pid)) for pid in pids] == [1, 1]
    processes.seconds = 3.0
    assert processes.equal(["$x+2$"], ["$2+x$"])
    assert children() == pids  # the children lived through it; only their forks were replaced


def test_what_does_not_end_is_undecided_and_the_next_question_is_answered(pool):
    processes, _ = pool(limit=1, seconds=0.1)
    assert processes.equal(["$10^{10^{10}}$"], ["$5$"]) is False
    processes.seconds = 3.0
    assert asked(processes, *[(["$x+1$"], ["$1+x$"])] * 3) == [True] * 3


def asked(processes, *questions, after=lambda: None):
    """What a pool of one child answers to questions asked at once, `after` some time: verdicts, or exceptions."""
    answers = []

    def ask(question):
        try:
            answers.append(processes.equal(*question))
        except Exception as error:
            answers.append(error)

    threads = [threading.Thread(target=ask, args=(each,), daemon=True) for each in questions]
    for thread in threads:
        thread.start()
    after()
    for thread in threads:
        thread.join()
    return answers


SLOW = r"$9^{9^{9^{9}}} + %d$"
LONG = [f"$x+{n}$" for n in range(2, 60)] + ["$1+x$"], ["$x+1$"]
"""A question that takes a while, and whose answer is right."""


def test_a_killed_child_is_no_verdict_and_nothing_of_it_is_remembered(pool):
    processes, children = pool(limit=1)
    assert processes.equal(["$x+1$"], ["$1+x$"])
    [child] = children()
    os.kill(child, signal.SIGKILL)
    with pytest.raises(InfrastructureError):
        processes.equal(["$x+3$"], ["$3+x$"])
    assert processes.equal(["$x+3$"], ["$3+x$"])


def test_a_child_that_hangs_is_no_verdict(pool, monkeypatch):
    monkeypatch.setattr(algebra, "HUNG_SECONDS", 0.5)
    processes, children = pool(limit=1)
    assert processes.equal(["$x+1$"], ["$1+x$"])
    [child] = children()
    forks = []

    def stop():
        forks.append(fork_of(child))
        os.kill(forks[0], signal.SIGSTOP)

    [error] = asked(processes, LONG, after=stop)
    assert isinstance(error, InfrastructureError)
    monkeypatch.undo()
    assert processes.equal(*LONG)
    assert child not in children()
    until(lambda: not is_running(forks[0]), "what hung did not go with its parent")


@pytest.mark.parametrize(("kills", "verdict"), [(1, True), (2, False)])
def test_a_fork_killed_once_is_asked_again_and_killed_twice_the_answer_is_at_fault(pool, kills, verdict):
    processes, children = pool(limit=1)
    assert processes.equal(["$x+1$"], ["$1+x$"])
    [child] = children()

    def kill():
        fork = None
        for _ in range(kills):
            fork = fork_of(child, fork)
            os.kill(fork, signal.SIGKILL)

    assert asked(processes, LONG, after=kill) == [verdict]
    assert processes.equal(["$x+4$"], ["$4+x$"])


@pytest.mark.slow
def test_slow_questions_do_not_delay_the_others(pool, monkeypatch):
    monkeypatch.setattr(algebra, "FIRST_SECONDS", 0.1)
    processes, _ = pool(limit=1, seconds=0.8)
    ended = []
    assert processes.equal(["$x+1$"], ["$1+x$"])
    slow = [threading.Thread(target=lambda n=n: ended.append(processes.equal([SLOW % n], ["$x$"]))) for n in range(4)]
    for thread in slow:
        thread.start()
    time.sleep(0.1)  # they come first
    assert processes.equal(["$x+2$"], ["$2+x$"])
    assert len(ended) <= 1
    for thread in slow:
        thread.join()
    assert ended == [False] * 4


def test_a_crowd_of_slow_questions_is_undecided_but_not_for_ever(pool, monkeypatch):
    monkeypatch.setattr(algebra, "FIRST_SECONDS", 0.05)
    monkeypatch.setattr(algebra, "PATIENCE_SECONDS", 0.2)
    processes, _ = pool(limit=2, seconds=1.0)
    questions = [([SLOW % n], ["$x$"]) for n in range(6)]
    assert asked(processes, *questions) == [False] * 6
    assert processes._verdict.cache_info().currsize < 6  # some are still to be decided


@pytest.mark.parametrize(
    ("prediction", "reference"),
    [
        ("cannot be 5", "5"),
        ("anything but 5", "5"),
        ("five plus 5", "5"),
        ("one fifth of 5", "5"),
        ("7 halves", "7"),
        ("5 half", "5"),
        ("5 tens", "5"),
        ("5 lakh", "5"),
        *(
            (f"5 {words}", "5")
            for words in ("plus six", "minus one", "point five", "divided by two", "to the six", "twenty")
        ),
        ("5 feet six inches", "5"),
        ("5 doubled", "5"),
        ("2,1", "1,3"),
        ("3,12", "12.3"),
        *((number, "105") for number in ("一百零五", "一百五")),
        *((number, "2") for number in ("百", "一二", "二三", "十二")),
        ("5 quadrillion", "5"),
        ("5万", "5"),
        ("5或7", "5"),
        ("5半", "5"),
        *((f"5{word}", "5") for word in ("以上", "平方", "的平方", "折", "错误", "阶乘")),
    ],
)
def test_words_that_make_another_number_of_it(prediction, reference):
    assert not answers_equal(prediction, reference)


@pytest.mark.parametrize(
    ("prediction", "reference"),
    [
        ("5个", "5"),
        ("5 分钟", "5"),
        ("5厘米", "5"),
        ("5平方米", "5"),
        ("5岁", "5"),
        ("答案是5", "5"),
        ("1 和 2", "1, 2"),
        ("5 lakh", "500000"),
        ("5 apples in two bags", "5"),
        ("2,1", "1,2"),
        ("$2,1$", "1,2"),
        ("二", "2"),
        ("两", "2"),
        ("零", "0"),
        ("十", "10"),
        ("十二", "12"),
        ("二十一", "21"),
        ("三百", "300"),
        ("二十万", "200000"),
        ("50％", "50\\%"),
    ],
)
def test_answers_in_chinese(prediction, reference):
    assert answers_equal(prediction, reference)
