"""Which prompts are in flight and which groups a step takes, over simulated runs of any latencies."""

import json
import math
import random
from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st

from etude.data import ResumableLoader
from etude.trainer.rollout_source import PromptQueue
from etude.trainer.staleness import Window


@dataclass(eq=False)
class Group:
    number: int
    duration: float
    version: int
    ends: float
    deadline: int = 0
    place: tuple = ()
    clock: list = None

    @property
    def finished(self):
        return self.ends <= self.clock[0]


def simulate(batch_size, max_staleness, durations, training):
    """A run of as many steps as there are whole batches of `durations`, those of its groups; step n learns for
    `training[n]`. What each step took, the most that were in flight, and how long it waited."""
    window, clock, steps = Window(batch_size, max_staleness), [0.0], len(durations) // batch_size
    taken, most, waited, begun = [], 0, 0.0, 0
    for version in range(steps):
        for _ in range(window.room(version, steps)):
            group = Group(begun, durations[begun], version, clock[0] + durations[begun], clock=clock)
            window.admit(group, version)
            begun += 1
        most = max(most, len(window.groups))
        while (chosen := window.choose(version + 1)) is None:
            unfinished = [group.ends for group in window.groups if not group.finished]
            assert unfinished, "it waits for nothing"
            waited += min(unfinished) - clock[0]
            clock[0] = min(unfinished)
        taken.append(chosen)
        clock[0] += training[version % len(training)]
    assert not window.groups
    return taken, most, waited


def ages(taken):
    return [step - group.version for step, groups in enumerate(taken) for group in groups]


latencies = st.floats(0.01, 100.0, allow_nan=False)


@given(
    st.integers(1, 4), st.integers(0, 6), st.lists(latencies, min_size=4, max_size=80), st.lists(latencies, min_size=1)
)
def test_every_prompt_is_taken_once_and_none_too_late(batch_size, max_staleness, durations, training):
    durations = durations[: len(durations) // batch_size * batch_size]
    taken, most, _ = simulate(batch_size, max_staleness, durations, training)
    assert all(len(groups) == batch_size for groups in taken)
    assert sorted(group.number for groups in taken for group in groups) == list(range(len(durations)))
    assert max(ages(taken)) <= max_staleness
    assert most <= (1 + math.ceil(max_staleness / 2)) * batch_size  # the other half lets fast groups overtake slow ones


@given(st.lists(latencies, min_size=4, max_size=40))
def test_without_staleness_a_step_takes_the_batch_that_was_planned(durations):
    durations = durations[: len(durations) // 2 * 2]
    taken, most, _ = simulate(2, 0, durations, [1.0])
    assert [sorted(group.number for group in groups) for groups in taken] == [
        [2 * step, 2 * step + 1] for step in range(len(taken))
    ]
    assert most <= 2


def test_a_slow_group_is_overtaken_and_then_waited_for():
    durations = [1.0] * 4 + [1000.0] + [1.0] * 35
    taken, _, _ = simulate(4, 4, durations, [1.0])
    at = next(step for step, groups in enumerate(taken) if any(group.number == 4 for group in groups))
    assert taken[at][0].number == 4
    assert at - taken[at][0].version == 4  # the last step that may train it
    assert [min(group.number for group in groups) > 4 for groups in taken[1:at]] == [True] * (at - 1)


@pytest.mark.parametrize("max_staleness", [1, 4])
def test_latency_is_hidden(max_staleness):
    """Of latencies that differ, a run waits a fraction of what a synchronous one does."""
    durations = [random.Random(n).lognormvariate(0.0, 1.0) for n in range(400)]
    wait = {level: simulate(8, level, durations, [0.1])[2] for level in (0, max_staleness)}
    assert wait[max_staleness] < wait[0] * (0.7 if max_staleness == 1 else 0.4)


def test_a_group_too_late_to_be_saved_by_waiting_is_no_deadlock():
    """Where steps took fewer than a batch, for want of groups with spread, more are due than there are places."""
    window, clock = Window(1, 1), [0.0]
    for number in range(3):
        window.admit(Group(number, 1.0, 0, float(number), clock=clock), version=0)
    clock[0] = 2.0
    assert [window.choose(step)[0].number for step in (3, 4, 5)] == [0, 1, 2]


# -- kills ------------------------------------------------------------------------------------------------------------


class Numbers:
    def __len__(self):
        return 12

    def __getitem__(self, number):
        return {"index": number}


@given(
    st.integers(1, 4),
    st.integers(0, 4),
    st.lists(latencies, min_size=24, max_size=24),
    st.lists(st.integers(1, 5), max_size=4),
    st.integers(1, 3),
)
def test_a_plan_that_is_killed_again_and_again_is_trained_on_once(batch_size, level, durations, kills, save_freq):
    """The run dies some steps after it began or went on, wherever its groups are then, and goes on from its last
    checkpoint: what it had trained since is trained again, and nothing else twice or never."""
    epochs, trained, saved, step = 2, [], None, 0
    kills = [*kills, None]
    for lives in kills:
        loader = ResumableLoader(Numbers(), batch_size)
        prompts, window, clock = PromptQueue(loader, epochs), Window(batch_size, level), [0.0]
        total, step = epochs * len(loader), 0
        if saved is not None:
            loader.load_state_dict(saved["loader"])
            prompts.restore(saved)
            step = saved["step"]
        trained, alive = trained[:step], 0
        while step < total and (lives is None or alive < lives):
            for place in prompts.take(window.room(step, total)):
                group = Group(place[0], durations[(place[0] + place[1]) % 24], step, 0.0, clock=clock)
                group.ends, group.place = clock[0] + group.duration, place
                window.admit(group, step)
            while (chosen := window.choose(step + 1)) is None:
                clock[0] = min(group.ends for group in window.groups if not group.finished)
            step, alive = step + 1, alive + 1
            trained.append([group.place[:2] for group in chosen])
            clock[0] += 0.5
            if step % save_freq == 0:
                state = prompts.state_dict(group.place for group in window.groups)
                saved = json.loads(json.dumps(state | {"step": step}))
    planned = [(number, place) for number in range(1, total + 1) for place in range(batch_size)]
    assert sorted(place for groups in trained for place in groups) == planned


@pytest.mark.parametrize("given", [[[0, 0]], [[1, 9]], [[5, 0]], [["a", 0]], [[1]]])
def test_a_checkpoint_that_names_no_row_of_the_plan_is_refused(given):
    loader = ResumableLoader(Numbers(), 4)
    next(loader.cycle())
    with pytest.raises((ValueError, TypeError)):
        PromptQueue(loader, None).restore({"untrained": given})


def test_rows_with_a_column_named_as_that_of_samplers_are_the_same_again():
    rows = [{"index": number, "dataset_row": 3 - number} for number in range(4)]
    prompts = PromptQueue(ResumableLoader(rows, 4, shuffle=False), 1)
    taken = prompts.take(4)
    state = prompts.state_dict(taken[1:])
    loader = ResumableLoader(rows, 4, shuffle=False)
    loader.load_state_dict(state["loader"])
    resumed = PromptQueue(loader, 1)
    resumed.restore(state)
    assert resumed.take(4) == taken[1:]
