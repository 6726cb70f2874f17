"""`etude view DIR`: browses a run's rollouts in the terminal; with `--web`, rollouts and curves in a browser."""

from __future__ import annotations

import sys
from pathlib import Path

import click

from etude.cli.listening import allow_hosts
from etude.errors import ConfigError, MissingExtraError


@click.command()
@click.argument("path", type=click.Path(path_type=Path))
@click.option("--filter", "query", default="", help="Show these first, as in  'score>0.5 tool:search words'.")
@click.option("--web", is_flag=True, help="Serve pages for a browser: curves, trajectories, tokens, timeline.")
@click.option(
    "--host",
    default="127.0.0.1",
    show_default=True,
    help="Address that --web listens on; beyond this machine, the URL has a token.",
)
@click.option("--port", default=0, show_default="a free one", type=click.IntRange(0, 65535), help="Port of --web.")
@allow_hosts
@click.option("--html", type=click.Path(path_type=Path), help="Write the pages of the run to this one file instead.")
@click.option("--trajectory", default="", help="Only this one goes into --html, such as rollouts/12.jsonl:3.")
def view(
    path: Path,
    query: str,
    web: bool,
    host: str,
    port: int,
    allow_hosts: tuple[str, ...],
    html: Path | None,
    trajectory: str,
) -> None:
    """Browse the rollouts of PATH: a run's folder, a folder of rollout dumps (verl's too), or one dump.

    Steps and trajectories with search, filters, sorting, the rollouts of a prompt side by side, and every token with its
    mask and log-prob. A run that is still writing is followed. Press ? for the keys. With --web PATH may also be a folder
    of runs, which can be compared.

    \b
    Examples:
      etude view runs/etude/mine
      etude view runs/etude/mine --filter 'score:0 flag:truncated'
      etude view runs --web --port 8080
      etude view runs/etude/mine --html mine.html
    """
    if query and (web or html is not None):
        raise ConfigError("--filter is the terminal's: the pages of --web have filters, and --html takes --trajectory")
    if html is not None:
        from etude.viewer.page import write_page

        count = write_page(path, html, trajectory)
        click.echo(f"{html}  {html.stat().st_size / 2**20:.1f} MiB, {count} trajectories")
    elif web:
        from etude.viewer.web import serve

        serve(path, host, port, lambda url: click.echo(f"{url}  (Ctrl-C stops)"), allow_hosts)
    else:
        _show(path, query)


def _show(path: Path, query: str) -> None:
    from etude.viewer.index import RolloutIndex

    index = RolloutIndex(path)
    try:
        from etude.viewer.tui import ViewApp
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] != "textual":
            raise
        raise MissingExtraError("etude view without --web", "viewer") from error
    app = ViewApp(index, query)
    if not (sys.stdin.isatty() and sys.stdout.isatty()):
        raise ConfigError(
            "etude view needs a terminal; etude view --web serves pages, etude explain prints one trajectory"
        )
    app.run()
