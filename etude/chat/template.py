"""`ChatTemplate`: encodes messages incrementally, each turn exactly once.

Invariant: sampled ids are never decoded and re-encoded, and earlier turns are never rendered again. Messages after an
assistant turn are rendered after a stub turn (`incremental`), which gives exactly the ids that encoding the whole
conversation gives; the constructor checks that on a probe for this tokenizer. A template that rewrites earlier assistant
turns (for example, drops old reasoning) is therefore safe to use.

Untrusted text: in `context_ids`, message content never produces a control token (any special token, and any other added
token that the template itself writes, such as a tool-response tag). Such a string in a tool result is encoded as ordinary
characters, which decode to the same text. `initial_ids` does not do that: prompts are trusted as part of the dataset, and a
control token spelled out in one becomes that token.

Images: with the processor of a vision model, contents may have image parts; see `placeholders`.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from itertools import chain, islice
from typing import TYPE_CHECKING, Any, TypeVar

from etude.chat.control import CUT, ControlTokens
from etude.chat.demonstration_turns import DemonstrationTurns
from etude.chat.dropped_parts import DroppedParts
from etude.chat.encoding import Decoder, Encoder, structural_ids
from etude.chat.incremental import IncrementalRenderer, owner_of
from etude.chat.parsers.base import ToolParser
from etude.chat.placeholders import Placeholders, image_count, text_of
from etude.chat.rendering import LRUCache, Message, Renderer, plain_message, rendering_key
from etude.chat.tool_prompt import ToolPrompt
from etude.chat.turns import Turns
from etude.errors import ConfigError, DataError
from etude.trajectory import Provenance, Run

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

T = TypeVar("T")
TOOLS_IN_SYSTEM = "actor_rollout_ref.rollout.multi_turn.tools_in_system=true"
PROMPTS_KEPT = 256
_CONTEXTS_KEPT, _LONGEST_KEPT = 1024, 4096  # contexts that are remembered, and characters of one's messages


def unnamed(names: Iterable[str], messages: Sequence[Message]) -> list[str]:
    """Returns the names of tools that no message has as a word: "prices" does not name `price`."""
    said = "\n".join(text_of(message.get("content")) for message in messages)
    return [name for name in names if not re.search(rf"(?<![A-Za-z0-9_]){re.escape(name)}(?![A-Za-z0-9_])", said)]


class ChatTemplate:
    """The chat template of `tokenizer`; keyword arguments (`enable_thinking=False` …) go to every rendering.

    With `tools_in_system`, the run's tool parser, tools, calls and tool results are written into plain messages, in its
    format, for a template that does not write them (`tool_prompt`).

    Attributes:
        shows_tools: whether a prompt with tools shows them to the model; `shows_tools_below_system`: one that begins with a
            system message.
        answers_tools: whether a tool message may follow a turn.
        needs_tool_names: whether the template writes the function's `name` into tool messages.
        image_roles: roles of messages that may have images.

    Raises:
        ConfigError: the tokenizer is not a fast one or has no template, or the template cannot be continued exactly:
            it has no end-of-turn token, drops contents, or lets tokens span the end of a turn.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        *,
        processor: Any = None,
        tools_in_system: ToolParser | None = None,
        **apply_chat_template_kwargs: Any,
    ) -> None:
        if not tokenizer.is_fast:
            raise ConfigError("a fast tokenizer (tokenizer.json) is needed: a slow one gives no character offsets")
        if not tokenizer.chat_template:
            raise ConfigError(
                "the tokenizer has no chat template", fix="put a chat_template.jinja beside tokenizer.json"
            )
        self.tokenizer = tokenizer
        self._decoder, self._encoder = Decoder(tokenizer, structural_ids(tokenizer)), Encoder(tokenizer)
        self._control = ControlTokens(tokenizer)
        plain = None if tools_in_system is None else ToolPrompt(tools_in_system)
        rewrite = None if plain is None else plain.rewrite
        self._renderer = renderer = Renderer(tokenizer, apply_chat_template_kwargs, rewrite)
        if plain is not None:
            plain.has_system = renderer.shows_tools() is True
        self.shows_tools = renderer.shows_tools() is not False
        below = renderer.shows_tools(system=True)
        self.shows_tools_below_system = self.shows_tools if below is None else below
        self._turns = turns = Turns(renderer, self._encoder)
        self._images = None if processor is None else Placeholders.of(processor, renderer, self._control)
        self._sampled = DemonstrationTurns(renderer, self._encoder, turns, self._images)
        self._sampled.check()
        incremental = IncrementalRenderer(renderer, self._encoder, turns, self._control, self._images)
        if plain is not None and incremental.tool_stub is None:
            plain.answers_as_user = True
            incremental = IncrementalRenderer(renderer, self._encoder, turns, self._control, self._images)
        if incremental.tool_stub is not None:
            turns.use(incremental.tool_stub, "tool")
        self._incremental = incremental
        self.answers_tools = incremental.tool_stub is not None
        self.needs_tool_names, self.image_roles = incremental.needs_tool_names, incremental.image_roles
        self._dropped_parts = DroppedParts(renderer)
        self._prompts = LRUCache[tuple[int, ...]](PROMPTS_KEPT)
        self._contexts = LRUCache[list[Run]](_CONTEXTS_KEPT)

    @property
    def stop_token_ids(self) -> tuple[int, ...]:
        """Ids that end an assistant turn: the template's (see `turns`), and the tokenizer's eos if it is different."""
        stops, eos = self._turns.stops, self.tokenizer.eos_token_id
        return stops if eos is None or eos in stops else (*stops, eos)

    @property
    def end_of_turn_id(self) -> int:
        """The id that ends a turn without tool calls: the template's end-of-turn token or, if it has none, the first token
        of a user message."""
        return self._turns.stops[0]

    @property
    def control_tokens(self) -> frozenset[str]:
        """Texts of the tokens that only the template or the policy may write."""
        return self._control.texts

    def disarm(self, text: T) -> T:
        """Puts a zero-width space inside every control token that a string in `text` spells out, at any depth.

        Use it for third-party text in a prompt: `initial_ids` trusts the prompt's messages, where a spelled-out control
        token becomes that token.
        """
        return self._control.disarm(text)

    def initial_ids(
        self,
        messages: Sequence[Message],
        tools: Sequence[dict[str, Any]] | None = None,
        image_tokens: Sequence[int] = (),
    ) -> list[int]:
        """Returns the prompt's ids, generation prompt included; `tools` are OpenAI tool dicts, `image_tokens` the number of
        tokens of each image in the messages.

        Raises:
            DataError: the template rejects the messages, or their number of images is not that of `image_tokens`.
        """
        if self._images is None and image_tokens:
            raise DataError("a text model takes no images")
        key = rendering_key(messages, tools)
        found = self._prompts.get(key)
        if found is None:
            if self._images is not None:
                cut = self._images.texts.cut
                messages, tools = [cut(plain_message(message)) for message in messages], cut(list(tools or ()))
            text = self._renderer.text_of_row(messages, tools, generate=True)
            first, *rest = [text] if self._images is None else text.split(CUT)
            after = self._turns.answered.text
            pieces = [self._encoder.ids(first), *(self._encoder.ids_after(after, piece)[0] for piece in rest)]
            found = tuple(chain.from_iterable(pieces))
            self._prompts.put(key, found)
        if self._images is None:
            return list(found)
        written, owners = [(list(found), Provenance.TEMPLATE)], [Provenance.TEMPLATE] * len(image_tokens)
        return [number for ids, _ in self._images.expand(written, owners, image_tokens) for number in ids]

    def prompt_length(
        self,
        messages: Sequence[Message],
        tools: Sequence[dict[str, Any]] | None = None,
        image_tokens: Sequence[int] = (),
    ) -> int:
        """Number of ids in the prompt; see `initial_ids`."""
        return len(self.initial_ids(messages, tools, image_tokens))

    def require_tools_shown(self, messages: Sequence[Message], tools: Sequence[dict[str, Any]] | None) -> None:
        """Rejects a prompt that does not show the model its tools: the template does not write them, and the messages do
        not name them.

        Raises:
            DataError: names the tools, and the key to set.
        """
        if not tools or self._shows_tools_to(messages):
            return
        if unknown := unnamed((tool["function"]["name"] for tool in tools), messages):
            raise DataError(
                f"the model is not shown its tools ({', '.join(unknown)}): the chat template does not write schemas"
                f"{' below a system message' if self.shows_tools else ''}, and the messages do not describe them",
                fix=f"set {TOOLS_IN_SYSTEM}",
            )

    def _shows_tools_to(self, messages: Sequence[Message]) -> bool:
        below = bool(messages) and messages[0].get("role") == "system"
        return self.shows_tools_below_system if below else self.shows_tools

    def describes_tools(self, messages: Sequence[Message], tools: Sequence[dict[str, Any]] | None) -> bool:
        """Whether a prompt tells the model what its tools take: the template writes their schemas, or the messages name each
        tool and the arguments that it requires."""
        if not tools or self._shows_tools_to(messages):
            return True
        said = "\n".join(text_of(message.get("content")) for message in messages)
        functions = [tool["function"] for tool in tools]
        required = (name for each in functions for name in (each.get("parameters") or {}).get("required") or ())
        return all(name in said for name in (*(each["name"] for each in functions), *required))

    def require_whole(self, messages: Sequence[Message], tools: Sequence[dict[str, Any]] | None = None) -> None:
        """Rejects a prompt of which the template drops a part: a tool call, text next to one, or reasoning. Dropping
        reasoning from earlier turns is accepted as the template's policy.

        Raises:
            DataError: a part is dropped; names the message and the part.
        """
        if (dropped := self._dropped_parts.of_prompt(messages, tools)) is not None:
            raise _dropped_part(*dropped)

    def context_ids(
        self, messages: Sequence[Message], *, after: Sequence[int] | None = None, image_tokens: Sequence[int] = ()
    ) -> list[Run]:
        """Encodes new tool and user messages after an assistant turn, plus the generation prompt; returns runs of ids with
        their provenance.

        `after` are the turn's sampled ids. If they do not end with the template's end of turn (the turn was truncated, or
        ended with another stop token), it is inserted first; see `turns`. Without `after`, the turn is assumed to have ended
        normally. A tool message may name the call it answers (`name`, `tool_call_id`), which only some templates write.
        Consecutive user messages are joined by a line break if the template does not support them.

        A token that overlaps a tool's content is TOOL, one that overlaps another message's content is USER, the rest is
        TEMPLATE. An image's placeholders, as many as its `image_tokens`, get their message's provenance.

        Raises:
            ConfigError: the template cannot render the messages here, for example because it has no tool role.
            DataError: the messages do not have as many images as `image_tokens`.
            ValueError: there are no messages, or one is the assistant's.
        """
        messages = self._join_users(messages)
        roles = [str(message.get("role")) for message in messages]
        if not roles or "assistant" in roles:
            raise ValueError("context_ids takes one or more tool or user messages and no assistant message")
        stub = self._incremental.stub_for(messages)
        opening = self._turns.opening(self._turns.end(stub, roles[0]), after)
        key = rendering_key(messages)  # a tool's answer may be rendered twice: to count its tokens, and to add it
        key = None if key is None or len(key) > _LONGEST_KEPT else key
        if (runs := self._contexts.get(key)) is None:
            runs = self._incremental.runs(stub, messages)
            self._contexts.put(key, runs)
        runs = [([*ids], label) for ids, label in runs]
        if self._images is not None:
            owners = [owner_of(message) for message in messages for _ in range(image_count(message))]
            runs = self._images.expand(runs, owners, image_tokens)
        elif image_tokens:
            raise DataError("a text model takes no images")
        return [(list(opening), Provenance.TEMPLATE), *runs] if opening else runs

    def continued_whole(self, messages: Sequence[Message]) -> list[int]:
        """Renders and encodes a whole stub conversation followed by `messages`; the ids must end with `context_ids` of the
        same messages.

        Raises:
            ConfigError: the template cannot render it.
        """
        return self._incremental.whole(self._incremental.stub_for(messages), self._join_users(messages))

    def _join_users(self, messages: Sequence[Message]) -> Sequence[Message]:
        """Joins consecutive user messages of text if the template does not support them."""
        if self._incremental.repeats_users:
            return messages
        joined: list[Message] = []
        for message in messages:
            pair = [joined[-1], message] if joined else []
            if pair and all(each.get("role") == "user" and type(each.get("content")) is str for each in pair):
                message = {**joined.pop(), "content": "\n".join(each["content"] for each in pair)}
            joined.append(message)
        return joined

    def demonstration(
        self,
        messages: Sequence[Message],
        tools: Sequence[dict[str, Any]] | None = None,
        image_tokens: Sequence[int] = (),
    ) -> list[Run]:
        """Encodes a whole conversation as a rollout would have assembled it, for supervised training.

        The prompt is TEMPLATE; each assistant turn, its end of turn included, is SAMPLED; everything between is as in
        `context_ids`. `image_tokens`: number of tokens of each image in the messages; assistant messages have none.

        Raises:
            DataError: the template rejects the messages, drops a part of one, or does not begin an assistant turn with its
                generation prompt (for example, the prompt opens a reasoning block and the message has no reasoning); or
                the number of images differs from that of `image_tokens`.
            ValueError: there is no assistant message, no prompt before the first one, two are consecutive, or messages
                follow the last one.
        """
        turns = [n for n, message in enumerate(messages) if message.get("role") == "assistant"]
        if not turns or turns[0] == 0 or turns[-1] != len(messages) - 1:
            raise ValueError("a demonstration starts with a prompt and ends with an assistant message")
        prompt, images = messages[: turns[0]], iter(image_tokens)
        self.require_whole(prompt, tools)
        shown = tuple(islice(images, sum(map(image_count, prompt))))
        runs: list[Run] = [(self.initial_ids(prompt, tools, shown), Provenance.TEMPLATE)]
        for turn, following in zip(turns, [*turns[1:], None]):
            answers = messages[turn + 1 : following]
            end = self._turns.answered
            if answers:
                end = self._turns.end(self._incremental.stub_for(answers), str(answers[0].get("role")))
            written = self._sampled.ids(messages[turn], end)
            if (dropped := self._dropped_parts.of_turn(messages[turn])) is not None:
                raise _dropped_part(turn, dropped)
            runs.append((written, Provenance.SAMPLED))
            if following is not None:
                shown = tuple(islice(images, sum(map(image_count, answers))))
                runs += self.context_ids(answers, after=written, image_tokens=shown)
        if left := len(list(images)):
            raise DataError(f"{len(image_tokens)} images are given, {left} more than the messages have places for")
        return runs

    def dropped_of_turn(self, message: Message) -> str | None:
        """Returns the first part of an assistant message that the template drops, such as "tool_calls[0]", or None.

        Raises:
            DataError: the template rejects the message.
        """
        return self._dropped_parts.of_turn(message)

    def rendered(self, messages: Sequence[Message]) -> str:
        """Renders a conversation to text, without a generation prompt.

        Raises:
            ConfigError: the template rejects it.
        """
        return self._renderer.stub_text(messages, generate=False)

    def decode(self, ids: Sequence[int]) -> str:
        """Decodes `ids` for reading: drops structural special tokens, keeps tool and reasoning tags."""
        return self._decoder.decode(ids)


def _dropped_part(number: int, name: str) -> DataError:
    return DataError(
        f"messages[{number}]: the chat template does not write {name}, so that the model would not see it",
        fix="take a template that does, or put it into content as the model is to write it (`etude chat check` tries one)",
    )
