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

Images: with the processor of a vision model, contents may have image parts; see `placeholders`.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from etude.chat.contents import has_marks, mark, plain_message, unmark
from etude.chat.continuation import Continuation, boundary_tokens
from etude.chat.decoding import Decoder
from etude.chat.encoding import Encoder
from etude.chat.forms import Forms
from etude.chat.labelled import Owned, Run
from etude.chat.placeholders import CUT, Placeholders, image_count
from etude.chat.recent import Recent, rendering_key
from etude.chat.symbolic import Form
from etude.chat.turns import ANCHOR, PROBE, USER_STUB, Stub, TurnEnd, Turns
from etude.errors import ConfigError, DataError, one_line
from etude.trajectory import Provenance

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Message = Mapping[str, Any]

_ANSWER_STUB = {"role": "assistant", "content": ANCHOR}
_IMAGE_PROBE = [{"type": "image"}, {"type": "text", "text": PROBE}]
_THOUGHT_TAGS = re.compile(r"</?(?:\w+:)?think>|\[/?THINK\]|\s")
_PROMPTS_KEPT = 256
_CONTEXTS_KEPT = 1024
_HEADS_KEPT = 16
_LONGEST_CONTEXT = 4096  # characters of messages whose ids are kept: a longer tool's answer is rarely met again


class ChatTemplate:
    """The chat template of `tokenizer`; keyword arguments (`enable_thinking=False` …) go to every rendering.

    Attributes:
        answers_tools: whether a tool's message may follow a turn.
        names_calls: whether such a message is written with the `name` of the function that it answers for.
        image_roles: of the messages that may have images.

    Raises:
        ConfigError: the tokenizer is not a fast one or has no template, or the template cannot be continued exactly:
            it has no end-of-turn token, loses contents, or lets tokens reach across the end of a turn.
    """

    def __init__(
        self, tokenizer: PreTrainedTokenizerBase, *, processor: Any = None, **apply_chat_template_kwargs: Any
    ) -> None:
        if not tokenizer.is_fast:
            raise ConfigError("a fast tokenizer (tokenizer.json) is needed: a slow one gives no character offsets")
        if not tokenizer.chat_template:
            raise ConfigError("the tokenizer has no chat template: put a chat_template.jinja beside tokenizer.json")
        self.tokenizer = tokenizer
        self._options = apply_chat_template_kwargs
        self._decoder, self._encoder = Decoder.of(tokenizer), Encoder(tokenizer)
        self._prompts = Recent[tuple[int, ...]](_PROMPTS_KEPT)
        self._contexts = Recent[list[Run]](_CONTEXTS_KEPT)
        self._heads = Recent[list[int]](_HEADS_KEPT)
        self._splits = False
        self._control = _control_tokens(tokenizer)
        spelled = sorted(tokenizer.convert_ids_to_tokens(sorted(self._control)), key=len, reverse=True)
        self._control_texts = re.compile("|".join(map(re.escape, spelled)) or r"(?!)")
        self._turns = Turns(tokenizer, self._render_plain, self._encoder, self._control)
        self._stop_text, self._labelled = self._turns.answered.text, self._turns.answered.encoder
        self._boundaries = boundary_tokens(tokenizer)
        self._forms = Forms[Form](tokenizer, self._options, self._render_whole, lambda form, _: form)
        self._continuations = Forms[Continuation](tokenizer, self._options, self._render_whole, self._continuation)
        self._check_head()
        self._check_tail(Stub.ANSWER, [{"role": "user", "content": PROBE}])
        self._repeats_users = self._is_exact(Stub.ANSWER, [{"role": "user", "content": PROBE}] * 2)
        self._tool_stub, self._tool_problem = self._find_tool_stub()
        self.answers_tools = self._tool_stub is not None
        self.names_calls = self._tool_stub is not None and self._shows_names(self._tool_stub)
        self._splits = self._can_split()
        self._images = None if processor is None else self._find_placeholders(processor)
        self.image_roles = frozenset(role for role in ("user", "tool") if self._shows_images(role))

    @property
    def stop_token_ids(self) -> tuple[int, ...]:
        """Ids that end an assistant turn: the template's (see `turns`), and the tokenizer's eos where it is another."""
        stops, eos = self._turns.stops, self.tokenizer.eos_token_id
        return stops if eos is None or eos in stops else (*stops, eos)

    @property
    def end_of_turn_id(self) -> int:
        """The id that ends a turn which answers: the template's own or, where it closes no turn, a user's first token."""
        return self._turns.stops[0]

    def initial_ids(
        self,
        messages: Sequence[Message],
        tools: Sequence[dict[str, Any]] | None = None,
        image_tokens: Sequence[int] = (),
    ) -> list[int]:
        """The prompt's ids, generation prompt included; `tools` are OpenAI tool dictionaries, `image_tokens` the tokens of
        each image in the messages.

        Raises:
            DataError: the template refuses the messages, or they do not have that many images.
        """
        if self._images is not None:
            messages = self._images.guarded(messages)
        elif image_tokens:
            raise DataError("a text model is shown no images")
        tools_key = json.dumps(tools, default=repr) if tools else ""
        key = rendering_key(messages, tools_key)
        found = self._prompts.get(key)
        if found is None:
            formed = self._forms.find(messages, (tools_key,), tools=tools)
            text = formed[0].filled(formed[1]) if formed else self._render_prompt(messages, tools, generate=True)
            found = tuple(self._prompt_ids(text))
            self._prompts.put(key, found)
        return list(found) if self._images is None else self._images.expanded(found, image_tokens)

    def _prompt_ids(self, text: str) -> list[int]:
        """The ids of a rendered prompt. What stands before its first end of turn, usually the system message and the
        tools, is the same in most rows: it is encoded once."""
        if self._images is not None and CUT in text:
            first, *rest = text.split(CUT)
            return [*self._prompt_ids(first), *(n for piece in rest for n in self._labelled.ids(piece))]
        cut = text.find(self._stop_text) + len(self._stop_text)
        if not self._splits or cut < len(self._stop_text):
            return self._encoder.ids(text)
        head = (text[:cut],)
        found = self._heads.get(head)
        if found is None:
            found = self._encoder.ids(text[:cut])
            self._heads.put(head, found)
        return [*found, *self._labelled.ids(text[cut:])]

    def disarmed(self, text: str) -> str:
        """`text` with a zero-width space inside every spelled-out control token.

        For text that others wrote and that becomes part of a prompt: `initial_ids` trusts the prompt's messages, and a
        control token spelled out there would become that token.
        """
        return self._control_texts.sub(lambda found: f"{found[0][0]}\u200b{found[0][1:]}", text)

    def prompt_length(
        self,
        messages: Sequence[Message],
        tools: Sequence[dict[str, Any]] | None = None,
        image_tokens: Sequence[int] = (),
    ) -> int:
        """Number of ids of the prompt."""
        return len(self.initial_ids(messages, tools, image_tokens))

    def context_ids(
        self,
        messages: Sequence[Message],
        *,
        after: Sequence[int] | None = None,
        after_stop: bool = True,
        image_tokens: Sequence[int] = (),
    ) -> list[Run]:
        """Ids of new tool and user messages after an assistant turn, with the generation prompt, by provenance.

        `after` are the turn's sampled ids. Where they do not end as the template ends such a turn (it was cut short by a
        limit, or ended by another stop token) its end is put in front; see `turns`. `after_stop` says it in their place.
        A tool message may say whom it answers (`name`, `tool_call_id`), which only some templates write. Users' messages
        are joined by a line break where the template does not take several in a row.

        A token that overlaps a tool's content is TOOL, one that overlaps another message's content is USER, the rest is
        TEMPLATE. An image's placeholders, as many as `image_tokens` says of it, belong to its message likewise.

        Raises:
            ConfigError: the template cannot render the messages here, for example because it knows no tool role.
            DataError: the messages do not have as many images as `image_tokens`.
            ValueError: there is no message, or one of them is the assistant's.
        """
        messages = self._taken(messages)
        roles = [str(message.get("role")) for message in messages]
        if not roles or "assistant" in roles:
            raise ValueError("context_ids takes one or more tool or user messages and no assistant message")
        stub = self._stub_for(messages)
        end = self._turns.end(stub, roles[0])
        key = rendering_key(messages)
        if key is not None and sum(map(len, key)) > _LONGEST_CONTEXT:
            key = None
        found = self._contexts.get(key)
        if found is None:
            found = self._context_runs(stub, messages)
            self._contexts.put(key, found)
        if self._images is not None:
            owners = [_provenance_of(message) for message in messages for _ in range(image_count(message))]
            found = self._images.expanded_runs(found, owners, image_tokens)
        elif image_tokens:
            raise DataError("a text model is shown no images")
        runs = [(list(ids), label) for ids, label in found]
        if after is None:
            opening = () if after_stop and (end.closes or end.id in self._turns.stops) else end.written
        else:
            opening = self._turns.opening(end, after[-1] if after else None)
        return [(list(opening), Provenance.TEMPLATE), *runs] if opening else runs

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
            answers = messages[turn + 1 : following]
            written = self._assistant_ids(messages[turn], answers)
            runs.append((written, Provenance.SAMPLED))
            if following is not None:
                runs += self.context_ids(answers, after=written)
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
        return self._whole(self._stub_for(messages), self._taken(messages))

    def _whole(self, stub: Stub, messages: Sequence[Message]) -> list[int]:
        answers = stub.answers_to(messages)
        return self._encoder.ids(self._render_plain([*stub.before(answers), *answers], True))

    def _taken(self, messages: Sequence[Message]) -> Sequence[Message]:
        return messages if self._repeats_users or len(messages) < 2 else _with_users_joined(messages)

    def _stub_for(self, messages: Sequence[Message]) -> Stub:
        """The stub turn that new messages follow; ConfigError where there is none that tools may answer."""
        if all(message.get("role") != "tool" for message in messages):
            return Stub.ANSWER
        if self._tool_stub is None:
            raise ConfigError(f"the chat template does not support the tool role: {self._tool_problem}")
        return self._tool_stub

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

    def _render_plain(self, messages: Sequence[Message], generate: bool) -> str:
        return self._render(messages, None, generate=generate)

    def _render_whole(self, messages: Sequence[Message], tools: Sequence[dict[str, Any]] | None) -> str:
        return self._render(messages, tools, generate=True)

    def _continuation(self, form: Form, messages: Sequence[Message]) -> Continuation | None:
        named = [(key, _provenance_of(message)) for message in messages for key in message if key != "role"]
        owners = [owner if key == "content" else None for key, owner in named]
        end = self._end_before(messages)
        return Continuation.of(form, (ANCHOR, end.text), owners, end.encoder, self._boundaries)

    def _end_before(self, messages: Sequence[Message]) -> TurnEnd:
        return self._turns.end(self._stub_for(messages), str(messages[0].get("role")))

    def _context_runs(self, stub: Stub, messages: Sequence[Message]) -> list[Run]:
        """What `_context_after` gives, from what the template wrote for messages of the same shape, where that is exact."""
        found = self._continuations.find(stub.answers_to(messages), (stub.value,), stub.before)
        if found is None or any(map(has_marks, found[1])):
            return self._context_after(stub, messages)
        return found[0].runs(found[1])

    def _context_after(self, stub: Stub, messages: Sequence[Message]) -> list[Run]:
        """Ids that follow the end of the stub turn when `messages` and a generation prompt come next."""
        answers = stub.answers_to(messages)
        marked = [mark(message) for message in answers]
        end = self._turns.end(stub, str(messages[0].get("role")))
        try:
            rendered = self._render_plain([*stub.before(answers), *(entry.message for entry in marked)], True)
            # The stub comes before any content, so its first occurrence and the first end of turn after it are its own.
            turn_end = rendered.index(end.text, rendered.index(ANCHOR)) + len(end.text)
            text, spans = unmark(rendered[turn_end:], marked)
        except ValueError as error:
            raise ConfigError(f"the chat template cannot render these messages: {one_line(error)}") from error
        owned = [Owned(span.start, span.end, _provenance_of(messages[span.message])) for span in spans]
        return end.encoder.runs(text, owned)

    def _assistant_ids(self, message: Message, answers: Sequence[Message] = ()) -> list[int]:
        """Ids that the policy would have sampled for an assistant message that `answers` follow, its end included."""
        head = self._render_prompt([USER_STUB], None, generate=True)
        whole = self._render_prompt([USER_STUB, message], None, generate=False)
        if not whole.startswith(head):
            raise DataError("the chat template does not write this assistant message after its generation prompt")
        whole = self._turns.as_sampled(whole, len(head), self._end_before(answers or [USER_STUB]))
        start, ids = self._encoder.ids(head), self._encoder.ids(whole)
        # Otherwise the first words would merge with the generation prompt, which a policy that samples after it cannot do.
        return ids[len(start) :] if ids[: len(start)] == start else self._labelled.ids(whole[len(head) :])

    def _check_head(self) -> None:
        """The generation prompt must lead to where the template puts an assistant's words.

        It may stop short of them or go on (a thought that the template opens and closes itself), or open a thought that a
        turn without one begins by closing; only where it leads there exactly can the ids be compared.
        """
        bare, head = (self._render([USER_STUB], None, generate=flag) for flag in (False, True))
        whole = self._render([USER_STUB, _ANSWER_STUB], None, generate=False)
        lead, _, _ = whole.partition(ANCHOR)
        if lead == head:
            parts = self._encoder.ids(head) + self._assistant_ids(_ANSWER_STUB)
            if self._encoder.ids(self._turns.as_sampled(whole, len(head), self._turns.answered)) != parts:
                raise ConfigError("a token of this tokenizer reaches across the start of an assistant turn")
        elif not head.startswith(lead) and (head == bare or not _but_thoughts(lead).startswith(_but_thoughts(head))):
            raise ConfigError("the chat template's generation prompt is not how it begins an assistant turn")

    def _check_tail(self, stub: Stub, messages: Sequence[Message]) -> None:
        """The ids of a context must be the last ids of the whole conversation encoded at once, and nothing of the turn."""
        end = self._turns.end(stub, str(messages[0].get("role")))
        tail = [end.id, *(number for ids, _ in self._context_after(stub, messages) for number in ids)]
        if self._whole(stub, messages)[-len(tail) :] != tail:
            raise ConfigError("a token of this tokenizer reaches across the end of an assistant turn")
        if ANCHOR in self.tokenizer.decode(tail):
            raise ConfigError("the chat template writes the token that ends a turn inside a turn")

    def _is_exact(self, stub: Stub, messages: Sequence[Message]) -> bool:
        try:
            self._check_tail(stub, messages)
        except ConfigError:
            return False
        return True

    def _find_placeholders(self, processor: Any) -> Placeholders:
        """The placeholder, and the tokens that the template writes around it."""
        image_token = str(processor.image_token)
        number = self.tokenizer.convert_tokens_to_ids(image_token)
        if number not in self._control:
            raise ConfigError(
                f"the tokenizer has no special token '{image_token}', which the processor puts for images"
            )
        tokens = {image_token, str(getattr(processor, "video_token", None) or image_token)}
        try:
            texts = [self.rendered([{"role": "user", "content": parts}]) for parts in (_IMAGE_PROBE[1:], _IMAGE_PROBE)]
        except ConfigError:  # it renders no parts: then there are no images, but the tokens may be spelled all the same
            return Placeholders(number, tokens)
        without, within = (Counter(self._control_texts.findall(text)) for text in texts)
        return Placeholders(number, tokens | set(within - without))

    def _shows_images(self, role: str) -> bool:
        """Whether messages of `role` may have images: the ids that follow a turn are those of the whole conversation,
        and do not depend on images before it (a template may number them)."""
        message = {"role": role, "content": _IMAGE_PROBE}
        stub = self._tool_stub if role == "tool" else Stub.ANSWER
        if self._images is None or stub is None:
            return False
        try:
            self._check_tail(stub, [message])
            runs = self._context_after(stub, [message])
            answers = stub.answers_to([message])
            texts = [
                self._render_plain([first, stub.before(answers)[1], *answers], True)
                for first in (USER_STUB, {"role": "user", "content": _IMAGE_PROBE})
            ]
        except ConfigError:
            return False
        stop = self._turns.end(stub, role).text
        tails = {text[text.index(stop, text.index(ANCHOR)) :] for text in texts}
        return len(tails) == 1 and sum(ids.count(self._images.id) for ids, _ in runs) == 1

    def _can_split(self) -> bool:
        """Whether a prompt may be encoded in two parts that meet behind an end of turn, as its parts' ids suggest."""
        try:
            text = self._render([USER_STUB, _ANSWER_STUB, USER_STUB], None, generate=True)
        except ConfigError:
            return False
        cut = text.find(self._stop_text) + len(self._stop_text)
        parts = [*self._encoder.ids(text[:cut]), *self._labelled.ids(text[cut:])]
        return cut >= len(self._stop_text) and parts == self._encoder.ids(text)

    def _find_tool_stub(self) -> tuple[Stub | None, str]:
        """The stub turn that tool messages may follow, best two of them at once, or None and the reason why there is none.

        Some templates want each to answer a call of its own, some write one call at most, others cannot write calls.
        """
        found, reason = None, ""
        for stub in (Stub.CALLS, Stub.CALL, Stub.ANSWER):
            try:
                self._check_tail(stub, [{"role": "tool", "content": PROBE}])
                found = found or stub
                self._check_tail(stub, [{"role": "tool", "content": PROBE}] * 2)
            except ConfigError as error:
                reason = str(error)
                continue
            found = stub
            break
        if found is not None:
            self._turns.use(found, "tool")
        return found, reason

    def _shows_names(self, stub: Stub) -> bool:
        """Whether what a tool's answer looks like depends on the function that was called."""
        texts = []
        for name in ({}, {"name": "one"}, {"name": "two"}):
            try:
                runs = self._context_after(stub, [{"role": "tool", "content": PROBE, **name}])
            except ConfigError:
                return False
            texts.append([number for ids, _ in runs for number in ids])
        return texts[0] != texts[1] or texts[1] != texts[2]


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


def _but_thoughts(text: str) -> str:
    return _THOUGHT_TAGS.sub("", text)


def _with_users_joined(messages: Sequence[Message]) -> list[Message]:
    joined: list[Message] = []
    for message in messages:
        last = joined[-1] if joined else {}
        if last.get("role") == message.get("role") == "user" and all(
            type(m.get("content")) is str for m in (last, message)
        ):
            joined[-1] = {**last, "content": f"{last['content']}\n{message['content']}"}
        else:
            joined.append(message)
    return joined


def _provenance_of(message: Message) -> Provenance:
    return Provenance.TOOL if message.get("role") == "tool" else Provenance.USER
