"""Faults on request: the same ones in every run, at the asked rate, each with the meaning of the real one."""

import asyncio

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from session_stage import Scripted, call, run, session

from etude.errors import EtudeError
from etude.tools import BrokenCall
from etude.tools.call import Source


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
    results, _ = outcomes_of({"faults": {"error": 0.5}, "on_exception": "infrastructure", "max_retries": 20})
    assert {outcome.error for outcomes in results for outcome in outcomes} == {None}
    assert sum(outcome.retries for outcomes in results for outcome in outcomes)


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
    assert max(map(len, texts)) <= 400
    assert {outcome.reward for outcomes in results for outcome in outcomes} == {0.5}
    assert {outcome.source for outcomes in results for outcome in outcomes} == {Source.FAULT}


def test_shares_are_those_asked_for():
    results, _ = outcomes_of({"faults": {"error": 0.1, "garbage": 0.2, "seed": 1}}, count=1000)
    found = [outcome for outcomes in results for outcome in outcomes]
    for share, count in (
        (0.1, sum(outcome.error == "exception" for outcome in found)),
        (0.2, sum(outcome.source is Source.FAULT and outcome.error is None for outcome in found)),
    ):
        assert count / len(found) == pytest.approx(share, abs=0.03)  # over four standard deviations


shares = st.floats(0, 0.3)


@settings(max_examples=30)
@given(st.fixed_dictionaries({"timeout": shares, "error": shares, "garbage": shares, "seed": st.integers(0, 9)}))
def test_two_runs_are_alike_whatever_runs_beside(faults):
    def story(count):
        results, _ = outcomes_of({"faults": faults, "max_retries": 2}, count)
        return [
            [(o.response.text, o.error, o.retries) for o in each] if isinstance(each, list) else str(each)
            for each in results
        ]

    assert story(2) == story(2) == story(5)[:2]


def test_seeds_differ():
    def story(seed):
        results, _ = outcomes_of({"faults": {"error": 0.5, "seed": seed}}, 20)
        return [outcome.error for outcomes in results for outcome in outcomes]

    assert story(1) != story(2)
