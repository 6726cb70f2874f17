"""`etude data`: makes the parquet files that training reads.

Invariant: a command writes its files whole or not at all, downloads nothing, and shows one of the rows it wrote. What
the rows hold is left to `etude.data.prepare`.
"""

from __future__ import annotations

import json
from pathlib import Path

import click

_SAMPLE_CHARACTERS = 4000


@click.group()
def data() -> None:
    """Make parquet files to train on."""


@data.command()
@click.option("--output-dir", type=click.Path(path_type=Path), default="data/arithmetic", help="Folder to write to.")
@click.option("--train", default=4096, help="Prompts to train on.")
@click.option("--val", default=256, help="Prompts for validation while training.")
@click.option("--test", default=256, help="Prompts for the final evaluation.")
@click.option("--demonstrations", default=2048, help="Conversations for supervised fine-tuning, mostly wrong habits.")
@click.option("--seed", default=0, help="Another seed draws other questions; splits stay disjoint whatever the seeds.")
def arithmetic(output_dir: Path, train: int, val: int, test: int, demonstrations: int, seed: int) -> None:
    """Generate the quickstart's arithmetic task.

    Questions such as "Compute 7 * 8 + 5." for a model with a `calculator` tool. No two splits share a question; a count
    of 0 leaves that file out.

    \b
    Example:
      etude data arithmetic --output-dir data/arithmetic --train 2048 --seed 1
    """
    from etude.data.prepare import arithmetic as task

    paths = task.write(output_dir, train=train, val=val, test=test, demonstrations=demonstrations, seed=seed)
    _show(paths)


@data.command()
@click.option(
    "--input",
    "inputs",
    type=click.Path(path_type=Path),
    multiple=True,
    required=True,
    help="Folder with train.jsonl and/or test.jsonl, or such a file; may be given more than once.",
)
@click.option("--output-dir", type=click.Path(path_type=Path), default="data/gsm8k", help="Folder to write to.")
def gsm8k(inputs: tuple[Path, ...], output_dir: Path) -> None:
    """Turn GSM8K's public files into rows for the `calc_gsm8k_reward` tool.

    Reads lines {"question": …, "answer": "… #### 72"}; nothing is downloaded. A line without a final answer is an error
    that names it.

    \b
    Example:
      etude data gsm8k --input ~/grade-school-math --output-dir data/gsm8k
    """
    from etude.data.prepare import gsm8k as task

    _show(task.write(inputs, output_dir))


def _show(paths: dict[str, Path]) -> None:
    """Prints where each file went, with its number of rows, and one row of the first."""
    from etude.data.files import read_rows, without_nulls

    tables = {split: read_rows(path) for split, path in paths.items()}
    for split, path in paths.items():
        click.echo(f"{split:<15} {len(tables[split]):>7,} rows  {path}")
    if tables:
        split = next(iter(tables))
        sample = json.dumps(without_nulls(tables[split][0]), indent=2, ensure_ascii=False)
        click.echo(f"\nthe first row of {split}:\n{sample[:_SAMPLE_CHARACTERS]}")
