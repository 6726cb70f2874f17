"""Builds the tool messages that answer a turn's calls from what the tools answered, for the chat template to render.

Invariant: no text written by a model, a tool or a user makes the run fail. That the template renders tool messages at all is
checked at start-up (`etude.chat.check.require_answers`); it may still split some contents, such as a tool result with words
at which the template cuts. Such text is replaced by a placeholder line; images stay. Tool results that leave too little room
for the next turn are truncated further, but each keeps at least `LEAST_TOKENS`. Media that the model cannot take become a
short note, which counts towards the result's length, and the trajectory goes on: a corrupt image is the tool's fault.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import islice
from typing import TYPE_CHECKING, Any

from etude.agents.images import decode_all
from etude.chat import ChatTemplate, ParsedResponse, ToolParser
from etude.chat.placeholders import content_of, image_count, text_of
from etude.errors import ConfigError, DataError, one_line
from etude.schemas import FunctionCall, ToolResponse
from etude.tools import TokenLimit, ToolCall
from etude.tools.builtin.images import MAX_IMAGES
from etude.tools.truncation import bound_text
from etude.trajectory import ToolCallRecord

if TYPE_CHECKING:
    from PIL.Image import Image

    from etude.models import ImageReader

NOT_EXECUTED = "not_executed"  # the error of a call beyond `max_parallel_calls`, or in a turn that used up the room
LEAST_TOKENS = 16  # minimum length of a truncated result: below this, it would be mostly the truncation mark
UNWRITABLE = "(this answer cannot be shown: the chat template does not write it as it is)"
_VIDEO = "(a video, which cannot be shown)"
_MEDIA = "(the tool returned media that a text model cannot see)"
_UNREAD = FunctionCall(name="", arguments="")  # stands for a malformed call


def refused_calls(parsed: ParsedResponse, turn: int, most: int) -> list[ToolCall]:
    """Returns the calls of a turn that do not run: those beyond the first `most`, then the malformed ones."""
    text = f"Not executed: at most {most} calls are executed in one turn."
    beyond = [ToolCall(call, turn, error=NOT_EXECUTED, shown=text) for call in parsed.calls[most:]]
    return beyond + [
        ToolCall(_UNREAD, turn, response=ToolResponse(text=error), error="malformed", shown=error)
        for error in parsed.errors
    ]


def tool_messages(parsed: ParsedResponse, calls: Sequence[ToolCall], needs_tool_names: bool) -> list[dict[str, Any]]:
    """Returns the message that answers each call. `needs_tool_names`: the template writes the tool's name into it."""
    messages: list[dict[str, Any]] = []
    for call in calls:
        known = None if call.requested is _UNREAD else call.requested
        message: dict[str, Any] = parsed.result_message(call.shown or "", known)
        if needs_tool_names and known is not None:
            message = with_tool_name(message, known.name)
        if call.images:
            message = {**message, "content": content_of(message["content"], len(call.images))}
        messages.append(message)
    return messages


async def render_response(
    response: ToolResponse, reader: ImageReader | None, limit: TokenLimit
) -> tuple[str, Sequence[Image], Sequence[int]]:
    """Prepares a tool response: its text, already truncated to `limit`, with notes for media that the model cannot take; its
    images; and the number of tokens of each. `reader` is None for a text-only model.

    Raises:
        InfrastructureError: the system cannot read an image now.
    """
    if not (response.image or response.video):
        return response.text or "", (), ()
    if reader is None:
        return append_notes(response.text, [_MEDIA], limit), (), ()
    given = response.image or []
    shown, faults = await decode_all(reader, given[:MAX_IMAGES])
    notes = [_VIDEO] if response.video else []
    if faults:
        notes.append(f"(an image that cannot be shown: {one_line(faults[0], 200)})")
    if len(faults) > 1:
        notes.append(f"({len(faults) - 1} more images that cannot be shown)")
    if len(given) > MAX_IMAGES:
        notes.append(f"(only the first {MAX_IMAGES} images are shown)")
    images, tokens = zip(*shown) if shown else ((), ())
    return append_notes(response.text, notes, limit), images, tokens


def append_notes(text: str | None, notes: Sequence[str], limit: TokenLimit) -> str:
    """Appends a line per note; if the result is too long, truncates the text first, and the notes only if necessary."""
    lines = "\n".join(notes).encode("utf-8", "replace").decode()
    whole = "\n".join(part for part in (text, lines) if part)
    if not lines or (cut := _truncate(whole, limit)) == whole:
        return whole
    tokens, chars = limit.max_tokens, limit.max_chars
    rest = replace(
        limit,
        max_tokens=None if tokens is None else tokens - limit.count(f"\n{lines}"),
        max_chars=None if chars is None else chars - len(lines) - 1,
    )
    if not text or min((left for left in (rest.max_tokens, rest.max_chars) if left is not None), default=-1) < 0:
        return cut
    return _truncate(f"{_truncate(text, rest)}\n{lines}", limit)


def _truncate(text: str, limit: TokenLimit) -> str:
    return bound_text(text, limit, len(text))


def shorten_results(calls: Sequence[ToolCall], excess: int, limit: TokenLimit) -> bool:
    """Truncates the texts of the messages by `excess` tokens in total; returns False if that is not possible."""
    cut = shorten_texts([call.shown or "" for call in calls], excess, limit)
    for call, text in zip(calls, cut or ()):
        call.cut |= text != (call.shown or "")
        call.shown = text
    return cut is not None


def with_result_tag(parsed: ParsedResponse, chat: ChatTemplate, parser: ToolParser) -> ParsedResponse:
    """Sets the tag around tool results if the template has no tool role."""
    if parsed.result_tag is not None or chat.answers_tools:
        return parsed
    return replace(parsed, result_tag=parser.result_tag or "tool_response")


def unrun_record(turn: int, call: FunctionCall) -> ToolCallRecord:
    """Returns the record of a call of a turn that a length limit ended."""
    said = "not executed: a length limit ended its turn"
    return ToolCallRecord(turn, call.name, call.arguments, said, error=NOT_EXECUTED)


def malformed_record(turn: int, error: str) -> ToolCallRecord:
    """Returns the record of a malformed call."""
    return ToolCallRecord(turn, "", "", error, error="malformed")


def replace_unwritable(
    chat: ChatTemplate, messages: Sequence[Mapping[str, Any]], image_tokens: Sequence[int] = ()
) -> list[dict[str, Any]]:
    """Replaces texts that the template cannot render by `UNWRITABLE`; returns an empty list if that does not help.

    `image_tokens`: number of tokens of each image in the messages; all images stay.
    """
    replaced, images = [], iter(image_tokens)
    for message in messages:
        own = list(islice(images, image_count(message)))
        content = message["content"] if _can_render(chat, [message], own) else content_of(UNWRITABLE, len(own))
        replaced.append({**message, "content": content})
    return replaced if _can_render(chat, replaced, image_tokens) else []


def drop_images(message: dict[str, Any]) -> dict[str, Any]:
    """Removes the images of a message that the model never saw: a trajectory's messages must have exactly its context's."""
    return {**message, "content": text_of(message["content"])} if image_count(message) else message


def shorten_texts(texts: Sequence[str], excess: int, limit: TokenLimit) -> list[str] | None:
    """Truncates the longest of `texts` to a common length that saves `excess` tokens; None if that length would be below
    `LEAST_TOKENS`."""
    sizes = [limit.count(text) for text in texts]
    left, cap = sum(sizes) - excess, 0
    for shorter, size in enumerate(sorted(sizes)):
        cap = left // (len(sizes) - shorter)
        if size > cap:
            break
        left -= size
    if cap < LEAST_TOKENS:
        return None
    return [text if size <= cap else limit.cut(text, cap) for text, size in zip(texts, sizes)]


def with_tool_name(message: dict[str, Any], name: str | None) -> dict[str, Any]:
    """Adds the function's name, if known, to a tool message; returns other messages unchanged."""
    return {**message, "name": name} if name and message.get("role") == "tool" else message


def _can_render(chat: ChatTemplate, messages: Sequence[Mapping[str, Any]], image_tokens: Sequence[int]) -> bool:
    if not all(isinstance(message.get("content"), str) or image_count(message) for message in messages):
        return False
    try:
        return bool(chat.context_ids(messages, image_tokens=image_tokens))
    except (ConfigError, DataError):
        return False
