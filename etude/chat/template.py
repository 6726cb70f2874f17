"""`ChatTemplate`: messages to token ids, one turn at a time and never twice.

Invariant: ids that were sampled are never decoded and encoded again, and earlier turns are never rendered again. What
follows an assistant turn is rendered by difference: a fixed stub conversation is rendered with the new messages, and
everything after the stub's end of turn is encoded by itself. The boundary is a special token, so this gives the very
ids that encoding the whole conversation gives; the constructor proves that on a probe for the tokenizer at hand. A
template that rewrites earlier assistant turns (one that drops old reasoning) is therefore used without harm.

Untrusted text: in `context_ids` a control token (every special token, and every other added token that the template
itself writes, such as a tool-response tag) never comes out of a message's content. Such a string in a tool's answer
is encoded as the plain characters it consists of, so that it decodes to the same text. `initial_ids` makes no such
difference: prompts are the data set's own, and a control token spelled out in one becomes that token.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from itertools import groupby
from typing import TYPE_CHECKING, Any

from etude.chat.contents import Span, mark, plain_message, unmark
from etude.chat.decoding import Decoder
from etude.chat.encoding import Encoder
from etude.chat.recent import Recent, rendering_key
from etude.errors import ConfigError, DataError, one_line
from etude.trajectory import Provenance

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Message = Mapping[str, Any]
Run = tuple[list[int], Provenance]

_USER_STUB: Message = {"role": "user", "content": "A question."}
_ANCHOR = "Etude stub turn"
_CALL_ID = "stub00000"
_ANSWER_STUB: Message = {"role": "assistant", "content": _ANCHOR}
_CALL_STUB: Message = {
    "role": "assistant",
    "content": "",
    "tool_calls": [
        {"id": _CALL_ID, "type": "function", "function": {"name": "stub", "arguments": {"text": _ANCHOR}}},
    ],
}
_PROBE = "An answer with 42 words."
_PROMPTS_KEPT = 256
_CONTEXTS_KEPT = 1024
_HEADS_KEPT = 16
_LONGEST_CONTEXT = 4096  # characters of messages whose ids are kept: a longer tool's answer is rarely met again
_LABELS = (Provenance.TEMPLATE, Provenance.TOOL, Provenance.USER)


class ChatTemplate:
    """The chat template of `tokenizer`; keyword arguments (`enable_thinking=False` …) go to every rendering.

    Raises:
        ConfigError: the tokenizer is not a fast one or has no template, or the template cannot be continued exactly:
            it has no end-of-turn token, loses contents, or lets tokens reach across the end of a turn.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, **apply_chat_template_kwargs: Any) -> None:
        if not tokenizer.is_fast:
            raise ConfigError("a fast tokenizer (tokenizer.json) is needed: a slow one gives no character offsets")
        if not tokenizer.chat_template:
            raise ConfigError("the tokenizer has no chat template: put a chat_template.jinja beside tokenizer.json")
        self.tokenizer = tokenizer
        self._options = apply_chat_template_kwargs
        self._decoder, self._encoder = Decoder(tokenizer), Encoder(tokenizer)
        self._prompts = Recent[tuple[int, ...]](_PROMPTS_KEPT)
        self._contexts = Recent[list[Run]](_CONTEXTS_KEPT)
        self._heads = Recent[list[int]](_HEADS_KEPT)
        self._splits = False
        self._control = _control_tokens(tokenizer)
        spelled = sorted(tokenizer.convert_ids_to_tokens(sorted(self._control)), key=len, reverse=True)
        self._control_texts = re.compile("|".join(map(re.escape, spelled)) or r"(?!)")
        self._stop_text, self.end_of_turn_id = self._find_end_of_turn()
        self._check_head()
        self._check_tail(_ANSWER_STUB, {"role": "user", "content": _PROBE})
        self._tool_stub, self._tool_problem = self._find_tool_stub()
        self._splits = self._can_split()

    @property
    def stop_token_ids(self) -> tuple[int, ...]:
        """Ids that end an assistant turn: the template's end of turn, and the tokenizer's eos where it is another."""
        eos = self.tokenizer.eos_token_id
        return (self.end_of_turn_id,) if eos in (None, self.end_of_turn_id) else (self.end_of_turn_id, eos)

    def initial_ids(self, messages: Sequence[Message], tools: Sequence[dict[str, Any]] | None = None) -> list[int]:
        """The prompt's ids, generation prompt included; `tools` are OpenAI tool dictionaries.

        Raises:
            DataError: the template refuses the messages.
        """
        key = rendering_key(messages, json.dumps(tools, default=repr) if tools else "")
        found = self._prompts.get(key)
        if found is None:
            found = tuple(self._prompt_ids(self._render_prompt(messages, tools, generate=True)))
            self._prompts.put(key, found)
        return list(found)

    def _prompt_ids(self, text: str) -> list[int]:
        """The ids of a rendered prompt. What stands before its first end of turn, usually the system message and the
        tools, is the same in most rows: it is encoded once."""
        cut = text.find(self._stop_text) + len(self._stop_text)
        if not self._splits or cut < len(self._stop_text):
            return self._encoder.ids(text)
        head = (text[:cut],)
        found = self._heads.get(head)
        if found is None:
            found = self._encoder.ids(text[:cut])
            self._heads.put(head, found)
        return [*found, *(number for number, _, _ in self._encode_piece(text[cut:]))]

    def disarmed(self, text: str) -> str:
        """`text` with a zero-width space inside every spelled-out control token.

        For text that others wrote and that becomes part of a prompt: `initial_ids` trusts the prompt's messages, and a
        control token spelled out there would become that token.
        """
        return self._control_texts.sub(lambda found: f"{found[0][0]}\u200b{found[0][1:]}", text)

    def prompt_length(self, messages: Sequence[Message], tools: Sequence[dict[str, Any]] | None = None) -> int:
        """Number of ids of the prompt."""
        return len(self.initial_ids(messages, tools))

    def context_ids(self, messages: Sequence[Message], *, after_stop: bool) -> list[Run]:
        """Ids of new tool and user messages after an assistant turn, with the generation prompt, by provenance.

        `after_stop` says whether the sampled ids end with `end_of_turn_id`; where they do not (a turn cut short by a
        limit, or ended by another stop token) that id is put in front. A token that overlaps a tool's content is TOOL,
        one that overlaps another message's content is USER, the rest is TEMPLATE.

        Raises:
            ConfigError: the template cannot render the messages here, for example because it knows no tool role.
            ValueError: there is no message, or one of them is the assistant's.
        """
        roles = [str(message.get("role")) for message in messages]
        if not roles or "assistant" in roles:
            raise ValueError("context_ids takes one or more tool or user messages and no assistant message")
        stub = _ANSWER_STUB
        if "tool" in roles:
            if self._tool_stub is None:
                raise ConfigError(f"the chat template does not support the tool role: {self._tool_problem}")
            stub = self._tool_stub
        key = rendering_key(messages)
        if key is not None and sum(map(len, key)) > _LONGEST_CONTEXT:
            key = None
        found = self._contexts.get(key)
        if found is None:
            found = self._context_after(stub, messages)
            self._contexts.put(key, found)
        runs = [(list(ids), label) for ids, label in found]
        return runs if after_stop else [([self.end_of_turn_id], Provenance.TEMPLATE), *runs]

    def demonstration(self, messages: Sequence[Message], tools: Sequence[dict[str, Any]] | None = None) -> list[Run]:
        """A whole conversation as a rollout would have assembled it, for supervised training.

        The prompt is TEMPLATE; what each assistant turn writes, its end of turn included, is SAMPLED; everything
        between is as in `context_ids`.

        Raises:
            DataError: the template refuses the messages, or does not begin an assistant turn as its generation prompt
                does (one that opens a thought, where the message has none).
            ValueError: no assistant message, no prompt before the first, two in a row, or messages after the last.
        """
        turns = [n for n, message in enumerate(messages) if message.get("role") == "assistant"]
        if not turns or turns[0] == 0 or turns[-1] != len(messages) - 1:
            raise ValueError("a demonstration starts with a prompt and ends with an assistant message")
        runs: list[Run] = [(self.initial_ids(messages[: turns[0]], tools), Provenance.TEMPLATE)]
        for turn, following in zip(turns, [*turns[1:], None]):
            runs.append((self._assistant_ids(messages[turn]), Provenance.SAMPLED))
            if following is not None:
                runs += self.context_ids(messages[turn + 1 : following], after_stop=True)
        return runs

    @property
    def control_tokens(self) -> frozenset[str]:
        """The tokens that only the template or the policy may write, as text."""
        return frozenset(self.tokenizer.convert_ids_to_tokens(sorted(self._control)))

    def continued_whole(self, messages: Sequence[Message]) -> list[int]:
        """Ids of a stub conversation that `messages` answer, rendered and encoded at once; `context_ids` of the same
        messages are its last ones.

        Raises:
            ConfigError: the template cannot render it.
        """
        stub = _ANSWER_STUB if all(m.get("role") != "tool" for m in messages) else self._tool_stub
        if stub is None:
            raise ConfigError(f"the chat template does not support the tool role: {self._tool_problem}")
        return self._whole(stub, messages)

    def _whole(self, stub: Message, messages: Sequence[Message]) -> list[int]:
        return self._encoder.ids(self._render([_USER_STUB, stub, *_answering(stub, messages)], None, generate=True))

    def rendered(self, messages: Sequence[Message]) -> str:
        """A conversation as text, without a generation prompt.

        Raises:
            ConfigError: the template refuses it.
        """
        return self._render(messages, None, generate=False)

    def decode(self, ids: Sequence[int]) -> str:
        """The text of `ids` for reading: structural special tokens dropped, tool and thought tags kept."""
        return self._decoder.decode(ids)

    def _render(self, messages: Sequence[Message], tools: Sequence[dict[str, Any]] | None, *, generate: bool) -> str:
        """Rendered text, with the generation prompt where `generate`; raises ConfigError for whatever goes wrong."""
        try:
            return self.tokenizer.apply_chat_template(
                [plain_message(message) for message in messages],
                tools=list(tools) if tools else None,
                tokenize=False,
                add_generation_prompt=generate,
                **self._options,
            )
        except Exception as error:  # a template raises whatever its expressions raise
            raise ConfigError(f"the chat template refuses the messages: {one_line(error)}") from error

    def _render_prompt(
        self, messages: Sequence[Message], tools: Sequence[dict[str, Any]] | None, *, generate: bool
    ) -> str:
        try:
            return self._render(messages, tools, generate=generate)
        except ConfigError as error:
            raise DataError(str(error)) from error

    def _context_after(self, stub: Message, messages: Sequence[Message]) -> list[Run]:
        """Ids that follow the end-of-turn token of the stub turn when `messages` and a generation prompt come next."""
        marked = [mark(message) for message in _answering(stub, messages)]
        try:
            rendered = self._render([_USER_STUB, stub, *(entry.message for entry in marked)], None, generate=True)
            # The stub comes before any content, so its first occurrence and the first end of turn after it are its own.
            turn_end = rendered.index(self._stop_text, rendered.index(_ANCHOR)) + len(self._stop_text)
            text, spans = unmark(rendered[turn_end:], marked)
        except ValueError as error:
            raise ConfigError(f"the chat template cannot render these messages: {one_line(error)}") from error
        return self._encode_by_provenance(text, spans, messages)

    def _assistant_ids(self, message: Message) -> list[int]:
        """Ids that the policy would have sampled for an assistant message, the end of turn included."""
        head = self._render_prompt([_USER_STUB], None, generate=True)
        whole = self._render_prompt([_USER_STUB, message], None, generate=False)
        if not whole.startswith(head) or self._stop_text not in whole[len(head) :]:
            raise DataError("the chat template does not write this assistant message after its generation prompt")
        turn_end = whole.rindex(self._stop_text)
        start, ids = self._encoder.ids(head), self._encoder.ids(whole[:turn_end])
        if ids[: len(start)] == start:
            return [*ids[len(start) :], self.end_of_turn_id]
        # The first words would merge with the generation prompt, which a policy that samples after it cannot do.
        words = self._encode_piece(whole[len(head) : turn_end])
        return [*(number for number, _, _ in words), self.end_of_turn_id]

    def _encode_piece(self, piece: str) -> list[tuple[int, int, int]]:
        """(id, start, end) of the tokens of `piece`, encoded as the text that follows an end of turn."""
        prefix = self._stop_text
        ids, offsets = self._encoder.with_offsets(prefix + piece)
        size = len(prefix)
        return [(number, max(start - size, 0), end - size) for number, (start, end) in zip(ids[1:], offsets[1:])]

    def _encode_by_provenance(self, text: str, spans: Sequence[Span], messages: Sequence[Message]) -> list[Run]:
        """Encodes `text` so that no control token overlaps a span: where one would, the text is cut inside it."""
        owner = bytearray(len(text))
        for span in spans:
            label = _LABELS.index(_provenance_of(messages[span.message]))
            owner[span.start : span.end] = bytes([label]) * (span.end - span.start)
        cuts = {0}
        while True:
            starts = sorted(cuts)
            pieces = [text[start:end] for start, end in zip(starts, [*starts[1:], len(text)])]
            tokens = [
                (number, shift + start, shift + end)
                for shift, piece in zip(starts, pieces)
                for number, start, end in self._encode_piece(piece)
            ]
            forged = [(s, e) for number, s, e in tokens if number in self._control and any(owner[s:e])]
            found = {end - len(text[start:end].lstrip()) + 1 for start, end in forged}
            if found <= cuts:
                break
            cuts |= found
        labelled = [(number, _LABELS[max(owner[start:end], default=0)]) for number, start, end in tokens]
        return [([number for number, _ in run], label) for label, run in groupby(labelled, key=lambda pair: pair[1])]

    def _find_end_of_turn(self) -> tuple[str, int]:
        """Text and id of the token that closes an assistant turn."""
        rendered = self._render([_USER_STUB, _ANSWER_STUB], None, generate=False)
        _, found, after = rendered.partition(_ANCHOR)
        if not found:
            raise ConfigError("the chat template does not write the content of an assistant message")
        added = {token.content: number for number, token in self.tokenizer.added_tokens_decoder.items()}
        closing = [token for token in added if token.strip() and after.lstrip().startswith(token)]
        if not closing:
            raise ConfigError("the chat template does not close an assistant turn with a token of this tokenizer")
        stop = max(closing, key=len)
        return stop, added[stop]

    def _check_head(self) -> None:
        """The generation prompt must lead to where the template puts an assistant's words.

        It may stop short of them or go on (a thought that the template opens and closes itself); only where it leads
        there exactly can the ids be compared.
        """
        bare, head = (self._render([_USER_STUB], None, generate=flag) for flag in (False, True))
        whole = self._render([_USER_STUB, _ANSWER_STUB], None, generate=False)
        lead, _, _ = whole.partition(_ANCHOR)
        if lead == head:
            parts = self._encoder.ids(head) + self._assistant_ids(_ANSWER_STUB)
            if self._encoder.ids(whole)[: len(parts)] != parts:
                raise ConfigError("a token of this tokenizer reaches across the start of an assistant turn")
        elif not head.startswith(lead) and (head == bare or not lead.startswith(head)):
            raise ConfigError("the chat template's generation prompt is not how it begins an assistant turn")

    def _check_tail(self, stub: Message, probe: Message) -> None:
        """The ids of a context must be the last ids of the whole conversation encoded at once."""
        tail = [self.end_of_turn_id, *(number for ids, _ in self._context_after(stub, [probe]) for number in ids)]
        if self._whole(stub, [probe])[-len(tail) :] != tail:
            raise ConfigError("a token of this tokenizer reaches across the end of an assistant turn")

    def _can_split(self) -> bool:
        """Whether a prompt may be encoded in two parts that meet behind an end of turn, as its parts' ids suggest."""
        try:
            text = self._render([_USER_STUB, _ANSWER_STUB, _USER_STUB], None, generate=True)
        except ConfigError:
            return False
        cut = text.find(self._stop_text) + len(self._stop_text)
        parts = [*self._encoder.ids(text[:cut]), *(number for number, _, _ in self._encode_piece(text[cut:]))]
        return cut >= len(self._stop_text) and parts == self._encoder.ids(text)

    def _find_tool_stub(self) -> tuple[Message | None, str]:
        """The stub turn that a tool message may follow, or None and the reason why there is none.

        Some templates want a tool message to answer a call, others cannot write calls at all.
        """
        reason = ""
        for stub in (_ANSWER_STUB, _CALL_STUB):
            try:
                self._check_tail(stub, {"role": "tool", "content": _PROBE})
            except ConfigError as error:
                reason = reason or str(error)
            else:
                return stub, ""
        return None, reason


def _control_tokens(tokenizer: PreTrainedTokenizerBase) -> frozenset[int]:
    """Ids that only the template or the policy may write."""
    template = tokenizer.chat_template
    source = template if isinstance(template, str) else "\n".join(template.values())
    control = {
        number
        for number, token in tokenizer.added_tokens_decoder.items()
        if token.special or (token.content.strip() and token.content in source)
    } | set(tokenizer.all_special_ids)
    # What the tokenizer says for characters it does not know is no control token, unless it doubles as one.
    if tokenizer.unk_token_id not in (tokenizer.eos_token_id, tokenizer.bos_token_id, tokenizer.pad_token_id):
        control.discard(tokenizer.unk_token_id)
    return frozenset(control)


def _answering(stub: Message, messages: Sequence[Message]) -> list[Message]:
    """`messages`, tool messages naming the stub's call where the stub makes one."""
    if stub is not _CALL_STUB:
        return list(messages)
    return [{"tool_call_id": _CALL_ID, **m} if m.get("role") == "tool" else m for m in messages]


def _provenance_of(message: Message) -> Provenance:
    return Provenance.TOOL if message.get("role") == "tool" else Provenance.USER
