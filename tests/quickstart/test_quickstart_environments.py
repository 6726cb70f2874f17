"""The examples of others' environments: their rows pick an environment, and their players play it to its end."""

from pathlib import Path

import pytest
import yaml

import etude
from etude.quickstart.example import Rows, find_example

FOLDER = Path(etude.__file__).parents[1] / "examples" / "environments"
NAMES = sorted(path.parent.name for path in FOLDER.glob("*/example.yaml"))
ROWS = Rows(train=4, val=2, test=2, demonstrations=6)


@pytest.mark.parametrize("name", NAMES)
def test_rows_are_seeds_of_the_environments_that_it_names(name, tmp_path):
    example = find_example(f"environments/{name}")
    tables = example.prepare(tmp_path, 1, ROWS)
    entries = yaml.safe_load((example.folder / "agent.yaml").read_text())["env"]
    named = {each.get("name", each["id"]) for each in entries}
    rows = [row for split in ("train", "val", "test") for row in tables[split]]
    assert {row["extra_info"]["env"] for row in rows} == named
    assert len({row["extra_info"]["env_seed"] for row in rows}) == len(rows) == 8
    assert ("demonstrations" in tables) is (example.options.model is None)
    talks = [[each["role"] for each in row["messages"]] for row in tables.get("demonstrations", [])]
    assert all(roles == ["user", "assistant"] * (len(roles) // 2) for roles in talks)
