"""The built-in managers: what a scorer sees, scorers with weights, batches, processes, rates, workers of a cluster."""

import asyncio
import os
import shutil
import threading
import time

import numpy as np
import psutil
import pytest
import torch
from test_rewards_manager import built, row, trajectory
from wait_stage import is_running, until, until_async

from etude.errors import ConfigError, InfrastructureError
from etude.rewards import TrajectoryScorer, load_compute_score, load_rewards, usage
from etude.rewards.throttled import RateOptions
from etude.trainer.metrics import is_success
from etude.trajectory import StopReason, ToolCallRecord


def score(made, of_row, of_manager):
    asyncio.run(TrajectoryScorer(of_manager)(made, of_row))
    return made.rewards


def rewards_of_all(of_manager, count):
    """The rewards of so many rollouts that are scored together, and the errors."""
    made = [trajectory((f"{number}", "")) for number in range(count)]
    scorer = TrajectoryScorer(of_manager)

    async def run():
        return await asyncio.gather(*(scorer(each, row()) for each in made), return_exceptions=True)

    errors = asyncio.run(run())
    return [each.rewards for each in made], [each for each in errors if each is not None]


def score_all(of_manager, count):
    rewards, errors = rewards_of_all(of_manager, count)
    return [each.score for each in rewards], errors


def in_file(tmp_path, source, name="compute_score", **kwargs):
    file = tmp_path / f"mine{len(list(tmp_path.iterdir()))}.py"
    file.write_text(source)
    return load_compute_score(str(file), name, kwargs)


@pytest.mark.parametrize(
    ("score_text", "seen"), [("assistant", "one\ntwo"), ("final_turn", "two"), ("full", "one<#### 42two<")]
)
def test_the_text_that_a_scorer_gets(score_text, seen):
    texts = []
    made = trajectory(("one", "#### 42"), ("two", ""))
    score(made, row(), built(scorer=lambda solution_str, **_: texts.append(solution_str) or 0.0, score_text=score_text))
    assert texts == [seen]


def test_another_text_needs_a_manager_that_decodes_it():
    with pytest.raises(ConfigError, match=r"score_text=full: .*test_documents_manager.* decodes the response itself"):
        built("test_documents_manager", score_text="full")


def test_a_scorer_that_asks_for_the_trajectory_gets_a_copy_of_it(tmp_path):
    function = in_file(
        tmp_path,
        """
def compute_score(solution_str, trajectory):
    call, = trajectory.tool_calls
    trajectory.messages[0]["content"] = "changed"
    trajectory.tool_rewards["calc"] = 7.0
    call.metrics["x"] = 1
    turn, last = trajectory.turns
    return {"score": len(trajectory.messages), "stop": trajectory.stop_reason, "turns": trajectory.assistant_turns,
            "call": [call.name, call.arguments, call.response], "step": trajectory.step_rewards, "of": turn["tool_calls"],
            "last": [last["message"]["content"], last["tool_calls"]], "tokens": trajectory.sampled_tokens}
""",
    )
    made = trajectory(("one", "42"), ("two", ""))
    made.messages = [
        {"role": "user", "content": "q"},
        {"role": "assistant", "content": "one"},
        {"role": "tool", "content": "42"},
        {"role": "assistant", "content": "two"},
    ]
    call = ToolCallRecord(0, "calc", "{}", "42", reward=0.5)
    made.tool_calls, made.rewards.steps, made.rewards.final = [call], [(0, "calc", 0.5)], {"calc": 1.0}
    made.stop_reason = StopReason.MAX_ASSISTANT_TURNS
    info = score(made, row(), built(scorer=function)).score_info
    assert (info["score"], info["stop"], info["turns"], info["tokens"]) == (4, "max_assistant_turns", 2, 8)
    assert (info["call"], info["step"], info["last"]) == (["calc", "{}", "42"], ((0, "calc", 0.5),), ["two", []])
    assert [each.name for each in info["of"]] == ["calc"]
    assert (made.messages[0]["content"], made.rewards.final, call.metrics) == ("q", {"calc": 1.0}, {})


def test_a_scorer_that_does_not_ask_is_called_as_before(tmp_path):
    function = in_file(tmp_path, "def compute_score(**given): return {'score': 1.0, 'given': sorted(given)}")
    given = score(trajectory(("a", "")), row(), built(scorer=function)).score_info["given"]
    assert given == ["data_source", "extra_info", "ground_truth", "solution_str"]


TWO = """
def right(solution_str, ground_truth):
    return {'score': float(solution_str == ground_truth), 'acc': solution_str == ground_truth}
async def brief(solution_str): return -len(solution_str) / 10
def broken(): raise KeyError('x')
def none(): return {'acc': 1}
"""


def entries(tmp_path, *given):
    (tmp_path / "two.py").write_text(TWO)
    return [{"path": str(tmp_path / "two.py")} | each for each in given]


def test_several_functions_with_weights(tmp_path):
    scorer = load_rewards(entries(tmp_path, {"name": "right", "weight": 2}, {"name": "brief", "label": "words"}))
    found = score(trajectory(("42", "")), row(), built(scorer=scorer))
    assert found.score == pytest.approx(1.8)
    assert found.score_info == {
        "score": pytest.approx(1.8),
        "acc": True,
        "right": 1.0,
        "right/acc": True,
        "words": -0.2,
        "reward_components": {"right": 2.0, "words": -0.2},
    }


def test_a_function_called_acc_is_not_the_acc_of_the_whole(tmp_path):
    given = entries(tmp_path, {"name": "acc", "weight": 0.1}, {"name": "right"})
    (tmp_path / "two.py").write_text(TWO + "def acc(): return 0.5\n")
    info = score(trajectory(("42", "")), row(), built(scorer=load_rewards(given))).score_info
    assert (info["acc"], info["reward_components"]) == (True, {"two": 0.05, "right": 1.0})


@pytest.mark.parametrize("weights", [{"right": 1.0, "penalty": 1.0}, {"form": 0.6, "right": 1.0, "penalty": 0.6}])
def test_what_is_added_to_a_verdict_does_not_change_it(tmp_path, weights):
    text = (
        "def penalty(): return -0.1\ndef right(solution_str, ground_truth): return float(solution_str == ground_truth)"
    )
    (tmp_path / "two.py").write_text(f"{text}\ndef form(): return 2.0")
    scorer = load_rewards(
        [{"path": str(tmp_path / "two.py"), "name": name, "weight": w} for name, w in weights.items()]
    )
    for answer, success in (("42", True), ("41", False)):
        assert is_success(score(trajectory((answer, "")), row(), built(scorer=scorer))) is success


def test_what_one_of_several_writes_to_the_others_do_not_see(tmp_path):
    (tmp_path / "own.py").write_text(
        "def clears(trajectory, extra_info): trajectory.messages[0].clear(); extra_info.clear(); return 0.0\n"
        "def asked(trajectory, extra_info): return float(trajectory.messages[0]['content'] == 'q' and 'index' in extra_info)"
    )
    scorer = load_rewards([{"path": str(tmp_path / "own.py"), "name": name} for name in ("clears", "asked")])
    made = trajectory(("42", ""))
    made.messages = [{"role": "user", "content": "q"}]
    assert score(made, row(index=1), built(scorer=scorer)).score == 1.0


@pytest.mark.parametrize(
    ("name", "words"), [("broken", "'broken' failed: KeyError"), ("none", "'none' returned no score")]
)
def test_one_of_several_that_fails_is_named(tmp_path, name, words):
    scorer = load_rewards(entries(tmp_path, {"name": "right"}, {"name": name}))
    with pytest.raises(InfrastructureError, match=words):
        score(trajectory(("42", "")), row(), built(scorer=scorer))


@pytest.mark.parametrize(
    ("given", "words"),
    [
        (({"name": "right"}, {"name": "right"}), r"rewards\[1\]: two rewards are called 'right'"),
        (({"nmae": "right"},), r"rewards\[0\].nmae; did you mean 'name'"),
        (({"weight": "much"},), r"rewards\[0\].weight must be a number"),
        (({"name": "left"},), "has no 'left'"),
        (({"label": "score", "name": "right"},), r"rewards\[0\]: 'score' is a detail of the whole score"),
        (({"label": "acc", "name": "right"},), r"rewards\[0\]: 'acc' is a detail of the whole score"),
    ],
)
def test_entries_that_cannot_be_used(tmp_path, given, words):
    with pytest.raises(ConfigError, match=words):
        load_rewards(entries(tmp_path, *given))


def test_functions_named_as_details_of_the_sum_do_not_replace_them(tmp_path):
    (tmp_path / "two.py").write_text("def score(): return 0.0\ndef pred(): return 0.5\ndef form(): return 1.0")
    (tmp_path / "own.py").write_text("def pred(): return 0.25")
    given = [("two", "score"), ("own", "pred"), ("two", "form")]
    scorer = load_rewards([{"path": str(tmp_path / f"{file}.py"), "name": name} for file, name in given])
    found = score(trajectory(("42", "")), row(), built(scorer=scorer))
    assert found.score == found.score_info["score"] == 1.25
    assert found.score_info["reward_components"] == {"two": 0.0, "own": 0.25, "form": 1.0}
    assert "pred" not in found.score_info


@pytest.mark.parametrize("verdict", [np.bool_(False), np.float32(0), np.int64(0), np.array(0), torch.tensor(False)])
def test_a_verdict_of_numpy_or_torch_is_a_verdict(verdict):
    found = score(trajectory(("42", "")), row(), built(scorer=lambda **_: {"score": 2.0, "acc": verdict}))
    assert not is_success(found)
    assert isinstance(found.score_info["acc"], bool | int | float)


BATCHED = """
calls = []
def compute_score(data_sources, solution_strs, ground_truths, extra_infos):
    calls.append(len(solution_strs))
    return [{"score": float(text), "rows": len(solution_strs)} for text in solution_strs]
def short(solution_strs): return [1.0]
def partly(solution_strs): return [KeyError(text) if text == "1" else float(text) for text in solution_strs]
def single(solution_str):
    if solution_str == "1": raise KeyError("x")
    return float(solution_str)
"""


def test_a_function_of_whole_batches(tmp_path):
    found, errors = score_all(built("batch", in_file(tmp_path, BATCHED)), 5)
    assert (found, errors) == ([0.0, 1.0, 2.0, 3.0, 4.0], [])
    rewards, _ = rewards_of_all(built("batch", in_file(tmp_path, BATCHED), batch_size=2), 5)
    assert [each.score_info["rows"] for each in rewards] == [2, 2, 2, 2, 1]


def test_a_batch_that_fails_and_a_row_that_fails(tmp_path):
    _, errors = score_all(built("batch", in_file(tmp_path, BATCHED, "short")), 3)
    assert [type(each) for each in errors] == [InfrastructureError] * 3
    assert "1 scores for 3 rows" in str(errors[0])
    for name in ("single", "partly"):
        found, errors = score_all(built("batch", in_file(tmp_path, BATCHED, name)), 3)
        assert (found, len(errors)) == ([0.0, None, 2.0], 1)


def test_a_function_of_batches_needs_the_manager_of_batches(tmp_path):
    with pytest.raises(ConfigError, match=r"set reward_model\.reward_manager=batch"):
        built("naive", in_file(tmp_path, BATCHED))


COMPUTES = """
import os, time
def compute_score(solution_str, extra_info):
    if solution_str == "hang":
        while True: pass
    if solution_str == "die": os._exit(3)
    if solution_str == "fail": raise KeyError("x")
    return {"score": float(solution_str), "pid": os.getpid()}
async def waits(solution_str): return 0.25
def grows(solution_str): return float(len(bytearray(4 << 30)) > 0)
"""


def test_scores_in_processes_of_their_own(tmp_path):
    prime = built("prime", in_file(tmp_path, COMPUTES), num_processes=2, timeout=20)
    rewards, _ = rewards_of_all(prime, 8)
    pids = {each.score_info["pid"] for each in rewards}
    assert [each.score for each in rewards] == list(range(8))
    assert os.getpid() not in pids
    assert 1 <= len(pids) <= 2
    with pytest.raises(InfrastructureError, match="failed: KeyError: 'x'"):
        score(trajectory(("fail", "")), row(), prime)
    with pytest.raises(InfrastructureError, match="its process died"):
        score(trajectory(("die", "")), row(), prime)
    prime.compute_score._timeout = 0.2
    for _ in range(3):
        with pytest.raises(InfrastructureError, match="its process was killed"):
            score(trajectory(("hang", "")), row(), prime)
    prime.compute_score._timeout = 20
    assert score(trajectory(("7", "")), row(), prime).score == 7.0
    prime.compute_score.processes.close()


PAYS = """
import os, time
from etude.rewards import usage
def compute_score(solution_str):
    if os.fork() == 0: usage.count(cost=100.0); os._exit(0)
    usage.count(requests=1, cost=2.0)
    if solution_str == "hang":
        open(__file__ + ".paid", "w").close()
        time.sleep(60)
    return 1.0
"""


def test_what_a_scorer_has_paid_counts_where_its_process_is_killed(tmp_path):
    """It was sent with the answer, which never came, or came when its caller had left: `reward_model.budget` saw nothing."""
    prime = built("prime", in_file(tmp_path, PAYS), num_processes=1, timeout=20)
    with usage.counting(used := usage.Counter()):
        assert score(trajectory(("x", "")), row(), prime).score == 1.0
        assert used == {"requests": 1, "cost": 2.0}
        prime.compute_score._timeout = 3.0
        with pytest.raises(InfrastructureError, match="its process was killed"):
            score(trajectory(("hang", "")), row(), prime)
    assert used == {"requests": 2, "cost": 4.0}
    [paid] = tmp_path.glob("*.paid")
    paid.unlink()
    prime.compute_score._timeout = 20

    async def leave():
        asked = asyncio.ensure_future(TrajectoryScorer(prime)(trajectory(("hang", "")), row()))
        await until_async(paid.exists)
        asked.cancel()
        await asyncio.wait({asked})

    with usage.counting(used := usage.Counter()):
        asyncio.run(leave())
    until(lambda: used == {"requests": 1, "cost": 2.0})  # counted by the thread that still waits for the child
    prime.compute_score.processes.close()


FORKS = """
import os, time
def compute_score(solution_str, ground_truth):
    if os.fork() == 0:
        return {"score": -1.0, "of": solution_str}
    time.sleep(0.2)
    return {"score": 1.0, "of": solution_str}
def dies(solution_str):
    if os.fork() == 0:
        time.sleep(30)
    os._exit(1)
"""


@pytest.mark.parametrize("name", ["prime", "naive"])
def test_a_fork_that_a_scorer_forgets_answers_nothing(tmp_path, name):
    managed = built(name, in_file(tmp_path, FORKS), timeout=20, **({"num_processes": 1} if name == "prime" else {}))
    before = {child.pid for child in psutil.Process().children(recursive=True)}
    for text in ("a", "b", "c"):
        scored = score(trajectory((text, "")), row(), managed)
        assert (scored.score, scored.score_info["of"]) == (1.0, text)
    if name == "prime":
        managed.compute_score.processes.close()
    left = [child for child in psutil.Process().children(recursive=True) if child.pid not in before]
    until(lambda: not any(is_running(child.pid) for child in left))


def test_a_dead_scorer_is_noticed_though_its_fork_lives(tmp_path):
    prime = built("prime", in_file(tmp_path, FORKS, "dies"), num_processes=1, timeout=20)
    started = time.monotonic()
    with pytest.raises(InfrastructureError, match="its process died"):
        score(trajectory(("x", "")), row(), prime)
    assert time.monotonic() - started < 15
    prime.compute_score.processes.close()


def test_an_async_scorer_the_built_in_ones_and_memory_in_processes(tmp_path):
    for scorer, text, expected in ((in_file(tmp_path, COMPUTES, "waits"), "x", 0.25), (None, "#### 42", 1.0)):
        prime = built("prime", scorer, num_processes=1)
        assert score(trajectory((text, "")), row(), prime).score == expected
        prime.compute_score.processes.close()
    prime = built("prime", in_file(tmp_path, COMPUTES, "grows"), num_processes=1, memory_mb=2048)
    with pytest.raises(InfrastructureError, match="MemoryError"):
        score(trajectory(("x", "")), row(), prime)
    prime.compute_score.processes.close()


def test_a_scorer_that_no_file_defines_stays_in_its_process():
    with pytest.raises(ConfigError, match="define it in a file"):
        built("prime", lambda solution_str: 1.0)


async def test_rates_are_kept_by_all_managers_of_one_name():
    lock, running, most = threading.Lock(), [0], [0]

    def scorer(**_):
        with lock:
            running[0] += 1
            most[0] = max(most[0], running[0])
        time.sleep(0.02)
        with lock:
            running[0] -= 1
        return 1.0

    managers = [built("rate_limited", scorer, max_concurrent=2, limiter="test-shared") for _ in range(2)]
    made = [trajectory(("x", "")) for _ in range(12)]
    await asyncio.gather(*(TrajectoryScorer(managers[n % 2])(each, row()) for n, each in enumerate(made)))
    scores = [each.rewards.score for each in made]
    assert scores == [1.0] * 12
    assert most[0] <= 2


def test_the_stricter_of_two_rates_counts():
    assert RateOptions(max_rpm=60).limit.per_second == 1.0
    assert RateOptions(max_rpm=60, max_tpm=60_000, estimated_tokens_per_request=2000).limit.per_second == 0.5
    assert RateOptions().limit.per_second is None
    with pytest.raises(ConfigError, match="max_rpm must be a number above 0"):
        built("rate_limited", None, max_rpm=0)


def test_a_request_that_fails_under_a_rate_is_broken_not_wrong():
    with pytest.raises(InfrastructureError, match="no answer within"):
        score(trajectory(("x", "")), row(), built("rate_limited", lambda **_: time.sleep(5), timeout=0.02))


@pytest.mark.slow
def test_workers_of_a_cluster(tmp_path):
    ray = pytest.importorskip("ray")
    with pytest.raises(ConfigError, match=r"there is none: trainer\.backend=ray"):
        built("remote", None)
    folder = f"/tmp/etude-remote-{os.getpid()}"
    ray.init(num_cpus=2, include_dashboard=False, object_store_memory=100 << 20, _temp_dir=folder, log_to_driver=False)
    try:
        remote = built("remote", in_file(tmp_path, COMPUTES), num_workers=2, timeout=60)
        found, errors = score_all(remote, 6)
        assert (found, errors) == ([0.0, 1.0, 2.0, 3.0, 4.0, 5.0], [])
        with pytest.raises(InfrastructureError, match="failed: KeyError: 'x'"):
            score(trajectory(("fail", "")), row(), remote)
        remote.compute_score._timeout = 0.2
        with pytest.raises(InfrastructureError, match="its process was killed"):
            score(trajectory(("hang", "")), row(), remote)
    finally:
        ray.shutdown()
        shutil.rmtree(folder, ignore_errors=True)
