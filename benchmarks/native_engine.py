"""What the native engine costs, and how far its log-probs are from a float32 full forward: the figures of docs/engines.md.

    python benchmarks/native_engine.py --model FOLDER [--trajectories 64 256 64] [--width 256] [--dtype float32]
    python benchmarks/native_engine.py --model FOLDER --errors
    python benchmarks/native_engine.py --model FOLDER --layers [--compile]
    python benchmarks/native_engine.py --model FOLDER --decode [--batches 1 8 32 64] [--group 8]
    python benchmarks/native_engine.py --step-threads          (two cores with nothing else to do; wall milliseconds)

A trajectory has a prompt of 190 tokens that its group of 8 shares and three turns of at most 96 sampled tokens, each but
the last followed by a tool's answer of 20. Times are CPU seconds of this process, at one thread where nothing else is said.
"""

from __future__ import annotations

import argparse
import asyncio
import copy
import random
import statistics
import time
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from transformers import AutoModelForCausalLM, GenerationConfig, Qwen3Config, Qwen3ForCausalLM

from etude.inference import NativeEngine, NativeEngineOptions, SamplingParams, TokenOutput
from etude.metrics import finish_metrics
from etude.models import load_causal_lm
from etude.models.packable import enable_packing
from etude.models.packed import packed_hidden

GROUP, PROMPT, ANSWER, TURNS, MOST = 8, 190, 20, 3, 96
Turn = tuple[list[int], TokenOutput]


async def trajectory(
    engine: NativeEngine, name: str, prompt: list[int], seed: int, stop: tuple[int, ...]
) -> list[Turn]:
    rng, context, turns = random.Random(seed), list(prompt), []
    for turn in range(TURNS):
        params = SamplingParams(max_tokens=rng.randint(16, MOST), stop_token_ids=stop, seed=seed * TURNS + turn)
        out = await engine.generate(name, context, params)
        turns.append((list(context), out))
        context += out.token_ids + [rng.randrange(256) for _ in range(ANSWER)]
    engine.close(name)
    return turns


def rollout(engine: NativeEngine, count: int, seed: int) -> list[list[Turn]]:
    rng = random.Random(seed)
    stop = engine._model.config.eos_token_id
    common = [rng.randrange(256) for _ in range(PROMPT - 24)]  # system prompt and tools
    prompts = [common + [rng.randrange(256) for _ in range(24)] for _ in range(0, count, GROUP)]

    async def main() -> list[list[Turn]]:
        names = [f"{seed}/{i}" for i in range(count)]
        engine.open(names)
        stops = () if stop is None else (stop,)
        rows = (trajectory(engine, n, prompts[i // GROUP], seed * count + i, stops) for i, n in enumerate(names))
        return await asyncio.gather(*rows)

    return asyncio.run(main())


def cost(model: Any, counts: list[int], width: int, dtype: str | None) -> None:
    engine = NativeEngine(model, NativeEngineOptions(max_num_seqs=width, dtype=dtype))
    rollout(engine, min(GROUP * 8, max(counts)), 0)
    for seed, count in enumerate(counts, start=1):
        asyncio.run(engine.update_weights(None, seed))
        engine.metrics()
        start = time.process_time()
        rollout(engine, count, seed)
        spent, figures = time.process_time() - start, finish_metrics(engine.metrics())
        tokens = figures["sampled_tokens"]
        print(f"{count} trajectories: {1e6 * spent / tokens:.1f} us a token, {tokens:.0f} tokens, {spent:.2f} CPU s")
        print("   ", {name: round(value, 3) for name, value in figures.items()}, flush=True)


def errors(folder: str) -> None:
    reference, rounded = load_causal_lm(folder), load_causal_lm(folder, dtype="bfloat16").float()
    for model in (reference, rounded):
        model.set_attn_implementation("eager")
    exact = copy.deepcopy(reference).double()
    for dtype, against, name in (
        ("float32", exact, "a float64 forward of them"),
        ("float32", reference, "float32 weights"),
        ("bfloat16", rounded, "the same rounded weights"),
        ("bfloat16", reference, "float32 weights"),
        ("float16", reference, "float32 weights"),
    ):
        engine = NativeEngine(copy.deepcopy(reference), NativeEngineOptions(dtype=dtype))
        turns = [turn for made in rollout(engine, 32, 1) for turn in made]
        sampled = torch.tensor([log_prob for _, out in turns for log_prob in out.log_probs])
        expected = _log_probs(against, turns)
        _print_error(f"{dtype} against {name}", sampled - expected)
        if against is exact:
            _print_error("Transformers' own float32 against that", _log_probs(reference, turns) - expected)


def _log_probs(model: Any, turns: list[Turn]) -> torch.Tensor:
    """Returns the log-probs of all sampled tokens, from a full forward over each context."""
    found = []
    for context, out in turns:
        with torch.no_grad():
            logits = model(input_ids=torch.tensor([context + out.token_ids])).logits[0, len(context) - 1 : -1]
        found.append(logits.log_softmax(-1).gather(1, torch.tensor(out.token_ids)[:, None])[:, 0])
    return torch.cat(found)


def _print_error(name: str, error: torch.Tensor) -> None:
    print(f"{name}: largest {error.abs().max():.3g}, mean {error.abs().mean():.3g}, {len(error)} tokens")


class NoAttention:
    """A layout whose attention costs nothing."""

    def attend(self, layer: int, query: Any, key: Any, value: Any, scoring: Any) -> Any:
        return query.transpose(0, 1)


def layers(model: Any, compiled: bool) -> None:
    """Times one decode step of 64 rows of a Qwen3 model without its attention."""
    enable_packing(model)
    config, body = model.config, model.model
    heads, kv_heads, dim, eps = (
        config.num_attention_heads,
        config.num_key_value_heads,
        config.head_dim,
        config.rms_norm_eps,
    )
    ids, positions = torch.randint(0, 256, (64,)), torch.arange(64)[None]

    def products() -> None:
        for layer in body.layers:
            for part in layer.modules():
                if isinstance(part, torch.nn.Linear):
                    F.linear(inputs[part.in_features], part.weight)

    def by_hand() -> Any:
        hidden = F.embedding(ids, body.embed_tokens.weight)
        cos, sin = (x[0][:, None] for x in body.rotary_emb(hidden, positions))
        sin = torch.cat([-sin[..., : dim // 2], sin[..., dim // 2 :]], -1)
        for layer in body.layers:
            attention, mlp = layer.self_attn, layer.mlp
            x = F.rms_norm(hidden, hidden.shape[1:], layer.input_layernorm.weight, eps)
            q = F.rms_norm(attention.q_proj(x).view(-1, heads, dim), (dim,), attention.q_norm.weight, eps)
            k = F.rms_norm(attention.k_proj(x).view(-1, kv_heads, dim), (dim,), attention.k_norm.weight, eps)
            attention.v_proj(x)
            q, k = (torch.addcmul(y * cos, y.roll(dim // 2, -1), sin) for y in (q, k))
            hidden = torch.addmm(hidden, q.reshape(64, -1), attention.o_proj.weight.t())
            x = F.rms_norm(hidden, hidden.shape[1:], layer.post_attention_layernorm.weight, eps)
            x = F.silu(mlp.gate_proj(x)).mul_(mlp.up_proj(x))
            hidden = torch.addmm(hidden, x, mlp.down_proj.weight.t())
        return F.rms_norm(hidden, hidden.shape[1:], body.norm.weight, eps)

    sizes = {part.in_features for part in body.modules() if isinstance(part, torch.nn.Linear)}
    inputs = {size: torch.randn(64, size) for size in sizes}
    ways: dict[str, Callable[[], Any]] = {
        "Transformers' modules": lambda: packed_hidden(model, ids, positions, NoAttention()),
        "of which matrix products": products,
        "by hand": by_hand,
    }
    with torch.inference_mode():
        assert torch.allclose(ways["by hand"](), ways["Transformers' modules"](), atol=1e-4)
        if compiled:
            start = time.process_time()
            ways["compiled"] = torch.compile(by_hand, dynamic=True)
            ways["compiled"]()
            print(f"compiling: {time.process_time() - start:.1f} CPU s in this process, and the compiler's own")
        for name, way in ways.items():
            times = []
            for _ in range(60):
                start = time.process_time()
                way()
                times.append(time.process_time() - start)
            print(f"{name}: {1e3 * sorted(times)[30]:.2f} ms")


PROMPT_LENGTH, DECODED, REPETITIONS = 300, 12, 3


def decode(folder: str, batches: list[int], group: int) -> None:
    """Prints sampled tokens per CPU second after prompts of 300 tokens, and the share of the CPU's float32 peak, of the
    engine and of Transformers' `generate`, which take turns. `group` rows have one prompt.

    The engine's prefill includes the reordering of the weights. A token's FLOP: two for each weight of a product, four for
    each key, head and dimension.
    """
    engine_model, model = load_causal_lm(folder), AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    config, peak = model.config, _peak()
    head = config.vocab_size * config.hidden_size
    body = sum(part.weight.numel() for part in model.modules() if isinstance(part, torch.nn.Linear)) - head
    attention = 4 * config.num_hidden_layers * model.model.layers[0].self_attn.q_proj.out_features
    prefill_flops = PROMPT_LENGTH * (2 * body + attention * PROMPT_LENGTH / 2) + 2 * head
    decode_flops = 2 * (body + head) + attention * (PROMPT_LENGTH + DECODED / 2)
    print(f"peak: {peak / 1e9:.0f} GFLOP/s a thread")
    ways = {"etude": (_engine_times, engine_model), "Transformers": (_generate_times, model)}
    for batch in batches:
        times: dict[str, list[list[float]]] = {name: [] for name in ways}
        for repetition in range(REPETITIONS if batch < 32 else 1):
            for name in list(ways)[:: -1 if repetition % 2 else 1]:
                run, of = ways[name]
                times[name].append(run(of, _prompts(of, batch, group, repetition)))
        rates = {}
        for name, runs in times.items():
            step = statistics.median(spent for run in runs for spent in run[2:])
            prefill = statistics.median(run[0] for run in runs)
            rates[name] = batch / step
            prompts = -(-batch // group) if name == "etude" else batch  # the engine computes a shared prompt once
            shares = prompts * prefill_flops / prefill / peak, batch * decode_flops / step / peak
            print(f"{batch} {name}: {rates[name]:.1f} tokens a CPU s, share of the peak", end=" ")
            print(f"prefill {shares[0]:.2f}, decode {shares[1]:.2f}", flush=True)
        print(f"{batch}: x {rates['etude'] / rates['Transformers']:.2f}", flush=True)


def _peak() -> float:
    """Returns the FLOP a CPU second of a large float32 product, the best of several."""
    square, best = torch.randn(2048, 2048), 0.0
    for _ in range(8):
        start = time.process_time()
        square @ square
        best = max(best, 2 * 2048**3 / (time.process_time() - start))
    return best


def _prompts(model: Any, batch: int, group: int, seed: int) -> list[list[int]]:
    rng = random.Random(seed)
    prompts = [
        [rng.randrange(model.config.vocab_size) for _ in range(PROMPT_LENGTH)] for _ in range(-(-batch // group))
    ]
    return [prompts[i // group] for i in range(batch)]


def _engine_times(model: Any, prompts: list[list[int]]) -> list[float]:
    """Returns the CPU seconds of the prefill and of each decode step."""
    batch = len(prompts)
    engine = NativeEngine(model, NativeEngineOptions(max_num_seqs=batch, max_num_batched_tokens=batch * PROMPT_LENGTH))
    compute, ends = engine._compute, [time.process_time()]

    def timed(plan: Any) -> Any:
        result = compute(plan)
        ends.append(time.process_time())
        return result

    engine._compute = timed  # type: ignore[method-assign]

    async def main() -> None:
        names = [str(i) for i in range(batch)]
        engine.open(names)
        requests = zip(names, prompts, range(batch))
        await asyncio.gather(
            *(engine.generate(n, p, SamplingParams(max_tokens=DECODED, seed=i)) for n, p, i in requests)
        )

    asyncio.run(main())
    return [after - before for before, after in pairwise(ends)]


def _generate_times(model: Any, prompts: list[list[int]]) -> list[float]:
    """As `_engine_times`, of Transformers' `generate`."""
    ends = [time.process_time()]

    def mark(ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        ends.append(time.process_time())
        return scores

    ids = torch.tensor(prompts)
    options = GenerationConfig(do_sample=True, top_k=0, max_new_tokens=DECODED, pad_token_id=0)
    model.generate(ids, attention_mask=torch.ones_like(ids), generation_config=options, logits_processor=[mark])
    return [after - before for before, after in pairwise(ends)]


SIZES = ((128, 4, 2048), (256, 8, 32000), (512, 8, 2048), (1024, 8, 2048))  # hidden size, layers, vocabulary


def step_threads() -> None:
    """Prints the wall time of decode steps and of the longest prefill, with one thread and with two."""
    for hidden, layer_count, vocabulary in SIZES:
        torch.manual_seed(0)
        heads = max(hidden // 64, 2)
        config = Qwen3Config(
            vocab_size=vocabulary,
            hidden_size=hidden,
            intermediate_size=3 * hidden,
            num_hidden_layers=layer_count,
            num_attention_heads=heads,
            num_key_value_heads=heads // 2,
            head_dim=64,
            max_position_embeddings=4096,
            tie_word_embeddings=True,
        )
        model = Qwen3ForCausalLM(config)
        flops = 2 * sum(parameter.numel() for parameter in model.parameters())
        for rows in (1, 4, 16, 64, 256):
            times = {threads: _step_times(model, rows, threads) for threads in (1, 2, 1, 2)}
            print(f"hidden size {hidden}, {flops / 2e6:.1f} M parameters, {rows} rows:", end=" ")
            for kind, tokens in zip(("decode", "prefill"), (rows, rows * 32)):
                one, two = (times[threads][kind] * 1e3 for threads in (1, 2))
                print(f"{kind} {tokens * flops / 1e9:.2f} GFLOP {one:.2f} ms, {two / one:.2f} with two;", end=" ")
            print(flush=True)


def _step_times(model: Any, rows: int, threads: int) -> dict[str, float]:
    """Returns the seconds of the median decode step and of the prefill of `rows` trajectories with 32-token prompts."""
    engine = NativeEngine(model, NativeEngineOptions(max_num_seqs=rows))
    compute, times = engine._compute, []

    def timed(plan: Any) -> Any:
        torch.set_num_threads(threads)
        start = time.perf_counter()
        result = compute(plan)
        times.append((plan.tokens, time.perf_counter() - start))
        return result

    engine._compute = timed  # type: ignore[method-assign]

    async def main() -> None:
        names = [str(i) for i in range(rows)]
        engine.open(names)
        params = SamplingParams(max_tokens=24)
        prompts = ([(7 * i + 3 * j) % 1000 for j in range(32)] for i in range(rows))
        await asyncio.gather(*(engine.generate(n, p, params) for n, p in zip(names, prompts)))

    asyncio.run(main())
    prefill = max(times)[1]
    return {"prefill": prefill, "decode": statistics.median(spent for tokens, spent in times if tokens == rows)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="folder of a small Hugging Face model")
    parser.add_argument("--trajectories", type=int, nargs="+", default=[64, 256, 64, 1024, 64])
    parser.add_argument("--width", type=int, default=256, help="max_num_seqs")
    parser.add_argument("--dtype")
    parser.add_argument("--errors", action="store_true")
    parser.add_argument("--layers", action="store_true")
    parser.add_argument("--compile", action="store_true")
    parser.add_argument("--decode", action="store_true")
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 8, 32, 64])
    parser.add_argument("--group", type=int, default=1, help="rows that have one prompt")
    parser.add_argument("--step-threads", action="store_true")
    given = parser.parse_args()
    if given.step_threads:
        return step_threads()
    if given.model is None:
        parser.error("--model is missing")
    torch.set_num_threads(1)
    if given.errors:
        errors(given.model)
    elif given.decode:
        decode(given.model, given.batches, given.group)
    elif given.layers:
        layers(load_causal_lm(given.model), given.compile)
    else:
        cost(load_causal_lm(given.model), given.trajectories, given.width, given.dtype)


if __name__ == "__main__":
    main()
