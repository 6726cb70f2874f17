"""`Compaction`: a conversation that outgrows `multi_turn.compact.at_tokens` goes on from a summary that the model writes.

The summary is a sampled turn like any other: it ends a sequence of the rollout, and is trained on at the rollout's reward.
The next sequence begins with the first prompt, the summary below its last user message, and what is kept of the end.

Invariant: what is kept is the very ids that the model saw and sampled, never a rendering of their text; they are part of the
new prompt, so that every sampled token is trained on once.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

from etude.chat import ChatTemplate
from etude.chat.placeholders import SUMMARY, append_to_last_user
from etude.options import CompactOptions
from etude.trajectory import Run, Trajectory

if TYPE_CHECKING:
    from etude.schemas import ImageInput


class Tail(NamedTuple):
    """The end of a conversation from a turn of the model's on: its ids, and where it begins in the messages and images."""

    ids: list[int]
    message: int
    image: int


class _Turn(NamedTuple):
    """A turn of the model's: its number, and where it begins in the messages, the context's ids and the images."""

    number: int
    message: int
    place: int
    image: int


@dataclass
class Compaction:
    """The state of a conversation that may be compacted.

    Attributes:
        question: the messages of the first prompt, and `images` theirs.
        earlier: the sequences that ended with a summary, in time order.
    """

    question: list[dict[str, Any]] = field(default_factory=list)
    images: list[ImageInput] = field(default_factory=list)
    earlier: list[Trajectory] = field(default_factory=list)
    _turns: list[_Turn] = field(default_factory=list)  # of the model's, in the context
    _context: list[int] = field(default_factory=list)  # as it would go on without the request for a summary
    _messages: int = 0  # in that

    def begin(self, trajectory: Trajectory) -> None:
        """Notes the first prompt."""
        self.question, self.images = list(trajectory.messages), list(trajectory.images)

    def mark_turn(self, trajectory: Trajectory) -> None:
        """Notes that a turn of the model's begins here."""
        place = len(trajectory.prompt_ids) + trajectory.response_length
        self._turns.append(_Turn(trajectory.assistant_turns, len(trajectory.messages), place, len(trajectory.images)))

    def ask(self, trajectory: Trajectory, context: Sequence[Run]) -> None:
        """Notes the context as it is, plus `context`, before the request for a summary is appended."""
        self._context = trajectory.context_ids() + [token for ids, _ in context for token in ids]
        self._messages = len(trajectory.messages)

    def kept(self, head: int, options: CompactOptions) -> Tail:
        """Returns the end of the conversation that stays after a new prompt of `head` tokens: at least `keep_last` messages
        from a turn of the model's on, or fewer to stay within `at_tokens`."""
        assert options.at_tokens is not None
        first = self._messages - options.keep_last
        before = [number for number, turn in enumerate(self._turns) if turn.message <= first]
        turns = self._turns[max(before, default=0) :] if options.keep_last else []
        for turn in turns:
            if head + len(self._context) - turn.place <= options.at_tokens:
                return Tail(self._context[turn.place :], turn.message, turn.image)
        return Tail([], self._messages, -1)

    def restart(self, trajectory: Trajectory, messages: list[dict[str, Any]], head: list[int], tail: Tail) -> int:
        """Ends the sequence with the summary, and lets `trajectory`, which keeps rewards and calls, go on as a new one.
        Returns by how much the numbers of kept messages move."""
        self.earlier.append(
            Trajectory(
                trajectory.request_id,
                trajectory.prompt_ids,
                trajectory.segments,
                messages=trajectory.messages,
                assistant_turns=trajectory.assistant_turns,
                user_turns=trajectory.user_turns,
                images=trajectory.images,
                first_turn=trajectory.first_turn,
                kept_turns=trajectory.kept_turns,
            )
        )
        shift, moved = len(head) - (len(self._context) - len(tail.ids)), len(messages) - tail.message
        images = trajectory.images[tail.image :] if tail.ids else []
        image = len(self.images) - tail.image
        self._turns = [
            _Turn(turn.number, turn.message + moved, turn.place + shift, turn.image + image)
            for turn in self._turns
            if turn.message >= tail.message
        ]
        trajectory.messages = messages + trajectory.messages[tail.message : self._messages]
        trajectory.images = [*self.images, *images]
        trajectory.prompt_ids, trajectory.segments = head + tail.ids, []
        trajectory.first_turn, trajectory.kept_turns = trajectory.assistant_turns, [turn.number for turn in self._turns]
        return moved


def request_of(options: CompactOptions) -> dict[str, Any]:
    """Returns the message that asks for a summary."""
    return {"role": "user", "content": options.prompt}


def summary_room(options: CompactOptions, chat: ChatTemplate) -> int:
    """Returns how many tokens the request for a summary and the summary take at most.

    Raises:
        ConfigError: the template cannot render the request.
    """
    return sum(len(ids) for ids, _ in chat.context_ids([request_of(options)])) + options.summary_tokens


def with_summary(messages: Sequence[dict[str, Any]], summary: str) -> list[dict[str, Any]]:
    """Returns the messages of the first prompt with a summary below the last user message."""
    copied = [dict(message) for message in messages]
    append_to_last_user(copied, f"{SUMMARY}\n{summary}")
    return copied
