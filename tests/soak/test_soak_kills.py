"""Runs killed at twenty random points, resumed, end as the one that was not; minutes long."""

import pytest
from kills_stage import Whole

pytestmark = [pytest.mark.soak, pytest.mark.timeout(600)]


@pytest.fixture(scope="module")
def whole(tiny, tmp_path_factory):
    return Whole.run(tiny, tmp_path_factory.mktemp("whole"))


@pytest.mark.parametrize("number", range(20))
def test_a_run_killed_anywhere_and_resumed_ends_as_one_that_was_not(tiny, whole, tmp_path, number):
    """Every second one saves in the background."""
    whole.kill_and_resume(tiny, tmp_path, number, f"trainer.async_save={str(bool(number % 2)).lower()}")
