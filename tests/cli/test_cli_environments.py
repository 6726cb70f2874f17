"""`etude env list` and `etude env check`."""

import io
import json

import pytest

from etude.cli.main import cli, run

pytest.importorskip("gymnasium")

OWN = """
from etude.environments import Environment, environment


@environment("cli_own")
class Own(Environment):
    def reset(self, task, seed):
        return f"{seed}"

    def score(self):
        return 0.0
"""


@pytest.fixture(scope="module")
def own(tmp_path_factory):
    file = tmp_path_factory.mktemp("own") / "own.py"
    file.write_text(OWN)
    return f"--plugins={file}"


def test_an_environment_is_played_by_its_id(own, capsys, monkeypatch):
    monkeypatch.setattr("sys.stdin", io.StringIO("right\nright\ndown\n\ndown\ndown\nright\n"))
    assert run(cli, ["play", "gym:FrozenLake-v1", "is_slippery=false"]) == 0
    shown = capsys.readouterr().out
    assert "write one action: left, down, right, up" in shown
    assert "Write one of: left, down, right, up." in shown
    assert shown.endswith("reward 1: acc 1\n")
    monkeypatch.setattr("sys.stdin", io.StringIO("/quit\n"))
    assert run(cli, ["play", "cli_own", own, "--row=2"]) == 0
    assert capsys.readouterr().out == "4\nreward 0\n"
    assert run(cli, ["play", "gym:FrozenLak-v1"]) == 2
    assert "did you mean 'FrozenLake-v1'" in capsys.readouterr().err


def test_what_can_be_opened_is_listed(own, capsys):
    assert run(cli, ["env", "list", own]) == 0
    shown = capsys.readouterr().out
    assert all(name in shown for name in ("gym:NAME", "reasoning_gym:NAME", "textarena:NAME", "cli_own"))
    assert run(cli, ["env", "list", "gym"]) == 0
    assert "gym:FrozenLake-v1\n" in capsys.readouterr().out
    assert run(cli, ["env", "list", "gim"]) == 2
    assert "did you mean 'gym:'" in capsys.readouterr().err


def test_what_reset_misses_in_its_task_is_named_with_what_to_write(tmp_path, capsys):
    own = OWN.replace("cli_own", "cli_words").replace('f"{seed}"', 'task["word"]')
    (tmp_path / "words.py").write_text(own)
    assert run(cli, ["env", "check", "cli_words", f"--plugins={tmp_path}/words.py", "--json"]) == 1
    [wrong] = [each for each in json.loads(capsys.readouterr().out)["findings"] if each["level"] == "error"]
    assert "words.py:8); the task is empty: Own defines no tasks(self, split)" in wrong["message"]
    assert wrong["fix"].startswith("write tasks(self, split) in Own, which lists {'word': …}")


def test_a_class_that_is_not_registered_is_told_how(own, capsys):
    assert run(cli, ["env", "check", "qqq", own]) == 1
    shown = " ".join(capsys.readouterr().out.split())
    assert "write @environment('qqq') before its class" in shown
    assert "docs/from-trl.md" in shown


def test_an_environment_is_checked(own, capsys):
    assert run(cli, ["env", "check", "cli_own", own, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["ok"] is True
    assert run(cli, ["env", "check", "gym:FrozenLake-v1", "--args", "{slippery: true}"]) == 1
    assert "slippery" in capsys.readouterr().out
