"""The forward pass of Llama, Mistral, Qwen2 and Qwen3 as one function, for inference.

Transformers spends 0.3 ms or more per pass outside its operators (module wrappers, masks that packed attention does not
read, normalisation in eight operators): negligible in a long pass, but a quarter of a decode step with few rows.

LoRA adapters on linear layers (see `etude.models.lora`) are applied unmerged: x Wᵀ + s (x Aᵀ) Bᵀ.

Invariant: `PlainDecoder.hidden` equals `packed_hidden` of the same model up to float32 rounding, with the parameters at the
time of the call. A model that differs in anything from these four Transformers classes (a replaced module, a custom
`forward`, hooks, another precision) runs through Transformers: `PlainDecoder.of` returns None, and also if the two disagree
on probe ids. `is_current` detects later changes to the modules; the caller must check it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from etude.models.attention import Scoring
from etude.models.lora import factors, is_adapted
from etude.models.packed import AttentionLayout, CausalSequences, packed_hidden

_KINDS = ("Llama", "Mistral", "Qwen2", "Qwen3")
_PROBE_TOKENS = (7, 5)
_PROBE_BOUND = 1e-3  # relative error; TF32 matrix products differ by less


@dataclass(frozen=True)
class _Layer:
    """The modules of one layer (parameters are looked up at each call) and its attention scoring."""

    before: Any
    query: Any
    key: Any
    value: Any
    query_norm: Any
    key_norm: Any
    out: Any
    between: Any
    gate: Any
    up: Any
    down: Any
    scoring: Scoring


class PlainDecoder:
    """A fast forward pass of one model; see the module's docstring."""

    def __init__(self, model: Any) -> None:
        self._model, self._body = model, model.model
        self._dim = int(self._body.layers[0].self_attn.head_dim)
        self._eps = float(model.config.rms_norm_eps)
        self._layers = _layers(model)

    @classmethod
    def of(cls, model: Any) -> PlainDecoder | None:
        """Builds the decoder of a model switched by `enable_packing`; None if it must run through Transformers."""
        if not _is_plain(model):
            return None
        made = cls(model)
        return made if made._agrees() else None

    def is_current(self) -> bool:
        """Whether the model still consists of the modules that `of` found, without hooks or patches."""
        model = self._model
        return model.model is self._body and _is_plain(model) and _layers(model) == self._layers

    @torch.no_grad()
    def _agrees(self) -> bool:
        """Whether the hidden states of two short sequences match those of Transformers."""
        model, weight = self._model, self._body.embed_tokens.weight
        ids = (torch.arange(1, 1 + sum(_PROBE_TOKENS)) * 7919 % len(weight)).to(weight.device)
        layout, training = CausalSequences(_PROBE_TOKENS), model.training
        model.eval()
        try:
            positions = layout.position_ids(weight.device)
            ours, theirs = self.hidden(ids, positions, layout), packed_hidden(model, ids, positions, layout)
        finally:
            model.train(training)
        return bool((ours - theirs).double().norm() <= _PROBE_BOUND * theirs.double().norm())

    def hidden(self, token_ids: Tensor, position_ids: Tensor, layout: AttentionLayout) -> Tensor:
        """Computes final hidden states (tokens, hidden); arguments as for `packed_hidden`. Does not support a backward
        pass."""
        dim, eps, half = self._dim, self._eps, self._dim // 2
        x = F.embedding(token_ids, self._body.embed_tokens.weight)
        cos, sin = (part[0][:, None] for part in self._body.rotary_emb(x, position_ids))
        sin = torch.cat([-sin[..., :half], sin[..., half:]], dim=-1)

        def normed(x: Tensor, norm: Any) -> Tensor:
            return F.rms_norm(x, x.shape[-1:], norm.weight, eps)

        def rotated(x: Tensor) -> Tensor:
            """Rotary embedding (Su et al. 2021, arXiv 2104.09864), halves as in Transformers; (heads, tokens, head_dim)."""
            return torch.addcmul(x * cos, x.roll(half, -1), sin).transpose(0, 1)

        for number, layer in enumerate(self._layers):
            y = normed(x, layer.before)
            query, key, value = (
                _linear(y, part).view(len(x), -1, dim) for part in (layer.query, layer.key, layer.value)
            )
            if layer.query_norm is not None:
                query, key = normed(query, layer.query_norm), normed(key, layer.key_norm)
            seen = layout.attend(number, rotated(query), rotated(key), value.transpose(0, 1), layer.scoring)
            x = x + _linear(seen.flatten(1), layer.out)
            y = normed(x, layer.between)
            x = x + _linear(F.silu(_linear(y, layer.gate)).mul_(_linear(y, layer.up)), layer.down)
        return normed(x, self._body.norm)


def _is_plain(model: Any) -> bool:
    """Whether a model consists only of modules that this file supports."""
    kind = type(model).__name__.removesuffix("ForCausalLM")
    if kind not in _KINDS or not _is_from_transformers(model) or model.config.hidden_act not in ("silu", "swish"):
        return False
    if any(parameter.dtype != torch.float32 for parameter in model.parameters()):
        return False
    parts = list(model.modules())
    if any(part._forward_hooks or part._forward_pre_hooks or "forward" in vars(part) for part in parts):
        return False
    norm, body = f"{kind}RMSNorm", model.model
    plain = _are(body, nn.Embedding, "embed_tokens") and _are(body, norm, "norm")
    plain &= _are(model, f"{kind}Model", "model") and _are(body, f"{kind}RotaryEmbedding", "rotary_emb")
    for layer in body.layers:
        attention, mlp = layer.self_attn, layer.mlp
        plain &= type(layer).__name__ == f"{kind}DecoderLayer" and _is_from_transformers(layer)
        plain &= _are(layer, f"{kind}Attention", "self_attn") and _are(layer, f"{kind}MLP", "mlp")
        plain &= _are(layer, norm, "input_layernorm", "post_attention_layernorm")
        plain &= kind != "Qwen3" or _are(attention, norm, "q_norm", "k_norm")
        plain &= all(_is_linear(getattr(attention, f"{name}_proj", None)) for name in "qkvo")
        plain &= all(_is_linear(getattr(mlp, f"{name}_proj", None)) for name in ("gate", "up", "down"))
    return plain and 2 * body.rotary_emb.inv_freq.numel() == body.layers[0].self_attn.head_dim


def _is_from_transformers(part: Any) -> bool:
    """Whether the class is Transformers' own, not one of the same name from a checkpoint's code."""
    return type(part).__module__.startswith("transformers.models.")


def _layers(model: Any) -> list[_Layer]:
    return [_layer(layer, model.config) for layer in model.model.layers]


def _layer(layer: Any, config: Any) -> _Layer:
    attention, mlp = layer.self_attn, layer.mlp
    window = getattr(attention, "sliding_window", None)
    if type(attention).__name__ == "MistralAttention":  # one window for all layers
        window = getattr(config, "sliding_window", None)
    return _Layer(
        before=layer.input_layernorm,
        query=attention.q_proj,
        key=attention.k_proj,
        value=attention.v_proj,
        query_norm=getattr(attention, "q_norm", None),
        key_norm=getattr(attention, "k_norm", None),
        out=attention.o_proj,
        between=layer.post_attention_layernorm,
        gate=mlp.gate_proj,
        up=mlp.up_proj,
        down=mlp.down_proj,
        scoring=Scoring(float(attention.scaling), window),
    )


def _are(parent: nn.Module, kind: type | str, *names: str) -> bool:
    """Whether the children with these names are exactly of the class `kind`, or of Transformers' class of that name."""
    children = [getattr(parent, name, None) for name in names]
    if isinstance(kind, str):
        return all(type(child).__name__ == kind and _is_from_transformers(child) for child in children)
    return all(type(child) is kind for child in children)


def _is_linear(part: Any) -> bool:
    """Whether `part` is a linear layer, with or without an adapter."""
    return type(part) is nn.Linear or (is_adapted(part) and type(part.base_layer) is nn.Linear)


def _linear(x: Tensor, part: Any) -> Tensor:
    y = F.linear(x, part.weight, part.bias)
    if type(part) is nn.Linear:
        return y
    first, second, scale = factors(part)
    return y.addmm_(x @ first.t(), second.t(), alpha=scale)
