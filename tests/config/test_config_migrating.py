"""The tables of docs/migrating.md say what the tree says."""

import re
from pathlib import Path

import pytest
import yaml
from omegaconf import OmegaConf

from etude.config import compose
from etude.renamed import MODULES

TEXT = (Path(__file__).parents[2] / "docs" / "migrating.md").read_text(encoding="utf-8")
TABLE = TEXT.partition("<!-- defaults: verl 0.9.1 -->\n")[2].partition("\n\n")[0]
CELLS = [[cell.strip() for cell in line.strip("|").split("|")] for line in TABLE.splitlines()[2:]]
DEFAULTS = {key: (there, here) for keys, there, here in CELLS for key in re.findall(r"`([^`]+)`", keys)}
"""Key → (verl's default, ours), as written."""


def test_the_table_is_as_long_as_the_text_says():
    assert f"{len(DEFAULTS)} have another default" in TEXT


@pytest.mark.parametrize("key", DEFAULTS)
def test_a_default_is_as_the_table_says(key):
    there, here = (yaml.safe_load(cell.strip("`")) for cell in DEFAULTS[key])
    value = OmegaConf.select(compose("ppo_trainer"), key)
    if isinstance(here, str) and here.endswith("…"):  # what follows depends on the run
        assert value.startswith(here[:-1])
    else:
        assert (list(value) if OmegaConf.is_list(value) else value) == here
    assert there != here


def test_the_import_table_and_the_advice_agree():
    rows = dict(re.findall(r"^\| `(verl\.[\w.]+)` \| `(etude\.[\w.]+)` \|$", TEXT, re.MULTILINE))
    shared = rows.keys() & MODULES.keys()
    assert shared >= {"verl.utils.rollout_trace", "verl.utils.reward_score"}
    assert {key: rows[key] for key in shared} == {key: MODULES[key] for key in shared}
