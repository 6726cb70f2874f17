"""Runs killed at twenty random points, resumed, end as the one that was not; minutes long."""

import random

import pytest
from async_stage import ASYNC, kill_and_resume, plan, slow_tool, trained
from kills_stage import Whole

pytestmark = [pytest.mark.soak, pytest.mark.timeout(600)]


@pytest.fixture(scope="module")
def whole(tiny, tmp_path_factory):
    return Whole.run(tiny, tmp_path_factory.mktemp("whole"))


@pytest.mark.parametrize("number", range(20))
def test_a_run_killed_anywhere_and_resumed_ends_as_one_that_was_not(tiny, whole, tmp_path, number):
    """Every second one saves in the background."""
    whole.kill_and_resume(tiny, tmp_path, number, f"trainer.async_save={str(bool(number % 2)).lower()}")


@pytest.mark.parametrize("number", range(10))
def test_an_asynchronous_run_killed_anywhere_trains_on_every_prompt_once(tiny, tmp_path, number):
    """Twice each, with prompts in flight that take from milliseconds to seconds."""
    dice = random.Random(number)
    level, kills = dice.choice([1, 2, 4]), [dice.uniform(0.1, 3.0) for _ in range(2)]
    settings = (*ASYNC, f"trainer.max_staleness={level}", slow_tool(tmp_path / "tool", 0.1))
    run = kill_and_resume(tiny, tmp_path, kills, *settings)
    assert sorted(trained(run)) == plan(6)
