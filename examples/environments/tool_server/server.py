"""A stockroom behind a server of OpenEnv 0.10, with four sessions: one article is ordered as often as another is in stock.

    python server.py

It runs in an interpreter of its own, which has the package openenv; it prints its address first.
"""

from __future__ import annotations

import random
import socket
from typing import Any

import uvicorn
from fastmcp import FastMCP
from openenv.core.env_server.http_server import create_app
from openenv.core.env_server.mcp_environment import MCPEnvironment
from openenv.core.env_server.mcp_types import CallToolAction, CallToolObservation
from openenv.core.env_server.types import Observation, State

ARTICLES = (
    "bolt",
    "chain",
    "drill",
    "fan",
    "hinge",
    "jack",
    "lamp",
    "nail",
    "pipe",
    "rope",
    "saw",
    "tap",
    "valve",
    "wheel",
)
SESSIONS = 4


class Stockroom(MCPEnvironment):
    """One episode; the right order earns 1, any order ends it."""

    SUPPORTS_CONCURRENT_SESSIONS = True

    def __init__(self) -> None:
        tools = FastMCP("stockroom")
        self._stock: dict[str, int] = {}
        self._ordered: tuple[str, int] | None = None

        @tools.tool
        def count(item: str) -> str:
            """Says how many pieces of an item are in stock."""
            return str(self._stock.get(item, "There is no such item."))

        @tools.tool
        def order(item: str, pieces: int) -> str:
            """Orders pieces of an item."""
            self._ordered = item, pieces
            return "Ordered."

        super().__init__(tools)

    def reset(self, seed: int | None = None, episode_id: str | None = None, **kwargs: Any) -> Observation:
        """Draws the stock and the question from the seed."""
        rng = random.Random(seed)
        first, second = rng.sample(ARTICLES, 2)
        self._stock = {item: rng.randint(100, 999) for item in ARTICLES}
        self._asked, self._ordered = (second, self._stock[first]), None
        return Observation(metadata={"message": f"Order a {second} for each {first}."}, reward=0.0, done=False)

    async def step_async(self, action: Any, timeout_s: float | None = None, **kwargs: Any) -> Observation:
        """Calls a tool, and rewards the order."""
        seen = await super().step_async(action, timeout_s=timeout_s, **kwargs)
        seen.done = self._ordered is not None
        seen.reward = float(self._ordered == self._asked)
        return seen

    def _step_impl(self, action: Any, timeout_s: float | None = None, **kwargs: Any) -> Observation:
        raise ValueError(f"not a call: {action}")

    @property
    def state(self) -> State:
        """Nothing that anybody asks for."""
        return State()


if __name__ == "__main__":
    app = create_app(Stockroom, CallToolAction, CallToolObservation, "stockroom", max_concurrent_envs=SESSIONS)
    listening = socket.create_server(("127.0.0.1", 0))
    print(f"http://127.0.0.1:{listening.getsockname()[1]}", flush=True)
    uvicorn.Server(uvicorn.Config(app, log_level="error")).run(sockets=[listening])
