"""`python benchmarks/memory.py`: the memory that `etude check` estimates for an update, beside what an update takes.

Each shape runs two updates in a process of its own, the second with the optimizer's state, and its resident memory is
sampled every 20 ms. The models are random; no data is read.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import threading
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Shape:
    """A Llama of this shape, and one micro-batch: `rows` of `length` tokens, of which the first half is a prompt that
    `shared` of them have in common."""

    name: str
    hidden: int
    layers: int
    intermediate: int
    vocabulary: int
    rows: int
    length: int
    shared: int = 1
    checkpointing: bool = False
    lora_rank: int = 0
    dtype: str = "float32"
    scored: int | None = None
    """Scored tokens at a row's end; None: half of it."""

    @property
    def prompt(self) -> int:
        return self.length // 2 if self.scored is None else self.length - self.scored


SHAPES = (
    Shape("SmolLM2-135M, 1,024 tokens", 576, 30, 1536, 49_152, 2, 512),
    Shape("SmolLM2-135M, 2,560 tokens, shared prompts", 576, 30, 1536, 49_152, 8, 512, shared=4),
    Shape("SmolLM2-135M, 4,096 tokens, checkpointing", 576, 30, 1536, 49_152, 8, 512, checkpointing=True),
    Shape("SmolLM2-135M, 1,024 tokens, LoRA", 576, 30, 1536, 49_152, 2, 512, lora_rank=16),
    Shape(
        "SmolLM2-135M, 4,000 + 1,000 tokens, checkpointing",
        576,
        30,
        1536,
        49_152,
        1,
        5000,
        checkpointing=True,
        scored=1000,
    ),
    Shape("6 layers, 4,096 tokens", 576, 6, 1536, 49_152, 8, 512),
    Shape("wide, 2 layers, 2,048 tokens", 2048, 2, 5632, 8_192, 4, 512),
)


def write_model(shape: Shape, folder: Path) -> None:
    """Writes the folder of a random model."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        hidden_size=shape.hidden,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.hidden // 64,
        num_key_value_heads=shape.hidden // 192 or 1,
        intermediate_size=shape.intermediate,
        vocab_size=shape.vocabulary,
        tie_word_embeddings=True,
        max_position_embeddings=8192,
    )
    torch.manual_seed(0)
    LlamaForCausalLM(config).save_pretrained(folder)


def estimate(shape: Shape, folder: Path) -> float:
    """Bytes that `etude check` says an update takes."""
    from etude.checks.resources import count_weights, estimate_memory
    from etude.checks.setup import Setup
    from etude.config import compose
    from etude.options import TrainOptions
    from etude.workers.role import Placement

    values = {"path": folder, "dtype": shape.dtype, "lora_rank": shape.lora_rank}
    model = [f"actor_rollout_ref.model.{name}={value}" for name, value in values.items()]
    options = compose(overrides=[*model, "algorithm.adv_estimator=grpo"])  # no critic
    assert isinstance(options, TrainOptions)
    setup = Setup(options)
    setup.placement = Placement("cpu")
    tokens = shape.rows * shape.length - (shape.rows - shape.rows // shape.shared) * shape.prompt
    return sum(estimate_memory(setup, count_weights(str(folder)), tokens, shape.checkpointing).values())


def measure(shape: Shape, folder: Path) -> tuple[float, float]:
    """Bytes that this process has at most while it takes two updates, and CPU seconds of the second."""
    import psutil
    import torch

    from etude.algorithms import agg_loss
    from etude.models import load_causal_lm
    from etude.models.checkpointing import checkpoint_layers
    from etude.models.lora import add_adapters
    from etude.options import ModelOptions, OptimOptions
    from etude.protocol import DataProto
    from etude.training.optim import OptimizerSet
    from etude.training.policy import PolicyLearner

    torch.set_num_threads(1)
    model: Any = load_causal_lm(folder, dtype=shape.dtype)
    if shape.lora_rank:
        add_adapters(model, ModelOptions(path=str(folder), lora_rank=shape.lora_rank))
    if shape.checkpointing:
        checkpoint_layers(model)
    engine = PolicyLearner(model, max_tokens=1 << 30, optimizer=OptimizerSet(model, OptimOptions(lr=1e-6), None))
    ids = torch.randint(0, shape.vocabulary, (shape.rows, shape.length))
    half = shape.prompt
    ids[:, :half] = ids[:: shape.shared, :half].repeat_interleave(shape.shared, dim=0)
    ones = torch.ones_like(ids)
    batch = DataProto.from_single_dict({"input_ids": ids, "attention_mask": ones, "response_mask": ones[:, half:]})
    process, peak, done = psutil.Process(), [0], threading.Event()

    def watch() -> None:
        while not done.wait(0.02):
            peak[0] = max(peak[0], process.memory_info().rss)

    watcher = threading.Thread(target=watch)
    watcher.start()

    def loss(log_probs: Any, _: Any, micro: DataProto, scale: Any) -> Any:
        mask = micro.batch["response_mask"]
        return agg_loss(-log_probs, mask, "token-mean", batch_num_tokens=scale.batch_num_tokens), {}

    seconds = 0.0
    for _ in range(2):
        began = time.process_time()
        engine.update(batch, loss, 1.0)
        seconds = time.process_time() - began
    done.set()
    watcher.join()
    return float(peak[0]), seconds


def compare(shape: Shape) -> tuple[float, float, float]:
    """Returns (estimated, measured) bytes and CPU seconds of an update; measured in a new process."""
    with tempfile.TemporaryDirectory() as folder:
        write_model(shape, Path(folder))
        command = [sys.executable, __file__, "--measure", json.dumps(asdict(shape)), "--folder", folder]
        found = subprocess.run(command, capture_output=True, text=True, check=True, timeout=900)
        size, seconds = map(float, found.stdout.split()[-2:])
        return estimate(shape, Path(folder)), size, seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--measure", type=json.loads, help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.measure:
        print(*measure(Shape(**given.measure), given.folder))
        return
    print("| shape | estimated | measured | ratio | CPU s an update |\n|---|---|---|---|---|")
    for shape in SHAPES:
        expected, found, seconds = compare(shape)
        sizes = f"{expected / 2**30:.2f} GiB | {found / 2**30:.2f} GiB | {expected / found:.2f}"
        print(f"| {shape.name} | {sizes} | {seconds:.0f} |", flush=True)


if __name__ == "__main__":
    main()
