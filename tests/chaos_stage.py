"""The stage of chaos: a run on Ray whose answers call an MCP server and a sandbox and are scored in other processes, all of
which are killed as it goes, its ranks too; and what it must have left."""

import contextlib
import os
import random
import signal
import time
from collections import Counter

import psutil
import torch
import yaml
from async_stage import ASYNC, accounts, dropped, plan, trained
from house_stage import ACTOR, ROLLOUT, Launched, steps, weights
from mcp_stage import STDIO
from ray_stage import WAIT, is_running, rank_processes, until

from etude.trainer.checkpoints import Checkpoints

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
        """Kills one process of that kind, if there is one just now: a rank's, or one below a rank."""
        ranks = rank_processes(self._nodes)
        found = ranks if kind == "rank" else [pid for rank in ranks for pid in below(rank, MARKS[kind])]
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
        assert "Traceback" not in said, said
        done = self.saved()
        assert said.splitlines()[-1].startswith(f"error: stopped after step {done} of 100000;"), said
        self._check(done)
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
        assert set(dropped(self.run)) <= {"infrastructure", "given_up", "not_learned"}
        assert all(bool(torch.isfinite(tensor).all()) for tensor in weights(self.run, done).values())


def below(pid, mark):
    """The processes below `pid` whose command line contains `mark`."""
    with contextlib.suppress(psutil.Error):
        return [each.pid for each in psutil.Process(pid).children(recursive=True) if mark in command_of(each)]
    return []


def processes(mark):
    """All processes but this one's whose command line contains `mark`."""
    return [each.pid for each in psutil.process_iter() if mark in command_of(each) and is_running(each.pid)]


def command_of(process):
    with contextlib.suppress(psutil.Error):
        return " ".join(process.cmdline())
    return ""


def unleash(run, dice, kinds, pause):
    """Kills one of each of `kinds`, in that order, a random part of `pause` seconds after a step."""
    for kind in kinds:
        before = run.saved()
        run.wait_for(lambda: run.saved() > before)  # noqa: B023  (called here)
        time.sleep(dice.uniform(0, pause))
        run.wait_for(lambda: run.kill(kind, dice))  # noqa: B023


__all__ = ["MARKS", "ChaosRun", "random", "unleash"]
