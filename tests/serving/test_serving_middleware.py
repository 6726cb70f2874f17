"""The bodies of all requests in progress together are bounded; small requests always pass."""

import asyncio

import httpx
from fastapi import FastAPI, Request

from etude.serving.middleware import BodyLimit

LARGE, SMALL = b"x" * (1 << 20), b"x"


async def test_large_bodies_beyond_what_a_server_holds_are_told_to_come_again():
    app, inside, over = FastAPI(), asyncio.Semaphore(0), asyncio.Event()
    app.add_middleware(BodyLimit, max_bytes=len(LARGE))

    @app.post("/")
    async def hold(request: Request) -> int:
        size = len(await request.body())
        inside.release()
        await over.wait()
        return size

    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://localhost") as client:
        held = [asyncio.create_task(client.post("/", content=LARGE)) for _ in range(8)]
        for _ in held:
            await inside.acquire()
        refused = await asyncio.wait_for(client.post("/", content=LARGE), 30)
        assert (refused.status_code, refused.headers["retry-after"]) == (429, "1")
        small = asyncio.create_task(client.post("/", content=SMALL))
        await inside.acquire()
        over.set()
        assert [each.json() for each in await asyncio.gather(*held, small)] == [len(LARGE)] * 8 + [1]
        assert (await client.post("/", content=LARGE)).json() == len(LARGE)
