"""The sglang engine against a server with SGLang's request and response types: no live SGLang runs here."""

import asyncio
import importlib.util
import os

import numpy as np
import pytest
from serving_stage import CONTEXT, bigram_score, save_bigram, serving
from sglang_server import Bigram, State, build_app

from etude.errors import ConfigError, EngineError
from etude.inference import EngineSetup, Router, SamplingParams, SGLangEngine, WeightMismatch, WeightProbe
from etude.inference.http import HttpServer
from etude.inference.probe import TOLERANCES

PROMPT = [3, 1, 4]


@pytest.fixture
def folders(tmp_path):
    return [save_bigram(tmp_path / f"v{seed}", seed) for seed in range(3)]


def run(folders, scenario, *, delay=0.0, timeout=10.0, **engine):
    """`scenario(engine, state)` against a fresh server."""

    async def main():
        state = State(Bigram(folders[0]), delay)
        async with serving(build_app(state)) as url:
            made = SGLangEngine(HttpServer(url, timeout=timeout), CONTEXT, **engine)
            return await asyncio.wait_for(scenario(made, state), 60)

    return asyncio.run(main())


@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_ids_and_log_probs_are_those_that_were_sampled(folders, temperature):
    async def scenario(engine, state):
        return await engine.generate("a", PROMPT, SamplingParams(temperature=temperature, max_tokens=40, seed=5))

    output = run(folders, scenario)
    assert (len(output.token_ids), output.stop_reason) == (40, "length")
    expected = bigram_score(folders[0])([(PROMPT, output.token_ids)], temperature)[0]
    assert np.allclose(output.log_probs, expected, atol=1e-9)


def test_seeds_decide_and_stop_ids_end_a_turn(folders):
    async def scenario(engine, state):
        params = SamplingParams(max_tokens=100, seed=1, stop_token_ids=(7, 9))
        same = [await engine.generate("a", PROMPT, params) for _ in range(2)]
        other = await engine.generate("a", PROMPT, SamplingParams(max_tokens=100, seed=2))
        return same, other, state

    (first, second), other, state = run(folders, scenario)
    assert first == second
    assert first.stop_reason == "stop"
    assert first.token_ids[-1] in (7, 9)
    assert not {7, 9} & set(first.token_ids[:-1])
    assert other.token_ids[:5] != first.token_ids[:5]
    asked = state.requests[0]
    assert asked.sampling_params.ignore_eos  # only our stop ids end a turn
    assert asked.return_sampling_mask is False


def test_restricted_sampling_gives_renormalised_log_probs(folders):
    async def scenario(engine, state):
        params = SamplingParams(max_tokens=60, seed=3, top_k=4, top_p=0.8)
        return await engine.generate("a", PROMPT, params), state.model.matrix

    evaluated, _ = run(folders, scenario)
    output, matrix = run(folders, scenario, keeps_ids=True)
    assert (evaluated.log_probs, evaluated.kept_ids) == (output.log_probs, None)
    drawn = zip([PROMPT[-1], *output.token_ids], output.token_ids, output.log_probs, output.kept_ids)
    for before, token, log_prob, ids in drawn:
        order = np.argsort(-matrix[before])[:4]
        probs = np.exp(matrix[before][order] - matrix[before].max())
        probs /= probs.sum()
        kept = (probs.cumsum() - probs) < 0.8
        support = dict(zip(order[kept].tolist(), np.log(probs[kept] / probs[kept].sum())))
        assert log_prob == pytest.approx(support[token], abs=1e-9)
        assert ids.tolist() == sorted(support)


def test_without_the_tokens_that_were_kept_nothing_is_trained_on(folders):
    async def scenario(engine, state):
        for state.fault, message in (("no masks", "lacks the tokens that top-k"), ("other masks", "token 0 is not")):
            with pytest.raises(EngineError, match=message):
                await engine.generate("a", PROMPT, SamplingParams(max_tokens=4, top_k=4))

    run(folders, scenario, keeps_ids=True)


def test_nucleus_alone_evaluates(folders):
    async def scenario(engine, state):
        return await engine.generate("a", PROMPT, SamplingParams(max_tokens=4, top_p=0.9))

    assert (
        len(run(folders, scenario, keeps_ids=True).token_ids) == 4
    )  # SGLang has no mask of it, and refuses to make one


def test_greedy_is_a_point_mass(folders):
    async def scenario(engine, state):
        output = await engine.generate("a", PROMPT, SamplingParams(temperature=0, max_tokens=5))
        return output, state.model.matrix

    output, matrix = run(folders, scenario)
    assert output.token_ids[0] == int(matrix[PROMPT[-1]].argmax())
    assert output.log_probs == [0.0] * 5


def test_the_context_limit_is_kept(folders):
    async def scenario(engine, state):
        long = [1] * (CONTEXT - 2)
        return [await engine.generate("a", ids, SamplingParams(max_tokens=9)) for ids in (long, [1] * CONTEXT, [])]

    outputs = run(folders, scenario)
    assert [(len(output.token_ids), output.stop_reason) for output in outputs] == [(2, "length")] + [(0, "length")] * 2


def test_abort_keeps_what_was_sampled_and_close_gives_up(folders):
    async def scenario(engine, state):
        tasks = [asyncio.ensure_future(engine.generate(n, PROMPT, SamplingParams(max_tokens=200))) for n in "ab"]
        await asyncio.sleep(0.3)
        with pytest.raises(ConfigError, match="already has a request"):
            await engine.generate("a", PROMPT, SamplingParams())
        await engine.abort("a")
        engine.close("b")
        outputs = await asyncio.gather(*tasks)
        while state.running:
            await asyncio.sleep(0.01)
        assert state.drawn < 200  # the closed connection ended it there, too
        await engine.abort("nobody")
        engine.close("nobody")
        return outputs

    aborted, closed = run(folders, scenario, delay=0.01)
    assert (aborted.stop_reason, closed.stop_reason) == ("aborted", "aborted")
    assert 0 < len(aborted.token_ids) < 200
    assert closed.token_ids == []


def test_a_cancelled_request_ends_at_the_server(folders):
    async def scenario(engine, state):
        task = asyncio.ensure_future(engine.generate("a", PROMPT, SamplingParams(max_tokens=200)))
        await asyncio.sleep(0.2)
        assert state.running
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        while state.running:
            await asyncio.sleep(0.01)
        assert state.drawn < 200
        return await engine.generate("a", PROMPT, SamplingParams(max_tokens=2))

    assert len(run(folders, scenario, delay=0.01).token_ids) == 2


def test_paused_requests_stay_and_go_on(folders):
    async def scenario(engine, state):
        task = asyncio.ensure_future(engine.generate("a", PROMPT, SamplingParams(max_tokens=30)))
        await asyncio.sleep(0.1)
        await engine.pause()
        await asyncio.sleep(0.3)
        waiting = not task.done()
        await engine.resume()
        return waiting, await task

    waiting, output = run(folders, scenario, delay=0.01)
    assert waiting
    assert len(output.token_ids) == 30


def test_every_token_bears_the_weights_that_drew_it(folders):
    async def scenario(engine, state):
        await engine.update_weights(folders[0], 1)
        task = asyncio.ensure_future(engine.generate("a", PROMPT, SamplingParams(max_tokens=60)))
        await asyncio.sleep(0.3)
        await engine.update_weights(folders[1], 2)
        return await task, state.version

    output, version = run(folders, scenario, delay=0.01)
    assert version == "2"
    split = output.weight_versions.count(1)
    assert 0 < split < 60
    assert output.weight_versions == [1] * split + [2] * (60 - split)
    for folder, part in ((folders[0], slice(0, split)), (folders[1], slice(split, None))):
        expected = bigram_score(folder)([(PROMPT, output.token_ids)], 1.0)[0]
        assert np.allclose(output.log_probs[part], expected[part], atol=1e-9)


def test_a_weight_update_leaves_a_paused_engine_paused(folders):
    async def scenario(engine, state):
        await engine.pause()
        await engine.update_weights(folders[1], 1)
        paused = state.paused
        await engine.resume()
        return paused, state.paused

    assert run(folders, scenario) == (True, False)


def test_memory_is_given_back_and_taken(folders):
    async def scenario(engine, state):
        await engine.sleep()
        asleep = state.asleep
        await engine.wake()
        return asleep, state.asleep

    assert run(folders, scenario) == (True, False)


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        ("status 500", "/generate: status 500: .*CUDA error"),
        ("garbage", "/generate: the answer is not JSON"),
        ("list", "the answer is JSON, but no object"),
        ("no log-probs", "the answer lacks a part: KeyError 'output_token_logprobs'"),
        ("few log-probs", "7 log-probs belong to other ids than the 8 drawn"),
        ("nan", "the log-prob of token 7 is not a finite number: nan"),
        ("positive", "the log-prob of token 0 is positive"),
        ("other ids", "8 log-probs belong to other ids"),
        ("own stop", "ended as 'stop' after token"),
        ("too many", "16 tokens, though 8 were asked for"),
        ("hang", "/generate: no answer within 0.5 s"),
    ],
)
def test_a_broken_answer_is_the_worlds_fault(folders, fault, message):
    async def scenario(engine, state):
        state.fault = fault
        with pytest.raises(EngineError, match=message):
            await engine.generate("a", PROMPT, SamplingParams(max_tokens=8))
        state.fault = "none"
        return await engine.generate("a", PROMPT, SamplingParams(max_tokens=8))  # and the next one is fine

    assert len(run(folders, scenario, timeout=0.5).token_ids) == 8


def test_a_server_that_is_not_there(folders):
    engine = SGLangEngine(HttpServer("http://127.0.0.1:9", timeout=5), CONTEXT)
    with pytest.raises(EngineError, match=r"127\.0\.0\.1:9/generate: ClientConnectorError"):
        asyncio.run(engine.generate("a", PROMPT, SamplingParams()))


def test_refused_weights_are_an_error_and_the_engine_goes_on(folders):
    async def scenario(engine, state):
        state.fault = "refuses weights"
        with pytest.raises(EngineError, match=r"update_weights_from_disk: status 400: .*Failed to update weights"):
            await engine.update_weights(folders[1], 1)
        with pytest.raises(ConfigError, match="takes weights from a checkpoint's folder, not from None"):
            await engine.update_weights(None, 1)
        return state.paused, (await engine.generate("a", PROMPT, SamplingParams(max_tokens=3))).weight_versions

    assert run(folders, scenario) == (False, [0, 0, 0])


def test_health(folders):
    async def scenario(engine, state):
        await engine.check()
        state.fault = "unhealthy"
        with pytest.raises(EngineError, match="health_generate: status 503"):
            await engine.check()

    run(folders, scenario)


def test_metrics_count_since_the_last_call(folders):
    async def scenario(engine, state):
        await engine.generate("a", PROMPT, SamplingParams(max_tokens=3))
        return engine.metrics(), engine.metrics()

    first, second = run(folders, scenario)
    assert first == {"requests": 1.0, "prompt_tokens": 3.0, "sampled_tokens": 3.0}
    assert not any(second.values())


def test_the_probe_passes_right_weights_and_refuses_stale_ones(folders):
    async def scenario(engine, state):
        probe = [
            WeightProbe([PROMPT, [9]], bigram_score(folder), tolerance=TOLERANCES["float32"], temperature=0.8)
            for folder in folders
        ]
        await engine.update_weights(folders[1], 1)
        result = await probe[1].check(engine, 1)
        state.fault = "stale"
        await engine.update_weights(folders[2], 2)
        with pytest.raises(WeightMismatch, match=r"does not serve version 2 of the weights: .* differ .* tolerance is"):
            await probe[2].check(engine, 2)
        return result

    result = run(folders, scenario)
    assert result.largest < 1e-9
    assert result.tokens == 16


def test_images_are_refused(folders):
    engine = SGLangEngine(HttpServer("http://127.0.0.1:9", timeout=5), CONTEXT)
    with pytest.raises(ConfigError, match="takes text only"):
        asyncio.run(engine.generate("a", PROMPT, SamplingParams(), images=[object()]))


def test_one_address_is_an_engine_and_several_are_a_router(monkeypatch):
    setup = {"model_path": "m", "tokenizer": None, "max_model_len": 64}
    urls = ["http://127.0.0.1:30000/", "http://127.0.0.1:30001"]
    monkeypatch.setenv("SERVER_KEY", "secret")
    one = SGLangEngine.from_setup(EngineSetup(**setup, server_urls=urls[:1], server_api_key_env="SERVER_KEY"))
    assert isinstance(one, SGLangEngine)
    assert one._server._headers == {"Authorization": "Bearer secret"}
    two = SGLangEngine.from_setup(EngineSetup(**setup, server_urls=urls))
    assert isinstance(two, Router)
    assert list(two.replicas) == ["http://127.0.0.1:30000", "http://127.0.0.1:30001"]


@pytest.mark.skipif(
    importlib.util.find_spec("sglang") is None or "SGLANG_URL" not in os.environ,
    reason="needs a live SGLang: install it, start a server, and set SGLANG_URL",
)
def test_a_live_server():
    async def main():
        engine = SGLangEngine(HttpServer(os.environ["SGLANG_URL"], timeout=120), CONTEXT)
        await engine.check()
        params = SamplingParams(max_tokens=16, seed=1, top_p=0.9)
        output = await engine.generate("a", PROMPT, params)
        assert len(output.token_ids) == len(output.log_probs) == 16

    asyncio.run(main())
