"""`etude`: the lazy list of commands, and how each kind of ending becomes an exit status."""

import subprocess
import sys
from pathlib import Path

import click
import pytest

import etude
from etude.cli import main as main_module
from etude.cli.main import COMMANDS, cli, run
from etude.errors import ConfigError, TrainingStopped, user_file
from etude.registry import import_object

ROOT = Path(etude.__file__).parents[1]


def ends_with(error: BaseException | None):
    """A command that ends with `error`."""

    @click.command()
    def command():
        if error is not None:
            raise error

    return command


@pytest.mark.parametrize(
    ("error", "status"),
    [
        (None, 0),
        (ConfigError("a.yaml: no"), 2),
        (TrainingStopped("stopped"), 2),
        (KeyboardInterrupt(), 130),
        (click.Abort(), 130),
        (click.UsageError("odd"), 2),
    ],
)
def test_every_ending_has_its_status(error, status):
    assert run(ends_with(error), []) == status


def test_a_users_error_is_one_line_on_stderr(capsys):
    run(ends_with(ConfigError("first\nsecond")), [])
    out, err = capsys.readouterr()
    assert (out, err) == ("", "error: first second\n")


def test_debugging_shows_the_traceback(monkeypatch):
    monkeypatch.setenv("ETUDE_DEBUG", "1")
    with pytest.raises(ConfigError):
        run(ends_with(ConfigError("x")), [])
    monkeypatch.setenv("ETUDE_DEBUG", "0")
    assert run(ends_with(ConfigError("x")), []) == 2


def test_a_fault_of_ours_keeps_its_traceback(monkeypatch):
    monkeypatch.setattr("etude.errors.user_file", lambda name: None)  # as if this file were ours
    with pytest.raises(ZeroDivisionError):
        run(ends_with(ZeroDivisionError()), [])


def test_a_bug_in_a_users_file_is_one_line_with_its_place(capsys, monkeypatch, tmp_path):
    file = tmp_path / "mine.py"
    file.write_text("import json\n\n\ndef command(**options):\n    return json.loads('{')\n")
    buggy = click.Command("mine", callback=import_object(f"{file}:command"))
    assert run(buggy, []) == 2
    error = f"error: JSONDecodeError: Expecting property name enclosed in double quotes: line 1 column 2 (char 1) ({file}:5)"
    assert capsys.readouterr().err == f"{error}; ETUDE_DEBUG=1 shows the traceback\n"
    monkeypatch.chdir(tmp_path)
    user_file.cache_clear()
    run(buggy, [])
    assert "(mine.py:5)" in capsys.readouterr().err
    monkeypatch.setenv("ETUDE_DEBUG", "1")
    with pytest.raises(ValueError, match="Expecting property name"):
        run(buggy, [])


def test_the_version(capsys):
    assert run(cli, ["--version"]) == 0
    assert etude.__version__ in capsys.readouterr().out


def test_a_misspelt_command_is_answered_with_the_nearest(capsys):
    assert run(cli, ["confg"]) == 2
    assert "did you mean 'config'?" in capsys.readouterr().err


@pytest.mark.parametrize("name", COMMANDS)
def test_every_listed_command_loads(name):
    assert isinstance(cli.get_command(click.Context(cli), name), click.Command)


def test_the_logging_level_is_checked(monkeypatch, capsys):
    monkeypatch.setenv("ETUDE_LOGGING_LEVEL", "WARNIN")
    assert run(cli, ["config", "--yaml"]) == 2
    assert "did you mean 'WARNING'?" in capsys.readouterr().err
    monkeypatch.setenv("ETUDE_LOGGING_LEVEL", "debug")
    assert run(cli, ["config", "--yaml"]) == 0
    assert main_module.logging.getLogger("etude").level == main_module.logging.DEBUG
    main_module.set_logging_level("WARNING")


def test_a_warning_of_the_hub_is_logged_once():
    script = (
        "from etude.cli.main import set_logging_level; from huggingface_hub.utils import logging;"
        "set_logging_level('WARNING'); logging.get_logger('huggingface_hub.utils').warning('retrying')"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, timeout=60, check=True
    )
    assert done.stderr.count("retrying") == 1


MODEL = {"torch", "transformers", "tensordict"}
TOOLS = {"torch", "ray", "transformers", "mcp", "aiohttp"}


@pytest.mark.parametrize(
    ("arguments", "heavy", "words"),
    [
        ("--help", {"torch", "ray", "transformers", "hydra", "omegaconf", "numpy", "pyarrow", "rich"}, "Begin:"),
        *(
            (f"{name} trainer.sed=3", MODEL | {"matplotlib", "pyarrow"}, "did you mean trainer.seed?")
            for name in ("train", "sft", "eval", "quickstart")
        ),
        ("config --yaml -cn gsm8k_tool", MODEL, "tool_config_path"),
        ("tools --help", TOOLS | {"pydantic", "etude.tools"}, "run them by hand"),
        (
            "tools call --help",
            TOOLS | {"pydantic", "etude.tools"},
            "create, one call for each of ARGUMENTS, calc_reward",
        ),
        ("tools list calculator", TOOLS, "calculator"),
    ],
)
def test_a_command_imports_nothing_heavy_before_it_must(arguments, heavy, words):
    script = (
        f"import sys; from etude.cli.main import cli, run; status = run(cli, {arguments.split()}); "
        f"sys.exit(status if not {heavy} & set(sys.modules) else 9)"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == (2 if "=" in arguments else 0), done.stderr
    assert words in " ".join((done.stderr if "=" in arguments else done.stdout).split())
    assert not done.stdout or "=" not in arguments


@pytest.mark.parametrize("arguments", [[], ["data"]])
def test_a_group_by_itself_shows_its_help(arguments, capsys):
    assert run(cli, arguments) == 0
    shown = capsys.readouterr()
    assert f"Usage: {' '.join(['etude', *arguments])} [OPTIONS] COMMAND" in shown.out
    assert not shown.err


def test_each_command_is_listed_once_in_one_line(capsys):
    run(cli, ["--help"])
    shown = capsys.readouterr().out.splitlines()
    for name, (_, line) in COMMANDS.items():
        assert [each.split(maxsplit=1) for each in shown].count([name, line]) == 1, name


def test_a_refused_argument_in_a_process_of_its_own():
    done = subprocess.run(
        [sys.executable, "-m", "etude.cli.main", "config", "trainer.sed=3"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 2
    assert done.stderr == "error: unknown key trainer.sed (command line); did you mean trainer.seed?\n"
    assert done.stdout == ""
