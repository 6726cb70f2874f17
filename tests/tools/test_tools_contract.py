"""A tool whose class or return values break the contract ends the run with one line that names it; whatever a session can
await and read still runs."""

import asyncio
import functools

import numpy as np
import pytest
from session_stage import Scripted, call, in_virtual_time, outcome_of, schema, session

from etude.errors import ConfigError, DataError, InfrastructureError, ToolError
from etude.schemas import ToolResponse
from etude.tools import BaseTool, FunctionTool, ToolSession, load_tools

EXECUTE = "async def execute(self, instance_id, parameters, **kwargs): return 'x', 0.0, {}"
BROKEN = {
    "no execute": ("async def run(self, instance_id, parameters): return 'x', 0.0, {}", "execute is missing"),
    "a plain def": ("def execute(self, instance_id, parameters): return 'x', 0.0, {}", "execute is not asynchronous"),
    "an async generator": (
        "async def execute(self, instance_id, parameters): yield 'x'",
        "execute is not asynchronous",
    ),
    "no function": ("execute = 'x'", "execute is not asynchronous"),
    "too few parameters": ("async def execute(self, parameters): return 'x', 0.0, {}", "execute cannot be called"),
    "a plain create": (
        f"{EXECUTE}\n    def create(self, instance_id=None): return instance_id, None",
        "create is not asynchronous",
    ),
    "a plain release": (f"{EXECUTE}\n    def release(self, instance_id): print(1)", "release is not asynchronous"),
    "a calc_reward without an id": (f"{EXECUTE}\n    async def calc_reward(self): return 1", "calc_reward cannot be"),
}


def load(tmp_path, body):
    """Loads the tool of a file whose class `Mine` has this body."""
    (tmp_path / "mine.py").write_text(f"from etude.tools import *\nclass Mine(BaseTool):\n    {body}\n")
    function = '{"type": "function", "function": {"name": "mine"}}'
    (tmp_path / "tools.yaml").write_text(f"tools: [{{class_name: 'mine.py:Mine', tool_schema: {function}}}]")
    [tool] = load_tools(tmp_path / "tools.yaml")
    return tool


@pytest.mark.parametrize("name", BROKEN)
def test_a_class_that_breaks_the_contract_is_refused_when_its_file_is_loaded(tmp_path, name):
    body, fault = BROKEN[name]
    with pytest.raises(ConfigError, match=rf"tool 'mine' \(Mine, .*mine\.py(:\d+)?\): {fault}.*define async def"):
        load(tmp_path, body)


def in_a_thread(function):
    @functools.wraps(function)
    def wrapper(*args, **kwargs):
        return asyncio.to_thread(function, *args, **kwargs)

    return wrapper


class Delegates(BaseTool):
    def execute(self, instance_id, parameters, **kwargs):
        async def work():
            return "x", 0.0, {}

        return work()


class Threaded(BaseTool):
    @in_a_thread
    def execute(self, instance_id, parameters, **kwargs):
        return "x", 0.0, {}


class Raises(BaseTool):
    def execute(self, instance_id, parameters, **kwargs):
        raise ToolError("x")


@pytest.mark.parametrize("kind", [Delegates, Threaded, Raises])
async def test_a_plain_method_that_returns_something_to_await_is_accepted(kind):
    async with session(kind({}, schema("t"))) as opened:
        assert (await opened.execute([call()], 0))[0].response.text == "x"


def test_a_plain_method_whose_source_does_not_show_it_ends_the_run_at_its_first_call():
    def result():
        return "x", 0.0, {}

    class Hidden(BaseTool):
        def execute(self, instance_id, parameters, **kwargs):
            return result()

    with pytest.raises(ConfigError, match=r"Hidden\.execute.*async def"):
        outcome_of(Hidden({}, schema("t")))


WRONG = [
    None, 7, (), (ToolResponse(),), ("x", 0.0), (1, 0.0, {}), (b"x", 0.0, {}), (ToolResponse(), 0.0, []), ("x", "much", {}),
    ("x", [1.0], {}), ("x", np.array([1.0, 2.0]), {}),
]  # fmt: skip


class Returns(BaseTool):
    """Returns these values from its methods, and counts the calls."""

    def __init__(self, config, **values):
        super().__init__(config, schema("t"))
        self.values, self.calls = {"create": "id", "execute": "x", "calc_reward": 1.0, **values}, []

    def _value(self, method):
        self.calls.append(method)
        return self.values.get(method)

    async def create(self, instance_id=None, **kwargs):
        return self._value("create")

    async def execute(self, instance_id, parameters, **kwargs):
        return self._value("execute")

    async def calc_reward(self, instance_id, **kwargs):
        return self._value("calc_reward")

    async def release(self, instance_id, **kwargs):
        self._value("release")


@pytest.mark.parametrize("returned", WRONG, ids=repr)
@pytest.mark.parametrize("config", [{}, {"on_exception": "infrastructure", "max_retries": 3}], ids=str)
def test_a_wrong_return_value_of_execute_ends_the_run_at_once(returned, config):
    tool = Returns(config, execute=returned)
    with pytest.raises(ConfigError, match=r"tool 't' \(Returns, .*contract.py:\d+\): execute (must return|returned)"):
        outcome_of(tool)
    assert tool.calls == ["create", "execute", "release"]


@pytest.mark.parametrize(
    ("method", "value"),
    [("create", ["x"]), ("create", (1, None)), ("calc_reward", "1.0"), ("calc_reward", {}), ("calc_reward", None)],
)
@in_virtual_time
async def test_so_does_one_of_its_other_methods(method, value):
    tool = Returns({}, **{method: value})
    with pytest.raises(ConfigError, match=rf"tool 't' \(Returns, .*: {method} (must return|returned)"):
        async with session(tool, row=["t"]) as opened:
            await opened.calc_rewards()
    assert tool.calls[-1] == "release"


@pytest.mark.parametrize("reward", [float("nan"), float("inf"), 10**400, 1e31])
def test_a_reward_that_is_not_finite_or_too_large_stays_an_infrastructure_failure(reward):
    with pytest.raises(InfrastructureError, match="tool 't'"):
        outcome_of(Scripted(execute=("x", reward, {})))


def test_verls_looser_forms_are_accepted():
    outcome = outcome_of(Scripted(execute=("plain", None, None)))
    assert (outcome.response, outcome.reward, outcome.metrics) == (ToolResponse(text="plain"), 0.0, {})
    outcome = outcome_of(Scripted(execute=(None, np.float32(0.5), {"n": np.int64(1)})))
    assert (outcome.response.is_empty(), outcome.reward, outcome.metrics) == (True, 0.5, {"n": 1})


def test_a_function_that_returns_too_much_ends_the_run_and_one_that_raises_does_not():
    def four(n: int):
        return "x", 0.0, {}, n

    def raises(n: int):
        raise TypeError("odd")

    with pytest.raises(ConfigError, match=r"tool 'four' \(.*four, .*\.py:\d+\): four must return"):
        asyncio.run(_outcome(FunctionTool(four)))
    assert "TypeError: odd" in asyncio.run(_outcome(FunctionTool(raises))).response.text


async def _outcome(tool):
    async with session(tool) as opened:
        return (await opened.execute([call(tool.name, '{"n": 1}')], 0))[0]


class Stubborn(Returns):
    async def create(self, instance_id=None, size=1):
        return self._value("create")


@pytest.mark.parametrize("section", ["create_kwargs", "execute_kwargs"])
def test_a_rows_arguments_that_a_method_does_not_take_are_an_error_of_the_row(section):
    def double(size: int) -> str:
        return str(2 * size)

    tool = Stubborn({}) if section == "create_kwargs" else FunctionTool(double, "t")
    ToolSession({"t": tool}, {"t": {section: {"size": 2}}}, request_id="r")
    with pytest.raises(DataError, match=rf"tools_kwargs.t.{section}: .*sise"):
        ToolSession({"t": tool}, {"t": {section: {"sise": 2}}}, request_id="r")
