"""Exports ATIF 1.7, Harbor's Agent Trajectory Interchange Format (RFC 0001): one JSON document per rollout.

Each assistant turn is an agent step, with token ids and log-probs in `metrics`, its tool calls, and their results as the
observation. The root's `extra` holds the exact sequences: prompt and response ids, mask and log-probs.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from etude import __version__
from etude.jsonl import json_line, json_safe
from etude.viewer.exports.turns import Call, ExportedRollout, Turn, valid

SCHEMA = "ATIF-v1.7"


def export(rollouts: Iterator[ExportedRollout], out: Path) -> None:
    """Writes one file if `out` ends with .jsonl, else a folder with one JSON file per rollout."""
    if out.suffix == ".jsonl":
        with out.open("wb") as file:
            for rollout in rollouts:
                file.write(json_line(atif_document(rollout)))
        return
    out.mkdir()
    for rollout in rollouts:
        name = rollout.row.place.removesuffix(".jsonl").replace(".jsonl:", "-").strip("/").replace("/", "-")
        (out / f"{name}.json").write_text(json.dumps(json_safe(atif_document(rollout)), indent=1) + "\n")


def atif_document(rollout: ExportedRollout) -> dict[str, Any]:
    """Converts a rollout to Harbor's `Trajectory` schema."""
    steps: list[dict[str, Any]] = []
    for role, text in rollout.prompt:
        steps.append({"source": "system" if role in ("system", "developer") else "user", "message": text})
    for number, turn in enumerate(rollout.turns):
        steps.append(_agent_step(number, turn))
        if turn.said:
            steps.append({"source": "user", "message": turn.said})
    steps = [{"step_id": number} | step for number, step in enumerate(steps, 1)]
    record = rollout.record
    return {
        "schema_version": SCHEMA,
        "session_id": rollout.run,
        "trajectory_id": rollout.row.place,
        "agent": {"name": valid(record.get("agent_name")) or "etude", "version": __version__},
        "steps": steps,
        "final_metrics": {
            "total_prompt_tokens": sum(turn.context for turn in rollout.turns),
            "total_completion_tokens": sum(len(turn.token_ids) for turn in rollout.turns),
            "total_steps": len(steps),
        },
        "extra": rollout.facts | {"sequences": rollout.sequences},
    }


def _agent_step(number: int, turn: Turn) -> dict[str, Any]:
    step: dict[str, Any] = {"source": "agent", "message": turn.text, "llm_call_count": 1, "extra": {"turn": number}}
    if turn.token_ids:
        step["metrics"] = {
            "prompt_tokens": turn.context,
            "completion_tokens": len(turn.token_ids),
            "completion_token_ids": turn.token_ids,
        }
        if turn.log_probs and all(map(math.isfinite, turn.log_probs)):
            step["metrics"]["logprobs"] = turn.log_probs
        if turn.weight_versions:
            step["metrics"]["extra"] = {"weight_versions": turn.weight_versions}
    if turn.calls:
        step["tool_calls"] = [
            {"tool_call_id": call.id, "function_name": call.name, "arguments": call.arguments} for call in turn.calls
        ]
        step["observation"] = {"results": [_result(call) for call in turn.calls]}
    return step


def _result(call: Call) -> dict[str, Any]:
    extra = {"reward": call.reward, "seconds": call.seconds} | ({"error": call.error} if call.error else {})
    return {"source_call_id": call.id, "content": call.response, "extra": extra}
