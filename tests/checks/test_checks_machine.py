"""`etude doctor`: what it says is there was tried, and what is missing comes with the line that mends it."""

import json
from email.message import Message
from importlib.metadata import version

import pytest
from agent_stage import every_finding_has_specific_advice

from etude.checks import machine
from etude.checks.findings import Findings, Level
from etude.cli.main import cli, run
from etude.sandbox import Executor, SandboxUnavailableError

__all__ = ["every_finding_has_specific_advice"]


@pytest.fixture(scope="module")
def inspected():
    return machine.inspect_machine()


def tried(*checks):
    found = Findings()
    for each in checks:
        found.run(each.__name__.strip("_"), lambda each=each: each(None), "see `etude doctor`")
    return found.all


def said(found, subject):
    return " ".join(each.message for each in found.all if each.subject == subject)


@pytest.mark.slow
def test_a_machine_that_runs_the_tests_has_no_error(inspected):
    assert not inspected.failed, inspected.all
    subjects = {each.subject for each in inspected.all}
    assert subjects == {"python", "packages", "processors", "gpu", "sandbox", "extras", "ray", "disk", "limits"}
    assert version("torch") in said(inspected, "packages")


def test_sandbox_modes_are_those_that_prove_themselves(inspected, isolation):
    assert f"{isolation.value}: every guarantee holds" in said(inspected, "sandbox")


def test_a_sandbox_that_does_not_isolate_is_a_warning(monkeypatch):
    async def broken(mode):
        raise SandboxUnavailableError(f"{mode.value}: the host's files can be read")

    monkeypatch.setattr(Executor, "open", broken)
    found = tried(machine._sandbox)
    assert [each.level for each in found] == [Level.WARNING] * 3
    assert "cannot run here" in found[-1].message
    assert "etude sandbox serve" in found[-1].fix


def test_what_a_machine_lacks_comes_with_what_to_set(monkeypatch):
    for name in ("_MIN_FREE", "_MIN_SHARED", "_MIN_FILES"):
        monkeypatch.setattr(machine, name, 2**62)
    monkeypatch.setattr(machine.os, "getloadavg", lambda: (1e6, 1e6, 1e6))
    monkeypatch.setattr(machine.shutil, "which", lambda name: f"/usr/bin/{name}")
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    found = tried(machine._processors, machine._gpu, machine._ray, machine._disk, machine._limits)
    wrong = [(each.subject, each.fix) for each in found if each.level is Level.WARNING]
    assert [subject for subject, _ in wrong] == ["processors", "gpu", "ray", *["disk"] * 3, "limits"]
    for (_, fix), name in zip(
        wrong, ("config.timeout", "nvidia-smi", "--shm-size", "default_local_dir", "TMPDIR", "HF_HOME", "ulimit")
    ):
        assert name in fix


def test_extras_come_with_their_pip_line(monkeypatch):
    lines = [
        "torch>=2.9",
        "there>=1; extra == 'one'",
        "old<2; extra == 'two'",
        "not-there; extra == 'three'",
        "etude[one,two]; extra == 'dev'",
    ]
    monkeypatch.setattr(machine, "requires", lambda name: lines)
    described = Message()
    for extra in ("one", "two", "three", "dev"):
        described["Provides-Extra"] = extra  # one more header each
    monkeypatch.setattr(machine, "metadata", lambda name: described)

    def version_of(name):
        if name == "not-there":
            raise machine.PackageNotFoundError(name)
        return "2.9"

    monkeypatch.setattr(machine, "version", version_of)
    found = tried(machine._extras)
    assert [(each.message, each.fix) for each in found if each.fix] == [
        ("two: old 2.9 is not <2", "if you need it: pip install 'etude[two]'"),
        ("three: not-there is not installed", "if you need it: pip install 'etude[three]'"),
    ]
    assert found[-1].message == "installed: one, dev"


def test_a_base_package_of_another_version_is_an_error(monkeypatch):
    monkeypatch.setattr(machine, "requires", lambda name: ["torch>=2.9,<2.14"])
    monkeypatch.setattr(machine, "version", lambda name: "2.8")
    found = tried(machine._packages)
    assert [(each.level, each.message, each.fix) for each in found] == [
        (Level.ERROR, "torch 2.8 is not <2.14,>=2.9", "run pip install 'torch<2.14,>=2.9'")
    ]


@pytest.mark.slow
def test_the_command_prints_json(capsys):
    assert run(cli, ["doctor", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["ok"] is True
