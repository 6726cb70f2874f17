"""vLLM behind HTTP: its OpenAI-compatible server, with token ids in and out.

The server must run with `VLLM_SERVER_DEV_MODE=1` (the routes that pause, abort and load weights), `--logprobs-mode
processed_logprobs` (log-probs of the distribution that is sampled from) and `--worker-extension-cls
etude.inference.vllm.worker.WeightReceiver`; `docs/engines.md` has the command. Routes are those of vLLM 0.32.

Requests go to `/inference/v1/generate` if the server has it (`--enable-scale-out`), because it reports each token's weight
version and, with `--return-sampling-mask`, the ids that top-k and top-p kept; otherwise to `/v1/completions` with
`return_token_ids`, where a request that spans a weight update counts as sampled entirely by the older weights.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable
from dataclasses import replace
from typing import Any

from etude.errors import ConfigError, EngineError, one_line
from etude.inference.http import HttpServer, StatusError
from etude.inference.served import Answer, ServedEngine, checkpoint_folder, validate_answer, version_spans
from etude.inference.types import SamplingParams, TokenOutput

RECEIVER = "etude.inference.vllm.worker.WeightReceiver"
COMPLETIONS, GENERATE = "/v1/completions", "/inference/v1/generate"
_ALL = 2**31 - 1  # as top-k: more than any vocabulary has
_CONTROL_SECONDS = 60.0  # timeout of pause, abort and the like, which wait for the current model step


def sampling_fields(params: SamplingParams, keeps_ids: bool = False) -> dict[str, Any]:
    """Returns the parameters under vLLM's names, with explicit values for those that a generation_config.json may set. With
    `keeps_ids` vLLM wants a temperature and a top-k: greedy decoding is the top 1, and a request without top-k (the weight
    probe's) keeps the whole vocabulary."""
    greedy = keeps_ids and params.temperature == 0
    stop = {"stop": list(params.stop), "include_stop_str_in_output": True, "detokenize": True} if params.stop else {}
    return stop | {
        "max_tokens": params.max_tokens,
        "temperature": 1.0 if greedy else params.temperature,
        "top_p": params.top_p,
        "top_k": 1 if greedy else _ALL if keeps_ids and params.top_k <= 0 else max(params.top_k, 0),
        "min_p": 0.0,
        "repetition_penalty": 1.0,
        "presence_penalty": 0.0,
        "frequency_penalty": 0.0,
        "seed": params.seed,
        "stop_token_ids": list(params.stop_token_ids),
        "ignore_eos": True,
        "logprobs": 0,
        "skip_special_tokens": False,
    }


class VLLMServerEngine(ServedEngine):
    """Implements `etude.inference.Engine` with one server. `route`: `GENERATE` or `COMPLETIONS`; None: ask the server.
    `sync_timeout`: seconds that a weight sync may take."""

    def __init__(
        self,
        server: HttpServer,
        max_model_len: int,
        sync_timeout: float = 600.0,
        route: str | None = None,
        keeps_ids: bool = False,
    ) -> None:
        super().__init__(max_model_len, keeps_ids)
        self._server, self._sync_timeout, self._route = server, sync_timeout, route
        self._slept_with: Any = None
        self._connecting = asyncio.Lock()
        self._connected: str | None = None

    async def _connect(self) -> str:
        """Returns the route for generation; asks the server only once.

        Raises:
            ConfigError: the server lacks the routes that weight updates need.
        """
        async with self._connecting:
            if self._connected is None:
                if await self._refusal(self._server.get("/is_paused")) == 404:
                    raise ConfigError(
                        f"{self._server.url} cannot be paused or given weights: start vLLM (0.32 or newer) with "
                        "VLLM_SERVER_DEV_MODE=1; docs/engines.md has the command"
                    )
                if self._route is None:  # send an empty request: only an existing route reports missing fields
                    refused = await self._refusal(self._server.post(GENERATE))
                    self._route = GENERATE if refused in (400, 422) else COMPLETIONS
                self._connected = self._route
        return self._connected

    async def _refusal(self, asked: Awaitable[object]) -> int | None:
        """Returns the error status of a request; None if it succeeded."""
        try:
            await asked
        except StatusError as error:
            return error.status
        return None

    async def _ask(self, name: str, prompt: list[int], params: SamplingParams) -> TokenOutput:
        route, version, adapter = await self._connect(), self._version, self.adapter
        fields = sampling_fields(params, self._keeps_ids)
        body: dict[str, Any] = {"request_id": name} | ({"model": adapter} if adapter else {})
        if route == GENERATE:
            body |= {"token_ids": prompt, "sampling_params": fields, "stream": False}
        else:
            body |= fields | {"prompt": prompt, "return_token_ids": True, "return_tokens_as_token_ids": True}
        answer = await self._server.ask(route, body)
        with self._server.reading(route):
            choice = answer["choices"][0]
            ids, ending = choice["token_ids"], choice["finish_reason"]
            if route == GENERATE:
                log_probs = [entry["logprob"] for entry in choice["logprobs"]["content"]]
                spans, kept = version_spans(choice["weight_versions"]), choice.get("sampling_mask")
                read = Answer(ids, log_probs, ending, spans, kept)
            else:
                read = Answer(ids, choice["logprobs"]["token_logprobs"], ending)
        if adapter:  # the server's versions are of the base weights
            read = replace(read, versions=None)
        return validate_answer(read, params, version, self._server.url, self._keeps_ids)

    async def _abort(self, name: str) -> None:
        external = f"generate-tokens-{name}" if self._connected == GENERATE else f"cmpl-{name}-0"
        await self._server.post("/abort_requests", {"request_ids": [external]}, timeout=_CONTROL_SECONDS)

    async def check(self) -> None:
        """Raises EngineError if the server's engine is dead or does not answer."""
        await self._server.get("/health")

    async def _pause(self) -> None:
        await self._connect()
        await self._control("/pause", mode="keep")

    async def _resume(self) -> None:
        await self._control("/resume")

    async def _load(self, source: Any, version: int) -> None:
        folder = checkpoint_folder(source, "vllm")
        call = {"method": "etude_load_folder", "args": [folder], "timeout": self._sync_timeout}
        try:
            answer = await self._server.ask("/collective_rpc", call, timeout=self._sync_timeout)
        except StatusError as error:
            raise EngineError(
                f"{one_line(error)}: does it run with --worker-extension-cls {RECEIVER}, and can it read {folder}?"
            ) from error
        check_loaded(answer.get("results"), self._server.url)
        reset = "/reset_prefix_cache"
        answer = await self._server.ask(reset, query={"reset_running_requests": "true"}, timeout=_CONTROL_SECONDS)
        if answer.get("success") is not True:
            raise EngineError(f"{self._server.url}{reset}: the old weights' keys and values could not be dropped")
        await self._server.post("/update_weight_version", {"new_version": str(version)}, timeout=_CONTROL_SECONDS)

    async def _load_adapter(self, name: str, folder: str) -> None:
        path = "/v1/load_lora_adapter"
        try:
            await self._server.post(path, {"lora_name": name, "lora_path": folder}, timeout=self._sync_timeout)
        except StatusError as error:
            if error.status != 404:
                raise
            raise ConfigError(
                f"{self._server.url}{path}: the server takes no adapters at run time, or cannot read {folder}: start vLLM "
                "with --enable-lora, --max-lora-rank and VLLM_ALLOW_RUNTIME_LORA_UPDATING=True (docs/engines.md)"
            ) from error

    async def _unload_adapter(self, name: str) -> None:
        await self._server.post("/v1/unload_lora_adapter", {"lora_name": name}, timeout=_CONTROL_SECONDS)

    async def sleep(self) -> None:
        """Moves the weights to host memory and drops the KV cache (the server needs --enable-sleep-mode)."""
        self._slept_with = await self._checksums()
        await self._control("/sleep", level="1", mode="wait")

    async def wake(self, *parts: str) -> None:
        """See `ServedEngine.wake`.

        Raises:
            EngineError: the weights are not those from before `sleep`.
        """
        for part in parts:
            await self._control("/wake_up", tags=part)
        if not parts:
            await self._control("/wake_up")
        if self._slept_with is not None and (not parts or "weights" in parts):
            check_same(self._slept_with, await self._checksums(), self._server.url)

    async def _checksums(self) -> Any:
        """Returns each worker's parameter checksums."""
        call = {"method": "etude_checksums", "timeout": self._sync_timeout}
        return (await self._server.ask("/collective_rpc", call, timeout=self._sync_timeout)).get("results")

    async def _control(self, path: str, **query: str) -> None:
        await self._server.post(path, query=query, timeout=_CONTROL_SECONDS)


def check_loaded(results: Any, source: str) -> None:
    """Raises EngineError unless every worker reports loaded parameters."""
    counts = results if isinstance(results, list) else []
    if not counts or not all(str(count).isdecimal() and int(count) > 0 for count in counts):
        raise EngineError(f"{source}: not every worker loaded the weights: {json.dumps(results, default=str)[:200]}")


def check_same(before: Any, after: Any, source: str) -> None:
    """Raises EngineError, naming a parameter, unless every worker's checksums are the same as before."""
    for was, now in zip(before, after, strict=True):
        if name := next((name for name, value in was.items() if now.get(name) != value), None):
            raise EngineError(f"{source}: '{name}' is not what it was before the engine's sleep")
