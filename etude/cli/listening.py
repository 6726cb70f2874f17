"""Options that the commands which start a server share: where it listens, its further names, its bearer token, and
how long open requests have at the end.

Invariant: the token comes from an option, a file or an environment variable; an empty one is rejected, since it would
protect nothing.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import click

from etude.errors import ConfigError

_Command = TypeVar("_Command", bound=Callable[..., Any])

allow_hosts = click.option(
    "--allow-host",
    "allow_hosts",
    metavar="NAME",
    multiple=True,
    help="A further DNS name by which clients reach the server; repeatable. Other names are refused: DNS rebinding.",
)


def listening(port: int, *, only: str = "") -> Callable[[_Command], _Command]:
    """Adds --host, --port (`port` by default) and --allow-host; `only` says of what, for the help."""
    where = f" ({only})." if only else "."

    def add(command: _Command) -> _Command:
        host = click.option("--host", default="127.0.0.1", show_default=True, help=f"Address to listen on{where}")
        number = click.option(
            "--port", default=port, show_default=True, type=click.IntRange(0, 65535), help=f"0 picks a free one{where}"
        )
        return host(number(allow_hosts(command)))

    return add


def protected(variable: str, *, grace: float = 10.0) -> Callable[[_Command], _Command]:
    """Adds --token, --token-file and --grace; `variable` is the environment variable that may hold the token."""

    def add(command: _Command) -> _Command:
        token = click.option(
            "--token",
            help=f"Bearer token that requests must carry; better set {variable}, which other users cannot see.",
        )
        file = click.option(
            "--token-file", type=click.Path(path_type=Path, dir_okay=False), help="A file with the token."
        )
        seconds = click.option(
            "--grace", default=grace, show_default=True, help="Seconds for open requests after Ctrl-C or SIGTERM."
        )
        return token(file(seconds(command)))

    return add


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
