"""What the server computes with: one base model, and any number of adapters on it, trained or sampled from.

Invariant: the weights of the base model are in memory once and never change; an adapter is a model object that shares them
and has its own LoRA factors, optimizer and gradients, so that adapters cannot affect each other. A sampler's weights are
fixed when it is made.
"""

from __future__ import annotations

import asyncio
import copy
import math
import secrets
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from etude.errors import CheckpointError, DataError, one_line
from etude.inference import NativeEngine, NativeEngineOptions, SamplingParams
from etude.metrics import finish_metrics
from etude.models.loading import load_causal_lm, load_tokenizer
from etude.models.lora import add_adapters, is_factor, peft_name, save_adapters
from etude.options import OptimOptions, TrainedModelOptions
from etude.options.model_path import longest_context
from etude.protocol import DataProto
from etude.seeds import request_seed
from etude.tinker.losses import loss_of
from etude.tinker.wire import Sample, TopTokens, TrainingRequest, sample_response, to_batch, training_output
from etude.training import LossScale, OptimizerSet, PolicyLearner
from etude.training.optim import step_metrics

_ALPHA = 32.0  # Tinker's, whatever the rank
_WEIGHTS, _MOMENTS = "adapter_model.safetensors", "optimizer.safetensors"
_MOST_ROWS = 64  # sequences that a sampler decodes together


@dataclass(frozen=True)
class AdapterShape:
    """The LoRA configuration of an adapter; the head has none here, whatever a client asks for."""

    rank: int
    seed: int
    train_mlp: bool = True
    train_attn: bool = True


class Base:
    """The model that all adapters share. `name` is what the server calls it."""

    def __init__(self, folder: Path, names: Sequence[str], *, dtype: str = "float32", max_tokens: int = 8192) -> None:
        """Raises ConfigError as `load_causal_lm` and `load_tokenizer`.

        Args:
            names: what clients may call the model; the first is its own.
            max_tokens: token budget of a micro-batch.
        """
        self.folder, self.name, self.names, self.max_tokens = folder, names[0], frozenset(names), max_tokens
        self.tokenizer = load_tokenizer(folder)
        self._model = load_causal_lm(folder, dtype=dtype).requires_grad_(False)
        self.context = longest_context(self._model.config.to_dict())
        self.vocabulary = int(self._model.get_input_embeddings().weight.shape[0])

    def copy(self) -> Any:
        """Returns a model object with these weights, not copied."""
        return _share(self._model)

    def check(self, ids: Sequence[int], targets: Sequence[int] = ()) -> None:
        """Raises DataError for ids that are not tokens, and for a sequence that is empty or longer than the context."""
        if not ids or min(ids) < 0 or max(*ids, 0, *targets) >= self.vocabulary or min(targets, default=0) < 0:
            raise DataError(f"a sequence is empty, or has an id outside the {self.vocabulary} tokens")
        if self.context is not None and len(ids) > self.context:
            raise DataError(f"a sequence has {len(ids)} tokens; the model's context is {self.context}")


def _share(model: Any) -> Any:
    """Copies a model's modules, and of its tensors only those that are trained."""
    frozen = (parameter for parameter in model.parameters() if not parameter.requires_grad)
    return copy.deepcopy(model, {id(tensor): tensor for tensor in chain(frozen, model.buffers())})


class Adapter:
    """A LoRA adapter that is trained. Its methods block, and are called one at a time."""

    def __init__(self, base: Base, shape: AdapterShape) -> None:
        """Raises ConfigError if the model has no layers to adapt, MissingExtraError without peft."""
        self.base, self.shape, self._model = base, shape, base.copy()
        excluded = [part for part, wanted in (("mlp", shape.train_mlp), ("attn", shape.train_attn)) if not wanted]
        options = TrainedModelOptions(
            path=str(base.folder),
            lora_rank=shape.rank,
            lora_alpha=_ALPHA,
            exclude_modules=rf".*({'|'.join(excluded)})\b.*" if excluded else None,
        )
        add_adapters(self._model, options, seed=shape.seed)
        self._optimizer = OptimizerSet(self._model, OptimOptions(clip_grad=None), None)
        self._learner = PolicyLearner(self._model, max_tokens=base.max_tokens, optimizer=self._optimizer)

    def forward_backward(self, request: TrainingRequest) -> bytes:
        """Adds the gradients of the request's loss to those of the next `step`, and returns the encoded log-probs of the
        targets: of all of them if `forward_only`, else of those with a part in the loss, 0 for the others.

        Raises:
            DataError: the request is invalid; nothing was computed.
        """
        for ids, wanted in zip(request.tokens, request.targets):
            self.base.check(ids, wanted.flatten().tolist())
        loss = loss_of(request)
        used = [loss.scored(given) for given in request.inputs]
        scored = [torch.ones_like(use) for use in used] if request.forward_only else used
        batch = to_batch(request, scored)
        found = torch.zeros(*batch.batch["response_mask"].shape, max(t.shape[1] for t in request.targets))
        total = 0.0

        def total_loss(
            log_probs: Tensor, _: Tensor, micro: DataProto, scale: LossScale
        ) -> tuple[Tensor, dict[str, float]]:
            nonlocal total
            each = micro.batch["topk_log_probs"] if "topk_log_probs" in micro.batch.keys() else log_probs[..., None]  # noqa: SIM118
            found[micro.batch["row"]] = each.detach().float()
            result = loss.total(each, micro.batch, request.config)
            total += float(result.detach())
            return result, {}

        try:
            with torch.set_grad_enabled(not request.forward_only):
                self._learner.accumulate(batch, total_loss, 1.0, loss_agg_mode="token-sum")
        except BaseException:
            self._optimizer.zero_grad()  # half of a gradient must not be stepped on
            raise
        outputs = [
            found[i, 1 : len(ids) + 1, : t.shape[1]] for i, (ids, t) in enumerate(zip(request.tokens, request.targets))
        ]
        outputs = [each[:, 0] if flat else each for each, flat in zip(outputs, request.flat)]
        return training_output(outputs, {"loss:sum": total})

    def step(self, params: Any) -> dict[str, float]:
        """Takes a step of AdamW with the SDK's `AdamParams`, and clears the gradients; returns `grad_norm`, `lr`,
        `weight_change`, `optimizer_steps` and `skipped_steps`. A step whose gradient is not finite is skipped, and has no
        `grad_norm`.

        Raises:
            ConfigError: a parameter is outside its range.
        """
        self._optimizer.set_adam(
            lr=params.learning_rate,
            betas=(params.beta1, params.beta2),
            eps=params.eps,
            weight_decay=params.weight_decay,
            clip_grad=params.grad_clip_norm or None,
        )
        metrics = finish_metrics(step_metrics(self._optimizer))
        return {name: value for name, value in metrics.items() if math.isfinite(value)}  # JSON has no other numbers

    def snapshot(self) -> Sampler:
        """Returns a sampler with the current weights."""
        model = _share(self._model)
        for parameter in model.parameters():
            parameter.grad = None
        return Sampler(self.base, model.requires_grad_(False))

    def save(self, folder: Path, *, optimizer: bool) -> None:
        """Writes a folder that peft loads, and with `optimizer` also the moments. Raises CheckpointError."""
        save_adapters(self._model, folder)
        if optimizer:
            state = self._optimizer.state_dict()
            moments = {name: value.cpu().contiguous() for name, value in state.items() if not name.startswith("model.")}
            try:
                save_file(moments, folder / _MOMENTS)
            except (OSError, SafetensorError) as error:
                raise CheckpointError(f"{folder}: cannot save the optimizer: {one_line(error)}") from error

    def load(self, folder: Path, *, optimizer: bool) -> None:
        """Loads what `save` wrote for an adapter of this shape; without `optimizer`, the moments stay as they are.

        Raises:
            CheckpointError: it is of another shape, or was saved without an optimizer.
        """
        try:
            saved = load_file(folder / _WEIGHTS)
            moments = load_file(folder / _MOMENTS) if optimizer else {}
        except (OSError, SafetensorError) as error:
            raise CheckpointError(f"{folder}: cannot load the adapter: {one_line(error)}") from error
        factors = {name: parameter for name, parameter in self._model.named_parameters() if is_factor(name)}
        shapes = {peft_name(name): parameter.shape for name, parameter in factors.items()}
        if {name: value.shape for name, value in saved.items()} != shapes:
            raise CheckpointError(f"{folder}: its adapter has other layers or another rank than this one")
        weights = {f"model.{name}": saved[peft_name(name)] for name in factors}
        own = {name: value for name, value in self._optimizer.state_dict().items() if not name.startswith("model.")}
        self._optimizer.load_state_dict(weights | (moments if optimizer else own))
        self._optimizer.zero_grad()  # of the weights that were there before


class Sampler:
    """Fixed weights that are sampled from."""

    def __init__(self, base: Base, model: Any) -> None:
        self.base, self._model = base, model
        self._engine: NativeEngine | None = None
        self._learner: PolicyLearner | None = None

    def prepare(self) -> None:
        """Makes the engine, which takes a moment."""
        if self._engine is None:
            options = NativeEngineOptions(max_num_seqs=_MOST_ROWS, tokenizer=self.base.tokenizer)
            self._engine = NativeEngine(self._model, options)
            self._learner = PolicyLearner(self._model, max_tokens=self.base.max_tokens)

    def params(self, given: Any, prompt: Sequence[int]) -> SamplingParams:
        """Converts the SDK's `SamplingParams`; a sequence also ends with the tokenizer's eos token.

        Raises:
            ConfigError: a parameter is outside its range.
            DataError: the prompt leaves no room to sample.
        """
        self.base.check(prompt)
        stop = given.stop or ()
        stop = (stop,) if isinstance(stop, str) else tuple(stop)
        eos = self.base.tokenizer.eos_token_id
        ids = tuple(each for each in stop if isinstance(each, int))
        limit = given.max_tokens
        if limit is None:
            if self.base.context is None:
                raise DataError("max_tokens is needed: the model does not say how long its context is")
            limit = max(1, self.base.context - len(prompt))
        return SamplingParams(
            temperature=given.temperature,
            top_p=given.top_p,
            top_k=given.top_k,
            max_tokens=limit,
            stop=tuple(each for each in stop if isinstance(each, str)),
            stop_token_ids=(*ids, *(() if eos is None or eos in ids else (eos,))),
            seed=secrets.randbits(63) if given.seed is None else given.seed,
        )

    async def generate(self, name: str, prompt: Sequence[int], params: SamplingParams) -> Sample:
        """Samples one sequence; `name` is unique among those being sampled. Raises as `NativeEngine.generate`."""
        assert self._engine is not None
        try:
            output = await self._engine.generate(name, prompt, params)
        finally:
            self._engine.close(name)
        return Sample(output.token_ids, output.log_probs, output.stop_reason == "stop")

    def score(self, ids: Sequence[int], top_k: int = 0, temperature: float = 1.0) -> tuple[Tensor, TopTokens | None]:
        """Returns the log-prob of each token after those before it (length,), the first NaN, and the `top_k` likeliest."""
        assert self._learner is not None
        row = torch.tensor([list(ids)])
        mask = torch.ones_like(row)
        mask[0, 0] = 0
        batch = DataProto.from_single_dict(
            {"input_ids": row, "attention_mask": torch.ones_like(row), "response_mask": mask}
        )
        found = self._learner.log_probs(batch, temperature, topk=top_k)
        log_probs = found[0][0].clone()
        log_probs[0] = torch.nan
        if not top_k:
            return log_probs, None
        values = found[3][0].clone()
        values[0] = torch.nan
        return log_probs, TopTokens(found[2][0], values)


Compute = Callable[..., Awaitable[Any]]


async def answer_sample(sampler: Sampler, name: str, request: Any, prompt: list[int], compute: Compute) -> bytes:
    """Samples what the SDK's `SampleRequest` asks for; `compute(function, *arguments)` awaits a blocking function.

    Raises:
        DataError, ConfigError: the request is invalid.
    """
    params = sampler.params(request.sampling_params, prompt)
    await compute(sampler.prepare)
    seeds = [request_seed(params.seed, number) for number in range(request.num_samples)]
    tasks = [sampler.generate(f"{name}/{i}", prompt, params.seeded(seed)) for i, seed in enumerate(seeds)]
    samples: list[Sample] = list(await asyncio.gather(*tasks))
    log_probs, top = None, None
    if request.prompt_logprobs or request.topk_prompt_logprobs:
        log_probs, top = await compute(sampler.score, prompt, request.topk_prompt_logprobs)
        if request.prompt_logprobs_last_n is not None:
            for values in (log_probs, *(() if top is None else (top.log_probs,))):
                values[: -request.prompt_logprobs_last_n] = torch.nan
    if request.topk_sample_logprobs:
        asked = request.topk_sample_logprobs, params.temperature or 1.0
        samples = [await _with_top(sampler, prompt, each, asked, compute) for each in samples]
    return sample_response(samples, log_probs if request.prompt_logprobs else None, top)


async def _with_top(
    sampler: Sampler, prompt: list[int], sample: Sample, asked: tuple[int, float], compute: Compute
) -> Sample:
    """Adds the alternatives of a sample's tokens; `asked`: how many, and at which temperature."""
    _, top = await compute(sampler.score, [*prompt, *sample.ids], *asked)
    start = len(prompt)
    return Sample(sample.ids, sample.log_probs, sample.stopped, TopTokens(top.ids[start:], top.log_probs[start:]))
