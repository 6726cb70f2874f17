"""An MCP server, written with the official SDK: a catalogue in which a price is found in two steps.

CATALOGUE=FILE python server.py
"""

from __future__ import annotations

import functools
import json
import os
from pathlib import Path
from typing import Any

from mcp.server import MCPServer

server = MCPServer("catalogue", log_level="ERROR")


@functools.cache
def catalogue() -> dict[str, Any]:
    """`ids` by name, and `prices` by id."""
    return dict(json.loads(Path(os.environ["CATALOGUE"]).read_text()))


@server.tool(structured_output=False)
def find(name: str) -> str:
    """The id of an article."""
    return str(catalogue()["ids"].get(name, "none"))


@server.tool(structured_output=False)
def price(id: str) -> str:
    """The price of an id."""
    return str(catalogue()["prices"].get(id, "none"))


if __name__ == "__main__":
    server.run("stdio")
