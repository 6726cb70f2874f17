"""The collector is calmer inside, and as it was found after the last block."""

import gc
import subprocess
import sys
import weakref

import pytest

from etude.agents import gc_tuning
from etude.agents.gc_tuning import relaxed_gc


@pytest.fixture(autouse=True)
def as_found():
    found = gc.get_threshold()
    yield
    gc.set_threshold(*found)
    gc.unfreeze()


def test_blocks_may_overlap_and_the_last_one_restores():
    found = gc.get_threshold()
    first, second = relaxed_gc(), relaxed_gc()
    first.__enter__()
    second.__enter__()
    assert gc.get_threshold() > found
    assert gc.get_freeze_count() > 0
    first.__exit__(None, None, None)
    assert gc.get_threshold() > found
    second.__exit__(None, None, None)
    assert gc.get_threshold() == found
    assert gc.get_freeze_count() == 0


def test_a_fresh_interpreter_is_calmed():
    """Also one that freezes objects of its own when it starts, as Python 3.12 does."""
    program = (
        "import gc\n"
        "from etude.agents.gc_tuning import relaxed_gc\n"
        "found = gc.get_threshold()\n"
        "with relaxed_gc():\n"
        "    print(gc.get_threshold() > found)"
    )
    assert subprocess.run([sys.executable, "-c", program], capture_output=True, text=True).stdout == "True\n"


def test_an_exception_restores_too():
    found = gc.get_threshold()
    with pytest.raises(ValueError, match="inside"), relaxed_gc():
        raise ValueError("inside")
    assert gc.get_threshold() == found


class Ring:
    """An object that only the collector can free."""

    def __init__(self) -> None:
        self.own = self


def test_garbage_in_cycles_is_still_collected_inside():
    with relaxed_gc():
        first = weakref.ref(Ring())
        assert first() is not None
        rings = gc.get_threshold()[0] + 50_000
        for _ in range(rings):
            Ring()
        assert first() is None
    assert gc.get_count()[0] < rings


def test_what_a_rollout_made_is_not_looked_at_when_it_ends():
    passes = []

    def note(phase, info):
        passes.append(info["generation"])

    try:
        with relaxed_gc():
            kept = [[n] for n in range(5_000)]
            gc.callbacks.append(note)
        young = gc.get_count()[0]
    finally:
        gc.callbacks.remove(note)
    assert passes == []
    assert young < len(kept)


def test_objects_that_passes_inside_a_rollout_have_seen_are_counted_too(monkeypatch):
    monkeypatch.setattr(gc_tuning, "_THRESHOLDS", (1_000, 20, 20))
    monkeypatch.setattr(gc_tuning, "_unseen", 0)
    with relaxed_gc():
        kept = [[n] for n in range(5_010)]
    assert 4_000 < gc_tuning._unseen < 10_000
    assert len(kept) == 5_010


def test_garbage_that_rollouts_left_is_collected_before_a_later_one(monkeypatch):
    monkeypatch.setattr(gc_tuning, "_UNSEEN", 1_000)
    monkeypatch.setattr(gc_tuning, "_unseen", 0)
    with relaxed_gc():
        left = weakref.ref(Ring())
        kept = [[n] for n in range(2_000)]
    assert left() is not None
    with relaxed_gc():
        assert left() is None
        assert len(kept) == 2_000


def test_a_program_that_arranged_its_collector_is_left_alone():
    gc.freeze()
    found = gc.get_threshold()
    with relaxed_gc():
        assert gc.get_threshold() == found
    assert gc.get_freeze_count() > 0
    gc.unfreeze()
    gc.disable()
    try:
        with relaxed_gc():
            assert gc.get_threshold() == found
    finally:
        gc.enable()
