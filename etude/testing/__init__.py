"""Trials of an agent before it is trained: `inspect_run` checks its configuration and calls each of its tools once,
`inspect_environment` plays agents that must not be paid. Both need no GPU and no weights, and return `Findings`, for the
commands and for tests of one's own:

    from etude.testing import inspect_environment

    def test_my_agent():
        assert not inspect_environment("agent", [], "shop", rows=2).failed
"""

from etude.checks.findings import Finding, Findings, Level
from etude.testing.run import inspect_run
from etude.testing.scripted_agents import inspect_environment
from etude.testing.trial import TrialRollouts, open_trial

__all__ = ["Finding", "Findings", "Level", "TrialRollouts", "inspect_environment", "inspect_run", "open_trial"]
