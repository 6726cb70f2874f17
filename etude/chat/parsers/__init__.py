"""Tool-call formats, one file each; importing this room registers them."""

from etude.chat.parsers.auto import AutoToolParser, format_of
from etude.chat.parsers.base import TOOL_PARSERS, ParsedResponse, ToolParser
from etude.chat.parsers.cohere import CohereToolParser
from etude.chat.parsers.deepseek_v3 import DeepseekV3ToolParser
from etude.chat.parsers.deepseek_v31 import DeepseekV31ToolParser
from etude.chat.parsers.gemma import GemmaToolParser
from etude.chat.parsers.glm4_moe import Glm4MoeToolParser
from etude.chat.parsers.gpt_oss import GptOssToolParser
from etude.chat.parsers.granite import GraniteToolParser
from etude.chat.parsers.hermes import HermesToolParser
from etude.chat.parsers.internlm2 import Internlm2ToolParser
from etude.chat.parsers.kimi_k2 import KimiK2ToolParser
from etude.chat.parsers.llama3_json import Llama3JsonToolParser
from etude.chat.parsers.minimax_m2 import MinimaxM2ToolParser
from etude.chat.parsers.mistral import MistralToolParser
from etude.chat.parsers.phi4 import Phi4ToolParser
from etude.chat.parsers.pythonic import PythonicToolParser
from etude.chat.parsers.qwen3_coder import Qwen3CoderToolParser
from etude.chat.parsers.rl_factory import CallsFirstToolParser, RLFactoryToolParser
from etude.chat.parsers.search_r1 import SearchR1ToolParser
from etude.chat.parsers.seed_oss import SeedOssToolParser
from etude.chat.parsers.xlam import XlamToolParser

__all__ = [
    "TOOL_PARSERS",
    "AutoToolParser",
    "CallsFirstToolParser",
    "CohereToolParser",
    "DeepseekV3ToolParser",
    "DeepseekV31ToolParser",
    "GemmaToolParser",
    "Glm4MoeToolParser",
    "GptOssToolParser",
    "GraniteToolParser",
    "HermesToolParser",
    "Internlm2ToolParser",
    "KimiK2ToolParser",
    "Llama3JsonToolParser",
    "MinimaxM2ToolParser",
    "MistralToolParser",
    "ParsedResponse",
    "Phi4ToolParser",
    "PythonicToolParser",
    "Qwen3CoderToolParser",
    "RLFactoryToolParser",
    "SearchR1ToolParser",
    "SeedOssToolParser",
    "ToolParser",
    "XlamToolParser",
    "format_of",
]
