"""What the shell completes, and what a pipe gets."""

import io
import subprocess
import sys

import pytest
from click.shell_completion import ShellComplete
from rich.table import Table

from etude.cli.console import open_console
from etude.cli.main import cli, run


def completions(line, incomplete):
    found = ShellComplete(cli, {}, "etude", "_ETUDE_COMPLETE").get_completions(line, incomplete)
    return [item.value for item in found]


def test_names_of_configurations(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.yaml").write_text("{}")
    assert "grpo_trainer" in completions(["train", "--config-name"], "")
    assert completions(["train", "--config-name"], "mi") == ["mine"]
    assert completions(["eval", "--config-path", "elsewhere", "--config-name"], "mi") == []


def test_keys_of_the_configuration_that_the_line_names():
    assert completions(["train"], "trainer.total_t") == ["trainer.total_training_steps="]
    assert completions(["sft"], "target_success.lo") == ["target_success.low="]
    assert completions(["train"], "target_success.lo") == []
    assert completions(["train", "--config-name", "nothing"], "trainer") == []


def test_commands_are_completed_without_importing_them():
    assert sorted(completions([], "re")) == ["report", "reproduce", "rescore", "retrieve", "reward"]
    environment = {"_ETUDE_COMPLETE": "bash_complete", "COMP_WORDS": "etude qui", "COMP_CWORD": "1"}
    script = (
        "import sys, atexit; from etude.cli.main import main; "
        "atexit.register(lambda: print(sorted(name for name in sys.modules if name.startswith('etude.cli.')))); main()"
    )
    command = [sys.executable, "-c", script]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60, check=False)
    assert done.stdout == "plain,quickstart\n['etude.cli.main']\n"


def test_bash_completes_after_the_scripts_own_definition(capsys):
    """The script that the command prints, in a real bash, over this interpreter's `etude`."""
    assert run(cli, ["completion", "bash"]) == 0
    script = f"""
        etude() {{ {sys.executable} -m etude "$@"; }}
        export -f etude
        {capsys.readouterr().out}
        env() {{ while [[ $1 == *=* ]]; do local -x "$1"; shift; done; "$@"; }}
        COMP_WORDS=(etude train trainer.total_t) COMP_CWORD=2
        _etude_completion etude
        echo "${{COMPREPLY[@]}}"
    """
    done = subprocess.run(["bash", "-c", script], capture_output=True, text=True, timeout=60, check=False)
    assert done.stdout == "trainer.total_training_steps=\n", done.stderr


@pytest.mark.parametrize(
    ("shell", "mark"), [("zsh", "#compdef etude"), ("fish", "complete --no-files --command etude")]
)
def test_other_shells_have_a_script(shell, mark, capsys):
    assert run(cli, ["completion", shell]) == 0
    shown = capsys.readouterr().out
    assert mark in shown
    assert f"_ETUDE_COMPLETE={shell}_complete" in shown


def test_a_pipe_is_not_wrapped(monkeypatch):
    written = io.StringIO()
    monkeypatch.setattr("sys.stdout", written)
    table = Table("name", "value")
    table.add_row("x" * 150, "y")
    open_console().print(table)
    assert "x" * 150 in written.getvalue()


@pytest.mark.parametrize("command", ["arithmetic", "questions"])
def test_the_help_of_data_says_defaults(command, capsys):
    run(cli, ["data", command, "--help"])
    shown = capsys.readouterr().out
    assert "[default: " in shown
    assert {"arithmetic": "4096", "questions": "searchR1_nq"}[command] in shown
