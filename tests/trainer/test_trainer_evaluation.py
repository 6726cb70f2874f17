"""An evaluation's figures: by prompt, by data source, and with intervals that cover."""

import json
import sys
from collections import Counter
from itertools import combinations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from etude.dumps import read_rollouts
from etude.errors import ConfigError, TrainingStopped
from etude.options import RewardOptions
from etude.run_folder import read_metrics
from etude.trainer.evaluation import evaluate, summarize
from etude.trainer.events import RolloutProgress
from etude.trainer.rollouts import Rollouts, sample_of
from etude.trainer.validation_metrics import estimate, expected_majority, wilson_interval
from etude.trajectory import Rollout, ToolCallRecord, Trajectory


def sample(score, *, tool=False, **info):
    trajectory = Trajectory("r", [1])
    trajectory.rewards.score = score
    trajectory.rewards.score_info = info
    if tool:
        trajectory.tool_calls.append(ToolCallRecord(turn=0, name="t", arguments="{}", response="", reward=0, seconds=0))
    return sample_of(Rollout([trajectory]), RewardOptions())


def test_each_prompt_counts_once_and_each_source_has_its_figures():
    sources = {"e1": "easy", "e2": "easy", "h1": "hard", "h2": "hard", "g1": "gone"}
    samples = {"e1": [sample(1.0, tool=True)] * 3, "e2": [sample(0.0)], "h2": [sample(0.0)]}
    figures = summarize(sources, samples, 3)
    easy, hard, gone = (figures["sources"][name] for name in ("easy", "hard", "gone"))
    assert (
        easy["success"] == easy["tool_use"] == easy["reward"] == 0.5
    )  # three samples of four are right, one prompt of two
    assert (easy["success_low"], easy["success_high"]) == wilson_interval(1, 2)
    assert (easy["prompts"], easy["samples"], easy["dropped"]) == (2, 4, 2)
    assert (hard["prompts"], hard["samples"], hard["dropped"], hard["success"]) == (1, 1, 5, 0.0)
    assert gone == {"prompts": 0, "samples": 0, "dropped": 3}
    assert figures["success"] == pytest.approx(1 / 3)
    assert (figures["prompts"], figures["samples"], figures["dropped"]) == (3, 5, 10)


@pytest.mark.parametrize("n", [1, 4, 16])
@pytest.mark.parametrize("alike", [0.0, 0.5, 1.0])
def test_the_interval_covers_however_alike_the_samples_of_a_prompt_are(n, alike):
    """`alike`: the share of prompts all of whose samples end equally."""
    generator = np.random.default_rng(7)
    covered, trials, p = 0, 600, 0.4
    for _ in range(trials):
        one = (generator.random((60, 1)) < p).repeat(n, axis=1)
        own = generator.random((60, n)) < p
        values = np.where(generator.random((60, 1)) < alike, one, own).astype(float)
        found = estimate(values.mean(axis=1).tolist(), proportion=True)
        covered += found.low <= p <= found.high
    assert covered / trials >= 0.93


def test_the_bootstrapped_interval_of_rewards_covers():
    generator, covered, trials, n = np.random.default_rng(3), 0, 200, 40
    for _ in range(trials):
        found = estimate(generator.normal(2.0, 1.0, n).tolist(), proportion=False)
        covered += found.low <= 2.0 <= found.high
    assert covered / trials >= 0.9
    values = [0.5, 2.0, 3.5]
    assert estimate(values, proportion=False) == estimate(values, proportion=False)


ANSWERS = st.lists(st.sampled_from(["a", "b", "c", None]), min_size=1, max_size=7)


@given(answers=ANSWERS, data=st.data())
def test_the_expected_majority_is_the_mean_over_all_subsets(answers, data):
    scores = [data.draw(st.sampled_from([0.0, 0.25, 1.0])) for _ in answers]
    k = data.draw(st.integers(1, len(answers)))
    found = []
    for chosen in combinations(range(len(answers)), k):
        votes = Counter(answers[i] for i in chosen if answers[i] is not None)
        modes = [answer for answer, count in votes.items() if count == max(votes.values())] or [None]
        means = [np.mean([score for own, score in zip(answers, scores) if own == mode]) for mode in modes]
        found.append(np.mean(means))
    assert expected_majority(answers, scores, k) == pytest.approx(np.mean(found))


def test_the_expected_majority_of_many_samples_is_finite():
    right = [1.0] * 900 + [0.0] * 600
    assert expected_majority(["a"] * 900 + ["b"] * 600, right, 3) == pytest.approx(0.648, abs=1e-3)
    assert expected_majority([str(i) for i in range(64)], [float(i == 0) for i in range(64)], 32) == pytest.approx(
        1 / 64
    )


def test_majority_differs_from_the_mean_and_needs_a_scorer_that_reads_answers():
    own = [sample(1.0, pred="4"), sample(1.0, pred="4"), sample(0.0, pred="5"), sample(0.0, pred=None)]
    found = summarize({"p": "s"}, {"p": own}, 4)
    assert found["avg@4"]["value"] == 0.5
    assert found["maj@4"]["value"] == found["pass@4"]["value"] == 1.0
    assert found["pass@2"]["value"] == pytest.approx(1 - 1 / 6)
    assert found["maj@2"]["value"] == pytest.approx((1 + 2 + 2 * 0.5) / 6)
    assert found["metrics"]["val-core/s/reward/maj@2/mean"] == pytest.approx(found["maj@2"]["value"])
    plain = summarize({"p": "s"}, {"p": [sample(1.0), sample(0.0)]}, 2)
    assert "maj@2" not in plain
    assert "val-core/s/reward/best@2/mean" in plain["metrics"]
    assert "val-core/s/reward/maj@2/mean" not in plain["metrics"]


@pytest.mark.parametrize(
    ("first", "second", "same"),
    [
        ("1800", "1,800.00", True),
        ("0.50", " .5", False),  # nothing that a scorer reads
        ("-0", "0.0", True),
        ("18", 18, True),
        ("1,2", "12", False),
        ("2/4", "1/2", False),
        ("1e3", "1000", False),
        ("B", "b", False),
        (r"\dfrac{1}{2}", r"$\frac{1}{2}$", True),
        (r"2\sqrt{3}", r"2 \sqrt{3}", True),
        (r"\left(1,2\right)", "(1, 2)", True),
        (r"1,\!800", "1800.", True),
        ("1 1/2", "11/2", False),
        (r"\$18", "18", False),
        ("$", ".", False),
    ],
)
def test_answers_vote_whatever_their_look_and_numbers_by_their_value(first, second, same):
    assert (sample(1.0, pred=first).answer == sample(1.0, pred=second).answer) is same


def test_right_answers_are_one_vote_however_written_and_wrong_ones_by_their_text():
    own = [sample(1.0, pred="1/2"), sample(1.0, pred="0.5"), *[sample(0.0, pred=said) for said in ("Rome", "rome")]]
    found = summarize({"p": "s"}, {"p": own}, 4)
    assert found["maj@4"]["value"] == found["metrics"]["val-core/s/reward/maj@4/mean"] == 0.5
    found = summarize({"p": "s"}, {"p": [*own[:2], sample(0.0, pred="Rome"), sample(0.0, pred="Bern")]}, 4)
    assert found["maj@4"]["value"] == 1.0


def test_figures_are_named_by_the_answers_asked_for_however_many_were_lost():
    found = summarize({"p": "s", "q": "s"}, {"p": [sample(1.0), sample(0.0)], "q": [sample(1.0)]}, 4)
    assert [name for name in found if "@" in name and not name.startswith("maj")] == ["avg@4", "pass@2", "pass@4"]
    assert found["avg@4"]["value"] == found["metrics"]["val-core/s/reward/mean@4"] == 0.75
    assert found["pass@4"]["value"] == found["metrics"]["val-core/s/reward/best@4/mean"] == 1.0


class Killed(BaseException):
    """Nothing catches it, as nothing catches a SIGKILL."""


def test_a_killed_evaluation_does_only_what_is_missing(tiny, tmp_path, monkeypatch):
    val = "actor_rollout_ref.rollout.val_kwargs"
    settings = (f"data.val_files={tiny.folder}/data/test.parquet", f"{val}.n=2", f"{val}.do_sample=true")
    asked, spent, whole = [], [], Rollouts.validate_rows

    def rolled(self, dataset, numbers):
        if len(asked) == 2:
            spent.extend(read_metrics(dump / "metrics.jsonl"))  # there already: a SIGKILL lets nothing be written
            raise Killed
        asked.append(list(numbers))
        return whole(self, dataset, numbers)

    config, told = tiny.config(tmp_path, *settings, "data.val_batch_size=1"), list[RolloutProgress]()
    expected = evaluate(
        config,
        lambda event: told.append(event) if isinstance(event, RolloutProgress) else None,
        dump_folder=tmp_path / "unbroken",
    )
    counts = [(event.done, event.total) for event in told]  # over all batches, not of each
    assert counts == sorted(counts)
    assert counts[-1] == (len(list(read_rollouts(tmp_path / "unbroken" / "0.jsonl"))),) * 2
    monkeypatch.setattr(Rollouts, "validate_rows", rolled)
    dump = tmp_path / "dump"
    with pytest.raises(Killed):
        evaluate(config, dump_folder=dump)
    assert spent[0]["timing_s/testing"] > 0
    with (dump / "0.jsonl.part").open("ab") as file:
        file.write(b'{"step": 0, "uid": "val-2", "tor')
    asked.clear()
    result = evaluate(config, dump_folder=dump)
    assert asked == [[2]]
    assert result | {"folder": ""} == expected | {"folder": ""}
    lines = [list(read_rollouts(folder / "0.jsonl")) for folder in (dump, tmp_path / "unbroken")]
    first, second = ([(each["uid"], each["response_ids"]) for each in records] for records in lines)
    assert first == second
    assert evaluate(config, dump_folder=dump) == result
    assert asked == [[2]]
    assert not (dump / "0.jsonl.part").exists()
    other = tiny.config(tmp_path, *settings, f"{val}.temperature=0.5")
    with pytest.raises(ConfigError, match=r"differs in actor_rollout_ref.rollout.val_kwargs.temperature: give another"):
        evaluate(other, dump_folder=dump)
    monkeypatch.undo()
    assert evaluate(other, dump_folder=dump, fresh=True)["samples"] == 6


def test_code_that_the_reward_imports_is_part_of_what_was_evaluated(tiny, tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(tmp_path)
    reward, grades = tmp_path / "reward.py", tmp_path / "grades.py"
    reward.write_text(
        "def compute_score(data_source, solution_str, ground_truth, extra_info=None):\n"
        "    from grades import grade\n"
        "    return grade()\n"
    )
    files = (f"data.val_files={tiny.folder}/data/test.parquet", f"custom_reward_function.path={reward}")
    config = tiny.config(tmp_path / "runs", *files)
    for body, expected in (("0.0", 0), ("1.0 + 1.0", 2)):
        grades.write_text(f"def grade(): return {body}\n")
        monkeypatch.delitem(sys.modules, "grades", raising=False)
        assert evaluate(config)["reward"] == expected
    grades.write_text("def grade(): return 3.0\n")
    with pytest.raises(ConfigError, match=r"differs in \S*grades.py"):
        evaluate(config, dump_folder=next((tmp_path / "runs").glob("eval-*")))


def test_an_edited_function_of_several_is_another_evaluation(tiny, tmp_path):
    reward, score = tmp_path / "reward.py", tmp_path / "score.txt"
    head = (
        f"from pathlib import Path\n\ndef compute_score(solution_str):\n    return float(Path('{score}').read_text())\n"
    )
    rewards = f"custom_reward_function.rewards=[{{path: {reward}}},{{path: etude.rewards.repetition, weight: 0}}]"
    files = (f"data.val_files={tiny.folder}/data/test.parquet", "custom_reward_function.path=null", rewards)
    config = tiny.config(tmp_path / "runs", *files)
    for value in ("0", "2"):  # a process imports a file once: the edit is a comment here
        score.write_text(value)
        reward.write_text(f"{head}# {value}\n")
        assert evaluate(config)["reward"] == float(value)


def test_each_step_of_a_folder_is_an_evaluation_of_its_own(tiny, tmp_path):
    val = "actor_rollout_ref.rollout.val_kwargs.temperature"
    first, second = (
        tiny.config(tmp_path, f"data.val_files={tiny.folder}/data/test.parquet", f"{val}={t}") for t in (0.5, 0.25)
    )
    before = evaluate(first, dump_folder=tmp_path / "dump", step=1)
    evaluate(second, dump_folder=tmp_path / "dump", step=2)
    assert (
        evaluate(first, dump_folder=tmp_path / "dump", step=1) == before
    )  # though the folder's last one was the other
    with pytest.raises(ConfigError, match=f"differs in {val}: give another"):
        evaluate(second, dump_folder=tmp_path / "dump", step=1)
    (tmp_path / "dump" / "1.identity.json").write_text("[]")
    with pytest.raises(ConfigError, match="trajectories of unknown origin"):
        evaluate(first, dump_folder=tmp_path / "dump", step=1)


def test_the_folder_of_a_training_run_is_refused_and_left_as_it_is(tiny, tmp_path):
    kept = {"run.json": '{"kind": "train", "ended": "completed"}', "config.yaml": "trainer: {}\n"}
    for name, text in kept.items():
        (tmp_path / name).write_text(text)
    config = tiny.config(tmp_path, f"data.val_files={tiny.folder}/data/test.parquet")
    for fresh in (False, True):
        with pytest.raises(ConfigError, match="holds another run"):
            evaluate(config, dump_folder=tmp_path, fresh=fresh)
    assert {name: (tmp_path / name).read_text() for name in kept} == kept


def test_an_evaluation_of_which_nothing_is_there_is_in_nobodys_way(tiny, tmp_path, monkeypatch):
    def killed(self, dataset, numbers):
        raise Killed

    settings, dump = [f"data.val_files={tiny.folder}/data/test.parquet"], tmp_path / "dump"
    config = tiny.config(tmp_path, *settings)
    with monkeypatch.context() as patch:
        patch.setattr(Rollouts, "validate_rows", killed)
        with pytest.raises(Killed):
            evaluate(config, dump_folder=dump)
    other = tiny.config(tmp_path, *settings, "actor_rollout_ref.rollout.val_kwargs.temperature=0.5")
    assert evaluate(other, dump_folder=dump)["samples"] == 3


def test_samples_that_were_dropped_are_tried_again(tiny, tmp_path):
    (tmp_path / "judge.py").write_text(
        "import pathlib\n"
        "def compute_score(data_source, solution_str, ground_truth, extra_info):\n"
        f"    if extra_info['index'] == 1 and not pathlib.Path('{tmp_path}/up').exists():\n"
        "        raise ConnectionError('no judge')\n"
        "    return 1.0\n"
    )
    settings = [f"data.val_files={tiny.folder}/data/test.parquet", "actor_rollout_ref.rollout.infrastructure_retries=0"]
    config = tiny.config(tmp_path / "run", *settings, f"custom_reward_function.path={tmp_path}/judge.py")
    first = evaluate(config, dump_folder=tmp_path / "dump")
    assert (first["samples"], first["dropped"]) == (2, 1)
    (tmp_path / "up").touch()
    second = evaluate(config, dump_folder=tmp_path / "dump")
    assert (second["samples"], second["dropped"], second["success"]) == (3, 0, 1.0)


def test_an_evaluation_says_what_it_cost_and_keeps_to_the_judges_budget(tiny, tmp_path):
    """Three rows, a batch each, at 0.5 each: a budget of 0.7 ends it after the second; a higher one goes on from there."""
    (tmp_path / "judge.py").write_text(
        "from etude.rewards import usage\n"
        "def compute_score(data_source, solution_str, ground_truth, extra_info):\n"
        "    usage.count(requests=1, cost=0.5)\n"
        "    return 1.0\n"
    )
    settings = [f"data.val_files={tiny.folder}/data/test.parquet", "data.val_batch_size=1"]

    def evaluated(budget):
        more = [f"custom_reward_function.path={tmp_path}/judge.py", f"reward_model.budget={budget}"]
        try:
            return evaluate(tiny.config(tmp_path / "run", *settings, *more), dump_folder=tmp_path / "dump")
        finally:
            totals.append(json.loads((tmp_path / "dump" / "run.json").read_bytes())["totals"])

    totals = []
    with pytest.raises(TrainingStopped, match=r"judges have cost 1, more than reward_model\.budget=0\.7"):
        evaluated(0.7)
    with pytest.raises(TrainingStopped, match="judges have cost 1, more"):
        evaluated(0.7)
    assert evaluated(2.0)["samples"] == 3
    assert [each["judge_cost"] for each in totals] == [1.0, 1.0, 1.5]
    assert totals[-1]["judge_requests"] == 3
    assert totals[-1]["cpu_hours"] > totals[0]["cpu_hours"] > 0
