"""A rollout in which nothing progresses: what is logged of it, that each part is tried again once, and then dropped."""

import asyncio
import logging
import threading
import time

import pytest
from failure_stage import Native, World

from etude.trajectory import StopReason

SECONDS = 0.3


class Once:
    """Holds the first `count` that come to `point`, and lets the others pass."""

    def __init__(self, point, count):
        self.point, self.held, self.count = point, 0, count

    async def at(self, point):
        if point == self.point and self.held < self.count:
            self.held += 1
            await asyncio.sleep(3600)


def rolled_out(world, gate=None):
    if gate is not None:
        world.gate = world.tool.gate = world.user.gate = world.engine.gate = gate
    return asyncio.run(world.generate())


def reports(caplog):
    return [r.getMessage() for r in caplog.records if r.getMessage().startswith("nothing has progressed")]


WAITS = {
    "execute": "tool echo",
    "generate 0": "the engine",
    "generate 1": "the engine",
    "score": "the scorer",
    "generate_response": "its agent's own code",
}


@pytest.mark.parametrize("point", WAITS)
@pytest.mark.parametrize("retries", [0, 2])
def test_what_hangs_is_named_tried_again_once_and_dropped(point, retries, caplog):
    world = World(point, infrastructure_retries=retries, stall_timeout=SECONDS)
    with caplog.at_level(logging.WARNING):
        results = rolled_out(world)
    world.assert_nothing_is_left()
    assert [r.stalls for r in results] == [2, 2, 2]
    assert [r.dropped for r in results] == [StopReason.INFRASTRUCTURE] * 3
    assert all("trainer.stall_timeout" in r.cause for r in results)
    first, second = reports(caplog)
    for report in (first, second):
        assert f"trajectory {world.rows[0]['uid']}/0" in report
        assert f"waits for {WAITS[point]}, 2 more" in report


@pytest.mark.parametrize("point", ["execute", "generate 1", "score"])
def test_what_hung_once_is_whole_after_its_second_try(point, caplog):
    world = World(point, infrastructure_retries=0, stall_timeout=1.0)
    results = rolled_out(world, Once(point, 3))
    world.assert_nothing_is_left()
    assert [(r.dropped, r.stalls, r.trajectory.rewards.score) for r in results] == [(None, 1, 1.0)] * 3
    assert len(reports(caplog)) == 1


def test_one_that_moves_keeps_the_others_from_being_stalled(caplog):
    """Slow is not stalled: as long as some call of a tool ends, nobody is cancelled."""
    world = World("nowhere", rows=6, stall_timeout=1.2)
    late = iter(range(6))

    async def slowly(point):
        if point == "execute":
            await asyncio.sleep(0.5 * next(late))  # the last one waits for twice the time-out

    world.gate.at = slowly
    results = rolled_out(world)
    assert [r.stalls for r in results] == [0] * 6
    assert reports(caplog) == []


def test_what_holds_everything_up_on_purpose_is_no_stall(caplog):
    """Such as a hand-over of weights."""
    world, gate = World("nowhere", infrastructure_retries=0, stall_timeout=SECONDS), threading.Event()

    async def held(point):
        await asyncio.to_thread(gate.wait)

    world.gate.at = held

    async def run():
        rollouts = asyncio.ensure_future(world.generate())
        world.manager.paused = True
        await asyncio.sleep(4 * SECONDS)
        world.manager.paused = False
        gate.set()
        return await rollouts

    results = asyncio.run(run())
    assert [r.stalls for r in results] == [0, 0, 0]
    assert reports(caplog) == []


def test_a_step_of_the_engine_is_progress_and_a_hanging_one_is_not():
    """The native engine's own count: a long turn is no stall."""
    world = World(engine="native", stall_timeout=30.0)
    assert isinstance(world.engine, Native)
    before = world.manager.steps_done()
    results = rolled_out(world)
    assert world.manager.steps_done() > before
    assert [r.stalls for r in results] == [0, 0, 0]


def test_a_blocked_event_loop_is_logged_and_stalls_nobody(caplog):
    world = World("nowhere", stall_timeout=SECONDS)

    async def block(point):
        if point == "execute" and not world.scored:
            world.scored.append("blocked")
            time.sleep(4 * SECONDS)  # noqa: ASYNC251

    world.gate.at = block
    results = rolled_out(world)
    assert "the event loop did not answer" in caplog.text
    assert [r.stalls for r in results] == [0, 0, 0]
