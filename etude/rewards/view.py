"""`TrajectoryView`: what a scorer sees of a finished trajectory, beside its text.

Invariant: a copy. Whatever a scorer does with it, the trajectory stays as it was; it holds plain data only, so that it
crosses to other processes.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from etude.trajectory import Provenance, ToolCallRecord, Trajectory


@dataclass(frozen=True)
class TrajectoryView:
    """One trajectory.

    `messages` are the whole conversation as the chat template saw it, `tool_calls` the calls in order, each with `turn`,
    `name`, `arguments` (JSON text), `response`, `reward`, `error` and `seconds`. `step_rewards` holds (turn, source, value),
    `tool_rewards` each tool's `calc_reward`. `sampled_tokens` were written by the model, `response_tokens` count all after
    the prompt. `stop_reason` is the value of a `StopReason`.
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
    extra_fields: Mapping[str, Any] = field(default_factory=dict)

    @property
    def turns(self) -> list[dict[str, Any]]:
        """The assistant's messages in order, each `{"message": …, "tool_calls": the calls it made}`."""
        said = [message for message in self.messages if message.get("role") == "assistant"]
        said = said[len(said) - self.assistant_turns :] if self.assistant_turns < len(said) else said
        return [
            {"message": message, "tool_calls": [call for call in self.tool_calls if call.turn == turn]}
            for turn, message in enumerate(said)
        ]

    @classmethod
    def of(cls, trajectory: Trajectory) -> TrajectoryView:
        """The view of `trajectory` as it is now."""
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
            extra_fields=copy.deepcopy(trajectory.extra_fields),
        )
