"""What the quickstart starts from: an arithmetic task, demonstrations with mostly bad habits, and an untrained model.

Invariant: everything follows from the seed; a folder that is complete is left as it is.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

TOOLS = Path(__file__).parents[1] / "tools" / "builtin" / "configs" / "calculator_terse.yaml"  # as quickstart.yaml says

# Shares of demonstrations that (use the tool well, copy its result wrongly), in the order in which they are learned: first
# how to copy numbers into a call and out of its result, which takes a small model many examples; then mostly to answer
# without it, the habit that the model is left with. Of all demonstrations the majority guesses.
_HABITS = ((0.62, 0.02), (0.30, 0.02))


@dataclass(frozen=True)
class Sizes:
    """Rows of each file, and the vocabulary of the tokenizer."""

    train: int = 2048
    val: int = 128
    test: int = 512
    demonstrations: int = 9600
    vocabulary: int = 512


def prepare(folder: Path, seed: int, sizes: Sizes = Sizes()) -> None:
    """Writes `folder/data/*.parquet` and `folder/model`."""
    from etude.data import write_parquet
    from etude.data.prepare.arithmetic import Habits, make_demonstrations, write

    data = folder / "data"
    write(data, train=sizes.train, val=sizes.val, test=sizes.test, demonstrations=0, seed=seed)
    early, late = (
        make_demonstrations(sizes.demonstrations // 2, 2 * seed + half, Habits(*shares))
        for half, shares in enumerate(_HABITS)
    )
    write_parquet([*early, *late], data / "demonstrations.parquet")
    _write_model(folder, seed, sizes.vocabulary)


def _write_model(folder: Path, seed: int, vocabulary: int) -> None:
    from etude.data import SFTDataset
    from etude.models import TinyModelSpec, build_tiny_model, build_tiny_tokenizer, save_pretrained
    from etude.tools import load_tools

    schemas = [tool.get_openai_tool_schema().to_openai() for tool in load_tools(str(TOOLS))]
    rows = [row["messages"] for row in SFTDataset(str(folder / "data" / "demonstrations.parquet"))][:3000]
    template = build_tiny_tokenizer([], vocabulary)  # knows the chat template, and nothing else yet
    texts = [template.apply_chat_template(messages, tools=schemas, tokenize=False) for messages in rows]
    tokenizer = build_tiny_tokenizer(texts, vocabulary)
    save_pretrained(build_tiny_model(TinyModelSpec(seed=seed), tokenizer), tokenizer, folder / "model")
