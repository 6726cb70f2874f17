"""The loop `openai_agent`: agents of every kind through the manager, and how each of their endings is read."""

import asyncio
import sys
import threading

import openai
import pytest
from agents_stage import CHAT, QUESTION, SAMPLING, Recorder, context, says
from gateway_stage import USER, answer, native, roll

from etude.agents import AgentLoopManager, AgentOptions
from etude.agents.base import register_agent_loops
from etude.agents.gateway import check_openai_agent, openai_agent
from etude.agents.gateway.loop import agent_of
from etude.errors import ConfigError, EtudeError
from etude.options import OpenAIAgentOptions
from etude.registry import load_plugins
from etude.trajectory import StopReason


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


# -- endings -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("wrong", ["1.0", float("nan"), [1.0], object(), 1e31])
def test_a_reward_is_a_number(loop_of, wrong):
    async def run(client):
        await client.chat.completions.create(model="m", messages=[USER])
        return wrong

    [result], _ = roll(loop_of(run), scored=False)
    assert (result.trajectory, result.dropped) == (None, StopReason.AGENT_ERROR)
    assert "agent 'run'" in result.cause


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
    with pytest.raises(ConfigError, match=r"has an unknown parameter 'clinet'; did you mean 'client'\?"):
        openai_agent("wrong")(lambda clinet: None)
    with pytest.raises(ConfigError, match="file not found"):
        check_openai_agent(OpenAIAgentOptions(function=f"{tmp_path}/none.py:run"))
    (tmp_path / "some.py").write_text("run = 5\n")
    with pytest.raises(ConfigError, match="the agent must be a function, got"):
        check_openai_agent(OpenAIAgentOptions(function=f"{tmp_path}/some.py:run"))
    with pytest.raises(ConfigError, match=r"some.py' is a file; name the object in it too"):
        check_openai_agent(OpenAIAgentOptions(function=f"{tmp_path}/some.py"))
    with pytest.raises(ConfigError, match="not both"):
        OpenAIAgentOptions(function="a.py:run", command=("a",))
    with pytest.raises(ConfigError, match="default_agent_loop=openai_agent needs"):
        AgentOptions(default_agent_loop="openai_agent")
    with pytest.raises(ConfigError, match="set either"):
        roll("openai_agent")
    (tmp_path / "agent.py").write_text(AGENT)
    unwalled = "- name: unwalled\n  _target_: etude.agents.OpenAIAgentLoop\n  sandbox: {enable: true}\n"
    (tmp_path / "loops.yaml").write_text(f"{unwalled}  function: {tmp_path}/agent.py:run\n")
    register_agent_loops(tmp_path / "loops.yaml")
    with pytest.raises(ConfigError, match=r"sandbox\.enable needs a command: a function runs in this process"):
        roll("unwalled")
    with pytest.raises(ConfigError, match="workspace needs a command"):
        agent_of(lambda client: None, (), "work", (), None)


def test_a_missing_openai_package_is_one_line(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(EtudeError, match=r"pip install 'etude\[openai\]'"):
        openai_agent("missing")(lambda client: None)
