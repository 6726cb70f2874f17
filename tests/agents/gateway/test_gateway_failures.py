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
from agents_stage import QUESTION, SAMPLING, TOKENIZER, call, context, says
from gateway_stage import PROGRAM, USER, answer, native, post_reward, roll

from etude.agents import AgentLoopManager
from etude.agents.gateway import loop
from etude.agents.gateway.loop import broken_by
from etude.chat import HermesToolParser
from etude.errors import EngineError, EtudeError, InfrastructureError, ToolError, TrainingStopped, is_infrastructure
from etude.trainer.rollouts import check_survivors
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


def test_only_numbers_with_the_key_of_a_running_rollout_are_rewards(loop_of):
    bodies = [b'{"reward": %s}' % value for value in (b"NaN", b"1e400", b'"1"', b'"' + b"1" * 5_000_000 + b'"', b"")]
    statuses, ended = [], []

    async def post(url, key, body):
        async with (
            aiohttp.ClientSession(headers={"Authorization": f"Bearer {key}"}) as http,
            http.post(url, data=body) as answered,
        ):
            return answered.status

    async def run(client, row, base_url, api_key):
        url = base_url.removesuffix("/v1") + "/reward"
        await client.chat.completions.create(model="m", messages=row["raw_prompt"])
        statuses.extend([await post(url, api_key, body) for body in bodies])
        statuses.append(await post(url, "wrong", b'{"reward": 9}'))
        for _ in range(2):
            assert await post(url, api_key, b'{"reward": 0.25}') == 200
        if row["extra_info"]["index"] == 1:
            while not ended:
                await asyncio.sleep(0.05)
            await asyncio.sleep(0.5)
            statuses.append(await post(*ended[0], b'{"reward": 9}'))
            statuses.append(await post(url, ended[0][1], b'{"reward": 9}'))
        elif not ended:
            ended.append((url, api_key))

    results, _ = roll(loop_of(run), rows=2, scored=False)
    assert [result.trajectory.rewards.total() for result in results] == [0.5, 0.5]
    assert len(statuses) == 2 * 6 + 2
    assert all(400 <= status < 500 for status in statuses), statuses


@pytest.mark.parametrize("scored", [True, False])
@pytest.mark.parametrize("posts", [True, False])
def test_an_agents_own_exception_ends_its_rollout_and_no_other(loop_of, caplog, scored, posts):
    async def run(client, row, base_url, api_key):
        await client.chat.completions.create(model="m", messages=row["raw_prompt"])
        if row["extra_info"]["index"] == 1:
            if posts:
                await post_reward(base_url, api_key, {"reward": -0.5})
            raise KeyError("mistake")
        return 1.0

    loop._logged.clear()
    first, failed, last = roll(loop_of(run), rows=3, scored=scored)[0]
    assert first.trajectory.rewards.total() == last.trajectory.rewards.total() == 1.0
    assert (failed.attempts, failed.failures) == (1, 0)
    if posts or scored:
        assert failed.trajectory.stop_reason is StopReason.AGENT_ERROR
        assert failed.trajectory.response_ids == says("5")
        assert failed.trajectory.rewards.score is None
        assert failed.trajectory.rewards.total() == (-0.5 if posts else 0.0)  # the reward manager's is to come
    else:
        assert (failed.trajectory, failed.dropped) == (None, StopReason.AGENT_ERROR)
        assert "KeyError: 'mistake'" in failed.cause
        assert "test_gateway_failures.py:" in failed.cause
    [logged] = [each for each in caplog.records if each.levelname == "WARNING"]
    assert "mistake" in caplog.text
    assert logged.exc_info[0] is KeyError


def test_only_the_first_of_many_errors_is_logged_with_its_traceback(loop_of, caplog):
    async def run(client):
        await client.chat.completions.create(model="m", messages=[USER])
        raise KeyError("mistake")

    loop._logged.clear()
    roll(loop_of(run), rows=5)
    assert [each.levelname for each in caplog.records if "mistake" in each.getMessage()].count("WARNING") == 1


@pytest.mark.parametrize("ending", ["returns", "is refused"])
def test_a_missing_reward_is_an_error_and_not_zero(loop_of, ending):
    async def run(client):
        await client.chat.completions.create(model="m", messages=[USER])
        if ending == "is refused":
            await client.chat.completions.create(model="m", messages=[TOO_MUCH])

    [result], _ = roll(loop_of(run), scored=False)
    assert (result.trajectory, result.dropped, result.failures) == (None, StopReason.AGENT_ERROR, 0)
    assert "without a reward" in result.cause


def test_a_posted_reward_is_a_reward(loop_of):
    async def run(client, base_url, api_key):
        await client.chat.completions.create(model="m", messages=[USER])
        await post_reward(base_url, api_key, {"reward": 0.0})

    [result], _ = roll(loop_of(run), scored=False)
    assert result.trajectory.stop_reason is StopReason.COMPLETED
    assert result.trajectory.rewards.steps == [(0, "agent", 0.0)]


@pytest.mark.parametrize("kind", ["coroutine", "thread"])
def test_an_agent_that_exits_does_not_end_the_process(loop_of, kind):
    async def run(client):
        await client.chat.completions.create(model="m", messages=[USER])
        sys.exit(0)

    def run_in_a_thread(client):
        client.chat.completions.create(model="m", messages=[USER])
        sys.exit(0)

    [result], _ = roll(loop_of(run if kind == "coroutine" else run_in_a_thread), scored=False)
    assert (result.trajectory, result.dropped) == (None, StopReason.AGENT_ERROR)


def test_an_agent_that_cancels_itself_has_failed(loop_of):
    async def run(client):
        await client.chat.completions.create(model="m", messages=[USER])
        raise asyncio.CancelledError

    results, _ = roll(loop_of(run), rows=2, scored=False)
    assert [each.dropped for each in results] == [StopReason.AGENT_ERROR] * 2


def test_an_agent_that_fails_before_it_asks_is_dropped_however_it_is_scored(loop_of):
    async def run(client, row):
        raise ModuleNotFoundError("no module named 'mine'")

    results, _ = roll(loop_of(run), rows=2)
    assert [each.dropped for each in results] == [StopReason.AGENT_ERROR] * 2
    with pytest.raises(TrainingStopped, match="no module named 'mine'"):
        check_survivors(results, 0.5)


def test_a_limit_of_openais_agents_sdk_is_its_rollouts_ending(loop_of):
    agents = pytest.importorskip("agents")

    @agents.function_tool
    def echo(text: str) -> str:
        """Repeats a text."""
        return text

    async def run(client):
        agents.set_tracing_disabled(True)
        model = agents.OpenAIChatCompletionsModel("m", client)
        agent = agents.Agent("an agent", model=model, tools=[echo])
        await agents.Runner.run(agent, "What is 2 + 3?", max_turns=2)

    [result], _ = roll(loop_of(run), lambda *_: says(call(text="a")), response_length=400, prompt_length=400)
    assert result.trajectory.stop_reason is StopReason.AGENT_ERROR
    assert result.trajectory.assistant_turns == 2


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


def test_another_servers_no_is_the_agents_error(loop_of):
    async def run(client):
        raise StatusError(400)

    [result], _ = roll(loop_of(run))
    assert (result.trajectory, result.dropped, result.failures) == (None, StopReason.AGENT_ERROR, 0)


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

    [result], _ = roll(loop_of(run))
    if isinstance(failure, KeyError):
        assert result.trajectory.stop_reason is StopReason.AGENT_ERROR
    else:
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
