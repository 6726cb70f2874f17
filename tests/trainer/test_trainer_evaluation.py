"""An evaluation's figures: by prompt, by data source, and with intervals that cover."""

import numpy as np
import pytest

from etude.agents import Rollout
from etude.protocol import DataProto
from etude.trainer.metrics import prompt_mean, wilson_interval
from etude.trainer.run import evaluation_metrics
from etude.trajectory import ToolCallRecord, Trajectory
from etude.workers import RewardOptions


def sample(score, *, tool=False):
    trajectory = Trajectory("r", [1])
    trajectory.rewards.score = score
    if tool:
        trajectory.tool_calls.append(ToolCallRecord(turn=0, name="t", arguments="{}", response="", reward=0, seconds=0))
    return trajectory


def batch(rows):
    """Of (source, prompt, trajectory or None)."""
    columns = {"data_source": [], "uid": [], "rollout": []}
    for source, uid, trajectory in rows:
        columns["data_source"].append(source)
        columns["uid"].append(uid)
        columns["rollout"].append(Rollout([trajectory]))
    arrays = {}
    for name, values in columns.items():
        arrays[name] = np.empty(len(values), dtype=object)
        arrays[name][:] = values
    return DataProto.from_dict(non_tensors=arrays)


def test_each_prompt_counts_once_and_each_source_has_its_figures():
    rows = [("easy", "e1", sample(1.0, tool=True))] * 3 + [("easy", "e2", sample(0.0)), ("hard", "h1", None)]
    rows += [("hard", "h2", sample(0.0)), ("gone", "g1", None)]
    figures = evaluation_metrics(batch(rows), RewardOptions())
    easy, hard, gone = (figures["sources"][name] for name in ("easy", "hard", "gone"))
    assert (
        easy["success"] == easy["tool_use"] == easy["reward"] == 0.5
    )  # three samples of four are right, one prompt of two
    assert (easy["success_low"], easy["success_high"]) == wilson_interval(1, 2)
    assert (easy["prompts"], easy["samples"], easy["dropped"]) == (2, 4, 0)
    assert (hard["prompts"], hard["samples"], hard["dropped"], hard["success"]) == (1, 1, 1, 0.0)
    assert gone == {"prompts": 0, "samples": 0, "dropped": 1}
    assert figures["success"] == pytest.approx(1 / 3)
    assert (figures["prompts"], figures["samples"], figures["dropped"]) == (3, 5, 2)


@pytest.mark.parametrize("n", [1, 4, 16])
@pytest.mark.parametrize("alike", [0.0, 0.5, 1.0])
def test_the_interval_covers_however_alike_the_samples_of_a_prompt_are(n, alike):
    """`alike`: the share of prompts all of whose samples end equally."""
    generator = np.random.default_rng(7)
    covered, trials, p = 0, 600, 0.4
    for _ in range(trials):
        one = (generator.random((60, 1)) < p).repeat(n, axis=1)
        own = generator.random((60, n)) < p
        values = np.where(generator.random((60, 1)) < alike, one, own).astype(float)
        _, low, high = prompt_mean(values.tolist())
        covered += low <= p <= high
    assert covered / trials >= 0.93
