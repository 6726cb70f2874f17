"""The HTTP tool against a real server on loopback: addresses, arguments, answers, and who is to blame."""

import asyncio
import json
import re
import time

import aiohttp
import httpx
import pytest
from aiohttp import web
from http_stage import listening

from etude.errors import ConfigError, InfrastructureError, ToolError
from etude.schemas import FunctionCall
from etude.tools import FunctionTool, ToolSession, load_tools
from etude.tools.function_tool import read_schema
from etude.tools.http_tool import HttpTool


def schema(*names):
    properties = {name: {"type": "string"} for name in names}
    function = {"name": "service", "parameters": {"type": "object", "properties": properties}}
    return read_schema({"type": "function", "function": function}, "here")


PAGES = [
    "<!DOCTYPE html>\n<html><title>Sign in</title></html>",
    "\n <!-- proxy -->\n<HTML lang=en><body>Sign in</body></HTML>",
    "The page begins with <html>.",
    "<htmlish/>",
]


async def answer(request):
    """Echoes the request, or does what its path says."""
    path = request.rel_url.raw_path
    if path.startswith("/status/"):
        return web.Response(status=int(path.rsplit("/", 1)[1]), text="because\n  of this", headers={"Retry-After": "1"})
    if path.startswith("/page/"):
        return web.Response(text=PAGES[int(path.rsplit("/", 1)[1])], content_type="text/html")
    if path == "/large":
        return web.Response(body=b"x" * 5000)
    if path == "/slow":
        await asyncio.sleep(30)
    if path == "/moved":
        return web.Response(status=302, headers={"Location": "/echo"})
    if path == "/latin":
        return web.Response(body="grün".encode("latin-1"))
    return web.json_response(
        {
            "method": request.method,
            "path": request.rel_url.raw_path,
            "query": dict(request.rel_url.query),
            "body": await request.json() if request.can_read_body else None,
            "key": request.headers.get("X-Key"),
            "items": [{"text": "first"}, {"text": "second"}],
        }
    )


def run(calls, **config):
    """The outcome of each call of one trajectory: a text or the exception."""

    async def main():
        outcomes = []
        async with listening(answer) as base:
            tool = HttpTool(config | {"url": base + config.get("url", "/echo")}, schema("a", "b", "id"))
            for arguments in calls:
                try:
                    outcomes.append((await tool.execute("i", arguments))[0].text)
                except (ToolError, InfrastructureError) as error:
                    outcomes.append(error)
        return outcomes

    return asyncio.run(main())


def test_arguments_travel_as_json_or_in_the_query():
    [posted] = map(json.loads, run([{"a": "ä", "b": [1]}], headers={"X-Key": "k"}))
    assert (posted["method"], posted["body"], posted["key"]) == ("POST", {"a": "ä", "b": [1]}, "k")
    [got] = map(json.loads, run([{"a": "ä&b=2", "b": [1]}], method="GET"))
    assert (got["method"], got["query"], got["body"]) == ("GET", {"a": "ä&b=2", "b": "[1]"}, None)
    [sent] = map(json.loads, run([{"a": "1"}], send="query"))
    assert (sent["method"], sent["query"]) == ("GET", {"a": "1"})


def test_an_argument_in_the_address_is_one_segment_whatever_it_holds():
    hostile = "../../admin?x=1#y"
    first, second, dots, missing = run([{"id": hostile}, {"id": "ü"}, {"id": ".."}, {"a": "x"}], url="/items/{id}/text")
    assert json.loads(first)["path"] == "/items/..%2F..%2Fadmin%3Fx=1%23y/text"
    assert json.loads(first)["query"] == {}
    assert json.loads(second)["path"] == "/items/%C3%BC/text"
    assert isinstance(dots, ToolError)
    assert "missing argument 'id'" in str(missing)


def test_an_argument_in_the_query_of_the_address():
    words = "a&b=c +1 %2B ü#"
    [got] = map(json.loads, run([{"a": words}], url="/echo?q={a}&fixed=1", method="GET"))
    assert got["query"] == {"q": words, "fixed": "1"}


def test_a_part_of_the_answer():
    assert run([{}], result="items.1.text") == ["second"]
    assert run([{}], result="items.1") == ['{"text": "second"}']
    [absent] = run([{}], result="items.2.text")
    assert isinstance(absent, InfrastructureError)
    assert "items.2.text" in str(absent)


@pytest.mark.parametrize("status", [400, 404, 409, 422])
def test_what_the_model_did_wrong_is_told(status):
    in_the_path = run([{"id": f"{status}"}], url="/status/{id}")
    in_the_query = run([{"a": "x"}], url=f"/status/{status}", send="query")
    for error in in_the_path + in_the_query:
        assert isinstance(error, ToolError)
        assert str(error) == f"Error: HTTP {status}: because of this"


@pytest.mark.parametrize("status", [404, 410])
def test_an_address_that_is_not_there_is_no_mistake_of_the_models(status):
    [posted] = run([{"a": "x"}], url=f"/status/{status}")
    [got] = run([{}], url=f"/status/{status}", method="GET")
    for error in (posted, got):
        assert isinstance(error, InfrastructureError)
        assert "config.url of tool 'service'" in str(error)


@pytest.mark.parametrize("page", range(len(PAGES)))
def test_a_web_page_is_an_answer_only_where_it_is_asked_for(page):
    [answered] = run([{}], url=f"/page/{page}")
    assert isinstance(answered, InfrastructureError) if page < 2 else answered == PAGES[page]
    assert run([{}], url=f"/page/{page}", headers={"accept": "text/html"}) == [PAGES[page]]


@pytest.mark.parametrize("status", [401, 403, 405, 406, 411, 415, 429, 500, 503])
def test_what_the_world_did_wrong_is_infrastructure(status):
    [error] = run([{}], url=f"/status/{status}")
    assert isinstance(error, InfrastructureError)
    assert f"HTTP {status}" in str(error)


@pytest.mark.parametrize("client", ["http", "aiohttp", "httpx"])
def test_a_call_is_made_again_when_the_service_says(client):
    """After its `Retry-After`, whether the tool is of `type: http` or a function that asks by a client of its own."""

    async def ask_aiohttp() -> str:
        async with aiohttp.ClientSession(raise_for_status=True) as session, session.get(address) as response:
            return await response.text()

    async def ask_httpx() -> str:
        async with httpx.AsyncClient() as session:
            return (await session.get(address)).raise_for_status().text

    async def main():
        nonlocal address
        async with listening(answer) as base:
            address, config = f"{base}/status/429", {"max_retries": 1, "retry_delay": 0.01}
            functions = {"aiohttp": ask_aiohttp, "httpx": ask_httpx}
            if client == "http":
                tool = HttpTool({"url": address, **config}, schema())
            else:
                tool = FunctionTool(functions[client], "service", config=config)
            async with ToolSession({"service": tool}, request_id="t0") as session:
                started = time.monotonic()
                with pytest.raises(InfrastructureError):
                    await session.execute([FunctionCall(name="service", arguments="{}")], turn=0)
                return time.monotonic() - started

    address = ""
    assert 1.0 <= asyncio.run(main()) < 10


def test_answers_are_bounded_in_size_and_time_and_never_lead_elsewhere():
    [large] = run([{}], url="/large", max_body_bytes=1000)
    assert isinstance(large, InfrastructureError)
    [slow] = run([{}], url="/slow", timeout=0.2)
    assert "no answer within 0.2 s" in str(slow)
    [moved] = run([{}], url="/moved")
    assert isinstance(moved, InfrastructureError)
    assert run([{}], url="/latin") == ["gr\N{REPLACEMENT CHARACTER}n"]


def test_nobody_listens():
    tool = HttpTool({"url": "http://127.0.0.1:9/x?key=s3cret"}, schema())
    with pytest.raises(InfrastructureError, match=re.escape("127.0.0.1:9")) as caught:
        asyncio.run(tool.execute("i", {}))
    assert "s3cret" not in str(caught.value)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({}, "config.url is missing"),
        ({"url": "host/x"}, "config.url: must be an address such as"),
        ({"url": "http://{a}/x"}, "the host must not depend"),
        ({"url": "http://h/{c}"}, "config.url needs 'c', which the schema does not have"),
        ({"url": "http://h", "methd": "GET"}, "unknown key config.methd; did you mean 'method'"),
        ({"url": "http://h", "method": "TRACE"}, "config.method"),
        ({"url": "http://h", "headers": {"A": "b\nc"}}, "the header 'A'"),
        ({"url": "http://h", "max_body_bytes": 0}, "config.max_body_bytes"),
    ],
)
def test_a_configuration_that_makes_no_sense(config, message):
    with pytest.raises(ConfigError, match=message):
        HttpTool(config, schema("a", "b"))


def test_in_yaml(tmp_path, monkeypatch):
    monkeypatch.setenv("SERVICE_KEY", "k")
    (tmp_path / "tools.yaml").write_text(
        "tools:\n"
        "  - config: {type: http, url: 'http://127.0.0.1:9/{a}', headers: {X-Key: '${SERVICE_KEY}'}, timeout: 3}\n"
        "    tool_schema: {function: {name: service, parameters: {properties: {a: {type: string}}}}}\n"
    )
    [tool] = load_tools(tmp_path / "tools.yaml")
    assert isinstance(tool, HttpTool)
    assert tool.config["headers"] == {"X-Key": "k"}
