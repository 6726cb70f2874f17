"""What becomes of tool calls beyond the trajectory: counts of those that broke it, traces, and runs without the tool."""

import asyncio
import json
from dataclasses import replace

import pytest
from agents_stage import QUESTION, SAMPLING, Echo, Recorder, call, context, says, schema

from etude.agents import AgentLoopManager
from etude.tools import BaseTool
from etude.tools.recording import MissingCall
from etude.trace import TraceOptions, Tracer
from etude.trainer.metrics import tool_metrics

SCRIPT = [says(call(text="one")), says(call(text="two")), says("5")]


def rolled(tools, *, tracer=None, script=SCRIPT, count=3, **given):
    shared = replace(context(tools, **given), tracer=tracer)
    manager = AgentLoopManager(shared, Recorder(script))
    rows = [
        {"raw_prompt": QUESTION, "uid": f"4.0-{i}", "rollout_index": i, "step": 4, "index": 10 + i}
        for i in range(count)
    ]
    return asyncio.run(asyncio.wait_for(manager.generate(rows, SAMPLING), 30))


def metrics_of(results):
    trajectories = [result.trajectory for result in results if result.trajectory]
    return tool_metrics(trajectories, [call for result in results for call in result.broken_calls])


class Failing(Echo):
    """Breaks the first `times` calls."""

    def __init__(self, times, error, **config):
        super().__init__("echo", reward=0.5, **config)
        self.times, self.error = times, error

    async def execute(self, instance_id, parameters, **kwargs):
        self.times -= 1
        if self.times >= 0:
            if self.error is None:
                await asyncio.sleep(60)
            raise self.error
        return await super().execute(instance_id, parameters, **kwargs)


def test_calls_that_end_a_trajectory_are_counted():
    tool = Failing(2, ConnectionError("down"))
    results = rolled([tool], count=1, infrastructure_retries=2)
    assert [record.error for record in results[0].broken_calls] == ["infrastructure"] * 2
    figures = metrics_of(results)
    assert figures["tool/echo/calls"] == 2 + 2
    assert figures["tool/echo/errors"] == figures["tool/echo/infrastructure"] == 2
    assert figures["tool/echo/timeouts"] == 0
    assert figures["tool/echo/reward"] == 1.0
    assert "tool/echo/retries" not in figures


def test_a_timeout_is_counted_even_where_nothing_survives():
    results = rolled([Failing(99, None, timeout=0.05)], count=2, infrastructure_retries=0)
    assert all(result.trajectory is None for result in results)
    figures = metrics_of(results)
    assert (figures["tool/echo/calls"], figures["tool/echo/errors"], figures["tool/echo/timeouts"]) == (2, 2, 2)
    assert figures["tool/echo/infrastructure"] == 2
    assert figures["tool/echo/latency_p50"] >= 0.05


def test_retries_within_a_call_save_the_trajectory():
    results = rolled([Failing(2, ConnectionError("down"), max_retries=2, retry_delay=0)], count=1)
    assert results[0].attempts == 1
    figures = metrics_of(results)
    assert (figures["tool/echo/retries"], figures["tool/echo/errors"]) == (2, 0)


class Counting(BaseTool):
    async def execute(self, instance_id, parameters, **kwargs):
        metrics = {"length": len(parameters["text"]), "odd name": 1, "nan": float("nan"), "text": "x"}
        return parameters["text"], 0.0, metrics


def test_cache_hits_refused_arguments_and_metrics_of_a_tools_own():
    tool = Counting({"cache": {}}, schema("echo"))
    script = [says(call(text="abc")), says(call(text=5)), says(call(text="abc") + call(text="z")), says("5")]
    figures = metrics_of(rolled([tool], script=script, count=1))
    assert (figures["tool/echo/calls"], figures["tool/echo/errors"]) == (4, 1)
    assert figures["tool/echo/cache_hits"] == 1
    assert figures["tool/echo/metrics/length"] == pytest.approx((3 + 3 + 1) / 3)
    assert {name for name in figures if name.startswith("tool/echo/metrics/")} == {"tool/echo/metrics/length"}
    assert figures["rollout/malformed_calls"] == 0


def test_a_rollout_is_recorded_and_replayed_token_for_token(tmp_path):
    path = str(tmp_path / "calls.db")
    live = rolled([Echo("echo", reward=0.25, final=2.0, record=path)])
    tool = Echo("echo", replay=path)
    again = rolled([tool])
    for first, second in zip(live, again):
        assert second.trajectory.response_ids == first.trajectory.response_ids
        assert second.trajectory.rewards == first.trajectory.rewards
        assert [record.source for record in second.trajectory.tool_calls] == ["replay"] * 2
    assert not tool.log
    with pytest.raises(MissingCall):
        rolled([Echo("echo", replay=path)], script=[says(call(text="three")), says("5")])


@pytest.mark.parametrize("token2text", [False, True])
def test_a_rollout_leaves_its_trace(tmp_path, token2text):
    path = tmp_path / "traces.jsonl"
    options = TraceOptions("jsonl", path=str(path), token2text=token2text, max_samples_per_step_per_worker=2)
    rolled([Echo("echo", reward=0.25, final=2.0)], tracer=Tracer.of(options, "p", "e"))
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    traces = {line["trace"] for line in lines}
    assert len(traces) == 2
    for trace in traces:
        spans = [line for line in lines if line["trace"] == trace]
        root = spans[-1]
        assert [span["kind"] for span in sorted(spans, key=lambda s: s["start"])] == [
            "trajectory",
            "generation",
            "tool",
            "generation",
            "tool",
            "generation",
        ]
        assert all(span["parent"] == root["span"] for span in spans[:-1])
        about = root["attributes"]
        assert (about["step"], about["request_id"], about["stop_reason"]) == (4, trace, "completed")
        assert about["uid"] == f"4.0-{about['rollout_index']}"
        assert (about["step_rewards"], about["final_rewards"]) == ([0.25, 0.25], {"echo": 2.0})
        tool = next(span for span in spans if span["kind"] == "tool")
        assert (tool["name"], tool["attributes"]["arguments"]) == ("echo", '{"text": "one"}')
        assert tool["attributes"]["response"] == {"text": "one"}
        generation = next(span for span in spans if span["kind"] == "generation")
        assert generation["attributes"]["prompt_tokens"] > generation["attributes"]["response_tokens"] > 0
        assert ("What is 2 + 3?" in generation["attributes"].get("prompt", "")) == token2text


def test_a_failed_attempt_is_a_trace_of_its_own(tmp_path):
    path = tmp_path / "traces.jsonl"
    tracer = Tracer.of(TraceOptions("jsonl", path=str(path)), "p", "e")
    rolled([Failing(1, OSError("gone"))], tracer=tracer, count=1)
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    roots = [line for line in lines if line["kind"] == "trajectory"]
    assert [(root["trace"], root["error"]) for root in roots] == [("4.0-0/0/0", "BrokenCall"), ("4.0-0/0/1", None)]
