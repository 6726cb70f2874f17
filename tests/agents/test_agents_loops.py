"""Loops named by a file, and the loop of a row that names none."""

import pytest
from agents_stage import run

from etude.agents import AGENT_LOOPS, AgentOptions
from etude.agents.base import register_agent_loops
from etude.errors import ConfigError

LOOP = """
import sys
from etude.agents import SingleTurnAgentLoop
class Counting(SingleTurnAgentLoop):
    seen = []
    def __init__(self, trainer_config, *, bonus=0, **kwargs):
        super().__init__(trainer_config, **kwargs)
        self.bonus = bonus
    async def run(self, sampling_params, **row):
        self.seen.append(self.bonus)
        return await super().run(sampling_params, **row)
class Nothing: ...
class Leaves(SingleTurnAgentLoop):
    def __init__(self, trainer_config, *, late=False, **kwargs):
        super().__init__(trainer_config, **kwargs)
        self.late = late or sys.exit("no key given")
    async def run(self, sampling_params, **row):
        sys.exit("no key given")
"""


@pytest.fixture
def file(tmp_path, monkeypatch):
    monkeypatch.setattr(AGENT_LOOPS, "_items", dict(AGENT_LOOPS._items))
    (tmp_path / "loop.py").write_text(LOOP)

    def write(text):
        path = tmp_path / "loops.yaml"
        path.write_text(text)
        return path

    return write


def roll(row, **given):
    [result], _ = run(row=row, **given)
    return result.trajectory


def test_a_loop_from_a_file_runs_with_its_keywords(file):
    path = file("- {name: counting, _target_: 'loop.py:Counting', bonus: 7}")
    assert register_agent_loops(path) == ["counting"]
    assert register_agent_loops(path) == ["counting"]  # a second run in one process
    assert roll({"agent_name": "counting"}).assistant_turns == 1
    assert AGENT_LOOPS.get("counting").loop_class.seen == [7]


@pytest.mark.parametrize("late", ["false", "true"])
def test_a_loop_that_exits_the_interpreter_is_an_error_that_says_so(file, late):
    """In its constructor or when it runs: either would end the event loop, and with it the engine and other tools."""
    register_agent_loops(file(f"- {{name: leaves, _target_: 'loop.py:Leaves', late: {late}}}"))
    with pytest.raises(RuntimeError, match="SystemExit: no key given"):
        roll({"agent_name": "leaves"})


def test_the_default_loop_is_that_of_rows_without_a_name(file):
    register_agent_loops(file("- {name: counting, _target_: 'loop.py:Counting', bonus: 1}"))
    seen = AGENT_LOOPS.get("counting").loop_class.seen
    before = len(seen)
    roll({}, agent=AgentOptions(default_agent_loop="counting"))
    assert len(seen) == before + 1
    roll({"agent_name": "single_turn_agent"}, agent=AgentOptions(default_agent_loop="counting"))
    assert len(seen) == before + 1


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("name: a", "expected a list"),
        ("- name: a", "expected a mapping with 'name' and '_target_'"),
        ("- {name: a, _target_: 'loop.py:Nothing'}", "no subclass of etude.agents.AgentLoopBase"),
        ("- {name: a, _target_: 'loop.py:Conting'}", "did you mean 'Counting'"),
        ("- {name: tool_agent, _target_: 'loop.py:Counting'}", "'tool_agent' is already registered"),
        (
            "- {name: a, _target_: 'loop.py:Counting'}\n- {name: a, _target_: 'loop.py:Counting', bonus: 1}",
            "entry 1: agent loop 'a' is already registered",
        ),
    ],
)
def test_a_wrong_file_is_one_line_that_names_it(file, text, message):
    path = file(text)
    with pytest.raises(ConfigError, match=message) as raised:
        register_agent_loops(path)
    assert str(raised.value).startswith(str(path))


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(ConfigError, match="agent loop configuration not found"):
        register_agent_loops(tmp_path / "none.yaml")
