"""`etude new`: writes a folder with a new agent that runs out of the box, from the templates in `scaffold/`.

Invariant: the folder is written completely or not at all, and existing files are never touched.
"""

from __future__ import annotations

import keyword
import os
import re
import tempfile
from importlib.util import find_spec
from pathlib import Path

import click

from etude.errors import ConfigError, one_line

_SCAFFOLD = Path(__file__).parent / "scaffold"
_NAME = re.compile(r"[a-z][a-z0-9_]{0,39}")
_TAKEN = frozenset({"etude", "test", "tests", "runs", "data", "model", "models"})


@click.group()
def new() -> None:
    """Begin something of your own."""


@new.command()
@click.argument("name")
@click.option(
    "--output-dir",
    type=click.Path(path_type=Path),
    default=Path(),
    help="Folder to write NAME to; default the present one.",
)
@click.option(
    "--pretrained", is_flag=True, help="For SmolLM2, which can talk: a tool that it learns to use in minutes."
)
def agent(name: str, output_dir: Path, pretrained: bool) -> None:
    """Write a folder NAME with an agent that runs as it is: a tool, its YAML, a reward, rows, a run, tests.

    \b
    Examples:
      etude new agent shop
      etude new agent roads --pretrained
    """
    files = write_agent(name, output_dir, pretrained=pretrained)
    folder = files[0].parent
    click.echo(f"{folder}: {', '.join(file.name for file in files)}\n\nnext:")
    run = f"--config-path {folder} --config-name agent"
    commands = [
        f"python {folder}/model.py",
        f"{'' if find_spec('pytest') else 'pip install pytest && '}python -m pytest {folder}",
        f"etude check {run}",
        f"etude env test {run}",
        f"etude play {run}",
        f"etude train {run} trainer.total_training_steps=2",
    ]
    if pretrained:
        commands = ["etude models get smollm2", *commands[2:5], f"etude quickstart --example {folder}"]
    for line in commands:
        click.echo(f"  {line}")
    click.echo(f"\n{folder}/README.md says what each shows, and what to change in which file for a task of your own")


def write_agent(name: str, parent: Path, *, pretrained: bool = False) -> list[Path]:
    """Writes the agent, or that for a pretrained model, to `parent/name` and returns the paths of its files.

    Raises:
        ConfigError: the name is invalid, the path exists, or the folder cannot be written.
    """
    if not _NAME.fullmatch(name) or keyword.iskeyword(name) or name in _TAKEN:
        raise ConfigError(
            f"'{name}' cannot name an agent: give a lower-case word of up to 40 letters, digits and _ that begins with a "
            f"letter and is not a word of Python's nor one of {', '.join(sorted(_TAKEN))}"
        )
    folder, scaffold = parent.expanduser() / name, _SCAFFOLD / "pretrained" if pretrained else _SCAFFOLD
    sources = sorted(file for file in scaffold.iterdir() if file.is_file() and file.name != "__init__.py")
    if folder.exists() or folder.is_symlink():
        raise ConfigError(f"{folder} exists already: give another name")
    try:
        parent.expanduser().mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=f".{name}-", dir=folder.parent) as temporary:
            made = Path(temporary) / name
            made.mkdir()
            for source in sources:
                text = source.read_text(encoding="utf-8").replace("AGENT_NAME", name)
                (made / source.name).write_text(text, encoding="utf-8")
            os.rename(made, folder)
    except OSError as error:
        raise ConfigError(f"{folder} cannot be written: {one_line(error)}") from error
    return [folder / source.name for source in sources]
