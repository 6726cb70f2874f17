"""Where we answer differently from Math-Verify's own tests (version 0.9): each pair, which side is right, and why.

Its other pairs are answered alike, as far as an answer can be taken from them: from the last box, else the whole text.
"""

import pytest

from etude.rewards.answers import answers_equal

REFERENCE_ONLY = "an answer is what is boxed or stated; whole solutions are not searched for a number"
CORRECTED = "a denial beside the number: as likely a hedge as a correction"
LAST_BOX = "the last box is the answer, not all of them: otherwise a box for every guess would win"
PRECISION = "0.33 is not 1/3: a rounded value has at least six places"

DECIDED = [  # reference, answer, ours, reason
    ("1000.99", "the number is not 10 which is 1,000.99€", False, CORRECTED),
    ("1000.99", "not it's not 10 it's 1,000.99m²", False, CORRECTED),
    ("$9$", "Answer $ \n 9 \n $", True, "line breaks inside the delimiters change nothing"),
    ("$9$", "Answer \\( \n 9 \n \\)", True, "line breaks inside the delimiters change nothing"),
    (
        r"$(\begin{pmatrix}\frac{1}{3}\\ \frac{1}{5} \end{pmatrix})$",
        r"$\begin{pmatrix}0.33\\0.2 \end{pmatrix}$",
        False,
        PRECISION,
    ),
    (r"$(\frac{3}{5},\frac{8}{3}]$", "$(0.6,2.6667]$", False, PRECISION),
    (
        r"$\begin{pmatrix}1 & 0 \\ 0 & 1\end{pmatrix}$",
        r"$\begin{pmatrix}1 & 0 \\ 0 & 1\end{pmatrix} \begin{pmatrix}1 & 0 \\ 0 & 1\end{pmatrix}$",
        False,
        "a product that is still to be multiplied is the problem, not its answer",
    ),
    ("$3$", "We know that $t = s + 5$, and find $t = 8$. So it was 3 hours ago.", False, REFERENCE_ONLY),
    ("$10/9$", r"Answer $ \frac{1}{2} \$ = \frac{10}{9} $", False, "a false equation names two values"),
    ("1,-2", "1", False, LAST_BOX),
    ("$(2, 2), (6, 2)$", "(6, 2)", False, LAST_BOX),
    ("${1,2,3}$", "3", False, LAST_BOX),
    ("2", "1,2", False, "two values are not one"),
    ("4", "${35 cm,4}$", False, "two values are not one"),
    (r"$x \in [-2,7]$", r"$-2 \le x \le 7$", True, "a solved relation is its set, on either side"),
    ("$f(x)$", "$f(y)$", False, "another variable is another answer, as with its option strict"),
    (r"$1 - \frac{1}{\mathrm{e}}$", r"$1 + \frac{1}{\mathrm{e}}$", False, "they are different numbers"),
]
MENDED = [
    ("0,111", "0.111", True),
    (r"$28\%$", "$28$ %", True),
    (r"$28\%$", "$28$ percent", True),
    ("$19, 46, and 82$", r"$19, 46, \text{ and } 82$", True),
    ("$19, 46, and 82$", "$21, 36, and 82$", False),
    ("0,111", "111", False),
]


@pytest.mark.parametrize(("reference", "answer", "ours", "reason"), DECIDED)
def test_a_difference_from_math_verify_is_decided(reference, answer, ours, reason):
    assert answers_equal(answer, reference) is ours, reason


@pytest.mark.parametrize(("reference", "answer", "right"), MENDED)
def test_where_math_verify_is_right(reference, answer, right):
    assert answers_equal(answer, reference) is right
