"""Tool calling: tools, their YAML configuration, and `ToolSession`, the tools' lifecycle within one trajectory."""

from etude.errors import ToolError
from etude.schemas import (
    FunctionCall,
    OpenAIFunctionCallSchema,
    OpenAIFunctionParametersSchema,
    OpenAIFunctionParsedSchema,
    OpenAIFunctionPropertySchema,
    OpenAIFunctionSchema,
    OpenAIFunctionToolCall,
    OpenAIFunctionToolSchema,
    ToolResponse,
)
from etude.tools.base import BaseTool, StatefulTool
from etude.tools.builtin import builtin_config
from etude.tools.call import BrokenCall, ToolCall
from etude.tools.execution import ToolRuntime
from etude.tools.function_tool import FUNCTION_TOOLS, FunctionTool, function_tool, load_function_tools
from etude.tools.loader import initialize_tools_from_config, load_tools
from etude.tools.mcp import MCPBaseTool
from etude.tools.options import CallPolicy
from etude.tools.qwen import TOOL_REGISTRY, QwenBaseTool, QwenTool, register_tool
from etude.tools.session import ToolSession
from etude.tools.truncation import TokenLimit
from etude.trace import rollout_trace_op

__all__ = [
    "FUNCTION_TOOLS",
    "TOOL_REGISTRY",
    "BaseTool",
    "BrokenCall",
    "CallPolicy",
    "FunctionCall",
    "FunctionTool",
    "MCPBaseTool",
    "OpenAIFunctionCallSchema",
    "OpenAIFunctionParametersSchema",
    "OpenAIFunctionParsedSchema",
    "OpenAIFunctionPropertySchema",
    "OpenAIFunctionSchema",
    "OpenAIFunctionToolCall",
    "OpenAIFunctionToolSchema",
    "QwenBaseTool",
    "QwenTool",
    "StatefulTool",
    "TokenLimit",
    "ToolCall",
    "ToolError",
    "ToolResponse",
    "ToolRuntime",
    "ToolSession",
    "builtin_config",
    "function_tool",
    "initialize_tools_from_config",
    "load_function_tools",
    "load_tools",
    "register_tool",
    "rollout_trace_op",
]
