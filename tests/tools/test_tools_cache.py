"""Cached answers: shared by equal questions, never an error, on disk and between processes; the lifecycle still holds."""

import asyncio
import base64
import importlib
import json
import logging
import math
import multiprocessing
import sqlite3
import sys
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image
from session_stage import call, in_virtual_time, run, schema

from etude.errors import ConfigError, ToolError
from etude.registry import import_object
from etude.schemas import ToolResponse
from etude.tools import BaseTool, BrokenCall, FunctionTool, ToolRuntime, ToolSession
from etude.tools.cache import ResultCache, ResultStore
from etude.tools.call import Source, ToolResult
from etude.tools.options import CachePolicy


class Oracle(BaseTool):
    """Answers after `seconds`; `asked` counts executions by argument, `fail` maps an argument to an exception."""

    def __init__(self, cache=None, seconds=0.1, fail=None, **config):
        super().__init__({"cache": cache or {}, "timeout": 1.0} | config, schema("oracle"))
        self.seconds, self.fail = seconds, fail or {}
        self.asked = Counter()
        self.open = set()

    async def create(self, instance_id=None, **create_kwargs):
        self.open.add(instance_id)
        return instance_id, ToolResponse()

    async def execute(self, instance_id, parameters, **execute_kwargs):
        assert instance_id in self.open
        q = parameters["q"]
        self.asked[q] += 1
        await asyncio.sleep(self.seconds)
        assert instance_id in self.open  # no call outlives its trajectory
        if q in self.fail:
            raise self.fail[q]
        return ToolResponse(text=f"answer to {q}"), 0.25, {"length": len(str(q))}

    async def release(self, instance_id, **release_kwargs):
        self.open.remove(instance_id)


def ask(q):
    return call("oracle", json.dumps({"q": q}))


async def asks(tool, *questions, request_id="r", row=None):
    async with ToolSession({"oracle": tool}, {"oracle": row or {}}, request_id=request_id) as session:
        return [(await session.execute([ask(q)], turn))[0] for turn, q in enumerate(questions)]


@in_virtual_time
async def test_an_equal_question_is_executed_once_and_rewarded_every_time():
    tool = Oracle()
    outcomes = await asks(tool, 1, 2, 1) + await asks(tool, 2, request_id="r2")
    assert tool.asked == {1: 1, 2: 1}
    assert [outcome.source for outcome in outcomes] == [Source.TOOL, Source.TOOL, Source.CACHE, Source.CACHE]
    assert {outcome.reward for outcome in outcomes} == {0.25}
    assert outcomes[2].response == outcomes[0].response
    assert outcomes[2].metrics == {"length": 1}
    assert outcomes[2].to_record().source == "cache"


@in_virtual_time
async def test_arguments_are_equal_as_json_is_and_kwargs_count():
    tool = Oracle()
    async with ToolSession({"oracle": tool}, request_id="r") as session:
        await session.execute([call("oracle", '{"q": 1, "b": 2}'), call("oracle", '{ "b":2,"q":1 }')], 0)
    await asks(tool, 5, row={"create_kwargs": {"a": 1}})
    await asks(tool, 5, row={"create_kwargs": {"a": 2}})
    await asks(tool, 5, row={"create_kwargs": {"a": 2}, "execute_kwargs": {"top": 3}})
    await asks(tool, 5, row={"create_kwargs": {"a": 2}, "execute_kwargs": {"top": 3}})
    assert tool.asked == {1: 1, 5: 3}


@in_virtual_time
async def test_who_changes_an_answer_changes_nobody_elses():
    async def execute():
        return ToolResult(ToolResponse(image=["i"]), 0.0, {"n": 1})

    cache = ResultCache(CachePolicy())
    for _ in range(3):
        answer = await cache.answer("k", execute)
        assert (answer.response.image, answer.metrics) == (["i"], {"n": 1})
        answer.response.image.append("j")
        answer.metrics["n"] = 2


@in_virtual_time
async def test_concurrent_equal_questions_share_one_execution():
    tool = Oracle()
    together = await asyncio.gather(*(asks(tool, 7, request_id=f"r{i}") for i in range(20)))
    outcomes = [first for [first] in together]
    assert tool.asked == {7: 1}
    assert Counter(outcome.source for outcome in outcomes) == {Source.TOOL: 1, Source.SHARED: 19}
    assert len({id(outcome.response) for outcome in outcomes}) == 20  # nobody can change another's answer


@pytest.mark.parametrize(("error", "word"), [(ToolError("no"), "tool"), (ValueError("bad"), "exception")])
@in_virtual_time
async def test_an_error_is_told_to_all_who_asked_and_never_kept(error, word):
    tool = Oracle(fail={3: error})
    together = await asyncio.gather(*(asks(tool, 3, request_id=f"r{i}") for i in range(4)))
    assert {outcomes[0].error for outcomes in together} == {word}
    assert tool.asked == {3: 1}
    del tool.fail[3]
    assert [outcome.error for outcome in await asks(tool, 3, 3)] == [None, None]
    assert tool.asked == {3: 2}


@in_virtual_time
async def test_broken_infrastructure_is_shared_but_not_kept():
    tool = Oracle(fail={3: ConnectionError("down")})
    together = await asyncio.gather(*(asks(tool, 3, request_id=f"r{i}") for i in range(4)), return_exceptions=True)
    assert all(isinstance(error, BrokenCall) for error in together)
    assert tool.asked == {3: 1}
    del tool.fail[3]
    assert (await asks(tool, 3))[0].error is None


@in_virtual_time
async def test_a_cancelled_leader_does_not_fail_its_followers():
    tool = Oracle(seconds=0.5)
    leader = asyncio.ensure_future(asks(tool, 9, request_id="leader"))
    await asyncio.sleep(0.1)
    followers = [asyncio.ensure_future(asks(tool, 9, request_id=f"f{i}")) for i in range(5)]
    await asyncio.sleep(0.1)
    assert tool.asked == {9: 1}
    leader.cancel()
    await asyncio.wait({leader})
    assert tool.asked == {9: 2}  # the first follower leads now
    await asyncio.sleep(0.1)
    followers[0].cancel()
    assert [outcomes[0].error for outcomes in await asyncio.gather(*followers[1:])] == [None] * 4
    assert tool.asked == {9: 3}
    assert tool.open == set()


@in_virtual_time
async def test_time_and_number_are_limited_in_memory(monkeypatch):
    now = [100.0]
    monkeypatch.setattr("etude.tools.cache.time.monotonic", lambda: now[0])
    tool = Oracle({"ttl": 10, "max_entries": 2})
    await asks(tool, 1, 1)
    now[0] += 11
    await asks(tool, 1)
    await asks(tool, 2, 1, 3, 1, 2)  # 3 pushed 2 out, the one not asked for longest
    assert tool.asked == {1: 2, 2: 2, 3: 1}


def test_memory_is_limited_by_what_answers_hold(monkeypatch):
    monkeypatch.setattr("etude.tools.cache._MAX_CHARACTERS", 2 * len("answer to 1"))
    tool = Oracle()
    run(asks(tool, 1, 2, 3, 3, 2, 1))
    assert tool.asked == {1: 2, 2: 1, 3: 1}


def test_functions_of_one_name_do_not_answer_for_each_other(tmp_path):
    config = {"cache": {"path": str(tmp_path / "a.db")}}

    def told_by(function):
        async def main():
            tool = FunctionTool(function, "who", config=config)
            async with ToolSession({"who": tool}, request_id="r") as session:
                return (await session.execute([call("who")], 0))[0].response.text

        return asyncio.run(main())

    def one() -> str:
        """One."""
        return "one"

    def other() -> str:
        """Other."""
        return "other"

    assert [told_by(one), told_by(other), told_by(one)] == ["one", "other", "one"]


class Judge(Oracle):
    async def calc_reward(self, instance_id, **kwargs):
        return 1.0


class Listener(Oracle):
    async def execute(self, instance_id, parameters, agent_data=None, **kwargs):
        return f"{len(agent_data.trajectory.messages)} messages", 0.0, {}


@pytest.mark.parametrize("kind", [Judge, Listener])
def test_a_tool_with_a_final_reward_or_an_eye_on_the_conversation_is_not_pure(kind):
    with pytest.raises(ConfigError, match=r"tool 'oracle': config\.cache is for tools whose execute is pure"):
        ToolRuntime.of(kind())
    ToolRuntime.of(kind({"enabled": False}))


@in_virtual_time
async def test_retries_and_limits_apply_to_the_execution_alone():
    tool = Oracle(seconds=0.9, max_concurrent_calls=1)
    answered = await asyncio.gather(*(asks(tool, 4, request_id=f"r{i}") for i in range(10)))
    assert all(outcomes[0].error is None for outcomes in answered)
    assert tool.asked == {4: 1}


# --- on disk -------------------------------------------------------------------------------------------------------


def answers_of(path, **config):
    """A fresh tool object, as another process would have it."""
    tool = Oracle({"path": str(path)}, **config)
    outcomes = asyncio.run(asks(tool, 1, 2, 1))
    return tool.asked, [outcome.source.value for outcome in outcomes], [outcome.response.text for outcome in outcomes]


def test_a_file_outlives_the_process(tmp_path):
    path = tmp_path / "deep" / "answers.db"
    first = answers_of(path, seconds=0)
    second = answers_of(path, seconds=0)
    assert first[0] == {1: 1, 2: 1}
    assert (second[0], second[1]) == ({}, ["cache"] * 3)
    assert second[2] == first[2]
    assert answers_of(path, seconds=0, engine="other")[0] == {1: 1, 2: 1}  # another configuration asks another world
    assert answers_of(path, seconds=0, max_response_chars=99)[0] == {}  # a limit of ours changes no answer


def test_answers_of_other_code_are_asked_anew(tmp_path, monkeypatch):
    """Of a tool's file and what it imports from its folder; a cache that is only read answers whatever the code is."""
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    written = {"tool_of_prices.py": "from prices_of_today import PRICE\n\n\ndef price() -> str:\n    return PRICE\n"}

    def told(price, **more):
        for name, text in {**written, "prices_of_today.py": f"PRICE = {price!r}\n"}.items():
            (tmp_path / name).write_text(text)
        for name in [name for name in sys.modules if "tool_of_prices" in name or name == "prices_of_today"]:
            del sys.modules[name]
        importlib.invalidate_caches()
        monkeypatch.setattr(sys, "dont_write_bytecode", True)
        function = import_object(f"{tmp_path}/tool_of_prices.py:price")
        tool = FunctionTool(function, config={"cache": {"path": str(tmp_path / "a.db"), **more}})

        async def main():
            async with ToolSession({"price": tool}, request_id="r") as session:
                [outcome] = await session.execute([call("price", "{}")], 0)
                return outcome.response.text, outcome.source

        return asyncio.run(main())

    assert [told("3"), told("3")] == [("3", Source.TOOL), ("3", Source.CACHE)]
    assert told("4") == ("4", Source.TOOL)
    assert told("3") == ("3", Source.CACHE)
    assert told("5", only=True) == ("4", Source.REPLAY)  # the last stored


def _ask_in_a_process(path, queue):
    queue.put(dict(answers_of(path)[0]))


def test_processes_share_a_file(tmp_path):
    context = multiprocessing.get_context("spawn")
    queue = context.Queue()
    processes = [context.Process(target=_ask_in_a_process, args=(tmp_path / "a.db", queue)) for _ in range(2)]
    for process in processes:
        process.start()
    asked = [queue.get(timeout=60) for _ in processes]
    for process in processes:
        process.join(60)
    assert all(set(counts.values()) <= {1} for counts in asked)
    assert answers_of(tmp_path / "a.db")[0] == {}


async def test_age_and_number_are_limited_on_disk(tmp_path, monkeypatch):
    now = [1000.0]
    monkeypatch.setattr("etude.tools.cache.time.time", lambda: now[0])
    store = ResultStore(tmp_path / "a.db", max_entries=3, ttl=10)
    for i in range(5):
        now[0] += 1
        await store.put(f"k{i}", {"n": i})
    kept = [await store.get(f"k{i}") for i in range(5)]
    now[0] += 9
    assert kept == [None, None, {"n": 2}, {"n": 3}, {"n": 4}]
    assert [await store.get(f"k{i}") for i in range(5)] == [None, None, None, {"n": 3}, {"n": 4}]


async def test_images_and_bytes_come_back_as_they_were(tmp_path):
    image = Image.new("RGBA", (5, 3), (1, 2, 3, 4))
    image.putpixel((1, 1), (200, 100, 50, 25))
    answer = ToolResult(ToolResponse(text="é\n", image=[image, b"\x00\xff", {"url": "x"}]), 0.5, {"a": [1, None]})

    async def execute():
        return answer

    policy = CachePolicy(path=str(tmp_path / "a.db"))
    assert await ResultCache(policy).answer("k", execute) is answer
    read = await ResultCache(policy).answer("k", None)
    assert read.response.image[0].tobytes() == image.tobytes()
    assert read.response.image[0].mode == "RGBA"
    assert read.response.image[1:] == [b"\x00\xff", {"url": "x"}]
    assert (read.response.text, read.reward, read.metrics, read.source) == ("é\n", 0.5, {"a": [1, None]}, Source.CACHE)


def test_what_cannot_be_written_is_kept_in_memory_only(tmp_path):
    path = tmp_path / "a.db"
    tool = Oracle({"path": str(path)}, seconds=0)
    strange = object()

    async def execute(self, instance_id, parameters, **kwargs):
        self.asked[parameters["q"]] += 1
        return ToolResponse(image=[strange]), 0.0, {}

    tool.execute = execute.__get__(tool)
    second = asyncio.run(asks(tool, 1, 1))[1]
    assert (second.source, second.response.image) == (Source.CACHE, [strange])
    assert sqlite3.connect(path).execute("SELECT count(*) FROM answers").fetchone() == (0,)


def test_a_file_that_is_no_cache_is_a_configuration_error(tmp_path):
    (tmp_path / "text.db").write_text("this is no database, and longer than a header would be" * 100)
    (tmp_path / "other.db").touch()
    other = sqlite3.connect(tmp_path / "other.db")
    other.execute("CREATE TABLE answers (x INTEGER)")
    other.close()
    for name in ("text.db", "other.db", "."):
        with pytest.raises(ConfigError, match="not a cache file"):
            ToolRuntime.of(Oracle({"path": str(tmp_path / name)}))


def test_a_file_that_fails_later_costs_its_entries_and_no_call(tmp_path, caplog):
    path = tmp_path / "a.db"
    tool = Oracle({"path": str(path)}, seconds=0)
    ToolRuntime.of(tool)
    vandal = sqlite3.connect(path)
    vandal.execute("DROP TABLE answers")
    vandal.commit()
    vandal.close()
    with caplog.at_level(logging.WARNING, logger="etude.tools"):
        outcomes = asyncio.run(asks(tool, 1, 1, 2))
    assert [outcome.error for outcome in outcomes] == [None] * 3
    assert tool.asked == {1: 1, 2: 1}  # memory still works
    assert len(caplog.records) == 1
    assert "the cache on disk is disabled" in caplog.text


POSTSCRIPT = base64.b64encode(b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 4 4\n%%EndComments\nshowpage\n").decode()
NONSENSE = [
    *("{", "[]", "{}", "[" * 100_000, '{"response": 3}', '{"response": {"image": [{"png": "AAAA"}]}}'),
    *('{"reward": NaN}', '{"reward": -Infinity}', '{"reward": 1e999}', '{"reward": "1"}', '{"metrics": 3}'),
    f'{{"response": {{"image": [{{"png": "{POSTSCRIPT}"}}]}}}}',
]


@pytest.mark.parametrize("stored", NONSENSE)
def test_an_entry_that_makes_no_sense_is_asked_anew(tmp_path, monkeypatch, stored):
    path = tmp_path / "a.db"
    asyncio.run(asks(Oracle({"path": str(path)}, seconds=0), 1))
    connection = sqlite3.connect(path)
    connection.execute("UPDATE answers SET answer = ?", (stored,))
    connection.commit()
    connection.close()
    tool = Oracle({"path": str(path)}, seconds=0)
    monkeypatch.setattr("PIL.EpsImagePlugin.Ghostscript", lambda *args, **kwargs: pytest.fail("Ghostscript runs"))
    (outcome,) = asyncio.run(asks(tool, 1))
    assert outcome.error is None
    assert math.isfinite(outcome.reward)
    if stored != "{}":  # an answer of nothing at all is an answer
        assert outcome.response.text == "answer to 1"


# --- any schedule --------------------------------------------------------------------------------------------------


@settings(max_examples=150)
@given(
    plans=st.lists(
        st.tuples(
            st.integers(0, 20),  # begins at, in hundredths of a second
            st.lists(st.integers(0, 2), min_size=1, max_size=3),  # questions
            st.none() | st.integers(0, 60),  # cancelled at
        ),
        min_size=1,
        max_size=6,
    ),
    fail=st.dictionaries(st.integers(0, 2), st.sampled_from([ToolError("no"), OSError("gone")]), max_size=1),
)
def test_in_any_schedule_nobody_else_pays_for_a_cancellation(plans, fail):
    tool = Oracle(fail=fail)

    async def one(i, start, questions):
        await asyncio.sleep(start / 100)
        return await asks(tool, *questions, request_id=f"r{i}")

    async def main():
        tasks = [asyncio.ensure_future(one(i, start, questions)) for i, (start, questions, _) in enumerate(plans)]
        for task, (_, _, cancelled) in zip(tasks, plans):
            if cancelled is not None:
                asyncio.get_running_loop().call_later(cancelled / 100, task.cancel)
        await asyncio.wait(tasks)
        return tasks

    tasks = run(main())
    assert tool.open == set()
    for task, (_, questions, cancelled) in zip(tasks, plans):
        if task.cancelled():
            assert cancelled is not None
        elif task.exception() is not None:
            assert isinstance(task.exception(), BrokenCall)
            assert any(isinstance(fail.get(q), OSError) for q in questions)
        else:
            for q, outcome in zip(questions, task.result()):
                assert outcome.error == ("tool" if q in fail else None)
                assert outcome.response.text == ("no" if q in fail else f"answer to {q}")
    cancelled = sum(cancelled is not None for _, _, cancelled in plans)
    for q, count in tool.asked.items():
        if q not in fail:
            assert count <= 1 + cancelled
