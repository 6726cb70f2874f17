"""`TeacherWorker`: a frozen model, local or on a vLLM server, that scores the tokens that the policy sampled."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from etude.agents.batch import IMAGES
from etude.algorithms.distillation import ABSENT
from etude.distributed import Dispatch, register
from etude.errors import ConfigError, EngineError
from etude.inference.http import HttpServer
from etude.models import check_vocabulary, load_causal_lm
from etude.options.distillation import is_address
from etude.options.serving import server_url
from etude.protocol import DataProto
from etude.timeouts import gather
from etude.training import PolicyLearner
from etude.trajectory import KEPT_IDS
from etude.workers.role import TOKENS, RoleWorker

_ROUTE = "/v1/completions"
TOPK_COLUMNS = ("teacher_topk_ids", "teacher_topk_log_probs")
_TRIED, _LETTERS = 32, 3  # most words of the first request, and the fewest letters of one
_ROUNDING = 1e-3  # a log-prob is at most 0, but for rounding
Scores = tuple[float, list[int], list[float]]  # a token's log-prob; the top-k ids at its position, and their log-probs


def teacher_columns(engine: PolicyLearner, data: DataProto, topk: int, vocabulary: int) -> DataProto:
    """Computes `teacher_log_probs` (batch, response_len) of the sampled tokens with the engine's model at meta_info's
    `temperature`, 0 where `response_mask` is 0; with `topk`, also `teacher_topk_ids` (batch, response_len, topk), the top-k
    ids that are below `vocabulary`, and `teacher_topk_log_probs`, `ABSENT` for the other ids."""
    log_probs, _, *top_k = engine.log_probs(data, data.meta_info["temperature"], topk=topk)
    columns = {"teacher_log_probs": log_probs}
    if top_k:
        ids, top = top_k
        # Embeddings may have padding rows beyond the tokenizer's ids, in a number that differs by model.
        known = ids < vocabulary
        columns |= zip(TOPK_COLUMNS, (ids.where(known, 0).int(), top.where(known, ABSENT)))
    return DataProto.from_single_dict(columns)


class TeacherWorker(RoleWorker):
    """Scores with the model or server `placement.teacher`."""

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def init_model(self) -> None:
        """Loads the model, or sends a first request to the server.

        Raises:
            ConfigError: the model's folder is wrong, the model has fewer embedding rows than the policy has tokens, or the
                server reads its tokens as other texts.
            EngineError: the server does not answer, or returns no prompt log-probs.
        """
        options, teacher = self.options, self.placement.teacher
        if teacher is None:
            raise ConfigError("distillation.teachers names no teacher for this worker")
        if is_address(teacher):
            self._server = HttpServer(server_url(teacher), timeout=options.distillation.server_timeout)
            asyncio.run(self._ask_one([0, *_words(self.tokenizer)], check_texts=True))
            return
        model = load_causal_lm(
            teacher, dtype=self.dtype, device=self.device, trust_remote_code=options.model.trust_remote_code
        )
        check_vocabulary(self.tokenizer, model)
        self._engine = PolicyLearner(model, max_tokens=options.ref.log_prob_max_token_len_per_gpu)

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO, columns=TOKENS, optional=(IMAGES, KEPT_IDS))
    def compute_teacher_log_prob(self, data: DataProto) -> DataProto:
        """See `teacher_columns`.

        Raises:
            EngineError: the server failed.
        """
        assert self.placement.teacher is not None
        if is_address(self.placement.teacher):
            return asyncio.run(self._score_on_server(data))
        return teacher_columns(self._engine, data, self.options.distillation.topk, len(self.tokenizer))

    async def _score_on_server(self, data: DataProto) -> DataProto:
        columns = data.batch
        ids, real = columns["input_ids"], columns["attention_mask"].bool()
        mask = columns["response_mask"].bool()
        sequences = [row[kept].tolist() for row, kept in zip(ids, real)]
        scored = await self._ask(sequences)
        width, k = mask.shape[1], self.options.distillation.topk
        names = ("teacher_log_probs", *(TOPK_COLUMNS if k else ()))
        empty = (torch.zeros(ids.shape), torch.zeros(*ids.shape, k, dtype=torch.int), torch.zeros(*ids.shape, k))
        columns = dict(zip(names, empty))
        for row, values in enumerate(scored):
            for column, of_tokens in zip(columns.values(), zip(*values)):
                column[row, real[row]] = torch.tensor(of_tokens, dtype=column.dtype)

        def mask_response(column: Tensor) -> Tensor:
            column = column[:, -width:]
            return torch.where(mask.view(*mask.shape, *[1] * (column.ndim - 2)), column, 0)

        return DataProto.from_single_dict({name: mask_response(column) for name, column in columns.items()})

    async def _ask(self, sequences: list[list[int]]) -> list[list[Scores]]:
        """Requests the scores of each token given the ones before it; zeros for the first token."""
        limit = asyncio.Semaphore(self.options.distillation.max_concurrent_requests)

        async def ask(sequence: list[int]) -> list[Scores]:
            async with limit:
                return await self._ask_one(sequence)

        return await gather(ask(sequence) for sequence in sequences)

    async def _ask_one(self, sequence: list[int], *, check_texts: bool = False) -> list[Scores]:
        server, k, failures = self._server, self.options.distillation.topk, 0
        body = {"prompt": sequence, "max_tokens": 1, "temperature": 0.0, "prompt_logprobs": k}
        while True:
            try:
                answer = await server.ask(_ROUTE, body)
                with server.reading(_ROUTE):
                    if check_texts:
                        _check_texts(answer, sequence, self.tokenizer, server.url)
                    return _read(answer, sequence, k, len(self.tokenizer), server.url)
            except EngineError:
                failures += 1
                if failures > self.options.rollout.infrastructure_retries:
                    raise


def _read(answer: Any, sequence: list[int], k: int, vocabulary: int, url: str) -> list[Scores]:
    """Parses vLLM's `prompt_logprobs`: per token a mapping from ids to log-probs, null for the first."""
    scored = answer["choices"][0]["prompt_logprobs"]
    scores = [(0.0, [0] * k, [0.0] * k)]
    scores += [_read_token(entry, token, k, vocabulary) for entry, token in zip(scored[1:], sequence[1:])]
    values = [value for one, _, top in scores for value in (one, *top)]
    if len(scored) != len(sequence) or not all(math.isfinite(value) and value <= _ROUNDING for value in values):
        raise EngineError(f"{url}{_ROUTE}: prompt_logprobs do not match the {len(sequence)} tokens of the request")
    return scores


def _words(tokenizer: Any) -> list[int]:
    """Up to `_TRIED` ids from all over the vocabulary that are a plain word each; [0] if there is none."""
    tried = range(0, len(tokenizer), max(1, len(tokenizer) // (20 * _TRIED)))
    texts = ((number, tokenizer.decode([number]).strip()) for number in tried)
    words = [number for number, text in texts if len(text) >= _LETTERS and text.isascii() and text.isalpha()]
    return words[:: -(-len(words) // _TRIED)] if words else [0]


def _check_texts(answer: Any, sequence: list[int], tokenizer: Any, url: str) -> None:
    """Raises ConfigError if a quarter of the tokens or more, of those whose texts vLLM gives, are other words there."""
    entries = answer["choices"][0]["prompt_logprobs"][1:]
    given = [(token, entry[str(token)].get("decoded_token")) for token, entry in zip(sequence[1:], entries)]
    read = [(token, there.strip(), tokenizer.decode([token]).strip()) for token, there in given if there]
    pieces = tokenizer.convert_ids_to_tokens([token for token, _, _ in read])  # some versions say these: 'Ġthe'
    others = [each for each, piece in zip(read, pieces) if each[1] not in (each[2], piece) and each[2] != ""]
    if others and 4 * len(others) >= len(read):
        token, there, here = others[0]
        raise ConfigError(
            f"distillation.teachers: {url} has another tokenizer than the policy: token {token} is {there!r:.40} there and "
            f"{here!r:.40} here"
        )


def _read_token(entry: Mapping[str, Any], token: int, k: int, vocabulary: int) -> Scores:
    by_id = {int(number): float(each["logprob"]) for number, each in entry.items()}
    known = sorted((number for number in by_id if 0 <= number < vocabulary), key=lambda number: -by_id[number])[:k]
    missing = k - len(known)
    return by_id[token], [*known, *[0] * missing], [*(by_id[number] for number in known), *[ABSENT] * missing]
