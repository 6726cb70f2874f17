"""The documents' YAML: what loads, and the one line for everything that does not."""

import pytest

from etude.errors import ConfigError
from etude.tools import builtin_config, initialize_tools_from_config, load_tools

TOOL_FILE = """
from etude.tools import BaseTool
class Echo(BaseTool):
    pass
class Named(BaseTool):
    name = "named"
class Renames(BaseTool):
    def __init__(self, config, tool_schema):
        super().__init__(config, tool_schema)
        self.name = "else"
class Explodes(BaseTool):
    def __init__(self, config, tool_schema):
        raise KeyError("no key")
class NoTool:
    pass
"""

PARAMETERS = {
    "type": "object",
    "properties": {"items": {"type": "array", "items": {"$ref": "#/$defs/Item"}, "minItems": 1, "default": []}},
    "required": ["items"],
    "additionalProperties": False,
    "$defs": {"Item": {"type": "object", "properties": {"a": {"enum": [1, 2]}}}},
}


@pytest.fixture
def write(tmp_path):
    (tmp_path / "mine.py").write_text(TOOL_FILE)

    def write_yaml(text, name="tools.yaml"):
        path = tmp_path / name
        path.write_text(text)
        return path

    return write_yaml


def entry(class_name="mine.py:Echo", name="echo", extra="", config="{type: native}", schema=None):
    schema = schema or f"{{type: function, function: {{name: {name}}}}}"
    return f"  - class_name: {class_name}\n    config: {config}\n    tool_schema: {schema}\n{extra}"


def test_a_schema_reaches_the_tool_as_it_was_written(write):
    import json

    schema = {
        "type": "function",
        "function": {"name": "echo", "description": "Says ${it}", "parameters": PARAMETERS, "strict": True},
    }
    (tool,) = initialize_tools_from_config(write("tools:\n" + entry(schema=json.dumps(schema))))
    assert tool.name == "echo"
    assert tool.tool_schema.to_openai() == schema
    assert tool.config == {"type": "native"}


def test_several_files_in_order():
    tools = load_tools([builtin_config("gsm8k"), builtin_config("calculator")])
    assert [tool.name for tool in tools] == ["calc_gsm8k_reward", "calculator"]


def test_the_environment_fills_in_the_configuration(write, monkeypatch):
    monkeypatch.setenv("SEARCH_API_KEY", "se$cret")
    monkeypatch.delenv("ABSENT_KEY", raising=False)
    config = (
        "{key: 'Bearer ${SEARCH_API_KEY}', nested: [{a: '${oc.env:SEARCH_API_KEY}'}], "
        "other: '${oc.env:ABSENT_KEY, fallback}', n: 3}"
    )
    (tool,) = load_tools(write("tools:\n" + entry(config=config)))
    assert tool.config == {"key": "Bearer se$cret", "nested": [{"a": "se$cret"}], "other": "fallback", "n": 3}


@pytest.mark.parametrize("reference", ["${ABSENT_KEY}", "${oc.env:ABSENT_KEY}"])
def test_a_missing_variable_names_variable_file_and_entry(write, monkeypatch, reference):
    monkeypatch.delenv("ABSENT_KEY", raising=False)
    path = write("tools:\n" + entry(name="one") + entry(name="two", config=f"{{a: [{{key: '{reference}'}}]}}"))
    with pytest.raises(
        ConfigError, match=r"tools.yaml: tools\[1\] \(mine.py:Echo\): config.a\[0\].key: .*ABSENT_KEY is not set"
    ):
        load_tools(path)


WRONG = {
    "not YAML": ("tools: [", "not readable as YAML"),
    "no tools": ("tool: []", "expected a list of tools"),
    "empty": ("", "expected a list of tools"),
    "no mapping": ("tools: [calculator]", r"tools\[0\]: expected a mapping"),
    "no class_name": ("tools: [{config: {}}]", r"tools\[0\]: expected a mapping with the key 'class_name'"),
    "unknown key": ("tools:\n" + entry(extra="    tool_shema: {}\n"), "unknown key 'tool_shema'; did you mean"),
    "config no mapping": ("tools:\n" + entry(config="[]"), "config must be a mapping"),
    "duplicate": ("tools:\n" + entry() + entry(), r"tools\[1\].*already is a tool named 'echo'"),
    "missing class": ("tools:\n" + entry("mine.py:Ecco"), r"\(mine.py:Ecco\): .*has no 'Ecco'; did you mean 'Echo'"),
    "missing file": ("tools:\n" + entry("yours.py:Echo"), r"yours.py:Echo\): file not found"),
    "missing module": ("tools:\n" + entry("no_such_package.Echo"), "cannot import 'no_such_package'"),
    "no path": ("tools:\n" + entry("Echo"), "is not of the form"),
    "no tool class": ("tools:\n" + entry("mine.py:NoTool"), r"mine.py:NoTool\): this is no subclass"),
    "not a class": ("tools:\n" + entry("etude.errors.one_line"), "this is no subclass"),
    "constructor": ("tools:\n" + entry("mine.py:Explodes"), "KeyError: 'no key'"),
    "schema": ("tools:\n" + entry(schema="{type: function, function: {}}"), "tool_schema.function.name: Field required"),
    "required": (
        "tools:\n" + entry(schema="{function: {name: echo, parameters: {required: [a]}}}"), "requires 'a', which is not"
    ),
    "no schema": ("tools:\n" + entry(schema="null"), "Echo has no schema"),
    "another name": ("tools:\n" + entry("mine.py:Named"), "Named is the tool 'named', but its schema says 'echo'"),
    "renamed": ("tools:\n" + entry("mine.py:Renames"), "names itself 'else', but its schema says 'echo'"),
    "mcp": ("tools:\n" + entry(config="{type: mcp}"), "'mcp' needs an MCP client, not available in this version"),
    "mcp key": ("tools:\n" + entry(extra="    mcp: {}\n"), "needs an MCP client, not available"),
    "sandbox": ("tools:\n" + entry(config="{type: sandbox_fusion}"), "not available in this version"),
    "type": ("tools:\n" + entry(config="{type: natve}"), "unknown config.type 'natve'; did you mean 'native'"),
    "timeout": ("tools:\n" + entry(config="{timeout: -1}"), r"tools\[0\].*config.timeout must be a positive number"),
    "interpolation": ("tools:\n" + entry(config="{a: '${oc.decode:x}'}"), "names no environment variable"),
    "verl's tool": (
        "tools:\n" + entry("verl.tools.gsm8k_tool.Gsm8kTool"), "here this class is etude.tools.builtin.gsm8k.Gsm8kTool"
    ),
    "verl's other": ("tools:\n" + entry("verl.tools.geo3k_tool.Geo3kTool"), "etude.tools.BaseTool"),
}  # fmt: skip


@pytest.mark.parametrize("case", WRONG)
def test_what_is_wrong_is_one_line_that_names_the_file(write, case):
    text, message = WRONG[case]
    with pytest.raises(ConfigError, match=message) as caught:
        load_tools(write(text))
    assert "tools.yaml" in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_missing_file(tmp_path):
    with pytest.raises(ConfigError, match=r"not found: .*absent.yaml"):
        load_tools(tmp_path / "absent.yaml")


def test_a_class_file_relative_to_the_working_directory(write, tmp_path, monkeypatch):
    path = write("tools:\n" + entry("mine.py:Echo"))
    (tmp_path / "conf").mkdir()
    moved = path.rename(tmp_path / "conf" / "tools.yaml")
    monkeypatch.chdir(tmp_path)
    assert [tool.name for tool in load_tools(moved)] == ["echo"]


def test_an_unknown_builtin():
    with pytest.raises(ConfigError, match="did you mean 'calculator'"):
        builtin_config("calculater")
