"""The reference pages, made from the code whenever the site is built: none of them stands in the repository.

Keys come from their declarations in etude/options/, commands from their own --help, public names from their docstrings
(mkdocstrings reads those). Needs Étude alone, no MkDocs.
"""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator
from pathlib import Path

import click

from etude.cli.main import cli
from etude.config.foreign_keys import ALIASES, REFUSED_VALUES
from etude.options import SFTOptions, TrainOptions, declarations
from etude.options.declare import Declaration
from etude.options.types import allowed
from etude.options.validate import yaml_text

PACKAGE = Path(__file__).parents[1] / "etude"
ROOMS = [
    "tools",
    "agents",
    "environments",
    "agents/environments",
    "agents/interactions",
    "chat",
    "rewards",
    "data",
    "algorithms",
    "sandbox",
    "retrieval",
    "inference",
    "training",
    "models",
    "limits",
    "distributed",
    "protocol",
    "trajectory",
    "trace",
    "registry",
    "testing",
    "errors",
]
"""The modules with public names, in the order of the site's navigation."""


def pages() -> dict[str, str]:
    """Path below docs/ → Markdown."""
    written = {"reference/keys.md": keys(), "reference/verl-keys.md": verl_keys(), "reference/commands.md": commands()}
    return written | {f"reference/{room.replace('/', '-')}.md": public_names(room) for room in ROOMS}


# -- configuration keys ------------------------------------------------------------------------------------------------


def keys() -> str:
    lines = [
        "# Configuration keys\n",
        "How they are set and checked: [Configuration](../training.md#configuration). `etude config KEY` says the same of "
        "one key, and where its value came from.\n",
        "## Keys of `etude train` and `etude eval`\n",
        *_sections(declarations(TrainOptions)),
        "## Keys of `etude sft`\n",
        *_sections(declarations(SFTOptions)),
    ]
    return "\n".join(lines)


def _sections(declared: dict[str, Declaration]) -> Iterator[str]:
    sections: dict[str, list[Declaration]] = {}
    for each in declared.values():
        sections.setdefault(each.section, []).append(each)
    for section, members in sections.items():
        yield f"### `{section}`\n" if section else "### At the root\n"
        yield from _table(("key", "takes", "default", "meaning"), (_row(each) for each in members))


def _row(each: Declaration) -> tuple[str, ...]:
    about = each.about
    takes = f"{allowed(each.hint)}, in {about.unit}" if about.unit else allowed(each.hint)
    applies = f" *Applies {each.when[-1][1].condition}.*" if each.when else ""
    alias = f" Another name of `{about.alias_of}`." if about.alias_of else ""
    return f"`{each.key.rpartition('.')[2]}`", takes, f"`{_default(each)}`", f"{about.meaning}{alias}{applies}"


def _default(each: Declaration) -> str:
    return each.about.written or yaml_text(each.default)


def _table(head: tuple[str, ...], rows: Iterable[tuple[str, ...]]) -> Iterator[str]:
    yield from (_cells(head), "|---" * len(head) + "|", *(_cells(row) for row in rows), "")


def _cells(texts: tuple[str, ...]) -> str:
    return f"| {' | '.join(text.replace('|', chr(92) + '|').replace('<', '&lt;') for text in texts)} |"


# -- beside verl's keys ------------------------------------------------------------------------------------------------


def verl_keys() -> str:
    declared = declarations(TrainOptions)
    names = {key: each.about.alias_of for key, each in declared.items() if each.about.alias_of} | ALIASES
    others = [each for each in declared.values() if each.about.verl_default]
    lines = [
        "# Keys of verl\n",
        "Keys that are not listed have verl's name, meaning and default, or are "
        "[refused with what to write](../migrating.md#command-lines).\n",
        "## Other names\n",
        "Sections with all that is below them.\n",
        *_table(("there", "here"), ((f"`{theirs}`", f"`{ours}`") for theirs, ours in sorted(names.items()))),
        "## Same name, other meaning\n",
        *_table(("key", "verl", "here"), _meanings(declared)),
        "## Other defaults\n",
        f"{len(others)} keys have another default than in verl 0.9.1's `ppo_trainer`. Set those that a run relies on:\n",
        *_table(
            ("key", "verl", "here"),
            ((f"`{each.key}`", f"`{each.about.verl_default}`", f"`{_default(each)}`") for each in others),
        ),
        "`null` for an option of the policy loss means the loss's own default, which verl's is for `vanilla` "
        "([all of them](../algorithms.md#policy-losses)); verl's -1 for `lr_warmup_steps` means its ratio. Weights and "
        "their arithmetic are float32 (`model.dtype`), where verl's FSDP computes in bfloat16.\n",
    ]
    return "\n".join(lines)


def _meanings(declared: dict[str, Declaration]) -> Iterator[tuple[str, str, str]]:
    for key, each in declared.items():
        refused: dict[str, list[str]] = {}
        for value, advice in REFUSED_VALUES.get(key, {}).items():
            refused.setdefault(advice, []).append(f"`{value}`")
        lines = [f"Refused: {', '.join(values)} ({advice})." for advice, values in refused.items()]
        if each.about.verl_meaning or lines:
            yield f"`{key}`", each.about.verl_meaning, " ".join([each.about.meaning, *lines])


# -- commands ----------------------------------------------------------------------------------------------------------


def commands() -> str:
    lines = ["# Commands\n", "What each says with `--help`.\n"]
    for name, text in helps(cli, click.Context(cli, info_name="etude")):
        lines += [f"{'##' if name.count(' ') < 2 else '###'} {name}\n", f"```text\n{text}\n```\n"]
    return "\n".join(lines)


def helps(command: click.Command, context: click.Context) -> Iterator[tuple[str, str]]:
    """(full name, help) of a command and all below it."""
    yield context.command_path, command.get_help(context)
    if isinstance(command, click.Group):
        for name in command.list_commands(context):
            below = command.get_command(context, name)
            if below is not None and not below.hidden:
                yield from helps(below, click.Context(below, info_name=name, parent=context))


# -- public names ------------------------------------------------------------------------------------------------------


def public_names(room: str) -> str:
    """The page of a room: one entry a name, which mkdocstrings fills in."""
    module = f"etude.{room.replace('/', '.')}"
    members = "".join(f"        - {name}\n" for name in exported(room))
    return f"# {module}\n\n::: {module}\n    options:\n      members:\n{members}"


def exported(room: str) -> list[str]:
    """A room's `__all__`; of a module without one, its own public classes and functions."""
    path = PACKAGE / room / "__init__.py"
    tree = ast.parse((path if path.exists() else PACKAGE / f"{room}.py").read_text(encoding="utf-8"))
    for node in tree.body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__":
            return list(ast.literal_eval(node.value))
    definitions = (node.name for node in tree.body if isinstance(node, ast.ClassDef | ast.FunctionDef))
    return [name for name in definitions if not name.startswith("_")]
