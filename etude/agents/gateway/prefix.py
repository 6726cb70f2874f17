"""Prefix match: which recorded turn a request continues, and the token ids between that turn and the new one.

A request continues a recorded turn if its messages are that turn's history, the turn itself, and new tool or user messages
after it. Any other request (edited, truncated or summarised messages, other tools) begins a new sequence.

Invariant: the prompt of a request that continues a turn is that turn's recorded ids, followed only by the new messages,
encoded separately; any other request's messages are rendered from the start. Which call a tool message answers is taken
from the request's own messages. Text in a tool message never becomes a control token, in either case.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import chain
from typing import Any

from etude.agents.base import AgentContext, response_room
from etude.agents.gateway.messages import ImageHeader, Message
from etude.agents.gateway.request import ChatRequest, GatewayError
from etude.agents.gateway.rollout_tree import History, RolloutTree, Turn
from etude.agents.tool_messages import with_result_tag, with_tool_name
from etude.chat import ChatTemplate, ParsedResponse
from etude.errors import ConfigError, DataError, one_line
from etude.options import RolloutOptions
from etude.schemas import FunctionCall
from etude.trajectory import Provenance, Run, StopReason


@dataclass(frozen=True)
class Prefix:
    """What comes before a request's new turn.

    Attributes:
        parent: the turn that it continues; None for a new sequence.
        context: the ids between the parent and the new turn, with their provenance; for a new sequence, the prompt.
        new_messages: the new messages; tool messages carry the ids of the recorded calls.
        image_headers: the images in `new_messages`.
        ids: all ids before the first sampled token.
        room: how many tokens may be sampled: what is left of the maximum sequence and response lengths.
        ending: the stop reason of the trajectory once `room` is used up.
    """

    parent: Turn | None
    context: list[Run]
    new_messages: list[Message]
    image_headers: list[ImageHeader]
    ids: list[int]
    room: int
    ending: StopReason


def match_prefix(tree: RolloutTree, history: History, request: ChatRequest, shared: AgentContext) -> Prefix:
    """Returns the recorded turn that the request continues and what follows it, or the prompt of a new sequence.

    Raises:
        GatewayError: the chat template rejects the messages, or does not render each image exactly once.
    """
    chat, messages = shared.chat, history.messages
    start = 1 + max((n for n, message in enumerate(messages) if message["role"] == "assistant"), default=-1)
    new, answering = messages[start:], history.answered[start:]
    parent = tree.find(history.keys[start - 1], messages[:start]) if start and new else None
    context: list[Run] | None = None
    try:
        if parent is not None:
            headers = [*chain.from_iterable(history.images[start:])]
            context = _context_after(parent, new, answering, [header.tokens for header in headers], shared)
        if context is not None and parent is not None:
            calls = parent.message.get("tool_calls", ())
            new = [
                message if call is None else message | {"tool_call_id": calls[call]["id"]}
                for message, call in zip(new, answering)
            ]
        else:
            parent, new, headers = None, messages, [*chain.from_iterable(history.images)]
            if shared.parser.result_tag is None:
                chat.require_tools_shown(messages, request.tools)
            shown = _prompt_messages(messages, history.answered, chat)
            first = chat.initial_ids(shown, request.tools or None, [header.tokens for header in headers])
            context = [(first, Provenance.TEMPLATE)]
    except DataError as error:
        raise GatewayError(one_line(error), param="messages") from error
    ids = [] if parent is None else parent.ids()
    for run, _ in context:
        ids += run
    prompt = sum(len(run) for run, _ in (context if parent is None else parent.path()[0].context))
    room, ending = response_room(shared.options, prompt, len(ids) - prompt)
    room = min(room, longest_sequence(shared.options) - len(ids))  # without `max_model_len`, too
    return Prefix(parent, context, new, headers, ids, room, ending)


def _prompt_messages(messages: list[Message], answered: list[int | None], chat: ChatTemplate) -> list[Message]:
    """Prepares messages for rendering: disarms tool results, and adds the tool's name where the template writes it."""
    prepared: list[Message] = []
    calls: list[Message] = []
    for message, call in zip(messages, answered):
        if message["role"] == "assistant":
            calls = message.get("tool_calls", [])
        if message["role"] == "tool":
            message = message | {"content": chat.disarm(message["content"])}
            if chat.needs_tool_names and call is not None:
                message = {"name": chat.disarm(calls[call]["function"]["name"]), **message}
        prepared.append(message)
    return prepared


def _context_after(
    parent: Turn, new: list[Message], answering: list[int | None], image_tokens: list[int], shared: AgentContext
) -> list[Run] | None:
    """Encodes the messages that follow a turn, which answer its calls at the indices `answering`; None if the template
    cannot render them there."""
    chat = shared.chat
    response = with_result_tag(parent.parsed.response, chat, shared.parser)
    rendered_messages = []
    for message, place in zip(new, answering):
        rendered = {"role": message["role"], "content": message["content"]}
        if message["role"] == "tool":
            call = None if place is None else parent.parsed.calls[place]
            rendered = _result_message(response, message["content"], call)
            name = message.get("name") if call is None else call.name
            rendered = with_tool_name(rendered, name) if chat.needs_tool_names else rendered
        rendered_messages.append(rendered)
    try:
        return chat.context_ids(rendered_messages, after=parent.parsed.output.token_ids, image_tokens=image_tokens)
    except ConfigError:
        return None


def _result_message(response: ParsedResponse, content: Any, call: FunctionCall | None) -> Message:
    """The message for a tool result, given as text or as parts with images, in the format of the policy's tool calls."""
    if isinstance(content, str):
        return response.result_message(content, call)
    message: Message = dict(response.result_message("", call))
    before, _, after = message["content"].partition("><")  # opening and closing tag, in formats that have them
    tags = [{"type": "text", "text": text} for text in (f"{before}>", f"<{after}") if after]
    return message | {"content": [*tags[:1], *content, *tags[1:]]}


def longest_sequence(options: RolloutOptions) -> int:
    """Maximum number of tokens in a sequence, from its first prompt to its last response."""
    return options.max_model_len or options.prompt_length + options.response_length
