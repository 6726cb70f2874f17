"""Exports Inspect `.eval` logs with `inspect_ai`'s own writer: one log per step of a run, one sample per rollout.

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

from etude.errors import MissingExtraError
from etude.jsonl import json_safe
from etude.viewer.exports.turns import Call, ExportedRollout, Turn, valid
from etude.viewer.rows import as_dict

try:
    from inspect_ai.log import (
        EvalConfig,
        EvalDataset,
        EvalLog,
        EvalMetric,
        EvalResults,
        EvalSample,
        EvalScore,
        EvalSpec,
        write_eval_log,
    )
    from inspect_ai.model import (
        ChatCompletionChoice,
        ChatMessage,
        ChatMessageAssistant,
        ChatMessageSystem,
        ChatMessageTool,
        ChatMessageUser,
        ModelOutput,
        ModelUsage,
    )
    from inspect_ai.scorer import Score
    from inspect_ai.tool import ToolCall, ToolCallError
except ModuleNotFoundError as error:
    if (error.name or "").partition(".")[0] != "inspect_ai":
        raise
    raise MissingExtraError("the format 'inspect'", "inspect") from error

MAX_SAMPLES = 1000
_MODEL = "etude/policy"


def export(rollouts: Iterator[ExportedRollout], out: Path) -> None:
    """Writes a folder of logs for `inspect view --log-dir`."""
    out.mkdir()
    for (split, step), of_step in groupby(rollouts, lambda each: (each.row.split, each.row.step)):
        epochs: Counter[str] = Counter()
        part = 0
        while of_log := list(islice(of_step, MAX_SAMPLES)):
            part += 1
            name = "-".join([split.replace("/", "-") or "rollouts", str(step), *([str(part)] if part > 1 else [])])
            write_eval_log(_log(name, of_log, epochs), str(out / f"{name}.eval"), format="eval")
            of_log.clear()  # frees them before the next batch is read


def _log(name: str, rollouts: list[ExportedRollout], epochs: Counter[str]) -> EvalLog:
    first = rollouts[0]
    written = datetime.fromtimestamp(first.modified // 10**9, timezone.utc).isoformat()
    samples = []
    for rollout in rollouts:
        epochs[rollout.row.uid] += 1
        samples.append(_sample(rollout, epochs[rollout.row.uid]))
    scores = [rollout.row.score for rollout in rollouts if rollout.row.score is not None]
    mean = EvalMetric(name="mean", value=sum(scores) / len(scores) if scores else 0.0)
    ids = {key: hashlib.blake2b(f"{key} {first.run} {name}".encode(), digest_size=11).hexdigest() for key in _IDS}
    spec = EvalSpec(
        **ids,
        created=written,
        task=f"{first.run}/{name}",
        dataset=EvalDataset(name=first.row.data_source or first.run, samples=len(set(epochs))),
        model=_MODEL,
        config=EvalConfig(epochs=max(epochs.values())),
        metadata={"run": first.run, "split": first.row.split, "training_step": first.row.step},
    )
    results = EvalResults(
        total_samples=len(samples),
        completed_samples=len(samples),
        scores=[EvalScore(name="score", scorer="score", metrics={"mean": mean})],
    )
    return EvalLog(status="success", eval=spec, results=results, samples=samples)


_IDS = ("eval_id", "run_id", "task_id")


def _sample(rollout: ExportedRollout, epoch: int) -> EvalSample:
    place, row = rollout.row.place, rollout.row
    prompt: list[ChatMessage] = [
        (ChatMessageSystem if role in ("system", "developer") else ChatMessageUser)(
            content=text, id=f"{place}#p{number}"
        )
        for number, (role, text) in enumerate(rollout.prompt)
    ]
    messages = [*prompt, *(message for n, turn in enumerate(rollout.turns) for message in _messages(place, n, turn))]
    answers = [message for message in messages if isinstance(message, ChatMessageAssistant)]
    reason = "max_tokens" if "truncated" in row.flags else "stop"
    sampled = sum(len(turn.token_ids) for turn in rollout.turns)
    read = sum(turn.context for turn in rollout.turns)
    usage = ModelUsage(input_tokens=read, output_tokens=sampled, total_tokens=read + sampled)
    scores = {} if row.score is None else {"score": Score(value=row.score, answer=_answer(rollout))}
    seconds = row.seconds or None
    return EvalSample(
        id=valid(row.uid),
        epoch=epoch,
        uuid=place,
        input=prompt,
        target=valid(rollout.expected),
        messages=messages,
        output=ModelOutput(
            model=_MODEL, choices=[ChatCompletionChoice(message=answers[-1], stop_reason=reason)], usage=usage
        ),
        scores=scores | {valid(name): Score(value=value) for name, value in row.rewards.items() if name != "score"},
        metadata=as_dict(json_safe(rollout.facts | {"sequences": rollout.sequences})),
        model_usage={_MODEL: usage},
        total_time=seconds,
        working_time=seconds,
        turn_count=len(rollout.turns),
    )


def _answer(rollout: ExportedRollout) -> str | None:
    answer = as_dict(as_dict(rollout.record.get("rewards")).get("score_info")).get("pred")
    return None if answer is None else valid(answer)


def _messages(place: str, number: int, turn: Turn) -> Iterator[ChatMessage]:
    calls = [ToolCall(id=call.id, function=call.name, arguments=call.arguments) for call in turn.calls]
    yield ChatMessageAssistant(content=turn.text, tool_calls=calls or None, model=_MODEL, id=f"{place}#{number}")
    for call in turn.calls:
        yield ChatMessageTool(
            content=call.response, tool_call_id=call.id, function=call.name, error=_error(call), id=f"{place}#{call.id}"
        )
    if turn.said:
        yield ChatMessageUser(content=turn.said, id=f"{place}#u{number}")


def _error(call: Call) -> ToolCallError | None:
    if call.error is None:
        return None
    kinds = {"timeout": "timeout", "malformed": "parsing", "invalid_arguments": "parsing"}
    return ToolCallError(type=kinds.get(call.error, "unknown"), message=call.error)
