"""Where a request's answer belongs: after which recorded turn, and with which ids in between.

If the messages are a recorded turn's history, that turn, and new tool or user messages, the request continues it. Any other
request (edited, shortened, summarised messages, other tools) begins a sequence.

Invariant: a request that continues a turn has that turn's recorded ids as its prompt, followed only by its new messages,
encoded on their own; any other has its own prompt. Which call a tool message answers is taken from the request's own
messages. Text in a tool message never becomes a control token, in either case.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

from etude.agents.base import AgentContext, response_room
from etude.agents.gateway.images import ImageHeader
from etude.agents.gateway.messages import History, Message, match_answers
from etude.agents.gateway.recording import Recording, Turn
from etude.agents.gateway.wire import ChatRequest, GatewayError
from etude.agents.tool_messages import with_result_tag, with_tool_name
from etude.chat import ChatTemplate, ParsedResponse
from etude.chat.provenance import Run
from etude.errors import ConfigError, DataError, one_line
from etude.options import RolloutOptions
from etude.schemas import FunctionCall
from etude.trajectory import Provenance, StopReason


@dataclass(frozen=True)
class Place:
    """Where a request's choices belong.

    Attributes:
        parent: the turn that it continues; None at the beginning of a sequence.
        context: the ids in between, by provenance; at a beginning the prompt.
        asked: the new messages, tools' with the ids of the recorded calls.
        pictures: their images.
        ids: everything before the first sampled token.
        answered: how many of them follow the sequence's first prompt.
        room: tokens left of the longest sequence, and of the response length.
        ending: how the trajectory ends if they are used up.
    """

    parent: Turn | None
    context: list[Run]
    asked: list[Message]
    pictures: list[ImageHeader]
    ids: list[int]
    answered: int
    room: int
    ending: StopReason


def place_request(
    recording: Recording,
    messages: list[Message],
    pictures: Sequence[Sequence[ImageHeader]],
    history: History,
    request: ChatRequest,
    shared: AgentContext,
) -> Place:
    """After the recorded turn that the request continues, or at the beginning of a new sequence.

    Raises:
        GatewayError: the chat template rejects the messages.
    """
    places = match_answers(messages)
    start = 1 + max((n for n, message in enumerate(messages) if message["role"] == "assistant"), default=-1)
    new, answering = messages[start:], places[start:]
    parent = recording.find(history.keys[start - 1], messages[:start]) if start and new else None
    if parent is not None:
        shown = [*chain.from_iterable(pictures[start:])]
        context = _context_after(parent, new, answering, [picture.tokens for picture in shown], shared)
        if context is not None:
            calls = parent.message.get("tool_calls", ())
            asked = [
                message if place is None else message | {"tool_call_id": calls[place]["id"]}
                for message, place in zip(new, answering)
            ]
            return _measured(parent, context, asked, shown, shared)
    chat, shown = shared.chat, [*chain.from_iterable(pictures)]
    tokens = [picture.tokens for picture in shown]
    try:
        prompt = chat.initial_ids(_shown(messages, places, chat), request.tools or None, tokens)
    except DataError as error:
        raise GatewayError(400, one_line(error), param="messages") from error
    return _measured(None, [(prompt, Provenance.TEMPLATE)], messages, shown, shared)


def _shown(messages: list[Message], places: list[int | None], chat: ChatTemplate) -> list[Message]:
    """The messages of a prompt: tools' text escaped, and with the tool's name where the template writes it."""
    shown: list[Message] = []
    calls: list[Message] = []
    for message, place in zip(messages, places):
        if message["role"] == "assistant":
            calls = message.get("tool_calls", [])
        if message["role"] == "tool":
            message = message | {"content": _disarmed(message["content"], chat)}
            if chat.names_calls and place is not None:
                message = {"name": chat.disarm(calls[place]["function"]["name"]), **message}
        shown.append(message)
    return shown


def _context_after(
    parent: Turn, new: list[Message], answering: list[int | None], image_tokens: list[int], shared: AgentContext
) -> list[Run] | None:
    """The ids of new messages after a turn, answering its calls at the indices `answering`; None if the template cannot
    render them there.

    Raises:
        GatewayError: the template does not render each of their images exactly once.
    """
    chat = shared.chat
    parsed = with_result_tag(parent.read.parsed, chat, shared.parser)
    shown = []
    for message, place in zip(new, answering):
        rendered = {"role": message["role"], "content": message["content"]}
        if message["role"] == "tool":
            call = None if place is None else parent.read.calls[place]
            rendered = _result(parsed, message["content"], call)
            name = message.get("name") if call is None else call.name
            rendered = with_tool_name(rendered, name) if chat.names_calls else rendered
        shown.append(rendered)
    try:
        return chat.context_ids(shown, after=parent.read.output.token_ids, image_tokens=image_tokens)
    except ConfigError:
        return None
    except DataError as error:
        raise GatewayError(400, one_line(error), param="messages") from error


def _disarmed(content: Any, chat: ChatTemplate) -> Any:
    if isinstance(content, str):
        return chat.disarm(content)
    return [part | {"text": chat.disarm(part["text"])} if "text" in part else part for part in content]


def _result(parsed: ParsedResponse, content: Any, call: FunctionCall | None) -> Message:
    """A tool's answer, of text or of parts with images, as the format gives it."""
    if isinstance(content, str):
        return parsed.result_message(content, call)
    message: Message = dict(parsed.result_message("", call))
    before, _, after = message["content"].partition("><")  # the two tags, in formats that have some
    tags = [{"type": "text", "text": text} for text in (f"{before}>", f"<{after}") if after]
    return message | {"content": [*tags[:1], *content, *tags[1:]]}


def longest_sequence(options: RolloutOptions) -> int:
    """Maximum tokens of a sequence, from its first prompt to its last answer."""
    return options.max_model_len or options.prompt_length + options.response_length


def _measured(
    parent: Turn | None, context: list[Run], asked: list[Message], pictures: list[ImageHeader], shared: AgentContext
) -> Place:
    options = shared.options
    ids = [] if parent is None else parent.ids()
    for run, _ in context:
        ids += run
    answered = 0 if parent is None else parent.answered + len(ids) - parent.total
    room, ending = response_room(options, len(ids) - answered, answered)
    room = min(room, longest_sequence(options) - len(ids))  # without `max_model_len`, too
    return Place(parent, context, asked, pictures, ids, answered, room, ending)
