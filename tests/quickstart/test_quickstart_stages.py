"""The quickstart on tiny sizes: stage by stage, interrupted and continued, refused where it must be."""

import ast
import json
import threading
from pathlib import Path

import pytest
from house_stage import same, weights

import etude.quickstart
from etude.cli.main import cli, run
from etude.dumps import read_rollouts
from etude.errors import ConfigError, EtudeError
from etude.quickstart import stages
from etude.quickstart.example import CALCULATOR, Rows, find_example
from etude.quickstart.prepare import TOOLS, example_inputs, prepare
from etude.quickstart.stages import Quickstart
from etude.tools import load_tools
from etude.trainer import run as runs
from etude.trainer.interrupts import Interrupted
from etude.trainer.ppo import PPOTrainer

ROWS = Rows(train=8, val=3, test=4, demonstrations=32)
TINY = (
    "data.train_batch_size=2",
    "data.max_response_length=24",
    "actor_rollout_ref.rollout.n=2",
    "actor_rollout_ref.rollout.val_kwargs.n=2",  # but for greedy answers, which are all the same
    "actor_rollout_ref.rollout.val_kwargs.do_sample=true",
    "actor_rollout_ref.actor.ppo_mini_batch_size=1",
    "algorithm.filter_groups.enable=false",  # a model that says noise earns the same for steps on end
    "trainer.total_training_steps=4",
    "trainer.save_freq=2",
    "trainer.test_freq=2",
    "trainer.num_threads=1",
    "trainer.logger=[jsonl]",
)
WARM_UP = (
    "data.train_batch_size=4",
    "trainer.total_training_steps=2",
    "target_success.low=0.0",
    "target_success.high=1.0",
    "target_success.samples=3",
    "target_success.max_response_length=16",
    "trainer.num_threads=1",
    "trainer.logger=[jsonl]",
)
STAGES = ["data", "model", "warm_up", "evaluate_before", "train", "evaluate_after"]


def quickstart(folder, notes=None, seed=1, overrides=TINY):
    note = (lambda text: None) if notes is None else notes.append
    return Quickstart(find_example(CALCULATOR), folder, seed, overrides, note, rows=ROWS, warm_up_overrides=WARM_UP)


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """(folder, summary) of a quickstart that nothing interrupted."""
    folder = tmp_path_factory.mktemp("quickstart") / "run"
    return folder, quickstart(folder).run()


def test_it_is_data_and_configuration_alone():
    banned = {f"etude.{room}" for room in ("algorithms", "training", "inference", "agents", "workers")}
    for path in Path(etude.quickstart.__file__).parent.glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            names = [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            names += [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            rooms = {".".join(name.split(".")[:2]) for name in names}
            assert not rooms & (banned | {"torch"}), path


def test_it_leaves_what_it_promises(whole):
    folder, summary = whole
    assert json.loads((folder / "summary.json").read_text()) == json.loads(json.dumps(summary))
    assert summary["tasks"] == 4
    assert set(summary["seconds"]) == set(STAGES)
    for when in ("before", "after"):
        figures = summary[when]["success, sampled"]
        assert 0 <= figures["low"] <= figures["value"] <= figures["high"] <= 1
    assert Path(summary["model"]).is_dir()
    assert (folder / "rollouts" / "4.jsonl").is_file()


def test_the_command_scores_its_model_as_it_does(whole, tmp_path, capsys):
    folder, summary = whole
    model = f"actor_rollout_ref.model.path={summary['model']}"
    greedy = [f"actor_rollout_ref.rollout.val_kwargs.{each}" for each in ("do_sample=false", "n=1")]
    files = (f"data.val_files={folder}/data/test.parquet", *TINY, *greedy)
    command = ["eval", "--config-name", "quickstart", "--dump", str(tmp_path), model, *files]
    assert run(cli, command) == 0
    ours, theirs = (
        list(read_rollouts(each)) for each in (tmp_path / "0.jsonl", folder / "evaluation" / "greedy" / "4.jsonl")
    )
    assert [record["input"] for record in ours] == [record["input"] for record in theirs]
    assert [record["response_ids"] for record in ours] == [record["response_ids"] for record in theirs]
    assert f"success {summary['greedy_after']:.3f}" in capsys.readouterr().out


def test_a_finished_one_does_nothing_again(whole, monkeypatch):
    folder, summary = whole
    monkeypatch.setattr(stages, "write_tables", None)
    monkeypatch.setattr(runs, "train", None)
    notes = []
    again = quickstart(folder, notes).run()
    assert again == summary
    assert len(notes) == len(STAGES)
    assert all(note.endswith(": done before") for note in notes)


@pytest.mark.parametrize("stage", [each for each in STAGES if each != "model"])
def test_an_interrupted_one_ends_as_one_that_was_not(whole, tmp_path, monkeypatch, stage):
    """Ctrl-C in the middle of a stage, then the same command again."""
    if stage == "train":
        step = PPOTrainer.training_step

        def abandoned(self, interrupts):
            if self.global_step == 3:  # one step after the checkpoint
                interrupts.stop = True
                raise KeyboardInterrupt
            return step(self, interrupts)

        monkeypatch.setattr(PPOTrainer, "training_step", abandoned)
    else:
        name = {"data": "_make_data", "model": "_make_model", "warm_up": "_warm_up"}.get(stage, "_evaluate")
        work = getattr(Quickstart, name)

        def cut(self, *arguments):
            if not arguments or stage == f"evaluate_{arguments[0]}":
                work(self, *arguments)
                raise KeyboardInterrupt
            return work(self, *arguments)

        monkeypatch.setattr(Quickstart, name, cut)
    folder = tmp_path / "run"
    with pytest.raises((KeyboardInterrupt, Interrupted)):
        quickstart(folder).run()
    monkeypatch.undo()
    notes = []
    summary = quickstart(folder, notes).run()
    assert sum(note.endswith(": done before") for note in notes) == STAGES.index(stage)
    assert same(weights(folder, 4), weights(whole[0], 4))
    for key in ("before", "after", "tasks"):
        assert summary[key] == whole[1][key]


def test_another_seed_in_the_folder_is_refused(whole):
    with pytest.raises(ConfigError, match="holds the quickstart of seed 1: give another --output-dir"):
        quickstart(whole[0], seed=2)


def test_a_ledger_that_is_none_is_refused(tmp_path):
    (tmp_path / "quickstart.json").write_text("{")
    with pytest.raises(ConfigError, match=r"quickstart\.json is no quickstart's record"):
        quickstart(tmp_path)


def test_a_wrong_override_is_told_before_anything_is_made(tmp_path, capsys):
    assert run(cli, ["quickstart", "--output-dir", str(tmp_path / "run"), "trainer.sed=2"]) == 2
    out, err = capsys.readouterr()
    assert (out, err.count("\n")) == ("", 1)
    assert "did you mean trainer.seed?" in err
    assert not (tmp_path / "run").exists()


def test_ctrl_c_between_two_stages_says_what_goes_on(tmp_path, monkeypatch, capsys):
    def interrupt(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(Quickstart, "_make_model", interrupt)
    assert run(cli, ["quickstart", "--example", "calculator", "--output-dir", str(tmp_path)]) == 130
    printed = capsys.readouterr()
    assert printed.err == "interrupted; the same command goes on after the last stage that finished\n"
    assert printed.out.splitlines()[:5] == [  # before anything is done, what will be, with the configured lengths
        "1 supervised warm-up: 600 steps of 16 conversations",
        "2 evaluating before: 512 questions, greedy and sampled",
        "3 reinforcement learning: 60 steps of 16 questions with 8 answers each, a checkpoint every 10 steps",
        "4 evaluating after: the same questions",
        "A line with ! names what costs a step learning signal; in the first steps, most pass as the model learns.",
    ]
    assert (tmp_path / "data" / "train.parquet").is_file()


@pytest.mark.parametrize(
    ("override", "wanted"),
    [
        ("trainer.total_training_steps=0", "trainer.total_training_steps must be a whole number of at least 1"),
        ("data.train_batch_size=100000", "the number of rows, got 100000"),
        ("actor_rollout_ref.rollout.multi_turn.format=hermess", "did you mean 'hermes'?"),
    ],
)
def test_a_wrong_value_is_told_before_the_warm_up(tmp_path, override, wanted):
    one = quickstart(tmp_path, overrides=(override,))
    one._warm_up = lambda: pytest.fail("it warmed up")
    with pytest.raises(ConfigError) as caught:
        one.run()
    assert wanted in str(caught.value)


def test_everything_follows_from_the_seed(tmp_path):
    for name, seed in (("a", 1), ("b", 1), ("c", 2)):
        prepare(tmp_path / name, seed, ROWS)
    for part in (
        "data/train.parquet",
        "data/demonstrations.parquet",
        "model/model.safetensors",
        "model/tokenizer.json",
    ):
        a, b, c = ((tmp_path / name / part).read_bytes() for name in "abc")
        assert a == b
        assert a != c


def test_its_tool_is_the_built_in_calculator():
    [tool] = load_tools(TOOLS)
    assert tool.name == "calculator"


def test_a_reward_of_ones_own_that_returns_text_is_refused_before_the_warm_up(tmp_path):
    (tmp_path / "mine.py").write_text("def compute_score(solution_str):\n    return '1'\n")
    notes = []
    run = quickstart(tmp_path / "run", notes, overrides=(*TINY, f"custom_reward_function.path={tmp_path}/mine.py"))
    with pytest.raises(EtudeError, match=rf"'compute_score' of {tmp_path}/mine\.py .* returned a str"):
        run.run()
    assert "supervised warm-up on demonstrations" not in notes


def own_example(folder, code="", **settings):
    """An example of the user's: the calculator's, with code of its own."""
    folder.mkdir(exist_ok=True)
    source = Path(etude.quickstart.__file__).parent / "calculator"
    for name in ("agent.yaml", "example.yaml"):
        (folder / name).write_text((source / name).read_text() + "".join(f"{k}: {v}\n" for k, v in settings.items()))
    (folder / "agent.py").write_text(
        f"from etude.quickstart.calculator.agent import prepare as made\n{code}\n{PREPARE}"
    )
    return find_example(str(folder))


PREPARE = "def prepare(folder, seed, rows):\n    return made(folder, seed, rows)\n"


def test_rows_of_other_code_and_results_of_other_settings_are_not_kept(tmp_path, capsys):
    def start(overrides=()):
        example = own_example(tmp_path / "mine", code)
        return Quickstart(example, tmp_path / "run", 1, overrides, lambda text: None, rows=ROWS)

    code = ""
    with start()._open():
        pass
    with start(("trainer.total_training_steps=3",))._open():
        pass  # nothing but rows is there, which settings do not change
    ledger = tmp_path / "run/quickstart.json"
    held = json.loads(ledger.read_text())
    ledger.write_text(json.dumps(held | {"stages": held["stages"] | {"train": {"seconds": 1.0, "cpu_seconds": 1.0}}}))
    with pytest.raises(
        ConfigError, match=r"is finished, with another agent\.yaml, example\.yaml or command line; give"
    ):
        start(("trainer.total_training_steps=3",)).run()
    with start()._open():
        pass
    code = "# edited"
    with pytest.raises(
        ConfigError, match=r"agent\.py, or what it imports, changed since it made the rows in .*; give an"
    ):
        start().run()


def test_other_numbers_of_rows_are_refused(tmp_path, capsys):
    """The user edits `rows` in example.yaml after a first run."""
    settings = own_example(tmp_path / "mine").folder / "example.yaml"

    def ask(rows):
        settings.write_text(f"shows: Sums.\nrows: {{{rows}}}\n")
        return Quickstart(find_example(str(settings.parent)), tmp_path / "run", 1, (), lambda text: None)

    for _ in range(2):  # the same rows are kept
        with ask("train: 8, val: 3, test: 32, demonstrations: 4")._open():
            pass
    ask("train: 8, val: 3, test: 8, demonstrations: 4")
    command = ["quickstart", "--example", str(settings.parent), "--output-dir", str(tmp_path / "run")]
    assert run(cli, command) == 2
    [line] = capsys.readouterr().err.splitlines()
    assert f"{tmp_path / 'run'} holds other numbers of rows (train 8, val 3, test 32, demonstrations 4) than" in line
    assert "example.yaml asks for (train 8, val 3, test 8, demonstrations 4); give another --output-dir, or" in line


def test_what_tries_an_example_makes_its_rows_for_itself(tmp_path, monkeypatch):
    monkeypatch.setenv("ETUDE_CACHE", str(tmp_path / "cache"))
    own_example(tmp_path / "mine")
    for _ in range(2):
        [train] = example_inputs(str(tmp_path / "mine"), "agent", ("data.val_files=x",))
        assert Path(train.removeprefix("data.train_files=")).is_relative_to(tmp_path / "cache")
        assert Path(train.removeprefix("data.train_files=")).is_file()
    for folder, name in ((str(tmp_path / "mine"), "other"), (str(tmp_path), None), (None, None)):
        assert example_inputs(folder, name, ()) == []
    with pytest.raises(ConfigError, match=r"mine is an example, .*; run `etude quickstart --example .*mine`"):
        example_inputs(str(tmp_path / "mine"), "agent", (), needs_model=True)
    given = ("actor_rollout_ref.model.path=m",)
    assert len(example_inputs(str(tmp_path / "mine"), "agent", given, needs_model=True)) == 2


def test_a_second_process_says_that_it_waits(tmp_path):
    notes, waits = [], threading.Event()

    def note(text):
        notes.append(text)
        waits.set()

    def open_too():
        with Quickstart(find_example(CALCULATOR), tmp_path, 1, TINY, note, rows=ROWS)._open():
            pass

    second = threading.Thread(target=open_too)
    with quickstart(tmp_path)._open():
        second.start()
        assert waits.wait(60)
        assert notes == [f"waiting: another process works in {tmp_path}"]
    second.join(60)
    assert notes[-1].endswith("done before")
