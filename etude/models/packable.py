"""Which models can run packed, and `enable_packing`, which switches them.

Invariant: a model that `enable_packing` accepts computes the log-probs of its own eager forward, both packed and token by
token from cached keys and values. For Transformers' own architectures in `TESTED`, and those in `etude.models.vision.KINDS`,
tests check this; any other architecture or class is compared here, once, on two short sequences; known incompatibilities are
rejected with the reason.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from etude.errors import ConfigError, one_line
from etude.models.attention import Scoring
from etude.models.packed import ATTENTION_NAME, CausalSequences, logits_of, masked_attention, packed_hidden
from etude.models.vision import KINDS

TESTED = frozenset({"llama", "mistral", "qwen2", "qwen3", "gemma", "gemma2", "gemma3_text", "qwen3_moe"})
_LAYERS = {"full_attention", "sliding_attention"}
_BATCH_ROPE = {"dynamic", "longrope"}  # frequencies depend on the longest position in the batch
_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
_PROBE_TOKENS = (7, 5)
_PROBE_PARTS = (5, 1, 1)  # a prompt and two decoded tokens


def enable_packing(model: Any) -> None:
    """Switches a Hugging Face causal LM to packed attention.

    Raises:
        ConfigError: the architecture cannot run packed; says why.
    """
    kind = model.config.model_type
    if model.config._attn_implementation == ATTENTION_NAME:
        return
    for reason in _incompatibilities(model):
        raise ConfigError(f"model type '{kind}' is not supported by the native engine: {reason}")
    if kind in KINDS:  # the vision tower keeps its own attention
        model.set_attn_implementation({"": ATTENTION_NAME, "text_config": ATTENTION_NAME})
        return
    model.set_attn_implementation(ATTENTION_NAME)
    tested = kind in TESTED and type(model).__module__.startswith("transformers.models.")
    if not tested and model.get_output_embeddings() is not None:
        _compare(model, kind)


def key_width(model: Any) -> tuple[int, int]:
    """(heads, head_dim) of the keys and values of each layer, from the configuration."""
    config = model.config.get_text_config()
    heads = config.num_attention_heads
    kv_heads = getattr(config, "num_key_value_heads", None) or heads
    return kv_heads, getattr(config, "head_dim", None) or config.hidden_size // heads


def _incompatibilities(model: Any) -> Iterator[str]:
    config = model.config.get_text_config()
    foreign = set(getattr(config, "layer_types", None) or ()) - _LAYERS
    if foreign:
        yield f"it uses {', '.join(sorted(foreign))}"
    if getattr(model, "_is_stateful", False):
        yield "some of its layers keep a state other than keys and values"
    if not getattr(model, "_supports_attention_backend", False):
        yield "its attention cannot be replaced"
    if getattr(config, "use_bidirectional_attention", False):
        yield "its attention is not causal"
    if any("sinks" in name.rsplit(".", 1)[-1] for name, _ in model.named_parameters()):
        yield "it uses attention sinks"
    if config.model_type != "qwen3_moe" and any((getattr(config, name, None) or 0) > 1 for name in _EXPERTS):
        yield "it is a mixture of experts other than Qwen3's"
    ropes = _rope_types(getattr(config, "rope_parameters", None)) & _BATCH_ROPE
    if ropes:
        yield f"its rotary embedding ({', '.join(sorted(ropes))}) depends on other sequences of the batch"


def _rope_types(parameters: Any) -> set[str]:
    if not isinstance(parameters, dict):
        return set()
    nested = [_rope_types(value) for value in parameters.values()]
    return {str(parameters.get("rope_type", "default"))}.union(*nested)


class _ProbeCache:
    """A key/value cache for one sequence fed in parts. It keeps one entry per layer, as in the native engine: a layer that
    attends twice finds the entry of its last call."""

    def __init__(self) -> None:
        self.length = self._start = 0
        self.twice = False
        self.widths: set[tuple[int, int]] = set()  # (heads, head_dim) of all keys and values
        self._kept: dict[int, tuple[Tensor, Tensor]] = {}
        self._seen: set[int] = set()

    def feed(self, tokens: int, device: torch.device) -> Tensor:
        """Starts a part; returns its position ids (1, tokens)."""
        self._start, self.length = self.length, self.length + tokens
        self._seen.clear()
        return torch.arange(self._start, self.length, device=device)[None]

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scoring: Scoring) -> Tensor:
        self.twice |= layer in self._seen
        self._seen.add(layer)
        if self._start:
            held = (kept[:, : self._start] for kept in self._kept[layer])
            key, value = (torch.cat(parts, dim=1) for parts in zip(held, (key, value)))
        self.widths |= {(x.shape[0], x.shape[2]) for x in (key, value)}
        self._kept[layer] = key, value
        mask = torch.ones(query.shape[1], self.length, dtype=torch.bool, device=query.device).tril_(self._start)
        if scoring.window is not None:
            mask.triu_(self._start - scoring.window + 1)
        return masked_attention(query[None], key[None], value[None], mask, scoring)[0].transpose(0, 1)


@torch.no_grad()
def _compare(model: Any, kind: str) -> None:
    """Raises ConfigError if two sequences packed together, or one of them fed in parts with cached keys and values, get
    other logits than each sequence alone."""
    training, device = model.training, next(model.parameters()).device
    rows = model.get_input_embeddings().weight.shape[0]
    ids = (torch.arange(1, 1 + sum(_PROBE_TOKENS)) * 7919 % rows).to(device)
    layout, kept = CausalSequences(_PROBE_TOKENS), _ProbeCache()
    parts = ids[: sum(_PROBE_PARTS)].split(_PROBE_PARTS)
    model.eval()
    try:
        packed = logits_of(model, packed_hidden(model, ids, layout.position_ids(device), layout))
        stepped = [logits_of(model, packed_hidden(model, x, kept.feed(len(x), device), kept)) for x in parts]
        model.set_attn_implementation("eager")
        alone = torch.cat([model(input_ids=part[None], use_cache=False).logits[0] for part in ids.split(_PROBE_TOKENS)])
    except Exception as error:  # an untested architecture can fail in any way
        failure = f"its packed forward fails with {type(error).__name__}: {one_line(error)}"
    else:
        failure = "" if _close(packed, alone) else "packed sequences get other logits than single ones"
        if not failure and not _close(torch.cat(stepped), alone[: kept.length]):
            why = "a layer attends more than once, and its" if kept.twice else "its"
            failure = f"{why} kept keys and values give later tokens other logits"
        elif not failure and kept.widths != {key_width(model)}:
            failure = f"its keys and values have (heads, head_dim) {sorted(kept.widths)}, not {key_width(model)}"
    finally:
        model.set_attn_implementation(ATTENTION_NAME)
        model.train(training)
    if failure:
        raise ConfigError(f"model type '{kind}' is not supported by the native engine: {failure}")


def _close(packed: Tensor, alone: Tensor) -> bool:
    bound = 5e-2 if alone.dtype in (torch.bfloat16, torch.float16) else 1e-3
    return bool((packed - alone).double().norm() <= bound * alone.double().norm())
