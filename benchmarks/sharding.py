"""Memory of a training rank: a model of some 100 million parameters, replicated or sharded over processes on this machine.

    python benchmarks/sharding.py                      # 1, 2 and 4 ranks
    python benchmarks/sharding.py --ranks 2 --layers 4
    python benchmarks/sharding.py --ranks 1 2 --layers 4 --tokens 2048 --together   # long rows, divided over the ranks

What counts is the largest resident memory of a rank over two updates, less what its process had before the model was
built: weights, gradients, AdamW's moments and activations. Ranks run on CPUs, with gloo.
"""

from __future__ import annotations

import argparse
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from transformers import Qwen3Config, Qwen3ForCausalLM

from etude.models.packable import enable_packing
from etude.options import FSDPOptions, OptimOptions
from etude.protocol import DataProto
from etude.training import OptimizerSet, PolicyLearner, build_mesh, sft_step, shard_model
from etude.training.ulysses import SequenceTeam

MIB = 1 << 20


def resident(field: str) -> int:
    """Returns VmRSS or VmHWM of this process, in bytes."""
    lines = Path("/proc/self/status").read_text(encoding="utf-8").splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith(field))


def build_model(layers: int) -> Any:
    """Builds the same model on every rank."""
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=16_000,
        hidden_size=768,
        num_hidden_layers=layers,
        num_attention_heads=12,
        num_key_value_heads=4,
        head_dim=64,
        intermediate_size=2_304,
        tie_word_embeddings=True,
    )
    model = Qwen3ForCausalLM(config)
    enable_packing(model)
    return model


def batches(steps: int, tokens: int) -> Iterator[DataProto]:
    """Yields rows of random tokens; all but the first token are trained on."""
    for step in range(steps):
        ids = torch.randint(0, 16_000, (2, tokens), generator=torch.Generator().manual_seed(step))
        mask = torch.ones_like(ids)
        mask[:, 0] = 0
        columns = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "response_mask": mask}
        yield DataProto.from_single_dict(columns)


def measure(rank: int, ranks: int, strategy: str, given: argparse.Namespace, folder: str) -> None:
    """Runs one rank, which writes its parameter count and peak memory into `folder`."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/meeting", rank=rank, world_size=ranks)
    before = resident("VmRSS")
    model = build_model(given.layers)
    size = sum(parameter.numel() for parameter in model.parameters())
    if strategy == "fsdp2":
        mesh = build_mesh(FSDPOptions(), ranks, torch.device("cpu"))
        shard_model(model, FSDPOptions(), mesh, torch.float32)
    optimizer = OptimizerSet(model, OptimOptions(lr=1e-4), None, rank=rank, world_size=ranks)
    team = SequenceTeam.join(ranks, "together") if given.together else None
    engine = PolicyLearner(model, max_tokens=512, optimizer=optimizer, team=team)
    Path("/proc/self/clear_refs").write_text(
        "5", encoding="utf-8"
    )  # the peak of building the unsharded model does not count
    for batch in batches(2, given.tokens):
        sft_step(engine, batch)
    Path(folder, f"{rank}").write_text(f"{size} {resident('VmHWM') - before}", encoding="utf-8")
    dist.destroy_process_group()


def main() -> None:
    """Prints a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="*", default=[1, 2, 4])
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--tokens", type=int, default=96, help="of each of the two rows")
    parser.add_argument("--together", action="store_true", help="all ranks compute each row together")
    given = parser.parse_args()
    os.environ["MALLOC_MMAP_THRESHOLD_"] = str(MIB)  # makes the ranks return freed memory to the system
    print("| ranks | strategy | parameters | peak a rank |\n|---|---|---|---|")
    for ranks in given.ranks:
        for strategy in ("ddp", "fsdp2") if ranks > 1 else ("ddp",):
            with tempfile.TemporaryDirectory() as folder:
                mp.spawn(measure, (ranks, strategy, given, folder), nprocs=ranks)
                read = [Path(folder, f"{rank}").read_text(encoding="utf-8").split() for rank in range(ranks)]
            largest = max(int(peak) for _, peak in read)
            print(f"| {ranks} | {strategy} | {int(read[0][0]) / 1e6:.0f} M | {largest / MIB:,.0f} MiB |", flush=True)


if __name__ == "__main__":
    main()
