"""The example with a class, a function and an MCP server: its tools by hand, and a step of its run."""

import json
from pathlib import Path

import pytest
from house_stage import metrics

import etude
from etude.cli.main import cli, run
from etude.config import compose
from etude.trainer.run import train

pytest.importorskip("mcp")

EXAMPLE = Path(etude.__file__).parents[1] / "examples" / "mixed_tools"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("tool", "arguments", "wanted"),
    [
        ("price", {"item": "tea"}, "420"),
        ("price", {"item": "gold"}, "There is no gold."),
        ("in_euros", {"cents": 740}, "7.40 €"),
        ("basket", {"item": "salt"}, "In the basket: salt."),
    ],
)
def test_each_kind_of_tool_answers_from_any_folder(tool, arguments, wanted, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    command = ["tools", "call", str(EXAMPLE / "tools.yaml"), tool, json.dumps(arguments)]
    assert run(cli, command) == 0
    assert wanted in capsys.readouterr().out


def test_the_basket_judges_and_the_run_runs(tiny, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    items = ['{"item": "honey"}', '{"item": "salt"}']
    kwargs = ["--create-kwargs", '{"wanted": ["salt", "honey"]}', "--json"]
    assert run(cli, ["tools", "call", str(EXAMPLE / "tools.yaml"), "basket", *items, *kwargs]) == 0
    assert json.loads(capsys.readouterr().out)["reward"] == 1.0
    settings = [
        f"actor_rollout_ref.model.path={tiny.model}",
        "data.max_prompt_length=2048",
        "data.max_response_length=32",
        "actor_rollout_ref.rollout.n=2",
        "actor_rollout_ref.rollout.multi_turn.format=hermes",
        f"trainer.default_local_dir={tmp_path}/run",
        "trainer.total_training_steps=1",
        "trainer.logger=[jsonl]",
        "trainer.report=false",
        "trainer.num_threads=1",
    ]
    train(compose("agent", settings, EXAMPLE))
    assert metrics(tmp_path / "run")[-1]["tool/basket/reward"] == 0.0
