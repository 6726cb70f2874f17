"""Chaos: every 20 seconds something of an asynchronous run on Ray is killed: a training rank, a rollout rank, a tool server,
a sandbox, a scorer. Half an hour of it, or `ETUDE_CHAOS_MINUTES`; each kind has its turn."""

import contextlib
import os
import random
import signal
import time
from collections import Counter

import psutil
import pytest
import torch
import yaml
from async_stage import ASYNC, accounts, dropped, plan, trained
from house_stage import ACTOR, ROLLOUT, Launched, steps, weights
from mcp_stage import STDIO
from ray_stage import rank_processes, ray_cluster
from wait_stage import WAIT, is_running, until

from etude.trainer.checkpoints import Checkpoints

pytest.importorskip("ray")
pytest.importorskip("mcp")
MINUTES = float(os.environ.get("ETUDE_CHAOS_MINUTES", "30"))
PAUSE = 20  # seconds
pytestmark = [pytest.mark.soak, pytest.mark.timeout(60 * (MINUTES + 20))]

AGENT = '''
"""A model that calls two tools in its first turn, whatever it says, and a score that takes a moment."""

import json
import time

from etude.chat import ParsedResponse, ToolParser
from etude.schemas import FunctionCall


@ToolParser.register("chaos")
class Chaos(ToolParser):
    stop_token_ids = tuple(range(10, 4000, 7))  # a turn is a few tokens

    def parse(self, text, tools=None):
        number = len(text) % 10
        add = FunctionCall(name="calculator", arguments=json.dumps({"expression": f"{number} + 1"}))
        run = FunctionCall(name="code_interpreter", arguments=json.dumps({"code": f"print({number} * 7)"}))
        return ParsedResponse(text, [add, run])


def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    time.sleep(0.02)
    return sum(solution_str.count(digit) for digit in "02468") / 8
'''
SANDBOX = {"type": "sandbox_fusion", "enable_global_rate_limit": False, "num_workers": 2}
MARKS = {"tool server": "mcp_stage_server.py", "sandbox": "fork_server", "scorer": "etude.rewards.processes"}
"""What a command line of these processes below a rank contains."""


class ChaosRun:
    """`etude train` on the cluster `nodes`, with rollouts in flight while it learns, until `stop`."""

    def __init__(self, tiny, nodes, folder, *settings, **sandbox):
        self.run, self._nodes, self._folder, self.killed = folder / "run", nodes, folder, Counter()
        (folder / "chaos.py").write_text(AGENT)
        servers = {"stage": STDIO | {"args": [*STDIO["args"], str(folder)]}}  # marks the processes as this run's
        mcp = {
            "config": {"type": "mcp", "timeout": 60},
            "mcp": {"mcpServers": servers, "tool_selected_list": ["calculator"]},
        }
        code = {
            "class_name": "etude.tools.builtin.code_interpreter.SandboxFusionTool",
            "config": {**SANDBOX, **sandbox},
        }
        (folder / "tools.yaml").write_text(yaml.safe_dump({"tools": [mcp, code]}))
        settings = [
            *ASYNC,
            "trainer.max_staleness=2",
            "trainer.save_freq=1",
            "trainer.total_training_steps=100000",
            "trainer.max_restarts=10",
            "trainer.min_valid_fraction=0",
            "trainer.backend=ray",
            "trainer.n_gpus_per_node=2",
            "actor_rollout_ref.hybrid_engine=false",
            f"{ROLLOUT}.nnodes=1",
            f"{ROLLOUT}.n_gpus_per_node=1",
            f"ray.address={nodes.address}",
            f"plugins=[{folder}/chaos.py]",
            f"{ROLLOUT}.multi_turn.tool_config_path={folder}/tools.yaml",
            f"{ROLLOUT}.multi_turn.format=chaos",
            f"{ROLLOUT}.multi_turn.max_assistant_turns=2",
            f"{ROLLOUT}.infrastructure_retries=3",
            f"{ACTOR}.optim.lr=1e-6",  # the model stays as it is, however long it takes
            "data.max_prompt_length=768",
            "data.max_response_length=192",
            f"custom_reward_function.path={folder}/chaos.py",
            "reward_model.reward_manager=prime",
            "reward_model.reward_kwargs.num_processes=1",
            *settings,
        ]
        self._launched = Launched(["train", *tiny.arguments(self.run, *settings)], folder / "log")

    def saved(self):
        """The newest checkpoint's step, 0 without one."""
        with contextlib.suppress(OSError, ValueError):
            return int((self.run / "latest_checkpointed_iteration.txt").read_text())
        return 0

    def wait_for(self, condition):
        """Waits for `condition()` while the run goes on."""
        until(lambda: condition() or not self._launched.process.is_alive(), self._launched.text())
        assert self._launched.process.is_alive(), self._launched.text()

    def kill(self, kind, dice):
        """Kills one process of that kind, if there is one just now. Tools are below rollout ranks alone."""
        ranks = rank_processes(self._nodes)
        if kind in MARKS:
            found = [pid for rank in ranks for pid in below(rank, MARKS[kind])]
        else:
            rollouts = [rank for rank in ranks if below(rank, MARKS["tool server"])]
            found = rollouts and (rollouts if kind == "rollout rank" else sorted({*ranks} - {*rollouts}))
        if found:
            self.killed[kind] += 1
            with contextlib.suppress(ProcessLookupError):
                os.kill(dice.choice(sorted(found)), signal.SIGKILL)
        return bool(found)

    def stop(self):
        """Ends the run after a further step, and checks what it left."""
        before = self.saved()
        self.wait_for(lambda: self.saved() > before)
        self._launched.signal(signal.SIGINT)
        end = time.monotonic() + WAIT
        while self._launched.process.is_alive() and time.monotonic() < end:
            self._launched.process.join(1)
        said = self._launched.text()
        assert self._launched.wait() == 128 + signal.SIGINT, said
        assert said.splitlines()[-1].startswith("stopped after step "), said
        self._check(self.saved())
        until(lambda: not rank_processes(self._nodes), "ranks are left")
        until(lambda: not processes(str(self._folder)), "tool servers are left")
        return said

    def _check(self, done):
        """Every prompt of the plan was trained on once, or dropped, or is in the checkpoint as not trained on."""
        assert steps(self.run) == [line["step"] for line in accounts(self.run)] == list(range(1, done + 1))
        state = Checkpoints.read_state(self.run / f"global_step_{done}")
        lost = [uid for uids in dropped(self.run).values() for uid in uids]
        left = [f"{number}.0-{place}" for number, place, *_ in state.get("untrained", ())]
        found = sorted([*trained(self.run), *lost, *left])
        assert found == plan(max(int(uid.partition(".")[0]) for uid in found))
        assert all(bool(torch.isfinite(tensor).all()) for tensor in weights(self.run, done).values())


def below(pid, mark):
    """The processes below `pid` whose command line contains `mark`, but for bubblewrap's own: a sandbox outlives it, and is
    then below no rank."""
    with contextlib.suppress(psutil.Error):
        children = [(each.pid, command_of(each)) for each in psutil.Process(pid).children(recursive=True)]
        return [found for found, command in children if mark in command and "bwrap" not in command.split(" ")[0]]
    return []


def processes(mark):
    """All processes but this one's whose command line contains `mark`."""
    return [each.pid for each in psutil.process_iter() if mark in command_of(each) and is_running(each.pid)]


def command_of(process):
    with contextlib.suppress(psutil.Error):
        return " ".join(process.cmdline())
    return ""


KINDS = (*MARKS, "rollout rank", "training rank")


def test_a_run_goes_on_whatever_is_killed_and_accounts_for_every_prompt(tiny, tmp_path, isolation):
    seed = random.randrange(1000)
    print(f"seed {seed}")  # shown where it fails
    dice, end, turns = random.Random(seed), time.monotonic() + 60 * MINUTES, []
    with ray_cluster(4, 4, connect=False) as nodes:
        run = ChaosRun(tiny, nodes, tmp_path)
        run.wait_for(run.saved)
        while time.monotonic() < end or len(run.killed) < len(KINDS):
            turns = turns or dice.sample(KINDS, len(KINDS))
            kind = turns.pop()
            run.wait_for(lambda: run.kill(kind, dice))  # noqa: B023  (called here)
            time.sleep(PAUSE)
        said = run.stop()
    assert "Traceback" not in said
    assert "Worker, rank " in said
    assert "the workers start again" in said
    assert set(run.killed) == set(KINDS)
