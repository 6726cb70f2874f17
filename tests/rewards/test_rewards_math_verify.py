"""Math-Verify's own pairs of a reference and an answer: where our verdict is another one, and which side is right.

An answer is what is boxed or stated, as `numina` reads it, else the whole text.
"""

import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from etude.rewards.answers import answers_equal
from etude.rewards.numina import extract_answer

PAIRS = Path(__file__).with_name("math_verify_pairs.jsonl")

OURS = {  # end of the reference and of the answer → why a careful reader agrees with us
    ("$9$", "$ \n 9 \n $"): "line breaks inside the delimiters change nothing",
    ("$9$", "\\( \n 9 \n \\)"): "line breaks inside the delimiters change nothing",
    ("$10/9$", r"\frac{10}{9} $"): "a false equation names two values",
    (r"\end{pmatrix}$", r"6 \\ 7 & 8\end{pmatrix}$"): "a sum that is still to be added",
    (r"0 & 1\end{pmatrix}$", r"0 & 1\end{pmatrix}$"): "a product that is still to be multiplied",
    (r"\end{pmatrix})$", r"0.2 \end{pmatrix}$"): "0.33 is not 1/3: a rounded value has at least six places",
    (r"\frac{8}{3}]$", "2.6667]$"): "a rounded value has at least six places",
    (r"[-2,7]$", r"x \\le 7$"): "a solved relation is its set, on either side",
    ("4}$", "4}$"): "two values are not one",
    (r"{\mathrm{e}}$", r"{\mathrm{e}}$"): "they are different numbers",
}
THEIRS = {  # … or would have given the reward
    ("1000.99", "1,000.99€"): "a denial beside the number: as likely a hedge as a correction",
    ("1000.99", "1,000.99m²"): "a denial beside the number",
    ("as follows:", r"\boxed{28\%}$."): "what follows the stated reference is not cut off",
    ("our answer.", "[Note"): "no answer is boxed or stated",
    ("$2/3$", "<|im_start|>user"): "no answer is boxed or stated",
    ("$12$", "<|im_start|>user"): "no answer is boxed or stated",
    ("$(7,6)$", "<|im_start|>user"): "no answer is boxed or stated",
    ("$100%$", "increases by 100%."): "no answer is boxed or stated",
    ("$10455$", "I hope it is correct."): "a box goes before what is stated after it",
    ("(1, 1)$$", r"\boxed{(1, 1)}$$"): "words between the boxes",
    ("bins", "1,2}$"): "words between the boxes",
}


def said(text):
    answer = extract_answer(text)
    return text if answer is None else answer


@pytest.mark.slow
def test_every_difference_from_math_verify_is_decided():
    _, *pairs = map(json.loads, PAIRS.read_text().splitlines())
    with ThreadPoolExecutor(2) as threads:
        ours = threads.map(lambda pair: answers_equal(said(pair[1]), said(pair[0])), pairs)
        differ = [pair for pair, verdict in zip(pairs, ours) if verdict != bool(pair[2])]
    decided = [*OURS, *THEIRS]
    unknown = [pair for pair in differ if not any(pair[0].endswith(a) and pair[1].endswith(b) for a, b in decided)]
    assert unknown == []
    assert len(differ) == len(decided)
    assert 1 - len(THEIRS) / len(pairs) >= 0.958  # docs/rewards.md
