"""Every YAML and Python example of the tool system's guide, run after the import table of docs/migrating.md.

The guide is read from beside this checkout. What its examples leave to the reader (a model, a search service, the data
set's rows) is supplied here; nothing in an example is changed but the names in the table, its placeholders `...` and
its logging variable.
"""

import asyncio
import inspect
import json
import logging
import os
import re
import sys
import textwrap
import uuid
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Optional

import aiohttp
import pytest
import yaml
from aiohttp import web
from http_stage import listening

import etude.tools
from etude.data import check_row, read_rows, write_parquet
from etude.schemas import FunctionCall
from etude.tools import BaseTool, ToolSession, load_tools
from etude.tools.builtin.geo3k import Geo3kTool
from etude.tools.session import SECTIONS

ROOT = Path(__file__).parents[2]
GUIDE = next((ROOT.parent / "shared" / "seeds").glob("000_*.txt"), None)
pytestmark = pytest.mark.skipif(GUIDE is None, reason="the guide is not beside this checkout")

BLOCK = re.compile(r"^```(\w+)\n(.*?)^```$", re.DOTALL | re.MULTILINE)
ROW = re.compile(r"^\| `([^`]+)` \| `([^`]+)` \|", re.MULTILINE)


def import_table():
    """(there, here) of the rows under "Imports", longest first, so that a class goes before its module."""
    page = (ROOT / "docs" / "migrating.md").read_text(encoding="utf-8")
    section = page.partition("## Imports\n")[2].partition("\n## ")[0]
    return sorted(ROW.findall(section), key=lambda row: -len(row[0]))


def migrated(text):
    for there, here in import_table():
        text = text.replace(there, here)
    return text


BLOCKS = [] if GUIDE is None else [(kind, migrated(body)) for kind, body in BLOCK.findall(GUIDE.read_text("utf-8"))]
PYTHON = [body for kind, body in BLOCKS if kind == "python"]
YAML = [body for kind, body in BLOCKS if kind == "yaml"]


def block(mark, kind=None):
    """The one block that holds `mark`."""
    [found] = [body for body in (kind or PYTHON) if mark in body]
    return found


def names(**more):
    """What the guide's fragments take for granted."""
    return {
        "BaseTool": BaseTool,
        "OpenAIFunctionToolSchema": etude.tools.OpenAIFunctionToolSchema,
        "ToolResponse": etude.tools.ToolResponse,
        "rollout_trace_op": etude.tools.rollout_trace_op,
        "Any": object,
        "Optional": Optional,
        "asyncio": asyncio,
        "aiohttp": aiohttp,
        "logger": logging.getLogger("guide"),
        "os": os,
        "uuid4": uuid.uuid4,
        "__name__": "guide",
    } | more


def executed(code, **more):
    space = names(**more)
    exec(compile(code, str(GUIDE), "exec"), space)
    return SimpleNamespace(**space)


def fragment(code, *bases):
    """A class whose body is `code`, above `bases`."""
    made = executed("class Made(*bases):\n" + textwrap.indent(code, "    "), bases=bases)
    return made.Made


def schema(name, **properties):
    parameters = {"type": "object", "properties": properties}
    return etude.tools.OpenAIFunctionToolSchema.model_validate(
        {"type": "function", "function": {"name": name, "parameters": parameters}}
    )


async def conversation(tool, calls, kwargs=None):
    """(outcomes, final reward) of one call a turn under a session."""
    row = {tool.name: kwargs or {}}
    async with ToolSession({tool.name: tool}, row, request_id="t") as session:
        outcomes = []
        for turn, arguments in enumerate(calls):
            call = FunctionCall(name=tool.name, arguments=json.dumps(arguments))
            outcomes += await session.execute([call], turn)
        return outcomes, (await session.calc_rewards())[tool.name]


def test_the_table_leaves_no_old_module():
    # Fragments of verl's own source, quoted with their place in it, are no examples.
    quoted = ("_handle_pending_state", "parsed_tool_calls", "calc_reward_and_release_fn")
    for body in PYTHON + YAML:
        code = "\n".join(line for line in body.splitlines() if not line.startswith("#"))
        if not any(mark in body for mark in quoted):
            assert "verl." not in code, code
            assert "from ." not in code, code


@pytest.mark.parametrize("method", ["create", "execute", "calc_reward", "release"])
def test_signatures(method):
    [line] = [body for body in PYTHON if body.startswith(f"async def {method}(") and body.count("\n") == 1]
    shown = executed(f"{line.strip()}: ...", dict=dict)
    wanted = inspect.signature(getattr(shown, method)).parameters
    ours = inspect.signature(getattr(BaseTool, method)).parameters
    assert [name for name, p in wanted.items() if p.kind is not p.VAR_KEYWORD] == list(ours)[:-1]


@pytest.fixture
def yours(tmp_path, monkeypatch):
    """A folder with the template as `your_tool.py`, the search example as `search_tool.py`, and the two YAML files."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("SEARCH_API_KEY", "the key")
    (tmp_path / "your_tool.py").write_text(block("# verl/tools/your_tool.py"), encoding="utf-8")
    (tmp_path / "your_tool.yaml").write_text(block("your_tool_name", YAML), encoding="utf-8")
    yield tmp_path
    sys.modules.pop("your_tool", None)


async def test_the_template_and_its_yaml(yours):
    [tool] = load_tools(yours / "your_tool.yaml")
    assert tool.name == "your_tool_name"
    assert tool.config["timeout"] == 30
    assert (
        tool.get_openai_tool_schema().to_openai()
        == yaml.safe_load(block("your_tool_name", YAML))["tools"][0]["tool_schema"]
    )
    outcomes, reward = await conversation(
        tool, [{"input": "x"}, {"input": "y", "option": 2}], {"create_kwargs": {"ground_truth": "z"}}
    )
    assert [outcome.response.text for outcome in outcomes] == ["Result: None"] * 2
    assert [outcome.metrics for outcome in outcomes] == [{"metric_name": 0.0}] * 2
    assert reward == 0.0
    assert tool._instance_dict == {}


async def test_the_templates_own_test(yours):
    example = block("async def test_tool_lifecycle").replace("{...}", "{}")
    await executed(example).test_tool_lifecycle()


def test_the_yaml_with_several_tools(yours):
    path = yours / "tools.yaml"
    path.write_text(block("支持同时配置多个工具", YAML), encoding="utf-8")
    geo3k, search = load_tools(path)
    assert (geo3k.name, search.name) == ("calc_geo3k_reward", "web_search")
    assert search.config["api_key"] == "the key"
    assert (
        geo3k.get_openai_tool_schema().function.parameters.properties["answer"].description
        == "The answer in \\boxed{} format"
    )


def prepared(code, example, **more):
    """The row that a preprocessing example makes of `example`, as it is read back from parquet."""
    module = executed(code, **more)
    row = module.make_map_fn("train")(dict(example), 7)
    return row


def test_the_preprocessing_template(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "datasets", ModuleType("datasets"))
    row = prepared(block("your_dataset_w_tool.py"), {"question": "2+2?", "answer": "4"})
    write_parquet([row, row], tmp_path / "train.parquet")
    [read, _] = read_rows(tmp_path / "train.parquet")
    checked = check_row(read, "x", ["your_tool_name", "another_tool"])
    kwargs = checked["extra_info"]["tools_kwargs"]
    assert kwargs["your_tool_name"]["create_kwargs"] == {"ground_truth": "4", "metadata": {"difficulty": "hard"}}
    assert kwargs["your_tool_name"]["execute_kwargs"] == {"timeout": 30, "verbose": True}
    assert kwargs["another_tool"] == {"create_kwargs": {"config_param": "value"}}


def test_the_form_of_tools_kwargs():
    shown = executed("shown = {" + block('"<tool_name>"') + "}").shown
    assert tuple(shown["tools_kwargs"]["<tool_name>"]) == SECTIONS


async def test_geo3k_in_the_guide_and_here(tmp_path):
    (tmp_path / "geo3k.yaml").write_text(block("A tool for calculating the reward of geo3k", YAML), encoding="utf-8")
    [ours] = load_tools(tmp_path / "geo3k.yaml")
    assert type(ours) is Geo3kTool
    theirs = executed(block("# verl/tools/geo3k_tool.py")).Geo3kTool({"type": "native"}, ours.tool_schema)
    calls = [
        {"answer": "3"},
        {"answer": "7.0"},
        {"answer": "7"},
        {"answer": "\\sqrt{49}"},
        {"answer": ""},
        {"answer": "x"},
    ]
    kwargs = {"create_kwargs": {"ground_truth": "7"}}
    results = [await conversation(tool, calls, kwargs) for tool in (theirs, ours)]
    said = [[(o.response.text, o.reward, o.metrics) for o in outcomes] for outcomes, _ in results]
    assert said[0] == said[1]
    assert [reward for _, reward, _ in said[0]] == [-0.05, 0.0, -0.05, -0.05, -0.05, -0.05]
    assert results[0][1] == results[1][1] == 0.0


def test_the_geo3k_preprocessing():
    example = {"problem": "<image>Find x.", "answer": "3", "images": [{"bytes": b"png"}]}
    row = prepared(block("geo3k_multiturn_w_tool.py"), example, instruction_following="Box it.")
    checked = check_row(row, "x", ["calc_geo3k_reward"])
    assert checked["prompt"][1]["content"] == "<image>Find x. Box it."
    assert checked["extra_info"]["tools_kwargs"]["calc_geo3k_reward"]["create_kwargs"] == {"ground_truth": "3"}


async def test_the_video_holmes_arguments(tmp_path):
    av = pytest.importorskip("av")
    import numpy as np

    path = tmp_path / "video.mp4"
    with av.open(str(path), "w") as container:
        stream = container.add_stream("mpeg4", rate=5)
        stream.width = stream.height = 64
        for level in range(10):
            frame = av.VideoFrame.from_ndarray(np.full((64, 64, 3), level, np.uint8), format="rgb24")
            container.mux(stream.encode(frame))
        container.mux(stream.encode())
    models = tmp_path / "models.py"
    models.write_text(
        "def detect(image, labels=None):\n    return []\n\n\ndef say(image, **asked):\n    return str(asked)\n"
    )
    arguments = block("execute_frame_extraction").replace("/path/to/video.mp4", str(path))
    row = executed(f"shown = {{{arguments}}}", answer="B").shown["tools_kwargs"]
    os.environ.update({"ETUDE_DETECTION_MODEL": f"{models}:detect", "ETUDE_CAPTION_MODEL": f"{models}:say"})
    try:
        tools = {tool.name: tool for tool in load_tools(etude.tools.builtin_config("video_holmes"))}
    finally:
        del os.environ["ETUDE_DETECTION_MODEL"], os.environ["ETUDE_CAPTION_MODEL"]
    async with ToolSession(tools, row, request_id="t") as session:
        said = []
        for name in list(row)[:3]:
            [outcome] = await session.execute([FunctionCall(name=name, arguments="{}")], turn=0)
            said.append(outcome.response)
        [_] = await session.execute([FunctionCall(name="calc_video_reward", arguments='{"answer": "(B)"}')], turn=1)
        rewards = await session.calc_rewards()
    assert len(said[0].image) == 4
    assert said[1].text.endswith("nothing found")
    assert said[2].text.endswith(str({"model_name": "blip2", "prompt": None}))
    assert rewards["calc_video_reward"] == 1.0


async def test_web_search_in_the_guide_and_here(yours, tmp_path):
    asked = []

    async def handler(request):
        asked.append((dict(request.query), request.headers["Authorization"]))
        return web.json_response([{"title": f"T{n}", "snippet": f"S{n}"} for n in range(int(request.query["num"]))])

    async with listening(handler) as url:
        said = await searches(f"{url}/search", tmp_path)
    assert said[0] == said[1]
    assert said[1][1][1:] == (-0.01, {"num_results": 5, "total_calls": 2})
    assert asked[0] == asked[2] == ({"q": "a", "num": "5"}, "Bearer the key")


async def searches(url, tmp_path):
    """What the guide's tool and ours answer to two searches."""
    code = block("# verl/tools/search_tool.py").replace('f"https://api.{self.search_engine}.com/search"', repr(url))
    code = code.replace("timeout=timeout\n", "timeout=aiohttp.ClientTimeout(total=timeout)\n")
    [entry] = yaml.safe_load(block("The search query", YAML))["tools"]
    entry["config"]["url"] = url
    (tmp_path / "search.yaml").write_text(yaml.safe_dump({"tools": [entry]}), encoding="utf-8")
    [ours] = load_tools(tmp_path / "search.yaml")
    assert (ours.name, ours.config["engine"]) == ("web_search", "google")
    theirs = executed(code).SearchTool(ours.config, ours.tool_schema)
    kwargs = executed("shown = {" + block('"web_search": {') + "}").shown["tools_kwargs"]["web_search"]
    results = [await conversation(tool, [{"query": "a"}, {"query": "b"}], kwargs) for tool in (theirs, ours)]
    return [[(o.response.text, o.reward, o.metrics) for o in outcomes] for outcomes, _ in results]


async def test_step_and_final_rewards():
    code = block("_is_action_redundant").replace("ToolResponse(...)", "ToolResponse(text='ok')")

    class Yours(fragment(code, BaseTool)):
        _instance_dict = {"t:game": {"num_steps": 3}}  # noqa: RUF012

        def _is_action_valid(self, parameters):
            return parameters["valid"]

        def _is_action_redundant(self, instance_id, parameters):
            return not parameters["valid"]

        def _is_task_completed(self, state):
            return True

    outcomes, reward = await conversation(Yours({}, schema("game")), [{"valid": True}, {"valid": False}])
    assert [outcome.reward for outcome in outcomes] == pytest.approx([0.1, -0.07])
    assert reward == 1.25


def test_the_sum_of_rewards():
    space = executed(block("total_reward = sum(step_rewards)"), step_rewards=[0.1, -0.05, 0.1, 0.0], final_reward=1.0)
    assert space.total_reward == pytest.approx(1.15)


async def test_errors_that_a_tool_handles_itself():
    class Yours(fragment(block("_validate_parameters"), BaseTool)):
        def _validate_parameters(self, parameters):
            return "do" in parameters

        async def _do_work(self, instance_id, parameters):
            if parameters["do"] == "hang":
                raise TimeoutError
            return 10 // parameters["do"]

    outcomes, _ = await conversation(Yours({}, schema("work")), [{}, {"do": 5}, {"do": "hang"}, {"do": 0}])
    assert [outcome.response.text for outcome in outcomes] == [
        "Invalid parameters",
        "Success: 2",
        "Operation timed out",
        "Error: integer division or modulo by zero",
    ]
    assert [outcome.reward for outcome in outcomes] == [-0.1, 0.1, -0.05, -0.1]


async def test_logging(caplog, monkeypatch):
    monkeypatch.setenv("ETUDE_LOGGING_LEVEL", "INFO")
    made = executed(block("Executing tool for instance"))

    class Yours(made.YourTool):
        async def _do_work(self, parameters):
            return "done"

    outcomes, _ = await conversation(Yours({}, schema("work")), [{}])
    assert outcomes[0].response.text == "done"
    assert "Execution completed: done" in caplog.text


async def test_state_and_shared_resources():
    code = block("_load_heavy_model") + textwrap.indent(block("_prepare_cache"), "    ")
    made = executed(code)

    class Yours(made.YourTool):
        def _load_heavy_model(self):
            return "model"

        def _create_api_client(self):
            return "client"

        async def _connect(self):
            await asyncio.sleep(0)
            return "resource"

        _load_model = _connect_to_api = _prepare_cache = _connect

        async def execute(self, instance_id, parameters, **kwargs):
            return etude.tools.ToolResponse(text=str(self._instance_dict[instance_id])), 0.0, {}

    outcomes, _ = await conversation(Yours({}, schema("work")), [{}])
    assert outcomes[0].response.text == str({"resources": ["resource"] * 3})
    assert executed(block('self._instance_dict[instance_id] = {\n            "data": []')).YourTool
    assert executed(block("class BadTool")).BadTool


def test_the_design_of_arguments():
    code = block("CREATE_KWARGS - ")
    create, execute, parameters = re.findall(r"\{.*?\n\}", code, re.DOTALL)
    space = executed(f"parts = [{create}, {execute}, {parameters}]", answer="42")
    assert [len(part) for part in space.parts] == [3, 3, 2]
