"""A repetition penalty: the share of a text's word n-grams that occur earlier in it; each Han character and each kana is a
word, as no spaces part them.

Source: "Demystifying Long Chain-of-Thought Reasoning" (arXiv:2502.03373), appendix on the n-gram repetition penalty.
"""

from __future__ import annotations

import regex

from etude.errors import ConfigError

MAX_CHARS = 1_000_000  # characters that are examined, from a text's end
_WORD = regex.compile(r"(?V1)[\p{Han}\p{Hiragana}\p{Katakana}ー]|[\S--[\p{Han}\p{Hiragana}\p{Katakana}ー]]+")


def compute_score(solution_str: str, ngram: int = 4, max_penalty: float = 1.0) -> float:
    """Returns -max_penalty · (1 - distinct n-grams / n-grams); 0.0 for a text of fewer than `ngram` words.

    Raises:
        ConfigError: `ngram` is no number of words, or `max_penalty` would pay for repetition.
    """
    if not isinstance(ngram, int) or ngram < 1 or max_penalty < 0:
        raise ConfigError(
            "the repetition penalty's ngram must be a whole number of at least 1, and its max_penalty at least 0: "
            f"{ngram}, {max_penalty}"
        )
    words = _WORD.findall(solution_str[-MAX_CHARS:].lower())
    total = len(words) - ngram + 1
    if total < 1:
        return 0.0
    distinct = len({tuple(words[start : start + ngram]) for start in range(total)})
    return -max_penalty * (1.0 - distinct / total)
