"""A real HTTP service on loopback for the tools that need one."""

import pytest
from aiohttp import web


@pytest.fixture
async def serve():
    """`await serve(handler, path)` starts a service and returns its address; all are stopped after the test."""
    runners = []

    async def start(handler, path="/search"):
        application = web.Application()
        application.router.add_route("*", path, handler)
        runner = web.AppRunner(application, shutdown_timeout=0.1)
        await runner.setup()
        runners.append(runner)
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        return f"http://127.0.0.1:{runner.addresses[0][1]}{path}"

    yield start
    for runner in runners:
        await runner.cleanup()
