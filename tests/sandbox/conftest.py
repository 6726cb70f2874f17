"""Executors for the sandbox's tests: one for each isolated mode of this machine, opened once a module."""

import asyncio

import pytest

from etude.sandbox import Executor, ExecutorOptions, Isolation, SandboxUnavailableError


class Sandbox:
    """An executor and its event loop, for tests that are plain functions."""

    def __init__(self, mode, **options):
        self.loop = asyncio.new_event_loop()
        self.executor = self.do(Executor.open(mode, workers=2, options=ExecutorOptions(**options)))

    def do(self, awaitable):
        return self.loop.run_until_complete(awaitable)

    def run(self, *args, **kwargs):
        from etude.sandbox import RunRequest

        return self.do(self.executor.run(RunRequest(*args, **kwargs)))

    def close(self):
        self.do(self.executor.close())
        self.loop.close()


def open_sandbox(mode, **options):
    try:
        return Sandbox(mode, **options)
    except SandboxUnavailableError as error:
        pytest.skip(str(error))


@pytest.fixture(
    scope="module", params=[Isolation.BUBBLEWRAP, Isolation.NAMESPACES, Isolation.NONE], ids=lambda m: m.value
)
def sandbox(request):
    """Every mode; programs here are friendly."""
    sandbox = open_sandbox(request.param)
    yield sandbox
    sandbox.close()


@pytest.fixture(scope="module")
def isolated_sandbox():
    """The best isolated mode of this machine."""
    sandbox = open_sandbox(Isolation.AUTO)
    yield sandbox
    sandbox.close()
