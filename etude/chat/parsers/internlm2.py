"""The format of InternLM 2 and 2.5: `<|action_start|><|plugin|>{"name": …, "parameters": {…}}<|action_end|>`.

The closing tag ends a turn, and may be missing, as upstream. `arguments` is read for `parameters`.
"""

from __future__ import annotations

from etude.chat.parsers.base import ToolParser, Tools
from etude.chat.parsers.blocks import Block, JsonBlockParser

_PLUGIN = "<|plugin|>"


@ToolParser.register("internlm2", "internlm")
class Internlm2ToolParser(JsonBlockParser):
    """Parser of JSON calls after `<|action_start|><|plugin|>`."""

    opening = ("<|action_start|>",)
    closing = ("<|action_end|>",)
    may_stay_open = True
    arguments = ("parameters", "arguments")
    special_tokens = ("<|action_start|>", "<|action_end|>", _PLUGIN)
    stop_tokens = ("<|action_end|>",)

    def read_block(self, text: str, tag: str, start: int, tools: Tools | None) -> Block | None:
        """See `BlockParser.read_block`; what is no plug-in (the interpreter) is text."""
        return super().read_block(text, tag, start + len(_PLUGIN), tools) if text.startswith(_PLUGIN, start) else None
