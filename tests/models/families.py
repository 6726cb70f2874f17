"""Tiny models of the families that Transformers knows, and what Étude does with each: the rows of docs/models.md.

    python tests/models/families.py          # prints the rows
    python tests/models/families.py --write  # writes them into docs/models.md and its translation

What is compared with is Transformers' own eager forward pass of one sequence. Sequences are longer than windows and chunks.
"""

from __future__ import annotations

import asyncio
import copy
import inspect
import logging
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import CONFIG_MAPPING, AutoModelForCausalLM

from etude.errors import ConfigError
from etude.inference import NativeEngine, SamplingParams
from etude.models.loading import load_causal_lm, save_pretrained, zero_dropout
from etude.models.lora import add_adapters, merged_weights
from etude.models.packable import use_packing
from etude.models.packed import is_packed, logit_finish
from etude.options import ModelOptions
from etude.protocol import DataProto
from etude.training.log_probs import token_log_probs
from etude.training.microbatches import micro_batches
from etude.training.packing import pack

PAGES = [Path(__file__).parents[2] / "docs" / name for name in ("models.md", "models.zh.md")]
BEGIN, END = "|---|---|---|---|---|---|\n", "\n\n"
TOLERANCE = 1e-4
WINDOW, CHUNK = 6, 7
VOCABULARY = 60

SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 128,
    "sliding_window": WINDOW,
    "attention_window_size": WINDOW,
    "attention_chunk_size": CHUNK,
    "initializer_range": 0.3,
    "vocab_size_per_layer_input": VOCABULARY,
    "hidden_size_per_layer_input": 8,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    # names of older configurations
    "n_embd": 32,
    "n_layer": 4,
    "n_head": 4,
    "n_inner": 32,
    "n_positions": 128,
    "rotary_dim": 8,
    "d_model": 32,
    "n_layers": 4,
    "n_heads": 4,
    "max_seq_len": 128,
    "ffn_dim": 32,
    "word_embed_proj_dim": 32,
    "attention_hidden_size": 32,
    # mixtures of experts
    "num_experts": 4,
    "num_local_experts": 4,
    "n_routed_experts": 4,
    "moe_num_experts": 4,
    "num_experts_per_tok": 2,
    "num_experts_per_token": 2,
    "moe_k": 2,
    "moe_topk": 2,
    "moe_intermediate_size": 16,
    "shared_expert_intermediate_size": 16,
    "shared_intermediate_size": 16,
    "n_shared_experts": 1,
    "num_shared_experts": 1,
    "moe_num_shared_experts": 1,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    # multi-head latent attention
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 12,
    # layers with a state
    "state_size": 8,
    "ssm_state_size": 8,
    "mamba_d_state": 8,
    "mamba_d_head": 16,
    "mamba_head_dim": 16,
    "mamba_n_heads": 4,
    "mamba_num_heads": 4,
    "mamba_d_ssm": 64,
    "mamba_expand": 2,
    "mamba_dt_rank": 4,
    "time_step_rank": 4,
    "expand": 2,
    "num_heads": 4,
    "n_groups": 1,
    "mamba_n_groups": 1,
    "n_mamba_heads": 2,
    "chunk_size": 8,
    "mamba_chunk_size": 8,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "lru_width": 32,
}
"""Set where the configuration knows the name."""

ALTERNATING = {"layer_types": ["sliding_attention", "full_attention"] * 2}
LINEAR = {"layer_types": ["linear_attention", "full_attention"] * 2}
CONV = {"layer_types": ["conv", "full_attention"] * 2}
LATENT = (
    "deepseek_v2",
    "deepseek_v3",
    "deepseek_v32",
    "glm4_moe_lite",
    "glm_moe_dsa",
    "longcat_flash",
    "minicpm3",
    "youtu",
)
"""Families with multi-head latent attention: keys and values of every head come from one vector, and differ in width."""

FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "afmoe": ("Arcee Trinity", {}),
    "apertus": ("Apertus", {}),
    "arcee": ("Arcee AFM", {}),
    "bamba": ("Bamba", {"attn_layer_indices": [1, 3]}),
    "bitnet": ("BitNet", {}),
    "bloom": ("BLOOM", {}),
    "cohere": ("Command R", {}),
    "cohere2": ("Command R7B, A", {}),
    "cwm": ("Code World Model", {}),
    "deepseek_v2": ("DeepSeek V2", {}),
    "deepseek_v3": ("DeepSeek V3, R1, Kimi K2", {}),
    "deepseek_v32": ("DeepSeek V3.2", {}),
    "diffllama": ("DiffLlama", {"initializer_range": 0.1}),
    "dots1": ("dots.llm1", {}),
    "ernie4_5": ("ERNIE 4.5", {}),
    "ernie4_5_moe": ("ERNIE 4.5 MoE", {}),
    "exaone4": ("EXAONE 4", ALTERNATING),
    "falcon": ("Falcon", {}),
    "falcon_h1": ("Falcon H1", {}),
    "falcon_mamba": ("Falcon Mamba", {}),
    "flex_olmo": ("FlexOlmo", {}),
    "gemma": ("Gemma", {}),
    "gemma2": ("Gemma 2", ALTERNATING),
    "gemma3_text": ("Gemma 3", ALTERNATING),
    "gemma3n_text": ("Gemma 3n", {"num_kv_shared_layers": 2, **ALTERNATING}),
    "gemma4_text": ("Gemma 4", {"num_kv_shared_layers": 0, "global_head_dim": 16, **ALTERNATING}),
    "glm": ("GLM-4 9B Chat", {}),
    "glm4": ("GLM-4 0414", {}),
    "glm4_moe": ("GLM-4.5, 4.6, 4.7", {}),
    "glm4_moe_lite": ("GLM-4.7 Flash", {}),
    "gpt2": ("GPT-2", {}),
    "gpt_bigcode": ("StarCoder", {}),
    "gpt_neox": ("Pythia", {}),
    "gpt_oss": ("gpt-oss", ALTERNATING),
    "granite": ("Granite 3", {}),
    "granitemoe": ("Granite 3 MoE", {}),
    "granitemoehybrid": ("Granite 4 Micro", {"layer_types": ["attention"] * 4}),
    "granitemoehybrid+mamba": ("Granite 4 H", {"layer_types": ["mamba", "attention"] * 2}),
    "helium": ("Helium", {}),
    "hunyuan_v1_dense": ("Hunyuan dense", {}),
    "hunyuan_v1_moe": ("Hunyuan MoE", {}),
    "jamba": ("Jamba", {"attn_layer_period": 2, "attn_layer_offset": 1, "expert_layer_period": 2}),
    "lfm2": ("LFM2", CONV),
    "lfm2_moe": ("LFM2 MoE", CONV),
    "llama": ("Llama 2, 3, SmolLM2", {}),
    "llama4_text": ("Llama 4", {"layer_types": ["chunked_attention", "full_attention"] * 2}),
    "mamba": ("Mamba", {}),
    "mamba2": ("Mamba 2", {"num_heads": 4, "head_dim": 16}),
    "mimo_v2_flash": ("MiMo V2 Flash", {}),
    "minicpm3": ("MiniCPM 3", {}),
    "minimax": ("MiniMax Text 01, M1", LINEAR),
    "minimax_m2": ("MiniMax M2", {}),
    "ministral3": ("Ministral 3", {}),
    "mistral": ("Mistral", {}),
    "mixtral": ("Mixtral", {}),
    "nanochat": ("nanochat", {}),
    "nemotron": ("Nemotron 4", {}),
    "nemotron_h": (
        "Nemotron H, Nemotron 3 Nano",
        {"initializer_range": 0.1, "layer_types": ["linear_attention", "mlp", "full_attention", "mlp"]},
    ),
    "olmo2": ("OLMo 2", {}),
    "olmo3": ("OLMo 3", ALTERNATING),
    "olmo_hybrid": ("OLMo Hybrid", LINEAR),
    "olmoe": ("OLMoE", {}),
    "opt": ("OPT", {}),
    "phi": ("Phi 1.5, 2", {}),
    "phi3": ("Phi 3, 4", {}),
    "phimoe": ("Phi 3.5 MoE", {}),
    "qwen2": ("Qwen2, Qwen2.5", {}),
    "qwen2_moe": ("Qwen1.5 MoE", {}),
    "qwen3": ("Qwen3", {}),
    "qwen3_5_moe_text": ("Qwen3.5 MoE", {"initializer_range": 0.1, **LINEAR}),
    "qwen3_5_text": ("Qwen3.5", {"initializer_range": 0.1, **LINEAR}),
    "qwen3_moe": ("Qwen3 MoE", {}),
    "qwen3_next": ("Qwen3-Next", LINEAR),
    "rwkv": ("RWKV 4", {}),
    "seed_oss": ("Seed-OSS", {}),
    "smollm3": ("SmolLM3", {}),
    "solar_open": ("Solar Open", {}),
    "stablelm": ("StableLM", {}),
    "starcoder2": ("StarCoder2", {}),
    "vaultgemma": ("VaultGemma", ALTERNATING),
}


def build(name: str, seed: int = 0) -> Any:
    """Builds the tiny model of a family in float32, in evaluation mode; two models of one seed are equal."""
    kind = name.partition("+")[0]
    config_class = CONFIG_MAPPING[kind]
    known = set(config_class().to_dict()) | set(inspect.signature(config_class.__init__).parameters)
    sizes = {key: value for key, value in SIZES.items() if key in known}
    if kind in LATENT:
        sizes = {key: value for key, value in sizes.items() if key != "head_dim"} | {"num_key_value_heads": 4}
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(config_class(**sizes | FAMILIES[name][1]), dtype=torch.float32)
    zero_dropout(model)
    return model.eval()


@dataclass(frozen=True)
class Row:
    """What Étude does with a family; the columns of the table in docs/models.md."""

    name: str
    trainer: str
    engine: str
    lora: str
    saved: str

    def __str__(self) -> str:
        kind = self.name.partition("+")[0]
        cells = (FAMILIES[self.name][0], f"`{kind}`", self.trainer, self.engine, self.lora, self.saved)
        return f"| {' | '.join(cells)} |"


def examine(name: str) -> Row:
    """Examines a family; raises AssertionError where something is computed wrongly."""
    alone = build(name)
    if alone.config._attn_implementation == "sdpa":
        alone.set_attn_implementation("eager")
    return Row(name, _trainer(name, alone), _engine(name, alone), _lora(name, alone), _saved(name, alone))


def _batch(seed: int = 0) -> DataProto:
    """Four rows: two with one prompt of 10 tokens, which packing shares, and two others."""
    draw = torch.Generator().manual_seed(seed)
    ids = torch.randint(3, VOCABULARY, (4, 26), generator=draw)
    ids[1, :10] = ids[0, :10]
    attention, mask = torch.ones_like(ids), torch.ones(4, 16, dtype=torch.long)
    for row, width in enumerate((16, 9, 13, 5)):
        attention[row, 10 + width :], mask[row, width:] = 0, 0
    return DataProto.from_single_dict({"input_ids": ids, "attention_mask": attention, "response_mask": mask})


def _expected(alone: Any, batch: DataProto) -> Tensor:
    """Log-probs (4, 16) of the responses, from one plain forward pass a row."""
    ids, mask = batch.batch["input_ids"], batch.batch["response_mask"]
    rows = []
    for tokens, scored in zip(ids, mask):
        width = 10 + int(scored.sum())
        logits = alone(input_ids=tokens[None, :width], use_cache=False).logits[0, 9:-1]
        found = logits.log_softmax(-1).gather(1, tokens[10:width, None])[:, 0]
        rows.append(torch.nn.functional.pad(found, (0, 26 - width)))
    return torch.stack(rows)


def _learn(model: Any, batch: DataProto, weights: Tensor | None = None) -> Tensor:
    """The trainer's log-probs (4, 16); with `weights`, also adds the gradient of their weighted sum."""
    packs = use_packing(model)
    result, head = torch.zeros(4, 16), model.get_output_embeddings()
    for rows in micro_batches(batch, 10**6 if packs else 1):
        packed = pack(batch, rows, torch.device("cpu"))
        hidden = packed.hidden(model)
        found, _ = token_log_probs(hidden, head.weight, packed.labels, bias=head.bias, finish=logit_finish(model))
        result[rows] = packed.scatter(found).detach()
        if weights is not None:
            (packed.scatter(found) * weights[rows]).sum().backward()
    return result


def _close(ours: Tensor, theirs: Tensor, what: str) -> None:
    torch.testing.assert_close(ours, theirs, atol=TOLERANCE, rtol=0, msg=lambda text: f"{what}: {text}")


def _trainer(name: str, alone: Any) -> str:
    model, batch = build(name), _batch()
    packs = use_packing(model)
    weights = torch.rand(4, 16, generator=torch.Generator().manual_seed(1))
    ours, theirs = _learn(model.train(), batch, weights), _expected(alone, batch)
    (theirs * weights * batch.batch["response_mask"]).sum().backward()
    _close(ours, theirs.detach(), "log-probs")
    pairs = [(key, ours, theirs.grad) for (key, ours), theirs in zip(model.named_parameters(), alone.parameters())]
    largest = max(float(gradient.norm()) for _, _, gradient in pairs if gradient is not None)
    for key, parameter, gradient in pairs:
        if gradient is not None:
            error = float((parameter.grad - gradient).norm())
            assert error <= TOLERANCE * (float(gradient.norm()) + 0.01 * largest), f"gradient of {key}: {error}"
    alone.zero_grad()
    other = _batch()
    other.batch["input_ids"][2:] = _batch(seed=1).batch["input_ids"][2:]
    with torch.no_grad():
        changed = _learn(model, other)
    torch.testing.assert_close(
        changed[:2], ours[:2], atol=2e-5, rtol=0, msg="a neighbour in the pack changes log-probs"
    )
    return "packed" if packs else "plain"


def _engine(name: str, alone: Any) -> str:
    try:
        model = build(name)
        engine = NativeEngine(model)
    except ConfigError:
        return "–"

    async def turns() -> list[tuple[list[int], list[float]]]:
        async def rollout(row: int) -> tuple[list[int], list[float]]:
            context, log_probs = [7 + k for k in range(10 + row // 2)], [0.0] * (10 + row // 2)
            for _ in range(2):
                params = SamplingParams(temperature=1.0, max_tokens=9, seed=row)
                out = await engine.generate(f"r{row}", context, params)
                context += [*out.token_ids, 5, 6]
                log_probs += [*out.log_probs, 0.0, 0.0]
            return context, log_probs

        return await asyncio.gather(*map(rollout, range(4)))

    for context, log_probs in asyncio.run(turns()):
        ids = torch.tensor(context)
        with torch.no_grad():
            logits = alone(input_ids=ids[None], use_cache=False).logits[0, :-1]
        theirs = logits.log_softmax(-1).gather(1, ids[1:, None])[:, 0]
        sampled = torch.tensor(log_probs[1:])
        _close(sampled, torch.where(sampled == 0, 0.0, theirs), "log-probs of the engine")
    return "batched" if is_packed(model) else "one by one"


def _lora(name: str, alone: Any) -> str:
    for targets in (("all-linear",), ("q_proj", "v_proj", "o_proj"), ("q_a_proj", "o_proj"), ("in_proj",)):
        model, batch = build(name), _batch()
        try:
            add_adapters(model, ModelOptions(path="model", lora_rank=2, target_modules=targets))
            break
        except ConfigError:
            continue
    else:
        return "–"
    use_packing(model)
    draw = torch.Generator().manual_seed(2)
    for part in (part for part in model.modules() if hasattr(part, "lora_B")):
        part.lora_B["default"].weight.data.normal_(std=0.05, generator=draw)
    ours = _learn(model, batch, torch.ones(4, 16))
    assert all(parameter.grad is not None for parameter in model.parameters() if parameter.requires_grad)
    merged = copy.deepcopy(alone)
    merged.load_state_dict(dict(merged_weights(model)), strict=False)
    with torch.no_grad():
        _close(ours, _expected(merged, batch), "log-probs with adapters")
    return "all-linear" if targets == ("all-linear",) else f"`{targets[0]}` …"


def _saved(name: str, alone: Any) -> str:
    ids = _batch().batch["input_ids"]
    with tempfile.TemporaryDirectory() as folder, torch.no_grad():
        save_pretrained(build(name), None, folder)
        again = load_causal_lm(folder)
        _close(
            again(input_ids=ids, use_cache=False).logits, alone(input_ids=ids, use_cache=False).logits, "saved logits"
        )
    return "yes"


def table() -> str:
    """The rows of docs/models.md."""
    return "\n".join(str(examine(name)) for name in FAMILIES)


def written(page: Path) -> str:
    """The rows that a page has."""
    return page.read_text(encoding="utf-8").partition(BEGIN)[2].partition(END)[0].strip()


if __name__ == "__main__":
    torch.set_num_threads(1)
    logging.disable(logging.WARNING)  # why a model is not packed
    rows = table()
    print(rows)
    for page in PAGES if "--write" in sys.argv[1:] else ():
        text = page.read_text(encoding="utf-8")
        page.write_text(text.replace(written(page), rows), encoding="utf-8")
