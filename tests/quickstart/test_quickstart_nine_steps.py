"""examples/nine_steps: the file runs as its README says, and each step did something."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import etude
from etude.dumps import read_rollouts

FILE = Path(etude.__file__).parents[1] / "examples" / "nine_steps" / "nine_steps.py"
PARSE = """
from nine_steps import MyModelToolParser
calls = '<tool_call>{"name": "search", "arguments": {}}</tool_call><tool_call>{"name": 1}</tool_call>'
parsed = MyModelToolParser(None).parse(f"a{calls}")
print((parsed.content, [call.name for call in parsed.calls], len(parsed.errors)))
"""


def said_by(*arguments):
    """Lines that a process of its own prints: the file registers names of the documents, as other tests do."""
    command = [sys.executable, *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=FILE.parent)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout.splitlines()


@pytest.mark.slow
def test_the_nine_steps_run_and_say_what_they_did(tmp_path):
    said = said_by(FILE, "--output-dir", tmp_path, "--steps", 2)
    assert [line[:2] for line in said if line[1:2] == "."] == [f"{step}." for step in range(1, 10)]
    assert said[-1].startswith("Right answers, sampled: ")
    assert said[-1].endswith(" in step 2.")
    rollouts = list(read_rollouts(tmp_path / "run" / "rollouts" / "2.jsonl"))
    assert {call["name"] for record in rollouts for call in record["tool_calls"]} >= {"search"}
    assert any("eggs" in record["output"] for record in rollouts)  # a result was shown to the model
    assert {record["score"] for record in rollouts} == {0.0, 1.0}
    assert ast.literal_eval(said_by("-c", PARSE)[0]) == ("a", ["search"], 1)
