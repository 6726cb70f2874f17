"""What a batch costs on its way between processes.

    python benchmarks/data_plane.py proto [--mebibytes 64] [--rounds 9]

`proto`: a `DataProto` through Ray's object store beside a plain dict of the same arrays, in one run: seconds of a put and a
get, and bytes. Rounds of the two alternate; each figure is the median of its rounds.
"""

from __future__ import annotations

import argparse
import pickle
import statistics
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import ray
import torch

from etude.protocol import DataProto


def training_batch(nbytes: int, width: int = 4096) -> DataProto:
    """About `nbytes` of the columns of a training batch."""
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
    """Bytes of `value` in pickle protocol 5, out-of-band buffers included."""
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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["proto"])
    parser.add_argument("--mebibytes", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=9)
    options = parser.parse_args()
    ray.init(
        num_cpus=2,
        include_dashboard=False,
        log_to_driver=False,
        object_store_memory=4 * (options.mebibytes << 20) + (80 << 20),
    )
    try:
        {"proto": proto}[options.what](options)
    finally:
        ray.shutdown()


if __name__ == "__main__":
    main()
