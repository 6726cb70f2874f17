"""`etude gateway MODEL`: serves a policy through an OpenAI-compatible API, and records sessions token by token."""

from __future__ import annotations

import asyncio
from pathlib import Path

import click

from etude.cli.config import PLAIN_SETTINGS
from etude.cli.listening import limit, listening, protected

_OURS = ("actor_rollout_ref.rollout.multi_turn.format=auto",)


@click.command(context_settings=PLAIN_SETTINGS)
@click.argument("model")
@click.argument("overrides", nargs=-1, type=click.UNPROCESSED)
@listening(8000)
@click.option(
    "--record",
    type=click.Path(path_type=Path, dir_okay=False),
    help="JSON-lines file that every session is appended to when it ends.",
)
@limit("--max-sessions", 1024, "Sessions at once.")
@click.option(
    "--idle-seconds",
    default=1800.0,
    show_default=True,
    type=click.FloatRange(0, min_open=True),
    help="Idle seconds after which a session ends.",
)
@limit("--max-n", 16, "Choices of one request.")
@limit("--max-turns", 1000, "Requests of one session.")
@limit("--max-request-mb", 32, "Largest request.")
@limit("--max-image-mb", 1024, "Pixel values that one session keeps.")
@protected("ETUDE_GATEWAY_TOKEN")
def gateway(
    model: str,
    overrides: tuple[str, ...],
    host: str,
    port: int,
    allow_hosts: tuple[str, ...],
    record: Path | None,
    idle_seconds: float,
    max_n: int,
    token: str | None,
    grace: float,
    **limits: int,
) -> None:
    """Serve MODEL, a folder or a name on the hub, at /v1/chat/completions.

    Give each conversation its own base URL, /s/NAME/v1: it is recorded as one rollout, and continued without re-encoding
    anything. OVERRIDES are key=value arguments of the configuration: engine, sampling, tool-call format.

    \b
    Example:
      etude gateway models/mine --record rollouts.jsonl actor_rollout_ref.rollout.temperature=0.7
    """
    from etude.config import compose

    config = compose(None, [f"actor_rollout_ref.model.path={model}", *_OURS, *overrides])
    from etude.trainer.gateway import ServingOptions, serve_policy  # torch and FastAPI: kept out of `etude --help`

    options = ServingOptions(
        host=host,
        port=port,
        allow_hosts=allow_hosts,
        token=token,
        record=record,
        idle_seconds=idle_seconds,
        max_choices=max_n,
        grace_seconds=grace,
        **limits,
    )

    def ready(url: str) -> None:
        click.echo(f"{url}/s/NAME/v1  serves {model}, a session for each NAME (Ctrl-C stops)")

    asyncio.run(serve_policy(config, options, ready))
