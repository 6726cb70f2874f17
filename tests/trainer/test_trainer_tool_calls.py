"""A training run whose tool calls are recorded, limited, disturbed and traced; and the same run without the tool."""

import json
import sqlite3
from contextlib import closing
from pathlib import Path

import yaml
from house_stage import metrics, same, weights

from etude.quickstart.prepare import TOOLS
from etude.trainer.run import train

STEPS = "trainer.total_training_steps=2"


def tools(folder, name, **config):
    """The override that names the quickstart's calculator with `config`, saved as `name`.yaml."""
    written = yaml.safe_load(Path(TOOLS).read_text())
    written["tools"][0]["config"] |= {"timeout": 10, "max_concurrent_calls": 4} | config
    path = folder / f"{name}.yaml"
    path.write_text(yaml.safe_dump(written))
    return f"actor_rollout_ref.rollout.multi_turn.tool_config_path={path}"


def test_a_recorded_run_is_repeated_to_the_bit_without_the_tool(tiny, tmp_path):
    calls = tmp_path / "calls.db"
    faults = {"error": 0.2, "garbage": 0.2, "seed": 3}
    trace = ("actor_rollout_ref.rollout.trace.backend=jsonl", "actor_rollout_ref.rollout.trace.sample_rate=0.5")
    train(tiny.config(tmp_path / "live", STEPS, tools(tmp_path, "live", record=str(calls), faults=faults), *trace))
    replayed = tools(tmp_path, "replayed", replay=str(calls), faults=faults)
    train(tiny.config(tmp_path / "again", STEPS, replayed))
    assert same(weights(tmp_path / "live", 2), weights(tmp_path / "again", 2))

    figures = [record for record in metrics(tmp_path / "live") if "tool/calculator/calls" in record]
    assert len(figures) == 2
    assert sum(record["tool/calculator/calls"] for record in figures) > 4
    assert sum(record.get("tool/calculator/faults", 0) for record in figures) > 0
    assert {"tool/calculator/latency_p50", "tool/calculator/latency_p95"} <= figures[0].keys()
    with closing(sqlite3.connect(calls)) as recording:
        events = [event for (event,) in recording.execute("SELECT event FROM calls")]
    assert events.count("create") == events.count("calc_reward") > 0

    lines = [json.loads(line) for line in (tmp_path / "live" / "traces.jsonl").read_text().splitlines()]
    roots = [line for line in lines if line["kind"] == "trajectory"]
    assert 0 < len(roots) < 16
    assert {line["attributes"]["step"] for line in roots} <= {1, 2}
    assert {"generation", "tool", "trajectory"} <= {line["kind"] for line in lines}
    assert not (tmp_path / "again" / "traces.jsonl").exists()
