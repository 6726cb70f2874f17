"""The vllm engine: its failures against a small imitation, everything else against vLLM itself where it is installed
(`make test-vllm`)."""

import asyncio
import os
import signal
import socket
import sys
from dataclasses import replace
from importlib.util import find_spec
from types import SimpleNamespace
from typing import ClassVar

import numpy as np
import psutil
import pytest
import torch
from fastapi import FastAPI
from fastapi.responses import JSONResponse, PlainTextResponse
from options_stage import changed
from safetensors.torch import save_file
from serving_stage import serving
from vllm_stage import CONTEXT, ON_CPU, adapters_of, save_model, score_by, vllm_server

from etude.errors import ConfigError, EngineError
from etude.inference import (
    AdapterFolder,
    EngineSetup,
    Router,
    SamplingParams,
    VLLMEngine,
    VLLMServerEngine,
    WeightMismatch,
    WeightProbe,
)
from etude.inference.http import HttpServer
from etude.inference.sampling import restrict
from etude.inference.vllm.loaded import WatchedLoad, parameter_checksums
from etude.inference.vllm.server import COMPLETIONS, GENERATE, sampling_fields
from etude.models.named_weights import checksum
from etude.options import RolloutOptions, TrainOptions
from etude.options.rollout import BUILTIN
from etude.options.serving import KEY, serving_faults
from etude.protocol import DataProto

PROMPT = [3, 1, 4]


# -- without vLLM --------------------------------------------------------------------------------------------------


def imitation(
    *, dev_mode=True, scale_out=False, choice=None, results=("11",), reset=True, generate_status=200, adapters=None
):
    """The routes that the engine uses, answering as vLLM 0.32 does."""
    app, calls = FastAPI(), []

    if dev_mode:

        @app.get("/is_paused")
        async def is_paused():
            return {"is_paused": False}

        @app.post("/pause")
        async def pause(mode: str = "abort"):
            calls.append(f"pause {mode}")
            return {"status": "paused"}

        @app.post("/resume")
        async def resume():
            calls.append("resume")
            return {"status": "resumed"}

        @app.post("/collective_rpc")
        async def rpc(body: dict):
            calls.append(body["method"])
            if results is None:
                return JSONResponse({"error": {"message": "no attribute 'etude_load_folder'"}}, status_code=500)
            return {"results": list(results)}

        @app.post("/reset_prefix_cache")
        async def reset_prefix_cache(reset_running_requests: bool = False):
            calls.append(f"reset {reset_running_requests}")
            return {"success": reset}

        @app.post("/update_weight_version")
        async def update_weight_version(body: dict):
            calls.append(f"version {body['new_version']}")
            return {"success": True, "new_version": body["new_version"]}

        @app.post("/abort_requests")
        async def abort_requests(body: dict):
            calls.append(f"abort {body['request_ids']}")
            return {"status": "aborted", "aborted": 1}

    if adapters is not None:

        @app.post("/v1/load_lora_adapter")
        async def load(body: dict):
            calls.append(f"load {body['lora_path']}")
            adapters.append(body["lora_name"])
            return PlainTextResponse("Success")

        @app.post("/v1/unload_lora_adapter")
        async def unload(body: dict):
            if body["lora_name"] not in adapters:
                return JSONResponse({"error": {"message": "cannot be found"}}, status_code=404)
            adapters.remove(body["lora_name"])
            return PlainTextResponse("Success")

    @app.post("/inference/v1/generate")
    async def generate(body: dict):
        if not scale_out:
            return JSONResponse({"error": {"message": "Scale-out endpoints are disabled."}}, status_code=403)
        if "token_ids" not in body:
            return JSONResponse({"error": {"message": "token_ids: field required"}}, status_code=400)
        calls.append(f"generate {body['model']}" if "model" in body else "generate")
        spans = [{"version": "default", "start": 0, "end": 1}, {"version": "5", "start": 1, "end": 2}]
        content = [{"token_id": 8, "logprob": -1.0}, {"token_id": 9, "logprob": -2.0}]
        done = {
            "token_ids": [8, 9],
            "logprobs": {"content": content},
            "finish_reason": "length",
            "weight_versions": spans,
        }
        return {"request_id": "x", "choices": [choice or done]}

    @app.post("/v1/completions")
    async def complete(body: dict):
        calls.append(f"complete {body['model']}" if "model" in body else "complete")
        await asyncio.sleep(0.1)
        done = {"token_ids": [8, 9], "logprobs": {"token_logprobs": [-1.0, -2.0]}, "finish_reason": "length"}
        return JSONResponse({"choices": [choice or done]}, status_code=generate_status)

    return app, calls


def against(app, scenario, **engine):
    async def main():
        async with serving(app) as url:
            return await scenario(VLLMServerEngine(HttpServer(url, timeout=10), 64, **engine))

    return asyncio.run(main())


def ask(engine, name="a"):
    return engine.generate(name, PROMPT, SamplingParams(max_tokens=5))


def test_the_route_that_names_the_weights_is_taken_where_it_is_open():
    app, calls = imitation(scale_out=True)
    output = against(app, ask)
    assert output.token_ids == [8, 9]
    assert output.weight_versions == [0, 5]
    assert calls == ["generate"]
    app, calls = imitation()
    assert against(app, ask).weight_versions == [0, 0]
    assert calls == ["complete"]


def test_training_with_top_k_needs_the_tokens_that_it_kept():
    def top_two(engine):
        return engine.generate("a", PROMPT, SamplingParams(max_tokens=5, top_k=2))

    content = [{"token_id": 8, "logprob": -1.0}, {"token_id": 9, "logprob": 0.0}]
    choice = {"token_ids": [8, 9], "logprobs": {"content": content}, "finish_reason": "length", "weight_versions": []}
    app, _ = imitation(scale_out=True, choice=choice | {"sampling_mask": [[8, 3], [9]]})
    assert [ids.tolist() for ids in against(app, top_two, keeps_ids=True).kept_ids] == [[3, 8], [9]]
    for scale_out in (True, False):  # a server without --return-sampling-mask, and one without --enable-scale-out
        app, _ = imitation(scale_out=scale_out)
        assert against(app, top_two).kept_ids is None
        with pytest.raises(EngineError, match="lacks the tokens that top-k and top-p kept"):
            against(app, top_two, keeps_ids=True)


def test_where_all_requests_keep_ids_each_has_a_temperature_and_a_top_k():
    """vLLM refuses others then: "sampling distribution replay requires temperature > 0", and top_k > 0."""
    greedy, probe, cut = (
        sampling_fields(params, keeps_ids=True)
        for params in (SamplingParams(temperature=0), SamplingParams(temperature=0.7), SamplingParams(top_k=5))
    )
    assert (greedy["temperature"], greedy["top_k"]) == (1.0, 1)
    assert (probe["temperature"], probe["top_k"] > 10**6) == (0.7, True)
    assert cut == sampling_fields(SamplingParams(top_k=5))


def test_a_server_without_the_development_routes_is_refused_with_what_to_do():
    app, _ = imitation(dev_mode=False)
    with pytest.raises(
        ConfigError, match=r"cannot be paused or given weights: start vLLM .* with VLLM_SERVER_DEV_MODE=1"
    ):
        against(app, ask)


@pytest.mark.parametrize(
    ("choice", "message"),
    [
        (None, "/v1/completions: status 500"),
        ({"token_ids": None, "logprobs": None, "finish_reason": "length"}, "lacks a part"),
        ({"logprobs": {"token_logprobs": []}, "finish_reason": "length"}, "lacks a part: KeyError 'token_ids'"),
        (
            {"token_ids": [1], "logprobs": {"token_logprobs": [None]}, "finish_reason": "length"},
            "is not a finite number",
        ),
        ({"token_ids": [1, 2], "logprobs": {"token_logprobs": [-1.0]}, "finish_reason": "length"}, "1 log-probs for 2"),
        ({"token_ids": [1], "logprobs": {"token_logprobs": [-1.0]}, "finish_reason": "stop"}, "which is no stop id"),
    ],
)
def test_a_broken_answer_is_the_worlds_fault(choice, message):
    app, _ = imitation(choice=choice, generate_status=200 if choice else 500)
    with pytest.raises(EngineError, match=message):
        against(app, ask)


def checkpoint(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    return tmp_path


def test_new_weights_come_between_pause_and_resume(tmp_path):
    app, calls = imitation()

    async def scenario(engine):
        await engine.update_weights(checkpoint(tmp_path), 3)
        return (await ask(engine)).weight_versions

    assert against(app, scenario) == [3, 3]
    assert calls[:5] == ["pause keep", "etude_load_folder", "reset True", "version 3", "resume"]


class Fused(torch.nn.Module):
    """A layer as vLLM has it: q, k and v in one matrix; an embedding with rows to spare; a norm."""

    packed_modules_mapping: ClassVar = {"qkv_proj": ["q_proj", "k_proj", "v_proj"]}

    def __init__(self):
        super().__init__()
        self.attn = torch.nn.Module()
        self.attn.qkv_proj = torch.nn.Linear(4, 8, bias=False, dtype=torch.bfloat16)
        self.embed = torch.nn.Embedding(6, 4)
        self.norm = torch.nn.LayerNorm(4, bias=False)

    def load_weights(self, weights, rows=(("q", 0, 4), ("k", 4, 6), ("v", 6, 8))):
        for name, tensor in weights:
            for part, start, end in rows:
                if name == f"attn.{part}_proj.weight":
                    self.attn.qkv_proj.weight.data[start:end] = tensor
            if name == "embed.weight":
                self.embed.weight.data[: len(tensor)] = tensor


def test_what_vllms_loader_was_given_is_compared_with_what_it_made_of_it():
    sizes = {"attn.q_proj": 4, "attn.k_proj": 2, "attn.v_proj": 2, "embed": 5}
    sent = [(f"{name}.weight", torch.randn(rows, 4)) for name, rows in sizes.items()]
    sent += [("norm.weight", torch.ones(4)), ("elsewhere.weight", torch.ones(2, 2))]
    model = Fused()
    watched = WatchedLoad(model)
    model.load_weights(watched.watch(reversed(sent)))
    assert watched.check() == 4
    before = parameter_checksums(model)
    assert before.keys() == {"attn.qkv_proj.weight", "embed.weight", "norm.weight"}
    swapped = (("q", 0, 4), ("k", 6, 8), ("v", 4, 6))
    watched = WatchedLoad(model)
    model.load_weights(watched.watch(sent), swapped)
    with pytest.raises(ValueError, match=r"'attn\.k_proj\.weight' is not in the engine's 'attn\.qkv_proj\.weight'"):
        watched.check()
    changed = {name for name, value in parameter_checksums(model).items() if value != before[name]}
    assert changed == {"attn.qkv_proj.weight"}


def test_weights_lost_in_a_servers_sleep_are_named():
    results = [{"model.norm.weight": "1f"}]
    app, calls = imitation(results=results)

    @app.post("/sleep")
    @app.post("/wake_up")
    async def control():
        return {}

    async def scenario(engine):
        await engine.sleep()
        await engine.wake()
        await engine.sleep()
        results[0] = {"model.norm.weight": "2e"}
        with pytest.raises(EngineError, match=r"'model\.norm\.weight' is not what it was before the engine's sleep"):
            await engine.wake()

    against(app, scenario)
    assert calls == ["etude_checksums"] * 4


def test_beside_a_trainer_vllm_leaves_it_half_of_the_gpu():
    setup = EngineSetup("model", None, 100, engine_kwargs={"enable_sleep_mode": False})
    alone, beside = (VLLMEngine.from_setup(replace(setup, shares_gpu=shares))._arguments for shares in (False, True))
    assert not {"gpu_memory_utilization", "return_sampling_mask"} & alone.keys()
    assert VLLMEngine.from_setup(replace(setup, keeps_ids=True))._arguments["return_sampling_mask"]
    assert (beside["gpu_memory_utilization"], beside["enable_sleep_mode"]) == (0.5, False)


class SwappingExperts(torch.nn.Module):
    """Two experts as vLLM has them for FlashInfer's kernel: after loading, the halves of each in `w13` are exchanged."""

    def __init__(self):
        super().__init__()
        self.experts = torch.nn.Module()
        self.experts.routed_experts = torch.nn.Module()
        for name, rows in (("w13_weight", 4), ("w2_weight", 2)):
            made = torch.nn.Parameter(torch.zeros(2, rows, 2, dtype=torch.bfloat16), requires_grad=False)
            self.experts.routed_experts.register_parameter(name, made)

    def load_weights(self, weights, kept=()):
        own = self.experts.routed_experts
        parts = {"gate_proj": own.w13_weight[:, :2], "up_proj": own.w13_weight[:, 2:], "down_proj": own.w2_weight}
        for name, tensor in weights:
            _, expert, part, _ = name.split(".")
            if part not in kept:
                parts[part][int(expert)].copy_(tensor)

    def reload_weights(self, weights_iterator, kept=()):
        self.load_weights(weights_iterator, kept)
        own = self.experts.routed_experts.w13_weight
        own.copy_(own.roll(2, 1))


def receiver_of(layer, monkeypatch, reload_weights):
    platforms = SimpleNamespace(current_platform=SimpleNamespace(is_cpu=lambda: False))
    monkeypatch.setitem(sys.modules, "vllm", SimpleNamespace(platforms=platforms))
    monkeypatch.setitem(sys.modules, "vllm.platforms", platforms)
    monkeypatch.delitem(sys.modules, "etude.inference.vllm.worker", raising=False)
    from etude.inference.vllm.worker import WeightReceiver

    receiver = WeightReceiver()
    receiver.model_runner = SimpleNamespace(get_model=lambda: layer, reload_weights=reload_weights)
    return receiver


def save_experts(folder):
    names = [f"experts.{e}.{part}.weight" for e in range(2) for part in ("gate_proj", "up_proj", "down_proj")]
    weights = {name: torch.randn(2, 2) for name in names}
    save_file(weights, folder / "model.safetensors")
    return {name: tensor.bfloat16() for name, tensor in weights.items()}


def test_experts_are_rearranged_again_after_a_weight_sync(monkeypatch, tmp_path):
    layer, weights = SwappingExperts(), save_experts(tmp_path)
    assert receiver_of(layer, monkeypatch, layer.reload_weights).etude_load_folder(str(tmp_path)) == 6
    up_first = [weights[f"experts.1.{part}.weight"] for part in ("up_proj", "gate_proj")]
    assert torch.equal(layer.experts.routed_experts.w13_weight[1], torch.cat(up_first))


@pytest.mark.parametrize("kept", ["gate_proj", "up_proj", "down_proj"])
def test_an_expert_that_does_not_have_the_values_that_were_sent_is_named(monkeypatch, tmp_path, kept):
    layer = SwappingExperts()
    save_experts(tmp_path)
    keeping = receiver_of(layer, monkeypatch, lambda **given: layer.reload_weights(**given, kept=(kept,)))
    with pytest.raises(ValueError, match="expert 0 of 'experts' is not in the engine what was sent"):
        keeping.etude_load_folder(str(tmp_path))


def test_experts_of_which_a_rank_has_a_part_are_left_to_the_probe():
    watched = WatchedLoad(SwappingExperts())
    sent = {f"experts.{e}.{part}.weight": torch.randn(4, 2) for e in range(2) for part in ("gate_proj", "down_proj")}
    list(watched.watch(sent.items()))
    assert watched.check() == 0


@pytest.mark.parametrize(
    ("faults", "message"),
    [
        ({"results": None}, "collective_rpc: status 500: .*does it run with --worker-extension-cls etude"),
        ({"results": []}, r"not every worker loaded the weights: \[\]"),
        ({"results": ["11", "0"]}, "not every worker loaded the weights"),
        ({"results": [None]}, "not every worker loaded the weights"),
        ({"reset": False}, "keys and values could not be dropped"),
    ],
)
def test_weights_that_were_not_taken_are_an_error_and_the_engine_goes_on(tmp_path, faults, message):
    app, calls = imitation(**faults)

    async def scenario(engine):
        with pytest.raises(EngineError, match=message):
            await engine.update_weights(checkpoint(tmp_path), 3)
        return (await ask(engine)).weight_versions

    assert against(app, scenario) == [0, 0]
    assert "resume" in calls
    assert not any(call.startswith("version") for call in calls)


@pytest.mark.parametrize("scale_out", [False, True])
def test_an_adapter_is_loaded_without_a_pause_and_named_by_requests_from_then_on(scale_out):
    kept = []
    app, calls = imitation(scale_out=scale_out, adapters=kept)

    async def scenario(engine):
        overtaken = asyncio.ensure_future(ask(engine))
        await asyncio.sleep(0.05)
        versions = []
        for version in (3, 4, 5):
            await engine.update_weights(AdapterFolder(f"/adapters/{version}", 2), version)
            versions.append((await ask(engine, f"b{version}")).weight_versions)
        return (await overtaken).weight_versions, versions

    first, versions = against(app, scenario)
    assert first == ([0, 5] if scale_out else [0, 0])  # without an adapter the server says so itself
    assert versions == [[3, 3], [4, 4], [5, 5]]
    assert [name.split("-")[2] for name in kept] == ["4", "5"]
    assert [call for call in calls if call.startswith("load")] == [f"load /adapters/{n}" for n in (3, 4, 5)]
    named = [call.split()[1] for call in calls if call.startswith(("complete ", "generate "))]
    assert named[1:] == kept
    assert not any(call.startswith(("pause", "resume", "reset")) for call in calls)


def test_a_server_that_was_started_anew_takes_the_next_adapter():
    """It has none of the old ones, and cannot unload them."""
    kept = []
    app, _ = imitation(adapters=kept)

    async def scenario(engine):
        for version in (1, 2):
            await engine.update_weights(AdapterFolder(f"/adapters/{version}", 1), version)
            kept.clear()
        await engine.update_weights(AdapterFolder("/adapters/3", 1), 3)
        return (await ask(engine)).weight_versions

    assert against(app, scenario) == [3, 3]
    assert [name.split("-")[2] for name in kept] == ["3"]


def test_a_server_without_adapters_at_run_time_is_refused_with_what_to_do():
    with pytest.raises(ConfigError, match="VLLM_ALLOW_RUNTIME_LORA_UPDATING=True"):
        against(imitation()[0], lambda engine: engine.update_weights(AdapterFolder("/adapters/1", 1), 1))


def test_an_abort_names_the_request_as_the_server_knows_it():
    app, calls = imitation()

    async def scenario(engine):
        task = asyncio.ensure_future(ask(engine))
        await asyncio.sleep(0.05)
        await engine.abort("a")
        await task

    against(app, scenario)
    assert "abort ['cmpl-a#0-0']" in calls


def test_addresses_make_server_engines():
    setup = EngineSetup("m", None, 64, server_urls=["http://127.0.0.1:1"])
    assert isinstance(VLLMEngine.from_setup(setup), VLLMServerEngine)
    setup = EngineSetup("m", None, 64, server_urls=["http://127.0.0.1:1", "http://127.0.0.1:2"])
    assert isinstance(VLLMEngine.from_setup(setup), Router)


def test_vllms_own_transfer_of_weights_is_refused_with_what_to_do():
    given = RolloutOptions(name="vllm", engine_kwargs={"vllm": {"weight_transfer_config": {"backend": "nccl"}}})
    [fault] = serving_faults(given, BUILTIN["vllm"], BUILTIN)
    assert (fault.key, "rollout.weight_transfer says how" in fault.fix) == (f"{KEY}.engine_kwargs", True)
    given = RolloutOptions(name="vllm", engine_kwargs={"vllm": {"seed": 1}})
    assert not [*serving_faults(given, BUILTIN["vllm"], BUILTIN)]


def test_handles_are_for_tensors_on_a_gpu(tmp_path):
    from etude.inference.vllm.local import _weights_call

    with pytest.raises(ConfigError, match="only where they lie on a GPU"):
        _weights_call({"w": torch.zeros(2)})
    assert _weights_call(checkpoint(tmp_path))[0] == "etude_load_folder"


# -- with vLLM -----------------------------------------------------------------------------------------------------

real = pytest.mark.skipif(find_spec("vllm") is None, reason="needs vLLM: make test-vllm")
LONG = 900  # tokens
TEXTS = ("What is 2 + 3?", "The answer is", "tool call", "country")


@pytest.fixture(scope="module")
def stage(tmp_path_factory):
    """Two checkpoints, their models, their tokenizer."""
    return stage_of(tmp_path_factory.mktemp("models"))


def stage_of(parent, experts=False):
    from etude.models import load_causal_lm, load_tokenizer

    folders = [save_model(parent / f"m{seed}", seed, experts) for seed in (1, 2)]
    return folders, [load_causal_lm(folder) for folder in folders], load_tokenizer(folders[0])


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


@pytest.fixture(scope="module")
def server(stage, tmp_path_factory):
    port = free_port()
    with vllm_server(stage[0][0], port, tmp_path_factory.mktemp("server") / "log", "--enable-scale-out"):
        yield f"http://127.0.0.1:{port}"


@pytest.fixture(params=[GENERATE, COMPLETIONS])
def served(server, request):
    return VLLMServerEngine(HttpServer(server, timeout=60), CONTEXT, route=request.param)


def probe_of(stage, number, **options):
    _, models, tokenizer = stage
    prompts = [tokenizer.encode(text) for text in TEXTS]
    return WeightProbe(prompts, score_by(models[number]), **{"tolerance": 1e-3, "tokens": 16, **options})


async def conformance(engine, stage):
    """What every vLLM must do, in process or behind HTTP."""
    folders, models, tokenizer = stage
    prompt = tokenizer.encode(TEXTS[0])
    largest = 0.0
    for version, number in enumerate((0, 1, 0, 1, 0), start=1):
        await engine.update_weights(folders[number], version)
        for temperature in (1.0, 0.7):
            result = await probe_of(stage, number, temperature=temperature).check(engine, version)
            largest = max(largest, result.largest)
    assert largest < 1e-4
    with pytest.raises(WeightMismatch, match="does not serve version 5"):
        await probe_of(stage, 1).check(engine, 5)
    params = SamplingParams(max_tokens=40, seed=5, stop_token_ids=tuple(range(200, 230)))
    first, second = [await engine.generate("a", prompt, params) for _ in range(2)]
    assert first.token_ids == second.token_ids
    assert (first.stop_reason == "stop") == (first.token_ids[-1] in params.stop_token_ids)
    greedy = await engine.generate("a", prompt, SamplingParams(temperature=0, max_tokens=8))
    wanted = models[0].generate(
        torch.tensor([prompt]), max_new_tokens=8, do_sample=False, eos_token_id=-1, pad_token_id=0
    )
    assert greedy.token_ids == wanted[0, len(prompt) :].tolist()
    assert greedy.log_probs == [0.0] * 8
    await restricted(engine, models[0], prompt)
    await control(engine, prompt)


async def restricted(engine, model, prompt):
    """Under top-k and top-p the log-probs are those of what is left to draw from."""
    params = SamplingParams(temperature=0.8, top_k=5, top_p=0.9, max_tokens=16, seed=3)
    output = await engine.generate("a", prompt, params)
    with torch.no_grad():
        logits = model(input_ids=torch.tensor([[*prompt, *output.token_ids]])).logits[0, len(prompt) - 1 : -1].float()
    expected = torch.log_softmax(restrict(logits / 0.8, [params] * len(logits)), -1)
    chosen = expected.gather(1, torch.tensor(output.token_ids)[:, None])[:, 0]
    assert torch.allclose(chosen, torch.tensor(output.log_probs), atol=1e-4)


async def control(engine, prompt):
    """Abort, close, pause, sleep."""
    params = SamplingParams(max_tokens=LONG)
    for _ in range(5):  # on a busy machine all tokens may be drawn before an abort is there
        tasks = [asyncio.ensure_future(engine.generate(name, prompt, params)) for name in "ab"]
        await asyncio.sleep(0.15)
        engine.close("b")
        while not tasks[0].done():  # an abort that comes before its request does nothing
            await engine.abort("a")
            await asyncio.sleep(0.02)
        aborted, closed = await asyncio.gather(*tasks)
        if aborted.stop_reason == closed.stop_reason == "aborted":
            break
    assert (aborted.stop_reason, closed.stop_reason) == ("aborted", "aborted")
    assert len(aborted.token_ids) == len(aborted.log_probs) < LONG
    await engine.pause()
    waiting = asyncio.ensure_future(engine.generate("c", prompt, SamplingParams(max_tokens=4)))
    await asyncio.sleep(0.5)
    assert not waiting.done()
    await engine.resume()
    assert len((await waiting).token_ids) == 4
    await engine.sleep()
    await engine.wake()
    await engine.check()
    assert len((await engine.generate("d", prompt, SamplingParams(max_tokens=4))).token_ids) == 4


async def overtaken(engine, stage):
    """A request that a weight update overtakes: every token's log-prob is that of the weights it bears."""
    folders, models, tokenizer = stage
    prompt = tokenizer.encode(TEXTS[0])
    for attempt in range(8):  # until the update falls into the answer rather than before or behind it
        old, new = 10 + 2 * attempt, 11 + 2 * attempt
        await engine.update_weights(folders[0], old)
        task = asyncio.ensure_future(engine.generate("a", prompt, SamplingParams(max_tokens=LONG)))
        await asyncio.sleep(0.1 * 1.5**attempt)
        await engine.update_weights(folders[1], new)
        output = await task
        split = output.weight_versions.count(old)
        if 0 < split < LONG:
            break
    assert 0 < split < LONG
    assert output.weight_versions == [old] * split + [new] * (LONG - split)
    for model, part in ((models[0], slice(0, split)), (models[1], slice(split, None))):
        expected = torch.tensor(score_by(model)([(prompt, output.token_ids)], 1.0)[0][part])
        assert torch.allclose(expected, torch.tensor(output.log_probs[part]), atol=1e-3)


@real
@pytest.mark.vllm
def test_a_server(served, stage):
    asyncio.run(conformance(served, stage))


@real
@pytest.mark.vllm
def test_a_request_that_new_weights_overtake(server, stage):
    asyncio.run(overtaken(VLLMServerEngine(HttpServer(server, timeout=60), CONTEXT), stage))


@real
@pytest.mark.vllm
@pytest.mark.parametrize("route", [GENERATE, COMPLETIONS])
def test_adapters_alone_are_what_a_server_samples_with(stage, tmp_path, monkeypatch, route):
    """Each version is the merged model's; a request that two updates overtake goes on with its own."""
    pytest.importorskip("peft")
    monkeypatch.setenv("VLLM_ALLOW_RUNTIME_LORA_UPDATING", "True")
    folders, merged = adapters_of(stage[0][0], tmp_path, 2)
    prompts, port = [stage[2].encode(text) for text in TEXTS], free_port()
    flags = ("--enable-scale-out", "--enable-lora", "--max-lora-rank", "8", "--max-loras", "2")

    async def scenario(engine):
        for version in (0, 1, 0, 1):
            await engine.update_weights(AdapterFolder(folders[version], 2), version)
            probe = WeightProbe(prompts, score_by(merged[version]), tolerance=1e-3, tokens=16)
            assert (await probe.check(engine, version)).largest < 1e-4
        with pytest.raises(WeightMismatch, match="does not serve version 1"):
            await WeightProbe(prompts, score_by(merged[0]), tolerance=1e-3, tokens=16).check(engine, 1)
        params = SamplingParams(max_tokens=LONG, seed=3)
        overtaken = asyncio.ensure_future(engine.generate("long", prompts[0], params))
        await asyncio.sleep(0.2)
        for version in (0, 1, 0):
            await engine.update_weights(AdapterFolder(folders[version], 2), version)
        output = await overtaken
        assert set(output.weight_versions) == {1}
        [expected] = score_by(merged[1])([(prompts[0], output.token_ids)], 1.0)
        assert np.abs(np.array(expected) - output.log_probs).max() < 1e-4

    with vllm_server(stage[0][0], port, tmp_path / "log", *flags):
        url = f"http://127.0.0.1:{port}"
        asyncio.run(scenario(VLLMServerEngine(HttpServer(url, timeout=60), CONTEXT, route=route)))


@real
@pytest.mark.vllm
def test_the_trainer_reaches_a_server_as_it_reaches_native(server, stage):
    trained(stage, {"name": "vllm", "server_urls": [server], "server_timeout": 60.0})


@real
@pytest.mark.vllm
def test_in_this_process(stage, monkeypatch):
    """An `AsyncLLM`: what every vLLM must do, then a request overtaken by new weights."""
    engine = in_process(stage, monkeypatch)

    async def main():
        try:
            await conformance(engine, stage)
            await overtaken(engine, stage)
            await engine.update_weights(stage[0][0], 99)
            assert_fused(stage[1][0].state_dict(), *await engine._engine.collective_rpc("etude_checksums"))
            for child in psutil.Process().children(recursive=True):
                child.send_signal(signal.SIGINT)  # as Ctrl-C does: the trainer finishes its step with the engine
            await asyncio.sleep(1)
            await engine.check()
            assert len((await engine.generate("z", PROMPT, SamplingParams(max_tokens=4))).token_ids) == 4
        finally:
            await engine.shutdown()

    asyncio.run(main())


@real
@pytest.mark.vllm
@pytest.mark.parametrize(("experts", "ranks"), [(True, 1), (False, 2)])
def test_a_mixture_and_two_ranks_sample_from_the_weights_that_were_sent(monkeypatch, tmp_path, experts, ranks):
    """On a CPU vLLM packs experts when it loads a model: what is loaded later must be packed, too."""
    own = stage_of(tmp_path, experts)
    engine = in_process(own, monkeypatch, tensor_parallel_size=ranks)

    async def main():
        try:
            for version, number in enumerate((0, 1, 0), start=1):
                await engine.update_weights(own[0][number], version)
                assert (await probe_of(own, number).check(engine, version)).largest < 1e-4
            engine._version = 4  # a sync that is withheld
            await engine._engine.update_weight_version("4")
            with pytest.raises(WeightMismatch, match="does not serve version 4"):
                await probe_of(own, 1).check(engine, 4)
        finally:
            await engine.shutdown()

    asyncio.run(main())


def assert_fused(weights, sums):
    """vLLM's parameters are those of the checkpoint, under vLLM's names."""
    attention, mlp = "model.layers.1.self_attn", "model.layers.1.mlp"
    fused = {f"{attention}.qkv_proj": [f"{attention}.{x}_proj" for x in "qkv"]}
    fused[f"{mlp}.gate_up_proj"] = [f"{mlp}.gate_proj", f"{mlp}.up_proj"]
    fused[f"{mlp}.down_proj"] = [f"{mlp}.down_proj"]
    for whole, parts in fused.items():
        expected = torch.cat([weights[f"{part}.weight"] for part in parts])
        assert sums[f"{whole}.weight"] == f"{checksum(expected):x}"


@real
@pytest.mark.vllm
def test_vllms_own_reload_on_a_cpu_is_caught(stage, monkeypatch):
    """vLLM's `reload_weights` reports success; what is computed afterwards is neither the old model nor the new."""
    if torch.cuda.is_available():
        pytest.skip("the fault is that of the packed weights on a CPU")

    class Vendor(VLLMEngine):
        async def update_weights(self, source, version):
            engine = await self._started()
            await engine.collective_rpc("reload_weights", kwargs={"weights_path": str(source)})
            await engine.reset_prefix_cache(reset_running_requests=True)
            await engine.update_weight_version(str(version))
            self._version = version

    engine = in_process(stage, monkeypatch, Vendor)
    del engine._arguments["worker_extension_cls"]

    async def main():
        try:
            await engine.update_weights(stage[0][1], 1)
            with pytest.raises(WeightMismatch, match="does not serve version 1"):
                await probe_of(stage, 1).check(engine, 1)
        finally:
            await engine.shutdown()

    asyncio.run(main())


@real
@pytest.mark.vllm
def test_the_trainer_reaches_vllm_in_its_own_process(stage, monkeypatch):
    quiet(monkeypatch)
    rollout = {"name": "vllm", "dtype": "bfloat16", "engine_kwargs": {"vllm": {"enforce_eager": True}}}
    worker = trained(stage, rollout, bound=0.3)
    worker._run(worker._manager.engine.shutdown())


@real
@pytest.mark.vllm
def test_arguments_that_vllm_does_not_know_are_refused_before_it_starts():
    with pytest.raises(ConfigError, match=r"vLLM has no argument 'enforce_eagr'; did you mean 'enforce_eager'"):
        VLLMEngine.check_installed({"enforce_eagr": True})
    with pytest.raises(ConfigError, match="logprobs_mode is set by the engine itself"):
        VLLMEngine.check_installed({"logprobs_mode": "raw_logprobs"})
    VLLMEngine.check_installed({"enforce_eager": True})


@real
@pytest.mark.vllm
def test_a_killed_server_is_an_engine_error(stage, tmp_path):
    port = free_port()
    with vllm_server(stage[0][0], port, tmp_path / "log") as process:

        async def main():
            engine = VLLMServerEngine(HttpServer(f"http://127.0.0.1:{port}", timeout=60), CONTEXT)
            await engine.generate("a", PROMPT, SamplingParams(max_tokens=2))
            await engine.pause()  # so that the next one is under way for certain
            task = asyncio.ensure_future(engine.generate("b", PROMPT, SamplingParams(max_tokens=LONG)))
            await asyncio.sleep(0.3)
            os.killpg(process.pid, signal.SIGKILL)
            with pytest.raises(EngineError):
                await task
            with pytest.raises(EngineError):
                await engine.check()

        asyncio.run(main())


def in_process(stage, monkeypatch, engine_class=VLLMEngine, **given):
    quiet(monkeypatch)
    folders, _, tokenizer = stage
    kwargs = {"enforce_eager": True, **given}
    setup = EngineSetup(str(folders[0]), tokenizer, CONTEXT, max_num_seqs=16, engine_kwargs=kwargs)
    return engine_class.from_setup(setup)


def quiet(monkeypatch):
    for name, value in ON_CPU.items():
        monkeypatch.setenv(name, value)


def trained(stage, rollout, bound=1e-3):
    """Rollouts and updates of a worker: log-probs agree to `bound` step after step, and the probe passes."""
    from batches_stage import update_batches

    from etude.agents import RolloutOptions
    from etude.distributed import InProcessWorkerGroup
    from etude.options import ActorOptions, ModelOptions
    from etude.training import OptimOptions
    from etude.workers import ActorRolloutRefWorker

    options = changed(
        TrainOptions(),
        model=ModelOptions(path=str(stage[0][0])),
        actor=ActorOptions(ppo_mini_batch_size=2, optim=OptimOptions(lr=1e-2)),
        rollout=RolloutOptions(prompt_length=64, response_length=48, **rollout),
    )
    group = InProcessWorkerGroup(ActorRolloutRefWorker, 1, options)
    group.init_model()
    group.update_weights(0)
    for step in range(3):
        batch = rolled_out(group, step)
        mask = batch.batch["response_mask"].bool()
        difference = (batch.batch["rollout_log_probs"] - batch.batch["old_log_probs"])[mask].abs().max()
        assert float(difference) < bound
        for parts in update_batches(batch, options.actor, shuffle=True, seed=3, ranks=1):
            group.update_actor(parts)
        (figures,) = group.update_weights(step + 1)
        assert figures["weight_sync/largest_difference"].value < bound
    return group._workers[0]


def rolled_out(group, step):
    """Eight answers with made-up advantages, ready for an update."""
    rows = [{"role": "user", "content": f"What is {number} + 3?"} for number in range(4) for _ in range(2)]
    columns = {
        "raw_prompt": [[row] for row in rows],
        "data_source": ["etude/arithmetic"] * 8,
        "reward_model": [{"ground_truth": "3"}] * 8,
        "extra_info": [{}] * 8,
        "tools_kwargs": [{}] * 8,
        "uid": [f"u{place // 2}" for place in range(8)],
        "rollout_index": list(range(8)),
    }
    batch = DataProto.from_single_dict({name: objects(values) for name, values in columns.items()})
    batch.meta_info = {"seed": step, "validate": False}
    batch = batch.union(group.generate_sequences(batch))
    batch.meta_info = {"temperature": 1.0, "global_step": step}
    mask = batch.batch["response_mask"]
    batch.batch["advantages"] = torch.randn(8, 1, generator=torch.Generator().manual_seed(step)) * mask
    return batch.union(group.compute_log_prob(batch))


def objects(values):
    column = np.empty(len(values), dtype=object)
    column[:] = values
    return column
