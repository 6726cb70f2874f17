"""Calls that cannot wait for ever."""

import asyncio
import contextvars
import gc
import os
import subprocess
import sys
import threading
import time

import pytest

from etude.errors import ConfigError, InfrastructureError
from etude.timeouts import BlockingCalls, background_loop, called, run_on, uninterrupted, within

VARIABLE = contextvars.ContextVar("VARIABLE", default="unset")


async def test_within_returns_raises_or_gives_up():
    async def answer(value):
        return value

    async def fail():
        raise KeyError("x")

    async def cancel_self():
        raise asyncio.CancelledError

    assert await within(5, answer, 3) == 3
    with pytest.raises(KeyError):
        await within(5, fail)
    with pytest.raises(TimeoutError, match="no answer within"):
        await within(0.01, asyncio.sleep, 1000)
    with pytest.raises(InfrastructureError, match="from inside"):
        await within(5, cancel_self)


async def test_a_cancelled_caller_leaves_nothing_running():
    ended = asyncio.Event()

    async def clean_up():
        try:
            await asyncio.sleep(1000)
        finally:
            ended.set()

    caller = asyncio.ensure_future(within(500, clean_up))
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    caller.cancel()
    with pytest.raises(asyncio.CancelledError):
        await caller
    assert ended.is_set()


async def test_what_would_end_the_loop_is_an_ordinary_error():
    async def leave():
        sys.exit(3)

    with pytest.raises(RuntimeError, match="SystemExit: 3"):
        await called(leave)
    with pytest.raises(ConfigError, match="must be defined with 'async def'"):
        await called(lambda: 3)
    threads = BlockingCalls("test", limit=1)
    with pytest.raises(RuntimeError, match="SystemExit: 3"):
        await threads.run(sys.exit, 3)
    with pytest.raises(RuntimeError, match="StopIteration"):
        await threads.run(next, iter([]))
    assert await threads.run(lambda: 7) == 7  # the thread has survived all of it


async def test_no_more_than_the_limit_run_at_once_and_all_run():
    threads, lock, running, most = BlockingCalls("test", limit=3), threading.Lock(), 0, 0
    meeting = threading.Barrier(3)

    def work(number):
        nonlocal running, most
        with lock:
            running += 1
            most = max(most, running)
        meeting.wait(timeout=30)  # three must be inside together, or this breaks
        with lock:
            running -= 1
        return number

    assert await asyncio.gather(*(threads.run(work, i) for i in range(12))) == list(range(12))
    assert most == 3


async def test_context_travels_and_a_waiting_call_that_is_cancelled_never_starts():
    threads, started, release = BlockingCalls("test", limit=1), [], threading.Event()
    VARIABLE.set("set")
    assert await threads.run(VARIABLE.get) == "set"
    first = asyncio.ensure_future(threads.run(release.wait, 30))
    await asyncio.sleep(0)
    second = asyncio.ensure_future(threads.run(started.append, 1))
    await asyncio.sleep(0)
    second.cancel()
    await asyncio.wait({second})
    release.set()
    assert await first
    assert await threads.run(lambda: len(started)) == 0


def test_a_function_that_never_returns_does_not_keep_the_process():
    program = (
        "import asyncio, time\n"
        "from etude.timeouts import BlockingCalls, within\n"
        "async def main():\n"
        "    try:\n"
        "        await within(0.05, BlockingCalls('t', 1).run, time.sleep, 1000)\n"
        "    except TimeoutError:\n"
        "        print('gave up')\n"
        "asyncio.run(main())\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout) == (0, "gave up\n"), done.stderr


async def test_the_time_of_a_call_begins_when_it_starts():
    threads, release = BlockingCalls("test", limit=1), threading.Event()
    first = asyncio.ensure_future(threads.run_within(30.0, release.wait, 20.0))
    second = asyncio.ensure_future(threads.run_within(0.2, int, "7"))
    await asyncio.sleep(0.5)  # more than the second call's limit, all of it spent waiting for the thread
    assert not second.done()
    release.set()
    assert await first
    assert await second == 7


async def test_a_call_that_takes_too_long_is_given_up_and_so_are_those_that_no_thread_is_left_for():
    threads, release = BlockingCalls("test", limit=1), threading.Event()
    with pytest.raises(TimeoutError, match=r"no answer within 0\.05 s"):
        await threads.run_within(0.05, release.wait, 20.0)
    with pytest.raises(TimeoutError, match="no thread is free"):
        await threads.run_within(0.05, int, "7")
    release.set()
    assert await threads.run_within(5.0, int, "7") == 7  # the thread came back
    assert await threads.run_within(5.0, int, "8") == 8


async def test_a_function_and_what_it_returns_to_be_waited_for_have_one_limit_which_is_named():
    def begin():
        time.sleep(0.2)
        return asyncio.sleep(20.0)

    began = time.monotonic()
    with pytest.raises(TimeoutError, match=r"no answer within 0\.5 s"):
        await BlockingCalls("test", limit=1).call_within(0.5, begin)
    assert time.monotonic() - began < 10.0


async def test_a_timed_call_raises_what_its_function_raises():
    threads = BlockingCalls("test", limit=1)
    with pytest.raises(ValueError, match="invalid literal"):
        await threads.run_within(5.0, int, "seven")


async def test_uninterrupted_work_runs_to_its_end_and_the_cancellation_comes_after():
    log = []

    async def work():
        await asyncio.sleep(0.05)
        log.append("done")
        return 7

    assert await uninterrupted(work()) == 7
    task = asyncio.ensure_future(uninterrupted(work()))
    for _ in range(3):
        await asyncio.sleep(0.005)
        task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert log == ["done", "done"]


async def test_uninterrupted_work_hands_its_error_on():
    async def work():
        raise ValueError("own")

    with pytest.raises(ValueError, match="own"):
        await uninterrupted(work())


def test_a_forked_child_gets_a_background_loop_of_its_own():
    async def number():
        return 7

    ours = background_loop("forked")
    child = os.fork()
    if child == 0:
        theirs = background_loop("forked")
        same = theirs is ours
        os._exit(asyncio.run_coroutine_threadsafe(number(), theirs).result(30) if not same else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
    assert background_loop("forked") is ours


async def test_what_fails_in_another_loop_after_its_caller_left_is_not_logged(caplog):
    ended = threading.Event()

    async def fail_when_cancelled():
        try:
            await asyncio.sleep(60)
        except asyncio.CancelledError:
            raise ValueError("late") from None
        finally:
            ended.set()

    loop = background_loop("test-run-on")
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(run_on(loop, fail_when_cancelled()), 0.05)
    assert await asyncio.to_thread(ended.wait, 10)
    await run_on(loop, asyncio.sleep(0.05))  # the loop has let go of the failed task
    gc.collect()
    await run_on(loop, asyncio.sleep(0))
    assert "never retrieved" not in caplog.text


async def test_an_error_in_another_loop_reaches_its_caller():
    async def fail():
        raise KeyError("x")

    with pytest.raises(KeyError):
        await run_on(background_loop("test-run-on"), fail())
