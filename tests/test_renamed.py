"""A Python file that still imports verl: one line that says what to write for each of its imports."""

import asyncio
import importlib
from pathlib import Path

import pytest

from etude.agents.base import register_agent_loops
from etude.errors import ConfigError
from etude.registry import MODULES, import_beside, import_module, import_object, missing_file
from etude.rewards.manager import BoundedScorer
from etude.tools import load_tools

TOOL = """import json
from verl.tools.base_tool import (
    BaseTool,
)
from verl import DataProto
import verl.utils.nowhere, os


def lazily():
    from verl.utils.reward_score import gsm8k
"""


def refusal(file):
    with pytest.raises(ConfigError) as caught:
        import_module(str(file))
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_each_import_is_named_with_its_line_and_its_place_here(tmp_path):
    file = tmp_path / "mine.py"
    file.write_text(TOOL)
    assert refusal(file) == (
        f"cannot import '{file}': ModuleNotFoundError: No module named 'verl'"
        "; mine.py:2: verl.tools.base_tool is etude.tools here"
        "; mine.py:5: verl is etude.protocol here"
        "; mine.py:6: verl.utils.nowhere is not used here"
        "; mine.py:10: verl.utils.reward_score is etude.rewards here"
        "; see docs/migrating.md"
    )


def test_a_helper_that_imports_verl_is_the_file_named(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "my_helper_of_verl.py").write_text("from verl.interactions.base import BaseInteraction\n")
    (tmp_path / "mine.py").write_text("import my_helper_of_verl\n")
    assert "; my_helper_of_verl.py:1: verl.interactions.base is etude.agents.interactions here;" in refusal(
        tmp_path / "mine.py"
    )


def test_an_environment_of_rl_factory_is_told_where_its_base_class_is(tmp_path):
    file = tmp_path / "stock.py"
    file.write_text("import re\nfrom envs.base import Env\nfrom envs.tool_manager.qwen3_manager import QwenManager\n")
    place = "etude.agents.environments here"
    hints = f"; stock.py:2: envs.base is {place}; stock.py:3: envs.tool_manager.qwen3_manager is {place}; see"
    assert hints in refusal(file)


@pytest.mark.parametrize(
    ("line", "module", "place"),
    [
        ("from .base import Env as BaseEnv", ".base", "etude.agents.environments"),
        ("from .base import BaseInteraction", ".base", "etude.agents.interactions"),
        ("from .schemas import OpenAIFunctionToolSchema, ToolResponse", ".schemas", "etude.tools"),
        ("from ..single_controller import Worker", "..single_controller", "etude.distributed"),
    ],
)
def test_a_relative_import_is_named_with_its_place_here(line, module, place, tmp_path):
    file = tmp_path / "mine.py"
    file.write_text(f"import os\n{line}\n")
    assert refusal(file).endswith(f"; mine.py:2: {module} is {place} here; see docs/migrating.md")


def test_a_relative_import_of_the_users_own_says_how_to_name_it(tmp_path):
    (tmp_path / "mine.py").write_text("from .helpers import clean\n")
    assert refusal(tmp_path / "mine.py").endswith("name its neighbours without the leading dot")


def test_a_file_imports_those_beside_it_and_they_theirs(tmp_path):
    (tmp_path / "prices_of_mine").mkdir()
    (tmp_path / "prices_of_mine/lists.py").write_text("import rates_of_mine\nLIST = rates_of_mine.RATES\n")
    (tmp_path / "rates_of_mine.py").write_text("RATES = {'pear': 3}\n")
    (tmp_path / "random.py").write_text("raise AssertionError('the standard library has this one')\n")
    (tmp_path / "mine.py").write_text("import random\nfrom prices_of_mine.lists import LIST\n")
    assert import_module(str(tmp_path / "mine.py")).LIST == {"pear": 3}


def test_two_folders_files_of_one_name_are_never_taken_for_each_other(tmp_path):
    for folder in ("a", "b"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "common_of_mine.py").write_text(f"WHERE = '{folder}'\n")
        (tmp_path / folder / "tool_of_mine.py").write_text(
            "def where():\n    import common_of_mine as c\n    return c.WHERE\n"
        )
    assert import_module(str(tmp_path / "a/tool_of_mine.py")).where() == "a"
    with pytest.raises(
        ConfigError, match=r"b/tool_of_mine\.py and a file in .*/a each import their own 'common_of_mine'; rename"
    ):
        import_module(str(tmp_path / "b/tool_of_mine.py"))


def test_a_module_beside_a_yaml_is_told_how_to_be_named(tmp_path):
    (tmp_path / "fares_of_mine.py").touch()
    for name in ("fares_of_mine.compute_score", "fares_of_mine:compute_score"):
        with pytest.raises(ConfigError, match=r"beside agent\.yaml, write fares_of_mine\.py:compute_score"):
            import_beside(name, tmp_path / "agent.yaml")


def test_a_file_that_is_not_there_is_told_with_the_place_that_was_looked_at(tmp_path, monkeypatch):
    (tmp_path / "guess").mkdir()
    monkeypatch.chdir(tmp_path)
    (tmp_path / "guess/rows.jsonl").touch()
    assert missing_file(Path("rows.jsonl")) == f"file not found: {tmp_path}/rows.jsonl; did you mean guess/rows.jsonl?"
    assert missing_file(Path("no/rows")) == f"file not found: {tmp_path}/no/rows (there is no folder {tmp_path}/no)"
    assert missing_file(Path("guess/row.jsonl")).endswith("did you mean 'rows.jsonl'?")
    assert missing_file(Path("gues/rows.jsonl")).endswith(
        f"(there is no folder {tmp_path}/gues; did you mean 'guess'?)"
    )
    assert "did you mean" not in missing_file(Path("guesses.py"))  # a folder is no file


def test_other_missing_packages_are_left_alone(tmp_path):
    (tmp_path / "mine.py").write_text("import no_such_package\n")
    assert refusal(tmp_path / "mine.py").endswith("No module named 'no_such_package'")


def test_an_import_in_a_scorers_body_ends_the_run_with_the_same_line(tmp_path):
    (tmp_path / "mine.py").write_text(
        "def compute_score(**_):\n    from verl.utils.reward_score.gsm8k import extract_solution\n"
    )
    scorer = BoundedScorer(import_object(f"{tmp_path}/mine.py:compute_score"), 10)
    with pytest.raises(ConfigError, match=r"; mine\.py:2: verl\.utils\.reward_score\.gsm8k is etude\.rewards here"):
        asyncio.run(scorer(data_source="x"))


@pytest.mark.parametrize("module", sorted(set(MODULES.values())))
def test_the_places_exist(module):
    importlib.import_module(module)


@pytest.mark.parametrize(
    ("read", "entry"),
    [
        (load_tools, "tools: [{{class_name: 'mine.py:Mine', config: {{type: native}}}}]"),
        (register_agent_loops, "[{{name: mine, _target_: '{folder}/mine.py:Mine'}}]"),
    ],
)
def test_files_that_name_a_class_of_such_a_file_say_it_whole(read, entry, tmp_path):
    (tmp_path / "mine.py").write_text(TOOL)
    file = tmp_path / "named.yaml"
    file.write_text(entry.format(folder=tmp_path))
    with pytest.raises(ConfigError) as caught:
        read(str(file))
    assert str(caught.value).startswith(str(file))
    assert str(caught.value).endswith("; see docs/migrating.md")
