"""`Continuation`: the ids of new messages from a `Form`, of which only what stands around the contents is encoded.

Glue before the last added token in front of the first content, and behind the first one after the last content, has
the same ids whatever the contents are: a tokenizer takes added tokens out of a text first, before it normalizes anything,
and encodes what lies between two of them by itself.

Invariant: the ids and labels are those that `LabelledEncoder.runs` gives for the whole text. `Continuation.of` compares
the two for every probe; where contents would write a control token, or take part in one, the whole text is encoded.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from etude.chat.forms import PROBES
from etude.chat.labelled import LabelledEncoder, Owned, Run, joined
from etude.chat.symbolic import Form, Part, Question, Slot
from etude.trajectory import Provenance

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


@dataclass(frozen=True)
class Continuation:
    """`parts` is the whole text; `middle` the part of it that is encoded, behind the added token `behind` and up to
    the token `closing` (None: to the end), whose neighbours are `head` and `tail`. `owners` is by content, None for texts
    that are the template's."""

    encoder: LabelledEncoder
    parts: tuple[Part, ...]
    owners: tuple[Provenance | None, ...]
    middle: tuple[Part, ...]
    behind: str | None
    closing: int | None
    head: list[Run]
    tail: list[Run]

    @classmethod
    def of(
        cls,
        form: Form,
        after: tuple[str, str],
        owners: Sequence[Provenance | None],
        encoder: LabelledEncoder,
        boundaries: Mapping[str, int],
    ) -> Continuation | None:
        """The continuation that a form of a whole conversation holds: what follows the first `after[1]` that comes after
        `after[0]`. `boundaries` are added tokens, text to id, at which a text may be cut.

        None where that does not stand before all contents, or a content that somebody owns is not written exactly once
        (an empty one may be left out).
        """
        parts = _behind(form.parts, *after)
        slots = [part.index for part in parts if isinstance(part, Slot)]
        nothing = {index for index in map(_found_empty, form.questions) if index not in slots}
        owned = [index for index, owner in enumerate(owners) if owner is not None and index not in nothing]
        if not parts or [index for index in slots if owners[index] is not None] != owned:
            return None
        whole = cls(encoder, parts, tuple(owners), parts, None, None, [], [])
        short = whole._shortened(boundaries)
        trials = [[probe] * len(owners) for probe in PROBES]
        return short if all(short.runs(trial) == whole.runs(trial) for trial in trials) else whole

    def _shortened(self, boundaries: Mapping[str, int]) -> Continuation:
        head, *between, tail = self.parts if len(self.parts) > 1 else (*self.parts, "")
        if not isinstance(head, str) or not isinstance(tail, str) or not between:
            return self
        behind, start = max(((text, head.rfind(text)) for text in boundaries), key=_place, default=("", -1))
        closings = [(tail.find(text), text) for text in boundaries if text in tail]
        runs = self.encoder.runs
        if start >= 0:
            start += len(behind)
        before = runs(head[:start], []) if start >= 0 else []
        lead = head[max(start, 0) :]
        end, closing = min(closings, default=(len(tail), ""))
        end += len(closing)
        after, _ = self.encoder.runs_behind(closing, tail[end:], []) if closing else ([], False)
        return Continuation(
            self.encoder,
            self.parts,
            self.owners,
            (lead, *between, tail[:end]),
            behind if start >= 0 else None,
            boundaries.get(closing),
            before,
            after,
        )

    def runs(self, contents: Sequence[str]) -> list[Run]:
        """The ids of the continuation with these contents."""
        text, spans = self._filled(self.middle, contents)
        runs, forged = self.encoder.runs_behind(self.behind, text, spans)
        if forged or (self.closing is not None and runs[-1][0][-1] != self.closing):
            return self.encoder.runs(*self._filled(self.parts, contents))
        return joined(self.head, runs, self.tail)

    def _filled(self, parts: Sequence[Part], contents: Sequence[str]) -> tuple[str, list[Owned]]:
        texts: list[str] = []
        spans: list[Owned] = []
        position = 0
        for part in parts:
            text = part if isinstance(part, str) else part.of(contents)
            owner = None if isinstance(part, str) else self.owners[part.index]
            if owner is not None:
                spans.append(Owned(position, position + len(text), owner))
            texts.append(text)
            position += len(text)
        return "".join(texts), spans


def _found_empty(question: Question) -> int | None:
    """The content of which the template asked whether it is empty, if it is."""
    slot = question.parts[0] if len(question.parts) == 1 else None
    empty = (question.method, question.args, question.answer) == ("__ne__", ("",), False)
    return slot.index if isinstance(slot, Slot) and empty else None


def _behind(parts: Sequence[Part], anchor: str, stop: str) -> tuple[Part, ...]:
    """What follows the first `stop` behind `anchor`, both in literal parts; nothing where there is none."""
    anchored = False
    for number, part in enumerate(parts):
        if isinstance(part, Slot):
            continue
        start = 0 if anchored else part.find(anchor)
        anchored = anchored or start >= 0
        end = part.find(stop, start) if anchored else -1
        if end >= 0:
            return (part[end + len(stop) :], *parts[number + 1 :])
    return ()


def _place(found: tuple[str, int]) -> int:
    return found[1]


def boundary_tokens(tokenizer: PreTrainedTokenizerBase) -> dict[str, int]:
    """Added tokens that take nothing of the text around them, and that no other one holds: text to id."""
    added = tokenizer.added_tokens_decoder
    texts = [token.content for token in added.values()]
    return {
        token.content: number
        for number, token in added.items()
        if not (token.normalized or token.lstrip or token.rstrip or token.single_word)
        and sum(token.content in text for text in texts) == 1
    }
