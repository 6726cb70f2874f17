"""`RolloutTree`: all turns of a session, and the training sequences made from it.

A turn's node holds the ids between its parent's last sampled token and its own first one (at a root: the prompt), and the
tokens sampled after them. A path from a root to a leaf is a context that the engine saw.

Invariant: concatenating the ids along a path gives exactly what the engine saw and sampled. Each sampled token is in the
response of exactly one sequence. The main sequence ends with the last turn, and its response covers the whole path; an
earlier one begins its response at the first turn that is in no later sequence, and everything before that is its prompt.

Turns are found by their history. `History.keys[i]` is a digest of everything that messages 0 to i say to the model,
together with tools and sampling; two requests have the same key if and only if they have the same history. A history stays
the same if the client drops empty values, adds None, omits reasoning, calls `system` `developer`, renames call ids, writes
text as a list of parts, reorders the keys of a call's arguments, or strips whitespace around the model's text. Swapping two
tool results between the calls of a turn makes a different history, and so does an image with different bytes. Reasoning is
in no key, since it may be omitted; a history that edits it is another one.
"""

from __future__ import annotations

import hashlib
import json
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

from etude.agents.gateway.messages import ImageHeader, Message, match_answers
from etude.agents.gateway.request import ChatRequest
from etude.agents.gateway.turn import ParsedTurn
from etude.agents.tool_messages import malformed_record
from etude.chat.placeholders import text_of
from etude.trajectory import Provenance, Run, StopReason, ToolCallRecord, Trajectory

if TYPE_CHECKING:
    from etude.schemas import ImageInput


@dataclass(frozen=True, eq=False)
class Turn:
    """One sampled choice.

    Attributes:
        parent: the turn that it continues; None at a root.
        order: (request number, minus the choice's index); sorts turns by time, a request's first choice last.
        context: the ids between the parent and this turn; at a root, the prompt.
        new_messages: the messages that are new since the parent; tool messages carry the ids of the parent's calls.
        images: the images in `new_messages`.
        message: the assistant message.
        parsed: the sampled output, parsed.
        cut_by: the rollout budget, or `TURN_LENGTH` for the request's own limit, that truncated the turn, if any.
        sampling: temperature, top_p and top_k; the same along a path.
        seconds: sampling time.
        with_tools: whether its request had tools; the same along a path.
        role: which of several agents asked; the same along a path.
    """

    parent: Turn | None
    order: tuple[int, int]
    context: list[Run]
    new_messages: list[Message]
    images: tuple[ImageInput, ...]
    message: Message
    parsed: ParsedTurn
    cut_by: StopReason | None
    sampling: dict[str, float]
    seconds: float
    with_tools: bool = False
    role: str = ""

    def path(self) -> list[Turn]:
        """The turns from the root to this one."""
        turns: list[Turn] = []
        turn: Turn | None = self
        while turn is not None:
            turns.append(turn)
            turn = turn.parent
        return turns[::-1]

    def ids(self) -> list[int]:
        """All token ids of the path."""
        ids: list[int] = []
        for turn in self.path():
            for run, _ in turn.context:
                ids += run
            ids += turn.parsed.output.token_ids
        return ids

    def malformed_in_a_row(self) -> int:
        """Number of malformed calls on the path since the last turn with a valid one."""
        count = 0
        for turn in reversed(self.path()):
            if turn.parsed.calls:
                break
            count += len(turn.parsed.errors)
        return count

    def all_images(self) -> tuple[ImageInput, ...]:
        """All images of the path, in order."""
        return tuple([image for turn in self.path() for image in turn.images])


@dataclass(frozen=True)
class Completion:
    """An answered request: its prompt's token ids, its name, and its turns, one per choice."""

    request: ChatRequest
    prompt_ids: list[int]
    name: str
    turns: list[Turn]


@dataclass
class RolloutTree:
    """The turns of a session in the order in which they were recorded, and its rewards."""

    turns: list[Turn] = field(default_factory=list)
    rewards: list[tuple[Turn, str, float]] = field(default_factory=list)
    _after: dict[bytes, list[Turn]] = field(default_factory=lambda: defaultdict(list))

    def add(self, turn: Turn, key: bytes) -> None:
        """Adds a turn; `key` identifies the history up to and including its assistant message."""
        self.turns.append(turn)
        self._after[key].append(turn)

    def find(self, key: bytes, history: Sequence[Message]) -> Turn | None:
        """Returns the turn that a history ends with; None if there is none, or if the history edits its reasoning. Of
        several with the same text, takes the one whose call ids and reasoning match best, then one not continued yet."""
        sent = [message for message in reversed(history) if message["role"] == "assistant"]
        matches = [turn for turn in self._after.get(key, ()) if not _edits_reasoning(turn, sent)]
        if len(matches) < 2:
            return matches[0] if matches else None
        continued = {turn.parent for turn in self.turns}
        return max(matches, key=lambda turn: (*_likeness(turn, sent), turn not in continued))

    @property
    def sampled(self) -> int:
        """Number of tokens sampled in all turns."""
        return sum(len(turn.parsed.output.token_ids) for turn in self.turns)

    def sequences(
        self, request_id: str, train: Literal["all", "tools", "main"] = "all", *, by_role: bool = True
    ) -> list[Trajectory]:
        """Returns the sequences in time order. The last one of each role, whose turns are numbered first, carries the
        rewards for the role's turns; without `by_role`, the very last one, the main sequence, those for all. `train` is the
        key `openai_agent.train`."""
        continued = {turn.parent for turn in self.turns}
        leaves = sorted((turn for turn in self.turns if turn not in continued), key=lambda turn: turn.order)
        if train != "all":
            leaves = [leaf for leaf in leaves if leaf.with_tools] or leaves
        if train == "main":
            leaves = leaves[-1:]
        numbers: dict[Turn, int] = {}
        of_role: Counter[str] = Counter()
        made = []
        for leaf in reversed(leaves):
            path = leaf.path()
            new = [turn for turn in path if turn not in numbers]
            made.append(_sequence(request_id, path, len(path) - len(new), of_role[leaf.role], numbers))
            numbers |= {turn: of_role[leaf.role] + place for place, turn in enumerate(new)}
            of_role[leaf.role] += len(new)
        last = {leaf.role: (leaf, sequence) for leaf, sequence in zip(leaves, reversed(made))}
        for turn, name, value in self.rewards:
            if (carrier := last.get(turn.role) if by_role else (leaves[-1], made[0])) is not None:
                known = turn.role == carrier[0].role and turn in numbers
                carrier[1].rewards.steps.append((numbers[turn if known else carrier[0]], name, value))
        return made[::-1]


def _edits_reasoning(turn: Turn, sent: Sequence[Message]) -> bool:
    """Whether the assistant messages `sent`, last first, change reasoning on the turn's path; omitting it is no change."""
    for message, recorded in zip(sent, reversed(turn.path())):
        thoughts = message.get("reasoning_content", "").strip()
        if thoughts and thoughts != recorded.message.get("reasoning_content", "").strip():
            return True
    return False


def _likeness(turn: Turn, sent: Sequence[Message]) -> tuple[int, int, int]:
    """How many of the assistant messages `sent`, last first, agree with those of the turn's path in (call ids, reasoning,
    exact text); they are equivalent."""
    same_ids = same_thoughts = same_texts = 0
    for message, recorded in zip(sent, reversed(turn.path())):
        pair = (message, recorded.message)
        calls = [each.get("tool_calls", ()) for each in pair]
        ids = [[call.get("id") for call in each] for each in calls]
        arguments = [[call["function"]["arguments"] for call in each] for each in calls]
        thoughts = [each.get("reasoning_content", "").strip() for each in pair]
        same_ids += ids[0] == ids[1]
        same_thoughts += thoughts[0] == thoughts[1]
        same_texts += message["content"] == recorded.message["content"] and arguments[0] == arguments[1]
    return same_ids, same_thoughts, same_texts


def _sequence(
    request_id: str, path: Sequence[Turn], first: int, number: int, numbers: Mapping[Turn, int]
) -> Trajectory:
    """Makes a trajectory of a path; its turns from index `first` on, numbered from `number` on, are the response. `numbers`
    are those of the turns before."""
    before = path[first].parent
    prompt = [] if before is None else before.ids()
    for ids, _ in path[first].context:
        prompt += ids
    last = path[-1]
    trajectory = Trajectory(
        request_id, prompt, sampling=dict(last.sampling), images=list(last.all_images()), role=last.role
    )
    trajectory.first_turn = trajectory.assistant_turns = number
    trajectory.kept_turns = [numbers[turn] for turn in path[:first]]
    for number, turn in enumerate(path):
        trajectory.messages += [*turn.new_messages, turn.message]
        if number < first:
            continue
        for ids, provenance in turn.context if number > first else ():
            trajectory.append(ids, provenance)
        trajectory.user_turns += number > first
        output = turn.parsed.output
        trajectory.append(
            output.token_ids, Provenance.SAMPLED, log_probs=output.log_probs, weight_versions=output.weight_versions
        )
        trajectory.tool_calls += _calls(trajectory.assistant_turns, turn, path[number + 1 : number + 2])
        trajectory.assistant_turns += 1
        trajectory.timings["generate_sequences"] = trajectory.timings.get("generate_sequences", 0.0) + turn.seconds
    trajectory.stop_reason = path[-1].cut_by or StopReason.COMPLETED
    return trajectory


def _calls(number: int, turn: Turn, following: Sequence[Turn]) -> list[ToolCallRecord]:
    """Records a turn's tool calls with the agent's results for them, then its malformed calls."""
    new_messages = following[0].new_messages if following else []
    places = match_answers([turn.message, *new_messages])[1:]
    answers = {place: text_of(message["content"]) for place, message in zip(places, new_messages)}
    made = [
        ToolCallRecord(
            number,
            call.name,
            call.arguments,
            answers.get(place, ""),
            error="unknown_tool" if call.name in turn.parsed.unknown else None,
            source="agent" if place in answers else "unanswered",
        )
        for place, call in enumerate(turn.parsed.calls)
    ]
    return made + [malformed_record(number, error) for error in turn.parsed.errors]


class History:
    """A request's messages with their images and keys (see the module), and the call that each answers, as of
    `match_answers`; `ground` identifies everything else that the prompt depends on."""

    def __init__(self, messages: list[Message], images: Sequence[Sequence[ImageHeader]], ground: str) -> None:
        self.messages, self.images, self.answered = messages, images, match_answers(messages)
        self.key = hashlib.blake2b(ground.encode("utf-8", "surrogatepass"), digest_size=16).digest()
        self.keys: list[bytes] = []
        for message, shown, place in zip(messages, images, self.answered):
            self.keys.append(self.after(message, place, [image.digest for image in shown]))
            self.key = self.keys[-1]

    def after(self, message: Message, place: int | None = None, images: Sequence[bytes] = ()) -> bytes:
        """Returns the key of this history plus `message`, which answers the call at `place`, if any, and has `images`."""
        role, content = message["role"], message["content"]
        fields = [role, content, message.get("name"), place]
        if role == "assistant":
            functions = [call["function"] for call in message.get("tool_calls", ())]
            fields = [role, content.strip(), [[each["name"], _sort_keys(each["arguments"])] for each in functions]]
        return hashlib.blake2b(b"".join([self.key, json.dumps(fields).encode(), *images]), digest_size=16).digest()


def _sort_keys(arguments: str) -> str:
    """Sorts the keys of a JSON text; returns anything else unchanged."""
    try:
        return json.dumps(json.loads(arguments), sort_keys=True)
    except (ValueError, RecursionError):
        return arguments
