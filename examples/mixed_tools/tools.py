"""Two of the three kinds of tools: a class, which keeps something for each trajectory, and a plain function."""

from __future__ import annotations

from typing import Any

from etude.tools import BaseTool, ToolError, ToolResponse, function_tool


class Basket(BaseTool):
    """A shopping basket. Its schema stands in tools.yaml; its final reward says whether what was asked for is in it."""

    def __init__(self, config: dict[str, Any], tool_schema: Any = None) -> None:
        super().__init__(config, tool_schema)
        self._capacity = int(config["capacity"])
        self._held: dict[str, list[str]] = {}
        self._wanted: dict[str, list[str]] = {}

    async def create(
        self, instance_id: str | None = None, wanted: list[str] | None = None, **create_kwargs: Any
    ) -> tuple[str, ToolResponse]:
        """`wanted` comes from the row's tools_kwargs.basket.create_kwargs."""
        assert instance_id is not None
        self._held[instance_id], self._wanted[instance_id] = [], list(wanted or [])
        return instance_id, ToolResponse()

    async def execute(
        self, instance_id: str, parameters: dict[str, Any], **execute_kwargs: Any
    ) -> tuple[ToolResponse, float, dict[str, Any]]:
        """Puts one item in."""
        held = self._held[instance_id]
        if len(held) >= self._capacity:
            raise ToolError(f"The basket is full: {', '.join(held)}.")  # told to the model
        held.append(str(parameters["item"]))
        return ToolResponse(text=f"In the basket: {', '.join(held)}."), 0.0, {}

    async def calc_reward(self, instance_id: str, **calc_reward_kwargs: Any) -> float:
        """Once a trajectory, at its end."""
        return float(sorted(self._held[instance_id]) == sorted(self._wanted[instance_id]))

    async def release(self, instance_id: str, **release_kwargs: Any) -> None:
        """Once a trajectory, however it ended."""
        del self._held[instance_id], self._wanted[instance_id]


@function_tool(config={"timeout": 5})
def in_euros(cents: int) -> str:
    """Writes an amount as euros.

    Args:
        cents: the amount in cents.
    """
    return f"{cents / 100:.2f} €"
