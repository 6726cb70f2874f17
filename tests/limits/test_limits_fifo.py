"""The pure parts: `Limit`, `TokenBucket`, `Fifo`, under schedules that Hypothesis invents, on a clock it moves."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from etude.errors import ConfigError
from etude.limits import Limit
from etude.limits.limit import TokenBucket
from etude.limits.limiter import Fifo


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, "max_concurrent, per_second or both"),
        ({"max_concurrent": 0}, "max_concurrent must be a whole number from 1, not 0"),
        ({"max_concurrent": 2.5}, "max_concurrent must be a whole number"),
        ({"max_concurrent": True}, "max_concurrent must be a whole number"),
        ({"per_second": 0}, "per_second must be a number above 0"),
        ({"per_second": float("nan")}, "per_second must be a number above 0"),
        ({"per_second": float("inf")}, "per_second must be a number above 0"),
        ({"per_second": "10"}, "per_second must be a number above 0"),
        ({"max_concurrent": 1, "burst": 3}, "burst says how many at one moment of per_second"),
        ({"per_second": 1, "burst": 0}, "burst must be a whole number from 1"),
    ],
)
def test_a_limit_without_meaning_is_refused(options, message):
    with pytest.raises(ConfigError, match=message):
        Limit(**options)


def test_a_limit_says_what_it_allows():
    assert str(Limit(max_concurrent=3)) == "3 at once"
    assert str(Limit(max_concurrent=3, per_second=2.5)) == "3 at once, 2.5 a second (bursts of 3)"
    assert Limit(per_second=0.2).bucket_size == 1
    assert Limit(per_second=7, burst=2).bucket_size == 2
    assert Limit(max_concurrent=3).bucket_size == 0


steps = st.floats(0, 3, allow_nan=False)


@given(st.floats(0.1, 50), st.integers(1, 10), st.lists(steps, max_size=60))
def test_a_bucket_never_gives_more_than_its_size_and_its_rate(rate, size, pauses):
    bucket, now, taken = TokenBucket(rate, size, 0.0), 0.0, []
    for pause in pauses:
        now += pause
        while bucket.take(now):
            taken.append(now)
    for i, start in enumerate(taken):
        for j in range(i, len(taken)):
            assert j - i + 1 <= size + rate * (taken[j] - start) + 1e-6


@given(st.floats(0.1, 50), st.integers(1, 10), st.lists(steps, max_size=60))
def test_a_bucket_knows_when_it_is_ready(rate, size, pauses):
    bucket, now = TokenBucket(rate, size, 5.0), 5.0
    for pause in pauses:
        now += pause
        due = bucket.ready_at()
        if abs(due - now) > 1e-6:
            assert bucket.take(now) == (due < now)


def test_a_clock_that_steps_back_neither_fills_nor_empties():
    bucket = TokenBucket(1.0, 2, 100.0)
    assert bucket.take(100.0)
    assert bucket.take(50.0)
    assert not bucket.take(60.0)
    assert not bucket.take(100.5)
    assert bucket.take(101.0)


def test_a_token_put_back_is_there_again_but_never_one_too_many():
    bucket = TokenBucket(1.0, 1, 0.0)
    assert bucket.take(0.0)
    bucket.put_back()
    bucket.put_back()
    assert bucket.take(0.0)
    assert not bucket.take(0.0)


limits = st.one_of(
    st.builds(Limit, max_concurrent=st.integers(1, 4)),
    st.builds(Limit, per_second=st.floats(0.5, 20), burst=st.none() | st.integers(1, 3)),
    st.builds(Limit, max_concurrent=st.integers(1, 4), per_second=st.floats(0.5, 20), burst=st.integers(1, 3)),
)
operations = st.lists(
    st.one_of(
        st.just(("ask", 0)),
        st.tuples(st.sampled_from(["cancel", "release"]), st.integers(0, 20)),
        st.tuples(st.just("pass"), st.floats(0.01, 1)),
    ),
    max_size=80,
)


@given(limits, operations)
def test_a_queue_serves_in_order_and_loses_nothing(limit, schedule):
    """Never more out than allowed; the order of grants is the order of asking; who cancelled gets nothing; nobody is
    left waiting while a permit is free; and when all is returned, everyone who still waits is served."""
    now, fifo = 0.0, Fifo(limit, 0.0)
    waiting, held, served, asked = [], {}, [], 0

    def note(granted):
        for ticket, lease in granted:
            assert ticket == waiting.pop(0)
            held[ticket] = lease
            served.append(ticket)

    for what, value in schedule:
        if what == "ask":
            lease = fifo.take(now)
            if lease is not None:
                assert not waiting
                held[asked] = lease
                served.append(asked)
            else:
                waiting.append(asked)
                note(fifo.enter(asked, now))
            asked += 1
        elif what == "cancel" and waiting:
            note(fifo.cancel(waiting.pop(value % len(waiting)), now))
        elif what == "release" and held:
            lease = held.pop(sorted(held)[value % len(held)])
            note(fifo.release(lease, now))
            note(fifo.release(lease, now))  # a second time does nothing
        elif what == "pass":
            now += value
            note(fifo.advance(now))
        assert fifo.waiting == len(waiting)
        if limit.max_concurrent is not None:
            assert fifo.held == len(held) <= limit.max_concurrent
        due = fifo.next_event()
        blocked = limit.max_concurrent is not None and len(held) == limit.max_concurrent
        assert (due is not None) == bool(waiting and not blocked)
    assert served == sorted(served)
    while waiting:
        for ticket in list(held):
            note(fifo.release(held.pop(ticket), now))
        now = max(now, fifo.next_event() or now) + 1e-6
        note(fifo.advance(now))
