"""Options that the commands which start a server share: where it listens, its further names, its bearer token, and
how long open requests have at the end.

Invariant: the token comes from an option, a file or an environment variable; an empty one is rejected, since it would
protect nothing.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar, cast

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


def limit(name: str, default: int, text: str, *, least: int = 1) -> Callable[[_Command], _Command]:
    """An option for a whole number of `least` or more that bounds what a server takes or keeps."""
    return click.option(name, default=default, show_default=True, type=click.IntRange(least), help=text)


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
    """Adds --token, --token-file and --grace to a command with a `host`; it gets the `token` of any of them or of the
    environment `variable`. Warns of a server without one that is reachable from other machines."""

    def add(command: _Command) -> _Command:
        @functools.wraps(command)
        def with_token(token: str | None, token_file: Path | None, host: str, **options: Any) -> Any:
            token = _bearer_token(token, token_file, variable)
            if token is None and host not in ("127.0.0.1", "localhost", "::1"):
                click.echo(f"warning: {host} may be reached by others, and there is no --token", err=True)
            return command(token=token, host=host, **options)

        text = f"Bearer token that requests must carry; better set {variable}, which other users cannot see."
        path = click.Path(path_type=Path, dir_okay=False)
        end = "Seconds for open requests after Ctrl-C or SIGTERM."
        token_file = click.option("--token-file", type=path, help="A file with the token.")
        seconds = click.option("--grace", default=grace, show_default=True, help=end)
        return cast(_Command, click.option("--token", help=text)(token_file(seconds(with_token))))

    return add


def _bearer_token(token: str | None, token_file: Path | None, variable: str) -> str | None:
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
