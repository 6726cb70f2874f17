"""`etude rescore` and `etude reward`: on the dumps of a real run, and on rows by hand."""

import json

import pytest
from house_stage import one_line_error

from etude.cli.main import cli, run
from etude.data import write_parquet
from etude.dumps import read_rollouts
from etude.trainer.run import train


@pytest.fixture(scope="module")
def dumps(tiny, tmp_path_factory):
    folder = tmp_path_factory.mktemp("rescore") / "run"
    train(tiny.config(folder, "trainer.total_training_steps=2", "trainer.save_freq=2"))
    return folder / "rollouts"


@pytest.fixture
def scorers(tmp_path):
    (tmp_path / "mine.py").write_text(
        "def one(solution_str): return 1.0\n"
        "def length(solution_str, trajectory, extra_info, per=1.0):\n"
        "    assert trajectory.num_turns == extra_info['num_turns']\n"
        "    return {'score': per * len(solution_str), 'acc': 0}\n"
        "def broken(solution_str): raise KeyError('x')\n"
    )
    return tmp_path / "mine.py"


def called(capsys, *arguments):
    status = run(cli, [str(argument) for argument in arguments])
    out, err = capsys.readouterr()
    assert err == ""
    return status, out


def test_the_reward_of_the_run_gives_the_scores_of_the_run(tiny, dumps, capsys):
    own = ("--reward", f"{tiny.folder}/agent.py:compute_score", "--json")
    status, out = called(capsys, "rescore", dumps, *own)
    found = json.loads(out)
    assert (status, found["changed"], found["failed"]) == (0, 0, 0)
    assert found["rows"] == sum(1 for step in (1, 2) for _ in read_rollouts(dumps / f"{step}.jsonl"))
    assert found["old_mean"] == found["new_mean"]
    tokenizer = dumps.parent / "global_step_2" / "actor" / "huggingface"
    assert json.loads(called(capsys, "rescore", dumps, *own, "--model", tokenizer)[1])["changed"] == 0


def test_another_reward(dumps, scorers, capsys):
    status, out = called(capsys, "rescore", dumps / "1.jsonl", "--reward", f"{scorers}:one", "--json")
    found, rows = json.loads(out), list(read_rollouts(dumps / "1.jsonl"))
    right = sum(record["rewards"]["score"] >= 1 for record in rows)
    assert (status, found["new_mean"], found["changed"]) == (0, 1.0, len(rows) - right)
    confusion = {"right->right": right, "right->wrong": 0, "wrong->right": len(rows) - right, "wrong->wrong": 0}
    assert found["confusion"] == confusion
    assert len(found["examples"]) == min(5, len(rows) - right)
    _, out = called(capsys, "rescore", dumps / "1.jsonl", "--reward", f"{scorers}:one", "--examples", 1)
    assert "was wrong" in out
    assert "→ 1" in out
    found = [called(capsys, "rescore", each, "--reward", f"{scorers}:one") for each in (dumps, dumps.parent)]
    assert found[0] == found[1]


def test_a_file_alone_names_compute_score_with_its_arguments(dumps, scorers, capsys):
    scorers.write_text("def compute_score(solution_str, bonus=0.0): return 1.0 + bonus\n")
    given = ("rescore", dumps / "1.jsonl", "--reward", scorers, "--reward-kwargs")
    assert json.loads(called(capsys, *given, '{"bonus": 0.5}', "--json")[1])["new_mean"] == 1.5
    assert "has no --reward.reward_kwargs.bonsu" in one_line_error(capsys, [*given, '{"bonsu": 0.5}'])


def test_a_function_of_batches_is_refused(dumps, scorers, capsys):
    scorers.write_text("def compute_score(solution_strs): return [1.0 for _ in solution_strs]\n")
    error = one_line_error(capsys, ["rescore", dumps / "1.jsonl", "--reward", scorers])
    assert error.endswith("scores whole batches; name a function of one answer")


def test_what_the_scorer_reads(dumps, scorers, capsys):
    arguments = ("rescore", dumps / "1.jsonl", "--reward", f"{scorers}:length", "--json")
    assistant, full = (
        json.loads(called(capsys, *arguments, *more)[1])["new_mean"] for more in ((), ("--score-text", "full"))
    )
    assert full > assistant
    doubled = json.loads(called(capsys, *arguments, "--reward-kwargs", '{"per": 2}')[1])["new_mean"]
    assert doubled == pytest.approx(2 * assistant)


def test_a_scorer_that_fails_gives_no_scores(dumps, scorers, capsys):
    status, out = called(capsys, "rescore", dumps / "1.jsonl", "--reward", f"{scorers}:broken", "--json")
    found = json.loads(out)
    assert (status, found["failed"], found["new_mean"], found["changed"]) == (1, found["rows"], None, 0)
    assert "KeyError: 'x'" in found["examples"][0]["error"]


@pytest.fixture
def rows(tmp_path):
    made = [
        {
            "data_source": "openai/gsm8k",
            "prompt": [{"role": "user", "content": "6 * 7?"}],
            "reward_model": {"style": "rule", "ground_truth": str(truth)},
            "extra_info": {"index": index, "split": "test"},
        }
        for index, truth in enumerate((42, 43))
    ]
    write_parquet(made, tmp_path / "rows.parquet")
    return tmp_path / "rows.parquet"


def test_typed_answers(rows, scorers, capsys):
    status, out = called(capsys, "reward", "try", rows, "--row", 0, "--row", 1, "--answer", "so #### 42")
    assert status == 0
    first, second = out.splitlines()
    assert "row 0: score 1" in first
    assert "'pred': '42'" in first
    assert "row 1: score 0" in second
    status, out = called(capsys, "reward", "try", rows, "--reward", f"{scorers}:broken", "--answer", "x")
    assert (status, "KeyError: 'x'" in out) == (1, True)


def test_dumped_answers(rows, dumps, capsys):
    status = run(cli, ["reward", "try", str(rows), "--dump", str(dumps / "1.jsonl")])
    out, err = capsys.readouterr()
    assert status == 0
    assert all(line.startswith("row ") for line in out.splitlines())
    without = sum(record["index"] > 1 for record in read_rollouts(dumps / "1.jsonl"))
    assert err == (f"answers of {dumps / '1.jsonl'} whose extra_info.index no row has: {without}\n" if without else "")


def test_a_dumped_answer_is_scored_against_the_row_of_its_own_source(dumps, tmp_path, capsys):
    """Rows of several sources are each numbered from 0; the last with an index took the answers of all."""
    shared = {"prompt": [{"role": "user", "content": "?"}], "extra_info": {"index": 0}}
    made = [
        shared | {"data_source": source, "reward_model": {"ground_truth": truth}}
        for source, truth in (("openai/gsm8k", "42"), ("nq", "Rome"), ("triviaqa", "Rome"), ("triviaqa", "Oslo"))
    ]
    write_parquet(made, tmp_path / "rows.parquet")
    first = next(iter(read_rollouts(dumps / "1.jsonl")))

    def tried(source, index):
        (tmp_path / "one.jsonl").write_text(json.dumps(first | {"data_source": source, "extra_info": {"index": index}}))
        status = run(cli, ["reward", "try", str(tmp_path / "rows.parquet"), "--dump", str(tmp_path / "one.jsonl")])
        return status, *capsys.readouterr()

    assert tried("openai/gsm8k", 0)[1].startswith("row 0: ")
    assert tried("nq", 0)[1].startswith("row 1: ")
    status, out, err = tried("nq", 7)
    assert (status, out) == (0, "")
    assert "no row has: 1" in err
    assert "rows 2 and 3 have the same data_source and extra_info.index (0)" in tried("triviaqa", 0)[2]
    write_parquet([*made[:2], *made[:1]], tmp_path / "rows.parquet")  # a row twice
    assert tried("openai/gsm8k", 0)[1].startswith("row 0: ")
    write_parquet(made[:1], tmp_path / "rows.parquet")
    both = [first | {"extra_info": {"index": 0}, "data_source": source} for source in ("nq", "openai/gsm8k")]
    (tmp_path / "one.jsonl").write_text("".join(json.dumps(each) + "\n" for each in both))
    assert run(cli, ["reward", "try", str(tmp_path / "rows.parquet"), "--dump", str(tmp_path / "one.jsonl")]) == 0
    out, err = capsys.readouterr()
    assert (out.count("row 0: "), "no row has: 1" in err) == (1, True)


def test_a_dumped_answer_is_scored_with_its_trajectory_as_rescore_does(rows, dumps, tmp_path, capsys):
    """Of a typed answer's, without tokens, turns and calls, a length penalty or a bonus for calls paid something else."""
    (tmp_path / "seen.py").write_text(
        "def seen(solution_str, trajectory, extra_info):\n"
        "    sizes = trajectory.response_tokens, trajectory.sampled_tokens, len(trajectory.tool_calls)\n"
        "    return sum(sizes) + len(solution_str) / 8 + extra_info['num_turns']\n"
    )
    first = next(iter(read_rollouts(dumps / "1.jsonl")))
    first["extra_info"] = {"index": 0, "split": "test"}
    (tmp_path / "one.jsonl").write_text(json.dumps(first))
    for text in ("full", "final_turn"):
        given = ("--reward", f"{tmp_path}/seen.py:seen", "--score-text", text)
        asked = called(capsys, "rescore", tmp_path / "one.jsonl", *given, "--json")[1]
        tried = called(capsys, "reward", "try", rows, "--dump", tmp_path / "one.jsonl", *given)[1]
        assert tried.startswith(f"row 0: score {json.loads(asked)['new_mean']:g} ")


def test_the_list_of_scorers(capsys):
    out = called(capsys, "reward", "list")[1]
    assert "aime*  etude.rewards.math_dapo.compute_score" in out
    assert "openai/gsm8k  etude.rewards.gsm8k.compute_score" in out


def test_a_data_source_without_a_scorer_says_where_ones_own_goes(dumps, tmp_path, capsys):
    record = next(iter(read_rollouts(dumps / "1.jsonl"))) | {"data_source": "shop"}
    (tmp_path / "1.jsonl").write_text(json.dumps(record) + "\n")
    assert run(cli, ["rescore", str(tmp_path / "1.jsonl")]) != 0
    assert "--reward reward.py:compute_score" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--reward", "nothing.py:one"), "nothing.py"),
        (("--reward-kwargs", "{"), "--reward-kwargs is not JSON"),
        (("--reward-kwargs", '{"a": 1}'), "are those of --reward"),
    ],
)
def test_what_cannot_be_used_is_one_line(dumps, arguments, words, capsys):
    assert words in one_line_error(capsys, ["rescore", dumps / "1.jsonl", *arguments])


def test_rows_and_dumps_that_are_not_there(rows, tmp_path, capsys):
    assert "has no row 7: it has 2" in one_line_error(capsys, ["reward", "try", rows, "--row", "7", "--answer", "x"])
    (tmp_path / "empty").mkdir()
    assert "there are no dumps" in one_line_error(capsys, ["rescore", tmp_path / "empty"])
