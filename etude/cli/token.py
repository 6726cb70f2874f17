"""Options that the commands which start a server share: its further names, and its bearer token.

Invariant: the token comes from an option, a file or an environment variable; an empty one is rejected, since it would
protect nothing.
"""

from __future__ import annotations

import os
from pathlib import Path

import click

from etude.errors import ConfigError

allow_hosts = click.option(
    "--allow-host",
    "allow_hosts",
    metavar="NAME",
    multiple=True,
    help="A further DNS name by which clients reach the server; repeatable. Other names are refused: DNS rebinding.",
)


def bearer_token(token: str | None, token_file: Path | None, variable: str) -> str | None:
    """Returns the token from --token, --token-file or the environment variable `variable`; None if there is none.

    Raises:
        ConfigError: both options are given, the file cannot be read, or the token is empty.
    """
    if token is not None and token_file is not None:
        raise ConfigError("give --token or --token-file, not both")
    if token_file is not None:
        try:
            token = token_file.read_text(encoding="utf-8").strip()
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"--token-file {token_file}: {error}") from error
    if token is None:
        token = os.environ.get(variable)
    if token is not None and not token.strip():
        raise ConfigError("the token is empty; leave it out for a server that asks for none")
    return token


def warn_if_open(token: str | None, host: str) -> None:
    """Warns if a server without a token is reachable from other machines."""
    if token is None and host not in ("127.0.0.1", "localhost", "::1"):
        click.echo(f"warning: {host} may be reached by others, and there is no --token", err=True)
