"""`MCPBaseTool`: wraps one tool of an MCP server as a `BaseTool`.

Invariant: the model sees the server's own description and full input schema, and the server gets the arguments as the model
wrote them; the server's text and images are returned in order. An error result is returned to the model; a server that is
unreachable or breaks is an infrastructure failure. The tool is stateless: a server's state belongs to its connection, which
all trajectories of a process share.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from etude.errors import ConfigError, DataError, ToolError, one_line
from etude.options.types import Positive
from etude.schemas import OpenAIFunctionToolSchema, ToolResponse
from etude.timeouts import BlockingCalls, run_on
from etude.tools.base import BaseTool, Execution
from etude.tools.builtin.images import AnswerImages
from etude.tools.mcp.options import McpServer
from etude.tools.mcp.reconnecting import pool_of
from etude.tools.options import CallPolicy, ToolOptions, read_options
from etude.trace import rollout_trace_op

if TYPE_CHECKING:
    from mcp_types import ContentBlock

_decoders = BlockingCalls("etude-mcp-images", limit=4)


class McpToolOptions(ToolOptions):
    """`rate_limit`: the documents' name for `calls_per_second`."""

    rate_limit: Positive | None = None


class MCPBaseTool(BaseTool):
    """A tool of an MCP server; as the `class_name` of a configuration entry, it stands for all selected tools.

    A subclass may override `_parse_tool_result` to parse results, and add keys to `config`.
    """

    def __init__(self, config: dict[str, Any], tool_schema: OpenAIFunctionToolSchema | None = None) -> None:
        super().__init__(dict(config), tool_schema)
        own = config if type(self) is MCPBaseTool else {"rate_limit": config.get("rate_limit")}
        if (rate := read_options(McpToolOptions, own, self.name).rate_limit) is not None:
            self.config.setdefault("calls_per_second", rate)
        self._timeout = CallPolicy.from_config(self.config, self.name).timeout
        self._server: McpServer | None = None
        self._remote_name = self.name

    def attach(self, server: McpServer, remote_name: str) -> None:
        """Routes calls to the tool `remote_name` of `server`, over the connections of the calling process."""
        self._server = server
        self._remote_name = remote_name

    @rollout_trace_op
    async def execute(self, instance_id: str, parameters: dict[str, Any], **execute_kwargs: Any) -> Execution:
        """Calls the server's tool; a row's `execute_kwargs` are added to the arguments and override the model's.

        Raises:
            ToolError: the server reported an error.
            InfrastructureError: the server is unreachable, or broke during the call.
        """
        if self._server is None:
            raise ConfigError(f"tool '{self.name}' belongs to no server: load it with load_tools")
        arguments = {**parameters, **execute_kwargs}
        pool = pool_of(self._server)
        result = await run_on(pool.loop, pool.call(self._remote_name, arguments, self._timeout))
        content = result.content
        if not content and result.structured_content is not None:
            answer: Any = ToolResponse(text=json.dumps(result.structured_content, ensure_ascii=False))
            metrics: dict[str, Any] = {}
        elif any(block.type == "image" for block in content):
            answer, metrics = await _decoders.run(self._parse_tool_result, content)
        else:
            answer, metrics = self._parse_tool_result(content)
        response = ToolResponse(text=answer) if isinstance(answer, str) else answer
        if result.is_error:
            raise ToolError(response.text or f"Error executing tool '{self.name}'.")
        return response, 0.0, metrics

    def _parse_tool_result(self, content: Sequence[ContentBlock]) -> tuple[str | ToolResponse, dict[str, Any]]:
        """Parses the server's content into (response, metrics): texts joined by newlines, images as PIL images."""
        return read_content(content), {}


def read_content(content: Sequence[ContentBlock]) -> ToolResponse:
    """Converts MCP content to a response: texts joined by newlines, images decoded within the limits of `AnswerImages`;
    other content becomes a text note.

    Raises:
        InfrastructureError: the system cannot decode images now.
    """
    texts: list[str] = []
    images: list[Any] = []
    limited = AnswerImages()
    for block in content:
        if block.type == "text":
            texts.append(block.text)
        elif block.type == "image":
            try:
                images.append(limited.load(f"data:{block.mime_type};base64,{block.data}"))
            except DataError as error:
                texts.append(f"[{block.mime_type}, not shown: {one_line(error, 200)}]")
        elif block.type == "resource":
            inner = block.resource
            texts.append(inner.text if hasattr(inner, "text") else f"[resource {inner.uri}, {inner.mime_type}]")
        elif block.type == "resource_link":
            texts.append(f"[resource {block.uri}: {block.name}]")
        else:
            texts.append(f"[{block.type} content, which cannot be shown]")
    return ToolResponse(text="\n".join(texts) if texts else None, image=images or None)
