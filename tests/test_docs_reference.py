"""The reference pages that the site is built with say everything: each key, command and public name."""

import importlib
import inspect
import runpy
from pathlib import Path

import pytest
import yaml

from etude.cli.main import COMMANDS
from etude.config.foreign_keys import REFUSED_VALUES
from etude.options import SFTOptions, TrainOptions, declarations
from etude.options.types import allowed
from etude.options.validate import yaml_text

REFERENCE = runpy.run_path(str(Path(__file__).parents[1] / "docs" / "reference.py"))
PAGES: dict[str, str] = REFERENCE["pages"]()
DECLARED = declarations(TrainOptions)


@pytest.mark.parametrize(("heading", "tree"), [("etude train", TrainOptions), ("etude sft", SFTOptions)])
def test_every_key_has_its_type_default_and_meaning(heading, tree):
    part = PAGES["reference/keys.md"].split(f"## Keys of `{heading}`")[1].split("\n## ")[0]
    for section, rows in sections(part).items():
        keys = {each.key.rpartition(".")[2]: each for each in declarations(tree).values() if each.section == section}
        assert keys.keys() == rows.keys()
        for name, each in keys.items():
            takes, default, meaning = rows[name]
            assert takes.startswith(escaped(allowed(each.hint)))
            assert takes.endswith(each.about.unit)
            assert default == escaped(f"`{each.about.written or yaml_text(each.default)}`")
            assert meaning.startswith(escaped(each.about.meaning))


def sections(text: str) -> dict[str, dict[str, list[str]]]:
    found = {}
    for part in text.split("\n### ")[1:]:
        title, *lines = part.splitlines()
        rows = [line[2:-2].split(" | ") for line in lines if line.startswith("| `")]
        found[title.strip("`").replace("At the root", "")] = {row[0].strip("`"): row[1:] for row in rows}
    return found


def escaped(text: str) -> str:
    return text.replace("|", "\\|").replace("<", "&lt;")


def test_the_comparison_with_verl_names_what_differs():
    page = PAGES["reference/verl-keys.md"]
    there = Path(__file__).parents[1] / "docs/reference/verl-keys.md"
    assert there.read_text() == page, "`make docs` writes it anew"
    others = [each for each in DECLARED.values() if each.about.verl_default]
    assert len(others) > 20
    for each in others:
        assert yaml.safe_load(each.about.verl_default) != yaml.safe_load(yaml_text(each.default))
        assert f"| `{each.key}` | `{each.about.verl_default}` |" in page
    for key, refused in REFUSED_VALUES.items():
        [line] = [line for line in page.splitlines() if line.startswith(f"| `{key}` |") and "Refused" in line]
        assert all(f"`{value}`" in line and advice in line for value, advice in refused.items())


def test_every_command_is_there():
    page = PAGES["reference/commands.md"]
    for name in COMMANDS:
        assert f"## etude {name}\n\n```text\nUsage: etude {name} " in page
    assert "### etude new agent\n" in page


@pytest.mark.parametrize("room", REFERENCE["ROOMS"])
def test_every_public_name_has_a_docstring(room):
    module = importlib.import_module(f"etude.{room.replace('/', '.')}")
    names = REFERENCE["exported"](room)
    assert names
    for name in names:
        item = getattr(module, name)
        if inspect.isclass(item) or inspect.isfunction(item):
            assert inspect.getdoc(item), f"{room}: {name}"
