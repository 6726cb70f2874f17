"""Environments behind servers: what they say is told, their failures are infrastructure, and no session is left over."""

import asyncio
import json

import pytest
from aiohttp import web
from peers_stage import NemoGym, OpenEnv, nemo_row
from wait_stage import until

from etude.environments import EnvironmentSession, InvalidAction
from etude.environments.loader import load_environments
from etude.environments.tasks import task_rows
from etude.errors import ConfigError, InfrastructureError
from etude.options import EnvironmentOptions
from etude.testing.environment_check import check_environment

MEANT = ("all tasks have one start", "nonsense earns")


def session_of(url, number=0, limit=None, **task):
    [entry] = load_environments([EnvironmentOptions(id=f"openenv:{url}", limit=limit)]).entries.values()
    return EnvironmentSession(entry, {"extra_info": {"task": task}, "group_seed": number, "request_id": "r"})


@pytest.mark.parametrize("tools", [False, True])
def test_a_server_of_openenv_conforms(tools):
    with OpenEnv(tools, capacity=20) as server:
        found = check_environment(EnvironmentOptions(id=f"openenv:{server.url.replace('http', 'ws')}"))
        assert [each for each in found.all if each.level.value != "ok" and not each.message.startswith(MEANT)] == []
        until(lambda: server.sessions == 0)


async def test_an_action_is_read_from_the_text_by_the_schema_of_the_server():
    with OpenEnv() as server:
        async with session_of(server.url, hint="of 2 to 9") as session:
            assert session.observation == "Guess a number of 2 to 9.\nEach turn, write number (integer)."
            silent, _ = await session.step("no idea")
            assert (silent.observation, silent.reward) == ("Each turn, write number (integer).", None)
            step, _ = await session.step("<think>3</think>I say 99")
            assert (step.observation, step.reward, step.done) == ("lower", 0.0, False)
            rewards = [(await session.step(str(number)))[0].reward for number in range(9, 1, -1) if not session.done]
            assert (rewards[-1], session.done) == (1.0, True)
            assert await session.score(completed=True) == (None, {})
        async with session_of(server.url) as session:
            assert (await session.score(completed=False))[0] == 0.0
            with pytest.raises(InfrastructureError, match="unlucky"):
                await session.step("13")


class Deep(OpenEnv):
    """Takes any JSON object as an action; answers `mirror` with JSON that no reader follows down."""

    async def _schema(self, request):
        return web.json_response({"action": {"properties": {"a": {}, "b": {}}}, "observation": {}, "state": {}})

    async def _play(self, request):
        socket = web.WebSocketResponse()
        await socket.prepare(request)
        async for message in socket:
            asked = json.loads(message.data)
            kind, data = self._mcp(asked["data"], {}) if asked["type"] == "mcp" else self._reset({"seed": 0}, {})
            text = json.dumps({"type": kind, "data": data})
            await socket.send_str("[" * 9999 if "mirror" in message.data else text)
        return socket


async def test_json_that_is_too_deep_is_no_action_and_from_a_server_infrastructure():
    with Deep() as server:
        async with session_of(server.url) as session:
            for nonsense in ('{"a": ' * 9999 + "1" + "}" * 9999, '{"a": NaN}', "[1]"):
                silent, _ = await session.step(nonsense)
                assert (silent.reward, silent.observation[:14]) == (None, "Each turn, wri")
            with pytest.raises(InfrastructureError, match="not JSON"):
                await session.step('{"a": "mirror"}')


class Liar(OpenEnv):
    lie = None

    def _guess(self, data, state):
        return self.lie


async def test_an_answer_that_is_no_observation_is_infrastructure():
    """One rollout is tried again; the run does not end, and no reward is made up."""
    seen = {"observation": {}, "reward": 1.0, "done": False}
    wrong = [
        [1],
        {"observation": {}, "done": False},
        seen | {"done": "false"},
        seen | {"observation": {"metadata": [1]}},
    ]
    with Liar() as server:
        for server.lie in [*(("observation", each) for each in wrong), ("state", seen), ("error", {})]:
            async with session_of(server.url) as session:
                with pytest.raises(InfrastructureError, match="step: unreadable answer"):
                    await session.step("5")


async def test_tools_of_a_server_are_called_in_steps_which_reward_them():
    with OpenEnv(tools=True) as server:
        async with session_of(server.url) as session:
            assert session.observation.startswith("Count to ")
            assert list(session.tools) == ["add"]
            response, reward, _ = await session.call_tool("add", {"k": 1})
            assert (response.text, reward, session.done) == ("1", 0.0, False)
            response, reward, _ = await session.call_tool("add", {"k": -1})
            assert (response.text, session.metrics["invalid_actions"]) == ("Error calling tool 'add': only upwards", 1)
            with pytest.raises(InfrastructureError, match="timed out"):
                await session.call_tool("add", {})
            response, reward, _ = await session.call_tool("add", {"k": int(session.observation[9:-1]) - 1})
            assert (reward, session.done) == (1.0, True)


async def test_sessions_wait_for_a_full_server_and_never_pass_the_limit():
    async def play(server, number, limit):
        async with session_of(server.url, number, limit) as session:
            await session.step("99")

    with OpenEnv(capacity=2) as server:
        await asyncio.gather(*(play(server, number, None) for number in range(4)))
        assert server.most == 2
    with OpenEnv() as server:
        await asyncio.gather(*(play(server, number, 3) for number in range(12)))
        assert server.most == 3


async def test_sessions_of_a_server_that_dies_are_neither_scored_nor_left():
    server, playing = OpenEnv(), []

    async def play(number):
        async with session_of(server.url, number, 64) as session:
            playing.append(session)
            while True:
                await session.step("99")
                await asyncio.sleep(0.01)

    tasks = [asyncio.ensure_future(play(number)) for number in range(64)]
    while len(playing) < 64:
        await asyncio.sleep(0.01)
    await asyncio.to_thread(server.stop)
    found = await asyncio.gather(*tasks, return_exceptions=True)
    assert {type(each) for each in found} == {InfrastructureError}
    assert server.sessions == 0
    assert all(session.environment._http.closed for session in playing)
    assert not playing[0].entry.limiter._held


@pytest.mark.parametrize("id", ["openenv:ws://127.0.0.1:9", "nemo_gym:http://127.0.0.1:9"])
def test_no_server_is_told_before_a_model_is_loaded(id):
    with pytest.raises(
        ConfigError, match=r"env\[0\]: \w+: no such server answers at http://127.0.0.1:9.*start it first"
    ):
        load_environments([EnvironmentOptions(id=id)])


# -- NeMo Gym ----------------------------------------------------------------------------------------------------


@pytest.fixture
def rows(tmp_path):
    file = tmp_path / "rows.jsonl"
    file.write_text("".join(json.dumps(nemo_row(first, first + 3)) + "\n" for first in range(4)))
    return str(file)


@pytest.mark.parametrize("mcp", [False, True])
def test_a_resources_server_conforms(mcp, rows):
    with NemoGym(mcp) as server:
        found = check_environment(EnvironmentOptions(id=f"nemo_gym:{server.url}", args={"dataset": rows}))
        assert [each for each in found.all if each.level.value != "ok"] == []


def test_calls_and_answer_are_what_is_verified(rows):
    async def play(session, server):
        async with session:
            assert [message["role"] for message in session.observation] == ["system", "user"]
            await session.call_tool("increment_counter", {"count": 1})
            with pytest.raises(InvalidAction, match="valid integer"):
                await session.call_tool("increment_counter", {"count": "x"})
            response, _, _ = await session.call_tool("increment_counter", {"count": 2})
            assert response.text == '{"success": true}'
            await session.step("<think>hm</think>Done.")
            assert await session.score(completed=True) == (1.0, {"seen": True})
        kinds = [item["type"] for item in server.verified[0]]
        assert kinds == 3 * ["function_call", "function_call_output"] + ["message"]
        assert server.verified[0][-1]["content"][0]["text"] == "Done."

    async def broken(session):
        async with session:
            await session.call_tool("increment_counter", {"count": 13})

    with NemoGym() as server:
        session = nemo_session(server, rows)
        assert [len(list(task_rows(session.entry, split, 64))) for split in ("train", "val")] == [4, 0]
        asyncio.run(play(session, server))
        with pytest.raises(InfrastructureError, match="500"):
            asyncio.run(broken(nemo_session(server, rows)))


def nemo_session(server, dataset):
    """A session of the data set's first row."""
    options = EnvironmentOptions(id=f"nemo_gym:{server.url}", args={"dataset": str(dataset)})
    [entry] = load_environments([options]).entries.values()
    return EnvironmentSession(entry, {**next(task_rows(entry, "train", None)), "group_seed": 0})


async def answer_and_score(session):
    async with session:
        await session.step("Done.")
        return await session.score(completed=True)


def test_the_reward_is_that_of_verify_whatever_the_row_and_its_other_numbers_are_called(tmp_path, monkeypatch):
    async def verify(self, request):
        return web.json_response({**await request.json(), "reward": 0.25, "score": 1.0, "seen": 2})

    monkeypatch.setattr(NemoGym, "_verify", verify)
    (tmp_path / "rows.jsonl").write_text(json.dumps(nemo_row(1, 2) | {"reward": None}) + "\n")
    with NemoGym() as server:
        session = nemo_session(server, tmp_path / "rows.jsonl")
        assert asyncio.run(answer_and_score(session)) == (0.25, {"seen": 2})


@pytest.mark.parametrize("answer", [{}, {"result": None}, {"result": {"tools": [3]}}, {"result": {}}, {"error": "no"}])
def test_an_unreadable_answer_of_a_resources_server_is_infrastructure(answer, rows, monkeypatch):
    async def mcp(self, request):
        return web.json_response(answer)

    monkeypatch.setattr(NemoGym, "_mcp", mcp)
    with NemoGym(mcp=True) as server, pytest.raises(InfrastructureError, match="tools/list: unreadable answer"):
        asyncio.run(answer_and_score(nemo_session(server, rows)))


@pytest.mark.parametrize("reward", [None, "1", float("nan"), [1]])
def test_a_verify_without_a_reward_is_infrastructure(reward, rows, monkeypatch):
    """One rollout is tried again; the run does not end."""

    async def verify(self, request):
        return web.json_response({"reward": reward})

    monkeypatch.setattr(NemoGym, "_verify", verify)
    with NemoGym() as server, pytest.raises(InfrastructureError, match="verify"):
        asyncio.run(answer_and_score(nemo_session(server, rows)))


def test_a_row_that_cannot_be_shown_is_told_with_its_line(tmp_path):
    row = nemo_row(1, 2)
    row["responses_create_params"]["input"].append({"type": "function_call", "name": "f", "arguments": "{}"})
    (tmp_path / "rows.jsonl").write_text(f"{json.dumps(nemo_row(1, 2))}\n{json.dumps(row)}\n")
    with NemoGym() as server:
        options = EnvironmentOptions(id=f"nemo_gym:{server.url}", args={"dataset": str(tmp_path / "rows.jsonl")})
        with pytest.raises(ConfigError, match="line 2: its input has more than texts"):
            load_environments([options])
