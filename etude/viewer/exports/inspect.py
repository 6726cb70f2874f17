"""Exports Inspect `.eval` logs with `inspect_ai`'s own models and writer: one log per step of a run, one sample per rollout.

A sample's id is the prompt's uid, its epoch the rollout's number within the prompt. Token ids, mask and log-probs are in the
sample's metadata. A step with more than `MAX_SAMPLES` rollouts gets several logs: the writer holds a whole log in memory.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Iterator
from datetime import datetime, timezone
from itertools import groupby, islice
from pathlib import Path
from typing import Any

from etude.errors import MissingExtraError
from etude.jsonl import json_safe
from etude.viewer.exports.turns import ExportedRollout, Turn, valid
from etude.viewer.rows import as_dict

try:
    from inspect_ai.log import EvalLog, write_eval_log
except ModuleNotFoundError as error:
    if (error.name or "").partition(".")[0] != "inspect_ai":
        raise
    raise MissingExtraError("the format 'inspect'", "inspect") from error

MAX_SAMPLES = 1000
_MODEL = "etude/policy"
_IDS = ("eval_id", "run_id", "task_id")
_ERRORS = {"timeout": "timeout", "malformed": "parsing", "invalid_arguments": "parsing"}


def export(rollouts: Iterator[ExportedRollout], out: Path) -> None:
    """Writes a folder of logs for `inspect view --log-dir`."""
    out.mkdir()
    for (split, step), of_step in groupby(rollouts, lambda each: (each.row.split, each.row.step)):
        epochs: Counter[str] = Counter()
        part = 0
        while of_log := list(islice(of_step, MAX_SAMPLES)):
            part += 1
            name = "-".join([split.replace("/", "-") or "rollouts", str(step), *([str(part)] if part > 1 else [])])
            log = EvalLog.model_validate(_log(name, of_log, epochs))
            write_eval_log(log, str(out / f"{name}.eval"), format="eval")
            of_log.clear()  # frees them before the next batch is read


def _log(name: str, rollouts: list[ExportedRollout], epochs: Counter[str]) -> dict[str, Any]:
    first = rollouts[0]
    samples = []
    for rollout in rollouts:
        epochs[rollout.row.uid] += 1
        samples.append(_sample(rollout, epochs[rollout.row.uid]))
    scores = [rollout.row.score for rollout in rollouts if rollout.row.score is not None]
    mean = {"name": "mean", "value": sum(scores) / len(scores) if scores else 0.0}
    ids = {key: hashlib.blake2b(f"{key} {first.run} {name}".encode(), digest_size=11).hexdigest() for key in _IDS}
    spec = {
        **ids,
        "created": datetime.fromtimestamp(first.modified // 10**9, timezone.utc).isoformat(),
        "task": f"{first.run}/{name}",
        "dataset": {"name": first.row.data_source or first.run, "samples": len(set(epochs))},
        "model": _MODEL,
        "config": {"epochs": max(epochs.values())},
        "metadata": {"run": first.run, "split": first.row.split, "training_step": first.row.step},
    }
    results = {
        "total_samples": len(samples),
        "completed_samples": len(samples),
        "scores": [{"name": "score", "scorer": "score", "metrics": {"mean": mean}}],
    }
    return {"status": "success", "eval": spec, "results": results, "samples": samples}


def _sample(rollout: ExportedRollout, epoch: int) -> dict[str, Any]:
    place, row = rollout.row.place, rollout.row
    prompt = [
        {"role": "system" if role in ("system", "developer") else "user", "content": text, "id": f"{place}#p{number}"}
        for number, (role, text) in enumerate(rollout.prompt)
    ]
    messages = [*prompt, *(message for n, turn in enumerate(rollout.turns) for message in _messages(place, n, turn))]
    last = [message for message in messages if message["role"] == "assistant"][-1]
    sampled = sum(len(turn.token_ids) for turn in rollout.turns)
    read = sum(turn.context for turn in rollout.turns)
    usage = {"input_tokens": read, "output_tokens": sampled, "total_tokens": read + sampled}
    choice = {"message": last, "stop_reason": "max_tokens" if "truncated" in row.flags else "stop"}
    found = as_dict(as_dict(rollout.record.get("rewards")).get("score_info")).get("pred")
    scores: dict[str, Any] = {valid(name): {"value": value} for name, value in row.rewards.items() if name != "score"}
    if row.score is not None:
        scores["score"] = {"value": row.score, "answer": None if found is None else valid(found)}
    return {
        "id": valid(row.uid),
        "epoch": epoch,
        "uuid": place,
        "input": prompt,
        "target": valid(rollout.expected),
        "messages": messages,
        "output": {"model": _MODEL, "choices": [choice], "usage": usage},
        "scores": scores,
        "metadata": as_dict(json_safe(rollout.facts | {"sequences": rollout.sequences})),
        "model_usage": {_MODEL: usage},
        "total_time": row.seconds or None,
        "working_time": row.seconds or None,
        "turn_count": len(rollout.turns),
    }


def _messages(place: str, number: int, turn: Turn) -> Iterator[dict[str, Any]]:
    calls = [{"id": call.id, "function": call.name, "arguments": call.arguments} for call in turn.calls]
    said = {"role": "assistant", "content": turn.text, "tool_calls": calls or None, "model": _MODEL}
    yield said | {"id": f"{place}#{number}"}
    for call in turn.calls:
        kind = _ERRORS.get(call.error or "", "unknown")
        error = None if call.error is None else {"type": kind, "message": call.error}
        answer = {"role": "tool", "content": call.response, "tool_call_id": call.id, "function": call.name}
        yield answer | {"error": error, "id": f"{place}#{call.id}"}
    if turn.said:
        yield {"role": "user", "content": turn.said, "id": f"{place}#u{number}"}
