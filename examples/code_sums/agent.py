"""Sums that are too hard for a tiny model, and a code interpreter to have them worked out.

Run as a program, this file writes what training starts from, all of it drawn from a seed: questions, demonstrations (most of
them a bad habit: answering 0 without running any code) and an untrained model of 0.6 million parameters. No two files share
a question. Loop, tool and scorer are built in; the tool runs the model's code in the real sandbox.

    python agent.py FOLDER SEED
"""

from __future__ import annotations

import random
import sys
from pathlib import Path
from typing import Any

from etude.data import write_parquet
from etude.data.prepare.arithmetic import DATA_SOURCE, Problem, guess, make_problems
from etude.models import TinyModelSpec, build_tiny_model, build_tiny_tokenizer, save_pretrained
from etude.tools import load_tools

SYSTEM = "Run Python code."
SIZES = {"train": 1024, "val": 64, "test": 128}
HABITS = ((0.65, 5000), (0.3, 5000))  # (share that runs code, demonstrations): first the skill, then mostly the habit
TOOLS = Path(__file__).with_name("tools.yaml")


def prompt(problem: Problem) -> list[dict[str, Any]]:
    """The messages of one question."""
    return [{"role": "system", "content": SYSTEM}, {"role": "user", "content": problem.question}]


def row(problem: Problem, split: str, index: int) -> dict[str, Any]:
    """A row for training or evaluation."""
    return {
        "data_source": DATA_SOURCE,  # scored by the integer in the last \\boxed{}
        "prompt": prompt(problem),
        "reward_model": {"style": "rule", "ground_truth": str(problem.answer)},
        "extra_info": {"index": index, "split": split},
    }


def demonstration(problem: Problem, runs_code: bool) -> dict[str, Any]:
    """A conversation that has the sum worked out, or answers 0 at once."""
    said = str(problem.answer) if runs_code else guess(problem)
    answer = {"role": "assistant", "content": f"The answer is \\boxed{{{said}}}."}
    if not runs_code:
        return {"messages": [*prompt(problem), answer]}
    arguments = {"code": f"print({problem.expression})"}
    call = {"type": "function", "function": {"name": "code_interpreter", "arguments": arguments}}
    printed = {"role": "tool", "content": str(problem.answer)}
    return {"messages": [*prompt(problem), {"role": "assistant", "content": "", "tool_calls": [call]}, printed, answer]}


def make_demonstrations(seed: int) -> list[dict[str, Any]]:
    """First mostly the skill, then mostly the habit."""
    rng = random.Random(f"demonstrations/{seed}")
    problems = iter(make_problems(sum(count for _, count in HABITS), seed, "demonstrations"))
    return [demonstration(next(problems), rng.random() < share) for share, count in HABITS for _ in range(count)]


def write_model(folder: Path, demonstrations: list[dict[str, Any]], seed: int) -> None:
    """An untrained model, and a tokenizer made for these texts."""
    schemas = [tool.get_openai_tool_schema().to_openai() for tool in load_tools(str(TOOLS))]
    template = build_tiny_tokenizer([], 512)
    texts = [
        template.apply_chat_template(each["messages"], tools=schemas, tokenize=False) for each in demonstrations[:3000]
    ]
    tokenizer = build_tiny_tokenizer(texts, 512)
    save_pretrained(build_tiny_model(TinyModelSpec(seed=seed), tokenizer), tokenizer, folder)


def write(folder: Path, seed: int) -> None:
    """Everything that training starts from."""
    folder.mkdir(parents=True, exist_ok=True)
    for split, count in SIZES.items():
        rows = [row(problem, split, index) for index, problem in enumerate(make_problems(count, seed, split))]
        write_parquet(rows, folder / f"{split}.parquet")
    demonstrations = make_demonstrations(seed)
    write_parquet(demonstrations, folder / "demonstrations.parquet")
    write_model(folder / "model", demonstrations, seed)


if __name__ == "__main__":
    write(Path(sys.argv[1]), int(sys.argv[2]))
