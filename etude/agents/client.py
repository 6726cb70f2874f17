"""`TrajectoryClient`: one trajectory's door to the engine, and the witness of what was drawn through it.

Invariant: a token that an output marks as sampled (mask 1) was drawn by the engine as the continuation of exactly the ids
that stand before it; `check` refuses an output for which that does not hold. Training on tokens nobody sampled, or
sampled after something else, is a bug, never a warning. A loop may still drop a turn or mask one out.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from etude.errors import ConfigError, EngineError, EtudeError, InfrastructureError
from etude.inference import Engine, SamplingParams, TokenOutput
from etude.trajectory import AgentLoopOutput


class TrajectoryClient:
    """What agent loops call their `server_manager`.

    Seeds: turn t of a trajectory draws with a seed made from the trajectory's seed and t, so that no two turns share
    random numbers, and no loop has to think of it.

    Attributes:
        outputs: what the engine returned, turn by turn.
    """

    def __init__(self, engine: Engine, request_id: str) -> None:
        self._engine, self.request_id = engine, request_id
        self._prompts: list[list[int]] = []
        self._ended = False
        self.outputs: list[TokenOutput] = []

    async def generate(
        self,
        request_id: str | None = None,
        *,
        prompt_ids: Sequence[int],
        sampling_params: SamplingParams | Mapping[str, Any],
        **media: Any,
    ) -> TokenOutput:
        """Samples one turn. Whatever `request_id` a loop made up, the engine knows the trajectory by its own.

        Raises:
            ConfigError: an unknown sampling parameter, or media that engines do not take.
            EngineError: the engine failed, or aborted the request.
            InfrastructureError: the trajectory is over (a loop that outlived its time limit asks on).
        """
        if self._ended:
            raise InfrastructureError(f"trajectory {self.request_id} is over: nothing more is sampled for it")
        params = SamplingParams.of(sampling_params)
        seed = (params.seed * 1_000_003 + 97 * len(self.outputs)) & 0x7FFFFFFFFFFFFFFF
        asked = list(prompt_ids)
        output = await self._engine.generate(self.request_id, asked, replace(params, seed=seed), **_images(media))
        if output.stop_reason == "aborted":
            raise EngineError(f"the engine aborted the request of trajectory {self.request_id}")
        self._prompts.append(asked)
        self.outputs.append(output)
        return output

    def end(self) -> None:
        """Nothing more may be sampled."""
        self._ended = True

    def check(self, output: AgentLoopOutput) -> None:
        """Raises EtudeError when the output marks a token as sampled that the engine did not sample there."""
        drawn = self._drawn(output)
        for place, (token, mask) in enumerate(zip(output.response_ids, output.response_mask)):
            if mask and place not in drawn:
                raise EtudeError(
                    f"the agent loop marked response token {place} (id {token}) of {self.request_id} as sampled, but the "
                    "engine did not sample it after the ids before it: keep token_ids as generate() returned them"
                )

    def log_probs(self, output: AgentLoopOutput) -> list[float]:
        """For each response token its log-prob as the engine drew it there; 0.0 for the others."""
        drawn = self._drawn(output)
        return [drawn.get(place, 0.0) for place in range(len(output.response_ids))]

    def _drawn(self, output: AgentLoopOutput) -> dict[int, float]:
        """Response positions whose token the engine drew right there, with its log-prob."""
        start = len(output.prompt_ids)
        context = [*output.prompt_ids, *output.response_ids]
        drawn: dict[int, float] = {}
        for asked, turn in zip(self._prompts, self.outputs):
            if context[: len(asked)] != asked:
                continue
            following = context[len(asked) :]
            for offset, (token, log_prob) in enumerate(zip(turn.token_ids, turn.log_probs)):
                if offset >= len(following) or following[offset] != token:
                    break
                drawn[len(asked) + offset - start] = log_prob
        return drawn


def _images(media: Mapping[str, Any]) -> dict[str, Any]:
    """Media as engines take them; loops written for verl say `image_data`, and hand on None for what there is not."""
    given = {name: value for name, value in media.items() if value is not None}
    images = given.pop("image_data", given.pop("images", None))
    if given:
        raise ConfigError(f"generate() takes no '{next(iter(given))}'")
    return {} if images is None else {"images": images}
