"""`GenerativeRewardModel`: a language model as judge, on a separate native engine in this process.

Invariant: it is never trained, and its engine shares nothing with the policy's. Its prompts go through its own chat
template, and control tokens that an answer spells out are encoded as plain text.
"""

from __future__ import annotations

import asyncio
import itertools
import threading
from collections.abc import Coroutine, Mapping, Sequence
from typing import Any, TypeVar

from etude.chat import ChatTemplate
from etude.errors import InfrastructureError
from etude.inference.native import NativeEngine, NativeEngineOptions
from etude.inference.types import SamplingParams
from etude.models import check_vocabulary, load_causal_lm, load_tokenizer
from etude.rewards.judge import Completion, Endpoint, Judge
from etude.timeouts import background_loop, gather

T = TypeVar("T")


class GenerativeRewardModel:
    """Implements `etude.rewards.judge.ChatModel`, and `generate` for RL-Factory's judges, which pass whole prompts."""

    def __init__(
        self,
        path: str,
        *,
        response_length: int,
        dtype: str = "float32",
        device: str = "cpu",
        trust_remote_code: bool = False,
        deterministic: bool = False,
    ) -> None:
        """Loads the tokenizer; `load` loads the weights. `deterministic`: generates one answer at a time, so that batching
        does not change rounding.

        Raises:
            ConfigError: the folder, its tokenizer or its chat template is missing or broken.
        """
        self.path, self._response_length, self._deterministic = path, response_length, deterministic
        self._given: dict[str, Any] = {"dtype": dtype, "device": device, "trust_remote_code": trust_remote_code}
        self.tokenizer = load_tokenizer(path, trust_remote_code=trust_remote_code)
        self._chat = ChatTemplate(self.tokenizer)
        self._loop = background_loop("etude-reward-model")
        self._names, self._lock = itertools.count(), threading.Lock()
        self._engine: NativeEngine | None = None
        self.judges: dict[Endpoint, Judge] = {}

    def __reduce__(self) -> Any:
        raise TypeError("a reward model stays in its process")

    def load(self) -> NativeEngine:
        """Loads the weights, once.

        Raises:
            ConfigError: they are missing or broken, or the architecture is not supported.
        """
        with self._lock:
            if self._engine is None:
                model = load_causal_lm(self.path, **self._given).requires_grad_(False)
                check_vocabulary(self.tokenizer, model)
                alone = NativeEngineOptions(max_num_seqs=1, enable_prefix_caching=False)
                self._engine = NativeEngine(model, alone if self._deterministic else NativeEngineOptions())
            return self._engine

    async def complete(
        self, messages: Sequence[Mapping[str, Any]], *, temperature: float, max_tokens: int | None, seed: int
    ) -> Completion:
        """Returns the model's answer; callable from any event loop.

        Raises:
            InfrastructureError: the engine failed, or the prompt leaves no room for an answer.
        """
        shown = [{**each, "content": self._chat.disarm(str(each["content"]))} for each in messages]
        params = SamplingParams(
            temperature=temperature,
            max_tokens=max_tokens or self._response_length,
            stop_token_ids=self._chat.stop_token_ids,
            seed=seed,
        )
        return await asyncio.wrap_future(self._submit(self._complete(self._chat.initial_ids(shown), params)))

    def generate(self, prompts: Sequence[str]) -> list[str]:
        """Returns greedy answers to rendered prompts; blocks, for code in threads. Raises the errors of `complete`."""
        params = SamplingParams(
            temperature=0.0, max_tokens=self._response_length, stop_token_ids=self._chat.stop_token_ids
        )
        ids = [self.tokenizer.encode(prompt, add_special_tokens=False) for prompt in prompts]
        answers = self._submit(gather(self._complete(each, params) for each in ids)).result()
        return [answer.text for answer in answers]

    def _submit(self, work: Coroutine[Any, Any, T]) -> Any:
        self.load()
        return asyncio.run_coroutine_threadsafe(work, self._loop)

    async def _complete(self, prompt_ids: list[int], params: SamplingParams) -> Completion:
        engine, name = self.load(), f"judge-{next(self._names)}"
        try:
            output = await engine.generate(name, prompt_ids, params)
        finally:
            engine.close(name)
        if not output.token_ids:
            raise InfrastructureError(f"{self.path}: a prompt of {len(prompt_ids)} tokens leaves no room for an answer")
        text = self.tokenizer.decode(output.token_ids, skip_special_tokens=True)
        return Completion(text, output.stop_reason == "length", len(prompt_ids), len(output.token_ids))
