"""Exports OpenTelemetry spans with the `gen_ai` semantic conventions, as OTLP JSON lines: one request per line.

A rollout is a trace: an `invoke_agent` span with a `chat` child per assistant turn and an `execute_tool` child per call.
Dumps without a `timeline` have durations but no timestamps: the trace then ends when the dump was written, tool calls last
as measured, and generation time is divided among the turns in proportion to their tokens.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, cast

from etude import __version__
from etude.jsonl import json_line, json_safe
from etude.viewer.exports.turns import Call, ExportedRollout, Turn, valid
from etude.viewer.rows import as_dict, as_list

PROVIDER = "etude"
_INTERNAL, _CLIENT = 1, 3  # span kinds
_ERROR = 2  # status code
_SAMPLING = ("temperature", "top_p", "top_k")


def export(rollouts: Iterator[ExportedRollout], out: Path) -> None:
    """Writes one file with one OTLP request per line."""
    with out.open("wb") as file:
        for rollout in rollouts:
            file.write(json_line(otlp_request(rollout)))


def otlp_request(rollout: ExportedRollout) -> dict[str, Any]:
    """Builds the request for a rollout's trace, with resource and scope."""
    resource = {"service.name": "etude", "service.version": __version__, "etude.run": rollout.run}
    scope = {"name": "etude.rollouts", "version": __version__}
    scoped = {"scope": scope, "spans": list(_spans(rollout))}
    return {"resourceSpans": [{"resource": {"attributes": _attributes(resource)}, "scopeSpans": [scoped]}]}


def _spans(rollout: ExportedRollout) -> Iterator[dict[str, Any]]:
    times = _times(rollout)
    trace = hashlib.blake2b(f"{rollout.run}\0{rollout.row.place}".encode(), digest_size=16).hexdigest()
    agent = valid(rollout.record.get("agent_name")) or "etude"
    begin, end = min(start for start, _ in times), max(stop for _, stop in times)
    root = _span(trace, 0, None, f"invoke_agent {agent}", _INTERNAL, (begin, end), _agent(rollout, agent))
    scores = {**rollout.row.rewards} | ({} if rollout.row.score is None else {"total": rollout.row.score})
    yield root | {"events": [_evaluation(name, value, end) for name, value in scores.items()]}
    number = 0
    for turn in rollout.turns:
        number += 1
        yield _span(trace, number, 0, f"chat {PROVIDER}", _CLIENT, times[number - 1], _chat(rollout, turn))
        for call in turn.calls:
            number += 1
            span = _span(trace, number, 0, f"execute_tool {call.name}", _INTERNAL, times[number - 1], _tool(call))
            yield span | ({"status": {"code": _ERROR, "message": call.error}} if call.error else {})


def _times(rollout: ExportedRollout) -> list[tuple[int, int]]:
    """(start, end) of each turn, followed by those of its calls, in nanoseconds since the epoch."""
    turns = rollout.turns
    generated, used = (_clock(rollout.record, name) for name in ("generate_sequences", "tool_calls"))
    calls = [[_nanoseconds(call.seconds) for call in turn.calls] for turn in turns]
    times = []
    if len(generated) == len(turns) and len(used) == sum(map(bool, calls)):
        waits = iter(used)
        for (start, end), lengths in zip(generated, calls):
            begun = next(waits)[0] if lengths else 0
            # the calls of a turn run concurrently
            times += [(start, end), *((begun, begun + length) for length in lengths)]
        return times
    # No usable timeline: lay the durations out one after another, ending when the dump was written.
    whole = _nanoseconds(as_dict(rollout.record.get("timings")).get("generate_sequences"))
    now = rollout.modified - whole - sum(map(sum, calls))
    sampled = sum(len(turn.token_ids) for turn in turns)
    for turn, lengths in zip(turns, calls):
        share = whole * len(turn.token_ids) / sampled if sampled else whole / len(turns)
        for length in (int(share), *lengths):
            times.append((now, now + length))
            now += length
    return times


def _clock(record: Mapping[str, Any], activity: str) -> list[tuple[int, int]]:
    """(start, end) of each span of `activity` in the dump's `timeline`, in nanoseconds since the epoch."""
    spans = [span for span in as_list(record.get("timeline")) if isinstance(span, list) and span[:1] == [activity]]
    starts = [(_nanoseconds(span[1]), _nanoseconds(span[2])) for span in spans if len(span) == 3]
    return [(start, start + length) for start, length in starts]


def _nanoseconds(seconds: object) -> int:
    is_time = isinstance(seconds, int | float) and 0 < seconds < 1e10
    return int(float(cast(float, seconds)) * 1e9) if is_time else 0


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
    """Encodes an OTLP JSON `AnyValue`; 64-bit integers are strings."""
    if isinstance(value, bool):
        return {"boolValue": value}
    if isinstance(value, int):
        return {"intValue": str(value)}
    if isinstance(value, float):
        return {"doubleValue": value if math.isfinite(value) else "NaN"}
    if isinstance(value, Iterable) and not isinstance(value, str):
        return {"arrayValue": {"values": [_any_value(each) for each in value]}}
    return {"stringValue": valid(value)}
