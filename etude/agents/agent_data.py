"""State of one run of an agent loop: `AgentState`, the states; `Conversation`, which the handlers and tools of `tool_agent`
get as `agent_data`; and `AgentData`, plain data with the same field names for custom loops.

Invariant: the tokens, messages, turns and rewards of a `Conversation` are views of the trajectory, and only the trajectory
is trained on. `AgentData` is passive: its loop must keep its lists in sync with what was sampled.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import Any

from etude.agents.compaction import Compaction
from etude.chat import ParsedResponse
from etude.environments import EnvironmentSession
from etude.errors import EtudeError
from etude.inference import SamplingParams
from etude.schemas import FunctionCall
from etude.tools import TokenLimit, ToolSession
from etude.trajectory import StopReason, Trajectory


class AgentState(Enum):
    """States of a tool-calling loop."""

    PENDING = "pending"
    GENERATING = "generating"
    PROCESSING_TOOLS = "processing_tools"
    INTERACTING = "interacting"
    COMPACTING = "compacting"
    TERMINATED = "terminated"


@dataclass
class AgentData:
    """State that a loop keeps from one state to the next, with verl's field names.

    `prompt_ids` is usually the whole context so far; `response_mask` and `response_logprobs` cover everything since the
    first prompt; `response_ids` and `tool_calls` are those of the current turn.
    """

    messages: list[dict[str, Any]]
    image_data: list[Any] | None = None
    metrics: dict[str, float] = field(default_factory=dict)
    request_id: str = ""
    tools_kwargs: dict[str, Any] = field(default_factory=dict)
    prompt_ids: list[int] = field(default_factory=list)
    response_ids: list[int] = field(default_factory=list)
    response_mask: list[int] = field(default_factory=list)
    response_logprobs: list[float] = field(default_factory=list)
    turn_scores: list[float] = field(default_factory=list)
    tool_rewards: list[float] = field(default_factory=list)
    user_turns: int = 0
    assistant_turns: int = 0
    tool_calls: list[FunctionCall] = field(default_factory=list)
    extra_fields: dict[str, Any] = field(default_factory=dict)


def _view(read: Callable[[Conversation], Any], instead: str) -> Any:
    """Makes a read-only property of `Conversation`; the error on assignment says what to do instead."""

    def refuse(data: Conversation, value: object) -> None:
        raise EtudeError(f"what agent_data says of its tokens and turns is read only here: {instead}")

    return property(read, refuse)


_BY_APPEND = "add tokens with  agent_data.trajectory.append(ids, provenance, log_probs=…)"
_BY_REWARD = "add a reward with  agent_data.trajectory.add_step_reward(source, value)"


@dataclass
class Conversation:
    """State of one run: the growing trajectory, and the current turn.

    verl-style handlers and tools get it as `agent_data`, with the field names of `AgentData`. Its tokens, messages and
    rewards are read-only tuples, copied from the trajectory. A subclass or tool may keep its own state in `extra_fields`
    for the lifetime of the trajectory.
    """

    trajectory: Trajectory
    session: ToolSession
    sampling: SamplingParams
    tool_schemas: list[dict[str, Any]]
    token_limit: TokenLimit  # truncates tool results that leave too little room
    tools_kwargs: Mapping[str, Any] = field(default_factory=dict)
    extra_fields: dict[str, Any] = field(default_factory=dict)
    environment: EnvironmentSession | None = None  # a user, a game, a server: whoever answers turns
    context: Any = None  # the loop's `AgentContext`
    started: float = field(default_factory=time.perf_counter)
    parsed: ParsedResponse = field(default_factory=lambda: ParsedResponse("", [], []))
    spoken: dict[int, str] = field(default_factory=dict)  # by message index: a turn without reasoning and calls
    tool_answers: set[int] = field(default_factory=set)  # indices of messages that answer calls, in any role
    sampled: Sequence[int] = ()  # the last turn's ids
    cut_by: StopReason | None = None  # the budget that truncated the last turn
    malformed_in_a_row: int = 0
    compaction: Compaction = field(default_factory=Compaction)

    request_id = _view(lambda data: data.trajectory.request_id, "it names the trajectory")
    metrics = _view(lambda data: data.trajectory.timings, "set its entries")
    messages = _view(lambda data: tuple(data.trajectory.messages), "they are what the trajectory's tokens say")
    image_data = _view(lambda data: tuple(data.trajectory.images) or None, "they are what the trajectory's tokens show")
    prompt_ids = _view(lambda data: tuple(data.trajectory.context_ids()), _BY_APPEND)
    response_ids = _view(lambda data: tuple(data.sampled), _BY_APPEND)
    response_mask = _view(lambda data: tuple(data.trajectory.response_mask), _BY_APPEND)
    response_logprobs = _view(lambda data: tuple(data.trajectory.response_log_probs), _BY_APPEND)
    user_turns = _view(lambda data: data.trajectory.user_turns, "feed_back counts them")
    assistant_turns = _view(lambda data: data.trajectory.assistant_turns, "sample counts them")
    tool_rewards = _view(lambda data: tuple(value for _, _, value in data.trajectory.rewards.steps), _BY_REWARD)
    turn_scores = tool_rewards

    @property
    def tool_calls(self) -> list[FunctionCall]:
        """The calls of the current turn; a handler may replace them before they run."""
        return self.parsed.calls

    @tool_calls.setter
    def tool_calls(self, calls: Sequence[FunctionCall]) -> None:
        self.parsed = replace(self.parsed, calls=list(calls))

    def messages_for_user(self) -> list[dict[str, Any]]:
        """Returns the messages for an interaction; see `BaseInteraction.generate_response`."""
        shown = []
        for number, message in enumerate(self.trajectory.messages):
            if number in self.spoken:
                message = {**message, "spoken": self.spoken[number]}
            elif number in self.tool_answers:
                message = {**message, "role": "tool"}
            shown.append(message)
        return shown


def end(data: Conversation, reason: StopReason) -> AgentState:
    data.trajectory.stop_reason = reason
    return AgentState.TERMINATED
