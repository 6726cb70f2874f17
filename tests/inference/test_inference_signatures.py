"""The calls of the vllm and sglang engines are those that vLLM 0.32.0 and SGLang 0.5.23 take, by their own source."""

import asyncio
import contextlib
import sys
from types import SimpleNamespace

import pytest
from signatures import CLASSES, METHODS, signature

from etude.inference import AdapterFolder, EngineSetup, SamplingParams, SGLangEngine, VLLMEngine

PARAMS = SamplingParams(max_tokens=1, top_k=4, top_p=0.9, seed=3, stop_token_ids=(9,), stop=("end",))


async def use(engine, folder):
    """Everything that a run does with an engine."""
    await engine.generate("a", [1, 2], PARAMS)
    await engine._abort("a")
    await engine.check()
    await engine.pause()
    await engine.resume()
    await engine.update_weights(folder, 1)
    await engine.sleep()
    await engine.wake("weights")
    await engine.wake()
    await engine.shutdown()


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    return tmp_path


def test_vllm_takes_every_call(monkeypatch, folder):
    called = set()
    done = {"token_ids": [9], "logprobs": [{9: SimpleNamespace(logprob=-1.0)}], "finish_reason": "stop"}
    done |= {"weight_versions": None, "sampling_mask": SimpleNamespace(token_ids=[[9]])}

    def taken(name, *args, **kwargs):
        signature(name).bind(*args, **kwargs)
        called.add(name)
        return SimpleNamespace(**kwargs)

    class AsyncLLM:
        @classmethod
        def from_engine_args(cls, *args, **kwargs):
            taken("AsyncLLM.from_engine_args", *args, **kwargs)
            return cls()

        async def generate(self, *args, **kwargs):
            taken("AsyncLLM.generate", *args, **kwargs)
            yield SimpleNamespace(outputs=[SimpleNamespace(**done)])

        def shutdown(self, *args, **kwargs):
            taken("AsyncLLM.shutdown", *args, **kwargs)

        def __getattr__(self, name):
            async def call(*args, **kwargs):
                taken(f"AsyncLLM.{name}", *args, **kwargs)
                return [{}] if "etude_checksums" in args else [3]

            return call

    def made(name):
        return lambda **given: taken(name, **given)

    kinds = SimpleNamespace(FINAL_ONLY=2)
    for module, names in {
        "vllm": {"SamplingParams": lambda output_kind, **given: taken("vllm.SamplingParams", **given)},
        "vllm.engine.arg_utils": {"AsyncEngineArgs": made("vllm.AsyncEngineArgs")},
        "vllm.v1.engine.async_llm": {"AsyncLLM": AsyncLLM},
        "vllm.sampling_params": {"RequestOutputKind": kinds},
    }.items():
        monkeypatch.setitem(sys.modules, module, SimpleNamespace(**names))
    engine = VLLMEngine.from_setup(EngineSetup("model", None, 64, keeps_ids=True, shares_gpu=True))
    asyncio.run(use(engine, folder))
    taken("GPUModelRunner.reload_weights", weights_iterator=iter(()))
    assert called == {*METHODS, *(name for name in CLASSES if name.startswith("vllm."))}


def test_sglang_takes_every_request(folder):
    asked, meta = set(), {"finish_reason": {"type": "stop"}, "output_token_logprobs": [[-1.0, 9, None]]}
    meta |= {"output_token_sampling_logprobs": [-1.0], "output_token_sampling_mask": [[9]]}

    class Server:
        url = "http://server"

        async def ask(self, path, body=None, **_):
            signature(path).bind(**(body or {}))
            signature("sglang.SamplingParams").bind(**(body or {}).get("sampling_params", {}))
            asked.add(path)
            return {"success": True, "output_ids": [9], "meta_info": meta}

        post = ask

        async def get(self, path, **_):
            assert path == "/health_generate"

        def reading(self, route):
            return contextlib.nullcontext()

    engine = SGLangEngine(Server(), 64, keeps_ids=True)
    asyncio.run(use(engine, folder))

    async def adapt():
        for version in (2, 3):
            await engine.update_weights(AdapterFolder(f"/adapters/{version}", 1), version)

    asyncio.run(adapt())
    assert asked == {name for name in CLASSES if name.startswith("/")}
