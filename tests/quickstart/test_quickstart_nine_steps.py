"""examples/nine_steps: the file runs as its README says, and each step did something."""

import runpy
import sys
from pathlib import Path

import pytest

import etude
from etude.dumps import read_rollouts

FILE = Path(etude.__file__).parents[1] / "examples" / "nine_steps" / "nine_steps.py"


@pytest.mark.slow
def test_the_nine_steps_run_and_say_what_they_did(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", [str(FILE), "--output-dir", str(tmp_path), "--steps", "2"])
    code = runpy.run_path(str(FILE), run_name="__main__")
    said = capsys.readouterr().out.splitlines()
    assert [line[:2] for line in said if line[1:2] == "."] == [f"{step}." for step in range(1, 10)]
    assert said[-1].startswith("Right answers, sampled: ")
    assert said[-1].endswith(" in step 2.")
    rollouts = list(read_rollouts(tmp_path / "run" / "rollouts" / "2.jsonl"))
    assert {call["name"] for record in rollouts for call in record["tool_calls"]} >= {"search"}
    assert any("eggs" in record["output"] for record in rollouts)  # a result was shown to the model
    assert {record["score"] for record in rollouts} == {0.0, 1.0}
    calls = '<tool_call>{"name": "search", "arguments": {}}</tool_call><tool_call>{"name": 1}</tool_call>'
    parsed = code["MyModelToolParser"](None).parse(f"a{calls}")
    assert (parsed.content, [call.name for call in parsed.calls], len(parsed.errors)) == ("a", ["search"], 1)
