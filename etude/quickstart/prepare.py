"""Creates an example's inputs: the tables made by its `prepare`, and an untrained model with a tokenizer trained on them.

Invariant: everything follows from the seed. A `model` folder that `prepare` wrote itself is kept.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from etude.errors import ConfigError
from etude.model_folder import NAMED_MODELS, cache_folder, named_folder
from etude.quickstart.example import CALCULATOR, Example, Rows, Tables, find_example

TOOLS = (
    Path(__file__).parents[1] / "tools" / "builtin" / "configs" / "calculator_terse.yaml"
)  # the one in quickstart.yaml
TABLES = ("train", "val", "test", "demonstrations")
_READ = 3000  # demonstrations to train the tokenizer on


def write_tables(example: Example, folder: Path, seed: int, rows: Rows) -> None:
    """Writes `folder/data/*.parquet`.

    Raises:
        ConfigError: `prepare` did not return the expected tables.
    """
    from etude.data import write_parquet

    assert example.prepare is not None
    tables = example.prepare(folder, seed, rows)
    if not isinstance(tables, dict) or not set(TABLES[:3]) <= set(tables) <= set(TABLES):
        raise ConfigError(
            f"{example.folder / 'agent.py'}: prepare must return the tables {', '.join(TABLES[:3])}, "
            "and demonstrations where example.yaml asks for some"
        )
    for name, table in tables.items():
        write_parquet(list(table), folder / "data" / f"{name}.parquet")


def example_inputs(
    folder: str | None, name: str | None, overrides: Sequence[str], *, needs_model: bool = False
) -> list[str]:
    """Returns overrides for what the quickstart of the example in `folder`, if it is one, would make: its rows, made anew in
    a folder of the cache, and the model, if it is here. Nothing that `overrides` name is made.

    Raises:
        ConfigError: the example cannot be read, `prepare` did not return the expected tables, or `needs_model` and only the
            quickstart makes or downloads it.
    """
    if folder is None or name not in (None, "agent") or not (Path(folder) / "example.yaml").is_file():
        return []
    example, made, given = Example.read(Path(folder)), list[str](), {each.partition("=")[0] for each in overrides}
    model = example.options.model
    if model is not None and (here := named_folder(model) if model in NAMED_MODELS else Path(model)).is_dir():
        made.append(f"actor_rollout_ref.model.path={here}")
    elif needs_model and "actor_rollout_ref.model.path" not in given:
        makes = "makes" if model is None else "fetches"
        raise ConfigError(
            f"{folder} is an example, whose model the quickstart {makes}",
            fix=f"run `etude quickstart --example {folder}`, or give actor_rollout_ref.model.path",
        )
    if example.prepare is not None and "data.train_files" not in given:
        place = cache_folder() / "examples" / hashlib.sha256(str(Path(folder).resolve()).encode()).hexdigest()[:12]
        write_tables(example, place, 1, example.options.rows)
        made += [f"data.{split}_files={place}/data/{split}.parquet" for split in ("train", "val")]
    return [each for each in made if each.partition("=")[0] not in given]


def show_example(tables: Tables, turns: Sequence[Mapping[str, Any]]) -> Tables:
    """Returns the tables with a worked example, given as messages, before each question: for a model whose chat template
    shows no tools. Demonstrations are left out: they were for a model that could not talk."""
    return {
        split: [{**row, "prompt": [*row["prompt"][:-1], *turns, row["prompt"][-1]]} for row in tables[split]]
        for split in TABLES[:3]
    }


def write_model(folder: Path, tool_files: list[str], seed: int, vocabulary: int) -> None:
    """Writes `folder/model`: an untrained model whose tokenizer is trained on the demonstrations and the tool schemas."""
    from etude.data import SFTDataset
    from etude.models import TinyModelSpec, build_tiny_model, build_tiny_tokenizer, save_pretrained
    from etude.tools import load_tools

    if (folder / "model").exists():
        return
    schemas = [tool.get_openai_tool_schema().to_openai() for file in tool_files for tool in load_tools(file)]
    rows = [row["messages"] for row in SFTDataset(str(folder / "data" / "demonstrations.parquet"))][:_READ]
    template = build_tiny_tokenizer([], vocabulary)  # only for its chat template
    texts = [template.apply_chat_template(messages, tools=schemas or None, tokenize=False) for messages in rows]
    tokenizer = build_tiny_tokenizer(texts, vocabulary)
    save_pretrained(build_tiny_model(TinyModelSpec(seed=seed), tokenizer), tokenizer, folder / "model")


def prepare(folder: Path, seed: int, rows: Rows | None = None) -> None:
    """Writes the tables and the untrained model of the quickstart itself."""
    calculator = find_example(CALCULATOR).options
    write_tables(find_example(CALCULATOR), folder, seed, rows or calculator.rows)
    write_model(folder, [str(TOOLS)], seed, calculator.vocabulary)
