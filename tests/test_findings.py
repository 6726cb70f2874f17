"""Findings of an inspection: what a step returns, raises or logs."""

import logging

import pytest

from etude.errors import ConfigError
from etude.findings import Findings, Level


def fails():
    raise ConfigError("tools.yaml: no such tool")


def warns():
    logging.getLogger("etude.tools").warning("tools.yaml: two tools have one name")
    return "3 tools"


@pytest.mark.parametrize(
    ("step", "levels"),
    [(lambda: "3 tools", [Level.OK]), (lambda: None, []), (warns, [Level.WARNING]), (fails, [Level.ERROR])],
    ids=["returns a line", "returns nothing", "logs a warning", "raises"],
)
def test_a_step_is_ok_only_if_it_raised_and_logged_nothing(step, levels):
    findings = Findings()
    findings.run("tools", step, fix="edit tools.yaml")
    assert [finding.level for finding in findings.all] == levels
    assert all(finding.fix for finding in findings.all if finding.level is not Level.OK)


def test_a_step_without_what_it_needs_is_skipped():
    findings = Findings()
    findings.run("tools", fails, fix="", ready=False)
    assert [finding.level for finding in findings.all] == [Level.SKIPPED]
    assert not findings.failed
