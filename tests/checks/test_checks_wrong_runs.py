"""Fifty runs that somebody got wrong, of ten kinds, and five that are right: `etude check` names what is wrong in them.

Each begins as the agent that `etude new agent` writes, an environment, or the quickstart, and has one mistake, as a user
would make it. A row is caught if an error or a warning names the cause: a key, a file, a name in a file. What is not caught
is an expected failure with its reason. `pytest -m ""` runs all.
"""

import json
import runpy
import shutil
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from etude.checks.findings import Level
from etude.cli.main import cli, run
from etude.cli.new import write_agent
from etude.testing import inspect_run

A, M, R = "actor_rollout_ref.actor", "actor_rollout_ref.model", "actor_rollout_ref.rollout"
Edit = Callable[[Path], None]
"""Changes the agent in a folder."""


@dataclass(frozen=True)
class Run:
    name: str
    kind: str
    cause: tuple[str, ...] = ()
    """Any of these, in an error or a warning, names the cause: a key, a file, a name in a file."""
    overrides: tuple[str, ...] = ()
    edits: tuple[Edit, ...] = field(default=(), repr=False)
    base: str = "agent"


def rows(change: Callable[[int, dict], None], *files: str) -> Edit:
    def edit(folder: Path) -> None:
        for name in files or ("rows.jsonl", "val.jsonl"):
            records = [json.loads(line) for line in (folder / name).read_text().splitlines()]
            for index, record in enumerate(records):
                change(index, record)
            (folder / name).write_text("".join(json.dumps(record) + "\n" for record in records))

    return edit


def replace(name: str, *pairs: tuple[str, str]) -> Edit:
    def edit(folder: Path) -> None:
        text = (folder / name).read_text()
        for old, new in pairs:
            assert old in text, (name, old)
            text = text.replace(old, new)
        (folder / name).write_text(text)

    return edit


def reward(body: str) -> Edit:
    head = (
        "import random\nimport re\n\n\ndef compute_score(data_source, solution_str, ground_truth, extra_info=None):\n"
    )

    def edit(folder: Path) -> None:
        (folder / "reward.py").write_text(head + "".join(f"    {line}\n" for line in body.strip("\n").splitlines()))

    return edit


def _one_question(index: int, row: dict) -> None:
    row["prompt"][1]["content"] = "What do they cost together?"


def _leaks(index: int, row: dict) -> None:
    row["prompt"][1]["content"] += f" Answer: {row['reward_model']['ground_truth']}"


def _no_truth(index: int, row: dict) -> None:
    if index == 3:
        row["reward_model"]["ground_truth"] = None


def _misspelt_kwargs(index: int, row: dict) -> None:
    row["extra_info"]["need_tools_kwargs"] = False
    row["extra_info"]["tool_kwargs"] = row["extra_info"].pop("tools_kwargs")


def _tool(old: str, new: str) -> Edit:
    return replace("tool.py", (old, new))


ANSWER = "return ToolResponse(text=str(prices[item])), 0.0, {}"

ENVIRONMENT = '''
import random

from etude.environments import Environment, InvalidAction, environment, tool


@environment("counter")
class Counter(Environment):
    limit = 8

    def tasks(self, split):
        yield from ({"goal": n} for n in (range(1, 20) if split == "train" else range(20, 25)))

    def reset(self, task, seed):
        self.number, self.goal = 0, task["goal"]
        return f"Count to {self.goal}."

    @tool
    def add(self, k: int) -> str:
        """Adds k to the number."""
        if k < 1:
            raise InvalidAction("Only upwards.")
        self.number += k
        return str(self.number)

    def score(self):
        return float(self.number == self.goal)
'''


def _text(name: str, text: str) -> Edit:
    return lambda folder: (folder / name).write_text(text)  # type: ignore[return-value]


def _template(*pairs: tuple[str, str]) -> Edit:
    return replace("model/chat_template.jinja", *pairs)


_TOOL_MESSAGES = '{%- elif message.role == "tool" %}'

WRONG = [
    # -- data
    Run("no ground truth in row 4", "data", ("ground_truth", "row 4", "rows.jsonl:4"), edits=(rows(_no_truth),)),
    Run("validation is training", "data", ("val_files",), ("data.val_files=[{folder}/rows.jsonl]",)),
    Run("every prompt is the same", "data", ("train_files", "rows.jsonl"), edits=(rows(_one_question),)),
    Run("prompts end with the answer", "data", ("train_files", "rows.jsonl", "prompt_key"), edits=(rows(_leaks),)),
    Run("tool_kwargs for tools_kwargs", "data", ("tools_kwargs", "tool_kwargs"), edits=(rows(_misspelt_kwargs),)),
    # -- reward
    Run(
        "pays everything",
        "reward",
        ("reward.py", "compute_score", "custom_reward_function"),
        edits=(reward("return 1.0"),),
    ),
    Run(
        "compares a number with a text",
        "reward",
        ("reward.py", "compute_score", "custom_reward_function"),
        edits=(reward("n = re.findall(r'\\d+', solution_str)\nreturn float(bool(n) and int(n[-1]) == ground_truth)"),),
    ),
    Run(
        "pays for listing every number",
        "reward",
        ("reward.py", "compute_score", "custom_reward_function"),
        edits=(reward("return float(ground_truth in solution_str)"),),
    ),
    Run(
        "breaks where there is no number",
        "reward",
        ("reward.py", "compute_score", "custom_reward_function"),
        edits=(reward("return float(re.findall(r'\\d+', solution_str)[-1] == ground_truth)"),),
    ),
    Run(
        "pays for length",
        "reward",
        ("reward.py", "compute_score", "custom_reward_function"),
        edits=(
            reward(
                "n = re.findall(r'\\d+', solution_str)\n"
                "return float(bool(n) and n[-1] == ground_truth) + 0.01 * len(solution_str)"
            ),
        ),
    ),
    # -- template
    Run("another model's calls", "template", ("multi_turn.format",), (f"{R}.multi_turn.format=llama3_json",)),
    Run(
        "tool answers are not rendered",
        "template",
        ("chat_template", "chat template"),
        edits=(_template(('{{- "\\n<tool_response>\\n" + content + "\\n</tool_response>" }}', "")),),
    ),
    Run(
        "no generation prompt",
        "template",
        ("add_generation_prompt", "generation prompt"),
        edits=(_template(("{%- if add_generation_prompt %}", "{%- if false %}")),),
    ),
    Run(
        "tools are not shown",
        "template",
        ("tools_in_system", "chat_template", "chat template"),
        edits=(_template(("{%- if tools %}", "{%- if false %}")),),
    ),
    Run(
        "generation ends at another token",
        "template",
        ("eos_token",),
        edits=(
            replace("model/tokenizer_config.json", ('"eos_token": "<|im_end|>"', '"eos_token": "<|endoftext|>"')),
            replace("model/generation_config.json", ('"eos_token_id": 2', '"eos_token_id": 0')),
            replace("model/config.json", ('"eos_token_id": 2', '"eos_token_id": 0')),
        ),
    ),
    # -- loop
    Run("one turn", "loop", ("max_assistant_turns",), (f"{R}.multi_turn.max_assistant_turns=1",)),
    Run("no room for a call", "loop", ("max_response_length",), ("data.max_response_length=8",)),
    Run("turns switched off", "loop", ("multi_turn.enable",), (f"{R}.multi_turn.enable=false",)),
    Run(
        "an agent without tools", "loop", ("default_agent_loop",), (f"{R}.agent.default_agent_loop=single_turn_agent",)
    ),
    Run(
        "tool answers are cut",
        "loop",
        ("max_tool_response_length",),
        (f"{R}.multi_turn.max_tool_response_length=8",),
        (
            _tool(
                "text=str(prices[item])",
                "text=f'Today the price of one piece of {item} comes to {prices[item]} euros; ask again for others.'",
            ),
        ),
    ),
    # -- tool
    Run(
        "rows name another tool",
        "tool",
        ("tools_kwargs", "prices"),
        edits=(replace("tools.yaml", ("name: price ", "name: prices ")),),
    ),
    Run(
        "a bug in execute",
        "tool",
        ("tool.py", "price"),
        edits=(_tool(ANSWER, 'return ToolResponse(text=prices[item]["each"]), 0.0, {}'),),
    ),
    Run(
        "one state for all conversations",
        "tool",
        ("tool.py", "price"),
        edits=(
            _tool(
                'return dict(create_kwargs["prices"])',
                'self.prices = dict(create_kwargs["prices"])\n        return self.prices',
            ),
            _tool("prices = self._instance_dict[instance_id]", "prices = self.prices"),
        ),
    ),
    Run(
        "slower than its time limit",
        "tool",
        ("timeout",),
        edits=(
            _tool(ANSWER, "import asyncio\n\n        await asyncio.sleep(1)\n        " + ANSWER),
            replace("tools.yaml", ("timeout: 10 ", "timeout: 0.2 ")),
        ),
    ),
    Run("pays for every call", "tool", ("tool.py", "price"), edits=(_tool(ANSWER, ANSWER.replace("0.0", "1.0")),)),
    # -- environment
    Run(
        "no reward",
        "environment",
        ("score", "reward"),
        base="environment",
        edits=(replace("counter.py", ("def score", "def scores")),),
    ),
    Run(
        "reset breaks",
        "environment",
        ("reset", "goal"),
        base="environment",
        edits=(replace("counter.py", ('task["goal"]', 'task["target"]')),),
    ),
    Run(
        "reset ignores the seed",
        "environment",
        ("reset", "seed"),
        base="environment",
        edits=(replace("counter.py", ('task["goal"]', "random.randint(1, 1000000)")),),
    ),
    Run(
        "pays everything",
        "environment",
        ("score", "counter.py"),
        base="environment",
        edits=(replace("counter.py", ("float(self.number == self.goal)", "1.0")),),
    ),
    Run(
        "sessions share their state",
        "environment",
        ("log", "share"),
        base="environment",
        edits=(
            replace(
                "counter.py",
                ("limit = 8", "limit = 8\n    log = []"),
                ("self.number, self.goal = 0,", "self.goal ="),
                ("self.number += k", "self.log.append(k)"),
                ("str(self.number)", "str(sum(self.log))"),
                ("self.number ==", "sum(self.log) =="),
            ),
        ),
    ),
    # -- optimizer
    Run("rate of 0", "optimizer", ("optim.lr",), (f"{A}.optim.lr=0",)),
    Run("rate of 1", "optimizer", ("optim.lr",), (f"{A}.optim.lr=1",)),
    Run("warm-up longer than the run", "optimizer", ("lr_warmup_steps",), (f"{A}.optim.lr_warmup_steps=1000",)),
    Run("mini-batch does not divide", "optimizer", ("ppo_mini_batch_size",), (f"{A}.ppo_mini_batch_size=3",)),
    Run("gradients clipped to 0", "optimizer", ("clip_grad",), (f"{A}.optim.clip_grad=0",)),
    # -- sampling
    Run("greedy", "sampling", ("rollout.temperature",), (f"{R}.temperature=0",)),
    Run("nearly greedy", "sampling", ("rollout.top_p",), (f"{R}.top_p=0.01",)),
    Run("one answer a group", "sampling", ("rollout.n",), (f"{R}.n=1",)),
    Run("one candidate a token", "sampling", ("rollout.top_k",), (f"{R}.top_k=1",)),
    Run("stops at every call", "sampling", ("rollout.stop",), (f'{R}.stop=["<tool_call>"]',)),
    # -- algorithm
    Run(
        "the critic never stops warming up",
        "algorithm",
        ("critic_warmup",),
        ("algorithm.adv_estimator=gae", "critic.model.path={folder}/model", "trainer.critic_warmup=100"),
    ),
    Run("pinned to the reference", "algorithm", ("kl_loss_coef",), (f"{A}.use_kl_loss=true", f"{A}.kl_loss_coef=100")),
    Run(
        "components that no scorer returns",
        "algorithm",
        ("gdpo_reward_keys",),
        ("algorithm.adv_estimator=gdpo", "algorithm.gdpo_reward_keys=[accuracy,format]"),
    ),
    Run(
        "rewards fade within an answer",
        "algorithm",
        ("algorithm.gamma",),
        ("algorithm.adv_estimator=reinforce_plus_plus", "algorithm.gamma=0.5"),
    ),
    Run("entropy above all", "algorithm", ("entropy_coeff",), (f"{A}.entropy_coeff=10",)),
    # -- resources
    Run("no room for a prompt in the cache", "resources", ("kv_cache_memory_mb",), (f"{R}.kv_cache_memory_mb=0.01",)),
    Run(
        "a folder that cannot be written",
        "resources",
        ("default_local_dir",),
        ("trainer.default_local_dir=/proc/etude/run",),
    ),
    Run(
        "GPUs that are not there",
        "resources",
        ("n_gpus_per_node", "trainer.device"),
        ("trainer.n_gpus_per_node=8", "trainer.device=cuda"),
    ),
    Run(
        "micro-batches shorter than a sequence",
        "resources",
        ("ppo_max_token_len_per_gpu",),
        (f"{A}.ppo_max_token_len_per_gpu=64",),
    ),
    Run(
        "trajectories get less time than a call", "resources", ("trajectory_timeout",), (f"{R}.trajectory_timeout=0.5",)
    ),
]

_GRADED = """
n = re.findall(r"\\d+", solution_str)
right = float(bool(n) and n[-1] == ground_truth)
near = 1 / (1 + abs(int(n[-1][:9]) - int(ground_truth))) if n else 0.0
return {"score": right + 0.1 * near - 0.05 * (len(solution_str) > 200), "acc": right}
"""
_TAGS = """
found = re.fullmatch(r"(?s)\\s*<think>.+</think>\\s*<answer>\\s*(\\d+)\\s*</answer>\\s*", solution_str)
return float(bool(found) and found[1] == ground_truth)
"""


def _no_tools(index: int, row: dict) -> None:
    row["extra_info"] = {"index": index}
    a, b = index + 12, 3 * index + 4
    row["prompt"] = [{"role": "user", "content": f"What is {a} + {b}? Write <think>…</think><answer>NUMBER</answer>."}]
    row["reward_model"]["ground_truth"] = str(a + b)


HEALTHY = [
    Run("the agent as it is", "healthy"),
    Run("the quickstart", "healthy", base="quickstart"),
    Run("an environment", "healthy", base="environment"),
    Run(
        "no tools, tags, rloo",
        "healthy",
        overrides=(
            f"{R}.multi_turn.tool_config_path=null",
            "algorithm.adv_estimator=rloo",
            "trainer.max_staleness=1",
            f"{R}.temperature=0.8",
        ),
        edits=(
            rows(_no_tools),
            lambda folder: rows(lambda i, r: _no_tools(i + 100, r), "val.jsonl")(folder),
            reward(_TAGS),
        ),
    ),
    Run(
        "a graded reward, a critic, LoRA, a KL loss",
        "healthy",
        overrides=(
            "algorithm.adv_estimator=gae",
            "critic.model.path={folder}/model",
            "algorithm.lam=0.95",
            f"{M}.lora_rank=8",
            f"{A}.use_kl_loss=true",
            f"{A}.entropy_coeff=0.001",
            "trainer.critic_warmup=2",
        ),
        edits=(reward(_GRADED),),
    ),
]


SMALL = (
    "data.train_batch_size=4",
    f"{A}.ppo_mini_batch_size=4",
    "data.max_prompt_length=256",
    "data.max_response_length=128",
    f"{R}.n=4",
    f"{R}.multi_turn.max_assistant_turns=6",
    "trainer.total_training_steps=20",
)
MISSED = {
    "every prompt is the same": "a game whose secret only the tool knows has one prompt, too",
    "generation ends at another token": "a run ends turns where the template does, whatever the tokenizer's eos_token is",
}
QUICK = {
    "prompts end with the answer",
    "pays for listing every number",
    "another model's calls",
    "tool answers are cut",
    "one state for all conversations",
    "sessions share their state",
    "warm-up longer than the run",
    "stops at every call",
    "rewards fade within an answer",
    "trajectories get less time than a call",
    "no tools, tags, rloo",
}
"""Run without `-m slow`: one of each kind that needs a check of its own, and a right one."""


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    """What the runs begin with: `agent/`, with its model, `environment/`, and `quickstart/`."""
    folder = tmp_path_factory.mktemp("base")
    write_agent("agent", folder)
    runpy.run_path(str(folder / "agent" / "model.py"))
    (folder / "environment").mkdir()
    (folder / "environment" / "counter.py").write_text(ENVIRONMENT)
    made = ["--output-dir", str(folder / "quickstart"), "--train", "64", "--val", "8", "--test", "8"]
    assert not run(cli, ["data", "arithmetic", *made, "--demonstrations", "8"])
    return folder


def findings(wrong: Run, base: Path, folder: Path) -> list[str]:
    """The errors and warnings of `etude check`, after a run's files are copied to `folder` and its mistake is made."""
    shutil.copytree(base / wrong.base, folder, dirs_exist_ok=True)
    shutil.copytree(base / "agent" / "model", folder / "model", dirs_exist_ok=True)
    for edit in wrong.edits:
        edit(folder)
    name, path, given = "agent", folder, [f"trainer.rollout_data_dir={folder}/run/rollouts"]
    if wrong.base == "environment":
        kind = f"counter_{abs(hash(folder))}"  # a name is registered once in a process
        replace("counter.py", ('@environment("counter")', f'@environment("{kind}")'))(folder)
        name, path = "grpo_trainer", None
        given = [
            f"env={kind}",
            f"{A}.optim.lr=1e-4",
            f"plugins=[{folder}/counter.py]",
            *SMALL,
            f"{M}.path={folder}/model",
        ]
    elif wrong.base == "quickstart":
        name, path = "quickstart", None
        given = [f"data.{split}_files={folder}/{split}.parquet" for split in ("train", "val")]
        given.append(f"{M}.path={folder}/model")
    given = [*given, f"trainer.default_local_dir={folder}/run", *wrong.overrides]
    found = inspect_run(name, [each.replace("{folder}", str(folder)) for each in given], path).all
    wanted = (Level.ERROR, Level.WARNING)
    return [f"{each.subject}: {each.message} → {each.fix}" for each in found if each.level in wanted]


def _rows(runs):
    for each in runs:
        marks = [] if each.name in QUICK else [pytest.mark.slow]
        if each.name in MISSED:
            marks.append(pytest.mark.xfail(reason=MISSED[each.name], strict=True))
        yield pytest.param(each, id=f"{each.kind}: {each.name}", marks=marks)


@pytest.mark.parametrize("wrong", _rows(WRONG))
def test_the_cause_of_a_wrong_run_is_named(base, tmp_path, wrong):
    found = findings(wrong, base, tmp_path)
    assert any(cause in line for line in found for cause in wrong.cause), "\n".join(found) or "nothing was found"


@pytest.mark.parametrize("right", _rows(HEALTHY))
def test_a_right_run_is_not_accused(base, tmp_path, right):
    assert findings(right, base, tmp_path) == []


def test_there_are_five_runs_of_each_kind():
    kinds = [each.kind for each in WRONG]
    assert len(kinds) == 50
    assert {kinds.count(kind) for kind in kinds} == {5}
