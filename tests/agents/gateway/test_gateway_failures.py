"""How failures around an agent are read: broken infrastructure, the gateway's refusals, and the user's bugs."""

import asyncio
import builtins
import contextlib
import importlib
import json
import sys
import urllib.request

import aiohttp
import openai
import pytest
import requests
from agents_stage import QUESTION, SAMPLING, TOKENIZER, context, says
from gateway_stage import PROGRAM, USER, answer, native, roll

from etude.agents import AGENT_LOOPS, AgentLoopManager
from etude.agents.gateway.loop import broken_by
from etude.chat import HermesToolParser
from etude.errors import EngineError, EtudeError, InfrastructureError, ToolError, is_infrastructure
from etude.trajectory import StopReason

httpx = importlib.import_module(
    openai.DefaultHttpxClient.__mro__[1].__module__.partition(".")[0]
)  # whichever openai uses
Group = getattr(builtins, "ExceptionGroup", None)
no_groups = pytest.mark.skipif(Group is None, reason="groups begin with Python 3.11")


def test_an_agent_that_lets_the_refusal_of_a_long_context_through_has_ended(loop_of):
    async def run(client, row):
        messages = list(row["raw_prompt"])
        while True:
            made = (await client.chat.completions.create(model="m", messages=messages)).choices[0]
            messages += [answer(made), USER]

    [result], _ = roll(loop_of(run), response_length=60, prompt_length=60)
    assert result.trajectory.stop_reason is StopReason.RESPONSE_LENGTH
    assert result.trajectory.assistant_turns > 1
    assert result.failures == 0
    [result], _ = roll(loop_of_again(loop_of, run), multi_turn={"max_assistant_turns": 2})
    assert result.trajectory.stop_reason is StopReason.MAX_ASSISTANT_TURNS


def loop_of_again(loop_of, run):
    AGENT_LOOPS._items.pop("an_agent")
    return loop_of(run)


def test_a_prompt_that_is_too_long_drops_the_row_and_no_more(loop_of):
    async def run(client, row):
        await client.chat.completions.create(model="m", messages=[{"role": "user", "content": "value " * 99}])

    [result], _ = roll(loop_of(run), prompt_length=50)
    assert (result.trajectory, result.dropped) == (None, StopReason.PROMPT_TOO_LONG)


@pytest.mark.parametrize("swallows", [False, True])
def test_a_failed_engine_is_infrastructure_whatever_the_agent_makes_of_it(loop_of, swallows):
    attempts = []

    async def run(client, row):
        try:
            await client.chat.completions.create(model="m", messages=row["raw_prompt"])
        except openai.OpenAIError:
            if not swallows:
                raise
            await asyncio.sleep(60)
        return 1.0

    def script(name, prompt, turn):
        attempts.append(name)
        return EngineError("gone") if len(attempts) == 1 else says("5")

    [result], engine = roll(loop_of(run), script)
    assert (result.attempts, result.failures) == (2, 1)
    assert result.trajectory.response_ids == says("5")
    assert attempts == ["u0/0/0", "u0/0/1"]
    assert sorted(engine.opened) == sorted(engine.closed)


def test_a_trajectory_whose_engine_keeps_failing_is_dropped_and_never_scored(loop_of):
    async def run(client, row):
        await client.chat.completions.create(model="m", messages=row["raw_prompt"])

    [result], _ = roll(loop_of(run), lambda *_: EngineError("gone"))
    assert (result.trajectory, result.dropped) == (None, StopReason.INFRASTRUCTURE)
    assert "gone" in result.cause


def test_an_agents_own_exception_is_the_users_bug(loop_of):
    async def run(client, row):
        await client.chat.completions.create(model="m", messages=row["raw_prompt"])
        raise KeyError("mistake")

    with pytest.raises(KeyError, match="mistake"):
        roll(loop_of(run))


@pytest.mark.parametrize("swallows", [False, True])
@pytest.mark.parametrize("turn", [1, 2])
def test_a_bug_of_ours_ends_the_run_whatever_the_agent_makes_of_it(loop_of, swallows, turn):
    class Broken(HermesToolParser):
        seen = 0

        def parse(self, text, tools=None):
            self.seen += 1
            if self.seen == turn:
                raise ZeroDivisionError("a parser's bug")
            return super().parse(text, tools)

    async def run(client, row):
        for _ in range(turn):
            try:
                await client.chat.completions.create(model="m", messages=row["raw_prompt"])
            except openai.OpenAIError:
                if not swallows:
                    raise
        return 0.0

    with pytest.raises(ZeroDivisionError, match="a parser's bug"):
        roll(loop_of(run), parser=Broken(TOKENIZER))


class StatusError(Exception):
    def __init__(self, status):
        super().__init__(f"status {status}")
        self.status_code = status


def caused():
    error = RuntimeError("cannot reach the judge")
    error.__cause__ = ConnectionError("refused")
    return error


def grouped():
    error = RuntimeError("a task group")
    error.__cause__ = Group("tasks", [ValueError("cancelled"), httpx.ReadError("reset")])
    return error


@pytest.mark.parametrize(
    "failure",
    [
        TimeoutError("slow"),
        InfrastructureError("down"),
        caused(),
        pytest.param(grouped, marks=no_groups),
        StatusError(503),
        StatusError(429),
    ],
)
def test_what_broke_around_the_agent_is_infrastructure(loop_of, failure):
    async def run(client, row):
        await client.chat.completions.create(model="m", messages=row["raw_prompt"])
        raise failure() if callable(failure) else failure

    [result], _ = roll(loop_of(run))
    assert (result.trajectory, result.dropped, result.failures) == (None, StopReason.INFRASTRUCTURE, 2)


@contextlib.asynccontextmanager
async def another_server(answer):
    """The address of a server that sends `answer` and closes."""

    async def serve(reader, writer):
        await reader.readuntil(b"\r\n\r\n")
        writer.write(answer)
        await writer.drain()
        writer.close()

    async with await asyncio.start_server(serve, "127.0.0.1", 0) as server:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"


async def with_httpx(url):
    async with httpx.AsyncClient(trust_env=False) as client:
        (await client.get(url)).raise_for_status()


async def with_aiohttp(url):
    async with aiohttp.ClientSession(raise_for_status=True) as client, client.get(url) as answered:
        await answered.read()


async def with_openai(url):
    async with openai.AsyncOpenAI(base_url=url, api_key="x", max_retries=0) as client:
        await client.models.list()


def with_requests(url):
    with requests.Session() as session:
        session.trust_env = False
        session.get(url, timeout=30).raise_for_status()


def with_urllib(url):
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    opener.open(url, timeout=30).close()


@pytest.mark.parametrize("ask", [with_httpx, with_aiohttp, with_openai, with_requests, with_urllib])
@pytest.mark.parametrize(
    ("said", "broken"),
    [
        (b"", True),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\nhalf", True),
        (b"HTTP/1.1 503 No\r\nContent-Length: 0\r\n\r\n", True),
        (b"HTTP/1.1 429 No\r\nContent-Length: 0\r\n\r\n", True),
        (b"HTTP/1.1 404 No\r\nContent-Length: 0\r\n\r\n", False),
    ],
    ids=["closes", "breaks off", "503", "429", "404"],
)
def test_what_every_http_client_raises_of_another_server(ask, said, broken):
    async def main():
        async with another_server(said) as url:
            try:
                await (ask(url) if asyncio.iscoroutinefunction(ask) else asyncio.to_thread(ask, url))
            except Exception as error:
                return broken_by(error) is not None, is_infrastructure(error)
        return None

    if ask is with_urllib and said.endswith(b"half"):
        pytest.skip("urllib does not read the body unless it is asked to")
    assert asyncio.run(main()) == (broken, broken)


@pytest.mark.parametrize(
    ("error", "broken"), [(EtudeError("x"), False), (ToolError("x"), False), (EngineError("x"), True)]
)
def test_our_own_errors_are_what_they_are_whatever_status_they_bear(error, broken):
    for error.status in (None, 404, 503):
        assert is_infrastructure(error) is broken


def test_another_servers_no_is_the_users_bug(loop_of):
    async def run(client):
        raise StatusError(400)

    with pytest.raises(StatusError):
        roll(loop_of(run))


WAYS = [
    "through",
    "wrapped",
    "in a context",
    "requests",
    "urllib",
    "command",
    pytest.param("in a group", marks=no_groups),
]
TOO_MUCH = {"role": "user", "content": "value " * 4000}


@pytest.mark.parametrize("way", WAYS)
def test_a_refusal_ends_an_agent_in_whatever_it_wraps_it(loop_of, way):
    async def run(client, row):
        await client.chat.completions.create(model="m", messages=[USER])
        try:
            await client.chat.completions.create(model="m", messages=[TOO_MUCH])
        except openai.BadRequestError as error:
            if way == "wrapped":
                raise ValueError("the model failed") from error
            if way == "in a context":
                raise ValueError("the model failed") from None
            if way == "in a group":
                raise Group("tasks", [error])  # noqa: B904
            raise

    def run_in_a_thread(base_url, api_key):
        headers = {"Authorization": f"Bearer {api_key}", "Content-Type": "application/json"}
        for message in (USER, TOO_MUCH):
            url, body = f"{base_url}/chat/completions", json.dumps({"messages": [message]})
            if way == "requests":
                requests.post(url, body, headers=headers, timeout=30).raise_for_status()
            else:
                urllib.request.urlopen(urllib.request.Request(url, body.encode(), headers), timeout=30).close()

    program = PROGRAM + f"body['messages'] = [{TOO_MUCH!r}]\nrequest.data = json.dumps(body).encode()\n"
    command = [sys.executable, "-c", program + "urllib.request.urlopen(request)"]
    if way == "command":
        name = loop_of(command=command)
    else:
        name = loop_of(run_in_a_thread if way in ("requests", "urllib") else run)
    [result], _ = roll(name)
    assert (result.dropped, result.failures) == (None, 0)
    assert result.trajectory.stop_reason is StopReason.RESPONSE_LENGTH
    assert result.trajectory.response_ids == says("5")


@pytest.mark.parametrize("failure", [KeyError("mistake"), ConnectionError("the search is down")])
def test_what_goes_wrong_after_a_refusal_is_read_by_itself(loop_of, failure):
    async def run(client):
        await client.chat.completions.create(model="m", messages=[USER])
        with contextlib.suppress(openai.BadRequestError):
            await client.chat.completions.create(model="m", messages=[TOO_MUCH])
        raise failure

    if isinstance(failure, KeyError):
        with pytest.raises(KeyError, match="mistake"):
            roll(loop_of(run))
    else:
        [result], _ = roll(loop_of(run))
        assert (result.trajectory, result.dropped) == (None, StopReason.INFRASTRUCTURE)


def test_an_agent_that_is_always_refused_is_told_why(loop_of):
    async def run(client):
        with contextlib.suppress(openai.BadRequestError):
            await client.chat.completions.create(model="m", messages=[USER], response_format={"type": "grammar"})
        return 1.0

    with pytest.raises(
        EtudeError, match=r"none of its requests was answered; the last one failed with: response_format: "
    ):
        roll(loop_of(run))


def test_agents_that_wait_for_one_another_in_the_deterministic_mode_are_told_so(loop_of):
    gates = []

    async def run(client):
        gates[:] = gates or [asyncio.Semaphore(1)]
        async with gates[0]:
            await client.chat.completions.create(model="m", messages=[USER], max_tokens=2)

    limits = {"trajectory_timeout": 0.3, "infrastructure_retries": 0}
    manager = AgentLoopManager(context(**limits), native(deterministic=True), deterministic=True)
    name = loop_of(run)
    rows = [{"raw_prompt": QUESTION, "agent_name": name, "uid": f"u{i}"} for i in range(2)]
    results = asyncio.run(manager.generate(rows, SAMPLING))
    assert any("agents must not wait for one another" in result.cause for result in results)


def test_an_agent_that_never_asks_is_told_so(loop_of):
    async def run(row):
        return 1.0

    with pytest.raises(EtudeError, match=r"agent 'run' returned without asking its policy anything"):
        roll(loop_of(run))
