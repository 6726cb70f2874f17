"""`etude view DIR`: the rollouts of a run, as pages in a browser."""

from __future__ import annotations

from pathlib import Path

import click


@click.command()
@click.argument("path", type=click.Path(path_type=Path))
@click.option("--web", is_flag=True, help="Serve pages for a browser.")
@click.option("--host", default="127.0.0.1", show_default=True, help="Address that --web listens on.")
@click.option("--port", default=0, show_default="a free one", type=click.IntRange(0, 65535), help="Port of --web.")
def view(path: Path, web: bool, host: str, port: int) -> None:
    """Browse PATH: a run's folder, a folder of runs, a folder of rollout dumps (verl's too), or one dump."""
    from etude.cli.token import warn_if_open
    from etude.viewer.web.server import serve

    if not web:
        raise click.UsageError("say --web")
    warn_if_open(None, host)
    serve(path, host, port, lambda url: click.echo(f"{url}  (Ctrl-C stops)"))
