"""`web_search` against a real service: requests as the engine wants them, bounded answers, and what each failure means."""

import asyncio
import gc
import gzip
import json
import socket
import warnings

import pytest
from aiohttp import web
from http_stage import listening

from etude.errors import ConfigError, InfrastructureError, ToolError
from etude.schemas import FunctionCall
from etude.tools import ToolSession, builtin_config, load_tools
from etude.tools.builtin.web_search import ENGINES, WebSearchTool

PAGES = [{"title": f"Page {n}", "snippet": f"Text\n of {n}"} for n in range(9)]


def tool(url, **config):
    return WebSearchTool({"type": "native", "url": url, "engine": "mine", **config})


async def searched(made, query="x", **execute_kwargs):
    instance_id, response = await made.create(None)
    assert response.is_empty()
    try:
        return await made.execute(instance_id, {"query": query}, **execute_kwargs)
    finally:
        await made.release(instance_id)


async def test_a_search_as_the_documents_show_it(serve):
    asked = []

    async def handler(request):
        asked.append((request.method, dict(request.query), request.headers.get("Authorization")))
        return web.json_response(PAGES)

    made = tool(await serve(handler), api_key="secret")
    await made.create("t")
    response, reward, metrics = await made.execute("t", {"query": " red panda "}, timeout=30, max_results=2)
    assert response.text == "Search results:\n1. Page 0: Text of 0\n2. Page 1: Text of 1"
    assert reward == -0.01
    assert metrics == {"num_results": 2, "total_calls": 1}
    _, _, metrics = await made.execute("t", {"query": "more"})
    assert metrics == {"num_results": 5, "total_calls": 2}
    assert [search["query"] for search in made._instance_dict["t"].search_history] == ["red panda", "more"]
    assert asked[0] == ("GET", {"q": "red panda", "num": "2"}, "Bearer secret")
    await made.release("t")
    assert "t" not in made._instance_dict


async def test_an_engine_with_a_body_and_results_further_down(serve):
    asked = []

    async def handler(request):
        asked.append((request.method, await request.json(), request.headers.get("X-API-KEY")))
        return web.json_response({"organic": PAGES[:1], "other": 1})

    made = WebSearchTool({"engine": "serper", "url": await serve(handler), "api_key": "k", "cost": 0})
    response, reward, _ = await searched(made)
    assert response.text == "Search results:\n1. Page 0: Text of 0"
    assert reward == 0
    assert asked == [("POST", {"q": "x", "num": 5}, "k")]


async def test_a_dotted_path_and_no_results(serve):
    answers = iter([{"web": {"results": [{"title": "T", "description": None}]}}, {"web": {}}, {}])

    async def handler(request):
        return web.json_response(next(answers))

    made = WebSearchTool({"engine": "brave", "url": await serve(handler)})
    assert (await searched(made))[0].text == "Search results:\n1. T: "
    assert (await searched(made))[0].text == "Search results:\nnone"
    assert (await searched(made))[0].text == "Search results:\nnone"


async def test_an_address_with_arguments_of_its_own(serve):
    asked = []

    async def handler(request):
        asked.append(dict(request.query))
        return web.json_response({"results": [{"title": "T", "content": "C"}]})

    made = WebSearchTool({"engine": "searxng", "url": f"{await serve(handler)}?format=json"})
    assert (await searched(made, "a&b=c"))[0].text == "Search results:\n1. T: C"
    assert asked == [{"format": "json", "q": "a&b=c", "num": "5"}]


async def test_what_the_model_reads_is_bounded(serve):
    async def handler(request):
        return web.json_response([{"title": "t" * 9000, "snippet": "s" * 9000}] * 100)

    response, _, metrics = await searched(tool(await serve(handler), max_snippet_chars=50, max_results=3))
    assert metrics["num_results"] == 3
    assert len(response.text) < 400
    assert (await searched(tool(await serve(handler), max_results=3), max_results=99))[2]["num_results"] == 3


@pytest.mark.parametrize(
    ("status", "body", "reason"),
    [
        (500, b"", "HTTP 500"),
        (429, b"", "HTTP 429$"),
        (401, b"", "HTTP 401; check the address and the key"),
        (302, b"", "HTTP 302; check"),
        (200, b"<html>", "is not JSON"),
        (200, b"[" * 200_000, "is not JSON"),
        (200, b'{"items": []}', "no list of results in its answer"),
        (200, b"[" + b" " * 3000 + b"]", "more than 2000 bytes"),
    ],
)
async def test_a_broken_service_is_infrastructure(serve, status, body, reason):
    async def handler(request):
        headers = {"Location": "http://127.0.0.1:1/"} if status == 302 else {}
        return web.Response(status=status, body=body, headers=headers)

    with pytest.raises(InfrastructureError, match=reason):
        await searched(tool(await serve(handler), max_body_bytes=2000 if b"  " in body else 10**6))


async def test_a_compressed_answer_is_read_within_the_limit(serve):
    bodies = iter([gzip.compress(json.dumps(PAGES).encode()), gzip.compress(b"[" + b" " * 50_000_000 + b"]"), b"plain"])

    async def handler(request):
        assert request.headers["Accept-Encoding"] == "identity"
        return web.Response(body=next(bodies), headers={"Content-Encoding": "gzip"})

    made = tool(await serve(handler))
    assert (await searched(made))[2]["num_results"] == 5
    with pytest.raises(InfrastructureError, match="more than 4000000 bytes"):
        await searched(made)
    with pytest.raises(InfrastructureError, match="not compressed as it says"):
        await searched(made)


async def test_a_silent_or_absent_service_is_infrastructure_and_tells_no_key(serve):
    async def handler(request):
        await asyncio.sleep(60)

    with pytest.raises(InfrastructureError, match=r"no answer within 0\.1 s"):
        await searched(tool(await serve(handler)), timeout=0.1)
    with pytest.raises(InfrastructureError) as raised:
        await searched(tool("http://127.0.0.1:9/search?key=SECRET", api_key="SECRET"))
    assert "127.0.0.1:9 is not reachable" in str(raised.value)
    assert "SECRET" not in str(raised.value)
    assert raised.value.__cause__ is None


@pytest.mark.parametrize("query", [None, "", "  ", 3, ["x"], "x" * 501])
async def test_a_query_that_makes_no_sense_is_told(query):
    with pytest.raises(ToolError, match="query"):
        await searched(tool("http://127.0.0.1:9/"), query)


async def test_a_query_that_the_service_refuses_is_told(serve):
    async def handler(request):
        return web.Response(status=400)

    with pytest.raises(ToolError, match="HTTP 400"):
        await searched(tool(await serve(handler)))


async def test_a_session_tries_again_what_broke(serve):
    answers = iter([503, 200])

    async def handler(request):
        return web.json_response(PAGES, status=next(answers))

    made = tool(await serve(handler), max_retries=1, retry_delay=0.01)
    async with ToolSession({"web_search": made}, request_id="t") as session:
        [outcome] = await session.execute([FunctionCall(name="web_search", arguments='{"query": "x"}')], turn=0)
    assert outcome.response.text.startswith("Search results:")
    assert outcome.error is None


@pytest.mark.slow
async def test_connections_are_shared_and_closed_with_the_tool(serve):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ResourceWarning)
        gc.collect()  # what other tests have left is not this one's
    peers = set()

    async def handler(request):
        peers.add(request.transport.get_extra_info("peername"))
        return web.json_response(PAGES)

    made = tool(await serve(handler))
    for name in ("a", "b"):
        await made.create(name)
    for name in ("a", "b", "a"):
        await made.execute(name, {"query": "x"})
    assert len(peers) == 1
    [session] = made._service._sessions.values()
    with warnings.catch_warnings():
        warnings.simplefilter("error", ResourceWarning)
        del made
        gc.collect()
    assert session.client.closed


def test_a_tool_serves_one_event_loop_after_another():
    async def once():
        async def handler(request):
            return web.json_response(PAGES)

        async with listening(handler, port):
            return await searched(made)

    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    made = tool(f"http://127.0.0.1:{port}/")
    assert asyncio.run(once()) == asyncio.run(once())


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        ({"max_result": 3}, "unknown key config.max_result; did you mean 'max_results'"),
        ({"max_results": 0}, "config.max_results must be a whole number from 1 to 50"),
        ({"url": "ftp://x/"}, "config.url: must be an address such as https://host/path"),
        ({"method": "PUT"}, "config.method"),
    ],
)
def test_options_are_checked(config, reason):
    with pytest.raises(ConfigError, match=reason):
        WebSearchTool(config)


@pytest.mark.parametrize("key", [20231122, ["20231122"]])
def test_a_key_that_is_no_text_is_not_shown(key):
    with pytest.raises(ConfigError, match=r"config\.api_key must be text or null$"):
        WebSearchTool({"api_key": key})


def test_the_example_configuration_takes_its_key_from_the_environment(monkeypatch):
    monkeypatch.delenv("SEARCH_API_KEY", raising=False)
    with pytest.raises(ConfigError, match="SEARCH_API_KEY is not set"):
        load_tools(builtin_config("web_search"))
    monkeypatch.setenv("SEARCH_API_KEY", "k")
    (made,) = load_tools(builtin_config("web_search"))
    assert made.name == "web_search"
    assert ENGINES["serper"].items() <= made._options.model_dump().items()


@pytest.mark.parametrize("name", [*ENGINES, "google"])
def test_every_engine_has_an_address(name):
    made = WebSearchTool({"engine": name})
    assert made._service.url.startswith("http")
    assert "{" not in made._service.url
