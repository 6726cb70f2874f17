"""A real HTTP service on loopback for the tools that need one."""

from contextlib import AsyncExitStack

import pytest
from http_stage import listening


@pytest.fixture
async def serve():
    """`await serve(handler, path)` starts a service and returns an address of it; all are stopped after the test."""
    async with AsyncExitStack() as services:

        async def start(handler, path="/search"):
            return await services.enter_async_context(listening(handler)) + path

        yield start
