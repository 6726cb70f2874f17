"""Creates an example's inputs: the tables made by its `prepare`, and an untrained model with a tokenizer trained on them.

Invariant: everything follows from the seed. A `model` folder that `prepare` wrote itself is kept.
"""

from __future__ import annotations

import hashlib
import logging
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from etude.errors import WARNING, ConfigError, describe_error
from etude.options.model_path import NAMED_MODELS, cache_folder, named_folder
from etude.quickstart.example import CALCULATOR, Example, Rows, Tables, find_example

logger = logging.getLogger(__name__)
TOOLS = (
    Path(__file__).parents[1] / "tools" / "builtin" / "configs" / "calculator_terse.yaml"
)  # the one in quickstart.yaml
TABLES = ("train", "val", "test", "demonstrations")
_SLOW = 30.0  # seconds after which `prepare` is asked about
_READ = 3000  # demonstrations to train the tokenizer on


def write_tables(example: Example, folder: Path, seed: int, rows: Rows) -> None:
    """Writes `folder/data/*.parquet`.

    Raises:
        ConfigError: `prepare` did not return the expected tables, or found no more rows.
    """
    from etude.data import write_parquet

    tables, file = _prepare(example, folder, seed, rows), example.folder / "agent.py"
    if not isinstance(tables, dict) or not set(TABLES[:3]) <= set(tables) <= set(TABLES):
        raise ConfigError(
            f"{file}: prepare must return the tables {', '.join(TABLES[:3])}, "
            "and demonstrations where example.yaml asks for some"
        )
    fewer = {name: getattr(rows, name) for name in tables if len(tables[name]) < getattr(rows, name)}
    if fewer:
        lacking = ", ".join(f"{len(tables[name]):,} of {asked:,} of {name}" for name, asked in fewer.items())
        fix = f"make more, or ask for fewer: rows in {example.folder / 'example.yaml'}"
        logger.warning(WARNING, f"{file}: prepare made fewer rows than asked for: {lacking}", fix)
    for name, table in tables.items():
        write_parquet(list(table), folder / "data" / f"{name}.parquet")
    trained, tested = {*map(_question, tables["train"])}, [*map(_question, tables["test"])]
    again = sum(question in trained for question in tested)
    if 2 * again > len(tested) and len({asked for asked, _ in tested}) > 1:  # else the environment hides what differs
        line = f"{file}: prepare gives {again:,} of {len(tested):,} test rows to train on, too: they measure memory"
        logger.warning(WARNING, line, "let `prepare` make no row of test that is in train")


def _question(row: Mapping[str, Any]) -> tuple[str, str]:
    """What a row asks, and its truth; of rows that nobody has checked yet, unlike those of `data.rows.question_of`."""
    return str(row.get("prompt")), str(row.get("reward_model"))


def _prepare(example: Example, folder: Path, seed: int, rows: Rows) -> Any:
    """Returns what `prepare` does; one that has run out of rows fails, or looks for more without end, which is told."""
    assert example.prepare is not None
    file, asked = example.folder / "agent.py", ", ".join(f"{getattr(rows, name):,} of {name}" for name in TABLES)
    fix = f"are there as many? rows in {example.folder / 'example.yaml'} says how many to ask for"
    line = f"{file}: prepare is still at work after {_SLOW:g} s; it was asked for {asked}"
    slow = threading.Timer(_SLOW, logger.warning, (WARNING, line, fix))
    slow.daemon = True
    slow.start()
    try:
        return example.prepare(folder, seed, rows)
    except (ValueError, LookupError, StopIteration) as error:
        raise ConfigError(f"{file}: prepare: {describe_error(error)}; it was asked for {asked}", fix=fix) from error
    finally:
        slow.cancel()


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
        if "actor_rollout_ref.model.path" not in given:
            example.warn_of_model()
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
