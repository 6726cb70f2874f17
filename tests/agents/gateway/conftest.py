"""What the tests of agents behind the gateway share."""

import pytest

from etude.agents import AGENT_LOOPS
from etude.agents.gateway import OpenAIAgentLoop


@pytest.fixture
def loop_of(monkeypatch):
    """Registers an agent for one test, and gives its name."""
    monkeypatch.setattr(AGENT_LOOPS, "_items", dict(AGENT_LOOPS._items))

    def enter(function=None, **own):
        def loop(**given):
            return OpenAIAgentLoop(**given, function=function, **own)

        AGENT_LOOPS.register("an_agent")(loop)
        return "an_agent"

    return enter
