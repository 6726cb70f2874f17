"""OpenTelemetry spans after the `gen_ai` semantic conventions, in the OTLP JSON file format: one request per line.

A rollout is a trace: `invoke_agent` over a `chat` for each turn of the policy and an `execute_tool` for each call. Dumps
hold durations but no clock: a trace ends when its dump was written, tool calls take what they took, and the time of
generation is divided over the turns by their tokens.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from etude import __version__
from etude.jsonl import json_line, json_safe
from etude.viewer.exports.turns import Call, ExportedRollout, Turn, apportion, valid
from etude.viewer.rows import as_dict

PROVIDER = "etude"
_INTERNAL, _CLIENT = 1, 3  # kinds of spans
_ERROR = 2  # a status
_SAMPLING = ("temperature", "top_p", "top_k")


def export(rollouts: Iterator[ExportedRollout], out: Path) -> None:
    """Writes one file."""
    with out.open("wb") as file:
        for rollout in rollouts:
            file.write(json_line(otlp_request(rollout)))


def otlp_request(rollout: ExportedRollout) -> dict[str, Any]:
    """The rollout's trace, with its resource and scope."""
    resource = {"service.name": "etude", "service.version": __version__, "etude.run": rollout.run}
    scope = {"name": "etude.rollouts", "version": __version__}
    scoped = {"scope": scope, "spans": list(_spans(rollout))}
    return {"resourceSpans": [{"resource": {"attributes": _attributes(resource)}, "scopeSpans": [scoped]}]}


def _spans(rollout: ExportedRollout) -> Iterator[dict[str, Any]]:
    timings = as_dict(rollout.record.get("timings"))
    generated = _seconds(timings.get("generate_sequences"))
    shares = apportion(generated, [len(turn.token_ids) for turn in rollout.turns])
    total = generated + sum(call.seconds for turn in rollout.turns for call in turn.calls)
    begin = now = rollout.modified - int(total * 1e9)
    trace = hashlib.blake2b(f"{rollout.run}\0{rollout.row.place}".encode(), digest_size=16).hexdigest()
    agent = valid(rollout.record.get("agent_name")) or "etude"
    root = _span(trace, 0, None, f"invoke_agent {agent}", _INTERNAL, (begin, rollout.modified), _agent(rollout, agent))
    scores = {**rollout.row.rewards} | ({} if rollout.row.score is None else {"total": rollout.row.score})
    yield root | {"events": [_evaluation(name, value, rollout.modified) for name, value in scores.items()]}
    number = 0
    for turn, seconds in zip(rollout.turns, shares):
        number, start, now = number + 1, now, now + int(seconds * 1e9)
        yield _span(trace, number, 0, f"chat {PROVIDER}", _CLIENT, (start, now), _chat(rollout, turn))
        for call in turn.calls:
            number, start, now = number + 1, now, now + int(call.seconds * 1e9)
            span = _span(trace, number, 0, f"execute_tool {call.name}", _INTERNAL, (start, now), _tool(call))
            yield span | ({"status": {"code": _ERROR, "message": call.error}} if call.error else {})


def _agent(rollout: ExportedRollout, agent: str) -> dict[str, Any]:
    messages = [{"role": role, "parts": [{"type": "text", "content": text}]} for role, text in rollout.prompt]
    columns = rollout.sequences[-1] if rollout.sequences else {}
    facts = {f"etude.{name}": value for name, value in rollout.facts.items() if name not in ("rewards", "score")}
    return {
        "gen_ai.operation.name": "invoke_agent",
        "gen_ai.provider.name": PROVIDER,
        "gen_ai.agent.name": agent,
        "gen_ai.conversation.id": rollout.row.request_id or rollout.row.place,
        "gen_ai.input.messages": json.dumps(messages),
        "gen_ai.usage.input_tokens": sum(turn.context for turn in rollout.turns),
        "gen_ai.usage.output_tokens": sum(len(turn.token_ids) for turn in rollout.turns),
        **facts,
        **{f"etude.{name}": values for name, values in columns.items()},
    }


def _chat(rollout: ExportedRollout, turn: Turn) -> dict[str, Any]:
    calls = [
        {"type": "tool_call", "id": each.id, "name": each.name, "arguments": each.arguments} for each in turn.calls
    ]
    reason = "tool_call" if calls else "length" if "truncated" in rollout.row.flags else "stop"
    parts = [{"type": "text", "content": turn.text}, *calls]
    sampling = as_dict(rollout.record.get("sampling"))
    return {
        "gen_ai.operation.name": "chat",
        "gen_ai.provider.name": PROVIDER,
        "gen_ai.output.messages": json.dumps([{"role": "assistant", "parts": parts, "finish_reason": reason}]),
        "gen_ai.response.finish_reasons": [reason],
        "gen_ai.usage.input_tokens": turn.context,
        "gen_ai.usage.output_tokens": len(turn.token_ids),
        **{
            f"gen_ai.request.{name}": sampling[name]
            for name in _SAMPLING
            if isinstance(sampling.get(name), int | float)
        },
    }


def _tool(call: Call) -> dict[str, Any]:
    return {
        "gen_ai.operation.name": "execute_tool",
        "gen_ai.tool.name": call.name,
        "gen_ai.tool.call.id": call.id,
        "gen_ai.tool.call.arguments": json.dumps(json_safe(call.arguments)),
        "gen_ai.tool.call.result": call.response,
        "etude.reward": call.reward,
        **({"error.type": call.error} if call.error else {}),
    }


def _evaluation(name: str, value: float, time: int) -> dict[str, Any]:
    attributes = {"gen_ai.evaluation.name": valid(name), "gen_ai.evaluation.score.value": value}
    return {"name": "gen_ai.evaluation.result", "timeUnixNano": str(time), "attributes": _attributes(attributes)}


def _span(
    trace: str, number: int, parent: int | None, name: str, kind: int, times: tuple[int, int], of: Mapping[str, Any]
) -> dict[str, Any]:
    ids = [hashlib.blake2b(f"{trace}{each}".encode(), digest_size=8).hexdigest() for each in (number, parent or 0)]
    return {
        "traceId": trace,
        "spanId": ids[0],
        **({} if parent is None else {"parentSpanId": ids[1]}),
        "name": name,
        "kind": kind,
        "startTimeUnixNano": str(times[0]),
        "endTimeUnixNano": str(times[1]),
        "attributes": _attributes(of),
    }


def _attributes(values: Mapping[str, Any]) -> list[dict[str, Any]]:
    return [{"key": name, "value": _any_value(value)} for name, value in values.items() if value is not None]


def _any_value(value: Any) -> dict[str, Any]:
    """As OTLP's JSON writes an `AnyValue`: integers of 64 bits as text."""
    if isinstance(value, bool):
        return {"boolValue": value}
    if isinstance(value, int):
        return {"intValue": str(value)}
    if isinstance(value, float):
        return {"doubleValue": value if math.isfinite(value) else "NaN"}
    if isinstance(value, Iterable) and not isinstance(value, str):
        return {"arrayValue": {"values": [_any_value(each) for each in value]}}
    return {"stringValue": valid(value)}


def _seconds(value: object) -> float:
    return max(float(value), 0.0) if isinstance(value, int | float) else 0.0
