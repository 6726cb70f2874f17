"""What stands in this folder is at hand for the folders below it, too: pytest puts a conftest's folder on the path."""

import pytest

from etude.agents import AGENT_LOOPS, register


@pytest.fixture
def loop_named():
    """Registers agent loops for one test."""
    names = []

    def enter(name, loop_class):
        register(name)(loop_class)
        names.append(name)

    yield enter
    for name in names:
        AGENT_LOOPS._items.pop(name, None)
