"""Every family of docs/models.md computes what its own forward pass does, and the page says what Étude does with it."""

import pytest
from families import FAMILIES, PAGES, examine, written


@pytest.mark.filterwarnings("ignore::RuntimeWarning:peft")
@pytest.mark.parametrize("name", FAMILIES)
def test_a_family_is_computed_as_its_own_forward_pass_does_and_its_row_is_current(name):
    row = str(examine(name))
    for page in PAGES:
        assert row in written(page).splitlines(), f"{page.name}: run  python tests/models/families.py --write"


def test_the_pages_have_a_row_for_each_family():
    assert len(FAMILIES) >= 40
    for page in PAGES:
        assert len(written(page).splitlines()) == len(FAMILIES)
