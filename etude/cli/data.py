"""`etude data`: prepares and inspects data files for training.

Invariant: a command writes its files completely or not at all, downloads nothing except `--input hub:…`, prints a sample
row, and writes a data card. `etude.data.prepare` defines the rows.
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

import click

_SAMPLE_CHARACTERS = 4000
_DEFAULT_LICENCE = "unknown to this program: see the source"

F = TypeVar("F", bound=Callable[..., Any])


def _input_option(text: str) -> Callable[[F], F]:
    text += " hub:OWNER/NAME fetches a data set."
    return click.option("--input", "inputs", type=click.Path(), multiple=True, required=True, help=text)


def _output_option(name: str) -> Callable[[F], F]:
    kind = click.Path(path_type=Path)
    return click.option("--output-dir", "--out", type=kind, default=f"data/{name}", help="Folder to write to.")


_code = click.option("--code", is_flag=True, help="Offer the code_interpreter tool.")
_FILES = "File (its name is the rows' split) or folder of files; may be given more than once."


@click.group(context_settings={"show_default": True})
def data() -> None:
    """Make parquet files to train on, and look into them."""


@data.command()
@_output_option("arithmetic")
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
    _show(paths, "Arithmetic", (), "none needed: generated")


@data.command()
@_input_option("Folder with train.jsonl and/or test.jsonl, or such a file; may be given more than once.")
@_output_option("gsm8k")
@click.option(
    "--tool",
    type=click.Choice(["calc_gsm8k_reward", "code_interpreter"]),
    default="calc_gsm8k_reward",
    help="The tool that rows name.",
)
def gsm8k(inputs: tuple[str, ...], output_dir: Path, tool: str) -> None:
    """Turn GSM8K's public files into rows for the `calc_gsm8k_reward` tool, or the code interpreter.

    Reads lines {"question": …, "answer": "… #### 72"}. A line without a final answer is an error that names it.

    \b
    Example:
      etude data gsm8k --input ~/grade-school-math --output-dir data/gsm8k
    """
    from etude.data.prepare import gsm8k as task

    sources = _sources(inputs)
    _show(task.write(sources, output_dir, tool=tool), "GSM8K", sources, "MIT")


@data.command()
@_input_option(_FILES)
@_output_option("math")
@_code
def math(inputs: tuple[str, ...], output_dir: Path, code: bool) -> None:
    """Turn MATH (or MATH-500) into rows whose answer is in \\boxed{}.

    Reads rows {"problem", "solution", "answer"}; without "answer", it is the last \\boxed{} of the solution.

    \b
    Example:
      etude data math --input MATH/test.jsonl --output-dir data/math
    """
    from etude.data.prepare import math as task

    sources = _sources(inputs)
    _show(task.write(sources, output_dir, form="math", code=code), "MATH", sources, "MIT")


@data.command()
@_input_option(_FILES)
@_output_option("dapo")
@_code
def dapo(inputs: tuple[str, ...], output_dir: Path, code: bool) -> None:
    """Turn DAPO's maths problems (or AIME's) into rows whose last line is `Answer: …`.

    Reads rows in verl's form {"prompt": [messages], "reward_model": {"ground_truth"}}, or {"problem", "answer"}.

    \b
    Example:
      etude data dapo --input dapo-math-17k.parquet --code
    """
    from etude.data.prepare import math as task

    sources = _sources(inputs)
    _show(task.write(sources, output_dir, form="dapo", code=code), "DAPO maths", sources, _DEFAULT_LICENCE)


@data.command()
@_input_option(_FILES)
@_output_option("humaneval")
@_code
def humaneval(inputs: tuple[str, ...], output_dir: Path, code: bool) -> None:
    """Turn HumanEval into rows scored by its tests in the sandbox.

    \b
    Example:
      etude data humaneval --input HumanEval.jsonl
    """
    from etude.data.prepare import programs as task

    sources = _sources(inputs)
    _show(task.write(sources, output_dir, form="humaneval", code=code), "HumanEval", sources, "MIT")


@data.command()
@_input_option(_FILES)
@_output_option("mbpp")
@_code
def mbpp(inputs: tuple[str, ...], output_dir: Path, code: bool) -> None:
    """Turn MBPP into rows scored by its tests in the sandbox.

    \b
    Example:
      etude data mbpp --input sanitized-mbpp.json
    """
    from etude.data.prepare import programs as task

    sources = _sources(inputs)
    _show(task.write(sources, output_dir, form="mbpp", code=code), "MBPP", sources, "CC BY 4.0")


@data.command()
@_input_option(_FILES + " The split of irrelevance.jsonl and live_relevance.jsonl says what is right.")
@_output_option("bfcl")
def bfcl(inputs: tuple[str, ...], output_dir: Path) -> None:
    """Turn single-turn files of the Berkeley Function-Calling Leaderboard into rows scored call by call.

    Reads rows {"question", "function", "ground_truth"}: BFCL's, with its possible answers joined by id.

    \b
    Example:
      etude data bfcl --input simple_python.jsonl --input irrelevance.jsonl
    """
    from etude.data.prepare import bfcl as task

    sources = _sources(inputs)
    _show(task.write(sources, output_dir), "Berkeley Function-Calling Leaderboard", sources, "Apache-2.0")


@data.command()
@_input_option("Folder with Geometry3K's parquet files, or such a file; may be given more than once.")
@_output_option("geo3k")
def geo3k(inputs: tuple[str, ...], output_dir: Path) -> None:
    """Turn Geometry3K's public files into rows for the `calc_geo3k_reward` tool.

    Reads rows {"problem", "answer", "images"} of the splits train, validation and test.

    \b
    Example:
      etude data geo3k --input ~/geometry3k --output-dir data/geo3k
    """
    from etude.data.prepare import geo3k as task

    sources = _sources(inputs)
    _show(task.write(sources, output_dir), "Geometry3K", sources, _DEFAULT_LICENCE)


@data.command()
@_input_option("File of questions; may be given more than once. The output file has the same name.")
@_output_option("questions")
@click.option("--tool", type=click.Choice(["search", "web_search"]), default="search", help="The tool that rows name.")
@click.option(
    "--data-source", default="searchR1_nq", help="The rows' data source, which picks their scorer: searchR1_hotpotqa …"
)
@click.option("--tags", is_flag=True, help="Ask for <search> tags (format search_r1) instead of tool calls.")
def questions(inputs: tuple[str, ...], output_dir: Path, tool: str, data_source: str, tags: bool) -> None:
    """Turn questions with short answers into rows for a search tool, in Search-R1's style: NQ, HotpotQA, TriviaQA …

    Reads rows {"question": …, "answers": [text, …]} (also "answer" or "golden_answers"), such as NQ-Open's.

    \b
    Example:
      etude data questions --input nq_open_dev.jsonl --output-dir data/nq
    """
    from etude.data.prepare import questions as task

    sources = _sources(inputs)
    paths = task.write(sources, output_dir, tool=tool, data_source=data_source, tags=tags)
    _show(paths, f"Questions ({data_source})", sources, _DEFAULT_LICENCE)


@data.command()
@_input_option("File of questions about images; may be given more than once.")
@_output_option("pictures")
@click.option("--data-source", default="etude/pictures", help="The rows' data source, which picks their scorer.")
def pictures(inputs: tuple[str, ...], output_dir: Path, data_source: str) -> None:
    """Turn questions about images into rows for the `image_zoom_in_tool`.

    Reads rows {"question": …, "answer": …, "image": path or bytes}; paths are relative to the file.

    \b
    Example:
      etude data pictures --input photos/train.jsonl --output-dir data/pictures
    """
    from etude.data.prepare import pictures as task

    sources = _sources(inputs)
    _show(task.write(sources, output_dir, data_source), f"Pictures ({data_source})", sources, _DEFAULT_LICENCE)


@data.command("video-holmes")
@_input_option("Folder with train_Video-Holmes.json and/or test_Video-Holmes.json, or such a file.")
@click.option(
    "--videos", type=click.Path(path_type=Path), required=True, help="Folder with the videos, <video ID>.mp4."
)
@_output_option("video-holmes")
def video_holmes(inputs: tuple[str, ...], videos: Path, output_dir: Path) -> None:
    """Turn Video-Holmes into rows for the video tools.

    Reads rows {"video ID", "Question", "Options", "Answer"}. A missing video is an error that names its row.

    \b
    Example:
      etude data video-holmes --input ~/Video-Holmes --videos ~/Video-Holmes/videos
    """
    from etude.data.prepare import video_holmes as task

    sources = _sources(inputs)
    _show(task.write(sources, videos, output_dir), "Video-Holmes", sources, _DEFAULT_LICENCE)


@data.command()
@_input_option("Dump file of trainer.rollout_data_dir, or a folder of them; may be given more than once.")
@_output_option("traces")
@click.option("--min-score", default=1.0, help="Leave rollouts with a lower score out.")
@click.option("--per-prompt", type=click.IntRange(1), help="At most so many different rollouts of a prompt, the best.")
def traces(inputs: tuple[str, ...], output_dir: Path, min_score: float, per_prompt: int | None) -> None:
    """Collect the rollouts of a run that are worth imitating, for `etude sft`.

    \b
    Example:
      etude data traces --input runs/mine/rollouts --per-prompt 2
      etude sft data.train_files=data/traces/traces.jsonl model.path=models/mine
    """
    from etude.data.prepare import traces as task

    sources = _sources(inputs)
    paths = task.write(sources, output_dir, min_score=min_score, per_prompt=per_prompt)
    _show(paths, "Traces", sources, "that of the prompts", sample=False)


@data.command()
@click.argument("file", type=click.Path(path_type=Path))
@click.option("--model", help="Folder or name of a model, whose tokenizer and chat template measure prompts.")
@click.option(
    "--tools", "tool_config", type=click.Path(path_type=Path), help="Tool configuration that a run would use."
)
@click.option(
    "--tools-in-system", metavar="FORMAT", help="As multi_turn.tools_in_system=true in this multi_turn.format."
)
@click.option("--set", "settings", multiple=True, metavar="KEY=VALUE", help="As data.apply_chat_template_kwargs.KEY.")
@click.option("--prompt-key", default="prompt", help="Column with the messages.")
@click.option("--image-key", default="images", help="Column with the images, for a vision-language model.")
@click.option("--problems", "most", default=10, type=click.IntRange(0), help="How many problems to list.")
def inspect(
    file: Path,
    model: str | None,
    tool_config: Path | None,
    tools_in_system: str | None,
    settings: tuple[str, ...],
    prompt_key: str,
    image_key: str,
    most: int,
) -> int:
    """Print what FILE holds: rows, columns, lengths, tool kwargs, and what a run would stumble over.

    Exit status 1 if there are problems.

    \b
    Example:
      etude data inspect data/gsm8k/train.parquet --model models/mine --tools tools.yaml
    """
    from etude.cli.chat import template_kwargs
    from etude.data.inspection import inspect_file

    for option, value in (("--tools-in-system", tools_in_system), ("--set", settings)):
        if value and model is None:
            raise click.UsageError(f"{option} needs --model")
    report = inspect_file(
        file,
        model=model,
        tool_config=tool_config,
        prompt_key=prompt_key,
        image_key=image_key,
        tools_in_system=tools_in_system,
        chat_template_kwargs=template_kwargs(settings),
    )
    for line in report.lines(most):
        click.echo(line)
    return 1 if report.problems else 0


def _sources(inputs: Sequence[str]) -> list[Path]:
    from etude.data.prepare.sources import fetch_inputs

    return fetch_inputs(inputs)


def _show(paths: dict[str, Path], title: str, sources: Sequence[Path], licence: str, *, sample: bool = True) -> None:
    """Writes the data card; prints each file's path and number of rows, and the first row of the first file."""
    from etude.data.files import located_rows, without_nulls
    from etude.data.prepare.card import count_rows, licence_beside, write_card

    for split, path in paths.items():
        click.echo(f"{split:<15} {count_rows(path):>7,} rows  {path}")
    if not paths:
        return
    card = write_card(title, paths, sources, licence=licence_beside(sources) or licence, command=_command())
    click.echo(f"{'data card':<29} {card}" if card else "no data card: there is a README.md of another's")
    if sample:
        split, path = next(iter(paths.items()))
        _, row = next(located_rows(path))
        text = json.dumps(without_nulls(row), indent=2, ensure_ascii=False, default=_to_json)
        click.echo(f"\nthe first row of {split}:\n{text[:_SAMPLE_CHARACTERS]}")


def _command() -> str:
    """Returns the current command line with its non-default options, in declaration order."""
    context = click.get_current_context()
    words = ["etude", "data", str(context.info_name)]
    for parameter in context.command.params:
        value = context.params.get(parameter.name or "")
        if isinstance(parameter, click.Option) and value != parameter.get_default(context):
            name = parameter.opts[0]
            values = value if parameter.multiple else [value]
            words += [name] if parameter.is_flag else [part for each in values for part in (name, str(each))]  # type: ignore[union-attr]
    return shlex.join(words)


def _to_json(value: object) -> str:
    """JSON fallback for other values; bytes, such as an image's, become a placeholder with their size."""
    return f"({len(value)} bytes)" if isinstance(value, bytes) else str(value)
