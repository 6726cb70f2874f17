"""What a `Limit` may say, and that a `LocalLimiter` keeps it, under schedules that Hypothesis invents."""

from types import SimpleNamespace
from unittest import mock

import pytest
from hypothesis import given
from hypothesis import strategies as st

from etude.errors import ConfigError
from etude.limits import Limit, LocalLimiter, RateLimit


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"max_concurrent": 0},
        {"max_concurrent": 2.5},
        {"max_concurrent": True},
        {"per_second": 0},
        {"per_second": float("nan")},
        {"per_second": float("inf")},
        {"per_second": "10"},
        {"max_concurrent": 1, "burst": 3},
        {"per_second": 1, "burst": 0},
    ],
)
def test_a_limit_that_is_invalid_is_refused(options):
    with pytest.raises(ConfigError):
        Limit(**options)


def test_a_limit_says_what_it_allows():
    assert str(Limit(max_concurrent=3)) == "3 at once"
    assert str(Limit(max_concurrent=3, per_second=2.5)) == "3 at once, 2.5 a second (bursts of 3)"
    assert Limit(per_second=0.2).bucket_size == 1
    assert Limit(per_second=7, burst=2).bucket_size == 2
    assert Limit(max_concurrent=3).bucket_size == 0


class Clock:
    """A clock that the test moves, for the limiters that are made under it; they set no timers."""

    def __init__(self):
        self.now = 100.0

    def __enter__(self):
        self.patch = mock.patch.multiple(
            "etude.limits.local", time=SimpleNamespace(monotonic=lambda: self.now), background_loop=mock.Mock()
        )
        self.patch.start()
        return self

    def __exit__(self, *_):
        self.patch.stop()


@given(st.floats(0.1, 50), st.integers(1, 10), st.lists(st.floats(0, 3), max_size=60))
def test_a_rate_never_gives_more_than_its_burst_and_its_rate_nor_less(rate, burst, pauses):
    with Clock() as clock:
        limiter, taken = RateLimit(rate, burst), []
        for pause in pauses:
            clock.now += pause
            while limiter.try_acquire() is not None:
                taken.append(clock.now)
        for i, start in enumerate(taken):
            for j in range(i, len(taken)):
                assert j - i + 1 <= burst + rate * (taken[j] - start) + 1e-6
        clock.now += 1.001 / rate
        assert limiter.try_acquire() is not None


limits = st.one_of(
    st.builds(Limit, max_concurrent=st.integers(1, 4)),
    st.builds(Limit, max_concurrent=st.integers(1, 4), per_second=st.floats(0.5, 20), burst=st.integers(1, 3)),
)
operations = st.lists(
    st.one_of(
        st.just(("enter", 0)),
        st.tuples(st.sampled_from(["leave", "release"]), st.integers(0, 20)),
        st.tuples(st.just("pass"), st.floats(0.01, 1)),
    ),
    max_size=80,
)


@given(limits, operations)
def test_a_queue_serves_in_order_and_loses_nothing(limit, schedule):
    """Never more out than allowed; grants in the order of asking; who left gets nothing; whoever still waits is served once
    all is returned."""
    with Clock() as clock:
        limiter, permits = LocalLimiter(limit), []

        def split():
            held = [permit for permit in permits if permit.outcome.done()]
            waiting = [permit for permit in permits if not permit.outcome.done()]
            assert permits == held + waiting, "granted in the order of asking"
            assert (limiter.held, limiter.waiting) == (len(held), len(waiting))
            assert limiter.held <= limit.max_concurrent
            return held, waiting

        def end(permit):
            permits.remove(permit)
            permit.release()
            permit.release()  # a second time does nothing

        for what, value in schedule:
            held, waiting = split()
            if what == "enter":
                permits.append(limiter.enter())
            elif what == "leave" and waiting:
                end(waiting[value % len(waiting)])
            elif what == "release" and held:
                end(held[value % len(held)])
            elif what == "pass":
                clock.now += value
        for _ in range(4 * len(permits) + 4):
            clock.now += 5.0
            held, _ = split()
            for permit in held:
                end(permit)
            limiter.enter().release()  # what a timer does on a real clock
        assert split() == ([], [])
