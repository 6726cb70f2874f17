"""Classes in Qwen-Agent's shape: both spellings of parameters, both forms of arguments, and the registry."""

import asyncio
import importlib
import json
import sys
import threading

import pytest

from etude.errors import ConfigError, ToolError
from etude.schemas import FunctionCall
from etude.tools import TOOL_REGISTRY, QwenBaseTool, QwenTool, ToolSession, load_tools, register_tool

LISTED = [
    {"name": "prompt", "type": "string", "description": "what to draw", "required": True},
    {"name": "sizes", "type": "array", "items": {"type": "integer"}},
]
SCHEMA = {
    "type": "object",
    "properties": {"prompt": {"type": "string"}, "style": {"$ref": "#/$defs/Style"}},
    "required": ["prompt"],
    "additionalProperties": False,
    "$defs": {"Style": {"enum": ["ink", "oil"]}},
}


class Draw:
    """As in Qwen-Agent's README: no constructor, a list of parameters, arguments as JSON text."""

    name = "draw"
    description = "Draws."
    parameters = LISTED

    def call(self, params: str, **kwargs) -> str:
        return f"drawn: {json.loads(params)['prompt']} {kwargs} {threading.current_thread().name[:10]}"


def execute(tool, parameters, **kwargs):
    return asyncio.run(tool.execute("i", parameters, **kwargs))


@pytest.fixture
def registry():
    before = dict(TOOL_REGISTRY._items)
    yield TOOL_REGISTRY
    TOOL_REGISTRY._items.clear()
    TOOL_REGISTRY._items.update(before)


def test_a_list_of_parameters_and_arguments_as_text():
    tool = QwenTool(Draw, {})
    function = tool.get_openai_tool_schema().to_openai()["function"]
    assert (function["name"], function["description"]) == ("draw", "Draws.")
    assert function["parameters"]["required"] == ["prompt"]
    assert function["parameters"]["properties"] == {
        "prompt": {"type": "string", "description": "what to draw"},
        "sizes": {"type": "array", "items": {"type": "integer"}},
    }
    response, reward, metrics = execute(tool, {"prompt": "a ç"}, user="x")
    assert (response.text, reward, metrics) == ("drawn: a ç {'user': 'x'} etude-qwen", 0.0, {})


def test_a_json_schema_and_arguments_as_a_dict():
    class Paint(QwenBaseTool):
        name, description, parameters = "paint", "Paints.", SCHEMA

        async def call(self, params: dict, **kwargs):
            return {"seen": params, "cfg": self.cfg}

    tool = QwenTool(Paint, {"key": "k"})
    assert tool.get_openai_tool_schema().to_openai()["function"]["parameters"] == SCHEMA
    answer = json.loads(execute(tool, {"prompt": "x"})[0].text)
    assert answer == {"seen": {"prompt": "x"}, "cfg": {"key": "k"}}


def test_what_calls_return():
    class Item:
        def __init__(self, text=None, image=None):
            self.text, self.image = text, image

    answers = {
        "text": ("t", ("t", None)),
        "number": (3, ("3", None)),
        "list": ([1, "ü"], ('[1, "ü"]', None)),
        "items": ([Item(text="a"), Item(image="i.png"), Item(text="b")], ("a\nb", ["i.png"])),
        "dicts": ([{"text": "a"}, {"image": "i.png"}], ("a", ["i.png"])),
    }

    class Any:
        name = "any"

        def call(self, params: dict, **kwargs):
            return answers[params["which"]][0]

    for which, (_, expected) in answers.items():
        response = execute(QwenTool(Any, {}), {"which": which})[0]
        assert (response.text, response.image) == expected

    class Nothing:
        name = "nothing"

        def call(self, params, **kwargs):
            return None

    with pytest.raises(ToolError, match="returned nothing"):
        execute(QwenTool(Nothing, {}), {})


async def test_qwens_own_check_of_arguments_is_told_to_the_model():
    class Checked(QwenBaseTool):
        name, parameters = "checked", LISTED

        def call(self, params, **kwargs):
            return self._verify_json_format_args(params)["prompt"]

    async with ToolSession({"checked": QwenTool(Checked, {})}, request_id="r") as session:
        calls = [FunctionCall(name="checked", arguments=text) for text in ('{"prompt": "p"}', "{}")]
        good, bad = await session.execute(calls, 0)
    assert (good.response.text, good.error) == ("p", None)
    assert bad.error is not None
    assert "prompt" in bad.response.text


def test_register_tool(registry, tmp_path):
    @register_tool("sketch")
    class Sketch(QwenBaseTool):
        parameters = LISTED

        def call(self, params, **kwargs):
            return f"cfg {self.cfg.get('ink')}"

    assert registry["sketch"] is Sketch
    assert "sketch" in registry
    (tmp_path / "mcp_tools.pydata").write_text("['sketch']")
    (tmp_path / "other.pydata").write_text("[{'name': 'sketch', 'ink': 'blue', 'timeout': 3}]")
    [plain] = load_tools(tmp_path / "mcp_tools.pydata")
    [inked] = load_tools(tmp_path / "other.pydata")
    assert (plain.name, execute(plain, {"prompt": "x"})[0].text) == ("sketch", "cfg None")
    assert (inked.config["timeout"], execute(inked, {"prompt": "x"})[0].text) == (3, "cfg blue")

    with pytest.raises(ConfigError, match="'sketch' is already registered"):
        register_tool("sketch")(type("Other", (QwenBaseTool,), {}))
    other = register_tool("sketch", allow_overwrite=True)(type("Other", (QwenBaseTool,), {}))
    assert registry["sketch"] is other
    with pytest.raises(ConfigError, match="names itself 'draw'"):
        register_tool("paint")(Draw)


@pytest.mark.parametrize(
    ("attributes", "message"),
    [
        ({"name": ""}, "Broken has no name"),
        ({"parameters": "x"}, "Broken.parameters must be a list"),
        ({"parameters": [{"type": "string"}]}, r"Broken.parameters\[0\] must be a mapping with a 'name'"),
        ({"parameters": [{"name": "a"}, {"name": "a"}]}, "there already is a parameter 'a'"),
        ({"parameters": {"type": "object", "required": ["a"]}}, "requires 'a', which is not"),
        ({"parameters": {"properties": 3}}, "Broken: tool_schema.function.parameters.properties"),
    ],
)
def test_a_class_that_cannot_be_a_tool(attributes, message):
    shape = {"name": "broken", "parameters": [], "call": lambda self, params, **kwargs: ""}
    broken = type("Broken", (), shape | attributes)
    broken.__qualname__ = "Broken"
    with pytest.raises(ConfigError, match=message):
        QwenTool(broken, {})


def test_the_tools_of_an_installed_qwen_agent_load_by_name(tmp_path, monkeypatch):
    package = tmp_path / "qwen_agent" / "tools"
    package.mkdir(parents=True)
    (tmp_path / "qwen_agent" / "__init__.py").write_text("")
    (package / "base.py").write_text(
        "TOOL_REGISTRY = {}\n"
        "class BaseTool:\n"
        "    name = ''\n    description = ''\n    parameters = []\n"
        "    def __init__(self, cfg=None):\n        self.cfg = cfg or {}\n"
        "def register_tool(name, allow_overwrite=False):\n"
        "    def enter(cls):\n        cls.name = name\n        TOOL_REGISTRY[name] = cls\n        return cls\n"
        "    return enter\n"
    )
    (package / "__init__.py").write_text(
        "from .base import TOOL_REGISTRY, BaseTool, register_tool\n"
        "@register_tool('weather')\n"
        "class Weather(BaseTool):\n"
        "    description = 'Tells the weather.'\n"
        "    parameters = [{'name': 'city', 'type': 'string', 'required': True}]\n"
        "    def call(self, params, **kwargs):\n        return 'rain in ' + params\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "a.pydata").write_text("['weather']")
    [tool] = load_tools(tmp_path / "a.pydata")
    assert execute(tool, {"city": "Ulm"})[0].text == 'rain in {"city": "Ulm"}'
    forget_qwen_agent()
    (package / "__init__.py").write_text("import a_package_that_qwen_agent_forgot_to_declare\n")
    with pytest.raises(ConfigError, match=r"\[0\] \(weather\): qwen-agent is installed but cannot be imported"):
        load_tools(tmp_path / "a.pydata")
    forget_qwen_agent()


def forget_qwen_agent():
    for name in [name for name in sys.modules if name.split(".")[0] == "qwen_agent"]:
        sys.modules.pop(name)
    importlib.invalidate_caches()


def test_without_qwen_agent_the_error_says_what_is_known(tmp_path):
    (tmp_path / "a.pydata").write_text("['code_interpreter_of_qwen']")
    with pytest.raises(ConfigError, match=r"known: .*calculator.*needs the package qwen-agent"):
        load_tools(tmp_path / "a.pydata")
