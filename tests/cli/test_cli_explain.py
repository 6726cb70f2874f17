"""`etude explain`: what it prints of a real run's dump, and that it finds what is wrong with a doctored one."""

import json

import pytest
from house_stage import one_line_error

from etude.cli.main import cli, run
from etude.dumps import read_rollouts
from etude.errors import DataError
from etude.jsonl import json_line
from etude.trainer.run import train
from etude.viewer.explain import Verdict, check_sequence, list_tokens, read_row

ROLLOUT = "actor_rollout_ref.rollout"


@pytest.fixture(scope="module")
def run_dir(tiny, tmp_path_factory):
    """A run of two steps that keeps every checkpoint; its tools' rewards weigh twice."""
    folder = tmp_path_factory.mktemp("explain") / "run"
    train(
        tiny.config(
            folder,
            "trainer.total_training_steps=2",
            "trainer.save_freq=1",
            f"{ROLLOUT}.temperature=0.8",
            f"{ROLLOUT}.top_p=0.95",
            f"{ROLLOUT}.top_k=40",
            "reward_model.score_weight=0.5",
            "trainer.rollout_token_values=true",
        )
    )
    return folder


def verdicts(record, **given):
    return [check.verdict for check in check_sequence(record, **given)]


def doctored(record, change):
    copy = json.loads(json.dumps(record))
    change(copy)
    return copy


def test_a_real_trajectory_holds_every_check(run_dir):
    weights = run_dir / "global_step_1" / "actor" / "huggingface"
    for record in read_rollouts(run_dir / "rollouts" / "2.jsonl"):
        assert record["sampling"] == {"temperature": 0.8, "top_p": 0.95, "top_k": 40}
        checks = check_sequence(record, weights)
        assert [check.verdict for check in checks] == [Verdict.HOLDS] * 6, checks


def test_other_weights_are_told_apart(run_dir):
    record = read_row(run_dir / "rollouts" / "2.jsonl", 0)
    check = check_sequence(record, run_dir / "global_step_2" / "actor" / "huggingface")[4]
    assert check.verdict is Verdict.FAILS
    assert "does the folder hold weights 1?" in check.evidence


@pytest.mark.parametrize(
    ("failing", "change"),
    [
        (0, lambda r: r["response_ids"].__setitem__(3, 1)),
        (0, lambda r: r["response_ids"].pop()),
        (1, lambda r: r["response_mask"].__setitem__(0, 0)),
        (2, lambda r: r["response_log_probs"].__setitem__(0, -9.0)),
        (2, lambda r: r["response_log_probs"].pop()),
        (2, lambda r: r["segments"][0]["log_probs"].__setitem__(0, 0.5)),
        (2, lambda r: r["segments"][0].pop("log_probs")),
        (3, lambda r: r.__setitem__("score", 7.5)),
        (4, lambda r: [each.__setitem__(0, -9.0) for each in (r["segments"][0]["log_probs"], r["response_log_probs"])]),
        (4, lambda r: r.__setitem__("sampling", {})),
        (5, lambda r: r["token_values"]["advantages"].pop()),
        (5, lambda r: r["token_values"]["entropys"].append(0.5)),
        (5, lambda r: r["token_values"]["log_probs"].__setitem__(r["response_mask"].index(0), -1.0)),
        (5, lambda r: r["token_values"].__setitem__("advantages", 0.5)),
        (5, lambda r: r.__setitem__("token_values", [])),
    ],
    ids=[
        "id",
        "length",
        "mask",
        "dumped-log-prob",
        "dumped-length",
        "log-prob",
        "no-log-probs",
        "score",
        "other-log-prob",
        "temperature",
        "short-values",
        "long-values",
        "unsampled-value",
        "no-list",
        "no-columns",
    ],
)
def test_a_doctored_record_fails_the_check_that_names_it(run_dir, failing, change):
    record = doctored(read_row(run_dir / "rollouts" / "2.jsonl", 0), change)
    weights = run_dir / "global_step_1" / "actor" / "huggingface"
    found = verdicts(record, model=weights)
    assert found[failing] is Verdict.FAILS
    if failing != 4:
        assert found[:failing] == [Verdict.HOLDS] * failing


def test_lists_that_are_too_short_are_one_line(run_dir, tmp_path, capsys):
    record = read_row(run_dir / "rollouts" / "2.jsonl", 0)
    for change in (
        lambda r: r["segments"][0]["weight_versions"].pop(),
        lambda r: r["segments"][0]["log_probs"].pop(),
    ):
        (tmp_path / "1.jsonl").write_bytes(json_line(doctored(record, change)))
        assert run(cli, ["explain", str(tmp_path / "1.jsonl")]) == 2
        assert "'segments' is malformed" in capsys.readouterr().err
    short = doctored(record, lambda r: [each.pop() for each in (r["response_mask"], *r["token_values"].values())])
    (tmp_path / "1.jsonl").write_bytes(json_line(short))
    assert run(cli, ["explain", str(tmp_path / "1.jsonl")]) == 1


def test_tokens_carry_mask_turn_log_prob_and_reward(run_dir):
    record = read_row(run_dir / "rollouts" / "2.jsonl", 0)
    tokens = list(list_tokens(record))
    assert [token.id for token in tokens] == record["response_ids"]
    assert [token.mask for token in tokens] == record["response_mask"]
    assert [token.log_prob is not None for token in tokens] == [bool(m) for m in record["response_mask"]]
    assert sum(token.reward for token in tokens) == pytest.approx(record["score"])
    assert "".join(token.text for token in tokens) == record["output"]


def test_the_command_prints_tokens_and_finds_the_weights_by_itself(run_dir, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "160")
    assert run(cli, ["explain", str(run_dir / "rollouts" / "2.jsonl"), "--row", "1"]) == 0
    out = capsys.readouterr().out
    record = read_row(run_dir / "rollouts" / "2.jsonl", 1)
    assert out.count("sampled\n") + out.count("sampled ") >= sum(record["response_mask"])
    assert out.count("✓") == 6
    assert all(name in out for name in ("advantage", "in update", "entropy"))
    assert "global_step_1" in out.replace("\n", "")


def test_turns_are_the_models_as_in_every_other_command(run_dir, capsys):
    record = read_row(run_dir / "rollouts" / "2.jsonl", 0)
    assert run(cli, ["explain", str(run_dir), "--no-tokens"]) == 0
    noun = "assistant turn" if record["assistant_turns"] == 1 else "assistant turns"
    out = capsys.readouterr().out
    assert f" · {record['assistant_turns']} {noun}\n" in out
    assert "asked: " in out
    assert f"ground truth: {record['gts']}\n" in out
    assert f"reward: score {record['rewards']['score']:g}" in out
    assert all(f"called: {call['name']} {call['arguments']} → " in out for call in record["tool_calls"])


def test_a_call_whose_answer_had_no_room_is_not_taken_for_the_answer(run_dir, tmp_path, capsys):
    call = {
        "turn": 0,
        "name": "shop",
        "arguments": "{}",
        "response": "87",
        "reward": 0.0,
        "error": None,
        "seconds": 0.1,
    }
    record = read_row(run_dir / "rollouts" / "2.jsonl", 0) | {"tool_calls": [call]}
    dump = tmp_path / "1.jsonl"
    dump.write_bytes(json_line(record) + json_line(record | {"stop_reason": "tool_response_overflow"}))
    for row, unseen in enumerate((False, True)):
        run(cli, ["explain", str(dump), "--row", str(row), "--no-tokens"])
        out = capsys.readouterr().out
        assert "called: shop {} → 87\n" in out
        assert ("\nunanswered: the model did not see what the last turn's calls said" in out) is unseen
        assert ("\nanswered: " in out) is not unseen


def test_what_a_tool_pays_for_a_call_and_at_the_end_is_told_apart(run_dir, tmp_path, capsys):
    paid = {"steps": [[0, "shop", -0.1]], "final": {"shop": 0.25}, "score": 1.0, "score_info": {}}
    dump = tmp_path / "1.jsonl"
    dump.write_bytes(json_line(read_row(run_dir / "rollouts" / "2.jsonl", 0) | {"rewards": paid}))
    run(cli, ["explain", str(dump), "--no-tokens"])
    assert "\nreward: score 1, shop -0.1, shop at the end 0.25\n" in capsys.readouterr().out


def test_a_folder_stands_for_its_newest_dump(run_dir, tmp_path, capsys):
    assert run(cli, ["explain", str(run_dir), "--no-tokens"]) == 0
    assert "rollouts/2.jsonl row 0" in capsys.readouterr().out.replace("\n", "")
    assert "there is no dump of rollouts" in one_line_error(capsys, ["explain", tmp_path])


def test_a_failed_check_is_exit_status_one(run_dir, tmp_path, capsys):
    record = doctored(read_row(run_dir / "rollouts" / "2.jsonl", 0), lambda r: r["response_mask"].__setitem__(0, 0))
    (tmp_path / "rollouts").mkdir()
    dump = tmp_path / "rollouts" / "1.jsonl"
    dump.write_bytes(json_line(record))
    assert run(cli, ["explain", str(dump), "--no-tokens"]) == 1
    assert "✗ the mask is 1" in capsys.readouterr().out


def test_the_model_is_loaded_once_for_all_sequences(run_dir, tmp_path, monkeypatch, capsys):
    import etude.models

    loads, load = [], etude.models.load_causal_lm
    monkeypatch.setattr(
        etude.models, "load_causal_lm", lambda folder, **more: loads.append(folder) or load(folder, **more)
    )
    record = read_row(run_dir / "rollouts" / "2.jsonl", 0)
    dump = tmp_path / "1.jsonl"
    dump.write_bytes(json_line(record | {"earlier": [record | {"role": "black"}, record]}))
    weights = run_dir / "global_step_1" / "actor" / "huggingface"
    run(cli, ["explain", str(dump), "--no-tokens", "--model", str(weights)])
    shown = capsys.readouterr().out
    assert shown.count("a full forward pass gives") == 3
    assert ("sequence 0 of 3 (earlier, black)" in shown, "sequence 1 of 3 (earlier)" in shown) == (True, True)
    assert loads == [weights]


def test_a_row_that_is_not_there_is_one_line(run_dir, tmp_path):
    with pytest.raises(DataError, match="has no row 99; its rows are numbered from 0 to 7"):
        read_row(run_dir / "rollouts" / "2.jsonl", 99)
    empty = tmp_path / "1.jsonl"
    empty.write_text("")
    with pytest.raises(DataError, match="holds no trajectory"):
        read_row(empty, 0)


def test_another_models_weights_are_refused(run_dir):
    record = doctored(
        read_row(run_dir / "rollouts" / "2.jsonl", 0), lambda r: r["segments"][0]["token_ids"].__setitem__(0, 10**6)
    )
    with pytest.raises(DataError, match="another model's"):
        check_sequence(record, run_dir / "global_step_1" / "actor" / "huggingface")


def test_a_dump_that_is_not_there_names_the_nearest(run_dir, capsys):
    wrong = run_dir / "rollout" / "2.jsonl"
    assert f"did you mean {run_dir}/rollouts/2.jsonl?" in one_line_error(capsys, ["explain", str(wrong)])
