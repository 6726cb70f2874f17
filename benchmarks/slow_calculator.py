"""The quickstart's calculator with log-normal latency: a plug-in for `async_training.py`.

The latency depends only on the trajectory's name, so that all runs of one seed wait equally long for the same calls.
"""

from __future__ import annotations

import asyncio
import random
from typing import Any

from etude.schemas import OpenAIFunctionToolSchema, ToolResponse
from etude.tools.builtin.calculator import Calculator


class SlowCalculator(Calculator):
    """Takes its latency from `config.median_seconds` and `config.sigma` (of the logarithm)."""

    def __init__(self, config: dict[str, Any], tool_schema: OpenAIFunctionToolSchema | None = None) -> None:
        own = dict(config)
        self._median, self._sigma = float(own.pop("median_seconds")), float(own.pop("sigma"))
        super().__init__(own, tool_schema)

    async def execute(
        self, instance_id: str, parameters: dict[str, Any], **execute_kwargs: Any
    ) -> tuple[ToolResponse, float, dict[str, Any]]:
        """Returns the calculator's answer, after a delay."""
        await asyncio.sleep(self._median * random.Random(instance_id).lognormvariate(0.0, self._sigma))
        return await super().execute(instance_id, parameters, **execute_kwargs)
