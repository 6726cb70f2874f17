"""What updates and the native engine reach on a GPU, beside its peak: the figures of docs/performance.md.

    python benchmarks/gpu.py [--cases NAME ...] [--waits] [--kernels]

Models are random, in the shapes of Qwen2.5; updates compute in bfloat16 with float32 masters and AdamW. A case: prompts,
answers a prompt, tokens of a prompt and of an answer. A token's useful FLOP: six for each weight of a product, the head's
where the token is scored, and twelve for each key it sees, head and dimension; what checkpointing repeats is not useful.
--waits prints where the host waits for the GPU, --kernels where the GPU's time goes.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import tempfile
from collections import Counter
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, Qwen2Config

from etude.checks.gpu import Sizes, Trial, count_waits
from etude.inference import NativeEngine
from etude.models import TinyModelSpec

GIB = 2**30
SHAPES = {  # hidden, layers, heads, key heads, feed-forward, vocabulary
    "0.5B": (896, 24, 14, 2, 4864, 151_936),
    "1.5B": (1536, 28, 12, 2, 8960, 151_936),
    "tiny": (64, 2, 4, 2, 128, 512),
}


@dataclass(frozen=True)
class Case:
    shape: str
    prompts: int
    answers: int
    prompt: int
    answer: int
    lora: int = 0
    checkpointing: bool = False
    liger: bool = False
    micro: int = 16_384
    """Tokens a micro-batch."""


CASES = {
    "short": Case("0.5B", 8, 8, 512, 512),
    "checkpointing": Case("0.5B", 8, 8, 512, 512, checkpointing=True),
    "liger": Case("0.5B", 8, 8, 512, 512, liger=True),
    "long": Case("0.5B", 1, 1, 2048, 30_720, checkpointing=True, micro=32_768),
    "larger": Case("1.5B", 8, 8, 512, 512),
    "larger-lora": Case("1.5B", 8, 8, 512, 512, lora=16),
    "larger-long": Case("1.5B", 4, 4, 2048, 8192, checkpointing=True, micro=34_816),
    "tiny": Case("tiny", 2, 2, 16, 16),
}


def write_model(shape: str, folder: Path, device: str) -> None:
    """Writes the folder of a random model of a shape in `SHAPES`; without weights if `device` is none."""
    hidden, layers, heads, kv_heads, feed_forward, vocabulary = SHAPES[shape]
    config = Qwen2Config(
        hidden_size=hidden,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        intermediate_size=feed_forward,
        vocab_size=vocabulary,
        tie_word_embeddings=True,
        max_position_embeddings=40_960,
    )
    config.save_pretrained(folder)
    if device == "none":
        return
    torch.manual_seed(0)
    with torch.device(device):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    model.save_pretrained(folder)


class Bench(Trial):
    """A trial of one case."""

    def __init__(self, device: str, folder: Path, name: str, peak: float) -> None:
        self.case = case = CASES[name]
        sizes = Sizes(TinyModelSpec(vocab_size=300), 0, case.prompts, case.answers, case.prompt, case.answer)
        super().__init__(device, folder / f"tokenizer-{name}", sizes)
        self.flops, self.model = peak, folder / case.shape
        if not self.model.is_dir():
            write_model(case.shape, self.model, device)
            for file in [*(self.folder / "model").glob("*token*"), self.folder / "model/chat_template.jinja"]:
                (self.model / file.name).write_bytes(file.read_bytes())

    @property
    def path(self) -> str:
        return str(self.model)

    def options(self, model: str = "", **rollout: Any) -> Any:
        options = super().options(**rollout)
        policy, case = options.actor_rollout_ref, self.case
        model = replace(
            policy.model,
            path=self.path,
            lora_rank=case.lora,
            use_liger=case.liger,
            enable_gradient_checkpointing=case.checkpointing,
            dtype="auto",
        )
        actor = replace(policy.actor, ppo_max_token_len_per_gpu=case.micro)
        policy = replace(policy, model=model, actor=actor)
        trainer = replace(options.trainer, deterministic=False)
        return replace(options, actor_rollout_ref=policy, trainer=trainer)

    def useful(self, model: Any) -> float:
        """FLOP of an update of the batch."""
        (hidden, layers, *_), vocabulary = SHAPES[self.case.shape], SHAPES[self.case.shape][-1]
        c = self.case
        body = sum(p.numel() for p in model.parameters()) - hidden * vocabulary
        rows = c.prompts * c.answers
        tokens, scored = c.prompts * c.prompt + rows * c.answer, rows * c.answer
        seen = c.prompts * c.prompt**2 / 2 + rows * c.answer * (c.prompt + c.answer / 2)
        return 6 * body * tokens + 6 * hidden * vocabulary * scored + 12 * layers * hidden * seen


def estimate(case: Case, folder: Path) -> float:
    """Bytes that `etude check` says a GPU needs for the case's largest micro-batch, of whole groups."""
    from etude.checks.resources import estimate_memory
    from etude.checks.setup import Setup
    from etude.config import compose
    from etude.workers.role import Placement

    write_model(case.shape, folder, "none")
    options = compose(
        overrides=[
            *("algorithm.adv_estimator=reinforce_plus_plus", f"data.train_batch_size={case.prompts}"),
            *(f"data.max_prompt_length={case.prompt}", f"data.max_response_length={case.answer}"),
            *(f"actor_rollout_ref.rollout.n={case.answers}", f"actor_rollout_ref.model.path={folder}"),
            f"actor_rollout_ref.actor.ppo_mini_batch_size={case.prompts}",
            f"actor_rollout_ref.actor.ppo_max_token_len_per_gpu={case.micro}",
            f"actor_rollout_ref.model.lora_rank={case.lora}",
        ]
    )
    setup = Setup(options)
    setup.placement = Placement("cuda")
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder))
    weights, group = sum(p.numel() for p in model.parameters()), case.prompt + case.answers * case.answer
    parts = estimate_memory(setup, weights, max(1, case.micro // group) * group, case.checkpointing)
    return sum(parts.values())


def peak_flops(device: str) -> float:
    size = 8192 if device != "cpu" else 512
    left, right = (torch.randn(size, size, device=device, dtype=torch.bfloat16) for _ in range(2))
    left @ right
    trial = object.__new__(Trial)
    trial.device = torch.device(device)
    return max(16 * size**3 / trial.seconds(lambda: [left @ right for _ in range(8)]) for _ in range(3))


def update(bench: Bench, waits: bool, kernels: bool) -> str:
    """Times updates of the case's batch, after two that warm up."""
    worker, cuda = bench.worker(), bench.device.type == "cuda"
    for _ in range(2):
        worker.update_actor(bench.batch)
    if cuda:
        torch.cuda.reset_peak_memory_stats()
    seconds = min(bench.seconds(lambda: worker.update_actor(bench.batch)) for _ in range(3))
    memory = torch.cuda.max_memory_allocated() / GIB if cuda else 0.0
    case, flops = bench.case, bench.useful(worker.model)
    tokens = case.prompts * case.prompt + case.prompts * case.answers * case.answer
    with count_waits(bench) as found:
        worker.update_actor(bench.batch)
    if waits:
        for (file, line), count in Counter((each.filename, each.lineno) for each in found).most_common(12):
            print(f"    {count} waits at {file}:{line}")
    if kernels:
        with torch.profiler.profile(activities=list(torch.profiler.supported_activities())) as profile:
            worker.update_actor(bench.batch)
            bench.wait()
        order = "self_cuda_time_total" if cuda else "self_cpu_time_total"
        print(profile.key_averages().table(sort_by=order, row_limit=14, max_name_column_width=70))
    share = f"{100 * flops / seconds / bench.flops:.0f} % of the peak"
    return (
        f"{tokens / seconds:,.0f} tokens/s, {share}, {seconds:.2f} s, {memory:.1f} GiB, {len(found)} waits of the host"
    )


def sample(bench: Bench, waits: bool, kernels: bool) -> str:
    """Times the native engine over the case's prompts."""
    worker = bench.worker()
    engine, case, steps = NativeEngine(worker.model), bench.case, min(bench.case.answer, 128)
    rows = bench.batch.batch["input_ids"][:, : case.prompt].tolist()

    async def run(tokens: int) -> int:
        names = [f"{tokens}/{number}" for number in range(len(rows))]
        engine.open(names)
        params = [{"max_tokens": tokens, "temperature": 1.0, "seed": seed} for seed in range(len(rows))]
        outputs = await asyncio.gather(*(engine.generate(*each) for each in zip(names, rows, params)))
        for name in names:
            engine.close(name)
        return sum(len(output.token_ids) for output in outputs)

    made: list[int] = []
    asyncio.run(run(8))
    with count_waits(bench) as found:
        seconds = bench.seconds(lambda: made.append(asyncio.run(run(steps))))
    if waits:
        for (file, line), count in Counter((each.filename, each.lineno) for each in found).most_common(8):
            print(f"    {count} waits at {file}:{line}")
    if kernels:
        with torch.profiler.profile(activities=list(torch.profiler.supported_activities())) as profile:
            asyncio.run(run(16))
            bench.wait()
        print(profile.key_averages().table(sort_by="self_cpu_time_total", row_limit=24, max_name_column_width=50))
    speed = f"{sum(made) / seconds:,.0f} tokens/s of {len(rows)} rows"
    return f"{speed}, {seconds / steps * 1e3:.1f} ms a step, {len(found) / steps:.1f} waits a step"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--cases", nargs="+", choices=CASES, default=[name for name in CASES if name != "tiny"])
    parser.add_argument("--engine", nargs="*", choices=CASES, default=["short"], help="cases whose prompts are sampled")
    parser.add_argument("--waits", action="store_true")
    parser.add_argument("--kernels", action="store_true")
    given = parser.parse_args()
    peak = peak_flops(given.device)
    print(f"peak: {peak / 1e12:.3g} TFLOP/s in bfloat16, torch {torch.__version__}", flush=True)
    with tempfile.TemporaryDirectory() as folder:
        for name, work in [*((n, "update") for n in given.cases), *((n, "engine") for n in given.engine)]:
            try:
                bench = Bench(given.device, Path(folder), name, peak)
                done = (
                    update(bench, given.waits, given.kernels)
                    if work == "update"
                    else sample(bench, given.waits, given.kernels)
                )
                print(f"{name}, {work}: {done}", flush=True)
            except Exception as failed:
                print(f"{name}, {work}: {type(failed).__name__}: {failed}", flush=True)
            gc.collect()
            if torch.cuda.is_available():
                torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
