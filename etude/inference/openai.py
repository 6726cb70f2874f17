"""The `openai` engine, for evaluation only: any server with OpenAI's `/v1/completions`, text in and text out.

Agents and engines exchange token ids, so the prompt's ids are decoded to text for the server, and the answer's text is
re-encoded. If the server reports that the model ended its turn, the first stop id is appended; if it reports a stop string
(`stop_reason`, as vLLM does), that string is. The re-encoded ids may differ from the sampled ones, and there are no
log-probs (they are zeros), so `etude train` refuses the engine. Servers that offer only chat completions are not supported,
because they would render the conversation and tools with their own template.
"""

from __future__ import annotations

from typing import Any

from etude.errors import ConfigError
from etude.inference.engine_setup import KEY, EngineSetup
from etude.inference.http import HttpServer
from etude.inference.router import connect
from etude.inference.served import ServedEngine
from etude.inference.types import ENGINES, Engine, SamplingParams, TokenOutput

_MAX_STOPS = 4  # the maximum number of stop strings in OpenAI's API


@ENGINES.register("openai")
class OpenAIEngine(ServedEngine):
    """One server; `model`: the name of the model there, None if it serves a single one."""

    servers = "required"
    evaluation_only = True

    def __init__(self, server: HttpServer, tokenizer: Any, max_model_len: int, model: str | None = None) -> None:
        super().__init__(max_model_len)
        self._server, self._tokenizer, self._model = server, tokenizer, model

    @classmethod
    def from_setup(cls, setup: EngineSetup) -> Engine:
        """Returns the engine of one address, or a router over several."""
        return connect(setup, lambda server: cls(server, setup.tokenizer, setup.max_model_len, setup.server_model))

    async def _model_name(self) -> str:
        if self._model is None:
            path = "/v1/models"
            listed = self._server.object(path, await self._server.get(path)).get("data")
            names = [str(each.get("id")) for each in listed or () if isinstance(each, dict)]
            if len(names) != 1:
                raise ConfigError(
                    f"{self._server.url} serves {len(names)} models ({', '.join(names[:5])}): set {KEY}.server_model"
                )
            self._model = names[0]
        return self._model

    async def _ask(self, name: str, prompt: list[int], params: SamplingParams) -> TokenOutput:
        path = "/v1/completions"
        body: dict[str, Any] = {
            "model": await self._model_name(),
            "prompt": self._tokenizer.decode(prompt, skip_special_tokens=False),
            "max_tokens": params.max_tokens,
            "temperature": params.temperature,
            "top_p": params.top_p,
            "seed": params.seed & 0x7FFFFFFF,
            "stream": False,
        }
        stops = [*params.stop, *(self._tokenizer.decode([token]) for token in params.stop_token_ids)]
        if stops:
            body["stop"] = stops[:_MAX_STOPS]
        if params.top_k > 0:
            body["top_k"] = params.top_k  # not part of OpenAI's API, though many servers take it
        answer = await self._server.ask(path, body)
        with self._server.reading(path):
            choice = answer["choices"][0]
            text, ending = choice["text"], choice["finish_reason"]
            if (stop_text := choice.get("stop_reason")) in params.stop:  # servers leave the stop string out of the text
                text, ending = text + stop_text, stop_text
            ids = [int(token) for token in self._tokenizer.encode(text, add_special_tokens=False)]
        reason = "stop" if ending == "stop" or ending in params.stop else "length"
        if ending == "stop" and params.stop_token_ids and ids[-1:] != [params.stop_token_ids[0]]:
            ids = [*ids, params.stop_token_ids[0]]
        if len(ids) > params.max_tokens:  # the re-encoded text may have a few more tokens
            ids, reason = ids[: params.max_tokens], "length"
        return TokenOutput(ids, [0.0] * len(ids), reason, [0] * len(ids))

    async def check(self) -> None:
        """Raises EngineError if the server does not answer."""
        await self._server.get("/v1/models")

    async def _load(self, source: Any, version: int) -> None:
        raise ConfigError("the openai engine is for evaluation: it takes no weights")
