"""Every example of the gallery takes two steps of training, with its own tools, services and agent. All but one start from
one model, which has learnt by heart how each goes. phone_book runs whole: tests/quickstart/test_quickstart_examples.py."""

import json
from pathlib import Path

import pytest

import etude
from etude.config import compose
from etude.data import SFTDataset, write_parquet
from etude.dumps import read_rollouts
from etude.models import TinyModelSpec, build_tiny_model, build_tiny_tokenizer, save_pretrained
from etude.quickstart.example import CALCULATOR, Rows, find_example
from etude.quickstart.stages import Quickstart
from etude.run_folder import read_metrics
from etude.tools import load_tools
from etude.tools.mcp import close_connections
from etude.trainer.run import fine_tune

pytestmark = pytest.mark.slow
ROWS = Rows(train=4, val=2, test=2, demonstrations=40)
OWN_MODEL = "two_tiles"  # its own untrained model sees; the others' is blind
SHOWN = 2  # conversations of each example that are learnt by heart
TINY = (
    "data.train_batch_size=2",
    "actor_rollout_ref.rollout.n=2",
    "actor_rollout_ref.rollout.temperature=0.3",  # by heart is not yet by heart at 1.0
    "actor_rollout_ref.actor.ppo_mini_batch_size=1",
    "algorithm.filter_groups.enable=false",
    "trainer.total_training_steps=2",
    "trainer.critic_warmup=0",
    "trainer.test_freq=-1",
    "trainer.save_freq=-1",
    "trainer.logger=[jsonl]",
)


def calls(tool):
    return lambda steps, rollouts: any(call["name"] == tool for each in rollouts for call in each["tool_calls"])


def is_answered(steps, rollouts):
    return any(each["user_turns"] for each in rollouts)


HAPPENED = {
    "ask_first": is_answered,
    "async_ray": calls("calculator"),
    "bisection": is_answered,
    "code_sums": calls("code_interpreter"),
    "distillation": lambda steps, rollouts: all(any("distillation" in key for key in step) for step in steps),
    "long_read": lambda steps, rollouts: all(step["rollout/sequences/mean"] > 1 for step in steps),
    "note_taker": lambda steps, rollouts: all(len(each["earlier"]) == 3 for each in rollouts),
    "polite_replies": lambda steps, rollouts: all(step["reward/judge/requests"] for step in steps),
    "ppo_critic": lambda steps, rollouts: all("critic/vf_loss" in step for step in steps),
    "self_distillation": lambda steps, rollouts: all("distillation/reverse_kl" in step for step in steps),
    "sorting_office": calls("sort"),
    "two_calls": calls("find"),
    OWN_MODEL: lambda steps, rollouts: all("<|vision_start|>" in each["input"] for each in rollouts),
}
"""What shows, in metrics and dumped rollouts, that it is this example that ran."""


def run_of(name, folder, *overrides):
    return Quickstart(find_example(name), folder, 1, overrides, lambda text: None, rows=ROWS)


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """The folder of a model of 90,000 parameters."""
    folder, shown = tmp_path_factory.mktemp("every_example"), []
    for name in [CALCULATOR, *(name for name in HAPPENED if name != OWN_MODEL and find_example(name).prepare)]:
        one = run_of(name, folder / name)
        with one._open(), one._serve():
            schemas = [
                tool.get_openai_tool_schema().to_openai() for file in one._tool_files() for tool in load_tools(file)
            ]
        talks = [row["messages"] for row in SFTDataset(str(folder / name / "data" / "demonstrations.parquet"))]
        shown += [(talk, schemas or None) for talk in sorted(talks, key=len)[-SHOWN:]]
    close_connections()
    template = build_tiny_tokenizer([], 320)  # knows the chat template, and no words yet
    texts = [template.apply_chat_template(talk, tools=schemas, tokenize=False) for talk, schemas in shown]
    tokenizer = build_tiny_tokenizer(texts, 512)
    spec = TinyModelSpec(hidden_size=64, num_layers=2, intermediate_size=128, seed=1)
    save_pretrained(build_tiny_model(spec, tokenizer), tokenizer, folder / "untrained")
    rows = [{"messages": talk, "tools": json.dumps(schemas)} for talk, schemas in shown]
    write_parquet(rows, folder / "shown.parquet")
    overrides = [
        f"data.train_files={folder}/shown.parquet",
        "data.shuffle=true",
        "data.max_length=512",
        f"model.path={folder}/untrained",
        "multi_turn.tool_config_path=null",
        "target_success.data_files=null",
        f"trainer.default_local_dir={folder}/warm_up",
        "data.train_batch_size=8",
        "trainer.total_training_steps=160",
        "trainer.save_freq=-1",
        "optim.lr_warmup_steps=10",
        "trainer.logger=[]",
    ]
    fine_tune(compose("quickstart_sft", overrides, root="sft"))
    return folder / "warm_up" / "huggingface"


def test_every_example_of_the_gallery_is_trained_by_some_test():
    gallery = {path.parent.name for path in (Path(etude.__file__).parents[1] / "examples").glob("*/example.yaml")}
    assert gallery == {*HAPPENED, "phone_book"}


@pytest.mark.parametrize("name", HAPPENED)
def test_it_takes_two_steps(name, model, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)  # rows of another example are made in runs/
    teacher = [f"distillation.teachers={{default: {model}}}"] if find_example(name).options.teacher else []
    path = tmp_path / "run" / "model" if name == OWN_MODEL else model
    one = run_of(name, tmp_path / "run", *TINY, f"actor_rollout_ref.model.path={path}", *teacher)
    with one._open(), one._serve():
        if one._start is not None:
            one._start.rows = ROWS
            one._start._make_data()
        one._train()
    steps = [step for step in read_metrics(tmp_path / "run" / "metrics.jsonl") if step["step"]]
    assert [step["step"] for step in steps] == [1, 2]
    assert not any(step["rollout/infrastructure_failures"] for step in steps)
    rollouts = [each for step in (1, 2) for each in read_rollouts(tmp_path / "run" / "rollouts" / f"{step}.jsonl")]
    assert len(rollouts) == 8
    assert HAPPENED[name](steps, rollouts)
