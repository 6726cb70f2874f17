"""Memory and seconds of updates at sizes and numbers of GPUs that were not at hand: the tables of docs/scaling.md.

    python benchmarks/scaling.py

Memory is what `etude check` estimates for the options (`estimate_memory`), with models of shapes alone. Where the defaults
do not fit 90 % of 80 GB, the settings of `WAYS` are added in this order until they do. Seconds: useful FLOP and bytes over
what an H100 and its links do, as in `seconds`.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, LlamaConfig, Qwen2Config, Qwen3Config

from etude.checks.resources import estimate_memory
from etude.checks.setup import Setup
from etude.config import compose
from etude.workers.role import Placement

GIB, GPU_BYTES, USABLE = 2**30, 80e9, 0.9
PEAK = 784e12  # FLOP/s of a product on an H100
SHARE = 0.32  # of the peak, which updates of 1.5 B reached
LINKS = {1: float("inf"), 8: 450e9, 64: 50e9}  # bytes/s to a GPU: NVLink's; 400 Gb/s each between nodes
PROMPTS, ANSWERS, PROMPT = 8, 8, 2048  # of a batch; the rest of a context is an answer
CONTEXTS, GPUS = (8192, 32_768), (1, 8, 64)
ACTOR, MODEL = "actor_rollout_ref.actor", "actor_rollout_ref.model"
SIZES = {  # vocabulary, hidden, feed-forward, layers, heads, key heads, tied
    "0.5 B": (Qwen2Config, 151_936, 896, 4864, 24, 14, 2, True),
    "7 B": (Qwen2Config, 152_064, 3584, 18_944, 28, 28, 4, False),
    "32 B": (Qwen2Config, 152_064, 5120, 27_648, 64, 40, 8, False),
    "70 B": (LlamaConfig, 128_256, 8192, 28_672, 80, 64, 8, False),
    "235 B": (Qwen3Config, 151_936, 4096, 12_288, 94, 64, 4, False),
}
"""235 B is Qwen3's mixture, whose activations cannot be told: counted as a dense model as wide as the eight experts of 1,536
that a token meets, with all the weights of 128."""
EXPERTS = {"235 B": (128, 8)}  # experts, and those that a token meets
WAYS = (
    f"{MODEL}.enable_gradient_checkpointing=true",
    f"{ACTOR}.ppo_max_token_len_per_gpu=8192",
    f"{ACTOR}.ulysses_sequence_parallel_size=8",
    f"{MODEL}.enable_activation_offload=true",
    f"{ACTOR}.optim.offload=true",
)
"""What is set where a model does not fit, from the cheapest on; on several GPUs fsdp2 is set first."""


@dataclass(frozen=True)
class Size:
    """A model of one row of `SIZES`: the weights that it has, and those of layers that a token meets."""

    folder: Path
    weights: int
    met: int

    @classmethod
    def write(cls, name: str, folder: Path) -> Size:
        kind, vocabulary, hidden, feed_forward, layers, heads, key_heads, tied = SIZES[name]
        config = kind(
            vocab_size=vocabulary,
            hidden_size=hidden,
            intermediate_size=feed_forward,
            num_hidden_layers=layers,
            num_attention_heads=heads,
            num_key_value_heads=key_heads,
            head_dim=hidden // heads if kind is not Qwen3Config else 128,
            tie_word_embeddings=tied,
            max_position_embeddings=40_960,
        )
        config.save_pretrained(folder)
        with torch.device("meta"):
            whole = sum(p.numel() for p in AutoModelForCausalLM.from_config(config).parameters())
        met = whole - vocabulary * hidden * (1 if tied else 2)
        experts, used = EXPERTS.get(name, (1, 1))
        more = (experts / used - 1) * 3 * layers * hidden * feed_forward
        return cls(folder, whole + round(more), met)


@dataclass(frozen=True)
class Row:
    """What a GPU of `gpus` needs for an update with rows of `context` tokens, with `settings` beside the defaults."""

    gpus: int
    context: int
    settings: tuple[str, ...]
    memory: float
    computing: float
    talking: float

    @property
    def fits(self) -> bool:
        return self.memory <= USABLE * GPU_BYTES


def try_settings(size: Size, gpus: int, context: int, settings: tuple[str, ...]) -> Row:
    options = compose(
        overrides=[
            *(f"{MODEL}.path={size.folder}", "trainer.backend=ray", "algorithm.adv_estimator=grpo"),
            *(f"data.train_batch_size={PROMPTS}", f"{ACTOR}.ppo_mini_batch_size={PROMPTS}"),
            *(f"data.max_prompt_length={PROMPT}", f"data.max_response_length={context - PROMPT}"),
            *(f"actor_rollout_ref.rollout.n={ANSWERS}", f"trainer.n_gpus_per_node={min(gpus, 8)}"),
            *(f"trainer.nnodes={max(1, gpus // 8)}", *settings),
        ]
    )
    setup = Setup(options)
    setup.placement = Placement("cuda")
    actor, checkpointing = options.actor, bool(options.model.checkpointing)
    team = actor.ulysses_sequence_parallel_size if gpus > 1 else 1
    tokens = max(actor.ppo_max_token_len_per_gpu, -(-context // team))
    memory = sum(estimate_memory(setup, size.weights, tokens, checkpointing).values())
    return Row(gpus, context, settings, memory, *seconds(size, options, gpus, tokens, checkpointing))


def seconds(size: Size, options: Any, gpus: int, tokens: int, checkpointing: bool) -> tuple[float, float]:
    """(computing, talking) of an update. A token takes six FLOP for each weight that it meets, eight where layers are
    computed again, six for each weight of the head where it is scored, and 12 · layers · hidden for each token that it sees.
    A micro-batch gathers two bytes a weight twice and reduces four (`tests/workers/test_workers_gpus.py` counts the
    collectives); in one process nothing is sent, and copies of `offload` are not counted."""
    name = next(name for name in SIZES if size.folder.name == name)
    _, vocabulary, hidden, _, layers, *_ = SIZES[name]
    context = options.rollout.prompt_length + options.rollout.response_length
    answer, rows = context - PROMPT, PROMPTS * ANSWERS
    packed = PROMPTS * PROMPT + rows * answer
    seen = PROMPTS * PROMPT**2 / 2 + rows * answer * (PROMPT + answer / 2)
    again = 8 / 6 if checkpointing else 1.0
    flops = again * (6 * size.met * packed + 12 * layers * hidden * seen) + 6 * hidden * vocabulary * rows * answer
    passes = max(1, -(-packed // (tokens * gpus)))
    sent = 0.0 if options.actor.strategy == "ddp" else passes * (2 * 2 + 4) * size.weights * (gpus - 1) / gpus
    return flops / (gpus * PEAK * SHARE), sent / LINKS[gpus]


def plan(size: Size, gpus: int, context: int) -> Row:
    """The first settings that fit, else the last."""
    chosen = [f"{ACTOR}.strategy=fsdp2"] if gpus > 1 else []
    row = try_settings(size, gpus, context, tuple(chosen))
    for way in WAYS:
        if row.fits:
            break
        if "ulysses" in way and gpus == 1:
            continue
        chosen.append(way)
        row = try_settings(size, gpus, context, tuple(chosen))
    return row


def table(names: Any = SIZES) -> Iterator[str]:
    """Yields the lines of the table."""
    yield "| model | GPUs | context | GiB a GPU | seconds | of them network | set |"
    yield "|---|---|---|---|---|---|---|"
    with tempfile.TemporaryDirectory() as folder:
        for name in names:
            size = Size.write(name, Path(folder) / name)
            for gpus in GPUS:
                for context in CONTEXTS:
                    row = plan(size, gpus, context)
                    times = f"{row.computing + row.talking:,.1f} | {row.talking:,.1f}" if row.fits else "- | -"
                    numbers = [str(number) for number, way in enumerate(WAYS, 1) if way in row.settings]
                    done = ", ".join(["fsdp2"] * (gpus > 1) + numbers) or "nothing"
                    short = done if row.fits else "does not fit: more GPUs"
                    yield f"| {name} | {gpus} | {context:,} | {row.memory / GIB:,.0f} | {times} | {short} |"


if __name__ == "__main__":
    print(*table(), sep="\n")
