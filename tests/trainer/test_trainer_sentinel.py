"""`trainer.sentinel`: a second scorer of validation answers; and what is looked for in dumps, as a run reports it."""

import json

from house_stage import ROLLOUT, metrics, one_line_error

from etude.cli.main import cli, run
from etude.data import read_rows
from etude.trainer.sentinel import second_opinion

SECOND = """
from etude.rewards.usage import count


def doubtful(data_source, solution_str, ground_truth, extra_info=None):
    return 0.25


def dear(data_source, solution_str, ground_truth, extra_info=None):
    count(requests=1, cost=5.0)
    return 0.25


def generous(data_source, solution_str, ground_truth, extra_info=None):
    return 1.0
"""


def test_a_second_scorer_judges_validation_and_never_trains(tiny, tmp_path, capsys):
    (tmp_path / "second.py").write_text(SECOND)
    given = [
        f"data.val_files={tiny.folder}/data/train.parquet",
        "data.val_max_samples=2",
        f"custom_reward_function.path={tmp_path}/second.py",
        "custom_reward_function.name=generous",
        "trainer.total_training_steps=1",
    ]
    sentinel = f"trainer.sentinel={tmp_path}/second.py:doubtful"
    assert run(cli, ["train", *tiny.arguments(tmp_path / "run", *given, sentinel)]) == 0
    before, after = metrics(tmp_path / "run")
    for figures in (before, after):
        assert figures["val/sentinel/score/mean"] == 0.25
        assert figures["val/sentinel/wrong"] == 1.0
        assert figures["val/reward/score/mean"] == 1.0
    assert after["reward/score/mean"] == 1.0
    missing = tiny.arguments(tmp_path / "other", *given, f"trainer.sentinel={tmp_path}/second.py:nobody")
    assert "nobody" in one_line_error(capsys, ["train", *missing])


def test_what_a_second_scorers_judges_cost_counts_towards_the_budget(tiny, tmp_path, capsys):
    (tmp_path / "second.py").write_text(SECOND)
    given = [f"data.val_files={tiny.folder}/data/train.parquet", "data.val_max_samples=2", "reward_model.budget=9"]
    run_arguments = tiny.arguments(tmp_path / "run", *given, f"trainer.sentinel={tmp_path}/second.py:dear")
    assert run(cli, ["train", *run_arguments]) == 2
    assert "judges have cost 10, more than reward_model.budget=9" in capsys.readouterr().err
    [before] = metrics(tmp_path / "run")
    assert before["val/sentinel/reward/judge/cost"] == 10.0
    assert before["val/sentinel/reward/judge/requests"] == 2.0


def test_what_tools_alone_call_right_can_be_called_wrong(tiny, tmp_path):
    """Their run had no `val/sentinel/wrong`, as if nothing had been right."""
    (tmp_path / "second.py").write_text(SECOND)
    (tmp_path / "tools.py").write_text(
        "from etude.tools.builtin.calculator import Calculator\n\n\nclass Pays(Calculator):\n"
        "    async def calc_reward(self, instance_id, **kwargs):\n        return 1.0\n"
    )
    (tmp_path / "tools.yaml").write_text("tools: [{class_name: 'tools.py:Pays'}]\n")
    rows = read_rows(tiny.folder / "data" / "train.parquet")[:2]
    for row in rows:
        row["extra_info"]["tools_kwargs"] = {"calculator": {"create_kwargs": {}}}
    (tmp_path / "rows.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    given = [
        f"data.val_files={tmp_path}/rows.jsonl",
        f"{ROLLOUT}.multi_turn.tool_config_path={tmp_path}/tools.yaml",
        "reward_model.enable=false",
        "custom_reward_function.path=null",
        "trainer.total_training_steps=1",
        f"trainer.sentinel={tmp_path}/second.py:doubtful",
    ]
    assert run(cli, ["train", *tiny.arguments(tmp_path / "run", *given)]) == 0
    for figures in metrics(tmp_path / "run"):
        assert figures["val/reward/success/mean"] == 1.0
        assert figures["val/sentinel/wrong"] == 1.0


def test_a_second_scorer_reads_what_the_reward_reads(tiny, tmp_path):
    """Of the whole text, where the reward reads the last turn, it calls wrong what is right."""
    (tmp_path / "read.py").write_text(
        "def size(data_source, solution_str, ground_truth, extra_info=None):\n    return len(solution_str) / 1000\n"
    )
    given = [
        f"data.val_files={tiny.folder}/data/train.parquet",
        "data.val_max_samples=2",
        f"custom_reward_function.path={tmp_path}/read.py",
        "custom_reward_function.name=size",
        "reward_model.score_text=full",
        "trainer.total_training_steps=1",
        f"trainer.sentinel={tmp_path}/read.py:size",
    ]
    assert run(cli, ["train", *tiny.arguments(tmp_path / "run", *given)]) == 0
    for figures in metrics(tmp_path / "run"):
        assert figures["val/sentinel/score/mean"] == figures["val/reward/score/mean"]


def test_a_second_scorer_that_fails_is_heard_of(caplog):
    def fails_on_long(data_source, solution_str, ground_truth, extra_info=None):
        return 1.0 / (len(solution_str) < 3)

    segments = [
        [{"token_ids": [1], "provenance": "sampled", "turn": 0, "log_probs": [0.0], "text": t}] for t in ("a", "long")
    ]
    records = [{"prompt_ids": [1], "segments": each, "stop_reason": "completed", "gts": "a"} for each in segments]
    assert second_opinion(records, fails_on_long) == {"val/sentinel/score/mean": 1.0}
    assert "trainer.sentinel failed on 1 of 2 answers" in caplog.text
    assert "ZeroDivisionError" in caplog.text
