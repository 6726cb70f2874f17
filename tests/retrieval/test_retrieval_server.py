"""The search service as its clients see it: Search-R1's wire format, bounds, metrics, and what a kill leaves."""

import asyncio
import json
import signal
import threading

import psutil
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from retrieval_stage import PASSAGES
from server_stage import ServerProcess, in_background
from starlette.testclient import TestClient

from etude.errors import ConfigError
from etude.retrieval import Retriever
from etude.retrieval.server import ServerOptions, create_app
from etude.schemas import FunctionCall
from etude.tools import ToolSession, load_tools
from etude.tools.builtin.search import passages_text


def app_client(index, **options):
    return TestClient(create_app(Retriever(index), ServerOptions(**options)), raise_server_exceptions=False)


@pytest.fixture(scope="module")
def server(index):
    with ServerProcess(str(index), group="retrieve") as process:
        yield process


def test_the_wire_format_is_search_r1s(index):
    with app_client(index) as client:
        answer = client.post("/retrieve", json={"queries": ["red panda", "zebra"], "topk": 2, "return_scores": True})
        assert answer.status_code == 200
        first, second = answer.json()["result"]
        assert second == []
        assert [set(hit) for hit in first] == [{"document", "score"}] * 2
        title, text = PASSAGES[0]
        contents = f'"{title}"\n{text}'
        assert first[0]["document"] == {"id": "p0", "title": title, "text": text, "contents": contents}
        assert first[0]["score"] > first[1]["score"] > 0
        for plain in ({}, {"return_scores": False}, {"return_scores": None, "topk": None}):
            answer = client.post("/retrieve", json={"queries": ["bamboo"], **plain}).json()["result"]
            assert [[document["id"] for document in found] for found in answer] == [["p2", "p1", "p0"]]


@pytest.mark.parametrize(
    ("body", "said"),
    [
        (b"{", "not valid JSON"),
        (b"[" * 100_000, "not valid JSON"),
        (b"[]", "must be an object"),
        ({}, "'queries' must be a list of texts"),
        ({"queries": "panda"}, "'queries' must be a list of texts"),
        ({"queries": ["a", 3]}, "'queries' must be a list of texts"),
        ({"queries": []}, "1 to 4 queries, not 0"),
        ({"queries": ["a"] * 5}, "1 to 4 queries, not 5"),
        ({"queries": ["a" * 21]}, "20 characters"),
        ({"queries": ["a"], "topk": 0}, "'topk' must be a whole number from 1 to 5"),
        ({"queries": ["a"], "topk": 6}, "'topk' must be a whole number from 1 to 5"),
        ({"queries": ["a"], "topk": True}, "'topk' must be a whole number"),
        ({"queries": ["a"], "topk": "3"}, "'topk' must be a whole number"),
        ({"queries": ["a", "b"], "topk": 5}, "9 passages, not 10"),
        ({"queries": ["a"], "return_scores": "yes"}, "'return_scores' must be true or false"),
    ],
)
def test_an_invalid_request_is_told_what_is_wrong(index, body, said):
    with app_client(index, max_queries=4, max_query_chars=20, max_topk=5, max_passages=9) as client:
        content = body if isinstance(body, bytes) else json.dumps(body).encode()
        answer = client.post("/retrieve", content=content)
        assert (answer.status_code, said in answer.json()["detail"]) == (422, True), answer.text
        assert (
            'etude_retrieval_requests_total{endpoint="retrieve",outcome="refused"} 1.0' in client.get("/metrics").text
        )


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=30),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=8,
)
REQUESTS = st.fixed_dictionaries(
    {}, optional={"queries": st.lists(st.text(max_size=40)) | JSON, "topk": JSON, "x": JSON}
)


def test_whatever_is_sent_is_answered_or_refused(index):
    with app_client(index) as client:

        @settings(max_examples=150, deadline=None)
        @given(st.binary(max_size=60) | REQUESTS.map(lambda request: json.dumps(request).encode()))
        def check(content):
            answer = client.post("/retrieve", content=content)
            assert answer.status_code in (200, 422), answer.text
            if answer.status_code == 200:
                assert len(answer.json()["result"]) == len(json.loads(content)["queries"])

        check()
        for path in (
            "/search",
            "/search?q=",
            "/search?q=tea&num=0",
            "/search?q=tea&num=99999999999",
            "/search?q=%ff%00",
        ):
            assert client.get(path).status_code in (200, 422), path
        assert client.get("/search?q=tea&num=2").json()["results"][0]["title"] == "Tea"


def test_a_large_request_is_not_read(index):
    with app_client(index, max_request_mb=1) as client:
        assert client.post("/retrieve", content=b"x" * (1 << 21)).status_code == 413


def test_more_queries_than_may_wait_are_sent_away(index):
    retriever = Retriever(index)
    entered, go = threading.Event(), threading.Event()
    search = retriever.search

    def slow(queries, topk):
        entered.set()
        assert go.wait(30)
        return search(queries, topk)

    retriever.search = slow
    with TestClient(create_app(retriever, ServerOptions(max_waiting=3))) as client:
        ask = lambda count: client.post("/retrieve", json={"queries": ["tea"] * count})  # noqa: E731
        thread, answers = in_background(lambda: ask(2))
        assert entered.wait(30)
        assert ask(2).status_code == 429
        assert client.get("/health").json()["waiting"] == 2  # the event loop is free meanwhile
        go.set()
        thread.join(30)
        assert answers[0].status_code == 200
        assert ask(2).status_code == 200


def test_a_fault_of_the_index_is_500_and_the_server_goes_on(index):
    retriever = Retriever(index)
    search, faults = retriever.search, [OSError("disk")]

    def once(queries, topk):
        if faults:
            raise faults.pop()
        return search(queries, topk)

    retriever.search = once
    with TestClient(create_app(retriever), raise_server_exceptions=False) as client:
        assert client.post("/retrieve", json={"queries": ["tea"]}).status_code == 500
        assert client.post("/retrieve", json={"queries": ["tea"]}).status_code == 200
        assert 'outcome="failed"} 1.0' in client.get("/metrics").text


def test_requests_of_several_depths_are_answered_together(index):
    with app_client(index) as client:
        alone = {k: client.post("/retrieve", json={"queries": ["bamboo"], "topk": k}).json() for k in (1, 2, 3)}
        threads = [
            in_background(lambda k=k: (k, client.post("/retrieve", json={"queries": ["bamboo"], "topk": k}).json()))
            for k in (1, 2, 3) * 5
        ]
        for thread, results in threads:
            thread.join(30)
            assert results[0][1] == alone[results[0][0]]


def test_health_metrics_and_the_token(index):
    with app_client(index, token="secret") as client:
        assert client.get("/health").json()["passages"] == len(PASSAGES)
        assert client.post("/retrieve", json={"queries": ["tea"]}).status_code == 401
        headers = {"Authorization": "Bearer secret"}
        assert client.post("/retrieve", json={"queries": ["tea", "panda"]}, headers=headers).status_code == 200
        page = client.get("/metrics", headers=headers).text
        assert "etude_retrieval_queries_total 2.0" in page
        assert 'etude_retrieval_requests_total{endpoint="retrieve",outcome="success"} 1.0' in page


def test_a_killed_server_starts_again_as_it_was(index):
    body = {"queries": [title for title, _ in PASSAGES], "topk": 3, "return_scores": True}
    first = ServerProcess(str(index), group="retrieve")
    before = first.call("/retrieve", body)
    files = {file.name: file.read_bytes() for file in index.iterdir()}
    assert first.stop(signal.SIGKILL)[0] == -signal.SIGKILL
    port = first.url.rpartition(":")[2]
    with ServerProcess(str(index), "--port", port, group="retrieve") as again:  # the same address, at once
        assert again.url == first.url
        assert again.call("/retrieve", body)[2] == before[2]
    assert {file.name: file.read_bytes() for file in index.iterdir()} == files


def test_a_kill_and_a_restart_lose_no_answer_of_a_tool_that_tries_again(index, tmp_path):
    """Clients ask all the while; each gets what it would have got from a server that nobody killed."""
    titles, enough = [title for title, _ in PASSAGES], threading.Event()
    first = ServerProcess(str(index), group="retrieve")
    port = first.url.rpartition(":")[2]
    (tmp_path / "tools.yaml").write_text(
        "tools:\n  - class_name: etude.tools.builtin.search.SearchTool\n    config:\n      type: native\n"
        f"      retrieval_service_url: {first.url}/retrieve\n      max_retries: 60\n      retry_delay: 0.1\n"
        "      result_format: text\n"
    )
    [tool] = load_tools(tmp_path / "tools.yaml")
    answers = []

    async def ask():
        async def client(number):
            while not enough.is_set():
                answers.append((titles[number], (await call(tool, query_list=[titles[number]])).response.text))

        await asyncio.gather(*(client(number) for number in range(4)))

    thread, ended = in_background(lambda: asyncio.run(ask()) or "whole")
    try:
        first.until(lambda: len(answers) > 20, "nobody was answered")
        assert first.stop(signal.SIGKILL)[0] == -signal.SIGKILL
        before = len(answers)
        with ServerProcess(str(index), "--port", port, group="retrieve") as again:
            again.until(lambda: len(answers) > before + 20, "nobody was answered again")
            enough.set()
            thread.join(60)
            assert ended == ["whole"]  # no call has failed
            for title, text in set(answers):
                hits = again.call("/retrieve", {"queries": [title], "topk": 3})[2]["result"]
                assert text == passages_text(hits[0])
    finally:
        enough.set()


def test_sigterm_lets_open_requests_be_answered(index):
    server = ServerProcess(str(index), group="retrieve")
    body = {"queries": ["the red panda eats bamboo in China"] * 4000, "topk": 5}
    thread, answers = in_background(lambda: server.call("/retrieve", body))
    server.until(lambda: answers or server.call("/health")[2]["waiting"], "the request never arrived")
    assert server.stop(signal.SIGTERM) == (-signal.SIGTERM, "")  # as a program without a handler ends
    thread.join(30)
    assert answers[0][0] == 200
    assert len(answers[0][2]["result"]) == 4000


def test_it_listens_on_this_machine_only(server):
    assert server.url.startswith("http://127.0.0.1:")
    listening = [c.laddr.ip for c in psutil.Process(server.process.pid).net_connections() if c.status == "LISTEN"]
    assert listening == ["127.0.0.1"]


def test_an_index_that_is_none_is_one_line(tmp_path):
    with pytest.raises(AssertionError, match="no search index"):
        ServerProcess(str(tmp_path), group="retrieve")
    with pytest.raises(ConfigError, match="no search index"):
        Retriever(tmp_path)


def test_memory_stays_flat(server):
    queries = [f"{title} {text}" for title, text in PASSAGES] + ["zebra", ""]
    for _ in range(20):
        server.call("/retrieve", {"queries": queries * 10, "topk": 6, "return_scores": True})
    before = server.memory()
    size = len(queries) * 25
    for _ in range(-(-50_000 // size)):
        server.call("/retrieve", {"queries": queries * 25, "topk": 6, "return_scores": True})
    assert server.memory() - before < 8 << 20


async def call(tool, refused=False, **arguments):
    async with ToolSession({tool.name: tool}, {}, request_id="test") as session:
        [outcome] = await session.execute([FunctionCall(name=tool.name, arguments=json.dumps(arguments))], 0)
        assert (outcome.error is not None) == refused, outcome
        return outcome


async def test_the_tool_search_reads_it(server, tmp_path):
    (tmp_path / "tools.yaml").write_text(
        "tools:\n  - class_name: etude.tools.builtin.search.SearchTool\n    config:\n      type: native\n"
        f"      retrieval_service_url: {server.url}/retrieve\n      topk: 2\n      result_format: text\n"
    )
    [tool] = load_tools(tmp_path / "tools.yaml")
    outcome = await call(tool, query_list=["red panda", "zebra"])
    first, second = outcome.response.text.split("\n---\n")
    assert first.startswith('Doc 1 (Title: "Red panda")\nThe red panda lives in the eastern Himalayas')
    assert second == "No search results found."
    assert dict(outcome.metrics)["total_results"] == 2


async def test_the_tool_web_search_reads_it(server, tmp_path):
    (tmp_path / "tools.yaml").write_text(
        "tools:\n  - class_name: etude.tools.builtin.web_search.WebSearchTool\n    config:\n      type: native\n"
        f"      engine: searxng\n      url: {server.url}/search\n      count_key: num\n      max_results: 2\n"
    )
    [tool] = load_tools(tmp_path / "tools.yaml")
    outcome = await call(tool, query="tea of China")
    assert outcome.response.text.splitlines()[1].startswith("1. Tea: Tea is made of the leaves")
    assert dict(outcome.metrics)["num_results"] == 2


SEARCH_R1_CLIENT = '''
"""A search tool as RL-Factory's users write it: an MCP server that asks the search service."""

import json
import sys
import urllib.request

from mcp.server import MCPServer

mcp = MCPServer("LocalServer", log_level="ERROR")


@mcp.tool()
def query_rag(query: str, topk: int = 3) -> str:
    """Searches the collection."""
    body = json.dumps({"queries": [query], "topk": topk, "return_scores": True}).encode()
    request = urllib.request.Request(sys.argv[1], body, {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=20) as response:
        return json.dumps(json.load(response), ensure_ascii=False)


if __name__ == "__main__":
    mcp.run("stdio")
'''


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["of the user's", "of the index", "of the service"])
async def test_query_rag_over_mcp(server, index, tmp_path, kind):
    import sys

    (tmp_path / "search.py").write_text(SEARCH_R1_CLIENT)
    etude = [sys.executable, "-m", "etude.cli.main", "retrieve", "mcp"]
    command = {
        "of the user's": [sys.executable, str(tmp_path / "search.py"), f"{server.url}/retrieve"],
        "of the index": [*etude, str(index)],
        "of the service": [*etude, f"{server.url}/retrieve"],
    }[kind]
    config = [{"mcpServers": {"rag": {"command": command[0], "args": command[1:]}}}]
    (tmp_path / "mcp_tools.pydata").write_text(repr(config))
    [tool] = load_tools(tmp_path / "mcp_tools.pydata")
    assert tool.name.endswith("query_rag")
    assert set(tool.get_openai_tool_schema().to_openai()["function"]["parameters"]["properties"]) == {"query", "topk"}
    outcome = await call(tool, query="red panda", topk=2)
    [found] = json.loads(outcome.response.text)["result"]
    assert [hit["document"]["id"] for hit in found] == ["p0", "p1"]
    assert all(isinstance(hit["score"], float) for hit in found)
    if kind != "of the user's":
        told = await call(tool, refused=True, query="x" * 9000)
        assert "a query may have 8192 characters" in told.response.text
