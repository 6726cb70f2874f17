"""docs/migrating.md says what the code says."""

import re
from pathlib import Path

from etude.registry import MODULES

TEXT = (Path(__file__).parents[2] / "docs" / "migrating.md").read_text(encoding="utf-8")


def test_the_import_table_and_the_advice_agree():
    rows = dict(re.findall(r"^\| `(verl\.[\w.]+)` \| `(etude\.[\w.]+)` \|$", TEXT, re.MULTILINE))
    shared = rows.keys() & MODULES.keys()
    assert shared >= {"verl.utils.rollout_trace", "verl.utils.reward_score"}
    assert {key: rows[key] for key in shared} == {key: MODULES[key] for key in shared}
