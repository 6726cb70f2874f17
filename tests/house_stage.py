"""The stage of whole runs: tiny arithmetic files, a model that has learnt by heart to call the calculator, and a score
that spreads, so that a step takes a fraction of a second and changes the weights."""

import json
import os
import sys
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path

from safetensors.torch import load_file

from etude.cli.main import cli, run
from etude.config import compose
from etude.data.files import write_parquet
from etude.models import TinyModelSpec, build_tiny_model, load_tokenizer, save_pretrained
from etude.quickstart.example import Rows
from etude.quickstart.prepare import TOOLS, prepare
from etude.run_folder import read_metrics
from etude.trainer.run import fine_tune

AGENT = '''
"""An agent in one file: a lenient parser of sums, and a score that differs from answer to answer."""

import json
import re

from etude.chat import ParsedResponse, ToolParser
from etude.schemas import FunctionCall


@ToolParser.register("sums")
class Sums(ToolParser):
    def parse(self, text, tools=None):
        found = re.findall(r"<tool_call>[^<]*?([0-9] [+] [0-9])", text)
        calls = [FunctionCall(name="calculator", arguments=json.dumps({"expression": each})) for each in found]
        return ParsedResponse(text, calls)


def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    return sum(solution_str.count(digit) for digit in "02468") / 8
'''
ROLLOUT = "actor_rollout_ref.rollout"
ACTOR = "actor_rollout_ref.actor"
ROWS = Rows(train=8, val=3, test=3, demonstrations=32)


@dataclass(frozen=True)
class Tiny:
    """A folder with `data/*.parquet`, `agent.py`, and the model."""

    folder: Path

    @classmethod
    def build(cls, folder):
        prepare(folder, 1, ROWS)
        (folder / "agent.py").write_text(AGENT)
        shrink(folder / "model")
        write_parquet([by_heart(n) for n in range(24)], folder / "by_heart.parquet")
        fine_tune(
            compose(
                "quickstart_sft",
                [
                    f"data.train_files={folder}/by_heart.parquet",
                    f"model.path={folder}/model",
                    f"multi_turn.tool_config_path={TOOLS}",
                    f"trainer.default_local_dir={folder}/sft",
                    "trainer.total_training_steps=60",
                    "data.train_batch_size=4",
                    "optim.name=adamw",
                    "optim.lr=5e-3",
                    "optim.lr_warmup_steps=5",
                    "optim.lr_scheduler_type=constant",
                    "trainer.num_threads=1",
                    "trainer.logger=[]",
                ],
                root="sft",
            )
        )
        return cls(folder)

    @property
    def model(self):
        return self.folder / "sft" / "huggingface"

    def arguments(self, run_dir, *overrides):
        """`etude train` arguments of a tiny run in `run_dir`: two prompts a step, four answers each, six steps."""
        return [
            "--config-name=grpo_trainer",
            f"data.train_files={self.folder}/data/train.parquet",
            "data.train_batch_size=2",
            "data.max_prompt_length=128",
            "data.max_response_length=72",
            f"actor_rollout_ref.model.path={self.model}",
            f"{ROLLOUT}.n=4",
            f"{ROLLOUT}.multi_turn.tool_config_path={TOOLS}",
            f"plugins=[{self.folder}/agent.py]",
            f"{ROLLOUT}.multi_turn.format=sums",
            f"{ACTOR}.optim.lr=1e-3",
            f"custom_reward_function.path={self.folder}/agent.py",
            "trainer.total_training_steps=6",
            f"trainer.default_local_dir={run_dir}",
            f"trainer.rollout_data_dir={run_dir}/rollouts",
            "trainer.logger=[jsonl]",
            "trainer.report=false",
            "trainer.deterministic=true",
            "trainer.device=cpu",
            "trainer.num_threads=1",
            *overrides,
        ]

    def config(self, run_dir, *overrides):
        """The same as a configuration."""
        name, *rest = self.arguments(run_dir, *overrides)
        return compose(name.removeprefix("--config-name="), rest)


def shrink(folder):
    """Puts an untrained model of 90,000 parameters in place of the quickstart's."""
    tokenizer = load_tokenizer(folder)
    spec = TinyModelSpec(hidden_size=64, num_layers=2, intermediate_size=128, seed=1)
    save_pretrained(build_tiny_model(spec, tokenizer), tokenizer, folder)


def by_heart(number):
    """One of two conversations: a call, its result, an answer."""
    a, b = 2 + number % 2, 3 + number % 2
    call = {"type": "function", "function": {"name": "calculator", "arguments": {"expression": f"{a} + {b}"}}}
    return {
        "messages": [
            {"role": "system", "content": "Use the calculator tool."},
            {"role": "user", "content": f"Compute {a} + {b}."},
            {"role": "assistant", "content": "", "tool_calls": [call]},
            {"role": "tool", "content": str(a + b)},
            {"role": "assistant", "content": f"The answer is \\boxed{{{a + b}}}."},
        ]
    }


def weights(run_dir, step, role="actor"):
    """The tensors of a checkpoint's model."""
    return load_file(run_dir / f"global_step_{step}" / role / "huggingface" / "model.safetensors")


def same(first, second):
    """Whether two sets of tensors are equal bit for bit."""
    return first.keys() == second.keys() and all(bool((first[name] == second[name]).all()) for name in first)


def metrics(run_dir):
    """The records of `metrics.jsonl`, one a line, unmerged."""
    return [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]


def steps(run_dir):
    """The step of each line of `metrics.jsonl`."""
    return [record["step"] for record in metrics(run_dir)]


def one_line_error(capsys, arguments):
    """What `etude` with wrong `arguments` says: one line on stderr, nothing on stdout, status 2."""
    capsys.readouterr()
    status = run(cli, [str(argument) for argument in arguments])
    out, err = capsys.readouterr()
    assert status == 2, (status, out, err)
    assert out == ""
    assert err.startswith("error: ")
    assert err.count("\n") == 1, err
    return err.removeprefix("error: ").rstrip("\n")


class Launched:
    """`etude` with `arguments` in a process of its own; its output goes to `log`."""

    def __init__(self, arguments, log):
        self.log = log
        context = get_context("forkserver")  # imports once, then forks before anything runs
        context.set_forkserver_preload(["etude.trainer.run", "house_stage"])
        self.process = context.Process(target=_run_logged, args=([str(a) for a in arguments], str(log)))
        self.process.start()

    def signal(self, number):
        os.kill(self.process.pid, number)

    def wait(self):
        """The exit status; minus the signal's number where one killed it."""
        self.process.join(120)
        assert self.process.exitcode is not None, self.text()
        return self.process.exitcode

    def text(self):
        return self.log.read_text() if self.log.exists() else ""


def _run_logged(arguments, log):
    output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(output, 1)
    os.dup2(output, 2)
    sys.exit(run(cli, arguments))


__all__ = [
    "ACTOR",
    "ROLLOUT",
    "ROWS",
    "Launched",
    "Tiny",
    "metrics",
    "one_line_error",
    "read_metrics",
    "same",
    "steps",
    "weights",
]
