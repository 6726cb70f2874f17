"""`etude sandbox`: serves the sandbox over HTTP, and verifies the isolation on this machine."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import click

from etude.cli.listening import limit, listening, protected

if TYPE_CHECKING:
    from etude.sandbox import Executor

ISOLATIONS = ("auto", "bubblewrap", "namespaces", "none")


@click.group()
def sandbox() -> None:
    """Run model-written code in isolation."""


@sandbox.command()
@listening(8080)
@click.option("--workers", type=click.IntRange(1), help="Programs at once; default one per CPU.")
@click.option(
    "--max-concurrency", type=click.IntRange(1), help="Requests at once, waiting ones included; default 64 per worker."
)
@click.option("--queue-seconds", default=60.0, show_default=True, help="Longest wait for a worker.")
@click.option("--max-run-seconds", default=600.0, show_default=True, help="Longest run_timeout a request may ask for.")
@click.option(
    "--max-compile-seconds", default=120.0, show_default=True, help="Longest compile_timeout a request may ask for."
)
@limit("--memory-mb", 1024, "Memory of a program, and the maximum it may request.", least=16)
@limit("--max-request-mb", 32, "Largest request.")
@click.option(
    "--isolation",
    default="auto",
    show_default=True,
    type=click.Choice(ISOLATIONS),
    help="'none' runs code as this user.",
)
@protected("ETUDE_SANDBOX_TOKEN", grace=30.0)
def serve(
    host: str,
    port: int,
    allow_hosts: tuple[str, ...],
    workers: int | None,
    max_concurrency: int | None,
    queue_seconds: float,
    max_run_seconds: float,
    max_compile_seconds: float,
    memory_mb: int,
    max_request_mb: int,
    isolation: str,
    token: str | None,
    grace: float,
) -> None:
    """Serve Sandbox Fusion's interface: POST /run_code, POST /run_jupyter, GET /v1/ping.

    Further pages: /health, /metrics (Prometheus), /docs (OpenAPI).
    """
    from etude.sandbox import Isolation, Limits  # FastAPI and the executor: kept out of `etude --help`
    from etude.sandbox.server import serve as serve_until_stopped
    from etude.sandbox.service import ServerOptions

    options = ServerOptions(
        workers=workers,
        max_concurrency=max_concurrency,
        queue_seconds=queue_seconds,
        token=token,
        max_request_mb=max_request_mb,
        max_compile_seconds=max_compile_seconds,
        limits=Limits(wall_seconds=max_run_seconds, cpu_seconds=max_run_seconds, memory_mb=memory_mb),
        isolation=Isolation(isolation),
    )

    def ready(url: str, executor: Executor) -> None:
        languages = ", ".join(language.value for language in executor.languages)
        click.echo(f"{url}  isolation {executor.isolation.value}, {executor.workers} workers, {languages}")

    asyncio.run(serve_until_stopped(options, host, port, grace, ready, allow_hosts))


@sandbox.command()
@click.option(
    "--isolation", default="auto", show_default=True, type=click.Choice(ISOLATIONS), help="The mode to check."
)
def check(isolation: str) -> None:
    """Attempt to break every guarantee of the isolation on this machine, and print what the sandbox offers."""
    from etude.sandbox import Executor, Isolation

    async def checked() -> str:
        async with await Executor.open(isolation) as executor:
            isolated = executor.isolation is not Isolation.NONE
            if isolated:
                await executor.check()
            languages = ", ".join(language.value for language in executor.languages)
            holds = "every guarantee holds" if isolated else "nothing is isolated"
            return f"isolation {executor.isolation.value}: {holds}; languages: {languages}"

    click.echo(asyncio.run(checked()))
