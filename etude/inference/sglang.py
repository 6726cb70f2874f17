"""The `sglang` engine: an SGLang server, over its native HTTP API.

Written against the request and response types of SGLang 0.5.23 (`srt/managers/io_struct.py`, `srt/entrypoints/
http_server.py`): `/generate` takes and returns token ids, `output_token_logprobs` are triples (log-prob, id, text), and
`weight_versions` in `meta_info` are spans over the output's tokens.

Two things determine what a log-prob means there. By default SGLang reports it after temperature and *before* top-k and
top-p; with top-k, `return_sampling_mask` requests the tokens that top-k and top-p kept and log-probs renormalised over
them, and these are used. (With top-p alone SGLang refuses to return them; log-probs are then those before top-p, and
only for evaluation.) And the server's environment must not set SGLANG_RETURN_ORIGINAL_LOGPROB, which would leave out
the temperature; the probe after a weight sync (`etude.inference.probe`) detects that.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from etude.errors import EngineError
from etude.inference.engine_setup import EngineSetup
from etude.inference.http import HttpServer
from etude.inference.router import connect
from etude.inference.served import (
    Answer,
    ServedEngine,
    checkpoint_folder,
    restricts,
    validate_answer,
    version_spans,
)
from etude.inference.types import ENGINES, Engine, SamplingParams, TokenOutput

_CONTROL_SECONDS = 60.0  # timeout of pause, abort and the like, which wait for the current model step

_KV_CACHE = {"tags": ["kv_cache"]}


@ENGINES.register("sglang")
class SGLangEngine(ServedEngine):
    """Implements `etude.inference.Engine` with one server; `sync_timeout`: seconds that a weight sync may take."""

    servers = "required"
    returns_kept_ids = True

    def __init__(
        self, server: HttpServer, max_model_len: int, sync_timeout: float = 600.0, keeps_ids: bool = False
    ) -> None:
        super().__init__(max_model_len, keeps_ids)
        self._server, self._sync_timeout = server, sync_timeout

    @classmethod
    def from_setup(cls, setup: EngineSetup) -> Engine:
        """Returns the engine of one address, or a router over several."""
        return connect(
            setup, lambda server: cls(server, setup.max_model_len, setup.weight_sync_timeout, setup.keeps_ids)
        )

    async def _ask(self, name: str, prompt: list[int], params: SamplingParams) -> TokenOutput:
        restricted = restricts(params)
        body = {
            "rid": name,
            "input_ids": prompt,
            "sampling_params": {
                "max_new_tokens": params.max_tokens,
                "temperature": params.temperature,
                "top_p": params.top_p,
                "top_k": params.top_k,
                "stop_token_ids": list(params.stop_token_ids),
                **({"stop": list(params.stop)} if params.stop else {}),
                "sampling_seed": params.seed,
                "ignore_eos": True,
                "skip_special_tokens": False,
                "no_stop_trim": True,
            },
            "return_logprob": True,
            "return_sampling_mask": restricted,
            **({"lora_path": adapter} if (adapter := self.adapter) else {}),
        }
        version = self._version
        answer = await self._server.ask("/generate", body)
        with self._server.reading("/generate"):
            read = self._read(answer, restricted)
        if adapter:  # the server's versions are of the base weights
            read = replace(read, versions=None)
        return validate_answer(read, params, version, self._server.url, self._keeps_ids)

    def _read(self, answer: dict[str, Any], restricted: bool) -> Answer:
        """Reads a `/generate` response; it has the token ids twice, and both must agree."""
        meta, ids = answer["meta_info"], answer["output_ids"]
        triples = meta["output_token_logprobs"]
        log_probs, drawn = [triple[0] for triple in triples], [triple[1] for triple in triples]
        if restricted:
            log_probs = meta["output_token_sampling_logprobs"]
        if drawn != ids:
            raise EngineError(
                f"{self._server.url}: {len(drawn)} log-probs belong to other ids than the {len(ids)} drawn"
            )
        spans = version_spans(meta.get("weight_versions"))
        return Answer(ids, log_probs, meta["finish_reason"]["type"], spans, meta.get("output_token_sampling_mask"))

    async def _abort(self, name: str) -> None:
        await self._server.post("/abort_request", {"rid": name}, timeout=_CONTROL_SECONDS)

    async def check(self) -> None:
        """Raises EngineError if the server cannot generate a token."""
        await self._server.get("/health_generate")

    async def _pause(self) -> None:
        """Pauses; requests stay, but their KV cache is dropped and recomputed after `_resume`."""
        await self._server.post("/pause_generation", {"mode": "retract"}, timeout=_CONTROL_SECONDS)

    async def _resume(self) -> None:
        await self._server.post("/continue_generation", {}, timeout=_CONTROL_SECONDS)

    async def _load(self, source: Any, version: int) -> None:
        path, folder = "/update_weights_from_disk", checkpoint_folder(source, "sglang")
        body = {"model_path": folder, "weight_version": str(version), "flush_cache": True, "abort_all_requests": False}
        answer = await self._server.ask(path, body, timeout=self._sync_timeout)
        if answer.get("success") is not True:
            raise EngineError(f"{self._server.url}{path}: not loaded: {answer.get('message')!r:.200}")

    async def _load_adapter(self, name: str, folder: str) -> None:
        path, body = "/load_lora_adapter", {"lora_name": name, "lora_path": folder}
        answer = await self._server.ask(path, body, timeout=self._sync_timeout)
        if answer.get("success") is not True:
            raise EngineError(f"{self._server.url}{path}: not loaded: {answer.get('error_message')!r:.200}")

    async def _unload_adapter(self, name: str) -> None:
        await self._server.post("/unload_lora_adapter", {"lora_name": name}, timeout=_CONTROL_SECONDS)

    async def sleep(self) -> None:
        """Releases the KV cache (the server needs --enable-memory-saver). The weights stay: SGLang would drop them without a
        copy, and sample from undefined ones if no weight sync came first."""
        await self._server.post("/release_memory_occupation", _KV_CACHE, timeout=_CONTROL_SECONDS)

    async def wake(self, *parts: str) -> None:
        """Reallocates the KV cache, unless `parts` leave it out."""
        if not parts or "kv_cache" in parts:
            await self._server.post("/resume_memory_occupation", _KV_CACHE, timeout=_CONTROL_SECONDS)
