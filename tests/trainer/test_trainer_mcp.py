"""A whole training run whose calculator is an MCP server that dies again and again: the run goes on, and leaves nothing."""

import psutil
import yaml
from house_stage import ROLLOUT, Launched, metrics
from mcp_stage import STDIO, write_json

from etude.dumps import read_rollouts
from etude.quickstart.prepare import TOOLS
from etude.tools import load_tools

CALLS = 10  # that a server answers before it dies


def test_a_run_survives_its_tool_server_and_leaves_none_behind(tiny, tmp_path):
    marked = {"args": [*STDIO["args"], str(tmp_path)], "env": {"STAGE_CALLS": str(CALLS)}}
    known = [tool.get_openai_tool_schema().to_openai() for tool in load_tools(TOOLS)]  # which the model has by heart
    write_json(tmp_path / "schemas.json", known)
    entry = {
        "config": {"type": "mcp", "timeout": 60},
        "mcp": {"mcpServers": {"stage": STDIO | marked}, "tool_schemas_path": "schemas.json"},
    }
    (tmp_path / "tools.yaml").write_text(yaml.safe_dump({"tools": [entry]}))
    run = tmp_path / "run"
    overrides = [
        f"{ROLLOUT}.multi_turn.tool_config_path={tmp_path}/tools.yaml",
        f"{ROLLOUT}.infrastructure_retries=20",
    ]
    launched = Launched(["train", *tiny.arguments(run, *overrides)], tmp_path / "log")
    assert launched.wait() == 0, launched.text()
    assert len(metrics(run)) == 6
    calls = [call for step in range(1, 7) for call in tool_calls(run, step)]
    answered = [call["response"] for call in calls if call["name"] == "calculator" and call["error"] is None]
    assert len(answered) > CALLS  # more than one server had a hand in it
    assert all(answer.isdigit() for answer in answered)
    servers = [each for each in psutil.process_iter(["cmdline"]) if str(tmp_path) in (each.info["cmdline"] or [])]
    assert psutil.wait_procs(servers, 30)[1] == []  # this one ends when it sees that nobody is there any more


def tool_calls(run, step):
    records = read_rollouts(run / "rollouts" / f"{step}.jsonl")
    return [call for record in records for call in record["tool_calls"]]
