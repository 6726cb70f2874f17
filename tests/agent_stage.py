"""A small agent with a file for each of its parts, so that each can be made wrong; the model is the stage's tiny one."""

import json
import re

import pytest
from house_stage import ACTOR, ROLLOUT

from etude.checks.findings import Finding, Level

_VAGUE = re.compile(r"\b(?:FILE|CONFIG|MODEL|ROWS)\b|^(?:mend|raise|lower|set|start) it\b")
_SPECIFIC = re.compile(r"`\w[^`]+`|(?<!\w)--?[a-z]|\w+\.\w+|/\w|[\w-]+=|[A-Z_]{6,}|pip install|did you mean|\w\(|'\w+'")
"""A command, option, key, path, setting, variable, function or name."""


@pytest.fixture(autouse=True)
def every_finding_has_specific_advice(monkeypatch):
    """Of all findings that a test makes: what to do names a key, a file, a command or a function, and no placeholder."""
    found, make = [], Finding.__init__

    def recorded(self, *args, **kwargs):
        make(self, *args, **kwargs)
        found.append(self)

    monkeypatch.setattr(Finding, "__init__", recorded)
    yield
    wrong = [each for each in found if each.level in (Level.ERROR, Level.WARNING)]
    vague = [each for each in wrong if not _SPECIFIC.search(each.fix) or _VAGUE.search(each.fix)]
    assert not vague, "\n".join(map(str, vague))


TOOL = '''
"""A tool that says whether a number is the secret."""

from etude.tools import BaseTool, ToolError, ToolResponse


class Guess(BaseTool):
    name = "guess"

    def __init__(self, config, tool_schema=None):
        super().__init__(config, tool_schema)
        self.secrets = {}

    async def create(self, instance_id=None, secret=0, **kwargs):
        self.secrets[instance_id] = secret
        return instance_id, ToolResponse()

    async def execute(self, instance_id, parameters, **kwargs):
        if not isinstance(parameters.get("number"), int):
            raise ToolError("give a whole number")
        return ToolResponse(text="right" if parameters["number"] == self.secrets[instance_id] else "wrong"), 0.0, {}

    async def release(self, instance_id, **kwargs):
        del self.secrets[instance_id]
'''
SCHEMA = {
    "type": "function",
    "function": {
        "name": "guess",
        "description": "Says whether it is the number.",
        "parameters": {
            "type": "object",
            "properties": {"number": {"type": "integer", "description": "from 1 to 9"}},
            "required": ["number"],
        },
    },
}
REWARD = '''
"""A score."""


def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    return float(solution_str.split()[-1:] == [ground_truth])
'''


class Agent:
    """Its files in `folder`, and the arguments of a run of it."""

    def __init__(self, folder, model):
        self.folder, self.model = folder, model
        self.write("tool.py", TOOL)
        self.write("reward.py", REWARD)
        self.tools(f"{folder}/tool.py:Guess")
        self.rows([self.row(number) for number in range(4)])

    def write(self, name, text):
        (self.folder / name).write_text(text)

    def tools(self, class_name, schema=SCHEMA, **config):
        entry = {"class_name": class_name, "config": {"type": "native", "timeout": 5, **config}}
        self.write("tools.yaml", json.dumps({"tools": [entry | ({"tool_schema": schema} if schema else {})]}))

    def row(self, number, **changes):
        kwargs = {"guess": {"create_kwargs": {"secret": 1 + number}}}
        return {
            "data_source": "tests/guess",
            "prompt": [{"role": "user", "content": "Find my number."}],
            "reward_model": {"style": "rule", "ground_truth": str(1 + number)},
            "extra_info": {"index": number, "need_tools_kwargs": True, "tools_kwargs": kwargs},
        } | changes

    def rows(self, rows):
        self.write("rows.jsonl", "".join(f"{json.dumps(row)}\n" for row in rows))

    def arguments(self, *overrides):
        return [
            "--config-name=grpo_trainer",
            f"data.train_files={self.folder}/rows.jsonl",
            "data.train_batch_size=4",
            "data.max_prompt_length=400",
            "data.max_response_length=300",
            f"actor_rollout_ref.model.path={self.model}",
            f"{ACTOR}.ppo_mini_batch_size=4",
            f"{ACTOR}.optim.lr=1e-4",
            f"{ROLLOUT}.n=2",
            f"{ROLLOUT}.max_model_len=1000",
            f"{ROLLOUT}.multi_turn.tool_config_path={self.folder}/tools.yaml",
            f"custom_reward_function.path={self.folder}/reward.py",
            f"trainer.default_local_dir={self.folder}/run",
            "trainer.device=cpu",
            "trainer.num_threads=1",
            *overrides,
        ]
