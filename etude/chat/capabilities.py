"""`TemplateCapabilities`: which messages a template can render after an assistant turn, tested at start-up.

Invariant: each capability was tested by encoding messages after a stub turn and comparing the ids with those of the whole
conversation (`IncrementalRenderer.check`). A template that cannot even render a user message there is rejected.
"""

from __future__ import annotations

from dataclasses import dataclass

from etude.chat.contents import Message
from etude.chat.incremental import IncrementalRenderer
from etude.chat.placeholders import IMAGE_PROBE, Placeholders
from etude.chat.turns import PROBE, USER_STUB, Stub
from etude.errors import ConfigError

_USER: Message = {"role": "user", "content": PROBE}
_TOOL: Message = {"role": "tool", "content": PROBE}


@dataclass(frozen=True)
class TemplateCapabilities:
    """The capabilities of one template.

    Attributes:
        repeats_users: whether it supports consecutive user messages.
        tool_stub: the stub turn after which it renders tool messages; None if it renders none.
        tool_problem: why it renders no tool messages, or not two in a row.
        needs_tool_names: whether the rendering of a tool message depends on the function's name.
        image_roles: roles of messages that may have images.
    """

    repeats_users: bool
    tool_stub: Stub | None
    tool_problem: str
    needs_tool_names: bool
    image_roles: frozenset[str]

    @classmethod
    def of(cls, incremental: IncrementalRenderer, images: Placeholders | None) -> TemplateCapabilities:
        """Tests one template; `images` is None for a text model.

        Raises:
            ConfigError: it cannot render a user message after an assistant turn.
        """
        incremental.check(Stub.ANSWER, [_USER])
        tool_stub, problem = _tool_stub(incremental)
        needs_tool_names = tool_stub is not None and _shows_names(incremental, tool_stub)
        image_roles: list[str] = []
        if images is not None:
            stubs = [("user", Stub.ANSWER), ("tool", tool_stub)]
            image_roles = [
                role for role, stub in stubs if stub is not None and _shows_images(incremental, images, stub, role)
            ]
        return cls(_repeats_users(incremental), tool_stub, problem, needs_tool_names, frozenset(image_roles))


def _repeats_users(incremental: IncrementalRenderer) -> bool:
    try:
        incremental.check(Stub.ANSWER, [_USER, _USER])
    except ConfigError:
        return False
    return True


def _tool_stub(incremental: IncrementalRenderer) -> tuple[Stub | None, str]:
    """Returns the stub turn after which tool messages can be rendered, preferably two in a row, or None with the reason.

    Some templates require a separate call for each tool message, some render at most one call, others none.
    """
    supported, reason = None, ""
    for stub in (Stub.CALLS, Stub.CALL, Stub.ANSWER):
        try:
            incremental.check(stub, [_TOOL])
            supported = supported or stub
            incremental.check(stub, [_TOOL, _TOOL])
        except ConfigError as error:
            reason = str(error)
            continue
        return stub, reason
    return supported, reason


def _shows_names(incremental: IncrementalRenderer, stub: Stub) -> bool:
    texts = []
    for name in ({}, {"name": "one"}, {"name": "two"}):
        try:
            runs = incremental.runs(stub, [{**_TOOL, **name}])
        except ConfigError:
            return False
        texts.append([number for ids, _ in runs for number in ids])
    return texts[0] != texts[1] or texts[1] != texts[2]


def _shows_images(incremental: IncrementalRenderer, images: Placeholders, stub: Stub, role: str) -> bool:
    """Whether messages of `role` may have images: after a turn, their ids are those of the whole conversation, and do not
    depend on earlier images (a template may number images)."""
    message = {"role": role, "content": IMAGE_PROBE}
    try:
        incremental.check(stub, [message])
        runs = incremental.runs(stub, [message])
        before = [USER_STUB, {"role": "user", "content": IMAGE_PROBE}]
        texts = {incremental.text(stub, [message], first) for first in before}
    except ConfigError:
        return False
    return len(texts) == 1 and sum(ids.count(images.id) for ids, _ in runs) == 1
