"""What a run on GPUs does, walked without one: PyTorch is told of GPUs, and everything else is real."""

from contextlib import ExitStack
from unittest import mock

import torch
import torch.distributed as dist
from ranks_stage import run_ranks

from etude.distributed import rank_process
from etude.distributed.rank_process import ProcessOptions, RankProcess, network_interface
from etude.distributed.worker import Worker
from etude.options import FSDPOptions
from etude.training import build_mesh


class MeshWorker(Worker):
    def __init__(self, **place):
        super().__init__(device="cuda", **place)
        self.mesh = build_mesh(FSDPOptions(), self.world_size, self.device)


class OneGPU:
    """PyTorch as it is in a process to which Ray shows a single GPU, gloo in the place of NCCL."""

    def __init__(self):
        self.selected, self.join, self.stack = None, dist.init_process_group, ExitStack()

    def select(self, device):
        number = torch.device("cuda", device).index if isinstance(device, int) else torch.device(device).index
        if number != 0:
            raise RuntimeError(f"CUDA error: invalid device ordinal {number}")
        self.selected = number

    def init(self, backend, **given):
        assert given.pop("device_id") == torch.device("cuda", 0)  # NCCL binds to it; gloo cannot
        self.join(backend.replace("nccl", "gloo"), **given)

    def __enter__(self):
        gpu = torch.device("cuda")
        for name, value in {
            "torch.accelerator.current_accelerator": lambda *_, **__: gpu,
            "torch.accelerator.device_count": lambda: 1,
            "torch.cuda.device_count": lambda: 1,
            "torch.cuda.set_device": self.select,
            "torch.cuda.is_initialized": lambda: self.selected is not None,
            "torch.distributed.init_process_group": self.init,
        }.items():
            self.stack.enter_context(mock.patch(name, value))

    def __exit__(self, *error):
        self.stack.close()


def join_with_one_gpu(rank, ranks, port):
    dist.destroy_process_group()  # the stage's own
    process = RankProcess.__new__(RankProcess)
    process._options = ProcessOptions(".", (), 1, 30)
    process._store = dist.TCPStore("127.0.0.1", port, ranks, is_master=rank == 0, wait_for_workers=False)
    names = {"RANK": rank, "WORLD_SIZE": ranks, "LOCAL_RANK": rank, "LOCAL_WORLD_SIZE": ranks}
    given = {name: str(value) for name, value in (names | {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}).items()}
    with OneGPU():
        process._build(given, 60.0, "cuda:0", MeshWorker, ((), {}))
        return process._worker.mesh["shard"].size()


def test_ranks_with_a_gpu_each_join_and_build_a_mesh(tmp_path):
    """Ray shows each rank one GPU, number 0, whatever its LOCAL_RANK."""
    store = dist.TCPStore("127.0.0.1", 0, 1, is_master=True, wait_for_workers=False)
    port = store.port
    del store
    assert run_ranks(2, join_with_one_gpu, port, folder=tmp_path) == [2, 2]


def test_ranks_meet_over_the_interface_of_their_nodes_address(monkeypatch):
    address = mock.Mock(address="10.0.0.7")
    monkeypatch.setattr(rank_process.psutil, "net_if_addrs", lambda: {"lo": [], "eth1": [address]})
    assert network_interface("10.0.0.7") == "eth1"
    assert network_interface("10.0.0.8") is None
    assert network_interface("127.0.1.1") is None
