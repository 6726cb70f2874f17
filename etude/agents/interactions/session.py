"""`InteractionSession`: one trajectory's conversation with an interaction.

Invariant: `start_interaction` is called once, and then `finalize_interaction` exactly once, however the trajectory ends,
including cancellation; no call takes longer than the interaction's `timeout`; a failure is an `InfrastructureError`, never a
reward.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any

from etude.agents.interactions.base import BaseInteraction
from etude.errors import ConfigError, InfrastructureError, describe_error, one_line
from etude.rewards.number import as_flag, as_reward
from etude.timeouts import uninterrupted, within

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class InteractionLimits:
    """`timeout`: seconds per call; `max_response_chars`: maximum length of a reply."""

    timeout: float = 60.0
    max_response_chars: int = 100_000

    @classmethod
    def from_config(cls, config: Mapping[str, Any], name: str) -> InteractionLimits:
        """Reads the limits from an interaction's `config`.

        Raises:
            ConfigError: one is not a positive number; names it.
        """
        given = {key: config[key] for key in ("timeout", "max_response_chars") if config.get(key) is not None}
        for key, value in given.items():
            if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value < float("inf"):
                raise ConfigError(f"interaction '{name}': config.{key} must be a positive number, not {value!r}")
        return cls(**given)


@dataclass(frozen=True)
class UserTurn:
    """The user's reply: whether the conversation is over, the next message, and the reward of the assistant's turn."""

    over: bool
    text: str
    reward: float
    metrics: dict[str, Any] = field(default_factory=dict)


class InteractionSession:
    """An asynchronous context manager around one conversation; enter it once."""

    def __init__(self, interaction: BaseInteraction, kwargs: Mapping[str, Any], *, request_id: str) -> None:
        self._interaction, self._kwargs = interaction, {k: v for k, v in kwargs.items() if k != "name"}
        self._limits = InteractionLimits.from_config(interaction.config, interaction.name)
        self._id = request_id

    async def __aenter__(self) -> InteractionSession:
        """Starts the conversation.

        Raises:
            InfrastructureError: it could not be started.
        """
        try:
            started = await self._call("start_interaction", self._id, **self._kwargs)
        except BaseException:
            await uninterrupted(self._finalize())  # it may be partly started
            raise
        self._id = started if isinstance(started, str) and started else self._id
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Finalizes the conversation; raises only cancellation."""
        await uninterrupted(self._finalize())

    async def answer(self, messages: Sequence[Mapping[str, Any]]) -> UserTurn:
        """Returns the user's reply to `messages`; the interaction gets a copy, which it may modify.

        Raises:
            InfrastructureError: it failed, timed out, or did not return four values of the right types.
        """
        returned = await self._call("generate_response", self._id, copy.deepcopy(list(messages)), **self._kwargs)
        try:
            over, text, reward, metrics = returned
            if not isinstance(text, str):
                raise TypeError(f"its text is a {type(text).__name__}")
            if reward is None:
                raise TypeError("it has no reward: return 0.0 for a turn that earns nothing")
            return UserTurn(
                as_flag(over),
                text[: self._limits.max_response_chars],
                as_reward(reward, "generate_response"),
                dict(metrics or {}),
            )
        except (TypeError, ValueError) as error:
            raise InfrastructureError(
                f"{self._label('generate_response')} returned no user turn: {one_line(error)}"
            ) from error

    async def _call(self, method: str, *args: Any, **kwargs: Any) -> Any:
        try:
            return await within(self._limits.timeout, getattr(self._interaction, method), *args, **kwargs)
        except Exception as error:
            raise InfrastructureError(f"{self._label(method)} failed: {describe_error(error)}") from error

    def _label(self, method: str) -> str:
        return f"interaction '{self._interaction.name}': {method}"

    async def _finalize(self) -> None:
        try:
            await self._call("finalize_interaction", self._id, **self._kwargs)
        except InfrastructureError as error:
            logger.warning("%s", error)
