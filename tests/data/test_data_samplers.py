"""Samplers: what they draw, and that a resumed one draws what an uninterrupted one would have."""

import json
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from etude.data import SAMPLERS, DataOptions, ResumableLoader, Sampler, open_sampler
from etude.data.samplers import ROW_COLUMN, row_success
from etude.errors import ConfigError
from etude.options.data import SamplerOptions
from etude.protocol import DataProto
from etude.trajectory import Rewards, Rollout, Trajectory

SIZES = {"big": 12, "small": 3}


class Rows(list):
    """A dataset of several sources, by their sizes."""

    def __init__(self, sizes=SIZES):
        self.fingerprints = {"rows": "1"}
        self.sources = [source for source, size in sizes.items() for _ in range(size)]
        super().__init__({"n": number} for number in range(len(self.sources)))


def scored(batch, score, info=None):
    """What a step makes of the rows: two rollouts of each, whose scores are `score(row)` and 0."""
    rows = [row[ROW_COLUMN] for row in batch for _ in range(2)]
    scores = torch.zeros(len(rows), 3)
    scores[::2, 1] = torch.tensor([score(row) for row in rows[::2]])
    rollouts = [Rollout([Trajectory("r", [1], rewards=Rewards(score_info=info or {}))]) for _ in rows]
    columns = {"token_level_scores": scores, ROW_COLUMN: np.array(rows, dtype=object), "rollout": rollouts}
    return DataProto.from_single_dict(columns)


def open_loader(seed=3, path=None, **sampler):
    options = DataOptions(seed=seed, sampler=SamplerOptions(class_path=path, **sampler))
    rows = Rows()
    return ResumableLoader(rows, 4, sampler=open_sampler(options, rows))


def play(loader, count):
    """`count` steps, each of which updates the sampler; returns the rows of each batch."""
    taken = []
    for _, batch in zip(range(count), loader.cycle()):
        taken.append([row["n"] for row in batch])
        loader.update(scored(batch, lambda row: row % 3 / 2))
    return taken


OWN = """
from etude.data import Sampler, row_success


class Best(Sampler):
    '''The rows with the best scores so far, in turn with row 0.'''

    def __init__(self, data_source, data_config):
        super().__init__(data_source, data_config)
        self.scores = {}

    def draw(self, count):
        best = sorted(self.scores, key=lambda row: (-self.scores[row], row))
        return (best + [row for row in range(len(self.data_source)) if row not in self.scores])[:count]

    def update(self, batch):
        self.scores.update(row_success(batch))

    def state_dict(self):
        return {"scores": list(self.scores.items())}

    def load_state_dict(self, state):
        self.scores = dict(state["scores"])


class Backwards:
    '''As verl's: iterated.'''

    def __init__(self, data_source, data_config):
        self.rows, self.seed = len(data_source), data_config.get("seed")

    def __len__(self):
        return self.rows

    def __iter__(self):
        return iter(range(self.rows - 1, -1, -1))


class Broken(Sampler):
    def draw(self, count):
        return [99] * count


class Failing(Sampler):
    def __init__(self, data_source, data_config):
        raise KeyError("difficulty")


class Nothing:
    def __init__(self, data_source, data_config):
        pass
"""


@pytest.fixture(scope="module")
def own(tmp_path_factory):
    path = tmp_path_factory.mktemp("sampler") / "mine.py"
    path.write_text(OWN)
    return str(path)


CASES = ["curriculum", "mixture", "Best", "Backwards"]


@pytest.mark.parametrize("name", CASES)
@settings(deadline=None, max_examples=15)
@given(before=st.integers(0, 9), after=st.integers(1, 9))
def test_resuming_anywhere_continues_exactly(own, name, before, after):
    where = {"class_name": name, "path": own if name in ("Best", "Backwards") else None}
    whole = play(open_loader(**where), before + after)
    interrupted = open_loader(**where)
    assert play(interrupted, before) == whole[:before]
    resumed = open_loader(**where)
    resumed.load_state_dict(json.loads(json.dumps(interrupted.state_dict())))
    assert play(resumed, after) == whole[before:]


def test_a_step_without_rollouts_teaches_a_sampler_nothing():
    """On Ray such a batch has no columns."""
    loader = open_loader(class_name="curriculum")
    loader.update(DataProto())
    assert loader.sampler.state_dict()["rates"] == {}


def test_without_a_sampler_rows_say_no_number():
    assert open_loader().sampler is None
    assert ROW_COLUMN not in next(iter(open_loader()))[0]


def test_a_curriculum_draws_what_is_left_to_learn():
    loader = open_loader(class_name="curriculum", floor=0.05)
    drawn = Counter()
    for _, batch in zip(range(600), loader.cycle()):
        assert len({row["n"] for row in batch}) == 4
        drawn.update(row["n"] for row in batch)
        # of the two rollouts of a row, both fail (rate 0), one succeeds (1/2): only the latter teach
        loader.update(scored(batch, lambda row: float(row in (2, 5, 7))))
    taught, others = [drawn[row] for row in (2, 5, 7)], [drawn[row] for row in range(15) if row not in (2, 5, 7)]
    assert min(taught) > 500  # of 600 batches
    assert max(others) < 120
    assert min(others) > 10  # they come again


def test_a_curriculum_does_not_prefer_rows_that_only_fail():
    """Of rows whose rollouts are all dropped it never hears: they kept the weight of a new row, the highest."""
    loader, drawn = open_loader(class_name="curriculum"), Counter()
    for _, batch in zip(range(200), loader.cycle()):
        drawn.update(row["n"] for row in batch)
        loader.update(scored([row for row in batch if row["n"] >= 3], float))
    failing, others = [drawn[row] for row in range(3)], [drawn[row] for row in range(3, 15)]
    assert max(failing) < min(others)
    assert min(failing) > 0  # the service may be back


def test_the_rate_is_a_moving_average():
    loader = open_loader(class_name="curriculum")
    for score in (1.0, 0.0):  # rates 1/2 and 0
        loader.update(scored([{ROW_COLUMN: 4}], lambda row, score=score: score))
    assert loader.sampler.state_dict()["rates"] == {"4": 0.25}
    assert loader.sampler._weights()[4] == pytest.approx(4 * 0.25 * 0.75)


def test_success_is_the_scorers_acc_or_else_a_reward_of_one():
    """It was the reward: wrong answers that were paid for their form counted as right."""
    rows, rewards = [{ROW_COLUMN: 1}, {ROW_COLUMN: 2}, {ROW_COLUMN: 3}], {1: -1.0, 2: 0.5, 3: 9.0}
    assert row_success(scored(rows, rewards.get)) == {1: 0.0, 2: 0.0, 3: 0.5}
    assert row_success(scored(rows, rewards.get, {"acc": 0.0})) == {1: 0.0, 2: 0.0, 3: 0.0}
    assert row_success(scored(rows, rewards.get, {"acc": True})) == {1: 1.0, 2: 1.0, 3: 1.0}


def open_mixture(weights):
    rows = Rows({source: 1 + 7 * number for number, source in enumerate(weights)})
    return rows.sources, open_sampler(DataOptions(sampler=SamplerOptions(class_name="mixture", weights=weights)), rows)


LIKE = [30, 2, 6, 30, 2, 6, 30, 2]  # several are due at once


@settings(deadline=None, max_examples=30)
@given(weights=st.lists(st.floats(0.05, 5), min_size=1, max_size=12), rows=st.integers(1, 300))
@example(weights=LIKE, rows=150)
def test_a_mixture_keeps_every_share_to_within_a_row_at_any_time(weights, rows):
    sources, sampler = open_mixture({str(number): weight for number, weight in enumerate(weights)})
    counts = Counter()
    for total, row in enumerate(sampler.draw(rows), 1):
        counts[sources[row]] += 1
        for number, weight in enumerate(weights):
            assert abs(counts[str(number)] - weight / sum(weights) * total) < 1 + 1e-9


def test_the_shares_of_a_long_draw_are_the_weights():
    """Whatever the sizes of the sources: 100,000 rows in batches, as a run takes them."""
    weights = {"openai/gsm8k": 3, "math_dapo": 1, "rare": 0.01, "not": 0}
    sources, sampler = open_mixture(weights)
    counts = Counter(sources[row] for _ in range(1000) for row in sampler.draw(100))
    assert counts == {"openai/gsm8k": 74_813, "math_dapo": 24_938, "rare": 249}
    assert all(abs(counts[source] / 100_000 - weight / 4.01) < 1e-5 for source, weight in weights.items())


def test_a_mixture_goes_through_each_source():
    loader = open_loader(class_name="mixture", weights={"small": 3})  # big: 1
    drawn = [number for batch in play(loader, 12) for number in batch]
    small, big = ([n for n in drawn if (n >= 12) == which] for which in (True, False))
    assert sorted(big) == list(range(12))
    assert all(sorted(small[start : start + 3]) == [12, 13, 14] for start in range(0, 36, 3))
    assert len({tuple(small[start : start + 3]) for start in range(0, 36, 3)}) > 1  # in new orders
    assert [
        n for batch in play(open_loader(seed=4, class_name="mixture", weights={"small": 3}), 12) for n in batch
    ] != drawn


def test_a_weight_of_zero_leaves_a_source_out():
    loader = open_loader(class_name="mixture", weights={"big": 0})
    assert {number for batch in play(loader, 6) for number in batch} == {12, 13, 14}


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"class_name": "mixtur"}, "unknown sampler 'mixtur'.*mixture"),
        ({"class_name": "mixture", "weights": {"bigg": 1}}, "names bigg; the rows are of big, small"),
        ({"class_name": "mixture", "weights": {"big": -1}}, "must not be negative"),
        ({"class_name": "mixture", "weights": {"big": 0, "small": 0}}, "one must be positive"),
        ({"class_name": "Missing", "path": "own"}, "has no 'Missing'"),
        ({"class_name": "Failing", "path": "own"}, "class_name=Failing: KeyError: 'difficulty' .*mine.py"),
        ({"class_name": "Nothing", "path": "own"}, "neither a Sampler nor an iterable"),
    ],
)
def test_a_wrong_sampler_is_named(own, given, said):
    if "path" in given:
        given = {**given, "path": own}
    with pytest.raises(ConfigError, match=said):
        open_loader(**given)


def test_a_sampler_that_draws_nonsense_is_named(own):
    with pytest.raises(ConfigError, match="Broken drew"):
        play(open_loader(class_name="Broken", path=own), 1)


def test_a_custom_class_needs_a_name():
    with pytest.raises(ConfigError, match="name is missing"):
        replace(DataOptions().custom_cls, path="mine.py")


def test_the_base_class_draws_nothing():
    with pytest.raises(NotImplementedError):
        Sampler(Rows(), None).draw(1)


def test_a_plugin_registers_a_sampler(monkeypatch):
    monkeypatch.setattr(SAMPLERS, "_items", dict(SAMPLERS._items))

    @SAMPLERS.register("first")
    class First(Sampler):
        def draw(self, count):
            return range(count)

    assert play(open_loader(class_name="first"), 2) == [[0, 1, 2, 3]] * 2
