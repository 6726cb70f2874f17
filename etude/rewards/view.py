"""`TrajectoryView`: what a scorer sees of a finished trajectory, besides its text.

Invariant: a copy: whatever a scorer does with it, the trajectory stays unchanged. It holds plain data only, so that it
can be sent to other processes.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from etude.chat.placeholders import SUMMARY, text_of
from etude.trajectory import Provenance, ToolCallRecord, Trajectory

_TAG_CHARS = 64
_OPENING = re.compile(r"(<\w+>)\s*\Z")


@dataclass(frozen=True)
class TrajectoryView:
    """A snapshot of one trajectory.

    `messages` are the whole conversation as the chat template saw it, `tool_calls` the calls in order, each with `turn`,
    `name`, `arguments` (JSON text), `response`, `reward`, `error` and `seconds`. `step_rewards` holds (turn, source,
    value), `tool_rewards` each tool's `calc_reward`. `sampled_tokens` counts tokens written by the model,
    `response_tokens` all tokens after the prompt. `stop_reason` is the value of a `StopReason`. `opened` is the tag that the
    prompt ends with, if it does: `<think>` of templates that begin each turn inside the reasoning. `compacted`: a summary of
    the model's own stands below the question (`multi_turn.compact`).
    """

    messages: tuple[dict[str, Any], ...]
    tool_calls: tuple[ToolCallRecord, ...]
    stop_reason: str
    num_turns: int
    assistant_turns: int
    user_turns: int
    step_rewards: tuple[tuple[int, str, float], ...]
    tool_rewards: Mapping[str, float]
    prompt_tokens: int
    response_tokens: int
    sampled_tokens: int
    message_turns: tuple[int, ...] = ()
    extra_fields: Mapping[str, Any] = field(default_factory=dict)
    opened: str = ""
    compacted: bool = False

    @property
    def prompt(self) -> Sequence[dict[str, Any]]:
        """The messages before the model's first turn."""
        own = self._own
        return self.messages[: own[0][1]] if own else self.messages

    @property
    def as_asked(self) -> list[dict[str, Any]]:
        """`messages`, without what the model itself wrote into a user's (see `asked_in`)."""
        asked = [
            {**each, "content": asked_in(each.get("content"), self.compacted)} if each.get("role") == "user" else each
            for each in self.prompt
        ]
        return [*asked, *self.messages[len(asked) :]]

    @property
    def turns(self) -> list[dict[str, Any]]:
        """The model's messages in order, each `{"message": …, "tool_calls": the calls it made}`; after a compaction, those
        that are left."""
        return [
            {"message": self.messages[place], "tool_calls": [call for call in self.tool_calls if call.turn == turn]}
            for turn, place in self._own
        ]

    @property
    def _own(self) -> list[tuple[int, int]]:
        """(turn number, index in `messages`) of the model's messages."""
        places = [place for place, message in enumerate(self.messages) if message.get("role") == "assistant"]
        return list(zip(self.message_turns, places[-len(self.message_turns) :]))

    @classmethod
    def of(cls, trajectory: Trajectory) -> TrajectoryView:
        """Takes a snapshot of `trajectory`."""
        sampled = sum(len(each.token_ids) for each in trajectory.segments if each.provenance is Provenance.SAMPLED)
        return cls(
            messages=tuple(copy.deepcopy(trajectory.messages)),
            tool_calls=tuple(copy.deepcopy(trajectory.tool_calls)),
            stop_reason=trajectory.stop_reason.value,
            num_turns=trajectory.num_turns,
            assistant_turns=trajectory.assistant_turns,
            user_turns=trajectory.user_turns,
            step_rewards=tuple(trajectory.rewards.steps),
            tool_rewards=dict(trajectory.rewards.final),
            prompt_tokens=len(trajectory.prompt_ids),
            response_tokens=trajectory.response_length,
            sampled_tokens=sampled,
            message_turns=tuple(trajectory.message_turns),
            extra_fields=copy.deepcopy(trajectory.extra_fields),
            compacted=trajectory.first_turn > 0,
        )


def opening_of(prompt: str) -> str:
    """Returns the tag that a prompt's text ends with, or ""."""
    found = _OPENING.search(prompt[-_TAG_CHARS:])
    return found[1] if found else ""


def with_opening(text: str, trajectory: Any, *tags: str) -> str:
    """Returns what the model wrote, behind the tag that its prompt ends with, if that is one of `tags`."""
    opened = getattr(trajectory, "opened", "")
    return opened + text if opened in {f"<{tag}>" for tag in tags} else text


def asked_in(content: Any, compacted: bool) -> str:
    """Returns the text of a user's message; in a `compacted` conversation without the summary that the model wrote below it.
    In any other, a line like that above a summary is the user's own."""
    whole = text_of(content)
    text, found, _ = whole.partition(f"{SUMMARY}\n")
    return text.removesuffix("\n") if compacted and found else whole


def question_of(trajectory: TrajectoryView) -> str:
    """Returns what the user asked, before the model's first turn (see `asked_in`). Later user messages are no question:
    templates without a tool role show tool answers in them."""
    users = (each.get("content") for each in trajectory.prompt if each.get("role") == "user")
    return "\n".join(asked_in(content, getattr(trajectory, "compacted", False)) for content in users)
