"""The loop `openai_agent`: agents of every kind through the manager, and how each of their endings is read."""

import asyncio
import builtins
import contextlib
import importlib
import json
import os
import pathlib
import signal
import sys
import threading
import urllib.request

import aiohttp
import openai
import pytest
import requests
from agents_stage import CHAT, QUESTION, SAMPLING, TOKENIZER, Recorder, context, says
from gateway_stage import USER, answer, native, until

from etude.agents import AGENT_LOOPS, AgentLoopManager, AgentOptions, RolloutOptions
from etude.agents.gateway import OpenAIAgentLoop, check_openai_agent, openai_agent
from etude.agents.gateway.loop import broken_by
from etude.agents.loops import register_agent_loops
from etude.agents.options import OpenAIAgentOptions
from etude.chat import HermesToolParser
from etude.config import compose, to_options
from etude.errors import ConfigError, EngineError, EtudeError, InfrastructureError, ToolError, is_infrastructure
from etude.registry import load_plugins
from etude.trajectory import StopReason

httpx = importlib.import_module(
    openai.DefaultHttpxClient.__mro__[1].__module__.partition(".")[0]
)  # whichever openai uses
Group = getattr(builtins, "ExceptionGroup", None)
no_groups = pytest.mark.skipif(Group is None, reason="groups begin with Python 3.11")


@pytest.fixture
def loop_of(monkeypatch):
    """Registers an agent for one test, and gives its name."""
    monkeypatch.setattr(AGENT_LOOPS, "_items", dict(AGENT_LOOPS._items))

    def enter(function=None, *, command=()):
        def loop(**given):
            return OpenAIAgentLoop(**given, function=function, command=command)

        AGENT_LOOPS.register("an_agent")(loop)
        return "an_agent"

    return enter


def roll(name, script=None, *, engine=None, rows=1, **given):
    """(results, engine) of rows that the agent `name` rolls out."""
    engine = engine or Recorder(script or (lambda *_: says("5")))
    manager = AgentLoopManager(context(**given), engine)
    given_rows = [
        {"raw_prompt": QUESTION, "agent_name": name, "uid": f"u{i}", "extra_info": {"index": i}} for i in range(rows)
    ]
    return asyncio.run(manager.generate(given_rows, SAMPLING)), engine


def test_an_asynchronous_agent(loop_of):
    seen = {}

    async def run(client, row, base_url, model):
        made = await client.chat.completions.create(model=model, messages=row["raw_prompt"])
        seen.update(row=row, base_url=base_url, content=made.choices[0].message.content)
        return 0.5

    [result], engine = roll(loop_of(run))
    assert result.trajectory.prompt_ids == CHAT.initial_ids(QUESTION)
    assert result.trajectory.response_ids == says("5")
    assert result.trajectory.response_mask == [1] * len(says("5"))
    assert result.trajectory.rewards.score == 0.5
    assert result.trajectory.stop_reason is StopReason.COMPLETED
    assert result.trajectory.sampling == {"temperature": 1.0, "top_p": 1.0, "top_k": -1}
    assert seen["content"] == "5"
    assert seen["row"]["extra_info"] == {"index": 0}
    assert seen["base_url"].startswith("http://127.0.0.1:")
    assert engine.opened == engine.closed == ["u0/0/0"]


def test_an_agent_that_makes_its_own_client_in_a_thread(loop_of):
    threads = set()

    def run(base_url, api_key, row):
        threads.add(threading.current_thread())
        with openai.OpenAI(base_url=base_url, api_key=api_key) as client:
            client.chat.completions.create(model="gpt-whatever", messages=row["raw_prompt"])

    [result], _ = roll(loop_of(run))
    assert result.trajectory.response_ids == says("5")
    assert result.trajectory.rewards.score is None
    assert threading.main_thread() not in threads


def test_an_agent_in_a_thread_is_given_a_synchronous_client(loop_of):
    def run(client, row):
        return client.chat.completions.create(model="m", messages=row["raw_prompt"]).usage.completion_tokens

    [result], _ = roll(loop_of(run))
    assert result.trajectory.rewards.score == 2.0


def test_an_object_that_is_called_asynchronously(loop_of):
    class Agent:
        async def __call__(self, client):
            await client.chat.completions.create(model="m", messages=[USER])

    [result], _ = roll(loop_of(Agent()))
    assert result.trajectory.response_ids == says("5")


def test_many_trajectories_at_once_each_with_its_own_session(loop_of):
    async def run(client, row):
        index = row["extra_info"]["index"]
        messages = [{"role": "user", "content": f"{index}?"}]
        first = (await client.chat.completions.create(model="m", messages=messages)).choices[0]
        await client.chat.completions.create(model="m", messages=[*messages, answer(first), USER])
        return index

    results, engine = roll(loop_of(run), rows=64, engine=Recorder(lambda *_: says("5"), latency=0.05))
    for index, result in enumerate(results):
        assert result.trajectory.rewards.score == index
        assert result.trajectory.prompt_ids == CHAT.initial_ids([{"role": "user", "content": f"{index}?"}])
        assert result.trajectory.assistant_turns == 2
    assert sorted(engine.opened) == sorted(engine.closed)


@pytest.mark.parametrize("kind", ["coroutines", "threads"])
@pytest.mark.parametrize("deterministic", [False, True])
def test_hundreds_that_think_at_once_hold_nobody_up(loop_of, kind, deterministic):
    async def run(client):
        await client.chat.completions.create(model="m", messages=[USER], max_tokens=2)

    def run_in_a_thread(client):
        client.chat.completions.create(model="m", messages=[USER], max_tokens=2)

    engine = native(deterministic=deterministic, max_num_seqs=512)
    results, _ = roll(loop_of(run if kind == "coroutines" else run_in_a_thread), rows=300, engine=engine)
    assert all(result.trajectory.response_length >= 1 for result in results)
    assert engine._rows == {}


def test_lanes_that_come_and_go_find_a_server_and_clients(loop_of):
    async def run(client, row):
        await asyncio.sleep(0.001 * (row["extra_info"]["index"] % 3))
        await client.chat.completions.create(model="m", messages=[USER])

    results, _ = roll(loop_of(run), rows=24, max_concurrent_trajectories=2)
    assert all(result.trajectory.response_ids == says("5") for result in results)


def test_a_rewritten_history_leaves_earlier_sequences(loop_of):
    async def run(client, row):
        await client.chat.completions.create(model="m", messages=row["raw_prompt"])
        await client.chat.completions.create(model="m", messages=[USER])
        return 1.0

    [result], _ = roll(loop_of(run))
    [earlier] = result.earlier
    assert earlier.prompt_ids == CHAT.initial_ids(QUESTION)
    assert result.trajectory.prompt_ids == CHAT.initial_ids([USER])
    assert result.trajectory.rewards.score == 1.0


# -- endings -------------------------------------------------------------------------------------------------------


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
            await client.chat.completions.create(model="m", messages=[USER], response_format={"type": "json_object"})
        return 1.0

    with pytest.raises(
        EtudeError, match=r"none of its requests was answered; the last one was told: response_format: "
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


@pytest.mark.parametrize("wrong", ["1.0", float("nan"), [1.0], object()])
def test_a_reward_is_a_number(loop_of, wrong):
    async def run(client):
        await client.chat.completions.create(model="m", messages=[USER])
        return wrong

    with pytest.raises(EtudeError, match="agent 'run'"):
        roll(loop_of(run))


@pytest.mark.parametrize("kind", ["coroutine", "thread", "command"])
def test_a_trajectory_that_takes_too_long_ends_with_all_it_started(loop_of, kind, tmp_path):
    lasting, left = threading.Event(), tmp_path / "left"

    async def run(client):
        try:
            await client.chat.completions.create(model="m", messages=[USER], max_tokens=900)
        finally:
            lasting.set()

    def run_in_a_thread(client):
        try:
            client.chat.completions.create(model="m", messages=[USER], max_tokens=900)
        except openai.OpenAIError:
            lasting.set()

    command = [sys.executable, "-c", f"import time, pathlib; time.sleep(2); pathlib.Path({str(left)!r}).touch()"]
    engine = native()
    if kind == "command":
        name = loop_of(command=command)
    else:
        name = loop_of(run if kind == "coroutine" else run_in_a_thread)
    given = {"response_length": 950, "prompt_length": 60, "trajectory_timeout": 0.3, "infrastructure_retries": 0}
    [result], _ = roll(name, engine=engine, **given)
    assert (result.trajectory, result.dropped) == (None, StopReason.INFRASTRUCTURE)
    assert engine._rows == {}
    assert kind == "command" or lasting.wait(10)
    assert not left.exists()


def test_cancelling_the_rollout_ends_agents_and_requests(loop_of):
    ended = []

    async def run(client):
        try:
            await client.chat.completions.create(model="m", messages=[USER], max_tokens=900)
        finally:
            ended.append(1)

    engine = native()
    manager = AgentLoopManager(context(response_length=950, prompt_length=60), engine)
    name = loop_of(run)

    async def main():
        rows = [{"raw_prompt": QUESTION, "agent_name": name, "uid": str(i)} for i in range(3)]
        task = asyncio.ensure_future(manager.generate(rows, SAMPLING))
        while sum(row.request is not None for row in engine._rows.values()) < 3:
            await asyncio.sleep(0.005)
        task.cancel()
        await asyncio.wait({task}, timeout=30)
        assert task.cancelled()

    asyncio.run(main())
    assert len(ended) == 3
    assert engine._rows == {}


# -- commands ------------------------------------------------------------------------------------------------------

PROGRAM = """
import json, os, sys, urllib.request
row = json.load(sys.stdin)
body = {"model": os.environ["OPENAI_MODEL"], "messages": row["raw_prompt"]}
request = urllib.request.Request(
    os.environ["OPENAI_BASE_URL"] + "/chat/completions",
    json.dumps(body).encode(),
    {"Authorization": "Bearer " + os.environ["OPENAI_API_KEY"], "Content-Type": "application/json"},
)
made = json.load(urllib.request.urlopen(request))
print("said", made["choices"][0]["message"]["content"])
print(sorted(os.environ), file=sys.stderr)
"""


def test_a_command_finds_its_policy_in_a_clean_environment(loop_of, monkeypatch):
    monkeypatch.setenv("A_SECRET", "x")
    program = PROGRAM + "assert 'A_SECRET' not in os.environ\nprint(0.25)\n"
    [result], _ = roll(loop_of(command=[sys.executable, "-c", program]))
    assert result.trajectory.response_ids == says("5")
    assert result.trajectory.rewards.score == 0.25


def test_a_command_without_a_number_gives_no_reward(loop_of):
    [result], _ = roll(loop_of(command=[sys.executable, "-c", PROGRAM]))
    assert result.trajectory.rewards.score is None


def test_a_command_that_fails_is_the_users_bug(loop_of):
    with pytest.raises(EtudeError, match=r"ended with status 3: oh no"):
        roll(loop_of(command=[sys.executable, "-c", "import sys; print('oh  no', file=sys.stderr); sys.exit(3)"]))


def test_a_command_that_does_not_exist(loop_of):
    with pytest.raises(EtudeError, match="cannot be started"):
        roll(loop_of(command=["/no/such/program"]))


def test_a_file_that_is_no_program_is_told_at_once(loop_of, tmp_path):
    plain = tmp_path / "agent"
    plain.write_text("echo 1\n")
    with pytest.raises(ConfigError, match="cannot be started"):
        check_openai_agent(OpenAIAgentOptions(command=(str(plain),)))
    plain.chmod(0o755)
    check_openai_agent(OpenAIAgentOptions(command=(str(plain),)))
    with pytest.raises(EtudeError, match=r"cannot be started: .*Exec format error"):
        roll(loop_of(command=[str(plain)]))


def runs(pid):
    """Whether the process has not ended; it may still wait for somebody to reap it."""
    try:
        return pathlib.Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


@pytest.mark.parametrize("leaves", [False, True], ids=["its group", "a session of its own"])
def test_what_a_command_leaves_behind_holds_nobody_up(loop_of, leaves, tmp_path):
    child = f"import os, time, pathlib; pathlib.Path({str(tmp_path / 'pid')!r}).write_text(str(os.getpid())); time.sleep(60)"
    program = (
        PROGRAM
        + "import subprocess, pathlib, time\n"
        + f"subprocess.Popen([sys.executable, '-c', {child!r}], start_new_session={leaves})\n"
        + f"while not pathlib.Path({str(tmp_path / 'pid')!r}).exists(): time.sleep(0.01)\n"
        + "print(0.5)\n"
    )
    before = set(os.listdir("/proc/self/fd"))
    [result], _ = roll(loop_of(command=[sys.executable, "-c", program]), trajectory_timeout=50.0)
    assert result.trajectory.rewards.score == 0.5
    assert len(os.listdir("/proc/self/fd")) <= len(before) + 1
    pid = int((tmp_path / "pid").read_text())
    if leaves:
        os.kill(pid, signal.SIGKILL)
    else:
        asyncio.run(until(lambda: not runs(pid)))


def test_a_command_may_say_much_and_read_nothing(loop_of):
    program = "print('x' * 3_000_000)\n" + PROGRAM.replace(
        "row = json.load(sys.stdin)", "row = {'raw_prompt': [{'role': 'user', 'content': 'a'}]}"
    )
    [result], _ = roll(loop_of(command=[sys.executable, "-c", program]))
    assert result.trajectory.response_ids == says("5")


# -- naming an agent -----------------------------------------------------------------------------------------------


def test_a_plugin_file_registers_an_agent(loop_of, tmp_path):
    (tmp_path / "plug.py").write_text(
        "from etude.agents.gateway import openai_agent\n"
        "@openai_agent('plugged')\n"
        "async def run(client, row):\n"
        "    await client.chat.completions.create(model='m', messages=row['raw_prompt'])\n"
    )
    load_plugins([str(tmp_path / "plug.py")])
    [result], _ = roll("plugged")
    assert result.trajectory.response_ids == says("5")
    with pytest.raises(ConfigError, match="already registered"):
        openai_agent("plugged")(lambda client: None)


AGENT = "async def run(client, row):\n    await client.chat.completions.create(model='m', messages=row['raw_prompt'])\n"


def test_the_configuration_names_an_agent_that_knows_nothing_of_this(tmp_path):
    (tmp_path / "agent.py").write_text(AGENT)
    config = compose(
        None,
        [
            f"actor_rollout_ref.rollout.agent.openai_agent.function={tmp_path}/agent.py:run",
            "actor_rollout_ref.rollout.agent.default_agent_loop=openai_agent",
        ],
    )
    options = to_options(RolloutOptions, config.actor_rollout_ref.rollout, "", ignore=("tool_config", "max_turns"))
    check_openai_agent(options.agent.openai_agent)
    [result], _ = roll(None, agent=options.agent)
    assert result.trajectory.response_ids == says("5")


def test_a_command_in_the_configuration():
    command = compose(None, ["actor_rollout_ref.rollout.agent.openai_agent.command=[python,agent.py]"])
    options = to_options(OpenAIAgentOptions, command.actor_rollout_ref.rollout.agent.openai_agent)
    assert options.command == ("python", "agent.py")


def test_a_loops_file_names_agents_too(loop_of, tmp_path):
    (tmp_path / "agent.py").write_text(AGENT)
    (tmp_path / "loops.yaml").write_text(
        f"- name: from_a_file\n  _target_: etude.agents.OpenAIAgentLoop\n  function: {tmp_path}/agent.py:run\n"
    )
    loop_of(lambda client: None)
    register_agent_loops(tmp_path / "loops.yaml")
    [result], _ = roll("from_a_file")
    assert result.trajectory.response_ids == says("5")


def test_wrong_agents_are_refused_before_anything_runs(tmp_path):
    with pytest.raises(ConfigError, match=r"wants a parameter 'clinet'; did you mean 'client'\?"):
        openai_agent("wrong")(lambda clinet: None)
    with pytest.raises(ConfigError, match="file not found"):
        check_openai_agent(OpenAIAgentOptions(function=f"{tmp_path}/none.py:run"))
    (tmp_path / "some.py").write_text("run = 5\n")
    with pytest.raises(ConfigError, match="is no function"):
        check_openai_agent(OpenAIAgentOptions(function=f"{tmp_path}/some.py:run"))
    with pytest.raises(ConfigError, match="not both"):
        OpenAIAgentOptions(function="a.py:run", command=("a",))
    with pytest.raises(ConfigError, match="default_agent_loop=openai_agent needs"):
        AgentOptions(default_agent_loop="openai_agent")
    with pytest.raises(ConfigError, match="set either"):
        roll("openai_agent")


def test_a_missing_openai_package_is_one_line(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(EtudeError, match=r"pip install 'etude\[openai\]'"):
        openai_agent("missing")(lambda client: None)
