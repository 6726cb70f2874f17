"""Where a request's answer stands: behind which recorded turn, and with which ids between.

Where the messages are those of a recorded turn's history, that turn, and new ones of tools or users, the request continues
it. Any other request (edited, shortened, summarised messages, other tools) begins a sequence.

Invariant: a request that continues a turn has that turn's recorded ids for a prompt, and behind them nothing but its new
messages, encoded by themselves; any other has a prompt of its own. What a tool's message spells out never becomes a control
token, in either.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from etude.agents.answers import naming
from etude.agents.base import AgentContext
from etude.agents.gateway.errors import GatewayError
from etude.agents.gateway.messages import History, Message
from etude.agents.gateway.recording import Recording, Turn
from etude.agents.gateway.wire import ChatRequest
from etude.chat.template import Run
from etude.errors import ConfigError, DataError, one_line
from etude.trajectory import Provenance


@dataclass(frozen=True)
class Place:
    """Where a request's choices stand.

    Attributes:
        parent: the turn that it continues; None at the beginning of a sequence.
        context: what stands between, by provenance; at a beginning the prompt.
        asked: the messages that are new.
        ids: everything before the first token that is sampled.
        answered: how many of them follow the sequence's first prompt.
        longest: tokens that the whole sequence may have.
        room: tokens that are left of it, and of the response's own length.
    """

    parent: Turn | None
    context: list[Run]
    asked: list[Message]
    ids: list[int]
    answered: int
    longest: int
    room: int


def placed(
    recording: Recording, messages: list[Message], history: History, request: ChatRequest, shared: AgentContext
) -> Place:
    """Behind the recorded turn that the request continues, or at the beginning of a new sequence.

    Raises:
        GatewayError: the chat template refuses the messages.
    """
    assistants = [n for n, message in enumerate(messages) if message["role"] == "assistant"]
    new = messages[assistants[-1] + 1 :] if assistants else []
    parent = recording.find(history.keys[assistants[-1]]) if new else None
    if parent is not None:
        context = _context_after(parent, new, shared)
        if context is not None:
            return _measured(parent, context, new, shared)
    chat = shared.chat
    shown = [
        message | {"content": chat.disarmed(message["content"])} if message["role"] == "tool" else message
        for message in messages
    ]
    try:
        prompt = chat.initial_ids(shown, request.tools or None)
    except DataError as error:
        raise GatewayError(400, one_line(error), param="messages") from error
    return _measured(None, [(prompt, Provenance.TEMPLATE)], messages, shared)


def _context_after(parent: Turn, new: list[Message], shared: AgentContext) -> list[Run] | None:
    """The ids of new messages behind a turn; None where the template cannot show them there."""
    chat, parsed = shared.chat, parent.read.parsed
    if parsed.result_tag is None and not chat.answers_tools:
        parsed = replace(parsed, result_tag=shared.parser.result_tag or "tool_response")
    called = {given["id"]: call for given, call in zip(parent.message.get("tool_calls", ()), parent.read.calls)}
    shown = []
    for message in new:
        told = {"role": message["role"], "content": message["content"]}
        if message["role"] == "tool":
            call = called.get(message.get("tool_call_id"))
            told = parsed.result_message(message["content"], call)
            told = naming(told, call.name) if call is not None and chat.names_calls else told
        shown.append(told)
    try:
        return chat.context_ids(shown, after=parent.read.output.token_ids)
    except ConfigError:
        return None


def _measured(parent: Turn | None, context: list[Run], asked: list[Message], shared: AgentContext) -> Place:
    options = shared.options
    ids = [] if parent is None else parent.ids()
    for run, _ in context:
        ids += run
    answered = 0 if parent is None else parent.answered + len(ids) - parent.total
    longest = options.max_model_len or options.prompt_length + options.response_length
    room = min(options.response_length - answered, longest - len(ids))
    return Place(parent, context, asked, ids, answered, longest, room)
