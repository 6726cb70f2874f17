"""The tool: what the model may call. Replace `Price` by a tool of your own; tools.yaml names the class.

One object serves all trajectories at once, so what belongs to one is kept apart: `StatefulTool` keeps what `begin` returns,
one per trajectory, under its instance id. What does not depend on the trajectory needs no class at all: a plain function
with `@function_tool` (docs/tools.md) will do.
"""

from __future__ import annotations

from typing import Any

from etude.tools import StatefulTool, ToolError, ToolResponse


class Price(StatefulTool[dict[str, int]]):
    """Says what one piece of an item costs in this trajectory's shop."""

    async def begin(self, **create_kwargs: Any) -> dict[str, int]:
        """Once a trajectory: what the row gives in `tools_kwargs.price.create_kwargs` arrives here."""
        return dict(create_kwargs["prices"])

    async def execute(
        self, instance_id: str, parameters: dict[str, Any], **execute_kwargs: Any
    ) -> tuple[ToolResponse, float, dict[str, Any]]:
        """One call of the model: (what it reads, a reward for this step, metrics).

        `parameters` fit the schema in tools.yaml already; others are refused before they get here.
        """
        prices = self._instance_dict[instance_id]
        item = parameters["item"]
        if item not in prices:
            # The model's mistake: it reads this and may try again. Any other exception is a bug of yours, and a lost
            # connection or a time-out is nobody's: the trajectory is then run again, never scored as wrong.
            raise ToolError(f"there is no '{item}' here; the shop has {', '.join(sorted(prices))}")
        return ToolResponse(text=str(prices[item])), 0.0, {}
