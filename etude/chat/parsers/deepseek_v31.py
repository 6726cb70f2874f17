"""The format of DeepSeek-V3.1 (`｜` and `▁` are no ASCII):

    <｜tool▁calls▁begin｜><｜tool▁call▁begin｜>get_weather<｜tool▁sep｜>{"city": "Beijing"}<｜tool▁call▁end｜>
    <｜tool▁calls▁end｜>

The documents write it with `|` and line breaks, which is read, too.
"""

from __future__ import annotations

import re

from etude.chat.parsers.base import ToolParser
from etude.chat.parsers.deepseek_v3 import DeepseekToolParser


@ToolParser.register("deepseek_v31", "deepseek_v3.1")
class DeepseekV31ToolParser(DeepseekToolParser):
    """Parser of named JSON arguments."""

    head = re.compile(r"([^`{<]*)<[｜|]tool▁sep[｜|]>")
    fence = ""
