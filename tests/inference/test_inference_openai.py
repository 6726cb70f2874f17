"""The openai engine against a small server with OpenAI's `/v1/completions`."""

import asyncio
import json

import pytest
from fastapi import FastAPI, Request
from serving_stage import serving

from etude.errors import ConfigError, EngineError
from etude.inference import EngineSetup, OpenAIEngine, SamplingParams, check_trainable
from etude.inference.http import HttpServer
from etude.models import build_tiny_tokenizer


@pytest.fixture(scope="module")
def tokenizer():
    return build_tiny_tokenizer(["What is 2 + 3? The answer is 5."] * 4, 400)


def server(text=" is 5.", ending="stop", models=("tiny",), body=None):
    """An app, and the requests it got."""
    app, seen = FastAPI(), []

    @app.get("/v1/models")
    async def listed():
        return {"object": "list", "data": [{"id": name, "object": "model"} for name in models]}

    @app.post("/v1/completions")
    async def complete(request: Request):
        seen.append((dict(request.headers), json.loads(await request.body())))
        if body is not None:
            return body
        return {"choices": [{"index": 0, "text": text, "finish_reason": ending, "logprobs": None}], "model": "tiny"}

    return app, seen


def ask(app, tokenizer, params, *, model=None, prompt="The answer"):
    async def main():
        async with serving(app) as url:
            engine = OpenAIEngine(HttpServer(url, timeout=10, api_key="sesame"), tokenizer, 200, model)
            await engine.check()
            return await engine.generate("a", tokenizer.encode(prompt), params)

    return asyncio.run(main())


def test_text_goes_out_and_comes_back_as_ids(tokenizer):
    app, seen = server()
    end = tokenizer.eos_token_id
    params = SamplingParams(temperature=0.7, max_tokens=30, stop_token_ids=(end,), seed=2**40)
    output = ask(app, tokenizer, params)
    assert tokenizer.decode(output.token_ids) == " is 5.<|im_end|>"
    assert output.stop_reason == "stop"
    assert output.log_probs == [0.0] * len(output.token_ids)  # there are none: nothing of this is trained on
    headers, body = seen[0]
    assert headers["authorization"] == "Bearer sesame"
    assert body["prompt"] == "The answer"
    assert body["stop"] == ["<|im_end|>"]
    assert (body["model"], body["temperature"], body["max_tokens"]) == ("tiny", 0.7, 30)
    assert "top_k" not in body


def test_a_cut_answer_has_no_end_and_a_long_one_is_cut(tokenizer):
    app, seen = server(ending="length")
    output = ask(app, tokenizer, SamplingParams(max_tokens=30, stop_token_ids=(1,), top_k=5), model="mine")
    assert output.stop_reason == "length"
    assert tokenizer.decode(output.token_ids) == " is 5."
    assert seen[0][1]["top_k"] == 5
    app, _ = server(text="2 + 3 = 5. " * 20)
    output = ask(app, tokenizer, SamplingParams(max_tokens=7))
    assert (len(output.token_ids), output.stop_reason) == (7, "length")


def test_the_stop_text_that_a_server_names_is_put_back(tokenizer):
    choice = {"index": 0, "text": "is 5", "finish_reason": "stop", "stop_reason": "The"}
    app, seen = server(body={"choices": [choice]})
    params = SamplingParams(max_tokens=30, stop_token_ids=(tokenizer.eos_token_id,), stop=("The",))
    output = ask(app, tokenizer, params)
    assert seen[0][1]["stop"] == ["The", "<|im_end|>"]
    assert (tokenizer.decode(output.token_ids), output.stop_reason) == ("is 5The", "stop")
    unnamed, _ = server(text="is 5")
    assert tokenizer.decode(ask(unnamed, tokenizer, params).token_ids) == "is 5<|im_end|>"


def test_of_several_models_one_must_be_named(tokenizer):
    app, _ = server(models=("a", "b"))
    with pytest.raises(ConfigError, match=r"serves 2 models \(a, b\): set actor_rollout_ref.rollout.server_model"):
        ask(app, tokenizer, SamplingParams())


@pytest.mark.parametrize(
    "body", [{}, {"choices": []}, {"choices": [{"text": None, "finish_reason": "stop"}]}, {"choices": 3}]
)
def test_an_answer_without_text_is_the_worlds_fault(tokenizer, body):
    app, _ = server(body=body)
    with pytest.raises(EngineError, match="the answer lacks a part"):
        ask(app, tokenizer, SamplingParams())


def test_it_takes_no_weights_and_training_refuses_it(tokenizer):
    setup = EngineSetup("m", tokenizer, 64, server_urls=["http://127.0.0.1:9/v1"], server_model="x")
    engine = OpenAIEngine.from_setup(setup)
    assert engine._server.url == "http://127.0.0.1:9"
    with pytest.raises(ConfigError, match="it takes no weights"):
        asyncio.run(engine.update_weights("folder", 1))
    with pytest.raises(ConfigError, match=r"rollout.name=openai is for `etude eval` only"):
        check_trainable("openai")
    for name in ("native", "vllm", "sglang"):
        check_trainable(name)
