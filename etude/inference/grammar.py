"""`GrammarCompiler`: which tokens a request's grammar allows next, with the llguidance library.

Invariant: a mask depends only on the grammar and the tokens sampled so far. After each token that it allows a text of the
grammar's language is still possible, and the tokens that end a turn are among them only if the text is complete. A control
token is never part of a text, only where a grammar names it by its id.

Cost is bounded in steps, not in time, so that it is the same in every run: a grammar beyond llguidance's limits raises
GrammarError, and fails its own request only.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Sequence
from copy import copy
from functools import cached_property, lru_cache
from typing import TYPE_CHECKING, Any

import numpy as np

from etude.chat.control import control_ids
from etude.chat.grammar import json_schema_text
from etude.errors import GrammarError, one_line
from etude.inference.types import Grammar

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_MOST_KEPT = 64  # compiled grammars per engine
_MOST_SYMBOLS = 30_000
_MOST_STATES = 50_000  # of a lexer; each takes 1 to 2 kB


class GrammarCompiler:
    """Compiles grammars for one tokenizer and a model's `vocabulary`; safe to use from several threads."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, vocabulary: int) -> None:
        self._tokenizer, self._vocabulary = tokenizer, vocabulary
        self._compiled = lru_cache(_MOST_KEPT)(self._compile)
        self._lock = threading.Lock()

    @property
    def eos(self) -> int:
        """The tokenizer's eos token; raises GrammarError if it has none."""
        if self._tokenizer.eos_token_id is None:
            raise GrammarError("a grammar needs a tokenizer with an eos token")
        return int(self._tokenizer.eos_token_id)

    def matcher(self, grammar: Grammar) -> Matcher:
        """Returns a matcher that has read nothing; compiles a grammar that is new (milliseconds; the first one, 1 to 2 s).

        Raises:
            GrammarError: the grammar is invalid, too complex or matches no text, or the tokenizer is not supported.
        """
        compiled = self._compiled(grammar)
        with self._lock:
            return Matcher(compiled.deep_copy(), self.eos, self._vocabulary)

    def _compile(self, grammar: Grammar) -> Any:
        from llguidance import LLMatcher, LLParserLimits

        with self._lock:
            trie = self._trie
        sources = {"regex": LLMatcher.grammar_from_regex, "lark": LLMatcher.grammar_from_lark}
        try:
            if grammar.kind == "json_schema":
                source = LLMatcher.grammar_from_json_schema(json_schema_text(json.loads(grammar.text)))
            else:
                source = sources[grammar.kind](grammar.text)
        except (ValueError, RecursionError) as error:
            raise GrammarError(f"the {grammar.kind} is invalid: {one_line(error)}") from error
        limits = LLParserLimits(max_grammar_size=_MOST_SYMBOLS, max_lexer_states=_MOST_STATES, verbose_errors=False)
        made = LLMatcher(trie, source, log_level=0, limits=limits)
        _check(made)
        trial = made.deep_copy()
        trial.compute_bitmask()  # detects a language without any text
        _check(trial)
        return made

    @cached_property
    def _trie(self) -> Any:
        from llguidance import LLTokenizer

        if not self._tokenizer.is_fast:
            kind = type(self._tokenizer).__name__
            raise GrammarError(f"a grammar needs a tokenizer of the tokenizers library, and {kind} is none")
        backend = copy(self._tokenizer.backend_tokenizer)
        backend.no_padding()
        backend.no_truncation()
        saved, control = json.loads(backend.to_str()), control_ids(self._tokenizer)
        for token in saved["added_tokens"]:
            token["special"] = token["special"] or token["id"] in control
        return LLTokenizer(json.dumps(saved), eos_token=self.eos)


class Matcher:
    """Follows one request's tokens through its grammar."""

    def __init__(self, compiled: Any, eos: int, vocabulary: int) -> None:
        self._state, self._eos, self._vocabulary = compiled, eos, vocabulary
        self._read = 0  # tokens
        self._masks: dict[bytes, bytes] = {}  # equal masks are one object, in memory and when pickled

    def mask(self, tokens: Sequence[int], ends: Sequence[int]) -> bytes:
        """Returns the ids allowed after `tokens`, a bit each, the lowest of a byte first; `ends` are ids that end a turn.

        Args:
            tokens: all sampled so far; they begin with those of the last call.

        Raises:
            GrammarError: a limit was exceeded, or no token of the vocabulary continues the text.
        """
        self._state.consume_tokens(list(tokens[self._read :]))
        self._read = len(tokens)
        bits = np.zeros((self._vocabulary + 7) // 8, dtype=np.uint8)
        allowed = np.frombuffer(self._state.compute_bitmask(), dtype=np.uint8)[: len(bits)]
        _check(self._state)
        bits[: len(allowed)] = allowed
        bits[-1] &= 0xFF >> -self._vocabulary % 8  # a tokenizer may have more ids than the model
        if bits[self._eos >> 3] >> (self._eos & 7) & 1:
            bits[self._eos >> 3] &= ~(1 << (self._eos & 7)) & 0xFF
            for end in ends:
                if end < self._vocabulary:
                    bits[end >> 3] |= 1 << (end & 7)
        if not bits.any():
            raise GrammarError("no token of the vocabulary continues the text as the grammar asks")
        mask = bits.tobytes()
        return self._masks.setdefault(mask, mask)


def _check(state: Any) -> None:
    if state.is_error():
        raise GrammarError(f"the grammar cannot be kept to: {one_line(Exception(state.get_error()), 200)}")
