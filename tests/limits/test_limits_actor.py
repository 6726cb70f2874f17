"""The actor that keeps a cluster's permits, in virtual time: what becomes of them when messages or processes are lost."""

import asyncio
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from virtual_time import run

from etude.limits import Limit
from etude.limits.cluster import LimitActor

LEASE = 3.0
ONE = Limit(max_concurrent=1)


async def acquire(actor, ticket, seconds):
    """Whether a process of its own gets a permit within `seconds`."""
    granted, _ = await actor.exchange(ticket, [ticket], [], {}, seconds)
    return granted == [ticket]


async def counts(actor):
    info = await actor.info()
    return info.held, info.waiting


def test_a_permit_that_is_not_renewed_goes_to_the_next_waiter():
    async def main():
        actor, now = LimitActor(ONE, LEASE), asyncio.get_running_loop().time
        assert await acquire(actor, "killed", LEASE)
        await asyncio.sleep(1)
        assert await actor.renew({"killed": True}) == []
        assert not await acquire(actor, "heir", LEASE - 0.5)
        assert await acquire(actor, "heir", LEASE)
        assert now() == pytest.approx(1 + LEASE)
        assert await actor.renew({"killed": True, "heir": True}) == ["killed"]
        await actor.release(["killed"])  # it was stopped, and has resumed: this is no other's permit
        assert await counts(actor) == (1, 0)

    run(main())


def test_a_waiter_that_is_not_renewed_loses_its_place():
    async def main():
        actor = LimitActor(ONE, LEASE)
        assert await acquire(actor, "holder", 0)
        gone = asyncio.ensure_future(acquire(actor, "gone", LEASE))
        for _ in range(3):
            await asyncio.sleep(LEASE / 2)
            await actor.renew({"holder": True})
        assert await counts(actor) == (1, 0)
        assert not await gone

    run(main())


def test_messages_that_come_twice_count_once_and_places_are_kept():
    async def main():
        actor = LimitActor(ONE, LEASE)
        assert await acquire(actor, "a", 0)
        assert await acquire(actor, "a", 0)
        assert not await acquire(actor, "b", 0)
        assert not await acquire(actor, "c", 0)
        assert not await acquire(actor, "b", 0)
        assert await counts(actor) == (1, 2)
        await actor.release(["a", "a", "unknown"])
        assert not await acquire(actor, "c", 0), "b's place is older"
        await actor.release(["b"])
        assert await acquire(actor, "c", 0)

    run(main())


def test_a_waiter_that_leaves_gets_nothing():
    async def main():
        actor = LimitActor(ONE, LEASE)
        assert await acquire(actor, "a", 0)
        waiting = asyncio.ensure_future(acquire(actor, "b", LEASE))
        await asyncio.sleep(0)
        await actor.release(["b"])
        await actor.release(["a"])
        assert not await waiting
        assert await counts(actor) == (0, 0)

    run(main())


def test_a_pure_rate_holds_nothing():
    async def main():
        actor = LimitActor(Limit(per_second=5, burst=2), LEASE)
        assert [await acquire(actor, ticket, 0) for ticket in "abc"] == [True, True, False]
        assert await counts(actor) == (0, 1)
        await actor.release(["c"])

    run(main())


def test_an_actor_that_replaces_a_lost_one_takes_over_the_permits_that_are_out(monkeypatch):
    async def main():
        monkeypatch.setattr("etude.limits.cluster.time", SimpleNamespace(monotonic=asyncio.get_running_loop().time))
        actor, now = LimitActor(Limit(max_concurrent=2), LEASE, settling=True), asyncio.get_running_loop().time
        assert not await acquire(actor, "new", 1.0), "others may still come forward"
        assert await actor.renew({"a": True, "b": True, "waiter": False}) == []
        assert await counts(actor) == (2, 1), "it keeps its place"
        new = asyncio.ensure_future(acquire(actor, "new", 10.0))
        await asyncio.sleep(LEASE - 1)
        assert await actor.renew({"a": True, "late": True, "new": False}) == ["late"]
        assert await new
        assert now() == pytest.approx(1.0 + LEASE), "b was not renewed"

    run(main())


schedules = st.lists(
    st.tuples(
        st.sampled_from(["ask", "ask", "ask", "release", "release", "leave", "renew", "renew", "kill"]),
        st.integers(0, 2),
        st.sampled_from([0.0, 0.1, LEASE / 4, LEASE / 2, LEASE * 1.1]),
    ),
    max_size=60,
)


@given(st.integers(1, 3), schedules)
def test_never_more_than_the_limit_is_valid_and_nothing_is_lost(n, schedule):
    """Of three processes, which renew what they hold when the schedule says so, and may be killed."""

    async def main():
        actor, loop = LimitActor(Limit(max_concurrent=n), LEASE), asyncio.get_running_loop()
        tickets = [{}, {}, {}]  # of each process: ticket → until when it is valid, 0.0 while it waits
        killed = []
        asked = 0

        async def ask(process, ticket):
            while ticket in process:
                sent_at = loop.time()
                if await acquire(actor, ticket, LEASE / 3) and ticket in process:
                    process[ticket] = sent_at + LEASE
                    return

        def check():
            valid = [until for process in [*tickets, *killed] for until in process.values() if until > loop.time()]
            assert len(valid) <= n

        for what, number, pause in schedule:
            process = tickets[number]
            held = [ticket for ticket, until in process.items() if until]
            waiting = [ticket for ticket, until in process.items() if not until]
            if what == "ask":
                process[f"t{asked}"] = 0.0
                loop.create_task(ask(process, f"t{asked}"))
                asked += 1
            elif what in ("release", "leave") and (some := held if what == "release" else waiting):
                del process[some[0]]
                await actor.release([some[0]])
            elif what == "renew":
                expired = await actor.renew({ticket: bool(until) for ticket, until in process.items()})
                for ticket in held:
                    process[ticket] = loop.time() + LEASE
                for ticket in expired:
                    del process[ticket]
            elif what == "kill":
                killed.append({ticket: until for ticket, until in process.items() if until})
                process.clear()
            check()
            await asyncio.sleep(pause)
            check()
        for process in tickets:
            process.clear()  # all are killed
        polls = [await acquire(actor, "heir", LEASE / 3) for _ in range(7)]
        assert polls[-1], "what the killed held did not expire"
        await actor.release(["heir"])
        await asyncio.sleep(LEASE * 1.1)
        assert await counts(actor) == (0, 0)

    run(main())
