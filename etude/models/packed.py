"""Packed forward passes: many sequences in one row of tokens, without padding.

A Hugging Face causal LM runs on a single row of shape (1, total_tokens); only attention needs to know where sequences start
and end. `packed_attention` is registered as an attention implementation and passes queries, keys and values to the
`AttentionLayout` given to `model.forward(..., layout=...)`. Training uses `CausalSequences`; the native inference engine has
its own layout, which reads and writes a key/value cache.

Invariant: a token's output depends only on tokens of its own sequence at positions up to its own.

Windows, chunks, sinks and soft-capped scores are supported. Which layer has which window or chunk is what Transformers
builds its masks from: `packed_mask` is registered as the mask function of this implementation. A model with another kind of
attention, or whose tokens interact in another way, is left to its own forward pass, one sequence at a time (see
`etude.models.packable`), instead of being computed wrongly.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from inspect import signature
from itertools import accumulate
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers import AttentionInterface, AttentionMaskInterface

from etude.errors import ConfigError
from etude.models.attention import Scoring, partial_attention, visibility, with_sinks
from etude.models.vision import PlacedFeatures, Vision, hidden_with_images

ATTENTION_NAME = "etude_packed"
_MASKED_LOGIT = -1e30  # finite, so that 0 · logit is 0, at any temperature
_BLOCK = 1 << 25  # scores of a block of queries (128 MiB in float32)
_UNKNOWN_ARGUMENTS = ("sinks", "position_bias", "indices", "block_indices")


class AttentionLayout(Protocol):
    """Where the sequences of a packed row are, and how their tokens attend."""

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scoring: Scoring) -> Tensor:
        """query (heads, tokens, head_dim), key and value (kv_heads, tokens, head_dim) → (tokens, heads, head_dim)."""
        ...


class CausalSequences:
    """Concatenated runs of tokens that form a prefix tree.

    A run attends to all of its ancestors, and causally to itself. So a prefix shared by several sequences is computed once,
    and its gradient is the sum of theirs. Without ancestors, the runs are separate sequences.
    """

    def __init__(self, lengths: Sequence[int], ancestors: Sequence[Sequence[int]] | None = None) -> None:
        """`lengths` are positive and sum to the token count; `ancestors[i]`: indices of the ancestor runs of run i, from the
        root down, all less than i."""
        self.lengths = list(lengths)
        self.ancestors = [tuple(up) for up in ancestors] if ancestors else [()] * len(self.lengths)
        self.depths = [sum(self.lengths[a] for a in up) for up in self.ancestors]
        self._masks: dict[tuple[Any, ...], Tensor] = {}
        self._cut: dict[int | None, Any] = {}  # see `_pieces`

    def position_ids(self, device: torch.device | str = "cpu") -> Tensor:
        """Returns position ids (1, total_tokens), counted from the root of each run's sequence."""
        runs = zip(self.depths, self.lengths)
        return torch.cat([torch.arange(depth, depth + length, device=device) for depth, length in runs])[None]

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scoring: Scoring) -> Tensor:
        if query.device.type != "cpu":
            return self._attend_pieces(query, key, value, scoring)
        queries, keys, values = (x.split(self.lengths, dim=1) for x in (query, key, value))
        outputs = []
        for i, up in enumerate(self.ancestors):
            k, v = (torch.cat([x[a] for a in (*up, i)], dim=1)[None] if up else x[i][None] for x in (keys, values))
            own = scoring.within(k.shape[2])
            plain = not up and own.span == (None, None)
            if scoring.softcap is not None or scoring.sinks is not None:
                out = masked_attention(queries[i][None], k, v, self._mask(i, own, query.device), scoring)
            else:
                mask = None if plain else self._mask(i, own, query.device)
                out = F.scaled_dot_product_attention(
                    queries[i][None], k, v, attn_mask=mask, is_causal=plain, scale=scoring.scale, enable_gqa=True
                )
            outputs.append(out[0])
        return torch.cat(outputs, dim=1).transpose(0, 1)

    def _attend_pieces(self, query: Tensor, key: Tensor, value: Tensor, scoring: Scoring) -> Tensor:
        """`attend` on a GPU, where scaled_dot_product_attention with a mask is its slowest kernel, and keeps scores and mask
        for the backward pass: one call of flash attention for all runs, which aligns a run with the end of its context, or
        small blocks of queries that are computed again in the backward pass."""
        contexts = [self._contexts(x) for x in (key, value)]
        if not takes_flash(query, scoring):
            runs = zip(query.split(self.lengths, dim=1), contexts[0], contexts[1])
            return torch.cat([_attend_blocks(q, k, v, scoring) for q, k, v in runs], dim=1).transpose(0, 1)
        spans, starts, longest = self._pieces(scoring.chunk, query.device)
        keys, values = (
            torch.cat([context[:, first:end] for context, cuts in zip(parts, spans) for first, end in cuts], dim=1)
            for parts in contexts
        )
        from torch.nn.attention.varlen import varlen_attn  # imports torch._dynamo, which takes seconds

        window = (-1 if scoring.window is None else scoring.window - 1, 0)
        query, keys, values = (x.transpose(0, 1) for x in (query, keys, values))
        out: Tensor = varlen_attn(
            query, keys, values, *starts, *longest, scale=scoring.scale, window_size=window, **_grouped(varlen_attn)
        )  # type: ignore[assignment]  # a tuple if it is asked for more
        return out

    def _contexts(self, tensor: Tensor) -> list[Tensor]:
        """For each run (heads, depth + length, head_dim): its ancestors' keys or values, and its own."""
        parts = tensor.split(self.lengths, dim=1)
        return [
            torch.cat([parts[a] for a in (*up, i)], dim=1) if up else parts[i] for i, up in enumerate(self.ancestors)
        ]

    def _pieces(
        self, chunk: int | None, device: torch.device
    ) -> tuple[list[list[tuple[int, int]]], tuple[Tensor, Tensor], tuple[int, int]]:
        """The pieces into which `chunk` cuts the runs: for each run, which part of its context each piece attends to; where
        queries and keys of each begin, twice (pieces + 1,); and the largest number of queries and of keys."""
        if chunk not in self._cut:
            spans, queries, keys = list[list[tuple[int, int]]](), [0], [0]
            for depth, length in zip(self.depths, self.lengths):
                end, size = depth + length, chunk or depth + length
                firsts = [depth, *range(depth - depth % size + size, end, size)]
                spans.append([(p - p % size, min(p - p % size + size, end)) for p in firsts])
                queries += [last - p for p, (_, last) in zip(firsts, spans[-1])]
                keys += [last - first for first, last in spans[-1]]
            starts = [torch.tensor([*accumulate(counts)], dtype=torch.int32) for counts in (queries, keys)]
            starts = [each.to(device, non_blocking=True) for each in starts]
            self._cut[chunk] = spans, (starts[0], starts[1]), (max(queries), max(keys))
        return self._cut[chunk]

    def _mask(self, run: int, scoring: Scoring, device: torch.device) -> Tensor:
        """(length, depth + length) bool mask, cached for layers and runs of the same shape."""
        depth, length = self.depths[run], self.lengths[run]
        shape = depth, length, scoring.span
        if shape not in self._masks:
            places = torch.arange(depth + length, device=device)
            self._masks[shape] = scoring.visible(places[depth:], places)
        return self._masks[shape]


@cache
def _grouped(attend: Callable[..., Any]) -> dict[str, Any]:
    """The argument for fewer key heads than heads; torch 2.11 takes them unasked."""
    return {"enable_gqa": True} if "enable_gqa" in signature(attend).parameters else {}


def takes_flash(query: Tensor, scoring: Scoring) -> bool:
    """Whether PyTorch's flash attention computes this: in half precision, without soft caps, and without sinks, whose
    gradient needs that of its normaliser."""
    if scoring.softcap is not None or scoring.sinks is not None or query.dtype not in (torch.bfloat16, torch.float16):
        return False
    if query.shape[-1] % 8 or query.shape[-1] > 256:
        return False
    return query.device.type != "cuda" or torch.cuda.get_device_capability(query.device) >= (8, 0)


def _attend_blocks(query: Tensor, key: Tensor, value: Tensor, scoring: Scoring) -> Tensor:
    """Attends from the last tokens of a context, (heads, tokens, head_dim), to the context, (kv_heads, keys, head_dim), in
    blocks of queries of which only the inputs are kept for the backward pass."""
    heads, tokens, _ = query.shape
    size = max(1, _BLOCK // (heads * key.shape[1]))

    def attend(block: Tensor, keys: Tensor, values: Tensor, first: int, start: int) -> Tensor:
        places = torch.arange(first, first + keys.shape[1], device=query.device)
        mask = scoring.visible(places[start - first :], places)
        return masked_attention(block[None], keys[None], values[None], mask, scoring)[0]

    outputs, depth = [], key.shape[1] - tokens
    for start in range(depth, key.shape[1], size):
        end = min(start + size, key.shape[1])
        first = int(scoring.first(torch.tensor([start])))
        block = query[:, start - depth : end - depth]
        outputs.append(
            checkpoint(attend, block, key[:, first:end], value[:, first:end], first, start, use_reentrant=False)
        )
    return torch.cat(outputs, dim=1)


def masked_attention(query: Tensor, key: Tensor, value: Tensor, mask: Tensor, scoring: Scoring) -> Tensor:
    """Grouped-query attention with a `mask` (tokens, keys) that includes the scoring's window and chunk; applies its soft
    cap and sinks. Queries, keys, values and the result are (1, heads, tokens, head_dim)."""
    groups = query.shape[1] // key.shape[1]
    key, value = (x.repeat_interleave(groups, dim=1) for x in (key, value))
    part = partial_attention(query, key, value, visibility(mask, query.dtype), scoring)
    return with_sinks(part, None if scoring.sinks is None else scoring.sinks[:, None])[0]


@dataclass(frozen=True)
class Span:
    """What packed attention gets from Transformers instead of a mask: the limits of a layer, see `Scoring`."""

    window: int | None = None
    chunk: int | None = None


def packed_mask(*, mask_function: Callable[..., Any], **others: Any) -> Span:
    """The mask function called by Transformers for the layers of one kind."""
    return Span(**_limits(mask_function))


def _limits(mask_function: Callable[..., Any]) -> dict[str, int]:
    """Reads the window and chunk of a mask function of Transformers, which is a closure over its parts."""
    name = mask_function.__qualname__.partition(".")[0]
    cells = mask_function.__closure__ or ()
    held = dict(zip(mask_function.__code__.co_freevars, (cell.cell_contents for cell in cells)))
    if name == "and_masks":
        return {key: limit for part in held["mask_functions"] for key, limit in _limits(part).items()}
    if name == "sliding_window_overlay":
        return {"window": held["sliding_window"]}
    if name == "chunked_overlay":
        return {"chunk": held["chunk_size"]}
    if name == "remap_positions_for_packed_sequence":
        return _limits(held["mask_function"])
    if name in ("causal_mask_function", "packed_sequence_mask_function"):  # the layout knows the sequences
        return {}
    raise ConfigError(f"the packed attention has no mask like {name}")


def packed_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | Span | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    *,
    layout: AttentionLayout,
    **others: Any,
) -> tuple[Tensor, None]:
    """The attention function called by Transformers: (1, heads, tokens, head_dim) → (1, tokens, heads, head_dim)."""
    if dropout:
        raise ConfigError("attention dropout is not supported: set attention_dropout to 0 in the model's config.json")
    for name in _UNKNOWN_ARGUMENTS:
        if others.get(name) is not None:
            raise ConfigError(f"{type(module).__name__} attends with '{name}', which the packed attention cannot")
    scale = float(query.shape[-1] ** -0.5 if scaling is None else scaling)
    chunk = None
    if isinstance(attention_mask, Span):  # a model that builds its masks itself tells its window alone
        sliding_window, chunk = attention_mask.window, attention_mask.chunk
    scoring = Scoring(scale, sliding_window, softcap, chunk, s_aux)
    # Multi-head latent attention has narrower values than keys; fused kernels and the cache want one width.
    kept, width = value.shape[-1], max(key.shape[-1], value.shape[-1])
    query, key, value = (x if x.shape[-1] == width else F.pad(x, (0, width - x.shape[-1])) for x in (query, key, value))
    out = layout.attend(int(module.layer_idx), query[0], key[0], value[0], scoring)  # type: ignore[arg-type]
    return out[None, ..., :kept].contiguous(), None  # as Transformers' own attention functions return it


AttentionInterface.register(ATTENTION_NAME, packed_attention)
AttentionMaskInterface.register(ATTENTION_NAME, packed_mask)


def is_packed(model: Any) -> bool:
    """Whether the model runs with packed attention, see `etude.models.packable`."""
    return bool(model.config._attn_implementation == ATTENTION_NAME)


def packed_hidden(
    model: Any, token_ids: Tensor, position_ids: Tensor, layout: AttentionLayout, shown: PlacedFeatures | None = None
) -> Tensor:
    """Computes final hidden states (tokens, hidden) of packed `token_ids` (tokens,) at `position_ids` (1, tokens), or with
    images (3, 1, tokens); `shown`: the images among the tokens. A model without packed attention computes one sequence."""
    if shown is not None:
        return hidden_with_images(model, token_ids, position_ids, layout, shown)
    if isinstance(layout, CausalSequences) and not is_packed(model):
        assert len(layout.lengths) == 1
        return plain_hidden(model, token_ids)
    output = body_of(model)(
        input_ids=token_ids[None],
        attention_mask=torch.ones_like(token_ids)[None],  # without one, Transformers looks for sequences itself
        position_ids=position_ids,
        use_cache=False,
        layout=layout,
    )
    return output.last_hidden_state[0]


def plain_hidden(model: Any, token_ids: Tensor) -> Tensor:
    """Computes the final hidden states (tokens, hidden) of one sequence (tokens,) with the model's own forward pass."""
    return body_of(model)(input_ids=token_ids[None], use_cache=False).last_hidden_state[0]


def body_of(model: Any) -> Any:
    """The part of a causal LM below its head; a model without a head itself."""
    if model.get_output_embeddings() is None:
        return model.base_model
    parts = (model.base_model, model.get_decoder(), getattr(model, "model", model))  # Llama 4 has its body in the last
    return next(part for part in parts if part is not model)


def logit_finish(model: Any) -> Callable[[Tensor], Tensor] | None:
    """Returns the post-processing of the model's raw logits; None if there is none.

    Gemma 2 caps logits, Cohere multiplies and Granite divides them. A vision model's image placeholder ids are masked out
    (see `etude.models.vision`).
    """
    config = model.config.get_text_config()
    cap = getattr(config, "final_logit_softcapping", None)
    factor = float(getattr(config, "logit_scale", None) or 1.0) / float(getattr(config, "logits_scaling", None) or 1.0)
    vision = Vision.of(model.config)
    if cap is None and factor == 1.0 and vision is None:
        return None

    def finish(logits: Tensor) -> Tensor:
        if vision is not None:
            left_out = torch.tensor([vision.image_token_id, vision.video_token_id], device=logits.device)
            logits = logits.to(torch.promote_types(logits.dtype, torch.float32)).index_fill(-1, left_out, _MASKED_LOGIT)
        if factor != 1.0:
            logits = logits * factor
        return logits if cap is None else cap * torch.tanh(logits / cap)

    return finish


def logits_of(model: Any, hidden: Tensor) -> Tensor:
    """Computes logits (tokens, vocabulary) from final hidden states (tokens, hidden)."""
    logits, finish = model.get_output_embeddings()(hidden), logit_finish(model)
    return logits if finish is None else finish(logits)
