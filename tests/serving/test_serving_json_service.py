"""`decompress` and `read_body`: whatever a server sends, its reader has at most its limit in memory."""

import asyncio
import contextlib
import gc
import gzip
import tracemalloc
import zlib

import pytest
from aiohttp import web
from http_stage import listening
from hypothesis import given
from hypothesis import strategies as st

from etude.errors import InfrastructureError
from etude.inference.http import MAX_ANSWER_BYTES
from etude.serving.json_service import JsonService, decompress

BOMB = gzip.compress(bytes(300 << 20), 9)  # 300 KB; twice, three times: any size


async def pieces(data, size):
    for start in range(0, len(data), size):
        yield data[start : start + size]


def decompressed(data, encoding, size=1 << 16):
    async def read():
        return [piece async for piece in decompress(pieces(data, size), encoding)]

    return asyncio.run(read())


@given(st.binary(max_size=3000), st.integers(1, 700), st.sampled_from(["gzip", "deflate", "GZIP", "", "identity"]))
def test_a_body_is_read_however_it_is_cut(data, size, encoding):
    sent = {"gzip": gzip.compress, "deflate": zlib.compress}.get(encoding.lower(), bytes)(data)
    assert b"".join(decompressed(sent, encoding, size)) == data


def test_pieces_are_small():
    found = decompressed(BOMB, "gzip")
    assert sum(map(len, found)) == 300 << 20
    assert max(map(len, found)) <= 1 << 16


@pytest.mark.parametrize("encoding", ["br", "zstd", "gzip", "gzip, gzip"])
def test_another_encoding_is_refused(encoding):
    with pytest.raises(ValueError, match="compressed"):
        decompressed(b"neither", encoding)


def served(answer, use):
    """Runs `use(url)` beside a server that gives `answer(request)` to every request; returns the peak of memory, too."""

    async def both():
        async with listening(answer) as url:
            tracemalloc.start()
            try:
                return await use(url), tracemalloc.get_traced_memory()[1]
            finally:
                tracemalloc.stop()

    return asyncio.run(both())


async def bomb(request):
    headers = {"Content-Encoding": "gzip", "Content-Type": request.headers.get("Accept", "").split(",")[0]}
    return web.Response(body=BOMB, headers=headers)


def test_a_bomb_is_an_infrastructure_failure_within_bounded_memory():
    async def use(url):
        with pytest.raises(InfrastructureError, match="more than 4000000 bytes"):
            await JsonService(url).request("GET", seconds=30)

    assert served(bomb, use)[1] < 20 << 20
    assert MAX_ANSWER_BYTES < 300 << 20


@pytest.mark.slow
def test_a_caller_who_leaves_as_the_time_is_up_leaves_no_traceback(caplog):
    async def hang(request):
        await asyncio.sleep(1)

    async def use(url):
        service = JsonService(url)

        async def ask(limit):
            with contextlib.suppress(TimeoutError, InfrastructureError):
                await asyncio.wait_for(service.fetch("GET", seconds=0.3), limit)

        await asyncio.gather(*(ask(0.298 + 0.0002 * number) for number in range(40)))

    for _ in range(3):
        served(hang, use)
        gc.collect()
    assert "never retrieved" not in caplog.text


def test_an_mcp_servers_bomb_breaks_its_connection_within_bounded_memory():
    pytest.importorskip("mcp")
    from etude.tools.mcp.options import McpServer
    from etude.tools.mcp.session import McpSession

    async def use(url):
        session = McpSession(
            McpServer(
                name="bomb",
                transport="streamable-http",
                url=f"{url}/mcp",
                connect_timeout=10,
                max_message_bytes=1_000_000,
            )
        )
        with pytest.raises(Exception) as caught:
            await session.opened()
        await session.close()
        return caught

    for kind in ("application/json", "text/event-stream", "text/plain"):

        async def typed(request, kind=kind):
            return web.Response(body=BOMB, headers={"Content-Encoding": "gzip", "Content-Type": kind})

        assert served(typed, use)[1] < 60 << 20, kind
