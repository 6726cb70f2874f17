"""Metrics: padding changes nothing, names never come from a model, published formulas hold."""

import itertools
import json
import math
from dataclasses import replace
from statistics import mean

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from etude.agents import Rollout
from etude.protocol import DataProto
from etude.trainer.metrics import (
    data_metrics,
    find_disappointments,
    reward_source_metrics,
    timing_metrics,
    tool_metrics,
)
from etude.trainer.rollouts import failure_metrics
from etude.trainer.validation_metrics import Sample, expected_best, validation_metrics, wilson_interval
from etude.trajectory import Provenance, Rewards, StopReason, ToolCallRecord, Trajectory


def test_a_validation_that_fell_is_told(tmp_path):
    def told(*values, kind="success", **others):
        records = [{"step": 8 * n, f"val/reward/{kind}/mean": each, **others} for n, each in enumerate(values)]
        (tmp_path / "metrics.jsonl").write_text("".join(f"{json.dumps(each)}\n" for each in records))
        return [*find_disappointments(tmp_path)]

    assert [*find_disappointments(tmp_path)] == []
    assert told(0.0, 0.9, 1.0) == told(0.5) == told(1.0, 0.96) == []
    assert "1.000 after step 16, 0.906 after step 24" in told(0.0, 1.0, 1.0, 0.906)[0]
    graded = {"kind": "total", "val/reward/success/mean": 0.0}  # no answer earns the maximum
    assert told(0.6, 0.3, **graded)[0].startswith("the reward of the validation fell: 0.600 after step 0, 0.300")
    assert told(0.02, -0.5, **graded)[0].startswith("the reward of")
    assert told(0.6, 0.58, **graded) == told(0.3, 0.6, **graded) == told(0.0, 0.0, **graded) == []
    assert told(1.0, 0.5, **{"val/rollout/dropped": 18.0}) == []  # what is left of them are other questions
    roles = {"role/white/score/mean": 1.0, "role/black/score/mean": -1.0}
    assert told(0.6, 0.3, **graded, **roles) == []  # what one of two players lost, the other won
    assert told(0.6, 0.3, **roles) == []
    (tmp_path / "run.json").write_text('{"validation_changed_at": 16}')  # the reward, for one
    assert told(0.0, 1.0, 1.0, 0.906, 0.9) == []


def test_a_reward_that_did_not_rise_is_told(tmp_path):
    def told(rewards, success=0.0, validated=(0.5, 0.5)):
        records = [
            {"step": n, "reward/total/mean": float(each), "reward/success/mean": success}
            for n, each in enumerate(rewards)
        ]
        for record, value in zip((records[0], records[-1]), validated):
            record["val/reward/success/mean"] = value
        (tmp_path / "metrics.jsonl").write_text("".join(f"{json.dumps(each)}\n" for each in records))
        return [*find_disappointments(tmp_path)]

    flat = [0, 0.1, 0.2, 0.1, 0.15, 0.1, 0.15]
    assert "0.133 in the first 3 steps, 0.133 in the last 3; `etude report" in told(flat)[0]
    assert (
        "in the last 3, while success of the validation rose from 0.031 after step 0 to 0.953 after step 6; `etude"
        in told(flat, validated=(0.03125, 0.953125))[0]
    )
    whole = (tmp_path / "metrics.jsonl").read_text().splitlines()  # the first validation lost answers: it is no start
    lost = json.dumps(json.loads(whole[0]) | {"val/reward/success/mean": 1.0, "val/rollout/dropped": 1.0})
    second = json.dumps(json.loads(whole[2]) | {"val/reward/success/mean": 0.143})
    (tmp_path / "metrics.jsonl").write_text("\n".join([lost, whole[1], second, *whole[3:]]) + "\n")
    assert "rose from 0.143 after step 2 to 0.953 after step 6" in next(find_disappointments(tmp_path))
    assert len(told([0] * 7)) == len(told([0, 8, 8, 8, 8, 8, 8])) == len(told([0, -1, -1, -1, -2, -2, -2])) == 1
    assert (
        told(flat, success=0.95)
        == told([0, 8, 9, 8, 10, 9, 10])
        == told([0, -5, -5, -4, -4, -4, -4])
        == told([0, 0.1, 0.2])  # a graded reward that rises needs no answer that earns all
        == []
    )
    plateau = [0.6, 0.7, 0.75, 0.65] * 20
    assert told([0, 0.1, 0.2, 0.4, *plateau]) == []  # it rose at once, and stayed
    assert "did not rise" in told([0, *plateau])[0]
    assert "did not rise" in told([0, 0.1, 0.2, 0.4, *plateau, *[0.3] * 80])[0]  # it did, and fell
    none = "no answer of 2 training steps succeeded"  # too few for a trend; those of the validation did
    assert told([0, 0, 0])[0].startswith(f"{none}; `etude report")
    assert told([0, 0, 0], validated=(0.1, 0.6))[0].startswith(
        f"{none}, while success of the validation rose from 0.100"
    )
    roles = {"role/white/score/mean": 1.0, "role/black/score/mean": -1.0, "step": 3}  # one of two players earns -1
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write(json.dumps(roles | {"reward/success/mean": 0.0}) + "\n")
    assert [*find_disappointments(tmp_path)] == []
    few = "the reward did not rise: 0.1 in the first of 5 steps, 0.1 in the last, which is few to tell; `etude report"
    assert told(flat[:6], success=0.1)[0].startswith(few)
    assert told(flat[:6], success=0.95) == told([0, 0.1, 0.2, 0.1], success=0.1) == []
    (tmp_path / "config.yaml").write_text("data: {sampler: {class_name: curriculum}}\n")  # which then takes harder rows
    assert told(flat, success=0.1) == told(flat[:6], success=0.1) == []
    assert told(flat)[0].startswith("no answer of 6 training steps succeeded;")


def test_a_reward_that_paid_all_from_the_first_step_is_told(tmp_path):
    def told(*spans):
        steps = [
            {"step": n, "critic/score/min": low, "critic/score/max": high, "reward/success/mean": 1.0}
            for n, (low, high) in enumerate(spans)
        ]
        (tmp_path / "metrics.jsonl").write_text("".join(f"{json.dumps(each)}\n" for each in steps))
        return [*find_disappointments(tmp_path)]

    begin = (0.0, 0.0)  # the validation before training
    assert told(begin, (1.0, 1.0), (1.0, 1.0))[0].startswith("every answer earned 1 from step 1 on; `etude report")
    assert told(begin, (0.0, 1.0), (1.0, 1.0)) == told(begin, (1.0, 1.0), (0.5, 1.0)) == []  # it rose; it differs
    (tmp_path / "run.json").write_text(json.dumps({"changed_at": 1}))  # the reward's file, before step 2
    assert told(begin, begin, (1.0, 1.0), (1.0, 1.0))[0].startswith("every answer earned 1 from step 2 on; ")


def batch(padding: int = 0) -> DataProto:
    """Two rows, prompts of 1 and 2 tokens in 2 columns, responses of 3 and 2 tokens in 3, then padding rows."""
    rows = {
        "response_mask": [[1, 0, 1], [1, 1, 0]],
        "attention_mask": [[0, 1, 1, 1, 1], [1, 1, 1, 1, 0]],
        "token_level_scores": [[0.0, 0.0, 1.0], [0.0, -1.0, 0.0]],
        "token_level_rewards": [[0.0, 0.0, 0.5], [0.0, -1.0, 0.0]],
        "advantages": [[1.0, 99.0, 2.0], [-1.0, -2.0, 99.0]],
        "returns": [[1.0, 99.0, 1.0], [-1.0, -1.0, 99.0]],
        "values": [[0.5, 99.0, 0.5], [-0.5, -0.5, 99.0]],
    }
    junk = {"response_mask": 0.0}
    data: dict[str, object] = {}
    for name, value in rows.items():
        width = len(value[0])
        data[name] = torch.tensor(value + [[junk.get(name, 7.0)] * width] * padding)
    return DataProto.from_single_dict(data)


def test_a_critic_of_zeros_explains_nothing_of_small_rewards() -> None:
    data = batch()
    assert data.batch is not None
    data.batch["values"] = torch.zeros(2, 3)
    data.batch["returns"] = data.batch["returns"] * 1e-3
    assert data_metrics(data)["critic/vf_explained_var"] == pytest.approx(0.0, abs=1e-6)
    data.batch["returns"] = torch.full((2, 3), 0.1, dtype=torch.float64)
    assert "critic/vf_explained_var" not in data_metrics(data)  # of equal returns there is nothing to explain
    data.batch["values"] = torch.full((2, 3), 0.3)
    data.batch["returns"] = torch.tensor([[0.0, 0.0, 1e-17], [-1e-17, 0.0, 0.0]], dtype=torch.float64)  # rounding
    assert "critic/vf_explained_var" not in data_metrics(data)


def test_data_metrics_by_hand() -> None:
    metrics = data_metrics(batch())
    assert metrics["critic/score/mean"] == 0.0
    assert metrics["critic/rewards/min"] == -1.0
    assert metrics["critic/rewards/mean"] == -0.25
    assert metrics["critic/advantages/mean"] == 0.0
    assert metrics["critic/advantages/max"] == 2.0
    assert metrics["critic/vf_explained_var"] == pytest.approx(0.75)
    assert metrics["response_length/mean"] == 2.5
    assert metrics["response_length/clip_ratio"] == 0.5
    assert metrics["prompt_length/max"] == 2.0
    assert data_metrics(batch(), max_response_length=4)["response_length/clip_ratio"] == 0.0
    for longest, share in ((4, 1.0), (5, 0.0)):  # of two rows with 1 + 3 and 2 + 2 tokens
        assert data_metrics(batch(), 4, longest)["response_length/clip_ratio"] == share
    several = batch()
    several.batch["main_sequence"] = torch.tensor([1, 0])  # of one rollout: lengths are of all sequences
    assert (found := data_metrics(several))["response_length/mean"] == 2.5
    assert (found["response_length/clip_ratio"], found["prompt_length/max"]) == (0.5, 2.0)


@pytest.mark.parametrize("padding", [1, 3])
def test_padding_rows_change_no_metric(padding: int) -> None:
    assert data_metrics(batch(padding)) == data_metrics(batch())


def test_a_batch_of_padding_alone_and_absent_columns_have_no_names() -> None:
    assert data_metrics(batch(2)[2:]) == {}
    lean = data_metrics(batch().select(["response_mask", "attention_mask"]))
    assert {name.partition("/")[0] for name in lean} == {"response_length", "prompt_length"}


def trajectory(*calls: ToolCallRecord, stop: StopReason = StopReason.COMPLETED, rewards: Rewards | None = None):
    made = Trajectory("r", [1], tool_calls=list(calls), stop_reason=stop, rewards=rewards or Rewards())
    made.append([1], Provenance.SAMPLED)
    return made


def call(name: str = "calculator", seconds: float = 1.0, error: str | None = None) -> ToolCallRecord:
    return ToolCallRecord(0, name, "{}", "x", seconds=seconds, error=error)


def test_an_agent_that_names_each_of_its_rewards_makes_few_metrics() -> None:
    """Each name was a metric of its own: ten thousand of a session, in every step."""
    posted = [(0, f"task-{number}", 1.0) for number in range(500)]
    metrics = tool_metrics([trajectory(call(), rewards=Rewards([*posted, (0, "calculator", 0.5)]))])
    assert metrics["tool/calculator/reward"] == 0.5
    assert sum(name.endswith("/reward") for name in metrics) == 33


def test_tool_metrics_by_hand() -> None:
    metrics = tool_metrics(
        [
            trajectory(
                call(seconds=1.0), call(seconds=3.0, error="timeout"), rewards=Rewards([(0, "calculator", 0.5)])
            ),
            trajectory(call(error="exception"), rewards=Rewards(final={"calculator": 1.0, "judge": 2.0})),
            trajectory(call("rm -rf /", error="unknown_tool"), call("{", error="malformed")),
            trajectory(call(error="not_executed"), call("rm -rf /", error="not_executed")),
            trajectory(call(error="timeout"), stop=StopReason.INFRASTRUCTURE),
        ]
    )
    assert metrics["tool/calculator/calls"] == 4
    assert metrics["tool/calculator/errors"] == 3
    assert metrics["tool/calculator/timeouts"] == 2
    assert metrics["tool/calculator/latency_p50"] == 1.0
    assert metrics["tool/calculator/latency_p95"] == pytest.approx(2.7)
    assert metrics["tool/calculator/reward"] == 0.75
    assert metrics["tool/judge/reward"] == 2.0
    assert metrics["tool_call_counts/max"] == 2
    assert metrics["num_turns/mean"] == 1.0
    assert metrics["rollout/tool_use_rate"] == pytest.approx(1 / 4)
    assert metrics["rollout/malformed_calls"] == 1
    assert metrics["rollout/calls_not_executed"] == 2
    assert metrics["rollout/unknown_tool_calls"] == 1
    assert metrics["rollout/stop_reason/completed"] == 0.8
    assert metrics["rollout/stop_reason/infrastructure"] == 0.2
    assert tool_metrics([]) == {}


def test_of_calls_that_an_agent_ran_those_it_answered_worked_and_none_has_a_latency() -> None:
    answered, last = replace(call(seconds=0.0), source="agent"), replace(call(seconds=0.0), source="unanswered")
    metrics = tool_metrics([trajectory(answered, last), trajectory(last)])
    assert metrics["rollout/tool_use_rate"] == 0.5
    assert (metrics["tool/calculator/calls"], metrics["tool/calculator/errors"]) == (3, 0)
    assert not any("latency" in name for name in metrics)


@given(st.text(min_size=1))
def test_a_name_that_the_model_made_up_names_no_metric(name: str) -> None:
    kinds = ("unknown_tool", "malformed", "not_executed")
    made_up = tool_metrics([trajectory(*(call(name, error=kind) for kind in kinds))])
    assert made_up == tool_metrics([trajectory(*(call(kind, error=kind) for kind in kinds))])


def test_rewards_by_source_leave_out_dropped_trajectories() -> None:
    metrics = reward_source_metrics(
        [
            trajectory(rewards=Rewards([(0, "a", 0.5), (1, "a", 0.5)], {"a": 1.0}, score=1.0)),
            trajectory(rewards=Rewards(score=0.0)),
            trajectory(rewards=Rewards(score=100.0), stop=StopReason.INFRASTRUCTURE),
        ],
        tool_weight=0.25,
    )
    assert metrics == {
        "reward/step/mean": 0.5,
        "reward/final/mean": 0.5,
        "reward/score/mean": 0.5,
        "reward/total/mean": 0.75,
        "reward/success/mean": 0.5,
        "reward/spread/step/a": pytest.approx(1 / 6),
        "reward/spread/final/a": pytest.approx(1 / 6),
        "reward/spread/score": pytest.approx(2 / 3),
    }
    assert "reward/score/mean" not in reward_source_metrics([trajectory()])
    assert reward_source_metrics([trajectory(stop=StopReason.CANCELLED)]) == {}


@pytest.mark.parametrize(
    ("rewards", "success"),
    [
        (Rewards(score=1.0), 1.0),
        (Rewards(score=0.9), 0.0),
        (Rewards(score=-1.0, score_info={"acc": True}), 1.0),
        (Rewards(score=2.0, score_info={"acc": 0.0}), 0.0),
        (Rewards(score=2.0, score_info={"acc": "yes"}), 1.0),
    ],
)
def test_success_is_the_scorers_word_or_a_reward_of_one(rewards: Rewards, success: float) -> None:
    assert reward_source_metrics([trajectory(rewards=rewards)])["reward/success/mean"] == success


def test_timing() -> None:
    metrics = timing_metrics({"gen": 3.0, "update_actor": 1.0, "step": 5.0}, 1000, 600)
    assert metrics["timing_s/gen"] == 3.0
    assert metrics["timing_per_token_ms/gen"] == 5.0  # per token of the responses
    assert metrics["timing_per_token_ms/update_actor"] == 1.0
    assert metrics["perf/time_per_step"] == 5.0
    assert metrics["perf/throughput"] == 200.0
    assert 0.001 < metrics["perf/cpu_memory_used_gb"] < 10_000
    assert timing_metrics({"gen": 3.0, "ref": 1.0}, 0, 0)["perf/time_per_step"] == 4.0
    assert "perf/throughput" not in timing_metrics({}, 0, 0)


@pytest.mark.parametrize(  # Newcombe 1998, Statistics in Medicine 17:857, table I, method 3
    ("successes", "n", "low", "high"),
    [(81, 263, 0.2553, 0.3662), (15, 148, 0.0624, 0.1605), (0, 20, 0.0, 0.1611), (1, 29, 0.0061, 0.1718)],
)
def test_wilson_against_published_numbers(successes: int, n: int, low: float, high: float) -> None:
    assert wilson_interval(successes, n) == pytest.approx((low, high), abs=5e-5)


@given(st.integers(1, 10_000), st.floats(0, 1))
def test_wilson_holds_the_proportion(n: int, share: float) -> None:
    low, high = wilson_interval(share * n, n)
    assert 0.0 <= low <= share + 1e-12
    assert share - 1e-12 <= high <= 1.0
    mirrored = wilson_interval(n - share * n, n)
    assert mirrored == pytest.approx((1 - high, 1 - low), abs=1e-9)


def test_wilson_refuses_what_is_no_proportion() -> None:
    assert wilson_interval(0, 0) == (0.0, 1.0)
    for successes, n in ((3, 2), (-1, 2), (1, 0)):
        with pytest.raises(ValueError, match="successes of"):
            wilson_interval(successes, n)


@given(st.lists(st.integers(-3, 3).map(float), min_size=1, max_size=6), st.data())
def test_expected_best_is_the_mean_over_all_subsets(samples: list[float], data: st.DataObject) -> None:
    k = data.draw(st.integers(1, len(samples)))
    expected = mean(max(subset) for subset in itertools.combinations(samples, k))
    assert expected_best(samples, k) == pytest.approx(expected)


def test_expected_best_of_many_samples_is_finite() -> None:
    assert math.isclose(expected_best([0.0] * 1999 + [1.0], 1000), 0.5)


def samples(*scores: float) -> list[Sample]:
    return [Sample(score, score, 0.0) for score in scores]


def test_validation_by_hand() -> None:
    metrics = validation_metrics({"a": [samples(1.0, 0.0), samples(1.0, 1.0)], "b": [samples(0.3)]})
    low, high = wilson_interval(1.5, 2)
    assert metrics == {
        "val-core/a/reward/mean@2": 0.75,
        "val-core/a/reward/mean@2/ci95_low": low,
        "val-core/a/reward/mean@2/ci95_high": high,
        "val-core/a/reward/best@2/mean": 1.0,
        "val-core/b/reward/mean@1": 0.3,
    }
    assert validation_metrics({}) == {}


def test_validation_of_ragged_groups_counts_every_prompt() -> None:
    metrics = validation_metrics({"a": [samples(1.0, 0.0, 0.0, 0.0, 0.0), samples(0.0)]})
    assert metrics["val-core/a/reward/mean@5"] == pytest.approx(0.1)
    assert [metrics[f"val-core/a/reward/best@{k}/mean"] for k in (2, 4, 5)] == pytest.approx([0.2, 0.4, 0.5])


def test_rollouts_that_teach_nothing_and_tools_that_were_not_released_are_counted():
    sampled, silent, none = (Trajectory(name, [1]) for name in "abc")
    sampled.append([2, 3], Provenance.SAMPLED, log_probs=[-0.1, -0.2])
    silent.append([2, 3], Provenance.TOOL)
    sampled.metrics["release_failures"], none.metrics["release_failures"] = 1.0, 2.0
    reasons = [StopReason.INFRASTRUCTURE, *[StopReason.CANCELLED] * 2, *[StopReason.PROMPT_TOO_LONG] * 4]
    reasons += [StopReason.AGENT_ERROR] * 16
    dropped = [Rollout(dropped=reason) for reason in [*reasons, *[StopReason.CONTEXT_REFUSED] * 8]]
    figures = failure_metrics([*(Rollout([each]) for each in (sampled, silent, none)), *dropped])
    assert (figures["rollout/nothing_sampled"], figures["rollout/release_failures"]) == (2.0, 3.0)
    assert (figures["rollout/dropped"], figures["rollout/given_up"]) == (19.0, 2.0)
    assert figures["rollout/agent_errors"] == 16.0
    assert (figures["rollout/prompt_too_long"], figures["rollout/context_refused"]) == (4.0, 8.0)
