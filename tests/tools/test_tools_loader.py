"""Configuration files: what loads, and the one line for everything that does not."""

import json

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from etude.errors import ConfigError, ConfigErrors
from etude.registry import import_object
from etude.tools import FUNCTION_TOOLS, FunctionTool, QwenTool, builtin_config, initialize_tools_from_config, load_tools
from etude.tools.loader import _MOVED

TOOL_FILE = '''
from etude.tools import BaseTool, function_tool
class Echo(BaseTool):
    async def execute(self, instance_id, parameters, **kwargs):
        return "", 0.0, {}
class Named(Echo):
    name = "named"
class Renames(Echo):
    def __init__(self, config, tool_schema):
        super().__init__(config, tool_schema)
        self.name = "else"
class Explodes(Echo):
    def __init__(self, config, tool_schema):
        raise KeyError("no key")
class NoTool:
    pass
class QwenShaped:
    name = "shaped"
    description = "Has Qwen-Agent's shape."
    parameters = [{"name": "q", "type": "string", "description": "what", "required": True}]
    def call(self, params, **kwargs):
        return params
@function_tool
def plain(a: int, b: int = 2) -> int:
    """Adds."""
    return a + b
'''

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

    yield write_yaml
    FUNCTION_TOOLS._items.pop("plain", None)  # another test's file defines another one


def entry(class_name="mine.py:Echo", name="echo", extra="", config="{type: native}", schema=None):
    schema = schema or f"{{type: function, function: {{name: {name}}}}}"
    return f"  - class_name: {class_name}\n    config: {config}\n    tool_schema: {schema}\n{extra}"


def test_a_schema_reaches_the_tool_as_it_was_written(write):
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
    "unknown top key": ("tools: []\nserver: {}", "unknown key 'server'"),
    "a key twice": ("tools:\n- class_name: a\n  class_name: b", "'class_name' is given twice in .* begins in line 2"),
    "empty": ("", "expected a list of tools"),
    "no mapping": ("tools: [7]", r"tools\[0\]: expected a mapping"),
    "unknown name": ("tools: [calculater]", r"tools\[0\] \(calculater\): no tool is registered as .* mean 'calculator'"),
    "a schema alone": (
        "[{type: function, function: {name: echo}}]",
        r"\[0\]: a tool's schema alone, .*; write \{class_name: file.py:Class, tool_schema: \{…\}\}.*@function_tool",
    ),
    "no class_name": ("tools: [{config: {}}]", r"tools\[0\]: expected a mapping with the key 'class_name'"),
    "unknown key": ("tools:\n" + entry(extra="    tool_shema: {}\n"), "unknown key 'tool_shema'; did you mean"),
    "parameters misspelt": (
        "tools:\n" + entry(schema="{function: {name: echo, parameter: {properties: {a: {type: string}}}}}"),
        "unknown key 'parameter'; did you mean 'parameters'",
    ),
    "required misspelt": (
        "tools:\n" + entry(schema="{function: {name: echo, parameters: {require: [a]}}}"),
        "unknown key 'require'; did you mean 'required'",
    ),
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
    "mcp without servers": ("tools: [{config: {type: mcp}}]", "config.type 'mcp' needs the key 'mcp'"),
    "mcp of another class": (
        "tools:\n  - {class_name: 'mine.py:Echo', config: {type: mcp}, mcp: {}}", "derives from etude.tools.MCPBaseTool"
    ),
    "mcp with a schema": ("tools: [{config: {type: mcp}, mcp: {}, tool_schema: {}}]", "remove tool_schema"),
    "mcp with no source": ("tools: [{config: {type: mcp}, mcp: {}}]", "needs either mcp_servers_config_path or"),
    "mcp without its file": (
        "tools: [{config: {type: mcp}, mcp: {mcp_servers_config_path: absent.json}}]", "/absent.json"
    ),
    "mcp key": ("tools:\n" + entry(extra="    mcp: {}\n"), "the key 'mcp' belongs to an entry with config.type 'mcp'"),
    "mcp with an unknown option": (
        "tools: [{config: {type: mcp}, mcp: {mcpServers: {a: {command: x}}, tool_selected: []}}]",
        "unknown key tool_selected; did you mean 'tool_selected_list'",
    ),
    "http without a schema": ("tools: [{config: {type: http, url: 'http://h'}}]", "needs a tool_schema"),
    "type": ("tools:\n" + entry(config="{type: natve}"), "unknown config.type 'natve'; did you mean 'native'"),
    "a function's config": (
        "tools: [{class_name: 'mine.py:plain', config: {timeot: 1}}]", "unknown key config.timeot; did you mean 'timeout'"
    ),
    "timeout": ("tools:\n" + entry(config="{timeout: -1}"), r"tools\[0\].*config.timeout must be a number above 0"),
    "interpolation": ("tools:\n" + entry(config="{a: '${oc.decode:x}'}"), "names no environment variable"),
    "verl's tool": (
        "tools:\n" + entry("verl.tools.gsm8k_tool.Gsm8kTool"), "here this class is etude.tools.builtin.gsm8k.Gsm8kTool"
    ),
    "verl's search": (
        "tools:\n" + entry("verl.tools.search_tool.SearchTool"), "etude.tools.builtin.web_search.WebSearchTool"
    ),
    "verl's other": ("tools:\n" + entry("verl.tools.my_tool.MyTool"), "derive your class from etude.tools.BaseTool"),
    "servers": ("mcpServers: []", "mcpServers must be a mapping"),
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


def test_where_verls_classes_went_is_where_they_are():
    for targets in _MOVED.values():
        for target in [word for word in targets.split() if word.startswith("etude.")]:
            assert isinstance(import_object(target), type)


def test_functions_and_qwen_shaped_classes_are_tools_too(write):
    path = write(
        "tools:\n"
        "  - {class_name: 'mine.py:plain', config: {timeout: 3}}\n"
        "  - {class_name: 'mine.py:QwenShaped'}\n"
        "  - calculator\n"
        "  - {name: gsm8k, timeout: 4}\n"
    )
    plain, shaped, calculator, gsm8k = load_tools(path)
    assert (type(plain), plain.config, plain(1)) == (FunctionTool, {"timeout": 3}, 3)
    assert type(shaped) is QwenTool
    assert [tool.name for tool in (plain, shaped, calculator, gsm8k)] == [
        "plain", "shaped", "calculator", "calc_gsm8k_reward"
    ]  # fmt: skip
    assert gsm8k.config["timeout"] == 4


def test_a_function_in_yaml_may_have_a_schema_of_its_own(write):
    function = {"name": "add_two", "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}}}
    entries = {"tools": [{"class_name": "mine.py:plain", "tool_schema": {"type": "function", "function": function}}]}
    [tool] = load_tools(write(json.dumps(entries), "tools.json"))
    assert tool.tool_schema.to_openai()["function"] == function


def test_a_python_file_is_a_configuration(write, tmp_path):
    write("")
    assert [tool.name for tool in load_tools(tmp_path / "mine.py")] == ["plain"]


def test_json_and_pydata_say_the_same(write):
    names = []
    for text, name in [
        ('["calculator"]', "a.json"),
        ("# a comment\n['calculator']\n", "a.pydata"),
        ("[{'name': 'calculator', 'timeout': 3}]", "b.pydata"),
        ('{"tools": ["calculator"]}', "c.json"),
    ]:
        names.append([tool.name for tool in load_tools(write(text, name))])
    assert names == [["calculator"]] * 4


@pytest.mark.parametrize(
    ("text", "name", "message"),
    [
        ("[open('x')]", "a.pydata", r"a.pydata: not readable as a Python literal"),
        ("[" * 10_000, "a.pydata", r"a.pydata: not readable as a Python literal"),
        ("[1, 2", "a.pydata", r"a.pydata: not readable as a Python literal"),
        ("'text'", "a.pydata", r"a.pydata: expected a list of tools"),
        ("[{'nme': 'x'}]", "a.pydata", r"a.pydata: \[0\]: unknown key 'nme'"),
        ("[{'name': 3}]", "a.pydata", r"a.pydata: \[0\]: 'name' must be the name of a tool"),
        (
            "[{'mcpServers': {'a': {'cmd': 'x'}}}]",
            "a.pydata",
            r"a.pydata: \[0\]: mcpServers.a: unknown key cmd; did you",
        ),
        ("[{'mcpServers': {}}]", "a.pydata", r"a.pydata: \[0\]: mcpServers must be a mapping of names"),
        ('{"tools": [\n}', "a.json", r"a.json: not readable as JSON: Expecting value at line 2, column 1"),
        ('{"tools": [], "tools": []}', "a.json", r"a.json: not readable as JSON: the key 'tools' is given twice"),
        ('{"mcpServers": {"a": {"command": "x", "url": "http://h"}}}', "a.json", r"a.json: mcpServers.a: needs either"),
    ],
)
def test_what_is_wrong_with_other_forms(write, text, name, message):
    with pytest.raises(ConfigError, match=message) as caught:
        load_tools(write(text, name))
    assert "\n" not in str(caught.value)


def test_a_file_that_is_too_large(write, monkeypatch):
    monkeypatch.setattr("etude.tools.config_file.MAX_FILE_BYTES", 10)
    with pytest.raises(ConfigError, match="larger than 10 bytes"):
        load_tools(write("tools: [calculator]"))


scalars = st.none() | st.booleans() | st.integers(-3, 3) | st.sampled_from(
    ["", "calculator", "mine.py:Echo", "mine.py:NoTool", "http://h/{a}", "mcp", "http", "native", "${HOME}", "${", "\0"]
)  # fmt: skip
keys = st.sampled_from(
    ["tools", "mcpServers", "class_name", "config", "tool_schema", "mcp", "name", "type", "url", "command", "args", "env",
     "function", "parameters", "properties", "required", "timeout", "cache", "headers", "tool_selected_list", "prefix", "a",
     "mcp_servers_config_path", "tool_schemas_path", "num_instances"]
)  # fmt: skip
contents = st.recursive(
    scalars, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(keys, inner, max_size=4), max_leaves=12
)


@settings(max_examples=150, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(entry=st.dictionaries(keys, contents, max_size=5), shape=st.sampled_from(["entry", "list", "bare"]))
@example(entry={"tools": [None, None]}, shape="bare")
def test_whatever_a_file_says_is_tools_or_a_line_for_each_fault(write, monkeypatch, entry, shape):
    monkeypatch.setattr("etude.tools.loader.discover_tools", lambda *details: [])
    content = {"entry": {"tools": [entry]}, "list": [entry], "bare": entry}[shape]
    path = write(json.dumps(content), "any.json")
    try:
        load_tools(path)
    except ConfigError as error:
        faults = error.faults if isinstance(error, ConfigErrors) else [error]
        assert all("any.json" in str(fault) and "\n" not in str(fault) for fault in faults)
