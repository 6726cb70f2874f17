"""Faults on request: the same ones in every run, at the asked rate, each with the meaning of the real one."""

import asyncio
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st
from session_stage import Scripted, call, run, session

from etude.errors import EtudeError
from etude.tools import BrokenCall
from etude.tools.faults import CallPlace, Fault, draw, garbage
from etude.tools.options import FaultPolicy
from etude.tools.outcome import Source

places = st.builds(CallPlace, st.text(max_size=5), st.text(max_size=9), st.integers(0, 9), st.integers(0, 9))


@given(places, st.integers(0, 5), st.integers(0, 3))
def test_a_fault_depends_on_the_place_alone(place, attempt, seed):
    policy = FaultPolicy(timeout=0.3, error=0.3, garbage=0.3, seed=seed)
    again = CallPlace(*place)
    assert draw(policy, place, attempt) is draw(policy, again, attempt)
    assert garbage(policy, place) == garbage(policy, again)
    assert len(garbage(policy, place)) <= 400


def test_shares_are_those_asked_for_and_seeds_differ():
    policy = FaultPolicy(timeout=0.05, error=0.1, garbage=0.2, seed=1)
    drawn = [draw(policy, CallPlace("t", f"r{i}", i % 3, i % 5), 0) for i in range(20_000)]
    shares = {fault: count / 20_000 for fault, count in Counter(drawn).items()}
    for fault, share in ((Fault.TIMEOUT, 0.05), (Fault.ERROR, 0.1), (Fault.GARBAGE, 0.2), (None, 0.65)):
        assert shares[fault] == pytest.approx(share, abs=0.012)  # over four standard deviations
    other = FaultPolicy(timeout=0.05, error=0.1, garbage=0.2, seed=2)
    assert drawn != [draw(other, CallPlace("t", f"r{i}", i % 3, i % 5), 0) for i in range(20_000)]


def outcomes_of(config, count=40, **script):
    tool = Scripted(config=config, **script)

    async def one(i):
        async with session(tool, request_id=f"r{i}") as opened:
            return await opened.execute([call(), call()], 0) + await opened.execute([call()], 1)

    async def main():
        return await asyncio.gather(*(one(i) for i in range(count)), return_exceptions=True)

    return run(main()), tool


def test_an_error_is_an_exception_of_the_tool(caplog):
    results, tool = outcomes_of({"faults": {"error": 1.0}})
    assert not caplog.records  # the first traceback that is logged shall be a real one
    for outcomes in results:
        for outcome in outcomes:
            assert (outcome.error, outcome.reward, outcome.source) == ("exception", 0.0, Source.FAULT)
    assert tool.count("execute") == 0
    assert tool.count("release done") == tool.count("create done") == 40
    results, _ = outcomes_of({"faults": {"error": 1.0}, "on_exception": "stop"}, count=1)
    assert isinstance(results[0], EtudeError)


def test_a_timeout_is_broken_infrastructure_and_is_retried():
    results, tool = outcomes_of({"faults": {"timeout": 1.0}})
    assert all(isinstance(error, BrokenCall) and error.record.error == "timeout" for error in results)
    assert tool.count("execute") == 0
    results, _ = outcomes_of({"faults": {"timeout": 0.5, "seed": 4}, "max_retries": 20})
    retried = [outcome.retries for outcomes in results for outcome in outcomes]
    assert all(outcome.error is None for outcomes in results for outcome in outcomes)
    assert 0.5 < sum(retried) / len(retried) < 1.6  # one, on average, of a fair coin


def test_garbage_is_what_the_model_sees_of_a_call_that_was_made():
    results, tool = outcomes_of({"faults": {"garbage": 1.0}})
    texts = {outcome.response.text for outcomes in results for outcome in outcomes}
    assert tool.count("execute done") == 120
    assert len(texts) > 60
    assert {outcome.reward for outcomes in results for outcome in outcomes} == {0.5}


def test_two_runs_are_alike_whatever_runs_beside():
    faults = {"faults": {"timeout": 0.1, "error": 0.2, "garbage": 0.2, "seed": 9}, "max_retries": 9}

    def story(count):
        results, _ = outcomes_of(faults, count)
        return [[(o.response.text, o.error, o.retries) for o in outcomes] for outcomes in results][:10]

    assert story(10) == story(10) == story(40)
