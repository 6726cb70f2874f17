"""`@function_tool`: schemas from signatures, arguments to signatures, results to responses."""

import asyncio
import contextlib
import datetime
import enum
import functools
import json
import math
import sys
import threading
import typing
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

import jsonschema
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import BaseModel, Field
from typing_extensions import NotRequired, TypedDict

from etude.errors import ConfigError, DataError, ToolError
from etude.schemas import FunctionCall, ToolResponse
from etude.tools import FUNCTION_TOOLS, FunctionTool, ToolSession, function_tool, load_function_tools
from etude.tools.function_tool import normalize_result


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
    assert [outcome.error for outcome in outcomes] == [None, "exception", "invalid_arguments", "exception"]
    assert (outcomes[0].response.text, outcomes[0].reward, outcomes[0].metrics) == ("0.25", 0.25, {"b": 4.0})
    with pytest.raises(DataError, match=r"divide.create_kwargs: .* a function has no create; give execute_kwargs"):
        ToolSession(tools, {"divide": {"create_kwargs": {"b": 4}}}, request_id="r")
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


def as_hinted(expression: str) -> str:
    return eval(expression)


def as_hinted_or_nothing(expression: str) -> str | None:
    return eval(expression)


def unhinted_result(expression: str):
    return eval(expression)


async def waiting_result(expression: str) -> Any:
    return eval(expression)


def result_of_a_function_with_another_inside(expression: str):
    def halves(text):
        return text[::2], 100.0

    return eval(expression, {"halves": halves})


@pytest.mark.parametrize(
    "function",
    [as_hinted, as_hinted_or_nothing, unhinted_result, waiting_result, result_of_a_function_with_another_inside],
)
@pytest.mark.parametrize("written", ['("x", 100.0)', '("x", 100.0, {})', "(1, 100.0)", "()", "(1, 2, 3, 4)"])
async def test_a_tuple_that_a_model_wrote_is_text_and_no_step_reward(function, written):
    response, reward, metrics = await FunctionTool(function).execute("i", {"expression": written})
    assert (response.text, reward, metrics) == (str(eval(written)), 0.0, {})


async def test_a_reward_that_its_author_may_have_meant_is_told_once(caplog):
    def built_up(item: str):
        result = (item, 1.0)
        return result

    tool = FunctionTool(built_up)
    assert [(await tool.execute("i", {"item": "fig"}))[1] for _ in range(2)] == [0.0, 0.0]
    [told] = [record.getMessage() for record in caplog.records]
    assert told.startswith("tool 'built_up' returned a tuple")
    assert "write -> tuple[str, float]" in told


def hinted_in_a_union(expression: str) -> str | tuple[str, float]:
    return eval(expression)


def written_out(expression: str):
    if expression == "?":
        return "unreadable"
    return expression, 0.5


@pytest.mark.parametrize("function", [hinted_in_a_union, written_out])
async def test_a_tuple_that_the_function_declares_holds_a_step_reward(function):
    given = {"expression": '("x", 0.5)' if function is hinted_in_a_union else "x"}
    assert await FunctionTool(function).execute("i", given) == (ToolResponse(text="x"), 0.5, {})


@pytest.mark.parametrize("returned", [(48.8, 2.35), divmod(7, 2), (None, 0.5), (["a"], 1)])
def test_a_pair_without_an_answer_is_no_step_reward(returned):
    with pytest.raises(TypeError, match="step reward"):
        normalize_result(returned)


@pytest.mark.parametrize("returned", [object(), iter([]), (n for n in "ab"), map(str, [1])])
def test_an_object_of_which_a_model_reads_an_address_is_no_answer(returned):
    with pytest.raises(TypeError, match="a model reads nothing"):
        normalize_result(returned)


def test_a_message_of_another_framework_is_what_it_says():
    """Such as LangChain's, which `tool.invoke(call)` returns."""

    class ToolMessage:
        tool_call_id, status = "c1", "success"

        def __init__(self, content):
            self.content = content

        def __repr__(self):
            return f"ToolMessage(content={self.content!r})"

    message = ToolMessage("3.50")
    assert normalize_result(message)[0].text == "3.50"
    message.status = "error"
    with pytest.raises(ToolError, match=r"3\.50"):
        normalize_result(message)
    assert normalize_result(ToolMessage([1]))[0].text == "ToolMessage(content=[1])"


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


def test_a_parameter_that_langchain_keeps_from_the_model_is_not_offered_to_it():
    class InjectedToolArg:
        pass

    class InjectedState(InjectedToolArg):
        pass

    def balance(account: int, user) -> str:
        """Reads a balance."""
        return f"{user}: {account}"

    for mark in (InjectedToolArg, InjectedToolArg(), InjectedState()):
        balance.__annotations__["user"] = Annotated[str, mark]
        with pytest.raises(ConfigError, match="parameter 'user' is injected") as refused:
            FunctionTool(balance)
        assert "execute_kwargs" in refused.value.fix
    parameters = {"type": "object", "properties": {"account": {"type": "integer"}}, "required": ["account"]}
    schema = {"type": "function", "function": {"name": "balance", "description": "", "parameters": parameters}}
    tool = FunctionTool(balance, schema=schema)
    assert asyncio.run(tool.execute("i", {"account": 1}, user="ann"))[0].text == "ann: 1"


def test_a_name_means_one_function():
    function_tool("taken_once")(lambda: 1)
    with pytest.raises(ConfigError, match="'taken_once' is already registered"):
        function_tool("taken_once")(lambda: 2)


def test_functions_without_a_file_are_one_only_within_a_module():
    made = [{"__name__": f"made_{n}"} for n in (1, 1, 2)]
    for scope in made:
        exec("def fileless(a: int) -> int:\n    'Adds.'\n    return a", scope)
    first, again, other = (scope["fileless"] for scope in made)
    function_tool(first)
    function_tool(again)
    with pytest.raises(ConfigError, match="'fileless' is already registered"):
        function_tool(other)


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


def test_functions_of_other_modules_are_tools_of_the_file_that_decorates_them(tmp_path):
    (tmp_path / "mine.py").write_text(
        "import functools, textwrap\n"
        "from etude.tools import function_tool\n"
        "from etude.tools.builtin.calculator import Calculator as _unused\n"
        "def scale(n: int, by: int) -> str:\n    'Scales.'\n    return str(n * by)\n"
        "first = function_tool('doubles')(functools.partial(scale, by=2))\n"
        "schema = {'type': 'function', 'function': {'name': 'dedents', 'parameters': {'properties': {'text': {}}}}}\n"
        "second = function_tool(schema=schema)(textwrap.dedent)\n"
    )
    (tmp_path / "other.py").write_text(
        f"from etude.registry import import_module\nfirst = import_module({str(tmp_path / 'mine.py')!r}).first\n"
    )
    tools = load_function_tools(tmp_path / "mine.py")
    assert [tool.name for tool in tools] == ["doubles", "dedents"]
    assert asyncio.run(tools[0].execute("i", {"n": 4}))[0].text == "8"
    with pytest.raises(ConfigError, match="defines no tool"):
        load_function_tools(tmp_path / "other.py")  # it only imports one
    with pytest.raises(ConfigError, match="not for an object of type dict"):
        function_tool({})


class Unit(enum.Enum):
    KM = "km"
    MILE = "mile"


@dataclass
class Place:
    """Where something is."""

    name: str
    at: tuple[float, float] = (0.0, 0.0)
    tags: list[str] = field(default_factory=list)


@dataclass
class Trip:
    places: list[Place]
    unit: Unit = Unit.KM


class Options(TypedDict):
    fast: bool
    names: NotRequired[dict[str, int]]


class Node(BaseModel):
    value: int
    children: list["Node"] = []


def everything(
    trip: Trip,
    options: Options,
    node: Node,
    which: int | str | None = None,
    day: datetime.date = datetime.date(2026, 1, 2),
    level: Literal[1, 2, "high"] = 1,
    unit: Unit = Unit.MILE,
    seen: Annotated[set[int], Field(description="numbers seen", max_length=3)] = {7},  # noqa: B006
    anything: Any = None,
) -> str:
    """Takes everything.

    More of it.

    Args:
        trip (Trip): the trip: all of it,
            on two lines
        options: how
        level: of care

    Returns:
        What arrived.
    """
    return repr((trip, options, node, which, day, level, unit, seen, anything))


def test_every_kind_of_hint_has_its_schema():
    function = FunctionTool(everything).tool_schema.to_openai()["function"]
    assert function["description"] == "Takes everything. More of it."
    parameters = function["parameters"]
    properties, definitions = parameters["properties"], parameters["$defs"]
    assert parameters["required"] == ["trip", "options", "node"]
    assert properties["trip"]["description"] == "the trip: all of it, on two lines"
    assert definitions["Trip"]["properties"]["places"]["items"] == {"$ref": "#/$defs/Place"}
    assert definitions["Place"]["required"] == ["name"]
    assert definitions["Unit"]["enum"] == ["km", "mile"]
    assert definitions["Options"]["required"] == ["fast"]
    assert definitions["Options"]["properties"]["names"]["additionalProperties"] == {"type": "integer"}
    assert definitions["Node"]["properties"]["children"]["items"] == {"$ref": "#/$defs/Node"}
    assert {each.get("type") for each in properties["which"]["anyOf"]} == {"integer", "string", "null"}
    assert properties["which"]["default"] is None
    assert properties["day"]["default"] == "2026-01-02"
    assert properties["level"]["enum"] == [1, 2, "high"]
    assert properties["unit"]["default"] == "mile"
    assert properties["seen"]["description"] == "numbers seen"
    assert properties["seen"]["maxItems"] == 3
    jsonschema.Draft202012Validator.check_schema(parameters)


async def test_every_kind_of_hint_gets_its_object():
    arguments = {
        "trip": {"places": [{"name": "a", "at": [1, 2]}], "unit": "mile"},
        "options": {"fast": True, "names": {"x": 1}},
        "node": {"value": 1, "children": [{"value": 2}]},
        "which": "w",
        "day": "2026-03-04",
        "level": "high",
        "unit": "km",
        "seen": [1, 2],
        "anything": {"deep": [None]},
    }
    jsonschema.validate(arguments, FunctionTool(everything).tool_schema.to_openai()["function"]["parameters"])
    response, _, _ = await FunctionTool(everything).execute("i", arguments)
    assert response.text == repr(
        (
            Trip([Place("a", (1.0, 2.0))], Unit.MILE),
            {"fast": True, "names": {"x": 1}},
            Node(value=1, children=[Node(value=2)]),
            "w",
            datetime.date(2026, 3, 4),
            "high",
            Unit.KM,
            {1, 2},
            {"deep": [None]},
        )
    )


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"trip": {"places": [{"at": [1, 2]}]}}, "argument 'trip.places.0.name': Field required"),
        ({"trip": {"places": [], "unit": "parsec"}}, "argument 'trip.unit'"),
        ({"node": {"value": 1, "children": [{"value": "x"}]}}, "argument 'node.children.0.value'"),
        ({"options": {}}, "argument 'options.fast'"),
        ({"seen": [1, 2, 3, 4]}, "argument 'seen'"),
        ({"level": 3}, "argument 'level'"),
        ({"page": 2}, "unexpected argument 'page'"),
    ],
)
async def test_a_wrong_argument_is_named_to_its_depth(change, message):
    arguments = {"trip": {"places": []}, "options": {"fast": False}, "node": {"value": 1}} | change
    with pytest.raises(ToolError, match=message) as caught:
        await FunctionTool(everything).execute("i", arguments)
    assert "\n" not in str(caught.value)
    with pytest.raises(ToolError, match="missing argument 'trip'"):
        await FunctionTool(everything).execute("i", {"options": {"fast": False}, "node": {"value": 1}})


def typo(query: str) -> str:
    """Searches.

    Args:
        qery: what
    """
    return query


def yields(a: int):
    yield a


class Owner:
    def method(self, a: int) -> int:
        return a


def stdlib_typed_dict(a: "StdlibTypedDict") -> str:
    return str(a)


class StdlibTypedDict(typing.TypedDict):
    a: int


def wrong_default(a: int = None) -> int:  # noqa: RUF013
    return a


def unknown_hint(a: "NoSuchName") -> int:  # noqa: F821
    return a


def callback(a: Callable[[int], int]) -> int:
    return a(1)


def offering(**properties):
    return {"type": "function", "function": {"name": "f", "parameters": {"properties": properties}}}


CALLABLES = {
    "a builtin": (math.sqrt, None, "cannot be called by name"),
    "a builtin with a schema": (math.sqrt, offering(x={"type": "number"}), "cannot be called by name"),
    "no signature": (max, offering(x={}), "cannot tell its parameters"),
    "a partial without a name": (functools.partial(as_hinted, expression="1"), None, "has no name"),
    "no function": (7, None, "not for an object of type int"),
    "another argument": (lambda x: x, offering(y={}), "its schema offers 'y', which it does not take"),
}


@pytest.mark.parametrize("case", CALLABLES)
def test_what_cannot_be_called_by_name_is_refused_when_it_is_decorated(case):
    function, schema, message = CALLABLES[case]
    with pytest.raises(ConfigError, match=message):
        FunctionTool(function, schema=schema)


class Scaled:
    """An object that is called."""

    def __init__(self, factor):
        self.factor = factor

    async def __call__(self, n: int) -> str:
        """Multiplies."""
        return str(n * self.factor)


def multiplied(n: int, factor: int = 1) -> str:
    """Multiplies."""
    return str(n * factor)


@pytest.mark.parametrize("function", [Scaled(3), functools.partial(multiplied, factor=3), Scaled(3).__call__])
def test_partials_and_objects_are_described_by_what_they_call(function):
    tool = FunctionTool(function, "triple")
    described = tool.tool_schema.to_openai()["function"]
    assert (described["description"], list(described["parameters"]["properties"])) == ("Multiplies.", ["n"])
    assert asyncio.run(tool.execute("i", {"n": 2}))[0].text == "6"


UNEXPRESSIBLE = {
    "no hint": (unhinted, "unhinted: parameter 'a' has no type hint"),
    "arguments": (variadic, r"variadic: parameter '\*values: int' cannot be called by name"),
    "keywords": (keywords, r"keywords: parameter '\*\*values: int' cannot be called by name"),
    "no schema": (unschemable, "unschemable: the hint of 'a'"),
    "typo": (typo, "typo: its docstring describes 'qery', which is not a parameter; did you mean 'query'"),
    "generator": (yields, "yields: it yields; return one answer"),
    "class": (Owner, "Owner is a class"),
    "method": (Owner.method, "method is a method: decorate a plain function"),
    "name": (unknown_hint, "unknown_hint: cannot read its type hints: name 'NoSuchName' is not defined"),
    "callback": (callback, "callback: "),
}
if sys.version_info >= (3, 11):  # before, Python takes the default None for an Optional hint
    UNEXPRESSIBLE["default"] = (wrong_default, "wrong_default: the default of 'a' does not fit its hint")
if sys.version_info < (3, 12):
    UNEXPRESSIBLE["TypedDict"] = (
        stdlib_typed_dict,
        "the hint of 'a' has no JSON Schema: .*typing_extensions.TypedDict",
    )


def test_a_function_of_the_users_file_is_named_by_file_and_line(tmp_path):
    code = 'from etude.tools import function_tool\n\n\n@function_tool\ndef track(parcel):\n    "Finds it."\n'
    (tmp_path / "mine.py").write_text(code)
    with pytest.raises(ConfigError, match=r"function tool track \(.*mine\.py:4\): parameter 'parcel' has no type hint"):
        load_function_tools(str(tmp_path / "mine.py"))


@pytest.mark.parametrize("case", UNEXPRESSIBLE)
def test_what_cannot_be_a_tool_says_so_when_it_is_decorated(case):
    function, message = UNEXPRESSIBLE[case]
    with pytest.raises(ConfigError, match=message) as caught:
        FunctionTool(function)
    assert "\n" not in str(caught.value)


def test_a_schema_of_ones_own_still_converts_by_the_hints():
    def walk(node: Node, **more: int) -> str:
        return f"{node.value} {more}"

    schema = {"type": "function", "function": {"name": "walk", "parameters": {"properties": {"node": {}}}}}
    tool = FunctionTool(walk, schema=schema)
    response, _, _ = asyncio.run(tool.execute("i", {"node": {"value": 3}, "other": 1}))
    assert response.text == "3 {'other': 1}"


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"timeot": 3}, "tool 'as_hinted': unknown key config.timeot; did you mean 'timeout'"),
        ({"timeout": "soon"}, "config.timeout"),
    ],
)
def test_limits_of_a_function(config, message):
    tool = FunctionTool(as_hinted, config={"timeout": 5})
    assert tool.configured({"max_retries": 2}).config == {"timeout": 5, "max_retries": 2}
    assert tool.configured({}).tool_schema.to_openai() == tool.tool_schema.to_openai()
    with pytest.raises(ConfigError, match=message):
        FunctionTool(as_hinted, config=config)


async def test_a_function_that_hangs_starves_no_other():
    never = threading.Event()

    def hangs() -> str:
        never.wait(30)
        return ""

    def works() -> str:
        return "fine"

    hanging, working = FunctionTool(hangs), FunctionTool(works)
    stuck = [asyncio.ensure_future(hanging.execute("i", {})) for _ in range(40)]
    try:
        assert (await asyncio.wait_for(working.execute("i", {}), 20))[0].text == "fine"
    finally:
        never.set()
        await asyncio.gather(*stuck)


json_values = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**53), 2**53) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=8,
)


@settings(max_examples=60)
@given(st.dictionaries(st.sampled_from(["trip", "options", "node", "which", "level", "seen", "odd"]), json_values))
def test_whatever_a_model_writes_is_an_answer_or_an_error_for_the_model(arguments):
    with contextlib.suppress(ToolError):
        response, _, _ = asyncio.run(EVERYTHING.execute("i", arguments))
        assert isinstance(response, ToolResponse)


EVERYTHING = FunctionTool(everything)
