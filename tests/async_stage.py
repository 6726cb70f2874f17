"""What asynchronous runs are judged by: the account of every prompt, and a calculator whose answers take their time."""

import json
import signal

from house_stage import ROLLOUT, Launched
from kills_stage import DIES, SAVES

from etude.trainer.run import train

ASYNC = ("trainer.deterministic=false", "trainer.num_threads=1")
SLOW = '''
"""A calculator that takes its time: longer for some trajectories, the same in every run."""

import asyncio
import random

from etude.tools.builtin.calculator import Calculator


class Slow(Calculator):
    async def execute(self, instance_id, parameters, **kwargs):
        await asyncio.sleep({seconds} * random.Random(instance_id).lognormvariate(0.0, 1.5))
        return await super().execute(instance_id, parameters, **kwargs)
'''
YAML = """
tools:
  - class_name: {path}:Slow
    config: {{type: native, timeout: 60}}
    tool_schema:
      type: function
      function:
        name: calculator
        parameters: {{type: object, properties: {{expression: {{type: string}}}}, required: [expression]}}
"""


def slow_tool(folder, seconds):
    """The override that configures it, with a median of `seconds`."""
    folder.mkdir(exist_ok=True)
    (folder / "slow.py").write_text(SLOW.format(seconds=seconds))
    (folder / "slow.yaml").write_text(YAML.format(path=folder / "slow.py"))
    return f"{ROLLOUT}.multi_turn.tool_config_path={folder / 'slow.yaml'}"


def accounts(run):
    """The lines of `prompts.jsonl`."""
    return [json.loads(line) for line in (run / "prompts.jsonl").read_text().splitlines()]


def trained(run):
    """The uids of all prompts that were trained on, in order."""
    return [uid for line in accounts(run) for uid, _ in line["trained"]]


def dropped(run):
    """Cause → uids of all prompts that were dropped."""
    found = {}
    for line in accounts(run):
        for cause, prompts in line["dropped"].items():
            found.setdefault(cause, []).extend(uid for uid, _ in prompts)
    return found


def plan(steps, batch_size=2):
    """The uids of what is planned."""
    return sorted(f"{step}.0-{place}" for step in range(1, steps + 1) for place in range(batch_size))


def kill_and_resume(tiny, folder, kills, *settings):
    """A run that dies after so many processor seconds, again and again, and then goes through."""
    run = folder / "run"
    for number, seconds in enumerate(kills):
        dies = folder / f"dies-{number}.py"
        dies.write_text(DIES.format(seconds=seconds))
        arguments = tiny.arguments(run, *SAVES, *settings, f"plugins=[{tiny.folder}/agent.py,{dies}]")
        launched = Launched(["train", *arguments], folder / "log")
        assert launched.wait() in (-signal.SIGPROF, 0), launched.text()
    train(tiny.config(run, *SAVES, *settings))
    return run
