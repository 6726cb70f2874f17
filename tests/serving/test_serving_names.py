"""Every HTTP server of the package under a foreign `Host` or `Origin`: on each path it refuses, and under its own names it
answers."""

import asyncio
import http.client
import re
import threading
import time
from pathlib import Path

import pytest
import uvicorn

import etude
from etude.serving.middleware import OwnNames

PATIENCE = 60
PATHS = (
    *("/", "/health", "/v1/ping", "/metrics", "/docs", "/openapi.json", "/nothing", "/mcp", "/api/runs", "/v1/models"),
    *(
        "/s/a/v1/models",
        "/s/a/v1/chat/completions",
        "/s/a/rollout",
        "/s/a/reward",
        "/run_code",
        "/retrieve",
        "/search?q=a",
    ),
)
FOREIGN = (
    *("evil.example", "evil.example:80", "127.0.0.1.evil.example", "localhost.evil.example", "localhost@evil.example"),
    *("evil.example#127.0.0.1", "evil.example:127.0.0.1", "[evil.example]", "", ":8000", "evil.example.", "x" * 5000),
)
OWN = (
    *("127.0.0.1", "localhost", "LOCALHOST:80", "localhost.", "[::1]:8000", "192.0.2.7"),
    *("a.localhost", "host.docker.internal"),
)


def sandbox(ready, folder, host, names):
    from etude.sandbox import Isolation
    from etude.sandbox.server import serve
    from etude.sandbox.service import ServerOptions

    options = ServerOptions(isolation=Isolation("none"), workers=1)
    asyncio.run(serve(options, host, 0, 1.0, lambda url, _: ready(url), names))


def retrieval(ready, folder, host, names):
    from etude.retrieval import Retriever, build_index
    from etude.retrieval.server import ServerOptions, create_app
    from etude.serving.listening import serve

    (folder / "corpus.jsonl").write_text('{"id": "a", "contents": "Tea is made of leaves."}\n')
    index = build_index(folder / "corpus.jsonl", folder / "index")
    app = create_app(Retriever(index), ServerOptions())
    asyncio.run(serve(app, host, 0, grace=1.0, ready=ready, allow_hosts=names))


def tools(ready, folder, host, names):
    from etude.serving.listening import listen, url_of
    from etude.tools import FunctionTool
    from etude.tools.server import ToolServer

    def add(a: int, b: int) -> int:
        """Adds."""
        return a + b

    with listen(host, 0) as listener:
        ready(url_of(listener, host))
        asyncio.run(ToolServer([FunctionTool(add)]).serve_http(listener, host=host, allow_hosts=names))


def viewer(ready, folder, host, names):
    from etude.viewer.web import serve

    serve(folder, host, 0, ready, names)


def gateway(ready, folder, host, names):
    from etude.config import compose
    from etude.models import TinyModelSpec, build_tiny_model, build_tiny_tokenizer, save_pretrained
    from etude.trainer.gateway import ServingOptions, serve_policy

    tokenizer = build_tiny_tokenizer(["What is 2 + 3?"], 400)
    save_pretrained(build_tiny_model(TinyModelSpec(num_layers=1), tokenizer), tokenizer, folder / "model")
    config = compose(
        None,
        [
            f"actor_rollout_ref.model.path={folder}/model",
            "actor_rollout_ref.rollout.multi_turn.format=auto",
        ],
    )
    options = ServingOptions(host, 0, names, grace_seconds=1.0)
    asyncio.run(serve_policy(config, options, ready))


def tinker(ready, folder, host, names):
    pytest.importorskip("tinker.types")
    from etude.models import TinyModelSpec, build_tiny_model, build_tiny_tokenizer, save_pretrained
    from etude.serving.listening import serve
    from etude.tinker.adapters import Base
    from etude.tinker.checkpoints import CheckpointStore
    from etude.tinker.server import create_app
    from etude.tinker.service import TinkerService

    tokenizer = build_tiny_tokenizer(["What is 2 + 3?"], 400)
    save_pretrained(build_tiny_model(TinyModelSpec(num_layers=1), tokenizer), tokenizer, folder / "model")
    service = TinkerService(Base(folder / "model", ("tiny",), max_tokens=64), CheckpointStore(folder / "saved"))
    asyncio.run(serve(create_app(service, None), host, 0, grace=1.0, ready=ready, allow_hosts=names))


def local_gateway(ready, folder, host, names):
    """The gateway of a rollout worker, as long as a session is open; it has no options."""
    from types import SimpleNamespace

    from etude.agents.gateway.local import LocalGateway

    async def main():
        async with LocalGateway.here().opened(SimpleNamespace(name="a"), None) as (url, _):
            ready(url.removesuffix("/s/a/v1"))
            while not SERVERS_MADE[-1].should_exit:
                await asyncio.sleep(0.05)

    asyncio.run(main())


SERVERS_MADE = []
SERVERS = {each.__name__: each for each in (sandbox, retrieval, tools, viewer, gateway, tinker, local_gateway)}


class Running:
    """A server in a thread of its own, where uvicorn leaves signals alone."""

    def __init__(self, start, folder, host="127.0.0.1", names=()):
        self.url, self.failure, listening = "", None, threading.Event()

        def ready(url):
            self.url = url
            listening.set()

        def run():
            try:
                start(ready, folder, host, names)
            except BaseException as error:
                self.failure = error
            finally:
                listening.set()

        self.thread = threading.Thread(target=run, daemon=True)
        self.thread.start()
        assert listening.wait(PATIENCE)
        assert self.failure is None, self.failure

    def ask(self, path, method="GET", **headers):
        """The status; `Host` only if it is among the headers."""
        port = int(re.search(r":(\d+)", self.url.removeprefix("http://")).group(1))
        deadline = time.monotonic() + PATIENCE
        while True:  # some sockets listen before their server accepts
            connection = http.client.HTTPConnection("127.0.0.1", port, timeout=PATIENCE)
            try:
                connection.putrequest(method, path, skip_host="Host" in headers)
                for name, value in headers.items():
                    connection.putheader(name, value)
                if method == "POST":
                    connection.putheader("Content-Length", "2")
                connection.endheaders(b"{}" if method == "POST" else None)
                return connection.getresponse().status
            except ConnectionError:
                assert time.monotonic() < deadline
            finally:
                connection.close()

    def end(self):
        for server in SERVERS_MADE:
            server.should_exit = True
        self.thread.join(PATIENCE)


@pytest.fixture
def running(monkeypatch, tmp_path, request):
    made, begin = [], uvicorn.Server.__init__

    def remember(self, config):
        begin(self, config)
        SERVERS_MADE.append(self)

    monkeypatch.setattr(uvicorn.Server, "__init__", remember)
    SERVERS_MADE.clear()

    def start(name, *given):
        made.append(Running(SERVERS[name], tmp_path, *given))
        return made[-1]

    yield start
    for each in made:
        each.end()


@pytest.mark.parametrize("name", SERVERS)
def test_a_foreign_name_or_origin_gets_nothing_from_any_server(name, running):
    server = running(name)
    for path in PATHS:
        for method in ("GET", "POST"):
            assert server.ask(path, method, Host="evil.example") == 400, (method, path)
            own = server.ask(path, method, Host="localhost")
            assert own != 400 or method == "POST", (method, path)  # an empty object may be no valid request
        assert server.ask(path, "POST", Origin="http://evil.example") == 403, path
        assert server.ask(path, "POST", Origin="null") == 403, path
        assert server.ask(path, "POST", Origin="http://192.0.2.7") == 403, path
        assert server.ask(path, "POST", Origin="http://localhost:6274") != 403, path
    for host in FOREIGN:
        assert server.ask("/health", Host=host) >= 400, host
        assert server.ask("/", Host=host) == 400, host
    for host in OWN:
        assert server.ask("/nothing", Host=host) == 404, host


@pytest.mark.parametrize("name", ["sandbox", "retrieval", "tools", "viewer"])
def test_a_server_that_others_reach_has_the_names_that_it_was_given(name, running):
    server = running(name, "0.0.0.0", ("search.example.org",))
    for host in ("search.example.org", "Search.Example.Org:80", "gpu-node-7", "sandbox", "10.0.0.7:8080", "node.local"):
        assert server.ask("/nothing", Host=host) in (401, 404), host
    for host in ("evil.example", "example.org", "x.search.example.org"):
        assert server.ask("/nothing", Host=host) == 400, host


def test_no_server_is_made_without_the_check():
    """The servers above are all that there are: uvicorn is configured in one place."""
    places = Path(etude.__file__).parent.rglob("*.py")
    assert [place.name for place in places if "uvicorn.Config(" in place.read_text()] == ["listening.py"]


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ([], 400),
        ([(b"host", b"localhost"), (b"host", b"evil.example")], 400),
        ([(b"host", b"evil.example"), (b"host", b"localhost")], 400),
        ([(b"host", "\u00e9vil".encode())], 400),
        ([(b"host", b"localhost:8000"), (b"origin", b"http://localhost:8000")], 200),
        ([(b"host", b"192.0.2.7:80"), (b"origin", b"http://192.0.2.7:80")], 200),
        ([(b"host", b"192.0.2.7:80"), (b"origin", b"http://192.0.2.8:80")], 403),
        ([(b"host", b"localhost"), (b"origin", b"http://localhost"), (b"origin", b"http://evil.example")], 403),
        ([(b"host", b"localhost"), (b"origin", b"")], 403),
    ],
)
async def test_headers_that_no_client_sends(headers, status):
    sent = []

    async def app(scope, receive, send):
        await send({"type": "http.response.start", "status": 200, "headers": []})

    async def send(message):
        sent.append(message)

    await OwnNames(app)({"type": "http", "method": "POST", "path": "/", "headers": headers}, None, send)
    assert sent[0]["status"] == status
