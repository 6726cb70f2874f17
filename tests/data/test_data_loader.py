"""The loader: an interruption anywhere changes nothing in what follows."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from etude.data import ResumableLoader
from etude.errors import ConfigError, DataError


class Numbers(list):
    """Rows that are told apart by their number."""

    def __init__(self, size):
        self.fingerprints = {"a.parquet": "1", "b.parquet": "2"}
        super().__init__({"n": number} for number in range(size))


def take(loader, count):
    """The next `count` batches, over as many epochs as that takes, each as row numbers."""
    taken = []
    while len(taken) < count:
        for batch in loader:
            taken.append([row["n"] for row in batch])
            if len(taken) == count:
                break
    return taken


SETTINGS = st.fixed_dictionaries(
    {"batch_size": st.integers(1, 5), "shuffle": st.booleans(), "seed": st.integers(0, 3), "drop_last": st.booleans()}
)


@given(size=st.integers(5, 12), settings=SETTINGS, before=st.integers(0, 12), after=st.integers(1, 12))
def test_resuming_anywhere_continues_exactly(size, settings, before, after):
    rows = Numbers(size)
    whole = take(ResumableLoader(rows, **settings), before + after)
    interrupted = ResumableLoader(rows, **settings)
    assert take(interrupted, before) == whole[:before]
    state = json.loads(json.dumps(interrupted.state_dict()))
    resumed = ResumableLoader(Numbers(size), **settings)
    resumed.load_state_dict(state)
    assert (resumed.epoch, resumed.position) == (interrupted.epoch, interrupted.position)
    assert take(resumed, after) == whole[before:]


@given(size=st.integers(5, 12), settings=SETTINGS, epoch=st.integers(0, 3))
def test_an_epoch_shows_every_row_once(size, settings, epoch):
    loader = ResumableLoader(Numbers(size), **settings)
    for _ in range(epoch):
        list(loader)
    batches = list(loader)
    seen = sorted(row["n"] for batch in batches for row in batch)
    assert len(batches) == len(loader)
    assert len(set(seen)) == len(seen)
    assert len(seen) == (size - size % settings["batch_size"] if settings["drop_last"] else size)
    assert (loader.epoch, loader.position) == (epoch + 1, 0)


def test_order_depends_on_seed_and_epoch():
    loader = ResumableLoader(Numbers(50), 10, seed=1)
    orders = [tuple(loader.order(0)), tuple(loader.order(1)), tuple(ResumableLoader(Numbers(50), 10, seed=2).order(0))]
    assert len(set(orders)) == 3
    assert tuple(ResumableLoader(Numbers(50), 5, seed=1).order(0)) == orders[0]
    assert list(ResumableLoader(Numbers(4), 2, shuffle=False).order(3)) == [0, 1, 2, 3]


@pytest.mark.parametrize(
    ("change", "key"),
    [
        ({"batch_size": 3}, r"data\.train_batch_size"),
        ({"seed": 9}, r"data\.seed"),
        ({"shuffle": False}, r"data\.shuffle"),
    ],
)
def test_a_changed_setting_names_its_key(change, key):
    settings = {"batch_size": 2, "shuffle": True, "seed": 1}
    state = ResumableLoader(Numbers(6), **settings).state_dict()
    with pytest.raises(ConfigError, match=rf"^{key} is .* but the checkpoint was made with"):
        ResumableLoader(Numbers(6), **(settings | change)).load_state_dict(state)


def test_a_changed_dataset_is_refused():
    state = ResumableLoader(Numbers(6), 2).state_dict()
    with pytest.raises(DataError, match=r"data\.train_files: the number of rows was 6 at the checkpoint and is 8 now"):
        ResumableLoader(Numbers(8), 2).load_state_dict(state)
    other = Numbers(6)
    other.fingerprints = {"a.parquet": "1", "moved/b.parquet": "3"}
    with pytest.raises(
        DataError, match=r"data\.train_files: rows .* changed since the checkpoint: moved/b\.parquet;"
    ) as no:
        ResumableLoader(other, 2).load_state_dict(state)
    assert no.value.fix.startswith("put the rows back, or set trainer.default_local_dir")
    other.fingerprints = {"a.parquet": "1"}
    with pytest.raises(DataError, match=r": b\.parquet;"):
        ResumableLoader(other, 2).load_state_dict(state)
    other.fingerprints = {"moved/a.parquet": "1", "moved/b.parquet": "2"}
    ResumableLoader(other, 2).load_state_dict(state)


def test_a_position_outside_the_epoch_is_refused():
    loader = ResumableLoader(Numbers(6), 2)
    with pytest.raises(DataError, match="stands at batch 3 of 3"):
        loader.load_state_dict(loader.state_dict() | {"position": 3})


@pytest.mark.parametrize("batch_size", [0, 7])
def test_a_batch_size_that_yields_nothing_is_refused(batch_size):
    with pytest.raises(ConfigError, match=r"data\.train_batch_size must be between 1 and 6"):
        ResumableLoader(Numbers(6), batch_size)


def test_a_negative_seed_is_refused():
    with pytest.raises(ConfigError, match=r"data\.seed"):
        ResumableLoader(Numbers(6), 2, seed=-1)


def test_without_drop_last_a_large_batch_holds_all_rows():
    assert [len(batch) for batch in ResumableLoader(Numbers(3), 8, drop_last=False)] == [3]
