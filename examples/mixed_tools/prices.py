"""The third kind: an MCP server. Étude starts it, speaks to it over stdio, and ends it with the run."""

from mcp.server import MCPServer

PRICES = {"tea": 420, "bread": 310, "honey": 650, "salt": 90}
server = MCPServer("prices", log_level="ERROR")


@server.tool()
def price(item: str) -> str:
    """Says what an item costs, in cents."""
    return str(PRICES[item]) if item in PRICES else f"There is no {item}."


if __name__ == "__main__":
    server.run("stdio")
