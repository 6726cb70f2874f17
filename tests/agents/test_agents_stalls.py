"""A rollout in which nothing progresses: what the watch says of it, that each part is tried again once, and then dropped."""

import asyncio
import logging
import threading
import time

import pytest
from failure_stage import Native, World

from etude.agents.stalls import StallWatch
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


def watched(world, gate=None, seconds=SECONDS):
    """The rollouts of `world` under a watch."""
    if gate is not None:
        world.gate = world.tool.gate = world.user.gate = world.engine.gate = gate

    async def run():
        watch = StallWatch(world.manager, asyncio.get_running_loop(), seconds)
        try:
            return await world.generate()
        finally:
            await asyncio.to_thread(watch.close)

    return asyncio.run(run())


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
    world = World(point, infrastructure_retries=retries)
    with caplog.at_level(logging.WARNING):
        results = watched(world)
    world.assert_nothing_is_left()
    assert [r.stalls for r in results] == [2, 2, 2]
    assert [r.dropped for r in results] == [StopReason.INFRASTRUCTURE] * 3
    assert all("nothing had progressed for 0.3 s (trainer.stall_timeout)" in r.cause for r in results)
    first, second = reports(caplog)
    assert f"for {WAITS[point]}, 2 more" in first
    assert "trajectory u" in first
    attempt = 0 if point == "score" else 1
    assert f"/{attempt} has waited" in second


@pytest.mark.parametrize("point", ["execute", "generate 1", "score"])
def test_what_hung_once_is_whole_after_its_second_try(point, caplog):
    world = World(point, infrastructure_retries=0)
    results = watched(world, Once(point, 3), seconds=1.0)
    world.assert_nothing_is_left()
    assert [(r.dropped, r.stalls, r.trajectory.rewards.score) for r in results] == [(None, 1, 1.0)] * 3
    assert len(reports(caplog)) == 1


def test_one_that_moves_keeps_the_others_from_being_stalled(caplog):
    """Slow is not stalled: as long as some tool answers, nobody is cancelled."""
    world, moves = World("nowhere"), threading.Event()

    async def slowly(point):
        if point == "execute":
            for _ in range(4):
                await asyncio.sleep(0.4)
                world.manager.progress = (0, world.manager.progress[1] + 1)  # as if other trajectories came and went
            moves.set()

    world.gate.at = slowly
    results = watched(world, seconds=1.2)
    assert moves.is_set()
    assert [r.stalls for r in results] == [0, 0, 0]
    assert reports(caplog) == []


def test_what_holds_everything_up_on_purpose_is_no_stall(caplog):
    """Such as a hand-over of weights."""
    world, gate = World("nowhere", infrastructure_retries=0), threading.Event()

    async def held(point):
        await asyncio.to_thread(gate.wait)

    world.gate.at = held

    async def run():
        watch = StallWatch(world.manager, asyncio.get_running_loop(), SECONDS)
        rollouts = asyncio.ensure_future(world.generate())
        with watch.suspended():
            await asyncio.sleep(4 * SECONDS)
        gate.set()
        try:
            return await rollouts
        finally:
            await asyncio.to_thread(watch.close)

    results = asyncio.run(run())
    assert [r.stalls for r in results] == [0, 0, 0]
    assert reports(caplog) == []


def test_a_step_of_the_engine_is_progress_and_a_hanging_one_is_not(caplog):
    """The native engine's own count: a long turn is no stall."""
    world = World(engine="native")
    assert isinstance(world.engine, Native)
    before = world.manager.steps_done()
    results = watched(world, seconds=30.0)
    assert world.manager.steps_done() > before
    assert [r.stalls for r in results] == [0, 0, 0]


def test_a_blocked_event_loop_is_said_to_be_one(caplog):
    world = World("nowhere")

    async def block(point):
        if point == "execute" and not world.scored:
            world.scored.append("blocked")
            time.sleep(4 * SECONDS)  # noqa: ASYNC251

    world.gate.at = block
    watched(world)
    assert any("the event loop does not answer" in report for report in reports(caplog))
