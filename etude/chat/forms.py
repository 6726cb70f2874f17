"""`Forms`: rendering a chat template by filling contents into what it wrote before.

The conversations of a rollout differ in their contents, seldom in their shape: a template is traced once for every shape
(roles, keys, tools) and way that contents send it, and from then on a rendering is a concatenation.

Invariant: a form gives the very text that the template gives. That is so because of how it was traced (`symbolic`); and a
form is kept only after it has given the same text as the template for the contents at hand and for `PROBES`, as far as
they go the same way. A shape for which that fails, or whose contents a template takes apart, is rendered every time.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

from etude.chat.contents import Message
from etude.chat.recent import Key, Recent
from etude.chat.rendering import Renderer
from etude.chat.symbolic import Form, filled
from etude.chat.tracer import Tracer

T = TypeVar("T")
Before = Callable[[Sequence[Message]], Sequence[Message]]

PROBES = (
    "",
    " \n\t two  words \n\n",
    '{"name": "x", "arguments": {"é": [1, "\\n"]}} <b>&amp; \'q\' "q"',
    "<tool_response>\n{{ x }} {% y %} %s {0}\n</tool_response>",
    "<think>\nwhy\n</think>\n\nThe answer is 7.",
    "日本語\u2028\u00a0\U0001f600\r\nx",
)
_TEXTS = ("content", "tool_call_id", "name")
_SHAPES_KEPT = 64
_FORMS_A_SHAPE = 8


def _nothing(_: Sequence[Message]) -> Sequence[Message]:
    return ()


def shape_of(messages: Sequence[Message]) -> tuple[list[str], list[str]] | None:
    """(everything about `messages` but their texts, their texts); None where a message has more than texts."""
    shape: list[str] = []
    texts: list[str] = []
    for message in messages:
        for key, value in message.items():
            if key == "role" and type(value) is str:
                shape += (key, value)
            elif key in _TEXTS and type(value) is str:
                shape.append(key)
                texts.append(value)
            else:
                return None
    return shape, texts


@dataclass
class _Known(Generic[T]):
    """The forms of one shape and what was made of each, and how often one was looked for."""

    forms: list[tuple[Form, T | None]] = field(default_factory=list)
    tried: int = 0


class Forms(Generic[T]):
    """The forms of one template.

    What is kept and given is what `make` makes of a form and the messages that it was traced for; None: it is of no use.
    Where `waits`, a shape is traced when it comes a second time: a trace costs as much as several renderings, and shapes
    of which there are many (every row may have tools of its own) seldom come again.
    """

    def __init__(
        self, renderer: Renderer, make: Callable[[Form, Sequence[Message]], T | None], *, waits: bool = False
    ) -> None:
        self._renderer, self._make, self._waits = renderer, make, waits
        self._tracers: dict[bool, Tracer | None] = {}
        self._known = Recent[_Known[T]](_SHAPES_KEPT)

    def find(
        self,
        messages: Sequence[Message],
        others: Key,
        before: Before = _nothing,
        tools: Sequence[dict[str, Any]] | None = None,
    ) -> tuple[T, list[str]] | None:
        """What was made of the form of `before(messages)` and `messages`, and the texts of `messages`, which fill it.

        `before` may hand texts of the messages on, and look at nothing but their shape; `others` says all there is to say
        of it and of `tools`. None where there is no form (yet), or the template refuses the messages.
        """
        described = shape_of(messages)
        if described is None:
            return None
        shape, texts = described
        key: Key = (*others, *shape)
        known = self._known.get(key)
        if known is None:
            self._known.put(key, known := _Known())
            if self._waits:
                return None
        for form, made in known.forms:
            if form.holds(texts):
                return None if made is None else (made, texts)
        if known.tried == _FORMS_A_SHAPE:
            return None
        known.tried += 1
        traced = self._traced(before, messages, tools, texts)
        if traced is None:
            return None
        new = self._make(traced, messages)
        known.forms.append((traced, new))
        return None if new is None else (new, texts)

    def _traced(
        self,
        before: Before,
        messages: Sequence[Message],
        tools: Sequence[dict[str, Any]] | None,
        texts: Sequence[str],
    ) -> Form | None:
        tracer = self._tracer(bool(tools))
        if tracer is None:
            return None

        def conversation(filling: Sequence[str]) -> list[Message]:
            said = _with_texts(messages, filling)
            return [*before(said), *said]

        def variables(ropes: Sequence[str]) -> dict[str, Any]:
            return {
                "messages": [dict(message) for message in conversation(ropes)],
                "tools": list(tools) if tools else None,
                "documents": None,
                "add_generation_prompt": True,
                **self._renderer.tokenizer.special_tokens_map,
                **self._renderer.options,
            }

        try:
            form = tracer.trace(texts, variables)
            trials = [texts, *([PROBES[(n + i) % len(PROBES)] for i in range(len(texts))] for n in range(len(PROBES)))]
            for trial in filter(form.holds, trials):
                if self._renderer.text(conversation(trial), tools, generate=True) != filled(form.parts, trial):
                    return None
        except Exception:  # Untraceable, or whatever a template's expressions raise, which rendering will raise again
            return None
        return form

    def _tracer(self, with_tools: bool) -> Tracer | None:
        if with_tools not in self._tracers:
            try:
                from transformers.utils import chat_template_utils

                source = self._renderer.tokenizer.get_chat_template(None, [{}] if with_tools else None)
                environment = chat_template_utils._compile_jinja_template(source).environment
                self._tracers[with_tools] = Tracer(source, environment)
            except Exception:  # Transformers' own affair, which another version may do otherwise
                self._tracers[with_tools] = None
        return self._tracers[with_tools]


def _with_texts(messages: Sequence[Message], texts: Sequence[str]) -> list[dict[str, Any]]:
    left = iter(texts)
    return [{key: next(left) if key in _TEXTS else value for key, value in message.items()} for message in messages]
