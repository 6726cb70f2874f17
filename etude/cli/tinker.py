"""`etude tinker`: serves the Tinker API over a model of this machine."""

from __future__ import annotations

import asyncio
from pathlib import Path

import click

from etude.cli.listening import limit, listening, protected


@click.command()
@click.argument("model")
@click.option("--name", help="What clients call the model; MODEL and its folder name it too.")
@listening(8000)
@click.option(
    "--checkpoints",
    type=click.Path(path_type=Path, file_okay=False),
    default=Path("tinker-checkpoints"),
    show_default=True,
    help="Folder of what clients save.",
)
@click.option("--dtype", default="float32", show_default=True, help="Of the arithmetic; adapters are float32.")
@limit("--max-tokens", 8192, "Tokens of one forward and backward pass.")
@limit("--max-snapshots", 8, "Unnamed sampler weights that a session may have; older ones are dropped.")
@click.option(
    "--session-seconds", default=120.0, show_default=True, help="Silence of a client after which its session is freed."
)
@protected("TINKER_API_KEY")
def tinker(
    model: str,
    name: str | None,
    host: str,
    port: int,
    allow_hosts: tuple[str, ...],
    checkpoints: Path,
    dtype: str,
    max_tokens: int,
    max_snapshots: int,
    session_seconds: float,
    token: str | None,
    grace: float,
) -> None:
    """Train LoRA adapters on MODEL for programs written for Tinker (a folder, GGUF file, or name of `etude models list`).

    \b
    Example:
      etude tinker smollm2 --port 8000
      TINKER_BASE_URL=http://127.0.0.1:8000 TINKER_API_KEY=tml-local python rl_loop.py
    """
    from etude.errors import ConfigError, MissingExtraError
    from etude.options.model_path import local_folder

    if token is not None and not token.startswith("tml-"):
        raise ConfigError("the token must begin with tml-: the SDK sends no other API key")
    try:
        from etude.tinker.server import create_app
    except ImportError as error:
        raise MissingExtraError("etude tinker", "tinker") from error
    from etude.serving.listening import serve
    from etude.tinker.adapters import Base
    from etude.tinker.checkpoints import CheckpointStore
    from etude.tinker.service import TinkerService

    folder = str((local_folder(model) or Path(model)).absolute())
    base = Base(Path(folder), (name or folder, model, folder), dtype=dtype, max_tokens=max_tokens)
    store = CheckpointStore(checkpoints.expanduser().absolute())
    service = TinkerService(base, store, session_seconds=session_seconds, max_snapshots=max_snapshots)

    def ready(url: str) -> None:
        click.echo(f"{url}  base model {base.name}, checkpoints in {checkpoints} (Ctrl-C stops)")

    asyncio.run(serve(create_app(service, token), host, port, grace=grace, ready=ready, allow_hosts=allow_hosts))
