"""`TeacherWorker`: a frozen model, here or on a vLLM server, that scores the tokens the policy sampled."""

from __future__ import annotations

import asyncio
import math
from typing import Any

import torch

from etude.agents.batch import IMAGES
from etude.bounded import gather
from etude.distributed import Dispatch, register
from etude.errors import ConfigError, EngineError
from etude.inference.http import HttpServer
from etude.models import load_causal_lm
from etude.options.distillation import is_address
from etude.protocol import DataProto
from etude.training import PolicyEngine
from etude.trajectory import KEPT_IDS
from etude.workers.role import TOKENS, RoleWorker

_ROUTE = "/v1/completions"


class TeacherWorker(RoleWorker):
    """Scores with the model or the server that `options.teacher` names."""

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def init_model(self) -> None:
        """Loads the model; a server is asked for a first score.

        Raises:
            ConfigError: the model's folder is wrong.
            EngineError: the server does not answer, or gives no log-probs of prompts.
        """
        options, teacher = self.options, self.options.teacher
        if teacher is None:
            raise ConfigError("distillation.teachers names no teacher for this worker")
        if is_address(teacher):
            self._server = HttpServer(teacher.rstrip("/"), timeout=options.distillation.server_timeout)
            asyncio.run(self._ask([[0, 0]]))
            return
        model = load_causal_lm(
            teacher, dtype=options.model.dtype, device=self.device, trust_remote_code=options.model.trust_remote_code
        )
        self._engine = PolicyEngine(model, max_tokens=options.ref.log_prob_max_token_len_per_gpu)

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO, columns=TOKENS, optional=(IMAGES, KEPT_IDS))
    def compute_teacher_log_prob(self, data: DataProto) -> DataProto:
        """`teacher_log_probs` (batch, response_len) at meta_info's `temperature`, 0 where `response_mask` is 0.

        Raises:
            EngineError: the server failed.
        """
        assert self.options.teacher is not None
        if is_address(self.options.teacher):
            return DataProto.from_single_dict({"teacher_log_probs": asyncio.run(self._served(data))})
        found = self._engine.log_probs(data, data.meta_info["temperature"])[0]
        return DataProto.from_single_dict({"teacher_log_probs": found})

    async def _served(self, data: DataProto) -> torch.Tensor:
        columns = data.batch
        ids, real = columns["input_ids"], columns["attention_mask"].bool()
        mask = columns["response_mask"].bool()
        sequences = [row[kept].tolist() for row, kept in zip(ids, real)]
        scored = await self._ask(sequences)
        found = torch.zeros(ids.shape, dtype=torch.float32)
        for row, values in enumerate(scored):
            found[row, real[row]] = torch.tensor(values, dtype=torch.float32)
        return torch.where(mask, found[:, -mask.shape[1] :], 0.0)

    async def _ask(self, sequences: list[list[int]]) -> list[list[float]]:
        """The log-prob of each token given those before it, 0.0 for the first."""
        limit = asyncio.Semaphore(self.options.distillation.max_concurrent_requests)

        async def ask(sequence: list[int]) -> list[float]:
            async with limit:
                return await self._ask_one(sequence)

        return await gather(ask(sequence) for sequence in sequences)

    async def _ask_one(self, sequence: list[int]) -> list[float]:
        server, body = self._server, {"prompt": sequence, "max_tokens": 1, "temperature": 0.0, "prompt_logprobs": 0}
        for failures in range(self.options.rollout.infrastructure_retries + 1):
            try:
                answer = await server.ask(_ROUTE, body)
                with server.reading(_ROUTE):
                    return _read(answer, sequence, server.url)
            except EngineError:
                if failures == self.options.rollout.infrastructure_retries:
                    raise
        raise AssertionError("unreachable")


def _read(answer: Any, sequence: list[int], url: str) -> list[float]:
    """The log-probs in vLLM's `prompt_logprobs`: per token a mapping from ids to log-probs, null for the first."""
    scored = answer["choices"][0]["prompt_logprobs"]
    found = [0.0, *(float(entry[str(token)]["logprob"]) for entry, token in zip(scored[1:], sequence[1:]))]
    if len(scored) != len(sequence) or not all(map(math.isfinite, found)):
        raise EngineError(f"{url}{_ROUTE}: prompt_logprobs do not match the {len(sequence)} tokens of the request")
    return found
