"""Tool-call parsers; importing this package registers them."""

from etude.chat.parsers.auto import AutoToolParser, find_other_format, format_of
from etude.chat.parsers.base import TOOL_PARSERS, ParsedResponse, ToolParser
from etude.chat.parsers.element_formats import (
    DeepseekV32ToolParser,
    Glm4MoeToolParser,
    KimiK3ToolParser,
    MinimaxM2ToolParser,
    Qwen3CoderToolParser,
    SeedOssToolParser,
)
from etude.chat.parsers.gpt_oss import GptOssToolParser
from etude.chat.parsers.headed_formats import DeepseekV3ToolParser, DeepseekV31ToolParser, KimiK2ToolParser
from etude.chat.parsers.json_formats import (
    CohereToolParser,
    GigaChat3ToolParser,
    GraniteToolParser,
    HermesToolParser,
    Internlm2ToolParser,
    Llama3JsonToolParser,
    MistralToolParser,
    Phi4ToolParser,
    XlamToolParser,
)
from etude.chat.parsers.python_formats import GemmaToolParser, Lfm2ToolParser, Olmo3ToolParser, PythonicToolParser
from etude.chat.parsers.rl_factory import CallsFirstToolParser, RLFactoryToolParser
from etude.chat.parsers.search_r1 import SearchR1ToolParser

__all__ = [
    "TOOL_PARSERS",
    "AutoToolParser",
    "CallsFirstToolParser",
    "CohereToolParser",
    "DeepseekV3ToolParser",
    "DeepseekV31ToolParser",
    "DeepseekV32ToolParser",
    "GemmaToolParser",
    "GigaChat3ToolParser",
    "Glm4MoeToolParser",
    "GptOssToolParser",
    "GraniteToolParser",
    "HermesToolParser",
    "Internlm2ToolParser",
    "KimiK2ToolParser",
    "KimiK3ToolParser",
    "Lfm2ToolParser",
    "Llama3JsonToolParser",
    "MinimaxM2ToolParser",
    "MistralToolParser",
    "Olmo3ToolParser",
    "ParsedResponse",
    "Phi4ToolParser",
    "PythonicToolParser",
    "Qwen3CoderToolParser",
    "RLFactoryToolParser",
    "SearchR1ToolParser",
    "SeedOssToolParser",
    "ToolParser",
    "XlamToolParser",
    "find_other_format",
    "format_of",
]
