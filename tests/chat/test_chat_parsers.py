"""ToolParser: the registry, and the several shapes a user's parser may have."""

import json
from types import SimpleNamespace

import pytest

from etude.chat import FunctionCall, HermesToolParser, ParsedResponse, ToolParser
from etude.chat.parsers.base import TOOL_PARSERS
from etude.errors import ConfigError
from etude.models import build_tiny_tokenizer

CALL = '<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>'
TOKENIZER = build_tiny_tokenizer([CALL], 300)
IDS = TOKENIZER(f"Hi {CALL}<tool_call>bad</tool_call><|im_end|>")["input_ids"]
F = FunctionCall(name="f", arguments='{"a": 1}')


def test_names_of_the_hermes_format():
    for name in ("hermes", "qwen"):
        assert type(ToolParser.get_tool_parser(name, TOKENIZER)) is HermesToolParser
    with pytest.raises(ConfigError, match="did you mean 'hermes'"):
        ToolParser.get_tool_parser("hermess", TOKENIZER)


async def test_ids_are_decoded_once_without_ends_of_turns():
    parser = ToolParser.get_tool_parser("hermes", TOKENIZER)
    parsed = await parser.parse_ids(IDS)
    assert (parsed.content, parsed.calls, len(parsed.errors)) == ("Hi", [F], 1)
    assert await parser.extract_tool_calls(IDS, None) == ("Hi", [F])
    assert parser.stop_token_ids == ()


async def test_text_needs_no_tokenizer_but_ids_do():
    parser = ToolParser.get_tool_parser("hermes")
    assert parser.parse(CALL).calls == [F]
    with pytest.raises(ConfigError, match="without a tokenizer"):
        await parser.parse_ids(IDS)


class AsInTheDocuments(ToolParser):
    """Its own constructor, which does not call the base's, and no `tools`."""

    def __init__(self, tokenizer) -> None:
        self.mine = tokenizer

    async def extract_tool_calls(self, responses_ids):
        return self.mine.decode(responses_ids, skip_special_tokens=True), [F]


class ListOnly(ToolParser):
    async def extract_tool_calls(self, responses_ids):
        return [F]


class Plain(ToolParser):
    def extract_tool_calls(self, responses_ids, tools=None):
        return None, [
            {"name": "f", "arguments": {"a": 1}},
            SimpleNamespace(name="f", arguments='{"a": 1}'),
            {"name": "tools", "arguments": json.dumps({"given": tools})},
        ]


class OverridesIds(HermesToolParser):
    async def extract_tool_calls(self, response_ids, tools=None):
        return "mine", []


class OverridesText(AsInTheDocuments):
    def parse(self, text, tools=None):
        return ParsedResponse("mine")


def made(parser, name):
    if name not in TOOL_PARSERS:
        ToolParser.register(name)(parser)
    return ToolParser.get_tool_parser(name, TOKENIZER)


async def test_a_parser_may_define_only_the_reading_of_ids():
    parsed = await made(AsInTheDocuments, "documents").parse_ids(IDS, [])
    assert parsed.content.startswith("Hi <tool_call>")
    assert (parsed.calls, parsed.errors) == ([F], [])
    with pytest.raises(NotImplementedError):
        made(AsInTheDocuments, "documents").parse("x")


async def test_a_parser_may_return_only_the_calls():
    parsed = await made(ListOnly, "list_only").parse_ids(IDS)
    assert parsed.calls == [F]
    assert parsed.content == f"Hi {CALL}<tool_call>bad</tool_call>"


async def test_a_parser_may_be_synchronous_and_return_other_objects():
    parsed = await made(Plain, "plain").parse_ids(IDS, [1])
    assert parsed.content == ""
    assert parsed.calls == [F, F, FunctionCall(name="tools", arguments='{"given": [1]}')]


async def test_the_most_derived_definition_counts():
    assert await made(OverridesIds, "overrides_ids").parse_ids(IDS) == ParsedResponse("mine")
    assert await made(OverridesText, "overrides_text").parse_ids(IDS) == ParsedResponse("mine")


@pytest.mark.parametrize(
    ("returned", "reason"),
    [("text", "a list of calls, not str"), ([1], "without a name"), ([{"name": "f"}], "without a name")],
)
async def test_what_is_no_list_of_calls_is_an_error(returned, reason):
    class Odd(ToolParser):
        async def extract_tool_calls(self, response_ids):
            return returned

    with pytest.raises(ConfigError, match=reason):
        await Odd(TOKENIZER).parse_ids(IDS)


def test_registering():
    with pytest.raises(ConfigError, match="defines neither"):
        ToolParser.register("empty")(type("Empty", (ToolParser,), {}))
    with pytest.raises(ConfigError, match="already registered"):
        ToolParser.register("hermes")(ListOnly)
    assert "empty" not in TOOL_PARSERS
