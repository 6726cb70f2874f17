"""`gsm8k`: a user who says whether the answer is correct, and ends the conversation once it is."""

from __future__ import annotations

from typing import Any

from etude.agents.interactions.base import BaseInteraction
from etude.errors import ConfigError
from etude.rewards.gsm8k import compute_score
from etude.rewards.truth import is_missing

CORRECT = "Your response is correct!"
INCORRECT = "Your response is incorrect! You need to reflect on your answer and try again."


class Gsm8kInteraction(BaseInteraction):
    """Judges what the assistant last said, its reasoning aside; the row's `interaction_kwargs` hold the `ground_truth`.

    The conversation ends with the first correct answer, reward 1.0; a wrong one gets 0.0. `config.method` is
    `strict` (the answer follows `####`; a message without it is read as if it began with it) or `flexible` (the last
    number counts).
    """

    def __init__(self, config: dict[str, Any]) -> None:
        """Raises ConfigError if `config` has an unknown key or method."""
        super().__init__(config)
        self.check_keys(config, ["method"])
        self._method = config.get("method", "strict")
        if self._method not in ("strict", "flexible"):
            raise ConfigError(f"config.method must be strict or flexible, not {self._method!r}")
        self._conversations: dict[str, dict[str, str]] = {}

    async def start_interaction(
        self, instance_id: str | None = None, ground_truth: str | None = None, **kwargs: Any
    ) -> str:
        """Stores the `ground_truth`; raises ValueError if there is none."""
        if is_missing(ground_truth):
            raise ValueError("the row's interaction_kwargs need a 'ground_truth'")
        instance_id = await super().start_interaction(instance_id)
        self._conversations[instance_id] = {"response": "", "ground_truth": str(ground_truth)}
        return instance_id

    async def generate_response(
        self, instance_id: str, messages: list[dict[str, Any]], **kwargs: Any
    ) -> tuple[bool, str, float, dict[str, Any]]:
        """See the class."""
        last: dict[str, Any] = next((m for m in reversed(messages) if m.get("role") == "assistant"), {})
        said = str(last.get("spoken", last.get("content")) or "")
        self._conversations[instance_id]["response"] = said if "####" in said else f"#### {said}"
        score = await self.calculate_score(instance_id)
        return (True, CORRECT, 1.0, {}) if score == 1.0 else (False, INCORRECT, 0.0, {})

    async def calculate_score(self, instance_id: str, **kwargs: Any) -> float:
        """Returns 1.0 if the last response is correct, else 0.0."""
        conversation = self._conversations[instance_id]
        return compute_score(conversation["response"], conversation["ground_truth"], method=self._method)

    async def finalize_interaction(self, instance_id: str, **kwargs: Any) -> None:
        """Deletes the conversation's state."""
        self._conversations.pop(instance_id, None)
