"""The SDK's messages: a training request as tensors, and results as protocol buffers.

A datum has N input tokens and, for each, the target that it should predict, or K alternatives. As a row of a batch it is
these tokens with a scored one after each: `response_mask` is 1 at column t + 1 if the target of token t is scored.

Invariant: a target that is also the next input token is that row's own label; other targets are labels beside it, so that
the log-prob of any target is exact. Nothing is scored, and so nothing computed, that has no part in the loss.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import numpy as np
import torch
from tinker.proto import tinker_public_pb2 as messages
from torch import Tensor

from etude.errors import DataError
from etude.protocol import DataProto

_DTYPES = {
    messages.DTYPE_FLOAT32: np.float32,
    messages.DTYPE_INT64: np.int64,
    messages.DTYPE_INT32: np.int32,
}
_MOST_VALUES = 1 << 28  # of a tensor of a request, padded: a few bytes may ask for terabytes
_NO_TOPK = -99999.0  # the SDK's log-prob of a position without alternatives


@dataclass(frozen=True)
class TrainingRequest:
    """A `forward_backward` request. `inputs` has per datum its tensors by name; `targets` (N, K) is one of them, apart."""

    model_id: str
    seq_id: int
    loss: str
    config: Mapping[str, float]
    forward_only: bool
    tokens: list[list[int]]
    targets: list[Tensor]
    flat: list[bool]
    inputs: list[dict[str, Tensor]]


def read_training_request(body: bytes) -> TrainingRequest:
    """Decodes the body of `forward_backward`.

    Raises:
        DataError: it is not such a message, it has images or sound, the shapes of a datum do not fit or are too large, or a
            number is not finite.
    """
    message = messages.ForwardBackwardRequest()
    try:
        message.ParseFromString(body)
    except Exception as error:
        raise DataError("the body is not a ForwardBackwardRequest") from error
    tokens, targets, flat, inputs = [], [], [], []
    for number, datum in enumerate(message.data):
        ids: list[int] = []
        for chunk in datum.model_input:
            if chunk.WhichOneof("chunk") != "encoded_text":
                raise DataError(f"datum {number}: only text is trained on here, not images or sound")
            if len(chunk.encoded_text.tokens) % 4:
                raise DataError(f"datum {number}: its tokens are not integers of 32 bits")
            ids += np.frombuffer(chunk.encoded_text.tokens, dtype=np.int32).tolist()
        given = {name: _tensor(value, f"datum {number}: {name}") for name, value in datum.loss_fn_inputs.items()}
        wanted = given.pop("target_tokens", None)
        if wanted is None or not ids or wanted.shape[:1] != (len(ids),) or wanted.ndim > 2:
            shape = None if wanted is None else tuple(wanted.shape)
            raise DataError(f"datum {number}: target_tokens needs a target for each of {len(ids)} tokens, not {shape}")
        if wanted.is_floating_point():
            raise DataError(f"datum {number}: target_tokens are ids, so integers")
        for name, value in given.items():
            if value.shape != wanted.shape:
                raise DataError(f"datum {number}: {name} has the shape {tuple(value.shape)}, not that of target_tokens")
            if not bool(value.isfinite().all()):
                raise DataError(f"datum {number}: {name} has a value that is not finite")
        flat.append(wanted.ndim == 1)
        tokens.append(ids)
        targets.append(wanted.long().view(len(ids), -1))
        inputs.append({name: value.float().view(len(ids), -1) for name, value in given.items()})
    if not tokens:
        raise DataError("no data")
    padded = len(tokens) * max(map(len, tokens)) * max(each.shape[1] for each in targets)
    if padded > _MOST_VALUES:
        raise DataError(
            f"the data are padded to {padded:,} targets: send less at once, and data of like lengths together"
        )
    config: dict[str, float] = dict(message.loss_fn_config)
    for name, value in message.loss_fn_config_v2.items():
        if value.WhichOneof("value") == "text":
            raise DataError(f"loss_fn_config: {name} must be a number")
        config[name] = value.number
    if strange := next((name for name, value in config.items() if not math.isfinite(value)), None):
        raise DataError(f"loss_fn_config: {strange} must be a finite number")
    about = (message.model_id, message.seq_id, message.loss_fn, config, message.forward_only)
    return TrainingRequest(*about, tokens, targets, flat, inputs)


def _tensor(message: Any, name: str) -> Tensor:
    kind, shape = _DTYPES.get(message.dtype), list(message.shape)
    if kind is None:
        raise DataError(f"{name}: dtype {message.dtype} is not known")
    if math.prod(shape) > _MOST_VALUES:
        raise DataError(f"{name}: the shape {shape} is too large")
    try:
        if message.HasField("sparse_csr"):
            parts = message.sparse_csr
            crow, column = (np.frombuffer(part, dtype=np.int64) for part in (parts.crow_indices, parts.col_indices))
            whole = np.zeros(shape, dtype=kind)
            row = np.repeat(np.arange(len(crow) - 1), np.diff(crow))
            whole[row, column] = np.frombuffer(parts.values, dtype=kind)
        else:
            whole = np.frombuffer(message.dense, dtype=kind)
            whole = whole.reshape(shape) if shape else whole
    except (ValueError, IndexError) as error:
        raise DataError(f"{name}: its values do not fill the shape {shape}") from error
    return torch.from_numpy(whole.copy())


def to_batch(request: TrainingRequest, scored: Sequence[Tensor]) -> DataProto:
    """Builds the batch of a request: `input_ids`, `attention_mask`, `response_mask` (rows, width), `row` (rows,), the
    request's inputs (rows, width, K) and, where targets are not the next tokens, `teacher_topk_ids` (rows, width, K).

    Args:
        scored: per datum (N,), which of its targets are scored.
    """
    rows = [[*ids, int(wanted[-1, 0])] for ids, wanted in zip(request.tokens, request.targets)]
    width, k = max(map(len, rows)), max(wanted.shape[1] for wanted in request.targets)
    ids = torch.zeros(len(rows), width, dtype=torch.long)
    attention, mask = torch.zeros_like(ids), torch.zeros_like(ids)
    labels = torch.zeros(len(rows), width, k, dtype=torch.long)
    names = sorted({name for given in request.inputs for name in given})
    columns = {name: torch.zeros(len(rows), width, k) for name in names}
    for i, (row, wanted, use) in enumerate(zip(rows, request.targets, scored)):
        ids[i, : len(row)], attention[i, : len(row)] = torch.tensor(row), 1
        mask[i, 1 : len(row)], labels[i, 1 : len(row), : wanted.shape[1]] = use.long(), wanted
        for name, value in request.inputs[i].items():
            columns[name][i, 1 : len(row), : wanted.shape[1]] = value
    made = {"input_ids": ids, "attention_mask": attention, "response_mask": mask, "row": torch.arange(len(rows))}
    if k > 1 or not torch.equal(labels[..., 0][mask.bool()], ids[mask.bool()]):
        made["teacher_topk_ids"] = labels
    return DataProto.from_single_dict(made | columns)


def training_output(log_probs: Sequence[Tensor], metrics: Mapping[str, float]) -> bytes:
    """Encodes the result of `forward_backward`: per datum the log-probs of its targets, (N,) or (N, K)."""
    message = messages.ForwardBackwardOutput(loss_fn_output_type="ArrayRecord", metrics=metrics)
    for shape, group in groupby(log_probs, lambda values: values.shape[1:]):
        same = list(group)
        data = [values.float().contiguous().numpy().tobytes() for values in same]
        tensor = messages.BatchedTensor(
            data=b"".join(data),
            offsets=np.cumsum([0, *map(len, data)], dtype=np.int64).tobytes(),
            dtype=messages.DTYPE_FLOAT32,
            trailing_shape=shape,
        )
        message.loss_fn_outputs.append(messages.ArrayRecord(fields={"logprobs": tensor}, num_datums=len(same)))
    return bytes(message.SerializeToString())


@dataclass(frozen=True)
class TopTokens:
    """The most probable tokens at each position, `ids` and `log_probs` (length, k), the likeliest first."""

    ids: Tensor
    log_probs: Tensor

    def message(self) -> Any:
        """Encodes it; a position that nothing predicts, or that was not asked for, has the SDK's sentinel."""
        ids, values = self.ids.numpy().astype(np.int32), self.log_probs.float().numpy().copy()
        none = np.isnan(values)
        ids[none], values[none] = 0, _NO_TOPK
        length, k = ids.shape
        return messages.TopkLogprobs(token_ids=ids.tobytes(), logprobs=values.tobytes(), k=k, length=length)


@dataclass(frozen=True)
class Sample:
    """A sampled sequence; `top`: alternatives of its tokens, where asked for."""

    ids: list[int]
    log_probs: list[float]
    stopped: bool
    top: TopTokens | None = None


def sample_response(
    samples: Sequence[Sample], prompt_log_probs: Tensor | None = None, top_prompt: TopTokens | None = None
) -> bytes:
    """Encodes the result of `asample`; `prompt_log_probs` (length,) is NaN where nothing was asked for or predicts."""
    message = messages.SampleResponse()
    for each in samples:
        reason = messages.STOP_REASON_STOP if each.stopped else messages.STOP_REASON_LENGTH
        sequence = message.sequences.add(
            stop_reason=reason,
            tokens=np.asarray(each.ids, dtype=np.int32).tobytes(),
            logprobs=np.asarray(each.log_probs, dtype=np.float32).tobytes(),
        )
        if each.top is not None:
            sequence.topk_sampled_logprobs.CopyFrom(each.top.message())
    if prompt_log_probs is not None:
        message.prompt_logprobs = prompt_log_probs.float().numpy().tobytes()
    if top_prompt is not None:
        message.topk_prompt_logprobs.CopyFrom(top_prompt.message())
    return bytes(message.SerializeToString())
