"""The server and its clients, over a network that delays, loses and repeats, through pauses, deaths and restarts."""

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st
from limits_stage import LEASE, World

from etude.limits.lease import IDLE_SECONDS, LeaseClient, LeaseServer, Reply, Report
from etude.limits.limit import Limit

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
            world.restart_server()
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
    info = world.server.info()
    assert info.held == info.waiting == 0
    assert all(process.client.held == process.client.idle == process.client.waiting == 0 for process in left)


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
def test_through_lost_messages_and_a_server_that_forgets(limit, n, seed, schedule):
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


ONE = Limit(max_concurrent=1)


class Told:
    """A client's reports to a server, written by hand."""

    def __init__(self, server, name):
        self.server, self.name = server, name
        self.state = {"version": 0, "granted": 0, "returned": 0, "unused": 0, "waiting": 0, "is_valid": True}
        self.number = 0

    def report(self, now=0.0, number=None, leaves=False, **state):
        self.state |= state
        self.number = self.number + 1 if number is None else self.number
        return self.server.receive(Report(self.name, number or self.number, **self.state, leaves=leaves), now)


def test_places_are_served_in_the_order_in_which_they_were_asked_for():
    server = LeaseServer(ONE, LEASE, 0.0)
    a, b = Told(server, "a"), Told(server, "b")
    assert a.report(waiting=2).granted == 1
    assert b.report(waiting=1).granted == 0
    a.report(granted=1, waiting=2)
    a.report(returned=1)
    assert (server.reply("a").granted, server.reply("b").granted) == (2, 0), "a's second place is older than b's"
    a.report(granted=2, returned=2, waiting=1)
    assert (server.reply("a").granted, server.reply("b").granted) == (2, 1), "a's third is younger"


def test_a_report_that_comes_twice_or_late_counts_once():
    server = LeaseServer(Limit(max_concurrent=4, per_second=1, burst=2), LEASE, 0.0)
    a = Told(server, "a")
    assert a.report(waiting=1) == a.report(number=1)
    a.report(granted=1, returned=1, unused=1, waiting=2)
    assert a.report(number=2).granted == 3, "the token that was put back came back once"
    info = server.info()
    assert (info.held, info.waiting) == (2, 0)
    late = server.receive(Report("a", 1, 0, 0, 0, 0, 3, True), 0.0)
    assert (late.granted, server.info().waiting) == (3, 0)


def test_what_is_granted_and_not_heard_of_is_not_asked_for_again():
    server = LeaseServer(ONE, LEASE, 0.0)
    a, b = Told(server, "a"), Told(server, "b")
    a.report(waiting=1)
    assert a.report(waiting=1).granted == 1
    assert server.info().waiting == 0
    a.report(waiting=2)
    b.report(waiting=1)
    a.report(waiting=1)
    assert server.info().waiting == 1, "who leaves the queue takes the youngest place along"
    a.report(granted=1, returned=1, waiting=0)
    assert server.reply("b").granted == 1


def test_clients_hear_when_others_wait_and_when_not_any_more():
    server = LeaseServer(Limit(max_concurrent=2), LEASE, 0.0)
    a, b = Told(server, "a"), Told(server, "b")
    assert not a.report(waiting=2).crowded
    before = server.reply("a").version
    assert not b.report(waiting=1).crowded
    assert server.reply("a").crowded
    assert server.reply("a").version > before
    b.report(waiting=0)
    assert not server.reply("a").crowded


def test_a_silent_client_loses_its_leases_and_a_reply_is_no_sign_of_life():
    server = LeaseServer(ONE, LEASE, 0.0)
    a, b = Told(server, "a"), Told(server, "b")
    a.report(waiting=1)
    b.report(1.0, waiting=1)
    server.reply("a")
    assert server.next_event() == LEASE
    server.advance(LEASE)
    assert server.reply("b").granted == 1
    assert not a.report(LEASE, granted=1, returned=1).known, "it cannot return what is another's"
    assert server.info().held == 1
    assert not Told(server, "c").report(LEASE, granted=1).known, "nor claim what it was never granted"


def test_who_leaves_gives_everything_back_at_once():
    server = LeaseServer(ONE, LEASE, 0.0)
    a, b = Told(server, "a"), Told(server, "b")
    a.report(waiting=3)
    b.report(waiting=1)
    a.report(leaves=True)
    assert server.reply("b").granted == 1
    assert (server.info().held, server.info().waiting, server.info().clients) == (1, 0, 1)
    assert not a.report().known


def test_a_server_that_lost_its_memory_takes_over_the_leases_that_are_out():
    server = LeaseServer(Limit(max_concurrent=2), LEASE, 10.0, settling=True)
    a, b, c = Told(server, "a"), Told(server, "b"), Told(server, "c")
    assert b.report(10.0, waiting=2).granted == 0, "nothing is granted while others may still come forward"
    a.number = c.number = 7
    assert a.report(10.5, version=9, granted=5, returned=4).version > 9
    assert server.info().held == 1
    assert not c.report(10.5, granted=2).known, "that would be three"
    assert not c.report(10.5, granted=1, is_valid=False).known, "that may have expired before"
    assert c.report(10.5, is_valid=True).known
    for client in (a, b):
        assert client.report(12.0).granted == client.state["granted"]
    server.advance(10.0 + LEASE)
    assert server.info().held == 2
    server.advance(10.5 + LEASE)  # c was not heard of again
    assert (server.info().held, server.reply("b").granted) == (2, 1)
    assert not a.report(10.6 + LEASE, granted=6).known, "too late to come forward"
    assert server.reply("b").granted == 2


def client_of(limit=ONE, **granted):
    """A client that has sent a report at time 0 and heard `granted` in return."""
    names = iter("abcdefgh")
    client = LeaseClient(limit, LEASE, lambda: next(names))
    client.enter("first", 0.0)
    client.report(0.0)
    served = client.receive(Reply("a", True, 1, **granted), 0.0, 0.0)
    return client, served


def test_a_request_that_was_cancelled_is_not_waited_for():
    client, _ = client_of(granted=0)
    client.enter("second", 0.0)
    assert client.report(0.0).waiting == 2
    client.cancel("second", 0.0)
    assert client.has_changes
    assert client.report(0.0).waiting == 1
    client.cancel("second", 0.0)
    assert not client.has_changes
    client.cancel("first", 0.0)
    assert client.receive(Reply("a", True, 2, 1), 0.0, 0.0) == []
    assert client.idle == 1, "the grant crossed the cancellation: it is kept"


def test_a_permit_that_passes_within_the_process_is_not_asked_of_the_server():
    client, [(_, lease)] = client_of(granted=1)
    client.enter("second", 0.0)
    assert client.report(0.0).waiting == 1
    [(ticket, other)] = client.release(lease, 0.0)
    assert (ticket, client.has_changes) == ("second", True)
    assert client.report(0.0).waiting == 0
    client.receive(Reply("a", True, 2, 1, crowded=True), 0.0, 0.0)
    assert client.release(lease, 0.0) == [], "a second time does nothing"
    client.enter("third", 0.0)
    assert client.release(other, 0.0) == [], "somebody else waits: the server says who is next"
    report = client.report(0.0)
    assert (report.returned, report.unused, report.waiting) == (1, 0, 1)


def test_a_lease_is_not_used_when_it_may_have_expired():
    client, [(_, lease)] = client_of(granted=1)
    client.release(lease, 0.3)
    assert client.take(LEASE) is None
    assert client.enter("second", LEASE) == []
    report = client.report(LEASE)
    assert (report.waiting, report.is_valid) == (0, False)
    [(ticket, _)] = client.receive(Reply("a", True, 1, 1), 3.05, 3.2)
    assert ticket == "second", "the server renewed it meanwhile"


def test_replies_that_are_overtaken_only_renew():
    client, [(_, lease)] = client_of(granted=1)
    client.receive(Reply("a", True, 3, 1, crowded=True), 1.0, 1.0)
    client.receive(Reply("a", True, 2, 1, crowded=False), 1.5, 1.5)
    client.release(lease, 1.5)
    assert (client.idle, client.report(1.5).returned) == (0, 1)
    assert client.report(1.4 + LEASE).is_valid


def test_a_client_that_expired_begins_again_and_its_old_permits_count_for_nothing():
    client, [(_, lease)] = client_of(granted=1)
    client.enter("second", 0.0)
    client.receive(Reply("a", False), 20.0, 20.0)
    assert (client.name, client.known, client.held, client.waiting) == ("b", False, 0, 1)
    assert client.release(lease, 20.0) == []
    report = client.report(20.0)
    assert (report.client, report.number, report.granted, report.returned, report.waiting) == ("b", 1, 0, 0, 1)
    assert client.receive(Reply("a", True, 9, 1), 20.0, 20.0) == [], "a late reply to the old name"


def test_an_unused_grant_is_reported_as_such():
    client, [(_, lease)] = client_of(Limit(per_second=5), granted=1)
    assert client.held == 0
    client.release(lease, 0.0, unused=True)
    report = client.report(0.0)
    assert (report.granted, report.returned, report.unused) == (1, 1, 1)
    client, [(_, lease)] = client_of(Limit(max_concurrent=2, per_second=5), granted=2)
    assert client.report(0.0).unused == 1, "under a rate nothing is kept"
    client.release(lease, 0.0)
    report = client.report(0.0)
    assert (report.granted, report.returned, report.unused) == (2, 2, 1)


def test_idle_permits_return_after_a_while():
    client, [(_, lease)] = client_of(Limit(max_concurrent=3), granted=2)
    client.advance(IDLE_SECONDS / 2)
    assert client.idle == 1
    assert client.next_event() == IDLE_SECONDS
    client.advance(IDLE_SECONDS)
    assert client.idle == 0
    client.release(lease, IDLE_SECONDS)
    client.advance(2 * IDLE_SECONDS)
    assert client.report(2 * IDLE_SECONDS).returned == 2
    assert client.is_quiet
