"""Recordings: what was recorded is served back without the tool, exactly, or one error says what is missing."""

import asyncio
import json
import multiprocessing
import sqlite3

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image
from session_stage import call, schema

from etude.errors import ConfigError, DataError, InfrastructureError, ToolError
from etude.schemas import ToolResponse
from etude.tools import BaseTool, ToolRuntime, ToolSession
from etude.tools.call import Source
from etude.tools.recording import MissingCall

run = asyncio.run  # in real time, as files are written in a thread


class Ledger(BaseTool):
    """A stateful service: sums what it is told, from the row's `start`; `touched` lists the methods that ran."""

    def __init__(self, **config):
        super().__init__({"timeout": 1.0} | config, schema("ledger"))
        self.sums, self.touched, self.broken = {}, [], set()

    async def create(self, instance_id=None, start=0, **create_kwargs):
        self.touched.append("create")
        self.sums[instance_id] = start
        return instance_id, ToolResponse(text=f"starts at {start}" if start else None)

    async def execute(self, instance_id, parameters, factor=1, **execute_kwargs):
        self.touched.append("execute")
        add = parameters.get("add", 0)
        if add in self.broken:
            raise ConnectionError("the service is down")
        if add == 13:
            raise ToolError("unlucky")
        if add == 14:
            raise ValueError("odd")
        self.sums[instance_id] += factor * add
        answer = ToolResponse(text=str(self.sums[instance_id])), 0.1 * add, {"n": add}
        await asyncio.sleep(0.001 * (add % 3))
        return answer

    async def calc_reward(self, instance_id, weight=1, **calc_reward_kwargs):
        self.touched.append("calc_reward")
        return float(weight * self.sums[instance_id])

    async def release(self, instance_id, **release_kwargs):
        self.touched.append("release")
        del self.sums[instance_id]


def add(*numbers):
    return [call("ledger", json.dumps({"add": number})) for number in numbers]


async def play(tool, turns, row=None, request_id="r", reward=True):
    """Everything that a trajectory got to see."""
    rows = {} if row is None else {"ledger": row}
    async with ToolSession({"ledger": tool}, rows, request_id=request_id) as session:
        seen = [response.text for response in session.initial_responses]
        for number, turn in enumerate(turns):
            for outcome in await session.execute(add(*turn), number):
                seen.append((outcome.response.text, outcome.reward, outcome.metrics, outcome.error))
        return seen, await session.calc_rewards() if reward else None


ROW = {
    "create_kwargs": {"start": 100},
    "execute_kwargs": {"factor": 2},
    "calc_reward_kwargs": {"weight": 3},
    "release_kwargs": {"x": 1},
}


@pytest.mark.parametrize("mode", ["strict", "order"])
@pytest.mark.parametrize("row", [None, {}, ROW])
def test_a_trajectory_is_replayed_without_the_tool(tmp_path, mode, row):
    path = str(tmp_path / "calls.db")
    turns = [[1, 2], [13, 14], [1]]
    live = run(play(Ledger(record=path), turns, row))
    tool = Ledger(replay={"path": path, "mode": mode})
    assert run(play(tool, turns, row)) == live
    assert tool.touched == []


def rows_of(path, columns="*"):
    """The table of recorded calls, in the order in which they were written."""
    connection = sqlite3.connect(path)
    rows = connection.execute(f"SELECT {columns} FROM calls ORDER BY rowid").fetchall()
    connection.close()
    return rows


async def test_every_call_is_written_as_it_was(tmp_path):
    path = tmp_path / "calls.db"
    tool = Ledger(record=str(path))
    tool.broken = {6}
    await play(tool, [[1], [13]], ROW, "0-0/0/0")
    with pytest.raises(InfrastructureError):
        await play(tool, [[6]], None, "0-1/0/0")
    rows = rows_of(path, "tool, trajectory, event, row, asked, answer")
    assert [row[:5] for row in rows] == [
        ("ledger", "0-0/0/0", "create", '{"start":100}', "create"),
        ("ledger", "0-0/0/0", "0", '{"start":100}', 'call [{"add":1},{"factor":2}]'),
        ("ledger", "0-0/0/0", "1", '{"start":100}', 'call [{"add":13},{"factor":2}]'),
        ("ledger", "0-0/0/0", "calc_reward", '{"start":100}', 'calc_reward {"weight":3}'),
        ("ledger", "0-1/0/0", "create", "{}", "create"),  # its call broke, which is not recorded
    ]
    assert [json.loads(row[5]) for row in rows] == [
        {"response": {"text": "starts at 100"}, "reward": 0.0},
        {"response": {"text": "102"}, "reward": 0.1, "metrics": {"n": 1}},
        {"response": {"text": "unlucky"}, "reward": 0.0, "error": "tool"},
        {"reward": 306.0},
        {"reward": 0.0},
    ]


def recorded(tmp_path, *trajectories):
    """A recording of (turns, row) each."""
    path = str(tmp_path / "calls.db")
    tool = Ledger(record=path)

    async def main():
        for i, (turns, row) in enumerate(trajectories):
            await play(tool, turns, row, f"r{i}")

    run(main())
    return path


def test_strict_finds_a_call_by_what_was_asked(tmp_path):
    path = recorded(tmp_path, ([[1], [2]], None), ([[5]], {"create_kwargs": {"start": 7}}))
    assert run(play(Ledger(replay=path), [[1]], None, "other", reward=False))[0][0][0] == "1"

    def missing(turns, row=None):
        with pytest.raises(MissingCall) as caught:
            run(play(Ledger(replay=path), turns, row))
        assert "\n" not in str(caught.value)
        return str(caught.value)

    assert f"tool 'ledger': {path} holds no call [{{\"add\":9}},{{}}]" in missing([[9]])
    assert 'holds no create, with create_kwargs {"start":8}' in missing([[5]], {"create_kwargs": {"start": 8}})
    missing([[5]])  # asked under other create_kwargs only
    missing([[1]], {"execute_kwargs": {"factor": 2}})
    assert 'no calc_reward {"weight":9}' in missing([[1], [2]], {"calc_reward_kwargs": {"weight": 9}})


def test_strict_serves_a_call_out_of_order_only_where_its_answer_is_beyond_doubt(tmp_path):
    path = recorded(tmp_path, ([[3], [4]], None), ([[4], [3]], None), ([[7]], None))
    texts = [seen[0] for seen in run(play(Ledger(replay=path), [[4], [3]], reward=False))[0]]
    assert texts == ["4", "7"]  # the history tells the two apart
    with pytest.raises(MissingCall, match="different answers"):
        run(play(Ledger(replay=path), [[7], [3]], reward=False))
    assert (
        run(play(Ledger(replay=path), [[3], [7]], reward=False))[0][1][0] == "7"
    )  # one answer only: recorded as first


class Clock(Ledger):
    """A service whose answers depend on when it is asked."""

    async def execute(self, instance_id, parameters, **execute_kwargs):
        self.touched.append("execute")
        return ToolResponse(text=str(len(self.touched))), 0.0, {}


@pytest.mark.parametrize("mode", ["strict", "order"])
def test_of_equal_trajectories_each_gets_back_its_own_answers(tmp_path, mode):
    path = str(tmp_path / "calls.db")

    async def of_both(tool, names):
        return {name: (await play(tool, [[1], [1]], None, name))[0] for name in names}

    live = run(of_both(Clock(record=path), ["r0", "r1"]))
    assert live["r0"] != live["r1"]
    assert run(of_both(Clock(replay={"path": path, "mode": mode}), ["r1", "r0"])) == live


def test_order_finds_a_call_by_its_number_whatever_is_asked(tmp_path):
    path = recorded(tmp_path, ([[1], [2]], None), ([[5]], None))
    tool = Ledger(replay={"path": path, "mode": "order"})
    assert run(play(tool, [[9]], None, "r1"))[0][0][0] == "5"
    assert run(play(tool, [[9], [9]], None, "r0"))[0][1][0] == "3"
    with pytest.raises(MissingCall, match="holds no 2 of r0"):
        run(play(tool, [[9, 9], [9]], None, "r0"))
    with pytest.raises(MissingCall, match="different answers"):
        run(play(tool, [[9]], None, "elsewhere"))


def test_order_serves_another_trajectory_of_the_same_row_where_all_agree(tmp_path):
    first, second = {"create_kwargs": {"start": 1}}, {"create_kwargs": {"start": 2}}
    path = recorded(tmp_path, ([[1]], first), ([[1]], second), ([[1]], first))
    tool = Ledger(replay={"path": path, "mode": "order"})
    texts = [run(play(tool, [[0]], row, f"new{i}"))[0][0] for i, row in enumerate([second, first, first])]
    assert texts == ["starts at 2", "starts at 1", "starts at 1"]


def test_a_trajectory_that_infrastructure_broke_is_not_served(tmp_path):
    path = str(tmp_path / "calls.db")
    tool = Ledger(record=path, max_retries=0)
    tool.broken = {2}

    async def main():
        with pytest.raises(Exception, match="down"):
            await play(tool, [[1], [2]], None, "r/0")
        tool.broken = set()
        return await play(tool, [[1], [2]], None, "r/1")

    live = run(main())
    assert run(play(Ledger(replay=path), [[1], [2]], None, "r/0")) == live
    assert run(play(Ledger(replay={"path": path, "mode": "order"}), [[1], [2]], None, "r/0")) == live


class Pure(BaseTool):
    """Answers by its arguments alone; `fails` once if told to."""

    def __init__(self, *, fails=False, **config):
        super().__init__(config, schema("ledger"))
        self.calls, self.fails = 0, fails

    async def execute(self, instance_id, parameters, **kwargs):
        self.calls += 1
        if self.fails and self.calls == 1:
            raise ConnectionError("once")
        return str(parameters), 0.5, {}


def test_retries_and_the_cache_leave_a_recording_that_replays(tmp_path):
    path = str(tmp_path / "calls.db")
    live = run(play(Pure(fails=True, record=path, cache={}, max_retries=1, retry_delay=0), [[1], [1, 1]]))
    for mode in ("strict", "order"):
        tool = Pure(replay={"path": path, "mode": mode})
        assert run(play(tool, [[1], [1, 1]])) == live
        assert tool.calls == 0


@pytest.mark.parametrize("mode", ["strict", "order"])
@pytest.mark.parametrize("more", [{}, {"max_retries": 20, "retry_delay": 0, "on_exception": "infrastructure"}])
def test_calls_that_a_fault_kept_from_the_tool_are_not_recorded_and_not_missed(tmp_path, mode, more):
    path = str(tmp_path / "calls.db")
    faults = {"faults": {"error": 0.4, "garbage": 0.3, "seed": 3}, **more}
    turns = [[n, n + 1] for n in range(10)]
    live = run(play(Ledger(record=path, **faults), turns))
    tool = Ledger(replay={"path": path, "mode": mode}, **faults)
    assert run(play(tool, turns)) == live
    assert tool.touched == []


def test_faults_are_not_recorded_and_are_made_anew(tmp_path):
    path = str(tmp_path / "calls.db")
    faults = {"garbage": 0.5, "seed": 3}
    turns = [[n] for n in range(12)]
    live = run(play(Ledger(record=path, faults=faults), turns))
    assert run(play(Ledger(replay=path, faults=faults), turns)) == live
    plain = run(play(Ledger(replay=path), turns))
    assert plain == run(play(Ledger(), turns))
    assert plain != live


def test_media_are_recorded_or_the_run_stops(tmp_path):
    class Camera(BaseTool):
        picture: object = Image.new("RGB", (2, 2), (9, 8, 7))

        async def execute(self, instance_id, parameters, **kwargs):
            return ToolResponse(image=[self.picture]), 0.0, {}

    def see(**config):
        async def main():
            camera = Camera(config, schema("camera"))
            async with ToolSession({"camera": camera}, request_id="r") as session:
                return (await session.execute([call("camera")], 0))[0]

        return run(main())

    see(record=str(tmp_path / "a.db"))
    replayed = see(replay=str(tmp_path / "a.db"))
    assert replayed.source is Source.REPLAY
    assert replayed.response.image[0].tobytes() == Camera.picture.tobytes()
    Camera.picture = object()
    with pytest.raises(ConfigError, match="tool 'camera': its answer cannot be recorded"):
        see(record=str(tmp_path / "b.db"))


def test_a_file_that_cannot_be_used_is_one_error(tmp_path):
    with pytest.raises(DataError, match=r"absent.db cannot be read"):
        ToolRuntime.of(Ledger(replay=str(tmp_path / "absent.db")))
    assert not (tmp_path / "absent.db").exists()
    (tmp_path / "calls.db").touch()
    with pytest.raises(DataError, match="holds no call of this tool"):
        ToolRuntime.of(Ledger(replay=str(tmp_path / "calls.db")))
    text = tmp_path / "calls.jsonl"
    text.write_text('{"tool": "ledger"}\n' * 100)
    for path in (text, tmp_path):
        with pytest.raises(ConfigError, match="not a cache file"):
            ToolRuntime.of(Ledger(record=str(path)))
    for config in ({"record": "a", "replay": "b"}, {"record": "a", "cache": {"path": "b", "only": True}}):
        with pytest.raises(ConfigError, match="exclude each other"):
            ToolRuntime.of(Ledger(**config))
    with pytest.raises(ConfigError, match="only needs a path"):
        ToolRuntime.of(Ledger(cache={"only": True}))


@pytest.mark.parametrize(
    "answer", ["{", "[]", '{"reward": NaN}', '{"reward": "1"}', '{"response": {"text": 3}}', '{"response": 3}']
)
def test_an_answer_that_makes_no_sense_ends_the_run(tmp_path, answer):
    path = recorded(tmp_path, ([[1]], None))
    connection = sqlite3.connect(path)
    connection.execute("UPDATE calls SET answer = ? WHERE event = '0'", (answer,))
    connection.commit()
    connection.close()
    with pytest.raises(MissingCall, match="is damaged"):
        run(play(Ledger(replay=path), [[1]]))


def test_a_cache_is_served_in_place_of_its_tool_too(tmp_path):
    """By what its calls were asked; it holds no initial responses and no final rewards."""
    path = str(tmp_path / "calls.db")
    live = run(play(Pure(cache={"path": path}), [[1], [2]]))
    tool = Pure(cache={"path": path, "only": True})
    assert run(play(tool, [[2], [1]]))[0] == live[0][::-1]
    with pytest.raises(MissingCall):
        run(play(tool, [[3]]))
    assert tool.calls == 0


def test_a_recording_is_served_by_a_read_only_cache(tmp_path):
    path = str(tmp_path / "calls.db")
    live = run(play(Ledger(record=path), [[1], [13]], ROW))
    tool = Ledger(cache={"path": path, "only": True})
    assert run(play(tool, [[1], [13]], ROW)) == live
    assert tool.touched == []


def _record_many(path, name):
    async def main():
        await asyncio.gather(*(play(Ledger(record=path), [[i % 5] * 3] * 3, None, f"{name}-{i}") for i in range(10)))

    asyncio.run(main())


def test_processes_write_one_file(tmp_path):
    path = str(tmp_path / "calls.db")
    context = multiprocessing.get_context("spawn")
    processes = [context.Process(target=_record_many, args=(path, name)) for name in "ab"]
    for process in processes:
        process.start()
    for process in processes:
        process.join(60)
    assert len(rows_of(path)) == 2 * 10 * (1 + 9 + 1)
    assert run(play(Ledger(replay=path), [[2] * 3] * 3))[1] == {"ledger": 18.0}


@settings(max_examples=40)
@given(
    trajectories=st.lists(
        st.tuples(
            st.lists(st.lists(st.integers(0, 14), min_size=1, max_size=3), max_size=3),
            st.sampled_from([None, {}, {"create_kwargs": {"start": 5}}, ROW]),
        ),
        min_size=1,
        max_size=5,
    ),
    order=st.randoms(use_true_random=False),
)
def test_what_was_recorded_replays_whatever_the_order_of_trajectories(tmp_path_factory, trajectories, order):
    path = str(tmp_path_factory.mktemp("replay") / "calls.db")
    first = Ledger(record=path)

    async def all_of(tool):
        numbers = list(range(len(trajectories)))
        order.shuffle(numbers)
        tasks = {i: asyncio.ensure_future(play(tool, *trajectories[i], f"r{i}")) for i in numbers}
        return [await task for _, task in sorted(tasks.items())]

    live = run(all_of(first))
    for mode in ("strict", "order"):
        tool = Ledger(replay={"path": path, "mode": mode})
        if any(turns or row is not None for turns, row in trajectories):
            assert run(all_of(tool)) == live
        assert tool.touched == []
