"""The format of Seed-OSS, as elements, with thoughts in `<seed:think>`:

    <seed:tool_call>
    <function=get_weather>
    <parameter=city>Beijing</parameter>
    </function>
    </seed:tool_call>

Texts are not quoted; the tool's schema tells their types. A function may stand without a block, as in vLLM.
"""

from __future__ import annotations

from etude.chat.parsers.base import ToolParser
from etude.chat.parsers.qwen3_coder import Qwen3CoderToolParser, function_elements


@ToolParser.register("seed_oss", "seed")
class SeedOssToolParser(Qwen3CoderToolParser):
    """Parser of `<function=…>` elements, in `<seed:tool_call>` tags or alone."""

    opening = ("<seed:tool_call>", Qwen3CoderToolParser.opening[1])
    closing = ("</seed:tool_call>",)
    elements = function_elements("<seed:tool_call>", "</seed:tool_call>", "</seed:think>")
    thoughts = (("<seed:think>", "</seed:think>"), ("<think>", "</think>"))
    special_tokens = ("<seed:tool_call>", "</seed:tool_call>", "<seed:think>", "</seed:think>")
