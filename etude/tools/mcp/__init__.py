"""Tools of MCP servers: over stdio, streamable HTTP and SSE, with the official SDK (`pip install 'etude[mcp]'`).

    options     configuration of a server   stdio         transport to a subprocess
    session     one live session            reconnecting  a new session after one broke; the pool of a process
    tool        `MCPBaseTool`               discovery     the servers' tools and their schemas

The SDK is imported only when the first connection opens.
"""

from etude.tools.mcp.discovery import discover_tools
from etude.tools.mcp.options import McpServer, anchor_servers
from etude.tools.mcp.reconnecting import close_connections
from etude.tools.mcp.tool import MCPBaseTool

__all__ = [
    "MCPBaseTool",
    "McpServer",
    "anchor_servers",
    "close_connections",
    "discover_tools",
]
