"""Which models can run packed, and `enable_packing`, which switches them; `use_packing` falls back to the model's own
forward pass, one sequence at a time.

Invariant: a model that `enable_packing` accepts computes the log-probs of its own eager forward, both packed and token by
token from cached keys and values. For Transformers' own architectures in `TESTED`, and those in `etude.models.vision.KINDS`,
tests check this; any other architecture or class is compared here, once, whatever its name: on two short sequences, and as
a small copy with sequences longer than any span (window, chunk, original length) that the configuration names, which is then
a few tokens. Where no such copy can be made, that is logged.
"""

from __future__ import annotations

import copy
import logging
import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor

from etude.errors import ConfigError, one_line
from etude.models.attention import Scoring
from etude.models.packed import (
    ATTENTION_NAME,
    AttentionLayout,
    CausalSequences,
    is_packed,
    logits_of,
    masked_attention,
    packed_hidden,
    plain_hidden,
)
from etude.models.vision import KINDS

logger = logging.getLogger(__name__)

TESTED = frozenset({"llama", "mistral", "qwen2", "qwen3", "gemma", "gemma2", "gemma3_text", "qwen3_moe"})
_BATCH_ROPE = {
    "dynamic",
    "longrope",
}  # beyond the original length, frequencies depend on the longest position in the batch
_PROBE_TOKENS = (7, 5)
_PROBE_PARTS = (5, 1, 1)  # a prompt and two decoded tokens
_SPAN = re.compile(
    r"(window|chunk|attention_span|local_attention|block_size|original_max_position|floor_scale)(?!\w*(layers|pattern))"
)
_SHORTEST_SPAN = 4  # in a small copy; the next longer span is one token longer
_COPIED_LAYERS = 6  # one of each kind, also where layers alternate by a pattern that no list in the configuration shows
_COPIED_VOCABULARY = 256


@dataclass(frozen=True)
class _Found:
    """Why a model cannot run packed, why not from cached keys and values, and, if not packed, why not plainly either; "" if
    it can."""

    packed: str = ""
    cached: str = ""
    plain: str = ""


_known: WeakKeyDictionary[Any, _Found] = WeakKeyDictionary()  # so that trainer and engine compare a model once


def enable_packing(model: Any, *, cached: bool = False) -> None:
    """Switches a Hugging Face causal LM to packed attention. `cached`: it will also be fed token by token, with the keys and
    values of earlier tokens.

    Raises:
        ConfigError: the architecture cannot run so; says why.
    """
    found = _find(model)
    if reason := found.packed or (found.cached if cached else ""):
        raise ConfigError(_refusal(model, reason), fix="sample with rollout.name=vllm" if cached else "")
    if is_packed(model):
        return
    # The vision tower keeps its own attention.
    vision = model.config.model_type in KINDS
    model.set_attn_implementation({"": ATTENTION_NAME, "text_config": ATTENTION_NAME} if vision else ATTENTION_NAME)


def use_packing(model: Any) -> bool:
    """Switches a causal LM to packed attention if it can run so. Returns False if it cannot: then it computes one sequence a
    forward pass, which is logged once.

    Raises:
        ConfigError: the model's own forward pass cannot be trained through either; says why.
    """
    found = _find(model)
    if found.plain:
        raise ConfigError(f"{_refusal(model, found.packed)}, and {found.plain}", fix="use another model")
    if not found.packed:
        enable_packing(model)
    return not found.packed


def share_check(model: Any) -> None:
    """Takes over the first rank's comparison of `model`, of which the other ranks have no weights (collective)."""
    found: list[Any] = [_find(model) if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(found)
    _known[model] = found[0]


def _refusal(model: Any, reason: str) -> str:
    return f"model type '{model.config.model_type}' cannot run packed: {reason}"


def _find(model: Any) -> _Found:
    """Compares a model once."""
    if model not in _known:
        found = _compare(model)
        if found.packed:
            found = replace(found, plain=_plain_failure(model))
            if not found.plain:
                logger.warning(
                    "%s; it computes one sequence a forward pass, each with its own prompt: about twice the time a token, "
                    "and nothing is shared in a group",
                    _refusal(model, found.packed),
                )
        _known[model] = found
    return _known[model]


def key_widths(model: Any) -> list[tuple[int, int]]:
    """Measures (heads, head_dim) of the keys and values of each layer of a model that runs packed, with one token."""
    cache, ids = _ProbeCache(), probe_ids(model, 1)
    with torch.no_grad():
        packed_hidden(model, ids, cache.feed(1, ids.device), cache)
    return [cache.width(layer) for layer in range(model.config.get_text_config().num_hidden_layers)]


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
        self._kept: dict[int, tuple[Tensor, Tensor]] = {}
        self._seen: set[int] = set()

    def feed(self, tokens: int, device: torch.device) -> Tensor:
        """Starts a part; returns its position ids (1, tokens)."""
        self._start, self.length = self.length, self.length + tokens
        self._seen.clear()
        return torch.arange(self._start, self.length, device=device)[None]

    def width(self, layer: int) -> tuple[int, int]:
        """(heads, head_dim) of the layer's keys and values."""
        heads, _, width = self._kept[layer][0].shape
        return heads, width

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scoring: Scoring) -> Tensor:
        self.twice |= layer in self._seen
        self._seen.add(layer)
        if self._start:
            held = (kept[:, : self._start] for kept in self._kept[layer])
            key, value = (torch.cat(parts, dim=1) for parts in zip(held, (key, value)))
        self._kept[layer] = key, value
        places = torch.arange(self.length, device=query.device)
        mask = scoring.visible(places[self._start :], places)
        return masked_attention(query[None], key[None], value[None], mask, scoring)[0].transpose(0, 1)


def _compare(model: Any) -> _Found:
    """Compares the model, and a small copy of it on sequences longer than each of its spans, with single sequences."""
    kind = model.config.model_type
    own = type(model).__module__.startswith("transformers.models.")
    causal = not getattr(model.config.get_text_config(), "use_bidirectional_attention", False)
    if is_packed(model) or kind in KINDS or (kind in TESTED and own and causal):
        return _Found()
    if not getattr(model, "_supports_attention_backend", False):
        return _Found("its attention cannot be replaced")
    found = _difference(model, _PROBE_TOKENS, _PROBE_PARTS)
    if found.packed:
        return found
    config = model.config.get_text_config()
    spans: dict[str, int] = {}
    _map_spans(config.to_dict(), spans.__setitem__)  # only to collect them
    # See `etude.options.model_path.longest_context`.
    if _rope_types(getattr(config, "rope_parameters", None)) & _BATCH_ROPE:
        spans = {name: span for name, span in spans.items() if "original" not in name}
    short = {span: _SHORTEST_SPAN + i for i, span in enumerate(sorted(set(spans.values())))}
    length = 2 * max(short.values(), default=_SHORTEST_SPAN) + 3  # the last tokens are beyond the second chunk
    prompt = _SHORTEST_SPAN - 1  # shorter than any span
    named = ", ".join(f"{name}={span}" for name, span in spans.items()) or "short sequences"
    try:
        small = _small_copy(model, short)
    except Exception as error:
        logger.warning(
            "model type '%s' was not compared beyond %s: no small copy of it can be made (%s: %s)",
            kind, named, type(error).__name__, one_line(error),
        )  # fmt: skip
        return found
    beyond = _difference(small, (length, prompt, length - 1), (prompt, *[1] * (length - prompt)))
    if beyond.packed and spans:
        advice = "if no context is longer than a window or chunk, set that to null in the model's config.json"
        return _Found(f"beyond {named}, {beyond.packed}; {advice}")
    return _Found(beyond.packed, found.cached or beyond.cached)


def _plain_failure(model: Any) -> str:
    """Says why one forward pass a sequence would train the model wrongly; "" if it would not."""
    ids = probe_ids(model, sum(_PROBE_TOKENS))
    has_head = model.get_output_embeddings() is not None
    training = model.training
    model.eval()
    try:
        with torch.no_grad():
            hidden, start = plain_hidden(model, ids), plain_hidden(model, ids[: _PROBE_TOKENS[0]])
            output = model(input_ids=ids[None], use_cache=False)
            ours, theirs = (logits_of(model, hidden), output.logits[0]) if has_head else (hidden, hidden)
    except Exception as error:  # an untested architecture can fail in any way
        return f"its forward pass fails with {type(error).__name__}: {one_line(error)}"
    finally:
        model.train(training)
    if not are_close(hidden[: _PROBE_TOKENS[0]], start):
        return "its tokens see later ones"
    return "" if are_close(ours, theirs) else "its logits are not those of its output embedding"


def _map_spans(values: Any, change: Callable[[str, int], object], name: str = "") -> Any:
    """A configuration in which each span, nested ones included, is what `change(name, tokens)` makes of it."""
    if isinstance(values, dict):
        return {key: _map_spans(x, change, key if isinstance(x, (int, list)) else name) for key, x in values.items()}
    if isinstance(values, list):
        return [_map_spans(x, change, name) for x in values]
    is_span = isinstance(values, int) and not isinstance(values, bool) and values > 0 and _SPAN.search(name)
    return change(name, values) if is_span else values


def _small_copy(model: Any, short: dict[int, int]) -> Any:
    """A float32 model of the same class on the CPU, with random weights, `short` spans, a layer of each kind, and one group
    of heads of the same width, or all of them where the class does not run with one. It may fail in any way."""
    try:
        small = _copy_with(model, short, one_group=True)
        small(input_ids=probe_ids(small, _SHORTEST_SPAN)[None], use_cache=False)
        return small
    except Exception:
        return _copy_with(model, short, one_group=False)


def _copy_with(model: Any, short: dict[int, int], *, one_group: bool) -> Any:
    config = copy.deepcopy(model.config)
    text, given = config.get_text_config(), model.config.get_text_config().to_dict()
    layers, heads = text.num_hidden_layers, text.num_attention_heads
    groups = getattr(text, "num_key_value_heads", None) or heads
    by_layer = {name: x for name, x in given.items() if isinstance(x, list) and len(x) == layers}
    kinds = {repr([x[i] for x in by_layer.values()]): i for i in reversed(range(layers))}
    kept = sorted(kinds.values()) if len(kinds) > 1 else [*range(min(layers, _COPIED_LAYERS))]
    sizes = {name: 64 for name in given if name.endswith("intermediate_size") and isinstance(given[name], int)}
    if one_group and heads % groups == 0 and text.hidden_size % groups == 0:
        sizes |= {"hidden_size": text.hidden_size // groups, "num_attention_heads": heads // groups}
        sizes |= {"num_key_value_heads": 1} if getattr(text, "num_key_value_heads", None) else {}
    shortened = _map_spans(given, lambda _, span: short.get(span, span))
    changed = {name: x for name, x in shortened.items() if x != given[name]}
    changed |= {name: [shortened[name][i] for i in kept] for name in by_layer}
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


def probe_ids(model: Any, count: int) -> Tensor:
    """Returns (count,) ids of the model's vocabulary, always the same."""
    weight = model.get_input_embeddings().weight
    return (torch.arange(1, 1 + count) * 7919 % len(weight)).to(weight.device)


@torch.no_grad()
def _difference(model: Any, lengths: tuple[int, ...], parts: tuple[int, ...]) -> _Found:
    """Says how sequences packed together, or the beginning of the first fed in `parts` with cached keys and values, get
    other logits (of a model without a head: hidden states) than each sequence alone."""
    training, previous = model.training, model.config._attn_implementation
    ids = probe_ids(model, sum(lengths))
    layout, kept = CausalSequences(lengths), _ProbeCache()
    has_head = model.get_output_embeddings() is not None

    def packed_outputs(tokens: Tensor, positions: Tensor, places: AttentionLayout) -> Tensor:
        hidden = packed_hidden(model, tokens, positions, places)
        return logits_of(model, hidden) if has_head else hidden

    model.eval()
    try:
        model.set_attn_implementation(ATTENTION_NAME)
        packed = packed_outputs(ids, layout.position_ids(ids.device), layout)
        steps = ids[: sum(parts)].split(parts)
        stepped = [packed_outputs(x, kept.feed(len(x), ids.device), kept) for x in steps]
        model.set_attn_implementation("eager")
        outputs = [model(input_ids=part[None], use_cache=False) for part in ids.split(lengths)]
        alone = torch.cat([(out.logits if has_head else out.last_hidden_state)[0] for out in outputs])
    except Exception as error:  # an untested architecture can fail in any way
        return _Found(f"its packed forward fails with {type(error).__name__}: {one_line(error)}")
    finally:
        model.set_attn_implementation(previous)
        model.train(training)
    if not are_close(packed, alone):
        return _Found("packed sequences get other logits than single ones")
    if not are_close(torch.cat(stepped), alone[: kept.length]):
        why = "a layer attends more than once, and its" if kept.twice else "its"
        return _Found(cached=f"{why} kept keys and values give later tokens other logits")
    return _Found()


def are_close(packed: Tensor, alone: Tensor) -> bool:
    """Whether two computations of one tensor differ by no more than rounding in its dtype."""
    bound = 5e-2 if alone.dtype in (torch.bfloat16, torch.float16) else 1e-3
    return bool((packed - alone).double().norm() <= bound * alone.double().norm())
