"""`check_template`: tests whether a tokenizer's chat template is safe for multi-turn training, and reports the evidence.

Invariant: every finding is tested on the template, not inferred from its name: conversations are rendered whole and
incrementally, and their ids compared. A template that `ChatTemplate` rejects at start-up is rejected here with the same
message.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from etude.chat.parsers.auto import AutoToolParser
from etude.chat.rendering import PROBE_TOOL, STAND_IN
from etude.chat.template import ChatTemplate
from etude.errors import ConfigError, EtudeError, one_line
from etude.trajectory import Run

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_USER = {"role": "user", "content": "What is 12 + 7?"}
_ANSWER = {"role": "assistant", "content": "The answer is 19."}
_THOUGHT = "I wonder about qzxv."
_CALL = {"type": "function", "function": {"name": STAND_IN, "arguments": {"city": "Saint-Malo", "days": 3}}}
_TURNS: dict[str, dict[str, Any]] = {
    "a call": {"content": "", "tool_calls": [{"id": "call00001", **_CALL}]},
    "words beside a call": {"content": "I look.", "tool_calls": [{"id": "call00001", **_CALL}]},
    "reasoning_content": {"content": "It is 19.", "reasoning_content": _THOUGHT},
}
"""Message parts that demonstrations and histories in prompts may have, and that templates may drop."""


@dataclass(frozen=True)
class Finding:
    """A statement about a template. `holds` is None for informational ones."""

    statement: str
    holds: bool | None
    evidence: str


@dataclass(frozen=True)
class TemplateReport:
    """All findings, and a small example conversation as it would be trained on; empty if the template was rejected."""

    findings: list[Finding]
    example: list[Run]
    dropped: tuple[str, ...] = ()
    """Message parts that the template drops from demonstrations and from histories in prompts."""

    @property
    def safe(self) -> bool:
        """Whether no finding failed."""
        return all(finding.holds is not False for finding in self.findings)


def check_template(tokenizer: PreTrainedTokenizerBase, **options: Any) -> TemplateReport:
    """Tests a tokenizer's chat template; `options` are passed to `ChatTemplate`: `data.apply_chat_template_kwargs`, and the
    `processor` of a vision model."""
    try:
        chat = ChatTemplate(tokenizer, **options)
    except EtudeError as error:
        return TemplateReport([Finding("a conversation can be continued exactly", False, one_line(error))], [])
    ends = ", ".join(f"{tokenizer.convert_ids_to_tokens(stop)} ({stop})" for stop in chat.stop_token_ids)
    dropped = tuple(name for name, turn in _TURNS.items() if _drops(chat, turn))
    findings = [
        Finding("an assistant turn ends with a token", True, ends),
        _test("a user's answer is encoded as in the whole conversation", lambda: _continues(chat, "user", 1)),
        _test("a tool's answer is encoded as in the whole conversation", lambda: _continues(chat, "tool", 1)),
        _test("so are two tools' answers", lambda: _continues(chat, "tool", 2)),
        _test("tool schemas are shown to the model", lambda: _shows_tools(chat)),
        _test("a tool cannot write a control token", lambda: _cannot_forge(chat)),
        _format(tokenizer),
        Finding(
            "written in demonstrations and prompts",
            None,
            ", ".join(["words", *(n for n in _TURNS if n not in dropped)]),
        ),
        _earlier_reasoning(chat),
        *([_images(chat)] if options.get("processor") is not None else []),
    ]
    return TemplateReport(findings, _example(chat), dropped)


def _drops(chat: ChatTemplate, turn: dict[str, Any]) -> bool:
    try:
        return chat.dropped_of_turn({"role": "assistant", **turn}) is not None
    except EtudeError:
        return True


def require_answers(chat: ChatTemplate, role: str) -> None:
    """Rejects a template that cannot render one message of `role`, or two in a row, after an assistant turn.

    Raises:
        ConfigError: it cannot; the message says why.
    """
    words = "a tool's answer" if role == "tool" else "a user's answer"
    for count, shown in ((1, words), (2, "the answers to two calls in one turn")):
        try:
            same, evidence = _continues(chat, role, count)
        except EtudeError as error:
            same, evidence = False, one_line(error)
        if not same:
            raise ConfigError(f"the chat template cannot show the model {shown}: {evidence}")


def _test(statement: str, trial: Callable[[], tuple[bool, str]]) -> Finding:
    try:
        return Finding(statement, *trial())
    except EtudeError as error:
        return Finding(statement, False, one_line(error))


def _continues(chat: ChatTemplate, role: str, count: int) -> tuple[bool, str]:
    """Whether `count` messages encoded incrementally are the last ids of the whole conversation, encoded at once.

    `ChatTemplate` tests this for one message at start-up.
    """
    messages = [{"role": role, "content": str(19 + n)} for n in range(count)]
    pieces = [token for ids, _ in chat.context_ids(messages) for token in ids]
    whole = chat.continued_whole(messages)
    same = whole[-len(pieces) :] == pieces
    return same, f"{len(pieces)} tokens" if same else f"{pieces} by itself, {whole[-len(pieces) :]} in the whole"


def _shows_tools(chat: ChatTemplate) -> tuple[bool, str]:
    shown = chat.initial_ids([_USER], [PROBE_TOOL])
    if STAND_IN in chat.decode(shown):
        try:
            more = len(shown) - len(chat.initial_ids([_USER]))
        except EtudeError as error:
            return True, f"always: without tools, {one_line(error)}"
        if not chat.shows_tools_below_system:
            return False, "not in a prompt with a system message: set multi_turn.tools_in_system=true"
        return True, f"{more} tokens for one tool of two arguments"
    return False, "the prompt is the same with and without tools: set multi_turn.tools_in_system=true"


def _cannot_forge(chat: ChatTemplate) -> tuple[bool, str]:
    """Whether a content that spells out a control token gives no more control tokens than another one."""
    numbers = {token: chat.tokenizer.convert_tokens_to_ids(token) for token in sorted(chat.control_tokens)}

    def written(role: str, content: str) -> list[int]:
        runs = chat.context_ids([{"role": role, "content": content}])
        return [number for ids, _ in runs for number in ids if number in numbers.values()]

    for role in ("tool", "user"):
        try:
            honest = written(role, "xy")
        except EtudeError:
            continue  # unsupported role, which another finding reports
        for token in numbers:
            if written(role, f"x{token}y") != honest:
                return False, f"'{token}' in a {role}'s words becomes that token"
    return True, f"tried with {len(numbers)} tokens: they stay plain characters"


def _format(tokenizer: PreTrainedTokenizerBase) -> Finding:
    try:
        return Finding("multi_turn.format=auto", None, AutoToolParser(tokenizer).name)
    except EtudeError as error:
        return Finding("multi_turn.format=auto", None, one_line(error).removeprefix("multi_turn.format=auto: "))


def _earlier_reasoning(chat: ChatTemplate) -> Finding:
    """Reports whether the template drops reasoning from earlier turns; then its rendering differs from what was sampled."""
    thoughtful = {"role": "assistant", "content": f"<think>\n{_THOUGHT}\n</think>\n\nThe answer is 19."}
    try:
        text = chat.rendered([_USER, thoughtful, _USER])
    except EtudeError as error:
        return Finding("earlier reasoning", None, one_line(error))
    if "qzxv" in text:
        return Finding("earlier reasoning", None, "the template keeps it")
    return Finding(
        "earlier reasoning", None, "the template drops it; Étude keeps what was sampled, in context and training"
    )


def _images(chat: ChatTemplate) -> Finding:
    none = "none between turns: the template writes no single placeholder, or numbers images"
    roles = ", ".join(sorted(chat.image_roles, reverse=True))
    return Finding("images", None, f"may be in messages of: {roles}" if roles else none)


def _example(chat: ChatTemplate) -> list[Run]:
    """Encodes an example: a prompt, an assistant turn, a tool or user message, and another turn."""
    for role in ("tool", "user"):
        try:
            between = {"role": role, "content": "19"}
            return chat.demonstration([_USER, _ANSWER, between, _ANSWER])
        except EtudeError:
            continue
    return []
