"""Which models can run packed, and `enable_packing`, which switches them.

Invariant: a model that `enable_packing` accepts computes the log-probs of its own eager forward, both packed and token by
token from cached keys and values. For Transformers' own architectures in `TESTED`, and those in `etude.models.vision.KINDS`,
tests check this; any other architecture or class is compared here, once, on two short sequences. Those are shorter than a
window, so one whose configuration names a span (window, chunk, original length) is also compared as a small copy, with
spans of a few tokens and longer sequences; where no such copy can be made, that is logged. Known incompatibilities are
rejected with the reason.
"""

from __future__ import annotations

import copy
import logging
import re
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from etude.errors import ConfigError, one_line
from etude.models.attention import Scoring
from etude.models.packed import (
    ATTENTION_NAME,
    AttentionLayout,
    CausalSequences,
    logits_of,
    masked_attention,
    packed_hidden,
)
from etude.models.vision import KINDS

logger = logging.getLogger(__name__)

TESTED = frozenset({"llama", "mistral", "qwen2", "qwen3", "gemma", "gemma2", "gemma3_text", "qwen3_moe"})
_LAYERS = {"full_attention", "sliding_attention"}
_BATCH_ROPE = {"dynamic", "longrope"}  # frequencies depend on the longest position in the batch
_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
_PROBE_TOKENS = (7, 5)
_PROBE_PARTS = (5, 1, 1)  # a prompt and two decoded tokens
_SPAN = re.compile(
    r"(window|chunk|attention_span|local_attention|block_size|original_max_position)(?!\w*(layers|pattern))"
)
_SHORTEST_SPAN = 4  # in a small copy; the next longer span is one token longer
_COPIED_LAYERS = 6  # one of each kind, also where layers alternate by a pattern that no list in the configuration shows
_COPIED_VOCABULARY = 256


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
    if kind not in TESTED or not type(model).__module__.startswith("transformers.models."):
        _compare(model, kind)
    model.set_attn_implementation(ATTENTION_NAME)


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


def _compare(model: Any, kind: str) -> None:
    """Raises ConfigError if the model, or a small copy of it on sequences longer than each of its spans, computes other
    outputs packed or token by token."""
    unsupported = f"model type '{kind}' is not supported by the native engine"
    failure = _difference(model, _PROBE_TOKENS, _PROBE_PARTS)
    if failure:
        raise ConfigError(f"{unsupported}: {failure}")
    spans = dict(_spans(model.config.get_text_config().to_dict()))
    if not spans:
        return
    named = ", ".join(f"{name}={span}" for name, span in spans.items())
    short = {span: _SHORTEST_SPAN + i for i, span in enumerate(sorted(set(spans.values())))}
    length = 2 * max(short.values()) + 3  # the last tokens are beyond the second chunk
    prompt = _SHORTEST_SPAN - 1
    try:
        small = _small_copy(model, short)
    except Exception as error:  # a class may refuse the changed configuration in any way
        logger.warning(
            "model type '%s' was not compared beyond %s: no small copy of it can be made (%s: %s)",
            kind, named, type(error).__name__, one_line(error),
        )  # fmt: skip
        return
    failure = _difference(small, (length, 5, length - 1), (prompt, *[1] * (length - prompt)))
    if failure:
        raise ConfigError(
            f"{unsupported} beyond {named}: {failure}. Use another model; or, if no context is longer than a window or "
            "chunk, set that to null in the model's config.json"
        )


def _spans(values: Any, name: str = "") -> Iterator[tuple[str, int]]:
    """(name, tokens) of every span in a configuration, nested ones included."""
    if isinstance(values, dict):
        for key, value in values.items():
            yield from _spans(value, key if isinstance(value, (int, list)) else name)
    elif isinstance(values, list):
        for value in values:
            yield from _spans(value, name)
    elif isinstance(values, int) and not isinstance(values, bool) and values > 0 and _SPAN.search(name):
        yield name, values


def _shortened(values: Any, short: dict[int, int], name: str = "") -> Any:
    """`values` with each span that `_spans` finds replaced by `short` of it."""
    if isinstance(values, dict):
        return {key: _shortened(x, short, key if isinstance(x, (int, list)) else name) for key, x in values.items()}
    if isinstance(values, list):
        return [_shortened(x, short, name) for x in values]
    return short[values] if any(_spans(values, name)) else values


def _small_copy(model: Any, short: dict[int, int]) -> Any:
    """A float32 model of the same class on the CPU, with random weights, `short` spans, a layer of each kind, and one group
    of heads of the same width."""
    config = copy.deepcopy(model.config)
    text, given = config.get_text_config(), model.config.get_text_config().to_dict()
    layers, heads, groups = text.num_hidden_layers, text.num_attention_heads, key_width(model)[0]
    by_layer = {name: x for name, x in given.items() if isinstance(x, list) and len(x) == layers}
    kinds = {repr([x[i] for x in by_layer.values()]): i for i in reversed(range(layers))}
    kept = sorted(kinds.values()) if len(kinds) > 1 else [*range(min(layers, _COPIED_LAYERS))]
    sizes = {name: 64 for name in given if name.endswith("intermediate_size") and isinstance(given[name], int)}
    if heads % groups == 0 and text.hidden_size % groups == 0:
        sizes |= {"hidden_size": text.hidden_size // groups, "num_attention_heads": heads // groups}
        sizes |= {"num_key_value_heads": 1} if getattr(text, "num_key_value_heads", None) else {}
    changed = {name: x for name, x in _shortened(given, short).items() if x != given[name]}
    changed |= {name: [_shortened(x[i], short, name) for i in kept] for name, x in by_layer.items()}
    changed |= {
        "num_hidden_layers": len(kept),
        "vocab_size": min(text.vocab_size, _COPIED_VOCABULARY),
        "pad_token_id": None,
    }
    for name, value in (sizes | changed).items():
        setattr(text, name, value)
    with torch.random.fork_rng(devices=[]), torch.device("cpu"):
        torch.manual_seed(0)
        small = type(model)(config).float()
        with torch.no_grad():
            for weight in small.parameters():
                if weight.dim() > 1:  # far from uniform attention, so that each key counts
                    weight.normal_(std=2 * weight.shape[-1] ** -0.5)
    return small


@torch.no_grad()
def _difference(model: Any, lengths: tuple[int, ...], parts: tuple[int, ...]) -> str:
    """Says how sequences packed together, or the beginning of the first fed in `parts` with cached keys and values, get
    other logits (of a model without a head: hidden states) than each sequence alone; "" if they do not."""
    training, device = model.training, next(model.parameters()).device
    rows = model.get_input_embeddings().weight.shape[0]
    ids = (torch.arange(1, 1 + sum(lengths)) * 7919 % rows).to(device)
    layout, kept = CausalSequences(lengths), _ProbeCache()
    has_head = model.get_output_embeddings() is not None

    def packed_outputs(tokens: Tensor, positions: Tensor, places: AttentionLayout) -> Tensor:
        hidden = packed_hidden(model, tokens, positions, places)
        return logits_of(model, hidden) if has_head else hidden

    model.eval()
    try:
        model.set_attn_implementation(ATTENTION_NAME)
        packed = packed_outputs(ids, layout.position_ids(device), layout)
        steps = ids[: sum(parts)].split(parts)
        stepped = [packed_outputs(x, kept.feed(len(x), device), kept) for x in steps]
        model.set_attn_implementation("eager")
        outputs = [model(input_ids=part[None], use_cache=False) for part in ids.split(lengths)]
        alone = torch.cat([(out.logits if has_head else out.last_hidden_state)[0] for out in outputs])
    except Exception as error:  # an untested architecture can fail in any way
        return f"its packed forward fails with {type(error).__name__}: {one_line(error)}"
    finally:
        model.set_attn_implementation("eager")
        model.train(training)
    if not _close(packed, alone):
        return "packed sequences get other logits than single ones"
    if not _close(torch.cat(stepped), alone[: kept.length]):
        why = "a layer attends more than once, and its" if kept.twice else "its"
        return f"{why} kept keys and values give later tokens other logits"
    if kept.widths != {key_width(model)}:
        return f"its keys and values have (heads, head_dim) {sorted(kept.widths)}, not {key_width(model)}"
    return ""


def _close(packed: Tensor, alone: Tensor) -> bool:
    bound = 5e-2 if alone.dtype in (torch.bfloat16, torch.float16) else 1e-3
    return bool((packed - alone).double().norm() <= bound * alone.double().norm())
