"""`etude view DIR`: the rollouts of a run, in the terminal."""

from __future__ import annotations

import sys
from pathlib import Path

import click

from etude.errors import ConfigError, MissingExtraError


@click.command()
@click.argument("path", type=click.Path(path_type=Path))
@click.option("--filter", "query", default="", help="Show these first, as in  'score>0.5 tool:search words'.")
def view(path: Path, query: str) -> None:
    """Browse the rollouts of PATH: a run's folder, a folder of rollout dumps (verl's too), or one dump.

    Steps and trajectories with search, filters, sorting, the rollouts of a prompt side by side, and every token with its
    mask and log-prob. A run that is still writing is followed. Press ? for the keys.

    \b
    Examples:
      etude view runs/etude/mine
      etude view runs/etude/mine --filter 'score:0 flag:truncated'
    """
    from etude.viewer.index import RolloutIndex

    index = RolloutIndex(path)
    try:
        from etude.viewer.tui import ViewApp
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] != "textual":
            raise
        raise MissingExtraError("etude view", "viewer") from error
    app = ViewApp(index, query)
    if not (sys.stdin.isatty() and sys.stdout.isatty()):
        raise ConfigError(
            "etude view needs a terminal; etude explain prints one trajectory, etude report writes a page"
        )
    app.run()
