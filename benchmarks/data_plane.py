"""What a batch costs on its way between processes.

    python benchmarks/data_plane.py proto [--mebibytes 64] [--rounds 31]
    python benchmarks/data_plane.py plane [--mebibytes 1024] [--rounds 5] [--blocks 8] [--queue]
    python benchmarks/data_plane.py driver [--lengths 256,1024,4096,16384] [--ranks 2]

`proto`: a `DataProto` through Ray's object store beside a plain dict of the same arrays, in one run: seconds of a put and a
get, and bytes. Rounds of the two alternate; each figure is the median of its rounds.

`plane`: a batch through a data plane (put by the driver in one or several blocks, then got whole), beside one copy of its
tensors in memory.

`driver`: bytes that cross between the driver and its workers in one training step on Ray, for answers of several lengths:
arguments and results as they are pickled, and what the driver fetches.
"""

from __future__ import annotations

import argparse
import pickle
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import ray
import torch

from etude.distributed import DataPlane
from etude.distributed.queue_store import QueueStore
from etude.distributed.ray_store import RayStore
from etude.protocol import DataProto


def training_batch(nbytes: int, width: int = 4096) -> DataProto:
    """Makes a batch with about `nbytes` in the columns of a training batch."""
    rows = max(1, nbytes // (width * (4 * 8 + 2 * 4)))
    ids = torch.randint(0, 50_000, (rows, width))
    columns = {name: ids.clone() for name in ("input_ids", "attention_mask", "position_ids", "response_mask")}
    columns |= {name: torch.randn(rows, width) for name in ("old_log_probs", "advantages")}
    return DataProto.from_dict(columns, {"uid": [f"1.0-{row}" for row in range(rows)]}, {"temperature": 1.0})


def seconds(work: Callable[[], Any]) -> float:
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


def wire_bytes(value: Any) -> int:
    """Returns the bytes of `value` in pickle protocol 5, out-of-band buffers included."""
    buffers: list[pickle.PickleBuffer] = []
    stream = pickle.dumps(value, protocol=5, buffer_callback=buffers.append)
    return len(stream) + sum(buffer.raw().nbytes for buffer in buffers)


def through_the_store(value: Any) -> None:
    ray.get(ray.put(value))


def proto(options: argparse.Namespace) -> None:
    batch = training_batch(options.mebibytes << 20)
    plain: dict[str, np.ndarray] = {name: tensor.numpy() for name, tensor in batch.batch.items()}
    plain["uid"] = batch.non_tensor_batch["uid"]
    took: dict[str, list[float]] = {"DataProto": [], "dict of arrays": []}
    for _ in range(options.rounds + 1):
        for name, value in (("DataProto", batch), ("dict of arrays", plain)):
            took[name].append(seconds(lambda value=value: through_the_store(value)))
    ours, peer = (statistics.median(each[1:]) for each in took.values())
    sizes = wire_bytes(batch), wire_bytes(plain)
    print(f"{'':16}{'put + get':>12}{'bytes':>14}")
    for name, time_, size in zip(took, (ours, peer), sizes):
        print(f"{name:16}{time_ * 1e3:9.2f} ms{size:14,d}")
    print(f"{'ratio':16}{ours / peer:12.2f}{sizes[0] / sizes[1]:14.3f}")


def copy_of(batch: DataProto) -> None:
    {name: tensor.clone() for name, tensor in batch.batch.items()}


def through(plane: DataPlane, batch: DataProto, blocks: int) -> None:
    ids = [str(row) for row in range(len(batch))]
    size = -(-len(ids) // blocks)
    for start in range(0, len(ids), size):
        plane.put(ids[start : start + size], batch[start : start + size])
    assert len(plane.get(ids)) == len(batch)
    plane.evict(ids)


def plane(options: argparse.Namespace) -> None:
    batch = training_batch(options.mebibytes << 20)
    nbytes = sum(tensor.nbytes for tensor in batch.batch.values())
    planes = {"in process": DataPlane(), "Ray objects": DataPlane(RayStore())}
    if options.queue:
        planes["TransferQueue"] = DataPlane(QueueStore.start())
    work = {"one copy": lambda: copy_of(batch)}
    for name, each in planes.items():
        for blocks in (1, options.blocks):
            work[f"{name}, {blocks} block{'s' * (blocks > 1)}"] = partial(through, each, batch, blocks)
    took: dict[str, list[float]] = {name: [] for name in work}
    for _ in range(options.rounds + 1):
        for name, each in work.items():
            took[name].append(seconds(each))
    base = statistics.median(took["one copy"][1:])
    print(f"{nbytes / 2**20:.0f} MiB")
    for name, times in took.items():
        print(f"{name:26}{statistics.median(times[1:]):8.3f} s{statistics.median(times[1:]) / base:8.2f} copies")
    for each in planes.values():
        each.close()


def driver(options: argparse.Namespace) -> None:
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests"))
    from house_stage import ACTOR, ROLLOUT, Tiny
    from ray_stage import LONG_LOOP, counted_bytes

    from etude.models import TinyModelSpec, build_tiny_model, load_tokenizer, save_pretrained
    from etude.quickstart.prepare import prepare
    from etude.trainer.run import train

    folder = Path(tempfile.mkdtemp(prefix="etude-driver-"))
    prepare(folder, 1)
    (folder / "agent.py").write_text("")
    (folder / "loops.py").write_text(LONG_LOOP)
    tokenizer = load_tokenizer(folder / "model")
    lengths = [int(length) for length in options.lengths.split(",")]
    spec = TinyModelSpec(hidden_size=32, num_layers=1, intermediate_size=64, max_position_embeddings=max(lengths) + 256)
    save_pretrained(build_tiny_model(spec, tokenizer), tokenizer, folder / "sft" / "huggingface")
    print(f"{'tokens':>8}{'driver, bytes':>15}{'one int64 column':>18}")
    for length in lengths:
        name, run = f"long_{length}", folder / str(length)
        (folder / "loops.yaml").write_text(f"- {{name: {name}, _target_: 'loops.py:LongAnswers', length: {length}}}")
        config = Tiny(folder).config(
            run,
            f"{ROLLOUT}.agent={{default_agent_loop:{name},agent_loop_config_path:{folder}/loops.yaml}}",
            f"{ROLLOUT}.multi_turn.format=hermes",
            f"data.max_response_length={length}",
            f"{ACTOR}.use_kl_loss=true",
            f"{ACTOR}.ppo_mini_batch_size=1",
            f"{ACTOR}.ppo_max_token_len_per_gpu={length + 128}",
            "custom_reward_function.path=null",
            "trainer.backend=ray",
            f"trainer.n_gpus_per_node={options.ranks}",
            "trainer.total_training_steps=1",
        )
        with counted_bytes() as counts:
            train(config)
        print(f"{length:8d}{sum(counts.values()):15,d}{8 * 8 * length:18,d}", flush=True)
        if options.verbose:
            print("   ", ", ".join(f"{method} {size:,d}" for method, size in sorted(counts.items())))
    shutil.rmtree(folder)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["proto", "plane", "driver"])
    parser.add_argument("--mebibytes", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--blocks", type=int, default=8)
    parser.add_argument("--queue", action="store_true", help="TransferQueue too")
    parser.add_argument("--lengths", default="256,1024,4096,16384")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--verbose", action="store_true", help="by method, too")
    options = parser.parse_args()
    ray.init(
        address="local",
        num_cpus=max(4, options.ranks),
        include_dashboard=False,
        log_to_driver=False,
        object_store_memory=3 * (options.mebibytes << 20) + (160 << 20),
    )
    try:
        {"proto": proto, "plane": plane, "driver": driver}[options.what](options)
    finally:
        ray.shutdown()


if __name__ == "__main__":
    main()
