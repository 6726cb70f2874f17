"""`etude data`: makes the parquet files that training reads.

Invariant: a command writes its files completely or not at all, downloads nothing, and prints one of the rows. Their content
is left to `etude.data.prepare`.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import click

_SAMPLE_CHARACTERS = 4000


F = TypeVar("F", bound=Callable[..., Any])


def _input_option(text: str) -> Callable[[F], F]:
    return click.option("--input", "inputs", type=click.Path(path_type=Path), multiple=True, required=True, help=text)


@click.group(context_settings={"show_default": True})
def data() -> None:
    """Make parquet files to train on."""


@data.command()
@click.option("--output-dir", type=click.Path(path_type=Path), default="data/arithmetic", help="Folder to write to.")
@click.option("--train", default=4096, help="Prompts to train on.")
@click.option("--val", default=256, help="Prompts for validation while training.")
@click.option("--test", default=256, help="Prompts for the final evaluation.")
@click.option("--demonstrations", default=2048, help="Conversations for supervised fine-tuning, mostly wrong habits.")
@click.option("--seed", default=0, help="Another seed draws other questions; splits stay disjoint for all seeds.")
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
@_input_option("Folder with train.jsonl and/or test.jsonl, or such a file; may be given more than once.")
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


@data.command()
@_input_option("Folder with Geometry3K's parquet files, or such a file; may be given more than once.")
@click.option("--output-dir", type=click.Path(path_type=Path), default="data/geo3k", help="Folder to write to.")
def geo3k(inputs: tuple[Path, ...], output_dir: Path) -> None:
    """Turn Geometry3K's public files into rows for the `calc_geo3k_reward` tool.

    Reads rows {"problem", "answer", "images"} of the splits train, validation and test; nothing is downloaded.

    \b
    Example:
      etude data geo3k --input ~/geometry3k --output-dir data/geo3k
    """
    from etude.data.prepare import geo3k as task

    _show(task.write(inputs, output_dir))


@data.command()
@_input_option("File of questions; may be given more than once. The output file has the same name.")
@click.option("--output-dir", type=click.Path(path_type=Path), default="data/questions", help="Folder to write to.")
@click.option("--tool", type=click.Choice(["search", "web_search"]), default="search", help="The tool that rows name.")
@click.option("--data-source", default="searchR1_nq", help="The rows' data source, which picks their scorer.")
@click.option("--tags", is_flag=True, help="Ask for <search> tags (format search_r1) instead of tool calls.")
def questions(inputs: tuple[Path, ...], output_dir: Path, tool: str, data_source: str, tags: bool) -> None:
    """Turn questions with short answers into rows for a search tool.

    Reads rows {"question": …, "answers": [text, …]} (also "answer" or "golden_answers"), such as NQ-Open's.

    \b
    Example:
      etude data questions --input nq_open_dev.jsonl --output-dir data/nq
    """
    from etude.data.prepare import questions as task

    _show(task.write(inputs, output_dir, tool=tool, data_source=data_source, tags=tags))


@data.command()
@_input_option("File of questions about images; may be given more than once.")
@click.option("--output-dir", type=click.Path(path_type=Path), default="data/pictures", help="Folder to write to.")
@click.option("--data-source", default="etude/pictures", help="The rows' data source, which picks their scorer.")
def pictures(inputs: tuple[Path, ...], output_dir: Path, data_source: str) -> None:
    """Turn questions about images into rows for the `image_zoom_in_tool`.

    Reads rows {"question": …, "answer": …, "image": path or bytes}; paths are relative to the file.

    \b
    Example:
      etude data pictures --input photos/train.jsonl --output-dir data/pictures
    """
    from etude.data.prepare import pictures as task

    _show(task.write(inputs, output_dir, data_source))


@data.command("video-holmes")
@_input_option("Folder with train_Video-Holmes.json and/or test_Video-Holmes.json, or such a file.")
@click.option(
    "--videos", type=click.Path(path_type=Path), required=True, help="Folder with the videos, <video ID>.mp4."
)
@click.option("--output-dir", type=click.Path(path_type=Path), default="data/video-holmes", help="Folder to write to.")
def video_holmes(inputs: tuple[Path, ...], videos: Path, output_dir: Path) -> None:
    """Turn Video-Holmes into rows for the video tools.

    Reads rows {"video ID", "Question", "Options", "Answer"}; nothing is downloaded. A missing video is an error
    that names its row.

    \b
    Example:
      etude data video-holmes --input ~/Video-Holmes --videos ~/Video-Holmes/videos
    """
    from etude.data.prepare import video_holmes as task

    _show(task.write(inputs, videos, output_dir))


def _show(paths: dict[str, Path]) -> None:
    """Prints where each file went, with its number of rows, and one row of the first."""
    from etude.data.files import read_rows, without_nulls

    tables = {split: read_rows(path) for split, path in paths.items()}
    for split, path in paths.items():
        click.echo(f"{split:<15} {len(tables[split]):>7,} rows  {path}")
    if tables:
        split = next(iter(tables))
        sample = json.dumps(without_nulls(tables[split][0]), indent=2, ensure_ascii=False, default=_shown)
        click.echo(f"\nthe first row of {split}:\n{sample[:_SAMPLE_CHARACTERS]}")


def _shown(value: object) -> str:
    """A placeholder for values that are not JSON: the bytes of an image."""
    return f"({len(value)} bytes)" if isinstance(value, bytes) else str(value)
