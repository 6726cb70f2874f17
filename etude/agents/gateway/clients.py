"""`Clients`: `openai` clients for the trajectories of one event loop, over shared connection pools.

A pool per trajectory would cost tens of milliseconds of CPU time each, mostly to load certificates. Certificates are
verified as usual, since an agent may point a copy of its client at another server (`with_options`).

Invariant: a client knows only its trajectory's address and key. It never retries: a failed request is either rejected for
good or fails the whole trajectory.
"""

from __future__ import annotations

import asyncio
import importlib.util
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

from etude.errors import MissingExtraError

if TYPE_CHECKING:
    from openai import AsyncOpenAI, OpenAI

_SECONDS = 86_400.0  # a trajectory has a time limit of its own


class Clients:
    """Created by `Clients.here` for the running event loop."""

    def __init__(self) -> None:
        import openai

        unlimited = type(openai.DEFAULT_CONNECTION_LIMITS)()  # waiting for a connection could block all others
        pool: dict[str, Any] = {"trust_env": False, "limits": unlimited, "timeout": _SECONDS}
        self._pool, self._thread_pool = openai.DefaultAsyncHttpxClient(**pool), openai.DefaultHttpxClient(**pool)
        given: dict[str, Any] = {
            "api_key": "none",
            "base_url": "http://127.0.0.1",
            "max_retries": 0,
            "timeout": _SECONDS,
        }
        self._asynchronous = openai.AsyncOpenAI(http_client=self._pool, **given)
        self._synchronous = openai.OpenAI(http_client=self._thread_pool, **given)

    @staticmethod
    def check_installed() -> None:
        """Raises MissingExtraError without the package."""
        if importlib.util.find_spec("openai") is None:
            raise MissingExtraError("an agent with an openai client", "openai")

    @staticmethod
    def here() -> Clients:
        """The clients of the running event loop."""
        loop = asyncio.get_running_loop()
        if loop not in _clients:
            _clients[loop] = Clients()
        return _clients[loop]

    @staticmethod
    def taken() -> list[Clients]:
        """The clients of the running event loop, to be closed: the next `here` creates new ones."""
        clients = _clients.pop(asyncio.get_running_loop(), None)
        return [] if clients is None else [clients]

    async def close(self) -> None:
        """Closes the connections."""
        self._thread_pool.close()
        await self._pool.aclose()

    def asynchronous(self, base_url: str, api_key: str) -> AsyncOpenAI:
        """A client for coroutines."""
        return self._asynchronous.copy(base_url=base_url, api_key=api_key)

    def synchronous(self, base_url: str, api_key: str) -> OpenAI:
        """A client for threads."""
        return self._synchronous.copy(base_url=base_url, api_key=api_key)


_clients: WeakKeyDictionary[asyncio.AbstractEventLoop, Clients] = WeakKeyDictionary()
