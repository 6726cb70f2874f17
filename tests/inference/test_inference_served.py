"""What the serving engines share: HTTP calls that always end, checked answers, and a configuration refused early."""

import asyncio

import pytest
from hypothesis import given
from hypothesis import strategies as st

from etude.errors import ConfigError, EngineError, MissingExtraError
from etude.inference import SamplingParams, check_serving
from etude.inference import http as http_module
from etude.inference.http import HttpServer, StatusError
from etude.inference.served import Answer, validate_answer
from etude.inference.vllm import VLLMEngine
from etude.options import RolloutOptions
from etude.options.serving import server_url


def answering(raw, path="/x", *, timeout=2.0, call="get", hold=False):
    """What `HttpServer` makes of the bytes `raw` as the answer to any request; None: the connection is closed. `hold`
    keeps the connection open after them."""

    async def main():
        async def handle(reader, writer):
            await reader.readuntil(b"\r\n\r\n")
            if raw is None:
                writer.transport.abort()
                return
            writer.write(raw)
            await writer.drain()
            if hold:
                await reader.read()  # until the caller hangs up; from Python 3.12 on a server waits for its connections
            writer.close()

        listener = await asyncio.start_server(handle, "127.0.0.1", 0)
        async with listener:
            server = HttpServer(f"http://127.0.0.1:{listener.sockets[0].getsockname()[1]}", timeout=timeout)
            return server.object(path, await server.get(path)) if call == "get" else await server.ask(path)

    return asyncio.run(main())


def response(body, status="200 OK", length=None):
    return f"HTTP/1.1 {status}\r\nContent-Length: {len(body) if length is None else length}\r\n\r\n".encode() + body


def test_an_object_comes_through():
    assert answering(response(b'{"a": [1]}')) == {"a": [1]}


@pytest.mark.parametrize(
    ("raw", "message"),
    [
        (None, "/x: ServerDisconnectedError"),
        (b"SSH-2.0-OpenSSH_9\r\n\r\n", "/x: "),
        (response(b"{}", "503 Unavailable"), r"/x: status 503: \{\}"),
        (response(b"", "404 Not Found"), r"/x: status 404: \(empty\)"),
        (response(b"moved", "302 Found"), "status 302"),
        (response(b"{", length=100), "/x: ClientPayloadError"),
        (response(b"\xff\xfe{}"), "the answer is not JSON"),
        (response(b"[" * 100_000), "the answer is not JSON"),
        (response(b"3"), "is JSON, but no object: 3"),
    ],
)
def test_whatever_a_server_does_the_call_ends_in_one_line(raw, message):
    with pytest.raises(EngineError, match=message) as caught:
        answering(raw)
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 500
    assert "127.0.0.1" in str(caught.value)


def test_a_status_can_be_told_from_other_failures():
    with pytest.raises(StatusError) as caught:
        answering(response(b"no", "409 Conflict"), call="post")
    assert caught.value.status == 409


def test_an_endless_answer_is_cut_off(monkeypatch):
    monkeypatch.setattr(http_module, "MAX_ANSWER_BYTES", 1 << 20)
    with pytest.raises(EngineError, match="longer than 1 MiB"):
        answering(response(b"x" * (2 << 20)))


def test_a_server_that_never_answers_is_given_up():
    with pytest.raises(EngineError, match=r"no answer within 0\.2 s"):
        answering(response(b"some", length=10), timeout=0.2, hold=True)


@pytest.mark.parametrize("text", ["ftp://host", "localhost:8000", "", "http://", "http://a:port", "http://a/?q=1", 3])
def test_what_is_no_address_is_refused(text):
    with pytest.raises(ConfigError, match=r"'.*' is no server address"):
        server_url(text)


@pytest.mark.parametrize("text", ["http://a:1", "http://a:1/", "http://a:1/v1", "http://a:1/v1/", " http://a:1 "])
def test_spellings_of_one_address_are_one(text):
    assert server_url(text) == "http://a:1"


PARAMS = SamplingParams(max_tokens=6, stop_token_ids=(7,))


@given(ids=st.lists(st.integers(0, 9), max_size=8), ending=st.sampled_from(["stop", "length", "abort", "error", None]))
def test_an_accepted_answer_keeps_the_contract(ids, ending):
    log_probs = [-0.5 * (i + 1) for i in range(len(ids))]
    try:
        output = validate_answer(Answer(ids, log_probs, ending, [(4, 0, 2)]), PARAMS, 3, "server")
    except EngineError:
        assert len(ids) > 6 or ending in ("stop", "error", None)
        return
    assert (output.token_ids, output.log_probs) == (ids, log_probs)
    assert len(ids) <= 6
    assert output.weight_versions == ([4, 4] + [3] * 8)[: len(ids)]
    assert output.stop_reason == ("aborted" if ending == "abort" else "stop" if ids[-1:] == [7] else "length")


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        (Answer("text", [], "length"), "no list of token ids"),
        (Answer([1, -2], [0.0, 0.0], "length"), "no list of token ids"),
        (Answer([1, True], [0.0, 0.0], "length"), "no list of token ids"),
        (Answer([1.0], [0.0], "length"), "no list of token ids"),
        (Answer([1], None, "length"), "no log-probs for 1 tokens"),
        (Answer([1], [-1.0, -1.0], "length"), "2 log-probs for 1 tokens"),
        (Answer([1], [None], "length"), "of token 0 is not a finite number: None"),
        (Answer([1], [float("-inf")], "length"), "is not a finite number: -inf"),
        (Answer([1], ["-1"], "length"), "is not a finite number: '-1'"),
        (Answer([1], [float("nan")], "length"), "is not a finite number: nan"),
        (Answer([1], [0.1], "length"), "is positive"),
        (Answer([1], [-1.0], "stop"), "ended as 'stop' after token 1, which is no stop id"),
        (Answer([], [], "stop"), "ended as 'stop' after no token"),
    ],
)
def test_what_cannot_be_trained_on_is_refused(answer, message):
    with pytest.raises(EngineError, match=f"server: .*{message}"):
        validate_answer(answer, PARAMS, 0, "server")


def check(name, urls=(), key=None, kwargs=None):
    check_serving(RolloutOptions(name=name, server_urls=urls, server_api_key_env=key, engine_kwargs=kwargs or {}))


def refuse(message, *settings, **more):
    with pytest.raises(ConfigError, match=message):
        check(*settings, **more)


def test_a_rollout_section_that_cannot_work_is_one_line(monkeypatch):
    refuse("server_urls: the engine 'native' runs in this process", "native", ["http://a:1"])
    refuse(r"name: needs actor_rollout_ref.rollout.server_urls", "sglang")
    refuse("name: needs", "openai")
    refuse("'a:1' is no server address", "sglang", ["a:1"])
    refuse("names an address twice", "vllm", ["http://a:1", "http://a:1/v1"])
    refuse("the environment variable NO_SUCH_KEY is not set", "sglang", ["http://a:1"], "NO_SUCH_KEY")
    refuse("no engine 'vlm'", "native", kwargs={"vlm": {"a": 1}})
    refuse("give these options to the server", "vllm", ["http://a:1"], kwargs={"vllm": {"seed": 1}})
    refuse("give these options to the server", "sglang", ["http://a:1"], kwargs={"sglang": {"x": 1}})
    refuse("the engine 'native' takes none", "native", kwargs={"native": {"x": 1}})
    check("native", kwargs={"vllm": {}})
    check("sglang", ["http://a:1", "https://b/"], kwargs={"vllm": {"seed": 1}})  # of another engine: not used


def test_a_package_that_is_not_installed_is_named_with_its_pip_line(monkeypatch):
    monkeypatch.setattr("etude.inference.vllm.local.find_spec", lambda name: None)
    with pytest.raises(MissingExtraError, match=r"run  .*pip install .*'etude\[vllm\]'"):
        VLLMEngine.check_installed({})
    with pytest.raises(MissingExtraError):
        check("vllm")
    check("vllm", ["http://127.0.0.1:8000"])  # a server needs nothing here
