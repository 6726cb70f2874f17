"""A real HTTP service on loopback."""

from contextlib import asynccontextmanager

from aiohttp import web


@asynccontextmanager
async def listening(handler, port=0):
    """Has `handler` answer every request within the block; yields the address."""
    application = web.Application()
    application.router.add_route("*", "/{path:.*}", handler)
    runner = web.AppRunner(application, shutdown_timeout=0.1)
    await runner.setup()
    try:
        await web.TCPSite(runner, "127.0.0.1", port).start()
        yield f"http://127.0.0.1:{runner.addresses[0][1]}"
    finally:
        await runner.cleanup()
