"""Findings of an inspection: what a check yields, raises or logs; and an error's fix and key, wherever it goes."""

import logging
import pickle

import pytest

from etude.checks.findings import Finding, Findings, Level, check, ok, warning
from etude.errors import WARNING, ConfigError, ConfigErrors, DataError, EtudeError, MissingExtraError


def raises():
    yield "not reached"
    raise ConfigError("tools.yaml: no such tool")


def logs():
    logging.getLogger("etude.tools").warning("tools.yaml: two tools have one name")
    yield "3 tools"


def says(*found):
    return lambda: iter(found)


def found(checked):
    findings = Findings()
    findings.run("tools", checked, "edit tools.yaml")
    return findings.all


@pytest.mark.parametrize(
    ("checked", "levels"),
    [
        (says("3 tools"), [Level.OK]),
        (says(), []),
        (logs, [Level.WARNING]),
        (raises, [Level.ERROR]),
        (says(warning("slow", "wait"), "3 tools"), [Level.WARNING]),
        (says(warning("slow", "wait"), ok("3 tools")), [Level.WARNING, Level.OK]),
        (says(ConfigError("a"), ConfigError("b"), ConfigError("a")), [Level.ERROR, Level.ERROR]),
    ],
)
def test_a_check_is_ok_only_if_it_found_nothing_else(checked, levels):
    assert [finding.level for finding in found(checked)] == levels
    assert all(finding.fix for finding in found(checked) if finding.level is not Level.OK)


def test_the_fix_of_an_error_or_warning_comes_before_that_of_the_check():
    log = logging.getLogger("etude.tools")

    def several():
        log.warning(WARNING, "two tools have one name", "name one of them `other`")
        yield ConfigError("no tools", fix="set tools")
        raise ConfigErrors([ConfigError("a is 1", key="a", fix="set a=2"), ConfigError("b is 1 (reward.py:6)")])

    assert [(each.message, each.fix) for each in found(several)] == [
        ("no tools", "set tools"),
        ("a is 1", "set a=2"),
        ("b is 1 (reward.py:6)", "mend reward.py:6; edit tools.yaml"),
        ("two tools have one name", "name one of them `other`"),
    ]


def test_a_stage_runs_its_checks_in_order_and_skips_those_that_lack_something():
    @check("test", "first", fix=lambda run: f"fix {run}")
    def first(run):
        raise DataError("gone")
        yield

    @check("test", "second", needs="result")
    def second(run):
        yield "never"

    @check("test", "third")
    def third(run):
        raise DataError("absent")
        yield

    findings = Findings().run_stage("test", "it", fix="see the manual")
    assert findings.failed
    assert [(each.subject, each.level, each.fix) for each in findings.all] == [
        ("first", Level.ERROR, "fix it"),
        ("second", Level.SKIPPED, ""),
        ("third", Level.ERROR, "see the manual"),
    ]
    assert [each.subject for each in Findings().run_stage("test", "it", fix="x", leave_out="second").all] == [
        "first",
        "third",
    ]


def test_a_finding_without_advice_is_refused():
    with pytest.raises(ValueError, match="no advice"):
        Finding(Level.WARNING, "rows", "something is wrong")


@pytest.mark.parametrize(
    "error",
    [
        ConfigError("n is 1", key="n", fix="set n=2"),
        MissingExtraError("LoRA", "lora"),
        ConfigErrors([ConfigError("a", key="a"), ConfigError("b", fix="set b")]),
        DataError("row 3 is empty").at("rows.jsonl"),
        EtudeError(),
    ],
    ids=repr,
)
def test_an_error_keeps_its_fix_and_key_between_processes(error):
    again = pickle.loads(pickle.dumps(error))
    assert type(again) is type(error)
    assert (str(again), again.message, again.fix, again.key) == (str(error), error.message, error.fix, error.key)


def test_an_error_is_one_line_that_ends_with_its_fix():
    error = DataError("no answer", fix="leave the row out", key="data.train_files").at("rows.jsonl:3")
    assert str(error) == "rows.jsonl:3: no answer; leave the row out"
    assert (error.message, error.fix, error.key) == (
        "rows.jsonl:3: no answer",
        "leave the row out",
        "data.train_files",
    )
