"""A server with SGLang's native HTTP interface around a model small enough for tests; run as a program it serves one,
by default a bigram model, and prints its port.

Requests and responses have the fields, types and defaults of SGLang 0.5.23 (`GenerateReqInput`, `SamplingParams`,
`UpdateWeightFromDiskReqInput`, `LoadLoRAAdapterReqInput`, `PauseGenerationReqInput`, `AbortReq` in `srt/managers/
io_struct.py` and `srt/sampling/sampling_params.py`; the responses as `srt/managers/tokenizer_manager.py` builds them).
Log-probs are those after the temperature and before top-k and top-p, as there; `output_token_sampling_logprobs` are
renormalised over what could be drawn.

`POST /fault {"kind": …}` makes it misbehave; see `FAULTS`.
"""

import asyncio
import copy
import json
import sys
import threading
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import numpy as np
import uvicorn
from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, Response
from pydantic import BaseModel
from safetensors.numpy import load_file

FAULTS = (
    "none",
    "status 500",  # of /generate
    "garbage",  # no JSON
    "list",  # JSON, but no object
    "no log-probs",
    "few log-probs",
    "nan",
    "positive",
    "other ids",
    "own stop",  # ends on a token that nobody asked to stop at
    "too many",
    "hang",
    "aborts",  # ends every request as aborted
    "stale",  # takes new weights, says so, and keeps the old ones
    "refuses weights",
    "forgets",  # wakes with other weights than it fell asleep with
    "unhealthy",
)


class SamplingParams(BaseModel):
    max_new_tokens: int = 128
    stop_token_ids: set[int] | None = None
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    ignore_eos: bool = False
    skip_special_tokens: bool = True
    no_stop_trim: bool = False
    sampling_seed: int | None = None


class GenerateReqInput(BaseModel):
    rid: str | None = None
    input_ids: list[int] | None = None
    sampling_params: SamplingParams = SamplingParams()
    lora_path: str | None = None
    return_logprob: bool | None = None
    return_sampling_mask: bool | None = None
    stream: bool = False


class AbortReq(BaseModel):
    rid: str | None = None
    abort_all: bool = False


class PauseGenerationReqInput(BaseModel):
    mode: Literal["abort", "retract", "in_place"] = "abort"


class UpdateWeightFromDiskReqInput(BaseModel):
    model_path: str
    load_format: str | None = None
    abort_all_requests: bool = False
    weight_version: str | None = None
    flush_cache: bool = True


class LoadLoRAAdapterReqInput(BaseModel):
    lora_name: str
    lora_path: str


class UnloadLoRAAdapterReqInput(BaseModel):
    lora_name: str


class Fault(BaseModel):
    kind: Literal[FAULTS]  # type: ignore[valid-type]


_LOADING = threading.Lock()  # Transformers cannot load two models in two threads of a process at a time


class Bigram:
    """The next token's logits are a row of a matrix: a checkpoint is that matrix."""

    def __init__(self, folder):
        self.load(folder)

    def load(self, folder):
        self.matrix = load_file(Path(folder) / "model.safetensors")["logits"].astype(np.float64)

    def logits(self, ids):
        return self.matrix[ids[-1]]


class Network:
    """A causal LM, computed afresh for every token."""

    def __init__(self, folder):
        self.load(folder)

    def load(self, folder):
        from etude.models import load_causal_lm

        with _LOADING:
            self.model = load_causal_lm(folder)

    def forget(self):
        import torch

        with torch.no_grad():
            for parameter in self.model.parameters():
                parameter.mul_(0.5)

    def adapted(self, folder):
        """Another model: this one with the adapter of a folder merged into its weights."""
        from peft import PeftModel

        made = copy.copy(self)
        with _LOADING:
            made.model = PeftModel.from_pretrained(copy.deepcopy(self.model), folder).merge_and_unload()
        return made

    def logits(self, ids):
        import torch

        with torch.no_grad():
            return self.model(input_ids=torch.tensor([ids]), use_cache=False).logits[0, -1].double().numpy()


@dataclass
class State:
    model: Bigram | Network
    delay: float  # seconds a token
    version: str = "default"
    fault: str = "none"
    paused: bool = False
    asleep: bool = False
    aborted: set = field(default_factory=set)
    running: set = field(default_factory=set)
    requests: list = field(default_factory=list)
    drawn: int = 0  # tokens
    adapters: dict = field(default_factory=dict)  # models by name


def log_softmax(logits):
    shifted = logits - logits.max()
    return shifted - np.log(np.exp(shifted).sum())


def draw(logits, params, rng):
    """(token, its log-prob before top-k and top-p, the same after them, the tokens that they kept)."""
    if params.temperature == 0:
        token = int(logits.argmax())
        return token, float(log_softmax(logits)[token]), 0.0, [token]
    plain = log_softmax(logits / params.temperature)
    order = np.argsort(-plain, kind="stable")
    if params.top_k > 0:
        order = order[: params.top_k]
    probs = np.exp(plain[order])
    probs /= probs.sum()
    kept = (np.cumsum(probs) - probs) < params.top_p
    order, probs = order[kept], probs[kept] / probs[kept].sum()
    place = int(rng.choice(len(order), p=probs))
    return int(order[place]), float(plain[order[place]]), float(np.log(probs[place])), order.tolist()


def spans_of(versions):
    spans = []
    for place, version in enumerate(versions):
        if spans and spans[-1]["version"] == version:
            spans[-1]["end"] = place + 1
        else:
            spans.append({"version": version, "start": place, "end": place + 1})
    return spans


def build_app(state):
    app = FastAPI()
    app.state.serving = state

    @app.post("/generate")
    async def generate(obj: GenerateReqInput, request: Request):
        state.requests.append(obj)
        if state.fault == "status 500":
            return JSONResponse({"error": {"message": "CUDA error"}}, status_code=500)
        if state.fault == "garbage":
            return Response(b"<html>\xff\xfe gateway", media_type="text/html")
        if state.fault == "list":
            return JSONResponse([1, 2])
        if state.fault == "hang":
            await asyncio.sleep(3600)
        if obj.lora_path is not None and obj.lora_path not in state.adapters:
            return JSONResponse({"error": {"message": f"{obj.lora_path} is not loaded"}}, status_code=400)
        model = state.adapters.get(obj.lora_path, state.model)
        params = obj.sampling_params
        if obj.return_sampling_mask and params.top_k < 1:
            message = f"return_sampling_mask requires top_k=1 or finite 1 < top_k <= 4096; got top_k={params.top_k}"
            return JSONResponse({"error": {"message": message}}, status_code=400)
        rng = np.random.default_rng(params.sampling_seed)
        ids, pairs, versions, ending = list(obj.input_ids), [], [], {"type": "length", "length": params.max_new_tokens}
        state.running.add(obj.rid)
        try:
            while len(pairs) < params.max_new_tokens:
                await asyncio.sleep(state.delay)
                while state.paused:
                    await asyncio.sleep(0.005)
                if obj.rid in state.aborted or await request.is_disconnected():
                    ending = {"type": "abort", "message": "Aborted"}
                    break
                now = state.model if obj.lora_path is None else model
                token, before, after, kept = draw(now.logits(ids), params, rng)
                ids.append(token)
                state.drawn += 1
                pairs.append((token, before, after, kept))
                versions.append(state.version)
                if token in (params.stop_token_ids or ()):
                    ending = {"type": "stop", "matched": token}
                    break
        finally:
            state.running.discard(obj.rid)
            state.aborted.discard(obj.rid)
        if state.fault == "aborts":
            ending = {"type": "abort", "message": "Abort in waiting queue"}
        if state.fault == "own stop":
            ending = {"type": "stop", "matched": 0}
        meta = {
            "id": obj.rid,
            "finish_reason": ending,
            "prompt_tokens": len(obj.input_ids),
            "completion_tokens": len(pairs),
            "weight_version": state.version,
            "weight_versions": spans_of(versions),
        }
        if obj.return_logprob and state.fault != "no log-probs":
            meta["output_token_logprobs"] = [[before, token, None] for token, before, *_ in pairs]
        if obj.return_sampling_mask:
            meta["output_token_sampling_logprobs"] = [after for _, _, after, _ in pairs]
            meta["output_token_sampling_mask"] = [kept for *_, kept in pairs]
        out = [token for token, *_ in pairs]
        if state.fault == "no masks":
            del meta["output_token_sampling_mask"]
        if state.fault == "other masks":
            meta["output_token_sampling_mask"] = [[token + 1] for token in out]
        if state.fault == "few log-probs":
            meta["output_token_logprobs"].pop()
        if state.fault == "nan":
            meta["output_token_logprobs"][-1][0] = float("nan")
        if state.fault == "positive":
            meta["output_token_logprobs"][0][0] = 0.5
        if state.fault == "other ids":
            meta["output_token_logprobs"][0][1] += 1
        if state.fault == "too many":
            out, meta["output_token_logprobs"] = out * 2, meta["output_token_logprobs"] * 2
        whole = {"text": "", "output_ids": out, "meta_info": meta}
        return Response(json.dumps(whole), media_type="application/json")

    @app.post("/abort_request")
    async def abort(obj: AbortReq):
        state.aborted |= set(state.running) if obj.abort_all else {obj.rid} & state.running
        return Response(status_code=200)

    @app.post("/pause_generation")
    async def pause(obj: PauseGenerationReqInput):
        state.paused = True
        return {"message": "Generation paused successfully.", "status": "ok"}

    @app.post("/continue_generation")
    async def resume():
        state.paused = False
        return {"message": "Generation continued successfully.", "status": "ok"}

    @app.post("/update_weights_from_disk")
    async def update(obj: UpdateWeightFromDiskReqInput):
        if state.fault == "refuses weights":
            content = {"success": False, "message": "Failed to update weights", "num_paused_requests": 0}
            return JSONResponse(content, status_code=400)
        if state.fault != "stale":
            state.model.load(obj.model_path)
        state.version = obj.weight_version or state.version
        return {"success": True, "message": "Succeeded to update model weights.", "num_paused_requests": 0}

    @app.post("/load_lora_adapter")
    async def load_adapter(obj: LoadLoRAAdapterReqInput):
        known = obj.lora_name in state.adapters
        if known or state.fault == "refuses weights":
            return JSONResponse({"success": False, "error_message": "Failed to load", "loaded_adapters": {}}, 400)
        adapted = state.model if state.fault == "stale" else state.model.adapted(obj.lora_path)
        state.adapters[obj.lora_name] = adapted
        return {"success": True, "error_message": "", "loaded_adapters": {}}

    @app.post("/unload_lora_adapter")
    async def unload_adapter(obj: UnloadLoRAAdapterReqInput):
        del state.adapters[obj.lora_name]
        return {"success": True, "error_message": "", "loaded_adapters": {}}

    @app.api_route("/release_memory_occupation", methods=["GET", "POST"])
    async def release():
        state.asleep = True

    @app.api_route("/resume_memory_occupation", methods=["GET", "POST"])
    async def occupy():
        state.asleep = False
        if state.fault == "forgets":
            state.model.forget()

    @app.get("/health_generate")
    async def health():
        if state.fault == "hang":
            await asyncio.sleep(3600)
        return Response(status_code=503 if state.fault == "unhealthy" else 200)

    @app.post("/fault")
    async def fault(obj: Fault):
        state.fault = obj.kind

    return app


def main(folder, delay, port, kind="Bigram", *of_sglang):
    app = build_app(State({"Bigram": Bigram, "Network": Network}[kind](folder), float(delay)))
    server = uvicorn.Server(uvicorn.Config(app, host="127.0.0.1", port=int(port), log_level="warning"))

    async def serve():
        task = asyncio.ensure_future(server.serve())
        while not server.started and not task.done():
            await asyncio.sleep(0.01)
        print(server.servers[0].sockets[0].getsockname()[1], flush=True)
        await task

    asyncio.run(serve())


if __name__ == "__main__":
    main(*sys.argv[1:])
