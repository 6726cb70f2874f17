"""`etude completion SHELL`: prints the shell completion script for commands, options and configuration keys."""

from __future__ import annotations

import click
from click.shell_completion import get_completion_class


@click.command()
@click.argument("shell", type=click.Choice(["bash", "zsh", "fish"]))
def completion(shell: str) -> None:
    """Print what SHELL reads to complete `etude`: commands, options, and the keys of the configuration.

    \b
    Examples:
      etude completion bash > ~/.local/share/bash-completion/completions/etude
      etude completion zsh > "${fpath[1]}/_etude"
      etude completion fish > ~/.config/fish/completions/etude.fish
    """
    from etude.cli.main import cli

    shell_class = get_completion_class(shell)
    assert shell_class is not None
    script = shell_class(cli, {}, "etude", "_ETUDE_COMPLETE")
    click.echo(script.source_template % script.source_vars())
