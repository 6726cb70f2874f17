"""A real MCP server, written with the official SDK and run as a process of its own by the tests of MCP tools.

    python mcp_stage_server.py stdio
    python mcp_stage_server.py streamable-http|sse PORT

`die` kills the process in the middle of a call, as a crash does.
"""

import asyncio
import itertools
import os
import sys
from typing import Literal

import anyio
from mcp.server import MCPServer
from mcp.server.mcpserver import Image
from mcp.server.mcpserver.exceptions import ToolError
from pydantic import BaseModel

server = MCPServer("stage", log_level="ERROR")
calls = itertools.count()
waiting: list[asyncio.Event] = []


class Book(BaseModel):
    title: str
    pages: int = 1


@server.tool()
def add(a: int, b: int = 1) -> int:
    """Adds two numbers."""
    return a + b


@server.tool(structured_output=False)
async def calculator(expression: str) -> str:
    """Evaluates a sum such as 2 + 3; the server dies of the call after STAGE_CALLS of them."""
    if next(calls) == int(os.environ.get("STAGE_CALLS", "-1")):
        os._exit(3)
    return str(sum(int(part) for part in expression.split("+")))


@server.tool(structured_output=False)
def shelve(books: list[Book], order: Literal["title", "pages"] = "title") -> str:
    """Sorts books."""
    return ", ".join(book.title for book in sorted(books, key=lambda book: getattr(book, order)))


@server.tool(structured_output=False)
def picture(size: int = 4) -> list:
    """Draws a red square, with words around it."""
    from io import BytesIO

    from PIL import Image as Picture

    file = BytesIO()
    Picture.new("RGB", (size, size), "red").save(file, "PNG")
    return ["before", Image(data=file.getvalue(), format="png"), "after"]


@server.tool(structured_output=False)
def refuse() -> str:
    """Says what the model did wrong."""
    raise ToolError("there is no such page")


@server.tool(structured_output=False)
def long(chars: int) -> str:
    """Says much."""
    return "x" * chars


@server.tool(structured_output=False)
async def wait(seconds: float) -> str:
    """Answers late."""
    await asyncio.sleep(seconds)
    return "done"


@server.tool(structured_output=False)
async def meet(people: int) -> str:
    """Answers when so many calls are here at once."""
    here = asyncio.Event()
    waiting.append(here)
    if len(waiting) == people:
        for event in waiting:
            event.set()
    await here.wait()
    return "met"


@server.tool(structured_output=False)
async def die(after: float = 0.0) -> str:
    """Ends the server without an answer."""
    await asyncio.sleep(after)
    os._exit(3)


@server.tool(structured_output=False)
def environment(name: str) -> str:
    """A variable of the server's environment."""
    return os.environ.get(name, "not set")


@server.tool(structured_output=False)
def process() -> str:
    """The server's process id."""
    return str(os.getpid())


async def serve_http(transport: str, port: int) -> None:
    import uvicorn

    make = server.sse_app if transport == "sse" else server.streamable_http_app
    app = make(host="127.0.0.1")

    async def guarded(scope, receive, send):
        """Refuses requests without the key that STAGE_KEY asks for."""
        wanted = os.environ.get("STAGE_KEY")
        given = dict(scope.get("headers") or []).get(b"authorization", b"").decode()
        if scope["type"] == "http" and wanted and given != f"Bearer {wanted}":
            await send({"type": "http.response.start", "status": 401, "headers": []})
            await send({"type": "http.response.body", "body": b"no"})
            return
        await app(scope, receive, send)

    await uvicorn.Server(uvicorn.Config(guarded, host="127.0.0.1", port=port, log_level="error")).serve()


if __name__ == "__main__":
    print("stage server starts", file=sys.stderr, flush=True)
    if sys.argv[1] == "stdio":
        server.run("stdio")
    else:
        anyio.run(serve_http, sys.argv[1], int(sys.argv[2]))
