"""`BaseInteraction`: a simulated user that replies to the policy, with verl's four methods.

    start_interaction → generate_response* → finalize_interaction

Invariant (kept by `InteractionSession`): one start, then any number of replies, then exactly one `finalize_interaction`,
however the trajectory ends. All trajectories share an interaction object; per-trajectory state is kept by instance id.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any
from uuid import uuid4

from etude.errors import ConfigError
from etude.registry import did_you_mean


class BaseInteraction:
    """Base of all interactions; subclasses override at least `generate_response`.

    Attributes:
        config: the mapping under `config` in the YAML. `InteractionSession` reads two of its keys: `timeout` (seconds per
            call, default 60) and `max_response_chars` (default 100,000).
        name: by which a row's `extra_info.interaction_kwargs.name` selects it.
    """

    def __init__(self, config: dict[str, Any]) -> None:
        self.config = config
        self.name: str = config.get("name", "interaction_agent")

    async def start_interaction(self, instance_id: str | None = None, **kwargs: Any) -> str:
        """Begins a conversation; `kwargs` are the row's `interaction_kwargs` without the name. Returns the id to use."""
        return instance_id or str(uuid4())

    async def generate_response(
        self, instance_id: str, messages: list[dict[str, Any]], **kwargs: Any
    ) -> tuple[bool, str, float, dict[str, Any]]:
        """Replies to the conversation so far.

        Args:
            messages: the conversation. An assistant message's `content` is everything sampled, its `spoken` the same
                without reasoning and tool calls; tool results have the role `tool`.

        Returns:
            Whether the conversation is over, the user's next message (unused if it is), the reward of the assistant's
            last turn, and metrics to keep.

        Raises:
            InfrastructureError: the trajectory is retried from fresh state. Any other exception is treated the same way,
                since a failing interaction is never the model's fault.
        """
        raise NotImplementedError

    @staticmethod
    def check_keys(config: dict[str, Any], known: Sequence[str]) -> None:
        """Checks that `config` has only `known` keys and those common to all interactions; for use in constructors.

        Raises:
            ConfigError: there is another key.
        """
        known = (*known, "name", "timeout", "max_response_chars")
        for key in config:
            if key not in known:
                raise ConfigError(f"unknown key 'config.{key}'{did_you_mean(key, known)}")

    async def calculate_score(self, instance_id: str, **kwargs: Any) -> float:
        """Returns the conversation's current score. Only `generate_response` may use it: the loop never calls it."""
        return 0.0

    async def finalize_interaction(self, instance_id: str, **kwargs: Any) -> None:
        """Releases the conversation's resources."""
