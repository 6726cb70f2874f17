"""`etude tools list`, `schema` and `call`: tools by hand, through the real lifecycle, with a status that tells."""

import json

import pytest
from house_stage import one_line_error

from etude.cli.main import cli, run
from etude.tools import FUNCTION_TOOLS

TOOLS = '''
from etude.errors import InfrastructureError
from etude.tools import BaseTool, OpenAIFunctionToolSchema, ToolError, ToolResponse, function_tool

PARAMETERS = {"type": "object", "properties": {"title": {"type": "string"}}, "required": ["title"]}


class Shelf(BaseTool):
    def __init__(self, config, tool_schema=None):
        function = {"name": "shelf", "description": "Puts a book\\n  on the shelf.", "parameters": PARAMETERS}
        super().__init__(config, tool_schema or OpenAIFunctionToolSchema.model_validate({"function": function}))
        self.shelves = {}

    async def create(self, instance_id=None, wanted=1, **kwargs):
        self.shelves[instance_id] = (wanted, [])
        return instance_id, ToolResponse(text=f"wants {wanted}")

    async def execute(self, instance_id, parameters, loud=False, **kwargs):
        wanted, books = self.shelves[instance_id]
        if parameters["title"] == "broken":
            raise InfrastructureError("no shelf")
        if len(books) == wanted:
            raise ToolError("the shelf is full")
        books.append(parameters["title"])
        return ToolResponse(text=f"{len(books)} of {wanted}{'!' if loud else ''}"), 0.25, {"left": wanted - len(books)}

    async def calc_reward(self, instance_id, weight=1.0, **kwargs):
        wanted, books = self.shelves[instance_id]
        return weight * len(books) / wanted

    async def release(self, instance_id, farewell="released", **kwargs):
        import sys

        print(farewell, file=sys.stderr)
        del self.shelves[instance_id]


@function_tool
def cli_doubles(number: int) -> int:
    """Doubles a number."""
    return 2 * number
'''


@pytest.fixture
def config(tmp_path):
    (tmp_path / "mine.py").write_text(TOOLS)
    path = tmp_path / "tools.yaml"
    path.write_text("tools:\n  - class_name: mine.py:Shelf\n  - class_name: mine.py:cli_doubles\n")
    yield path
    FUNCTION_TOOLS._items.pop("cli_doubles", None)


def etude(capsys, *arguments):
    """(status, stdout, stderr)"""
    capsys.readouterr()
    status = run(cli, ["tools", *map(str, arguments)])
    return status, *capsys.readouterr()


def test_list(config, capsys):
    status, out, _ = etude(capsys, "list", config)
    assert status == 0
    first, second = out.splitlines()
    assert first.split()[0] == "shelf"
    assert first.split()[1].endswith("mine.py:Shelf")  # as its YAML names it
    assert first.endswith("Puts a book on the shelf.")
    assert second.split()[0] == "cli_doubles"
    assert second.endswith("Doubles a number.")


def test_schema(config, capsys):
    status, out, _ = etude(capsys, "schema", config)
    assert status == 0
    assert [each["function"]["name"] for each in json.loads(out)] == ["shelf", "cli_doubles"]
    _, out, _ = etude(capsys, "schema", config, "cli_doubles")
    [schema] = json.loads(out)
    assert schema["function"]["parameters"]["properties"] == {"number": {"type": "integer"}}


def test_call_runs_the_whole_lifecycle(config, capsys):
    status, out, err = etude(
        capsys, "call", config, "shelf", '{"title": "Emma"}', '{"title": "Ulysses"}',
        "--create-kwargs", '{"wanted": 4}', "--execute-kwargs", '{"loud": true}',
        "--calc-reward-kwargs", '{"weight": 10}', "--release-kwargs", '{"farewell": "gone"}',
    )  # fmt: skip
    assert status == 0
    assert "create     wants 4\n" in out
    assert "call       1 of 4!\n" in out
    assert "call       2 of 4!\n" in out
    assert "step reward 0.25" in out
    assert '{"left": 2}' in out
    assert out.endswith("reward     5\n")
    assert "gone" in err


def test_call_as_json(config, capsys, tmp_path):
    (tmp_path / "arguments.json").write_text('{"title": "Emma"}')
    status, out, _ = etude(
        capsys, "call", config, "shelf", f"@{tmp_path / 'arguments.json'}", '{"title": "X"}', "--json"
    )
    assert status == 1  # the second book did not fit
    report = json.loads(out)
    assert (report["tool"], report["initial"], report["reward"]) == ("shelf", [{"text": "wants 1"}], 1.0)
    first, second = report["calls"]
    assert (first["response"], first["reward"], first["metrics"], first["error"]) == (
        {"text": "1 of 1"}, 0.25, {"left": 0}, None
    )  # fmt: skip
    assert (second["response"], second["error"]) == ({"text": "the shelf is full"}, "tool")


def test_calls_of_one_turn(config, capsys):
    arguments = [f'{{"title": "{i}"}}' for i in range(3)]
    status, out, _ = etude(capsys, "call", config, "shelf", *arguments, "--at-once", "--create-kwargs", '{"wanted": 3}')
    assert status == 0
    assert out.count("call ") == 3


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["cli_doubles", '{"number": "21"}'], (0, "42")),
        (["cli_doubles", '{"number": "many"}'], (1, "number")),
        (["cli_doubles", "{"], (1, "JSON")),
        (["cli_doubles"], (0, "reward     0")),
        (["shelf", '{"title": "broken"}'], (3, "wants 1")),
    ],
)
def test_the_status_tells_how_it_went(config, capsys, arguments, expected):
    status, out, err = etude(capsys, "call", config, *arguments)
    assert (status, expected[1] in out) == (expected[0], True)
    assert ("infrastructure: " in err) == (status == 3)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["list", "absent.yaml"], "/absent.yaml"),
        (["list", "calculater"], "no file and no built-in tool 'calculater'"),
        (["schema", "calculator", "calc"], "no tool 'calc'"),
        (["call", "calculator", "calculater"], "no tool 'calculater'; did you mean 'calculator'"),
        (
            ["call", "calculator", "calculator", "--create-kwargs", "[1]"],
            "--create-kwargs: expected a JSON object, not list",
        ),
        (["call", "calculator", "calculator", "--create-kwargs", "{"], "--create-kwargs: not valid JSON"),
        (["call", "calculator", "calculator", "@absent.json"], "absent.json: cannot be read"),
        (["call", "calculator", "calculator", "6 * 7"], "write JSON objects, or key=value, here expression=VALUE"),
        (["list", "calculator", "--plugin", "absent.py"], "file not found"),
        (["serve", "calculator", "--tools-kwargs", '{"calc": {}}'], "'calc', which is not configured"),
        (["serve", "calculator", "--transport", "streamable-http", "--path", "mcp"], "--path must begin with '/'"),
        (["serve", "calculator", "--port", "8000"], "--port needs --transport streamable-http"),
        (["serve", "calculator", "--allow-host", "a"], "--allow-host needs --transport streamable-http"),
    ],
)
def test_what_is_wrong_is_one_line(capsys, arguments, message, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert message in one_line_error(capsys, ["tools", *arguments])


def test_a_built_in_tool_by_name_and_a_python_file(config, capsys):
    for arguments in ('{"expression": "6 * 7"}', "expression=6 * 7"):
        status, out, _ = etude(capsys, "call", "calculator", "calculator", arguments)
        assert (status, out.split()[:2]) == (0, ["call", "42"])
    assert (status, out.splitlines()[0]) == (0, "call       42")
    status, out, _ = etude(capsys, "list", config.with_name("mine.py"))
    assert (status, out.split()[0]) == (0, "cli_doubles")


def test_plugins_are_imported_first(tmp_path, capsys):
    (tmp_path / "plugin.py").write_text(
        "from etude.tools import QwenBaseTool, register_tool\n"
        "@register_tool('cli_greet')\n"
        "class Greet(QwenBaseTool):\n"
        "    description = 'Greets.'\n"
        "    parameters = [{'name': 'who', 'type': 'string', 'required': True}]\n"
        "    def call(self, params: dict, **kwargs):\n        return 'hello ' + params['who']\n"
    )
    (tmp_path / "mcp_tools.pydata").write_text("['cli_greet']")
    arguments = [tmp_path / "mcp_tools.pydata", "cli_greet", '{"who": "you"}', "--plugin", tmp_path / "plugin.py"]
    status, out, _ = etude(capsys, "call", *arguments)
    assert (status, out.splitlines()[0]) == (0, "call       hello you")


def test_a_folder_does_not_hide_the_tool_of_its_name(capsys, tmp_path, monkeypatch):
    (tmp_path / "gsm8k").mkdir()
    monkeypatch.chdir(tmp_path)
    status, out, _ = etude(capsys, "list", "gsm8k")
    assert status == 0
    assert "calc_gsm8k_reward" in out
