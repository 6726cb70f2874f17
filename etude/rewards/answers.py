r"""`answers_equal`: whether two answers, LaTeX or plain text, mean the same.

Invariant: it always returns, from any thread, whatever the model wrote. Identical texts, words and single numbers are
compared here, exactly; everything else is symbolic algebra, in which a short expression can hang inside one C call, so
it runs in a process that is killed at its limit (see `algebra.py`), and an answer undecided by then counts as wrong. An
answer that names several values ("5 or 7") is their set, never one of them. A relation stands for a set only when
solved. `is_answer` also knows the question: copying it, or rewriting an expression that it states, earns nothing.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

from etude.errors import DataError
from etude.rewards.algebra import AlgebraProcesses
from etude.rewards.numeral import ALTERNATIVE, CONTINUATION, MAGNITUDES, Numeral, read_numeral
from etude.rewards.truth import truths_of
from etude.rewards.view import question_of

MAX_ANSWER_CHARS = 1000
MAX_QUESTION_CHARS = 10_000  # searched for expressions, from the question's beginning

_SYMBOLS = {
    "−": "-", "–": "-", "×": r"\times ", "·": r"\cdot ", "÷": "/", "π": r"\pi ", "∞": r"\infty ", "≤": r"\leq ",
    "≥": r"\geq ", "≠": r"\neq ", "∪": r"\cup ", "∩": r"\cap ", "∈": r"\in ", "±": r"\pm ", "∅": r"\emptyset ",
    "°": r"^\circ ", "或": " or ", "和": " and ", "、": ", ", "％": "%",
    "½": r"\frac{1}{2}", "¼": r"\frac{1}{4}", "¾": r"\frac{3}{4}", "⅓": r"\frac{1}{3}", "⅔": r"\frac{2}{3}",
    "²": "^2", "³": "^3", "\u00a0": " ", "\u202f": " ", "\u2009": " ", "\u200b": "", "≈": r"\approx ",
}  # fmt: skip
_TYPED = [  # roots and powers without LaTeX
    (re.compile(r"√\s?(?:\(([^()]*)\)|(\d+|[a-zA-Z]))"), r"\\sqrt{\1\2}"),
    (re.compile(r"(?<![\w)}\]*])\*\*(?=[^\s*])([^*\n]+?)(?<=\S)\*\*(?![\w({\\*])"), r"\1"),  # bold
    (re.compile(r"(?<=[^\s*])\*\*(?=[.,;:]|\s+[a-zA-Z]{2}|\s*\Z)"), ""),  # the end of bold
    (re.compile(r"\*\*"), "^"),
    (re.compile(r"(?<![\\a-zA-Z])sqrt\(([^()]*)\)"), r"\\sqrt{\1}"),
]
_SPELLINGS = [  # what models write → LaTeX
    (re.compile(r",\\!\s*|(?<=\d)\\,(?=\d{3}(?!\d))"), ","),  # thousands
    (re.compile(r"\.(?=\s*(?:\$|\\\)|\\\])+\.?\s*\Z)"), ""),
    (re.compile(r"\A\s*(?:\\\(|\\\[|\$\$)((?:(?!\\\(|\\\[|\$).)*)(?:\\\)|\\\]|\$\$)\.?\s*\Z", re.S), r"$\1$"),
    (re.compile(r"\A\\(?:text(?:bf|it|rm)?|mathrm|mbox)\s?\{([^{}]*\d[^{}]*)\}\Z"), r"\1"),  # \text{8 apples}
    (re.compile(r"\$,?\s*(and|or)\s*\$"), r" \1 "),  # $3$ and $4$
    (re.compile(r"\A\\text\s?\{([^{}\d]*(?:\bis|[Aa]nswer:)\s*)\}"), r"\1 "),  # \text{The answer is } 8
    (re.compile(r"\\mathrm\{i\}"), "i"),
    (re.compile(r"\\(?:boldsymbol|bm|pmb)(?![a-z])"), r"\\mathbf"),
    (re.compile(r"\\math(bb|bf|cal)\s+([a-zA-Z])"), r"\\math\1{\2}"),  # \mathbb R
    (re.compile(r"\A\\(?:color\s?\{\w+\}(?!\s?\{)|(?:bf|bfseries|large|Large|LARGE|huge|Huge)(?![a-zA-Z]))"), ""),
    (
        re.compile(
            r"\A\\(?:mathbf(?=.*(?:\d|\\frac|\\sqrt|\\text))|underline|(?:text)?color\s?\{\w+\})\s?"
            r"\{((?:[^{}]|\{(?:[^{}]|\{[^{}]*\})*\})*)\}\Z"
        ),
        r"\1",
    ),
    *_TYPED,
    (re.compile(r"(?<!\\)~|(?<!\\)\\(?:,|!|;|:| |\Z|quad|qquad|left(?![a-z])|right(?![a-z])|displaystyle)"), " "),
    (re.compile(r"(?<![\\<>!=])>="), r"\\geq "),
    (re.compile(r"(?<![\\<>!=])<="), r"\\leq "),
    (re.compile(r"!="), r"\\neq "),
    (re.compile(r"\\gt(?![a-z])"), ">"),
    (re.compile(r"\\lt(?![a-z])"), "<"),
    (re.compile(r"\\varnothing"), r"\\emptyset"),
    (re.compile(r"\\degree(?![a-z])"), r"^\\circ"),
    (re.compile(r"\b(?:[Nn]egative|[Mm]inus)\s+(?=\\?\$?[\d.\\])"), "-"),
    (re.compile(r"\A\$([^$]+)\$\s*(?:\\?%|percent|pct)\Z"), r"\1\\%"),
    (re.compile(r"(?<![\\a-zA-Z])pi(?![a-zA-Z])"), r"\\pi "),
    (re.compile(r"(?<![\\a-zA-Z])infinity(?![a-zA-Z])"), r"\\infty "),
    (re.compile(r"(?<=\d)\{,\}(?=\d)"), ","),
    (re.compile(r"(?<=\d)\s?\^\s?\{\s?(?:\\(?:text|mathrm|textrm)\s?\{)?(st|nd|rd|th)\}{1,2}(?=[.$\s]*\Z)"), r"\1"),
    (re.compile(r"\A(?:\\approx|(?:[Aa]bout|[Aa]pproximately|[Rr]oughly|[Aa]round)(?=\s))\s*(?=\\?\$?[\d.\\+-])"), ""),
    (
        re.compile(
            r"\A(?:(?:[Tt]he\s+)?(?:[Ff]inal\s+)?[Aa]nswer(?:\s+is\b:?|:)\s*|(?:所以|因此|故)?(?:最终)?答案(?:是|为)?[:：]?\s*)"
        ),
        "",
    ),
    (re.compile(r"\A(?:\\(?:text|mathrm|mbox)\s?\{)?\s?[Aa]ll\s+real(?:s|\s+numbers)\s?\}?\.?\Z"), r"\\mathbb{R}"),
]
_DELIMITED = re.compile(r"(?<!\\)\$|\\[(\[]|\\boxed|\\fbox")
_WRAPPED = re.compile(r"\\(?:text(?:bf|it|rm|sf)?|math(?:rm|bf|it|sf)|mbox|operatorname)\s*\{([^{}]*)\}")
_UNIT = re.compile(  # after a number or a closing bracket, at the end
    r"(?<=[\d)}])\s*(?:\\(?:text|mathrm|mbox|textrm)\s*\{[^{}]*\}|\\[dt]?frac(?:\{\s*\\(?:text|mathrm)\s*\{[^{}\d]*\}\s*\}){2}|\^\s*\{?\\circ\}?"
    r"|\s(?:[ckm]?m|ft|mi)/(?:s|h|hr|min)|(?:\s[a-zA-Z]{2,20}){1,3}|[€£¥₹]"
    r"|(?![\s\u4e00-\u9fff]*(?:[平立次]方\s*\Z|阶乘))(?!(?<=\d)\s*[\u4e00-\u9fff]*[万亿兆千百十几零一二三四五六七八九半又点加减乘除与至到不非无以上下内外的错否折成多余])[\u4e00-\u9fff]{1,6})"
    r"(?:\s*\^\s*\{?\d\}?)?\s*\Z"
)
_CURRENCY = re.compile(r"(?:\\\$|\$|[€£¥₹])\s*(?=\.?\d)")
_NOT_UNITS = re.compile(  # words, and pairs of letters that may be two variables
    r"\b(?:and|or|is|are|was|not|no|nor|never|but|plus|minus|times|over|halves|half|tens|if|than|to|mod|wrong|false|percent|choose|thirds?|fifths?|sixths?|sevenths?|eighths?|ninths?|tenths?"
    r"|hundredths?|thousandths?|millionths?|sqrt|sin|cos|tan|log)\b|\A\s*(?:squared|cubed|factorial|ln)\b"
    r"|\b(?!(?:cm|mm|km|nm|dm|ft|in|kg|mg|ml|cl|dl|lb|oz|mi|yd|hr|ms|ns|us|hz|kw|kj|pa|kb|mb|gb|tb|am|pm|of|at|by|an|on)\b)"
    r"[a-z]{2}\b",
    re.I,
)
_MAGNITUDE = re.compile(
    rf"(?<=\d)\s*(\\(?:text|mathrm|mbox|textrm)\s*\{{)?\s*({'|'.join(MAGNITUDES)})(?![a-zA-Z])(?(1)(\s*\}})?)", re.I
)
_SEVERAL = re.compile(r"(?:,\s*)?(?<![a-zA-Z\\])(?:and|or)(?![a-zA-Z])", re.I)
_DENIED = re.compile(
    r"\b(?:not|never|wrong|false|incorrect|cannot|except|excluding|neither|unlikely)\b"
    r"|\b(?:(?:any|every)thing|all) but\b|n['’]t\b",
    re.I,
)
_COMPARED = re.compile(  # the number that follows is not the answer
    r"\b(?:than|least|most|twice|thrice|double|plus|(?<!\\)times|above|below|exceeding|half(?:\s+of)?"
    r"|(?:thirds?|quarters?|fourths?|fifths?|sixths?|sevenths?|eighths?|ninths?|tenths?|opposite|reciprocal|inverse|root|square|cube)\s+of)"
    r"[\s}]+(?:\\?\$|\\\()?\s*(?=[\d.\\+-])",
    re.I,
)
_EXPLAINED = re.compile(  # 7 of "$7$, as 2 divides it" or "7 (from 2 cases)": what follows is no part of the answer
    r"(\$[^$]+\$|\\\((?:(?!\\\)).)+\\\)|[-+]?\\?\$?\d[\d.,/]*(?<![.,/])(?:\s?\\?%)?)(?:\s?[a-zA-Z]{3,20})?"
    r"(?:(?P<reason>(?:[.,;]?\s+\(?(?:since|because)|[,;]\s+(?:as(?!\swell)|given|counting|considering)|\s+\(from)\b.*)"
    r"|(?P<rounded>\s*\((?:approximately|about|roughly)\b[^()]*\)\.?)"
    r"|(?P<sentence>\.\s+[A-Z].*))",
    re.S,
)
_VALUE = re.compile(r"\$[^$]+\$|\\\((?:(?!\\\)).)+\\\)|(?:(?<![\w)}])-)?\d+(?:[.,/]\d+)*|\\[dt]?frac.*", re.S)
_AFTER_REASON = re.compile(r"(?:[;:!?—→]|\.(?=\s)|\b(?:or|but|so|wait)\b)(.*)", re.S)  # 8 of "7, as I erred: 8"
_ROUNDED = re.compile(  # a formula is what stands before it, prose what stands behind
    r"\d[^\\a-zA-Z]*\\approx|\}\s*\\approx"
)
_CONTINUED = re.compile(rf"\d{CONTINUATION}")
_ALTERNATIVE = re.compile(rf"\d{ALTERNATIVE}")
_TWO_VALUES = re.compile(r"(-?\d+),(-?\d{1,2})")  # or a decimal comma
_HALF_OF_DAY = re.compile(r"\d[\s~$]*(?:\\(?:text|mathrm|mbox)\s?\{\s*)?([ap])\.?\s?m\b", re.I)  # 11:30 \text{ p.m.}
_BASED = re.compile(r"(\d\w*)_(?:\{\s*(\d{1,2})\s*\}|(\d{1,2}))")
_SEQUENCE = re.compile(r"(m?\s*\\(?:measured)?angle\s*)?((?:[A-Z]\s*){2,}|(?:[a-zA-Z]\s*){3,})")  # not xy, a product
_LISTED = re.compile(r"\d+(?:\.\d+)?(?:(?:\s+|\s*R\s*)\d+(?:\.\d+)?)+")  # or 7 R 2, with a remainder
_COMBINED = re.compile(r"[+/^-]|\\(?:[dt]?frac|sqrt)(?![a-z])")
_RELATION = re.compile(r"[=<>]|\\(?:[lg]eq?|neq?|in)(?![a-z])")
_ASSIGNED = re.compile(r"([a-zA-Z])(?:_\{?\w{1,10}\}?)?\s*=\s*([^=<>,;]+)")
_OPTION = re.compile(  # (C) 18: a letter and a value, without another letter or value
    r"\s*(?:\$\s*)?(?:\\(?:text(?:bf|rm|it)?|math(?:bf|rm)|mbox)\s*\{\s*)?\(([A-J])\)[.:}]*(?:\s|~|\\[ ,;:]|\\q?quad)+\}?"
    r"((?!.*(?:(?<![a-zA-Z\\])[A-J](?![a-zA-Z])|\b(?:or|not)\b)).*\w.*)",
    re.S,
)
_ANCHOR = re.compile(r".*\b(?:answer|result|solution)(?:\s+is)?\s*[:=]?\s*(?=\S)", re.I | re.S)
_LEADING_WORDS = re.compile(r"\A(?:(?![a-zA-Z]\s*=)[a-zA-Z]+(?:['’][a-zA-Z]+)?[,:]?\s+)+(?=\S)")
_WORDS = re.compile(r"[a-zA-Z]{2,}\s+[a-zA-Z]{2,}|[a-zA-Z]+['’][a-zA-Z]+")
_SEGMENT = re.compile(
    r"(?<!\\)\$([^$]+)(?<!\\)\$|\\\((.+?)\\\)|\\\[(.+?)\\\]|\\(?:boxed|fbox)\s*\{((?:[^{}]|\{(?:[^{}]|\{[^{}]*\})*\})*)\}",
    re.S,
)
_NAME = re.compile(r"(?!.*\\(?:[dt]?frac|sqrt|cdot|times|binom|begin))[^\d+*/^-]*[a-zA-Z][^+*/^-]*", re.S)
_LETTER = re.compile(
    r"(?<![\\a-zA-Z])[a-zA-Z]|\\(?:alpha|beta|gamma|delta|theta|phi|varphi|omega|lambda|mu|sigma)(?![a-z])"
)
_CONDITION = re.compile(r"(?<=[a-zA-Z])\([^()=]*=[^()=]*\)")  # P(X = 2)
_OUTER = re.compile(r"\A\\[(\[]|\\[)\]]\Z")
_ARITHMETIC = re.compile(
    r"-?\s?(?:[\d(]|\\(?:[dt]?frac|sqrt)(?![a-z]))"
    r"(?:[\d\s.()/^!*+{}-]|\\(?:times|cdot|div|[dt]?frac|sqrt)(?![a-z])){0,200}[\d)!}]"
)
_FRACTION = re.compile(r"\\[dt]?frac(?![a-z])\s*(\d?)")  # \frac12 is \frac{1}{2}
_THOUSANDS = re.compile(r"(?<=\d)(?:,|\{,\}|,?\\[,!])(?=\d{3}(?!\d))")
_TIMES = re.compile(r"(?<=\d)\s?[xX]\s?(?=\d)")
_DIGITS = re.compile(r"\d*\.?\d+")
_BETWEEN = r"[^\w,;:=?$\n\\]{0,9}"
_NUMBER_ASKED = re.compile(  # of a question, as -3/20 or 25 %
    rf"(?:-\s?)?\d[\d.]*(?:{_BETWEEN}(?:\\[a-zA-Z]+)?{_BETWEEN}\d[\d.]*)*(?:\s?\\?%)?"
)
_TERM = re.compile(r"\d+(?:\.\d+)?|\\[a-zA-Z]+|[a-zA-Z!|]")
_OPERATION = re.compile(  # left to do
    r"\\(?:operatorname\*?\s?\{)?(sum|prod|i+nt|lim|max|min|gcd|lcm|det|lfloor|lceil|[pb]?mod|begin\{[vV]matrix|[dt]?frac\s?\{d\})"
    r"(?![a-z])"
)
_MODULUS = re.compile(r"\s*\(?\s*\\[pb]?mod(?![a-z]).*", re.S)
_EQUALS = re.compile(r"=(?![^{}]*\})")  # not that of \sum_{k=1}
_LOOK = re.compile(r"\\(?:left|right|cdot|displaystyle|text\w*|math\w+|mbox)(?![a-z])|\\[,;:! ()\[\]]|[$*]")
_BOUND = r"(?:[\d\s./^*(){}+-]|\\(?:[dt]?frac|sqrt|pi|infty)(?![a-z]))+"
_SIGN = r"(<|>|\\[lg]e(?:q(?:slant)?)?(?![a-z]))"
_INEQUALITY = re.compile(rf"\s*(?:({_BOUND}){_SIGN})?\s*([a-zA-Z])\s*(?:{_SIGN}({_BOUND}))?")
_SET_OF = re.compile(  # \{x \mid x > 3\}
    r"\s*\\\{\s*([a-zA-Z])\s*(?:\\in\s*\\mathbb\{R\}\s*)?(?:\\mid(?![a-z])|\\vert(?![a-z])|[|:])(.*)\\\}\s*", re.S
)
_COMPARES = re.compile(_SIGN)
_JOINED = re.compile(r"[,;]|(?<![a-zA-Z\\])and(?![a-zA-Z])")
_EITHER = re.compile(r"\s*(?:(?<![a-zA-Z\\])or(?![a-zA-Z])|\\lor(?![a-z])|\\vee(?![a-z]))\s*")
_LETTERS = re.compile(r"\\(?:math(?:bb|cal)|text[a-z]*|operatorname|mbox)\s*\{[^{}]*\}|\\[a-zA-Z]+|([a-zA-Z])")
_algebra = AlgebraProcesses()


def answers_equal(prediction: str, ground_truth: str) -> bool:
    """Whether two answers mean the same; False if either is longer than 1,000 characters.

    Raises:
        InfrastructureError: the process for symbolic algebra cannot be started.
    """
    if len(prediction) > MAX_ANSWER_CHARS or len(ground_truth) > MAX_ANSWER_CHARS:
        return False
    ours, theirs = _normalise(prediction), _normalise(ground_truth)
    if not ours or not theirs:
        return False
    if _tight(ours) == _tight(theirs):
        return True
    solved = _solution(ours), _solution(theirs)
    if solved[0] and solved[1] and solved[0][0] != solved[1][0] and "" not in (solved[0][0], solved[1][0]):
        return False  # of x and of y
    listed = [sum(map(bool, map(_COMPARES.search, _JOINED.split(text)))) > 1 for text in (ours, theirs)]  # x < 1, x > 2
    if not any(listed):
        ours, theirs = (each[1] if each else text for each, text in zip(solved, (ours, theirs)))
    if ours.count(r"\begin{") > max(1, theirs.count(r"\begin{")) and "=" not in ours:
        return False  # matrices that are still to be added or multiplied
    halves = [[each.lower() for each in _HALF_OF_DAY.findall(text)] for text in (ours, theirs)]
    if all(halves) and halves[0] != halves[1]:
        return False
    if _COMPARED.search(ours) or any(each.search(ours) and not each.search(theirs) for each in (_DENIED, _CONTINUED)):
        return False
    if (said := _without_reason(ours)) is None:
        return False
    ours = said
    if (
        "\n" in ours
        and "\\begin" not in ours
        and len(lines := [each for each in ours.split("\n") if each.strip(" $")]) > 1
    ):
        ours = ", ".join(lines)
    values = _TWO_VALUES.fullmatch(ours.strip("$")), _TWO_VALUES.fullmatch(theirs.strip("$"))
    if _number(theirs) is not None and values[1] is None and _number(ours) is None and _ALTERNATIVE.search(ours):
        return False
    if (formulas := _SEGMENT.findall(ours)) and len(
        formulas
    ) > 1:  # all of them are the answer, whatever the words between
        ours = ", ".join(next(filter(None, each), "") for each in formulas)
    sides = _CONDITION.sub("(X)", _OUTER.sub("", ours.strip("$ "))).split("=")
    if len(sides) > 1 and "=" not in theirs and not _RELATION.search(ours.replace("=", "")):
        is_number = _number(theirs) is not None and not any(map(_DELIMITED.search, sides))
        is_number = is_number and values[1] is None
        stated = [side for side in sides if not (is_number and _is_symbolic(side))]  # 12 of "m + n = 12"
        if is_number or not _NAME.fullmatch(sides[0]):
            return bool(stated) and all(answers_equal(side, theirs) for side in stated)  # "7 = 12" is not 12
    if based := _BASED.fullmatch(theirs.strip("$")):
        if any(_based(each) != _based(based.groups()) for each in _BASED.findall(ours)):
            return False  # algebra sees no base
        if _BASED.fullmatch(ours.strip("$")):
            return True
    elif not _BASED.search(theirs) and any(_based(each)[1] != 10 for each in _BASED.findall(ours)):
        return False
    words = _words(ours), _words(theirs)
    if words[0] and words[1] and words[0] == words[1]:
        return True
    values = _TWO_VALUES.fullmatch(ours.strip("$")), values[1]
    if values[0] and values[1] and values[0][1] == values[1][2] and values[0][2] == values[1][1]:
        return True  # "2,1" and "1,2" are the same two values, as "2, 1" and "1, 2" are
    numbers = _number(ours), _number(theirs)
    if numbers[0] is not None and numbers[1] is not None:
        named = _variable(ours), _variable(theirs)
        return (None in named or named[0] == named[1]) and numbers[0].equals(numbers[1])
    if not _in_order(ours, theirs):
        return False
    ours, theirs = _apart(ours, theirs)
    return _algebra.equal(_readings(ours, theirs), _readings(theirs, ours))


def _without_reason(text: str) -> str | None:
    """Returns a normalised answer without what follows it as its reason; None if that states another value."""
    explained = _EXPLAINED.fullmatch(text)
    if explained is None:
        return text
    if _is_restated(explained):
        return None
    value = _OUTER.sub("", explained[1])
    is_formula = explained[1].startswith(("$", "\\(")) and not _is_symbolic(value)
    return value if is_formula or _number(value) is not None else text


def _is_restated(explained: re.Match[str]) -> bool:
    """Whether another value follows the one that `_EXPLAINED` found: 8 of "7. Checking gives 8", unlike 2 of "7, as there
    are 2 cases"."""
    value, more = _OUTER.sub("", explained[1]).strip("$"), explained[0][explained.end(1) :]
    if explained["reason"]:
        more = found[1] if (found := _AFTER_REASON.search(more.lstrip(" .,;"))) else ""
    stated = _VALUE.findall(more)
    if not stated:
        return False
    ours, last = read_numeral(value), read_numeral(stated[-1])
    if ours is None or last is None or not explained["rounded"]:
        return not answers_equal(stated[-1], value)
    return abs(ours.value - last.value) * 10 ** (last.places or 0) >= 1


def references_of(ground_truth: Any) -> list[str]:
    """Returns the reference answers (see `truths_of`) that an answer can equal.

    Raises:
        DataError: there is none: they are missing, or whole solutions rather than answers.
    """
    truths = [truth for truth in truths_of(ground_truth) if len(truth) <= MAX_ANSWER_CHARS]
    if not truths:
        raise DataError(
            f"reward_model.ground_truth is longer than {MAX_ANSWER_CHARS} characters",
            fix="give reward_model.ground_truth the answer, not the solution",
        )
    return truths


def is_answer(answer: str | None, ground_truth: Any, trajectory: Any = None) -> bool:
    """Whether `answer` equals one of the reference answers in `ground_truth` (see `references_of`); False for None, and
    for an expression of the question in `trajectory`, copied or rewritten, which equals the answer before anything is
    worked out.

    Raises:
        DataError: there is no reference answer.
        InfrastructureError: symbolic algebra failed.
    """
    truths = references_of(ground_truth)
    if answer is None:
        return False
    asked = question_of(trajectory) if trajectory is not None else ""
    return any(
        not _is_copied(said, wanted, asked)
        and answers_equal(_value(given, wanted, asked), wanted)
        and not is_unworked(said, wanted, asked)
        for truth in truths
        for given, wanted in _by_option(answer, truth)
        for said in (_said(given),)
    )


def _said(answer: str) -> str:
    """Returns `answer` without the reason that it gives, which no question states."""
    text = _normalise(answer) if len(answer) <= MAX_ANSWER_CHARS else ""
    said = _without_reason(text)
    return answer if said is None or said == text else said


def _by_option(answer: str, truth: str) -> list[tuple[str, str]]:
    """Returns what to compare: of an option with its letter, (C) 18, the letter with a letter, its value with a value."""
    said, wanted = _option(answer), _option(truth)
    if said and wanted:
        return [(said[1], wanted[1])] if said[0] == wanted[0] else []
    if wanted:
        return [(answer, truth), (answer, wanted[0]), (answer, wanted[1])]
    if said:
        return [(answer, truth), (said[re.fullmatch("[a-j]", _words(truth)) is None], truth)]  # or a product: (A) x
    return [(answer, truth)]


def _option(text: str) -> tuple[str, str] | None:
    found = _OPTION.fullmatch(text) if len(text) <= MAX_ANSWER_CHARS else None
    if found is None:
        return None
    value = found[2].rstrip(" $.")
    return found[1], value.removesuffix("}") if value.count("}") > value.count("{") else value


def _is_copied(answer: str, truth: str, question: str) -> bool:
    """Whether `answer`, the equation that it ends with, or each value that it states ("x = 3/20") is an echo."""
    if len(answer) > MAX_ANSWER_CHARS:
        return False  # it equals nothing
    sides = _EQUALS.split(answer)  # "x + 5 = 12" of "y = x + 5 = 12"
    stated = [side for side in sides if not _is_symbolic(side)]
    if _shape(answer) == _shape(truth) or (
        stated == sides[-1:]
        and _shape(stated[0]) == _shape(_EQUALS.split(truth)[-1])
        and _number(_normalise(stated[0])) is None
    ):
        return False  # "y = 2x + 1", of the lines that a question offers
    whole = (answer, "=".join(sides[-2:]))
    return any(is_echo(each, truth, question) for each in whole) or (
        bool(stated) and all(is_echo(each, truth, question) for each in stated)
    )


def _value(answer: str, truth: str, question: str) -> str:
    """Returns `answer` without the expression whose value `question` asks for: 18 of "f(-2) = 18"."""
    if len(answer) > MAX_ANSWER_CHARS or "=" in truth:
        return answer
    *named, value = _EQUALS.split(answer)
    stated = "".join(_plain(question).split())
    shapes = ["".join(_plain(side).split()) for side in named]
    is_named = all(len(shape) > 2 and shape in stated and read_numeral(shape) is None for shape in shapes)
    return value if named and is_named else answer


def is_echo(answer: str, truth: str, question: str) -> bool:
    """Whether `answer` is copied from `question` and is another notation than `truth`. A single number, whatever stands
    around it, is copied only if it is the question's only one ("Write 3/20 as a decimal")."""
    shape = "".join(_plain(answer).split()).rstrip(".,?")
    if len(shape.strip("()")) < 3 or len(answer) > MAX_ANSWER_CHARS or _shape(answer) == _shape(truth):
        return False
    copy = r"\s*".join(map(re.escape, shape))
    copies = re.search(rf"(?<![\w.\\]){copy}(?!\w)", _plain(question))
    if _number(_normalise(answer)) is None:
        return copies is not None
    asked = _NUMBER_ASKED.findall(_in_latex(question)) if _digits(answer) != _digits(truth) else []
    is_only_one = bool(asked) and all(_is_number(each, answer) for each in asked)
    return is_only_one or (copies is not None and len(answer.split()) > 4)


def _shape(text: str) -> list[list[str]]:
    """The characters of each side of a formula in any order: 1 + 2x is 2x + 1, but a = b - c is not c = b - a."""
    return [sorted(side) for side in "".join(_plain(text).split()).rstrip(".,?").split("=")]


def is_unworked(answer: str, truth: str, question: str) -> bool:
    """Whether `answer`, which equals `truth`, only rewrites an expression that `question` states and that equals it too.
    Where `truth` is a number, so is a worked answer: not "513^2-487^2+0" or "(513)^2-(487)^2". Elsewhere it has at least as
    many numbers and variables in common with `truth` as with the expression, so that adding 0 changes nothing.
    An operation that `truth` has not, such as a sum or an integral, is unworked whatever the question states.

    Raises:
        InfrastructureError: symbolic algebra failed.
    """
    sides = _EQUALS.split(answer)
    is_number = _number(_normalise(truth)) is not None
    if set(_OPERATION.findall(sides[-1])) - set(_OPERATION.findall(truth)):
        residue = _MODULUS.sub("", sides[-1]).rpartition(r"\equiv")[2]  # 3 of "x \equiv 3 \pmod 7"
        stated = [each for each in (*sides, residue) if not _OPERATION.search(each)]
        return not any(
            answers_equal(each, truth) for each in stated if not is_number or _number(_normalise(each)) is not None
        )
    ours, theirs = _terms(sides[-1]), _terms(truth)
    unworked = any(each[0].isdigit() or each[0] == "\\" for each in ours - theirs)
    if ours in (theirs, _terms(_EQUALS.split(truth)[-1])) or (is_number and not unworked):
        return False
    if is_number and any(_number(_normalise(side)) is not None and answers_equal(side, truth) for side in sides):
        return False  # "26000 = 513^2-487^2"
    return any(
        (is_number or _distance(ours, _terms(expression)) < _distance(ours, theirs))
        and answers_equal(expression, truth)
        for expression in dict.fromkeys(_expressions(question))
    )


def _expressions(question: str) -> Iterator[str]:
    """Yields the formulas of `question`, sides of equations singly, and its arithmetic in plain text."""
    text = _TIMES.sub(r"\\times ", _in_latex(question))
    for pattern, spelling in _TYPED:
        text = pattern.sub(spelling, text)
    for found in _SEGMENT.finditer(text):
        yield from next(filter(None, found.groups()), "").split("=")
    yield from _ARITHMETIC.findall(_SEGMENT.sub(" ", text))


def _terms(text: str) -> Counter[str]:
    """Counts the numbers, variables and functions of a formula."""
    return Counter(_TERM.findall(_FRACTION.sub(r"\\frac \1 ", _LOOK.sub(" ", _normalise(text)))))


def _in_latex(text: str) -> str:
    """Returns `text` with LaTeX for symbols and without thousands separators."""
    return _THOUSANDS.sub("", "".join(_SYMBOLS.get(letter, letter) for letter in text[:MAX_QUESTION_CHARS]))


def _digits(text: str) -> list[str]:
    """Returns the numbers that `text` writes a number with, without zeros that change nothing: 3 and 20 of 3/20."""
    found = _DIGITS.findall(_FRACTION.sub(r"\\frac \1 ", _in_latex(text)))
    return [each.strip("0").rstrip(".") if "." in each else each.lstrip("0") for each in found]


def _is_number(asked: str, answer: str) -> bool:
    """Whether a question's number is that of an answer: its digits, and neither -2.5 nor 10 % where 2.5 and 10 are asked."""
    if _digits(asked) != _digits(answer):
        return False
    one, other = (_number(_normalise(each)) for each in (asked, answer))
    if one is None or other is None:  # such as 0.\overline{36}, cut off at its brace
        return not re.search(r"\d\s*[-+]", asked)
    return (one.value, one.percent) == (other.value, other.percent)


def _distance(one: Counter[str], other: Counter[str]) -> int:
    return (one - other).total() + (other - one).total()


def _plain(text: str) -> str:
    """Returns `text` without LaTeX that changes its look only."""
    text = _LOOK.sub(" ", text.replace(r"\dfrac", r"\frac").replace(r"\tfrac", r"\frac"))
    return text.replace("{", "").replace("}", "")


def _normalise(text: str) -> str:
    text = "".join(_SYMBOLS.get(letter, letter) for letter in text)
    for pattern, spelling in _SPELLINGS:
        text = pattern.sub(spelling, text)
    text = _MAGNITUDE.sub(_power, text)
    return text.strip().removesuffix(".").removeprefix("=").strip()


def _power(found: re.Match[str]) -> str:
    opened = found[1] if found[1] and not found[3] else ""  # a unit follows inside the same braces
    return rf"\times 10^{{{MAGNITUDES[found[2].lower()]}}}{opened}"


def _tight(text: str) -> str:
    """Removes dollar signs and insignificant spaces for comparison ("1 1/2" is not "11/2")."""
    return re.sub(r"\s+(?!\d)|(?<!\d)\s+|(?<!\\)\$", "", text)


def _in_order(ours: str, theirs: str) -> bool:
    """Whether `ours` has the order of `theirs` where that is a word, a row of points or numbers apart by spaces: to algebra,
    all of them are products."""
    texts = [_WRAPPED.sub(r"\1", each).strip("$ ") for each in (ours, theirs)]
    if any(_LISTED.fullmatch(each) and read_numeral(each) is None for each in texts):
        one, other = (re.split(r"[\s,R]+", each) for each in texts)
        return one == other
    found = _SEQUENCE.fullmatch(texts[1])
    if found is None:
        return True
    letters, named = (re.sub(r"\\times|[^a-zA-Z]", "", _LOOK.sub("", each)) for each in (ours, found[2]))
    named_backwards = named[::-1] if found[1] else named  # the angle CBA is ABC
    return (named in letters or named_backwards in letters) and not _COMBINED.search(ours)


def _apart(*texts: str) -> list[str]:
    """Writes capitals as other letters where one text has both R and r: to algebra, they are the same."""
    found = [set(filter(None, _LETTERS.findall(text))) for text in texts]
    both = sorted({letter for each in found for letter in each if letter.isupper() and letter.lower() in each})
    free = [letter for letter in "uvwqzkpyxtsn" if not any({letter, letter.upper()} & each for each in found)]
    if len(both) > len(free) or any(map(_WORDS.search, texts)):
        return list(texts)
    names = dict(zip(both, free))
    return [_LETTERS.sub(lambda match: names.get(match[1], match[0]), text) for text in texts]


def _words(text: str) -> str:
    """Returns an answer in words, or the letter of an option, in lower case; empty for anything else."""
    cased = _WRAPPED.sub(r"\1", text.replace("$", "")).strip().strip("().")
    bare = cased.casefold()
    worded = re.fullmatch(r"[^\W_]+(?:[\s-]+[^\W_]+)*", bare) and not bare[:1].isdigit()
    if re.fullmatch(r"\w(?:\s*-\s*\w)+", bare):
        return "".join(cased.split())  # C-A-B is an order, and R - r a difference
    return " ".join(bare.split()) if worded else ""


def _bare(text: str) -> str:
    """Strips the dollar signs around `text`, currency, a unit, and the prose before a final "answer is"."""
    if "$" in text and (inner := re.fullmatch(r"\$([^$]+)\$", text)):
        text = inner[1].strip()
    elif not _DELIMITED.search(_CURRENCY.sub("", text)) and _WORDS.search(text) and not _DENIED.search(text):
        text = _LEADING_WORDS.sub("", _ANCHOR.sub("", text), count=1)
    text = _CURRENCY.sub("", text)
    unit = _UNIT.search(text)
    return text[: unit.start()].strip() if unit and not _NOT_UNITS.search(unit[0]) else text


def _number(text: str) -> Numeral | None:
    bare = _bare(text)
    assigned = _ASSIGNED.fullmatch(bare)
    return read_numeral(assigned[2] if assigned else bare)


def _variable(text: str) -> str | None:
    assigned = _ASSIGNED.fullmatch(_bare(text))
    return assigned[1] if assigned else None


def _based(found: Sequence[str | None]) -> tuple[str | None, int]:
    """Returns the digits and the base of a match of `_BASED`."""
    digits, braced, bare = found
    return digits, int(braced or bare or 0)


def _solution(text: str) -> tuple[str, str] | None:
    r"""Returns the variable and the intervals of solved inequalities of one variable joined by "or", or in a set; of a set
    the variable is "": \{x | x > 3\} is \{t | t > 3\}. None for anything else, an inequality alone included."""
    named = _SET_OF.fullmatch(text.strip("$ "))
    stated = _WRAPPED.sub(r" \1 ", named[2] if named else text.strip("$ "))
    found = [_INEQUALITY.fullmatch(each) for each in _EITHER.split(stated)]
    variables = {each[3] for each in found if each}
    if None in found or len(variables) != 1 or (named and variables != {named[1]}) or (not named and len(found) < 2):
        return None
    intervals = [_interval(each) for each in found if each]
    return ("" if named else variables.pop(), r"\cup".join(intervals)) if all(intervals) else None


def _interval(found: re.Match[str]) -> str:
    """Returns 1 < x \\le 2 as an interval; empty if its signs point in two ways, or it has none."""
    before, sign, _, other, after = found.groups()
    ways = {each.startswith(("<", r"\l")) for each in (sign, other) if each}
    if len(ways) != 1:
        return ""
    low, above, below, high = (before, sign, other, after) if ways == {True} else (after, other, sign, before)
    opening, closing = ("[" if above and "e" in above else "("), ("]" if below and "e" in below else ")")
    infinity = r"\infty"
    return f"{opening}{low or '-' + infinity},{high or infinity}{closing}"


def _is_symbolic(side: str) -> bool:
    """Whether a side of an equation names a value: a name, or letters without a number."""
    return bool(_LETTER.search(side) and (_NAME.fullmatch(side) or not re.search(r"\d", side)))


def _readings(text: str, other: str) -> list[str]:
    """Returns the possible readings of `text` for `AlgebraProcesses.equal`."""
    if _DELIMITED.search(_CURRENCY.sub("", text)) and not re.fullmatch(r"\$[^$]+\$", text):
        return [text]
    bare = _SEVERAL.sub(
        ",", _WRAPPED.sub(lambda match: match[1] if _SEVERAL.search(match[1]) else match[0], _bare(text))
    )
    named = _variable(text), _variable(other)
    same_variable = named[1] == named[0] or (named[1] is None and not _RELATION.search(other))
    if same_variable and (assigned := _ASSIGNED.fullmatch(bare)):
        bare = assigned[2]
    found = [f"${bare}$"]
    if bare.count(r"\pm") == 1:
        found.append(f"${bare.replace(chr(92) + 'pm', '+')}, {bare.replace(chr(92) + 'pm', '-')}$")
    if _WORDS.search(bare) and not _SEVERAL.search(text) and not _ROUNDED.search(bare):
        found.append(text)
    return found
