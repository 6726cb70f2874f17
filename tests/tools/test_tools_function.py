"""`@function_tool`: schemas from signatures, arguments to signatures, results to responses."""

import json
import threading
from typing import Literal, Optional

import pytest
from pydantic import BaseModel

from etude.errors import ConfigError, ToolError
from etude.schemas import FunctionCall, ToolResponse
from etude.tools import FUNCTION_TOOLS, FunctionTool, ToolSession, function_tool, load_function_tools
from etude.tools.function_tool import normalize_result


class Point(BaseModel):
    x: int
    y: int = 0


def search(query: str, near: Point, order: Literal["date", "rank"] = "rank", tags: Optional[list[str]] = None) -> str:  # noqa: UP045
    """Searches the
    archive.

    Args:
        query: what to look for,
            in words
        near (Point): a place: the centre
        order: how to sort

    Returns:
        Lines.
    """
    return f"{query} {type(near).__name__} {near.x} {order} {tags}"


def test_schema_from_hints_and_docstring():
    function = FunctionTool(search).tool_schema.to_openai()["function"]
    assert function["name"] == "search"
    assert function["description"] == "Searches the archive."
    parameters = function["parameters"]
    assert parameters["required"] == ["query", "near"]
    assert parameters["properties"]["query"] == {"type": "string", "description": "what to look for, in words"}
    assert parameters["properties"]["near"] == {"$ref": "#/$defs/Point", "description": "a place: the centre"}
    order = parameters["properties"]["order"]
    assert (order["enum"], order["default"]) == (["date", "rank"], "rank")
    assert {"type": "array", "items": {"type": "string"}} in parameters["properties"]["tags"]["anyOf"]
    assert parameters["$defs"]["Point"]["required"] == ["x"]


async def test_arguments_arrive_as_hinted():
    response, reward, metrics = await FunctionTool(search).execute("i", {"query": "q", "near": {"x": 3}, "tags": ["a"]})
    assert (response.text, reward, metrics) == ("q Point 3 rank ['a']", 0.0, {})


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"near": {"x": 1}}, "missing argument 'query'"),
        ({"query": "q", "near": {"x": "far"}}, "argument 'near.x'"),
        ({"query": "q", "near": {"x": 1}, "page": 2}, "unexpected argument 'page'"),
        ({"query": "q", "near": {"x": 1}, "order": "size"}, "argument 'order'"),
    ],
)
async def test_wrong_arguments_are_told_to_the_model(arguments, message):
    with pytest.raises(ToolError, match=message):
        await FunctionTool(search).execute("i", arguments)


def test_the_three_spellings_and_the_plain_call():
    @function_tool
    def spelling_one(a: int) -> int:
        return a + 1

    @function_tool("spelling_two")
    async def anything(a: int) -> int:
        return a + 1

    schema = {
        "type": "function",
        "function": {"name": "spelling_three", "parameters": {"properties": {"a": {"minimum": 0}}}},
    }

    @function_tool(name="spelling_three", schema=schema)
    def other(**anything):
        return anything

    assert spelling_one(1) == 2
    assert [tool.name for tool in (spelling_one, anything, other)] == ["spelling_one", "spelling_two", "spelling_three"]
    assert FUNCTION_TOOLS.get("spelling_two") is anything
    assert other.tool_schema.to_openai()["function"]["parameters"]["properties"]["a"] == {"minimum": 0}


async def test_sync_functions_run_in_another_thread_and_async_ones_in_this():
    def blocking() -> str:
        return threading.current_thread().name

    async def waiting() -> str:
        return threading.current_thread().name

    assert (await FunctionTool(blocking).execute("i", {}))[0].text.startswith("etude-tool")
    assert (await FunctionTool(waiting).execute("i", {}))[0].text == threading.current_thread().name


async def test_a_function_in_a_session():
    def divide(a: float, b: float) -> tuple[str, float, dict]:
        return str(a / b), 0.25, {"b": b}

    def exhausted() -> str:
        return next(iter([]))

    tools = {"divide": FunctionTool(divide), "exhausted": FunctionTool(exhausted)}
    calls = [("divide", {"a": 1, "b": 4}), ("divide", {"a": 1, "b": 0}), ("divide", {"a": 1}), ("exhausted", {})]
    async with ToolSession(tools, {"divide": {"execute_kwargs": {}}}, request_id="r") as session:
        outcomes = await session.execute([FunctionCall(name=n, arguments=json.dumps(a)) for n, a in calls], 0)
        assert await session.calc_rewards() == {"divide": 0.0, "exhausted": 0.0}
    assert [outcome.error for outcome in outcomes] == [None, "exception", "tool", "exception"]
    assert (outcomes[0].response.text, outcomes[0].reward, outcomes[0].metrics) == ("0.25", 0.25, {"b": 4.0})
    assert "ZeroDivisionError" in outcomes[1].response.text


@pytest.mark.parametrize(
    ("returned", "expected"),
    [
        ("a", (ToolResponse(text="a"), 0.0, {})),
        ({"é": 1}, (ToolResponse(text='{"é": 1}'), 0.0, {})),
        (7, (ToolResponse(text="7"), 0.0, {})),
        (ToolResponse(image=["i"]), (ToolResponse(image=["i"]), 0.0, {})),
        (("a",), (ToolResponse(text="a"), 0.0, {})),
        (("a", None), (ToolResponse(text="a"), 0.0, {})),
        (("a", 0.5, {"n": 1}), (ToolResponse(text="a"), 0.5, {"n": 1})),
    ],
)
def test_normalize_result(returned, expected):
    assert normalize_result(returned) == expected


@pytest.mark.parametrize("returned", [(), (1, 2, 3, 4)])
def test_tuples_of_another_length(returned):
    with pytest.raises(TypeError, match="tuple of"):
        normalize_result(returned)


def unhinted(a):
    return a


def variadic(*values: int) -> int:
    return sum(values)


def keywords(**values: int) -> int:
    return len(values)


def unschemable(a: threading.Lock) -> None:  # type: ignore[valid-type]
    return None


@pytest.mark.parametrize(("function", "parameter"), [(unhinted, "a"), (variadic, "values"), (keywords, "values")])
def test_a_signature_without_schema_names_function_and_parameter(function, parameter):
    with pytest.raises(ConfigError, match=f"{function.__name__}: .*{parameter}"):
        function_tool(function)


def test_a_hint_without_schema():
    with pytest.raises(ConfigError, match="unschemable: the hint of 'a'"):
        FunctionTool(unschemable)


def test_a_name_means_one_function():
    function_tool("taken_once")(lambda: 1)
    with pytest.raises(ConfigError, match="'taken_once' is already registered"):
        function_tool("taken_once")(lambda: 2)


def test_a_schema_of_another_name():
    with pytest.raises(ConfigError, match="function tool 'mine': its schema says 'yours'"):
        function_tool("mine", schema={"type": "function", "function": {"name": "yours"}})(lambda: 1)


def test_load_function_tools(tmp_path):
    file = tmp_path / "mine.py"
    file.write_text(
        "from etude.tools import function_tool\n"
        "@function_tool\ndef loaded_b(a: int) -> int:\n    return a\n"
        "@function_tool('loaded_a')\ndef other(a: int) -> int:\n    return a\n"
    )
    assert [tool.name for tool in load_function_tools(file)] == ["loaded_b", "loaded_a"]
    assert [tool.name for tool in load_function_tools(str(file))] == ["loaded_b", "loaded_a"]
    (tmp_path / "empty.py").write_text("from etude.tools import function_tool\n")
    with pytest.raises(ConfigError, match="defines no tool"):
        load_function_tools(tmp_path / "empty.py")
    with pytest.raises(ConfigError, match="file not found"):
        load_function_tools(tmp_path / "absent.py")
