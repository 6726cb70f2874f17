"""The ranks of `etude doctor --gpu --gpus N`: processes with a device each.

Invariant: they join and learn through the code that Ray's ranks run, and a failure of one ends all.
"""

from __future__ import annotations

import pickle
import time
from dataclasses import replace
from datetime import timedelta
from functools import partial
from os import environ
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch.multiprocessing import spawn

from etude.distributed.rank_process import ProcessOptions, RankProcess, Reply, unpack_error
from etude.metrics import add_metrics, finish_metrics
from etude.options import TrainOptions
from etude.options.training import Strategy
from etude.protocol import DataProto
from etude.workers import TrainWorker
from etude.workers.role import Placement

STRATEGIES: tuple[Strategy, ...] = ("ddp", "fsdp2")
_HOST, _SECONDS = "127.0.0.1", 120.0


def learn_on_ranks(
    options: TrainOptions, device: str, batch: DataProto, ranks: int, updates: int, folder: Path
) -> dict[Strategy, tuple[dict[str, float], float]]:
    """Starts `ranks` processes that make updates with equal shares of the rows of `batch`. Returns for each strategy the
    metrics of the first update, and the seconds of one of `updates` others. `device`: cuda (each process has one) or cpu.

    Raises:
        Exception: a process failed; the text has its traceback.
    """
    limit = timedelta(seconds=_SECONDS)
    stores = [dist.TCPStore(_HOST, 0, is_master=True, wait_for_workers=False, timeout=limit) for _ in STRATEGIES]
    ports = [store.port for store in stores]
    spawn(_learn, (ranks, ports, options, device, batch.chunk(ranks), updates, folder), nprocs=ranks)
    every = [pickle.loads((folder / f"rank-{rank}").read_bytes()) for rank in range(ranks)]
    return {
        strategy: (finish_metrics(add_metrics(metrics for metrics, _ in found)), max(seconds for _, seconds in found))
        for strategy, found in zip(STRATEGIES, zip(*every))
    }


def _learn(
    rank: int,
    ranks: int,
    ports: list[int],
    options: TrainOptions,
    device: str,
    shares: list[DataProto],
    updates: int,
    folder: Path,
) -> None:
    if device == "cuda":  # as Ray does, a process is shown one GPU
        shown = environ.get("CUDA_VISIBLE_DEVICES") or ",".join(map(str, range(ranks)))
        environ["CUDA_VISIBLE_DEVICES"] = shown.split(",")[rank]
    found = []
    for strategy, port in zip(STRATEGIES, ports):
        actor = replace(options.actor, strategy=strategy)
        own = replace(options, actor_rollout_ref=replace(options.actor_rollout_ref, actor=actor))
        names = {"WORLD_SIZE": ranks, "RANK": rank, "LOCAL_WORLD_SIZE": ranks, "LOCAL_RANK": rank, "MASTER_PORT": port}
        given = {name: str(value) for name, value in names.items()} | {"MASTER_ADDR": _HOST}
        process, gpu = RankProcess(ProcessOptions.of_this_process()), "cuda:0" if device == "cuda" else None
        _value(process.build(given, _SECONDS, gpu, TrainWorker, ((own, Placement(device=device)), {})))
        _value(process.call("init_model", ((), {}), None))
        update = partial(process.call, "update_actor", ((shares[rank],), {}), None)
        first, began = _value(update()), time.perf_counter()
        for _ in range(updates):
            _value(update())  # metrics are the CPU's: it has waited for them
        found.append((first, (time.perf_counter() - began) / updates))
        _value(process.close())
    (folder / f"rank-{rank}").write_bytes(pickle.dumps(found))


def _value(reply: Reply) -> Any:
    if reply.error is not None:
        raise unpack_error(reply.error)
    return reply.value
