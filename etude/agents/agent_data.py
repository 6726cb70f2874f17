"""`AgentState` and `AgentData`: the state machine's states, and a place for what a loop of one's own knows of its run.

Invariant: `AgentData` holds plain data under the names that the documents use and does nothing; keeping its lists in
step with what was sampled is the loop's business, and `etude.agents.validation` its judge.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from etude.schemas import FunctionCall


class AgentState(Enum):
    """States of a tool-calling loop."""

    PENDING = "pending"
    GENERATING = "generating"
    PROCESSING_TOOLS = "processing_tools"
    INTERACTING = "interacting"
    TERMINATED = "terminated"

    __hash__ = object.__hash__  # that of an `Enum` is written in Python, and every state looks its successor up


@dataclass
class AgentData:
    """What a loop keeps between its states.

    `prompt_ids` is usually the whole context so far, and `response_mask`, `response_logprobs` grow with what follows the
    first prompt; `response_ids` are those of the turn in hand, and `tool_calls` its calls.
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
