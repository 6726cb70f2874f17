"""`etude scale`: its engine against one that steps token by token, its loop against sums by hand, its fit."""

from __future__ import annotations

import json
import random
from dataclasses import replace

import pytest
from click.testing import CliRunner
from hypothesis import given, settings
from hypothesis import strategies as st

from etude.cli.scale import (
    Costs,
    Measured,
    Placement,
    Trajectory,
    Turn,
    fit_costs,
    measure,
    predict,
    recommend,
    roll_out,
    scale,
    with_tools,
)
from etude.errors import DataError

COSTS = Costs(step=0.01, row=0.001, prefill=0.0001, train=0.5, token=0.002, sync=0.25, driver=0.125)


def stepped(costs: Costs, requests: list[tuple[int, int]], slots: int) -> float:
    """When the last of `requests`, (prefilled, sampled), ends in an engine that decodes one token a step."""
    now, waiting, running = 0.0, list(requests), list[int]()
    while waiting or running:
        while waiting and len(running) < slots:
            prefilled, sampled = waiting.pop(0)
            running.append(sampled)
            now += prefilled * costs.prefill
        now += costs.step + costs.row * len(running)
        running = [left - 1 for left in running if left > 1]
    return now


def one_turn(prefilled: int, sampled: int) -> Trajectory:
    return Trajectory((Turn(prefilled, sampled, 0.0),), 0.0)


@settings(max_examples=50, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 50), st.integers(1, 20)), min_size=1, max_size=9), st.integers(1, 4))
def test_the_engine_is_one_that_decodes_token_by_token(requests, slots):
    end, busy = roll_out(COSTS, [one_turn(*each) for each in requests], slots, len(requests))
    assert end == pytest.approx(stepped(COSTS, requests, slots))
    assert busy == pytest.approx(end)


def test_a_turn_that_waits_for_its_tool_leaves_the_engine_to_others():
    costs = Costs(0.0, 1.0, 0.0, 0.0, 0.0, 0.0, 0.0)
    waits = Trajectory((Turn(0, 2, 10.0), Turn(0, 3, 0.0)), scoring=5.0)
    assert roll_out(costs, [waits], 8, 1) == (2 + 10 + 3 + 5, 5.0)
    # both decode 2 tokens at half the pace, then the other 4 alone, long before the tool returns
    assert roll_out(costs, [waits, one_turn(0, 6)], 8, 2) == (4 + 10 + 3 + 5, 4 + 4 + 3)
    assert roll_out(costs, [waits, one_turn(0, 6)], 8, 1)[0] == 2 + 10 + 3 + 6


def fixed(turns=((10, 20, 0.0),), **changes) -> Measured:
    trajectory = Trajectory(tuple(Turn(*turn) for turn in turns), scoring=0.0)
    return replace(Measured(COSTS, [trajectory], prompts=8, n=4, slots=64), **changes)


def generation(measured: Measured, ranks: int) -> float:
    """Seconds of one batch of equal trajectories without tools, by hand."""
    rows = measured.prompts * measured.n // ranks
    (turn,) = measured.trajectories[0].turns
    return rows * turn.prefilled * COSTS.prefill + turn.sampled * (COSTS.step + COSTS.row * rows)


@pytest.mark.parametrize("ranks", [1, 2, 4, 8])
def test_a_synchronous_step_is_the_sum_of_its_parts(ranks):
    found = predict(fixed(), Placement(ranks, ranks, colocated=True))
    expected = generation(fixed(), ranks) + COSTS.train + COSTS.token * 8 * 4 * 30 / ranks + COSTS.driver + COSTS.sync
    assert found.step_seconds == pytest.approx(expected)
    assert found.samples_per_second == pytest.approx(32 / expected)
    assert found.engines_busy == pytest.approx(generation(fixed(), ranks) / expected)


def test_one_step_off_takes_as_long_as_its_slower_half():
    slow_training = replace(COSTS, token=0.1)
    found = predict(fixed(costs=slow_training), Placement(1, 1, colocated=False, staleness=1))
    expected = slow_training.training(8 * 4 * 30, 1) + COSTS.driver + COSTS.sync
    assert found.step_seconds == pytest.approx(expected)
    assert found.trainers_busy == pytest.approx((COSTS.train + 0.1 * 960) / expected)
    slow_rollout = replace(COSTS, step=10.0)
    found = predict(fixed(costs=slow_rollout, slots=32), Placement(1, 1, colocated=False, staleness=1))
    assert found.step_seconds == pytest.approx(20 * 10.0, rel=0.02)
    assert found.engines_busy > 0.95


def test_the_gradients_and_weights_that_cross_take_their_time():
    costs = replace(COSTS, gradients=8e9, weights=3e9, bandwidth=1e9)
    assert costs.training(0, 4) == pytest.approx(COSTS.train + 2 * 8 * 3 / 4)
    assert costs.training(0, 1) == pytest.approx(COSTS.train)
    assert costs.syncing() == pytest.approx(COSTS.sync + 3)


def long_tailed() -> Measured:
    draw = random.Random(0)
    drawn = [Trajectory((Turn(10, 20, draw.lognormvariate(0, 1.5)), Turn(5, 10, 0.0)), 0.0) for _ in range(200)]
    return fixed(trajectories=drawn, prompts=16, n=4)


def test_stale_rollouts_hide_slow_tools():
    """More staleness is never much slower, and with a long tail of latencies it is much faster."""
    speeds = [recommend(long_tailed(), 4, staleness, steps=8).samples_per_second for staleness in (0, 1, 4)]
    assert speeds[2] > 1.8 * speeds[0]
    assert speeds[1] > speeds[0]


def test_the_recommended_placement_is_the_fastest_tried():
    measured = fixed(costs=replace(COSTS, token=0.01))
    best = recommend(measured, 8, staleness=1)
    others = [predict(measured, Placement(k, 8 - k, False, 1)).samples_per_second for k in range(1, 8)]
    assert best.samples_per_second == pytest.approx(max(others))
    assert best.placement.trains + best.placement.rolls_out == 8
    assert recommend(measured, 1, staleness=1) is None
    assert predict(measured, best.placement) == best  # the same seed draws the same trajectories


def test_misuse_is_refused():
    with pytest.raises(ValueError, match="at least 1 step"):
        predict(fixed(), Placement(1, 1, True), steps=0)
    with pytest.raises(ValueError, match="1 rank of each kind"):
        predict(fixed(), Placement(1, 0, False, 1))
    with pytest.raises(DataError, match="no tool was called"):
        with_tools(fixed(), 3.0)


def step_record(step: int, draw: random.Random, costs: Costs = COSTS) -> dict:
    steps, sampled, prefilled, tokens = (draw.randint(50, 500) for _ in range(4))
    engine = costs.step * steps + costs.row * sampled + costs.prefill * prefilled
    trained = costs.train + costs.token * tokens
    return {
        "step": step,
        "engine/steps": steps,
        "engine/sampled_tokens": sampled,
        "engine/prefilled_tokens": prefilled,
        "engine/seconds_decode": engine * 0.75,
        "engine/seconds_prefill": engine * 0.25,
        "perf/total_num_tokens": tokens,
        "timing_s/gen": engine + 1.0,
        "timing_s/old_log_prob": trained / 4,
        "timing_s/update_actor": 3 * trained / 4,
        "timing_s/update_weights": costs.sync,
        "timing_s/adv": costs.driver,
        "timing_s/step": engine + 1.0 + trained + costs.sync + costs.driver,
    }


def test_costs_are_found_again():
    draw = random.Random(1)
    found = fit_costs([step_record(step, draw) for step in range(20)])
    for name in ("step", "row", "prefill", "train", "token", "sync", "driver"):
        assert getattr(found, name) == pytest.approx(getattr(COSTS, name), abs=1e-9), name


def test_no_cost_is_negative():
    draw = random.Random(2)
    records = [step_record(step, draw) for step in range(20)]
    for record in records:  # faster the more it samples: nothing that these costs could be
        record["engine/seconds_decode"] = 10 - record["engine/sampled_tokens"] / 100
    found = fit_costs(records)
    assert min(found.step, found.row, found.prefill) >= 0


DUMPED = {
    "prompt_ids": [1, 2, 3],
    "segments": [
        {"token_ids": [4, 5], "provenance": "sampled", "turn": 0},
        {"token_ids": [6], "provenance": "template", "turn": 0},
        {"token_ids": [7, 8, 9], "provenance": "tool", "turn": 0},
        {"token_ids": [10], "provenance": "sampled", "turn": 1},
    ],
    "tool_calls": [{"turn": 0, "seconds": 0.5}, {"turn": 0, "seconds": 2.0}],
    "timings": {"compute_score": 0.125},
}


def write_run(folder, steps: int = 6):
    draw = random.Random(3)
    (folder / "rollouts").mkdir(parents=True)
    (folder / "metrics.jsonl").write_text("".join(json.dumps(step_record(i, draw)) + "\n" for i in range(1, steps + 1)))
    (folder / "config.yaml").write_text(
        "data: {train_batch_size: 4}\nactor_rollout_ref: {rollout: {n: 2, max_num_seqs: 16}}\n"
    )
    (folder / "rollouts" / "1.jsonl").write_text(json.dumps(DUMPED) + "\n")
    return folder


def test_a_run_is_read_from_its_folder(tmp_path):
    measured = measure(write_run(tmp_path / "run"))
    assert measured.trajectories == [Trajectory((Turn(3, 2, 2.0), Turn(4, 1, 0.0)), 0.125)]
    assert (measured.prompts, measured.n, measured.slots) == (4, 2, 16)
    assert with_tools(measured, 5.0).trajectories[0].turns[0].tools == 5.0


def test_a_folder_without_what_is_needed_is_named(tmp_path):
    run = write_run(tmp_path / "run", steps=2)
    with pytest.raises(DataError, match=r"metrics\.jsonl: 2 training steps; .* at least 3"):
        measure(run)
    run = write_run(tmp_path / "other")
    (run / "rollouts" / "1.jsonl").unlink()
    with pytest.raises(DataError, match=r"no rollouts in .*trainer\.rollout_data_dir="):
        measure(run)


def test_the_command_prints_a_row_for_each_number_of_ranks(tmp_path):
    run = write_run(tmp_path / "run")
    result = CliRunner().invoke(scale, [str(run), "--ranks", "1,4", "--staleness", "0,1", "--steps", "3"])
    assert result.exit_code == 0, result.output
    assert [line.split()[:2] for line in result.output.splitlines()[1:]] == [["1", "0"], ["4", "0"], ["4", "1"]]
    slow = CliRunner().invoke(
        scale, [str(run), "--ranks", "4", "--staleness", "0", "--slower", "10", "--tool-seconds", "60"]
    )
    fast = float(result.output.splitlines()[2].split()[-4])
    assert float(slow.output.splitlines()[1].split()[-4]) > 60 > fast
    bad = CliRunner().invoke(scale, [str(run), "--ranks", "0,x"])
    assert bad.exit_code == 2
    assert "whole numbers of at least 1, comma-separated, not '0,x'" in bad.output
