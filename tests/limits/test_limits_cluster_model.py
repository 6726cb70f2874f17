"""The ledger and its holders, over a network that delays, loses and repeats, through pauses, deaths and restarts."""

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st
from limits_stage import LEASE, World

from etude.limits.holder import IDLE_SECONDS, Holder
from etude.limits.ledger import MAX_BATCH, Ledger
from etude.limits.limit import Limit
from etude.limits.messages import Grant, Refused, Reply, Turn

HEALTHY = ("enter",) * 6 + ("release",) * 4 + ("cancel", "cancel", "unused")
FRAIL = (*HEALTHY, "pause", "pause", "resume", "resume", "kill")
LOSSY = (*FRAIL, "restart")
PAUSES = (0.0, 0.0, 0.002, 0.01, 0.05, 0.4, LEASE * 1.2)

limits = st.one_of(
    st.builds(Limit, max_concurrent=st.integers(1, 6)),
    st.builds(Limit, max_concurrent=st.integers(1, 3), per_second=st.floats(1, 50), burst=st.integers(1, 4)),
)


def schedules(names):
    return st.lists(
        st.tuples(st.sampled_from(names), st.integers(0, 5), st.sampled_from(PAUSES)), min_size=10, max_size=80
    )


def random_schedule(names, seed):
    chance = random.Random(seed)
    return [(chance.choice(names), chance.randrange(6), chance.choice(PAUSES)) for _ in range(300)]


def act(world, schedule):
    for what, number, pause in schedule:
        process = world.processes[number % len(world.processes)]
        well = process.alive and not process.paused
        if what == "enter" and well:
            process.enter()
        elif what in ("release", "unused") and well and process.in_use:
            process.release(sorted(process.in_use)[number % len(process.in_use)], what == "unused")
        elif what == "cancel" and well and process.entered:
            process.cancel(process.entered[number % len(process.entered)])
        elif what == "pause" and process.alive:
            process.paused = True
        elif what == "resume" and process.paused:
            process.resume()
        elif what == "kill" and sum(p.alive for p in world.processes) > 1:
            process.alive = False
        elif what == "restart":
            world.restart_keeper()
        world.run(pause)


def drain(world):
    """Everyone releases what they have; all who wait must be served, and every permit must come home."""
    for process in world.processes:
        if process.alive and process.paused:
            process.resume()
    left = [process for process in world.processes if process.alive]
    for _ in range(4000):
        for process in left:
            for ticket in list(process.in_use):
                process.release(ticket)
        if not any(process.entered or process.in_use for process in left):
            break
        world.run(0.02)
    assert not any(process.entered for process in left), "a waiter was never served"
    world.run(3 * LEASE + 2 * IDLE_SECONDS)
    assert world.ledger.held == world.ledger.waiting == 0
    assert all(process.holder.held == process.holder.idle == process.holder.waiting == 0 for process in left)


@given(limits, st.integers(1, 4), st.integers(0, 99), schedules(HEALTHY))
def test_in_good_health_nothing_is_exceeded_nothing_lies_idle_and_nobody_is_forgotten(limit, n, seed, schedule):
    world = World(limit, n, seed)
    act(world, schedule)
    drain(world)


@given(limits, st.integers(2, 4), st.integers(0, 99), schedules(FRAIL))
def test_through_pauses_and_deaths(limit, n, seed, schedule):
    world = World(limit, n, seed)
    act(world, schedule)
    drain(world)


@given(limits, st.integers(2, 4), st.integers(0, 99), schedules(LOSSY))
def test_through_lost_messages_and_a_keeper_that_forgets(limit, n, seed, schedule):
    world = World(limit, n, seed, loss=0.2)
    act(world, schedule)
    drain(world)


@pytest.mark.parametrize("seed", range(40))
def test_through_long_histories(seed):
    """The same promises, deeper into states than Hypothesis looks."""
    loss = (0.0, 0.2)[seed % 2]
    limit = Limit(max_concurrent=1 + seed % 4, per_second=(None, None, 20.0)[seed % 3])
    world = World(limit, 2 + seed % 3, seed, loss=loss)
    act(world, random_schedule(LOSSY if loss else FRAIL, seed))
    drain(world)


LIMIT = Limit(max_concurrent=1)


def told(reply):
    return [(type(event).__name__, *list(vars(event).values())[1:]) for event in reply.events]


def leases(reply):
    return [event.lease for event in reply.events if isinstance(event, Grant)]


def test_requests_are_granted_in_the_order_in_which_they_arrive():
    ledger = Ledger(LIMIT, LEASE, "k", 0.0)
    ledger.turn(Turn("a", 1, 0, requests=(1, 2)), 0.0)
    ledger.turn(Turn("b", 1, 0, requests=(1,)), 0.0)
    ledger.turn(Turn("a", 2, 0, requests=(3,)), 0.0)
    order = []
    turn = {"a": 2, "b": 1}
    for _ in range(4):
        for name in ("a", "b"):
            for lease in leases(ledger.unheard(name)):
                if lease in ledger._owners[name].leases:
                    order.append(name)
                    turn[name] += 1
                    ledger.turn(Turn(name, turn[name], 0, releases=((lease, False),)), 0.0)
                    break
    assert order == ["a", "a", "b", "a"]


def test_a_turn_that_arrives_twice_counts_once():
    ledger = Ledger(Limit(max_concurrent=4, per_second=1, burst=2), LEASE, "k", 0.0)
    first = Turn("a", 1, 0, requests=(1,))
    assert ledger.turn(first, 0.0) == ledger.turn(first, 0.0)
    assert (ledger.held, ledger.waiting) == (1, 0)
    back = Turn("a", 2, 1, requests=(2,), releases=((f"{ledger.keeper}-1", True),))
    assert ledger.turn(back, 0.0) == ledger.turn(back, 0.0)
    assert (ledger.held, ledger.waiting) == (1, 0)
    assert ledger.turn(Turn("a", 3, 2, requests=(3, 4)), 0.0).events[0].request == 3
    assert ledger.waiting == 1, "the token that was put back came back once"


def test_batches_are_for_when_nobody_waits():
    ledger = Ledger(Limit(max_concurrent=400), LEASE, "k", 0.0)
    assert len(leases(ledger.turn(Turn("a", 1, 0, requests=(1,)), 0.0))) == 1 + MAX_BATCH
    small = Ledger(Limit(max_concurrent=5), LEASE, "k", 0.0)
    assert len(leases(small.turn(Turn("a", 1, 0, requests=(1,)), 0.0))) == 1 + 2
    assert len(leases(small.turn(Turn("b", 1, 0, requests=(1, 2, 3)), 0.0))) == 2
    assert small.waiting == 1
    rated = Ledger(Limit(max_concurrent=50, per_second=100), LEASE, "k", 0.0)
    assert len(leases(rated.turn(Turn("a", 1, 0, requests=(1,)), 0.0))) == 1


def test_whoever_keeps_permits_hears_when_another_waits_and_when_not_any_more():
    ledger = Ledger(Limit(max_concurrent=2), LEASE, "k", 0.0)
    ledger.turn(Turn("a", 1, 0, requests=(1, 2)), 0.0)
    ledger.turn(Turn("b", 1, 0, requests=(1,)), 0.0)
    assert told(ledger.listen("a", 2, 0.0)) == [("Crowded", True)]
    assert told(ledger.listen("b", 0, 0.0)) == []
    ledger.turn(Turn("b", 2, 0, cancels=(1,)), 0.0)
    assert told(ledger.listen("a", 2, 0.0)) == [("Crowded", True), ("Crowded", False)]


def test_a_silent_holder_loses_its_leases_and_an_unheard_answer_is_no_sign_of_life():
    ledger = Ledger(LIMIT, LEASE, "k", 0.0)
    ledger.turn(Turn("a", 1, 0, requests=(1,)), 0.0)
    ledger.turn(Turn("b", 1, 0, requests=(1,)), 1.0)
    ledger.unheard("a")
    assert ledger.next_event() == LEASE
    ledger.advance(LEASE)
    assert leases(ledger.unheard("b")) == ["k-2"]
    assert not ledger.listen("a", 0, LEASE).known


def test_a_resumed_holder_cannot_release_the_lease_of_another():
    ledger = Ledger(LIMIT, LEASE, "k", 0.0)
    (stale,) = leases(ledger.turn(Turn("a", 1, 0, requests=(1,)), 0.0))
    (fresh,) = leases(ledger.turn(Turn("b", 1, 0, requests=(1,)), LEASE))
    for name in (stale, fresh):
        assert not ledger.turn(Turn("a", 2, 1, releases=((name, False),)), LEASE).known
        ledger.turn(Turn(f"a-again-{name}", 1, 0, releases=((name, False),)), LEASE)
    assert ledger.held == 1
    assert not leases(ledger.turn(Turn("c", 1, 0, requests=(1,)), LEASE))


def test_who_leaves_gives_back_everything_at_once():
    ledger = Ledger(LIMIT, LEASE, "k", 0.0)
    ledger.turn(Turn("a", 1, 0, requests=(1, 2, 3)), 0.0)
    ledger.turn(Turn("b", 1, 0, requests=(1,)), 0.0)
    ledger.turn(Turn("a", 2, 0, leaves=True), 0.0)
    assert leases(ledger.unheard("b"))
    assert (ledger.held, ledger.waiting, ledger.owners) == (1, 0, 1)


def test_a_keeper_that_lost_its_memory_waits_for_the_leases_that_are_out():
    ledger = Ledger(Limit(max_concurrent=2), LEASE, "new", 10.0, settling=True)
    assert not ledger.listen("a", 7, 10.0).known
    ledger.turn(Turn("b", 1, 0, requests=(1, 2)), 10.0)
    assert ledger.waiting == 2, "nothing is granted while holders may still come forward"
    assert told(ledger.turn(Turn("a2", 1, 0, adopt=("old-1",)), 10.5)) == [("Crowded", True)]
    assert told(ledger.turn(Turn("c2", 1, 0, adopt=("old-2", "old-3")), 10.5))[0] == ("Refused", "old-3")
    ledger.listen("a2", 0, 12.0)
    ledger.listen("b", 0, 12.0)
    ledger.advance(10 + LEASE)
    assert ledger.held == 2
    ledger.advance(10.5 + LEASE)  # c2 was not heard of again
    assert len(leases(ledger.unheard("b"))) == 1
    late = ledger.turn(Turn("d2", 1, 0, adopt=("old-4",)), 10.6 + LEASE)
    assert ("Refused", "old-4") in told(late)


def introduced(limit=LIMIT):
    """A holder that a keeper knows, at time 0."""
    names = iter("abcdefgh")
    holder = Holder(limit, LEASE, lambda: next(names))
    holder.enter("first", 0.0)
    turn = holder.next_turn()
    holder.cancel("first", 0.0)
    holder.hear(Reply("k", "a", True), turn, 0.0, 0.0)
    holder.hear(Reply("k", "a", True), holder.next_turn(), 0.0, 0.0)
    assert holder.is_quiet
    return holder


def test_a_request_that_was_cancelled_is_cancelled_at_the_keeper():
    holder = introduced()
    holder.enter("x", 0.0)
    holder.enter("y", 0.0)
    holder.cancel("y", 0.0)  # was never sent
    turn = holder.next_turn()
    assert (turn.requests, turn.cancels) == ((2,), ())
    holder.cancel("x", 0.0)
    assert holder.next_turn() is turn, "said again until it is answered"
    holder.hear(Reply("k", "a", True, (Grant(1, 2, "k-1"),)), turn, 0.0, 0.0)
    assert holder.next_turn().cancels == (2,)
    assert holder.idle == 1, "the grant crossed the cancellation: it is kept"


def test_a_lease_is_not_used_when_it_may_have_expired():
    holder = introduced()
    holder.enter("x", 0.0)
    turn = holder.next_turn()
    assert holder.hear(Reply("k", "a", True, (Grant(1, 2, "k-1"),)), turn, 0.1, 0.2) == [("x", "k-1")]
    assert holder.release("k-1", 0.3) == []
    assert holder.take(0.1 + LEASE) is None
    assert holder.enter("y", 0.1 + LEASE) == []
    assert holder.hear(Reply("k", "a", True), None, 3.05, 3.2) == [("y", "k-1")], "the keeper renewed it meanwhile"


def test_a_holder_that_expired_begins_again_and_its_old_permits_count_for_nothing():
    holder = introduced()
    holder.enter("x", 0.0)
    holder.hear(Reply("k", "a", True, (Grant(1, 2, "k-1"),)), holder.next_turn(), 0.0, 0.0)
    holder.enter("y", 0.0)
    holder.hear(Reply("k", "a", False), None, 20.0, 20.0)
    assert (holder.name, holder.held, holder.waiting) == ("b", 0, 1)
    assert holder.release("k-1", 20.0) == []
    turn = holder.next_turn()
    assert (turn.owner, turn.number, turn.requests, turn.releases, turn.adopt) == ("b", 1, (3,), (), ())
    assert holder.hear(Reply("k", "a", True, (Grant(2, 3, "k-9"),)), None, 20.0, 20.0) == [], "a late answer to the old"


def test_a_holder_offers_its_leases_to_a_keeper_that_forgot_them():
    holder = introduced(Limit(max_concurrent=3))
    holder.enter("x", 0.0)
    grants = (Grant(1, 2, "k-1"), Grant(2, None, "k-2"))
    holder.hear(Reply("k", "a", True, grants), holder.next_turn(), 0.0, 0.0)
    holder.hear(Reply("new", "a", False), None, 1.0, 1.0)
    turn = holder.next_turn()
    assert turn.owner == "b"
    assert sorted(turn.adopt) == ["k-1", "k-2"]
    holder.hear(Reply("new", "b", True, (Refused(1, "k-1"),)), turn, 1.0, 1.0)
    assert (holder.held, holder.idle) == (0, 1)


def test_idle_leases_return_after_a_while():
    holder = introduced(Limit(max_concurrent=3))
    holder.enter("x", 0.0)
    grants = (Grant(1, 2, "k-1"), Grant(2, None, "k-2"))
    holder.hear(Reply("k", "a", True, grants), holder.next_turn(), 0.0, 0.0)
    holder.advance(IDLE_SECONDS / 2)
    assert holder.idle == 1
    holder.advance(IDLE_SECONDS)
    assert holder.idle == 0
    assert holder.next_turn().releases == (("k-2", True),)
