"""Executors for the sandbox's tests: one for each isolated mode of this machine, opened once a module."""

import asyncio

import pytest

from etude.sandbox import Executor, ExecutorOptions, Isolation, SandboxUnavailableError


class Box:
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


def open_box(mode, **options):
    try:
        return Box(mode, **options)
    except SandboxUnavailableError as error:
        pytest.skip(str(error))


@pytest.fixture(
    scope="module", params=[Isolation.BUBBLEWRAP, Isolation.NAMESPACES, Isolation.NONE], ids=lambda m: m.value
)
def box(request):
    """Every mode; programs here are friendly."""
    box = open_box(request.param)
    yield box
    box.close()


@pytest.fixture(scope="module")
def isolated_box():
    """The best isolated mode of this machine."""
    box = open_box(Isolation.AUTO)
    yield box
    box.close()
