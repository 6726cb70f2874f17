"""`DataProto`, Étude's and verl's: the same operations on 1,024 rows of 2,048 tokens.

Eight tensors of 96 MiB together, and six object columns.
"""

from __future__ import annotations

import argparse
import os
import pickle
from collections.abc import Callable
from typing import Any

from side_by_side.meter import measured, peak_mib, report, resident_mib

ROWS, TOKENS = 1024, 2048


def main() -> None:
    """Measures one contender; figures are CPU milliseconds."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("contender", choices=("etude", "verl"))
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--ray", action="store_true", help="through Ray's object store as well")
    options = parser.parse_args()
    import torch

    torch.set_num_threads(options.threads)
    if options.contender == "etude":
        from etude.protocol import DataProto
    else:
        from verl.protocol import DataProto
    data = made(DataProto)
    column = DataProto.from_dict(tensors={"values": torch.randn(ROWS, TOKENS)})
    before = resident_mib()
    figures = {}
    for name, work in operations(DataProto, data, column).items():
        readings = measured(work, options.runs)
        figures[f"{name}_cpu"], figures[f"{name}_wall"] = 1e3 * readings["cpu"], 1e3 * readings["wall"]
    if options.ray:
        figures |= _through_ray(data, options.runs)
    report({**figures, "memory": peak_mib() - before})


def made(kind: Any) -> Any:
    """Makes the batch."""
    import numpy as np
    import torch

    def ids() -> torch.Tensor:
        return torch.randint(0, 32000, (ROWS, TOKENS))

    def objects(value: Callable[[int], object]) -> Any:
        column = np.empty(ROWS, dtype=object)
        column[:] = [value(row) for row in range(ROWS)]
        return column

    floats = {name: torch.randn(ROWS, TOKENS) for name in ("old_log_probs", "ref_log_prob", "advantages", "returns")}
    masks = {name: torch.ones(ROWS, TOKENS, dtype=torch.long) for name in ("attention_mask", "response_mask")}
    return kind.from_dict(
        tensors={"input_ids": ids(), "position_ids": ids(), **masks, **floats},
        non_tensors={
            "uid": objects(lambda row: f"{row:032d}"),
            "data_source": objects(lambda row: "benchmark"),
            "raw_prompt": objects(lambda row: [{"role": "user", "content": f"question {row} " * 20}]),
            "reward_model": objects(lambda row: {"style": "rule", "ground_truth": str(row)}),
            "extra_info": objects(lambda row: {"index": row, "split": "train"}),
            "turns": objects(lambda row: row % 4),
        },
        meta_info={"global_steps": 1, "temperature": 1.0},
    )


def operations(kind: Any, data: Any, column: Any) -> dict[str, Callable[[], object]]:
    """Returns the measured operations by name."""
    import torch

    parts = data.chunk(8)
    order = torch.randperm(ROWS)
    half = list(range(0, ROWS, 2))

    def renewed() -> Any:
        return kind(batch=data.batch.clone(recurse=False), non_tensor_batch=dict(data.non_tensor_batch))

    def reordered() -> object:
        copy = renewed()
        copy.reorder(order)
        return copy

    return {
        "select": lambda: data.select(batch_keys=["input_ids", "attention_mask"], non_tensor_batch_keys=["uid"]),
        "union": lambda: renewed().union(column),
        "chunk": lambda: data.chunk(8),
        "concat": lambda: kind.concat(parts),
        "repeat": lambda: data.repeat(2, interleave=True),
        "reorder": reordered,
        "half_the_rows": lambda: data[half],
        "pickle_round_trip": lambda: pickle.loads(pickle.dumps(data, protocol=5)),
    }


def _through_ray(data: Any, runs: int) -> dict[str, float]:
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    import ray

    ray.init(
        num_cpus=1,
        include_dashboard=False,
        log_to_driver=False,
        logging_level="ERROR",
        object_store_memory=2**30,
    )
    try:
        readings = measured(lambda: ray.get(ray.put(data)), runs)
    finally:
        ray.shutdown()
    return {"ray_put_get_cpu": 1e3 * readings["cpu"], "ray_put_get_wall": 1e3 * readings["wall"]}


if __name__ == "__main__":
    main()
