"""`AgentLoopBase`: how one trajectory is rolled out, and what a loop is given to do it with.

A loop is written against `server_manager.generate(request_id=…, prompt_ids=…, sampling_params=…)`. What it gets is a
`TrajectoryClient`: it speaks to the engine for exactly one trajectory and remembers every sampled token.

Invariant: the tokens a loop marks as sampled (mask 1) are, in order, tokens that its client drew; `TrajectoryClient.check`
refuses an output for which that does not hold. Training on tokens nobody sampled is a bug, never a warning.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from etude.agents.options import RolloutOptions
from etude.chat import ChatTemplate, ToolParser
from etude.errors import EtudeError
from etude.inference import Engine, SamplingParams, TokenOutput
from etude.registry import Registry
from etude.tools import BaseTool
from etude.trajectory import AgentLoopOutput

AGENT_LOOPS: Registry[type[AgentLoopBase]] = Registry("agent loop")
register = AGENT_LOOPS.register


@dataclass(frozen=True)
class AgentContext:
    """What the trajectories of one worker share. `config` is the whole resolved configuration, for users' loops."""

    config: Any
    options: RolloutOptions
    tokenizer: Any
    chat: ChatTemplate
    parser: ToolParser
    tools: Mapping[str, BaseTool] = field(default_factory=dict)


class TrajectoryClient:
    """One trajectory's door to the engine.

    Seeds: turn t of a trajectory draws with a seed made from the trajectory's seed and t, so that no two turns share
    random numbers, and no loop has to think of it.
    """

    def __init__(self, engine: Engine, request_id: str) -> None:
        self._engine, self.request_id = engine, request_id
        self.outputs: list[TokenOutput] = []

    async def generate(
        self,
        request_id: str | None = None,
        *,
        prompt_ids: Sequence[int],
        sampling_params: SamplingParams | Mapping[str, Any],
        **media: Any,
    ) -> TokenOutput:
        """Samples one turn. Whatever `request_id` a loop made up, the engine knows the trajectory by its own."""
        params = SamplingParams.of(sampling_params)
        seed = (params.seed * 1_000_003 + 97 * len(self.outputs)) & 0x7FFFFFFFFFFFFFFF
        output = await self._engine.generate(self.request_id, prompt_ids, replace(params, seed=seed), **media)
        self.outputs.append(output)
        return output

    def check(self, output: AgentLoopOutput) -> None:
        """Raises EtudeError when the output marks a token as sampled that the engine did not sample there."""
        drawn = [token for turn in self.outputs for token in turn.token_ids]
        claimed = [token for token, mask in zip(output.response_ids, output.response_mask) if mask]
        if claimed != drawn[: len(claimed)]:
            place = next(i for i, (a, b) in enumerate(zip([*claimed, None], [*drawn, None])) if a != b)
            raise EtudeError(
                f"the agent loop marked token {claimed[place]} (masked token {place} of {self.request_id}) as sampled, "
                "but the engine did not sample it: keep token_ids as generate() returned them"
            )


class AgentLoopBase(ABC):
    """Base class of agent loops; one object a trajectory.

    Subclasses registered with `@register("name")` are chosen by a row's `agent_name`. They may keep state on `self`.
    """

    def __init__(
        self, trainer_config: AgentContext, server_manager: TrajectoryClient, tokenizer: Any, **_: Any
    ) -> None:
        self.context = trainer_config
        self.config = trainer_config.config
        self.server_manager = server_manager
        self.tokenizer = tokenizer
        self.chat = trainer_config.chat
        self.tools = trainer_config.tools

    @abstractmethod
    async def run(self, sampling_params: dict[str, Any], **row: Any) -> AgentLoopOutput:
        """Rolls out one trajectory.

        Args:
            sampling_params: `temperature`, `top_p`, `top_k`, `max_tokens`, `stop_token_ids`, `seed`.
            row: the dataset row (`raw_prompt`, `tools_kwargs`, `extra_info` …) and `request_id`.

        Raises:
            InfrastructureError: the world broke; the trajectory is retried from fresh state.
        """
