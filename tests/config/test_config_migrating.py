"""docs/migrating.md says what the code says."""

import re
from pathlib import Path

import pytest
import yaml

from etude.options import TrainOptions, declarations
from etude.options.validate import yaml_text
from etude.renamed import MODULES

TEXT = (Path(__file__).parents[2] / "docs" / "migrating.md").read_text(encoding="utf-8")
DECLARED = declarations(TrainOptions)


@pytest.mark.parametrize("key", [key for key, each in DECLARED.items() if each.about.verl_default])
def test_a_default_that_is_noted_is_another(key):
    each = DECLARED[key]
    assert yaml.safe_load(each.about.verl_default) != yaml.safe_load(yaml_text(each.default))
    assert f"| `{key}` | `{each.about.verl_default}` |" in TEXT


def test_what_is_refused_of_verl_is_in_the_table():
    [line] = [line for line in TEXT.splitlines() if line.startswith("| `data.truncation` |")]
    assert "Refused: `left`, `right`, `middle` (write error or drop" in line


def test_the_import_table_and_the_advice_agree():
    rows = dict(re.findall(r"^\| `(verl\.[\w.]+)` \| `(etude\.[\w.]+)` \|$", TEXT, re.MULTILINE))
    shared = rows.keys() & MODULES.keys()
    assert shared >= {"verl.utils.rollout_trace", "verl.utils.reward_score"}
    assert {key: rows[key] for key in shared} == {key: MODULES[key] for key in shared}
