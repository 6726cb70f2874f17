"""Tokens are told of as they are drawn, by every engine that can, and the result is the one that is given without."""

import asyncio
import json

import pytest
from fastapi import FastAPI, Request
from fastapi.responses import StreamingResponse
from serving_stage import CONTEXT, save_bigram, serving
from sglang_server import Bigram, State, build_app

import etude.inference.http as http_module
from etude.errors import EngineError
from etude.inference import (
    NativeEngine,
    NativeEngineOptions,
    Router,
    SamplingParams,
    ScriptedEngine,
    SGLangEngine,
    TokenOutput,
)
from etude.inference.http import HttpServer
from etude.inference.types import streams_tokens
from etude.inference.vllm.server import VLLMServerEngine
from etude.models import TinyModelSpec, build_tiny_model, build_tiny_tokenizer

PROMPT = [3, 1, 4]


async def both(engine, params):
    """(the result without a listener, the result with one, what it was told, call by call)."""
    told = []
    whole = await engine.generate("a", PROMPT, params)
    return whole, await engine.generate("a", PROMPT, params, on_tokens=lambda ids: told.append(list(ids))), told


def joined(told):
    return [token for ids in told for token in ids]


def test_the_native_engine_tells_of_each_token():
    spec = TinyModelSpec(hidden_size=32, num_layers=1, intermediate_size=32, vocab_size=300)
    model = build_tiny_model(spec, build_tiny_tokenizer(["one two"], 300))
    engine = NativeEngine(model, NativeEngineOptions())
    whole, streamed, told = asyncio.run(both(engine, SamplingParams(max_tokens=9, seed=4)))
    assert streamed == whole
    assert told == [[token] for token in whole.token_ids]


@pytest.mark.parametrize("restricted", [{}, {"top_p": 0.9}])
@pytest.mark.parametrize("incremental", [False, True])
def test_sglang_in_both_of_its_ways_to_stream(tmp_path, incremental, restricted):
    async def main():
        state = State(Bigram(save_bigram(tmp_path, 0)), 0.0, incremental=incremental)
        async with serving(build_app(state)) as url:
            engine = SGLangEngine(HttpServer(url, timeout=10), CONTEXT)
            return await both(engine, SamplingParams(max_tokens=7, seed=3, **restricted))

    whole, streamed, told = asyncio.run(main())
    assert streamed == whole
    assert (joined(told), len(told)) == (whole.token_ids, 4)


@pytest.mark.parametrize("incremental", [False, True])
def test_a_stream_is_bounded_in_what_is_kept_of_it_not_in_its_sum(tmp_path, monkeypatch, incremental):
    """Sixty tokens are an answer of 3 kB, and thirty events that each repeat it one of 40 kB."""
    monkeypatch.setattr(http_module, "MAX_ANSWER_BYTES", 8000)

    async def main():
        state = State(Bigram(save_bigram(tmp_path, 0)), 0.0, incremental=incremental)
        async with serving(build_app(state)) as url:
            engine = SGLangEngine(HttpServer(url, timeout=10), CONTEXT)
            return await both(engine, SamplingParams(max_tokens=60, seed=3))

    whole, streamed, told = asyncio.run(main())
    assert streamed == whole
    assert joined(told) == whole.token_ids


def test_one_event_of_a_stream_is_bounded(monkeypatch):
    monkeypatch.setattr(http_module, "MAX_ANSWER_BYTES", 200)
    with pytest.raises(EngineError, match="longer than"):
        with_vllm(
            completions([10**299]),
            lambda engine: engine.generate("a", PROMPT, SamplingParams(max_tokens=3), on_tokens=lambda ids: None),
        )


def test_a_stream_of_more_tokens_than_were_asked_for_is_cut_off_at_once():
    told = []
    with pytest.raises(EngineError, match="4 tokens, though 3 were asked for"):
        with_vllm(
            completions(list(range(100))),
            lambda engine: engine.generate("a", PROMPT, SamplingParams(max_tokens=3), on_tokens=told.append),
        )
    assert told == [[0], [1], [2]]


def completions(tokens, *, fails=False, scale_out=False):
    """vLLM's server: /v1/completions with `return_token_ids`, its stream a token an event."""
    app = FastAPI()

    @app.get("/is_paused")
    async def paused(): ...

    @app.post("/inference/v1/generate", status_code=400 if scale_out else 404)
    async def generate(): ...

    def choice(ids, reason):
        return {
            "index": 0,
            "text": "",
            "token_ids": ids,
            "logprobs": {"token_logprobs": [-0.5] * len(ids)},
            "finish_reason": reason,
        }

    @app.post("/v1/completions")
    async def complete(request: Request):
        body = await request.json()
        if not body.get("stream"):
            return {"choices": [choice(tokens, "length")]}

        async def events():
            for place, token in enumerate(tokens):
                ids = {"choices": [choice([token], "length" if place + 1 == len(tokens) else None)]}
                yield f"data: {json.dumps(ids)}\r\n\r\n".encode()
                if fails:
                    yield b'data: {"error": {"message": "EngineCore died"}}\n\n'
            yield b'data: {"choices": []}\n\ndata: [DONE]\n\n'

        return StreamingResponse(events(), media_type="text/event-stream")

    return app


def with_vllm(app, work):
    async def main():
        async with serving(app) as url:
            return await work(VLLMServerEngine(HttpServer(url, timeout=10), CONTEXT))

    return asyncio.run(main())


def test_vllm_as_a_server():
    whole, streamed, told = with_vllm(completions([5, 6, 7]), lambda engine: both(engine, SamplingParams(max_tokens=3)))
    assert streamed == whole
    assert told == [[5], [6], [7]]


def test_a_server_that_fails_midway_is_an_engine_that_failed():
    with pytest.raises(EngineError, match="EngineCore died"):
        with_vllm(
            completions([5, 6], fails=True),
            lambda engine: engine.generate("a", PROMPT, SamplingParams(max_tokens=2), on_tokens=lambda ids: None),
        )


class Failing:
    """Tells of some tokens, and fails; the other replica draws others."""

    def __init__(self, tells):
        self.tells = tells

    def open(self, ids): ...
    def close(self, name): ...

    async def check(self): ...

    async def generate(self, request_id, prompt_ids, params, *, images=None, on_tokens=None):
        if self.tells:
            on_tokens([9])
        raise EngineError("gone")


@pytest.mark.parametrize("tells", [False, True])
def test_a_router_takes_no_token_back(tells):
    """Another replica may draw others: what went out cannot be retried, anything else is."""

    async def main():
        router = Router({"a": Failing(tells), "b": ScriptedEngine(lambda *_: [1, 2])})
        told = []
        params = SamplingParams(max_tokens=4)
        output = await router.generate("r", PROMPT, params, on_tokens=lambda ids: told.extend(ids))
        return output, told

    if tells:
        with pytest.raises(EngineError, match="failed after tokens of it had gone out: gone"):
            asyncio.run(main())
    else:
        output, told = asyncio.run(main())
        assert output.token_ids == told == [1, 2]


def test_an_engine_without_the_parameter_is_asked_without_it():
    class Whole:
        def open(self, ids): ...
        def close(self, name): ...

        async def generate(self, request_id, prompt_ids, params, *, images=None):
            return TokenOutput([1], [0.0], "stop", [0])

    async def main():
        return await Router({"a": Whole()}).generate("r", PROMPT, SamplingParams(), on_tokens=lambda ids: None)

    assert not streams_tokens(Whole())
    assert asyncio.run(main()).token_ids == [1]
