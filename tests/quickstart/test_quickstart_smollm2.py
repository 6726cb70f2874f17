"""The examples with a real model: each composes and has rows that fit, and one takes a step with the model itself."""

from pathlib import Path

import pytest

import etude
from etude.checks.findings import Level
from etude.cli.main import cli, run
from etude.data.files import located_rows
from etude.dumps import read_rollouts
from etude.models import load_tokenizer
from etude.options.model_path import named_folder
from etude.quickstart.example import Rows, find_example
from etude.quickstart.prepare import example_inputs, write_tables
from etude.quickstart.stages import Quickstart
from etude.run_folder import read_metrics
from etude.testing import inspect_run

EXAMPLES = Path(etude.__file__).parents[1] / "examples"
NAMES = sorted(path.parent.relative_to(EXAMPLES).as_posix() for path in EXAMPLES.glob("smollm2/*/example.yaml"))
needs_model = pytest.mark.skipif(not named_folder("smollm2").is_dir(), reason="run  etude models get smollm2")


def run_of(name, folder, *overrides):
    rows = Rows(train=4, val=2, test=3, demonstrations=find_example(name).options.rows.demonstrations and 8)
    return Quickstart(find_example(name), folder, 1, overrides, lambda text: None, rows=rows)


@pytest.mark.parametrize("name", NAMES)
def test_it_composes_and_starts_from_the_model(name, tmp_path):
    one = run_of(name, tmp_path)
    one.check_keys()
    warmed_up = tmp_path / "warm_up" / "huggingface"
    assert one.plan()[-1].endswith(" evaluating after: the same questions")
    assert one._warm_model == (warmed_up if name == "smollm2/word_problems" else named_folder("smollm2"))


@needs_model
@pytest.mark.parametrize("name", [name for name in NAMES if find_example(name).prepare])
def test_its_rows_fit(name, tmp_path):
    example = find_example(name)
    if hasattr(example._code, "DATA") and not example._code.DATA.exists():
        pytest.skip(f"{example._code.DATA} is not there")
    pytest.importorskip("bm25s")
    one = run_of(name, tmp_path)
    write_tables(example, tmp_path, 1, one.rows)
    tokenizer, limit = load_tokenizer(named_folder("smollm2")), one._config().data.max_prompt_length
    asked = {}
    for split, count in (("train", 4), ("val", 2), ("test", 3)):
        prompts = [row["prompt"] for _, row in located_rows(tmp_path / "data" / f"{split}.parquet")]
        asked[split] = {prompt[-1]["content"] for prompt in prompts}
        assert len(prompts) == count
        assert all(len(tokenizer.apply_chat_template(prompt)["input_ids"]) <= limit for prompt in prompts)
    assert not asked["train"] & asked["test"] or "sorting_office" in name  # the tool says there which letter it is


@needs_model
def test_a_new_agent_for_it_is_checked_without_a_finding(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert run(cli, ["new", "agent", "roads", "--pretrained"]) == 0
    found = inspect_run("agent", example_inputs("roads", "agent", ()), "roads")
    assert [each for each in found.all if each.level is not Level.OK] == []


@needs_model
@pytest.mark.slow
def test_the_model_takes_a_step(tmp_path):
    small = ("data.train_batch_size=1", "actor_rollout_ref.rollout.n=2", "trainer.total_training_steps=1")
    one = run_of("smollm2/products", tmp_path, *small, "trainer.save_freq=-1", "algorithm.filter_groups.enable=false")
    with one._open():
        one._train()
    [step] = [step for step in read_metrics(tmp_path / "metrics.jsonl") if step["step"]]
    assert step["actor/optimizer_steps"] == 1
    assert len(list(read_rollouts(tmp_path / "rollouts" / "1.jsonl"))) == 2


def test_the_tutorial_shows_an_example_as_it_is():
    for page in ("tutorial.md", "tutorial.zh.md"):
        text = (EXAMPLES.parent / "docs" / page).read_text(encoding="utf-8")
        assert (EXAMPLES / "smollm2" / "products" / "agent.yaml").read_text() in text
