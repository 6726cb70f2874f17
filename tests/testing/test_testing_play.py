"""`etude play`: what is typed is what a model would have sampled, and the score is the run's."""

import io
import json
import re

import pytest
from agent_stage import SCHEMA, Agent
from house_stage import ROLLOUT, one_line_error

from etude.cli.main import cli, run
from etude.dumps import read_rollouts, trajectory_from_record
from etude.errors import DataError
from etude.testing.play import read_call
from etude.viewer.explain import Verdict, check_sequence


@pytest.fixture
def agent(tmp_path, tiny):
    return Agent(tmp_path, tiny.model)


@pytest.fixture
def type_in(agent, monkeypatch, capsys):
    """(exit status, what is printed, the dump's record) after lines were typed."""

    def played(*lines, overrides=(), options=()):
        monkeypatch.setattr("sys.stdin", io.StringIO("".join(f"{line}\n" for line in lines)))
        capsys.readouterr()
        status = run(cli, ["play", *agent.arguments(*overrides), *options])
        file = agent.folder / "run" / "play" / "0.jsonl"
        out, err = capsys.readouterr()
        return status, out + err, next(read_rollouts(file)) if file.exists() else None

    return played


def test_a_conversation_with_calls_and_an_answer(type_in):
    status, said, record = type_in(
        '{"name": "guess", "arguments": {"number": 4}}', "guess number=2", "It is 2", options=["--row", "1"]
    )
    assert status == 0
    assert "<|im_start|>user\nFind my number.<|im_end|>" in said
    assert "<tool_response>\nwrong\n</tool_response>" in said
    assert "<tool_response>\nright\n</tool_response>" in said
    assert "reward 1\n" in said
    trajectory = trajectory_from_record(record)
    assert [(call.name, json.loads(call.arguments), call.response) for call in trajectory.tool_calls] == [
        ("guess", {"number": 4}, "wrong"),
        ("guess", {"number": 2}, "right"),
    ]
    assert trajectory.assistant_turns == 3
    assert record["score"] == 1.0
    assert all(check.verdict is not Verdict.FAILS for check in check_sequence(record))


def test_what_cannot_be_sent_is_said_and_asked_again(type_in):
    status, said, record = type_in(
        '{"arguments": {}}', "/tools", "/what", "guess number='", "guess number=x", "no \\", "idea"
    )
    assert status == 0
    assert 'not sent: a call is JSON such as {"name": "TOOL", "arguments": {}}' in said
    assert '"description": "Says whether it is the number."' in said
    assert said.count("Type an answer, or a call") == 2
    assert "not sent: No closing quotation" in said
    [call] = trajectory_from_record(record).tool_calls  # sent as it is: a model may write it, too
    assert call.error == "invalid_arguments"
    assert trajectory_from_record(record).messages[-1]["content"].startswith("no \nidea")
    assert record["score"] == 0.0


def test_the_model_answers_a_row_through_the_runs_tools(type_in):
    status, said, record = type_in(options=["--policy"])
    assert status == 0
    assert said.startswith(record["input"])  # decoded from ids, as always; without the help for those who type
    assert "Find my number." in said
    trajectory = trajectory_from_record(record)
    assert f"{trajectory.assistant_turns} assistant turn" in said
    assert "\nreward 0\n  1 × 0  reward function: acc 0\n" in said
    assert all(check.verdict is not Verdict.FAILS for check in check_sequence(record))
    assert re.search(r"^loading \S+/huggingface$", said, re.MULTILINE)


def test_the_model_answers_a_typed_question_which_is_not_scored_by_the_rows_answer(type_in):
    status, said, record = type_in(options=["--row", "1", "--ask", "Is it 3?"])
    assert status == 0
    assert "<|im_start|>user\nIs it 3?<|im_end|>" in record["input"]
    assert "Find my number." not in said
    assert "reward 0, of calls alone: the answer to your question is not scored\n" in said
    assert trajectory_from_record(record).rewards.score is None


def test_a_scorers_own_values_are_told_plainly(type_in, agent):
    agent.write("reward.py", "def compute_score(**given):\n    return {'score': 1, 'form': 0.5, 'pred': 'seven'}\n")
    _, said, _ = type_in("7")
    assert "ended: completed, 1 assistant turn\nreward 1\n  1 × 1  reward function: form 0.5, pred seven" in said


@pytest.mark.parametrize("lines", [["/quit"], ["guess number=1"], []])
def test_who_leaves_is_not_scored(type_in, lines):
    status, said, record = type_in(*lines)
    assert status == 2
    assert said.splitlines()[-1].endswith("nothing is scored")
    assert record is None


def test_raw_text_is_taken_as_it_is(type_in):
    status, _, record = type_in('/raw <tool_call>\\n{"name"', "done 1")
    assert status == 0
    text = '<tool_call>\\n{"name"'
    assert trajectory_from_record(record).messages[1]["content"].startswith(text)


def test_bytes_that_are_no_text_are_replaced(type_in):
    status, _, record = type_in("guess number=2 \udcff=1", "it is \udcff 1")
    assert status == 0
    assert trajectory_from_record(record).messages[-1]["content"].startswith("it is ? 1")


def test_a_scorer_that_fails_is_no_score(type_in, agent):
    agent.write("reward.py", "def compute_score(**given):\n    return 1 / 0\n")
    status, said, record = type_in("1")
    assert status == 1
    assert "dropped: scoring: 'compute_score' of " in said
    assert "reward.py for the data source 'tests/guess' failed: ZeroDivisionError" in said
    assert record is None


def test_a_row_that_is_not_there(agent, capsys):
    line = one_line_error(capsys, ["play", *agent.arguments(), "--row", "9"])
    assert line.endswith("rows.jsonl: no row 9: there are 4")


def test_a_folder_that_cannot_be_written_is_refused_before_the_first_question(agent, tmp_path, capsys):
    (tmp_path / "file").write_text("")
    arguments = ["play", *agent.arguments(), "--output-dir", str(tmp_path / "file" / "play")]
    assert run(cli, arguments) == 2
    out, err = capsys.readouterr()
    assert f"cannot write into {tmp_path}/file/play" in err
    assert out == ""


def test_a_configuration_that_would_not_train(agent, capsys):
    assert "unknown key" in one_line_error(capsys, ["play", *agent.arguments(f"{ROLLOUT}.nn=1")])


SCHEMAS = {"guess": SCHEMA, "say": {"function": {"parameters": {"properties": {"text": {"type": "string"}}}}}}


@pytest.mark.parametrize(
    ("line", "call"),
    [
        ("guess number=3", ("guess", {"number": 3})),
        ("guess", ("guess", {})),
        ("say text=3", ("say", {"text": "3"})),
        ("say text='two words' more=[1,2]", ("say", {"text": "two words", "more": [1, 2]})),
        ("guess the number", None),
        ("it is 3", None),
        ('{"name": "other"}', ("other", {})),
    ],
)
def test_calls_and_answers_are_told_apart(line, call):
    assert read_call(line, SCHEMAS) == call


@pytest.mark.parametrize("line", ["{", "{}", '{"name": 3}', '{"name": "a", "arguments": [1]}', "[" * 9 and "{" * 3000])
def test_what_looks_like_a_call_and_is_none(line):
    with pytest.raises(DataError):
        read_call(line, SCHEMAS)
