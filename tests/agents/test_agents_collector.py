"""The collector is calmer inside, and as it was found after the last block."""

import gc

import pytest

from etude.agents.collector import calm_collector


@pytest.fixture(autouse=True)
def as_found():
    found = gc.get_threshold()
    yield
    gc.set_threshold(*found)
    gc.unfreeze()


def test_blocks_may_overlap_and_the_last_one_restores():
    found = gc.get_threshold()
    first, second = calm_collector(), calm_collector()
    first.__enter__()
    second.__enter__()
    assert gc.get_threshold() > found
    assert gc.get_freeze_count() > 0
    first.__exit__(None, None, None)
    assert gc.get_threshold() > found
    second.__exit__(None, None, None)
    assert gc.get_threshold() == found
    assert gc.get_freeze_count() == 0


def test_an_exception_restores_too():
    found = gc.get_threshold()
    with pytest.raises(ValueError, match="inside"), calm_collector():
        raise ValueError("inside")
    assert gc.get_threshold() == found


def test_garbage_in_cycles_is_still_collected_inside():
    with calm_collector():
        for _ in range(30_000):
            cycle: list[object] = []
            cycle.append(cycle)
        assert gc.get_count()[0] < 30_000


def test_a_program_that_arranged_its_collector_is_left_alone():
    gc.freeze()
    found = gc.get_threshold()
    with calm_collector():
        assert gc.get_threshold() == found
    assert gc.get_freeze_count() > 0
    gc.unfreeze()
    gc.disable()
    try:
        with calm_collector():
            assert gc.get_threshold() == found
    finally:
        gc.enable()
