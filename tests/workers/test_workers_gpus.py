"""What a run on GPUs does, walked without one: PyTorch is told of GPUs, and everything else is real."""

import asyncio
from collections import Counter
from contextlib import ExitStack
from dataclasses import replace
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from options_stage import changed
from ranks_stage import run_ranks, uneven_batch
from safetensors.torch import load_file
from torch.distributed.fsdp import FSDPModule
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode
from workers_stage import SPEC, TEXTS, tiny_options

from etude.distributed import rank_process
from etude.distributed.rank_process import ProcessOptions, RankProcess, network_interface
from etude.distributed.worker import Worker
from etude.models import build_tiny_model, build_tiny_tokenizer, load_causal_lm, loading, save_pretrained
from etude.models.named_weights import full_tensor, own_weights
from etude.options import FSDPOptions, RunOptions
from etude.training import build_mesh, count_scored, sharding
from etude.training.microbatches import micro_batches
from etude.workers import CriticWorker, TrainWorker
from etude.workers.engine_link import EngineLink
from etude.workers.role import start_process
from etude.workers.weight_chunks import gather_objects


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
    process._options, process._records = ProcessOptions(".", (), 1, 30), rank_process._Records()
    process._store = dist.TCPStore("127.0.0.1", port, ranks, is_master=rank == 0, wait_for_workers=False)
    names = {"RANK": rank, "WORLD_SIZE": ranks, "LOCAL_RANK": rank, "LOCAL_WORLD_SIZE": ranks}
    given = {name: str(value) for name, value in (names | {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}).items()}
    with OneGPU():
        assert process.build(given, 60.0, "cuda:0", MeshWorker, ((), {})).error is None
        return process._worker.mesh["shard"].size()


@pytest.mark.slow
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


def hand_over_a_folder(rank, ranks, given):
    """(folder, whether its tensors are the actor's, as an engine's process would load them) of each way to train."""
    found = []
    for options in given:
        worker = TrainWorker(options, rank=rank, world_size=ranks)
        worker.init_model()
        loaded = {}

        async def update_weights(folder, version):
            loaded.update(folder=str(folder), own=load_causal_lm(folder).state_dict())  # noqa: B023

        engine = SimpleNamespace(shares_weights=False, update_weights=update_weights)
        link = EngineLink(engine, options.rollout, worker.bundle.chat, worker._actor, "float32")
        for version in (0, 1):
            asyncio.run(link.push(version))
        same = [torch.equal(loaded["own"][name], full_tensor(own)) for name, own in own_weights(worker.model).items()]
        found.append((loaded["folder"], all(same), len(list(link._base.glob("version-*")))))
        gather_objects(None)  # the first rank's folder ends with its link
    return found


@pytest.mark.slow
def test_the_first_rank_of_a_node_writes_the_weights_for_all_of_its_engines(model_path, tmp_path):
    rollout = {"name": "sglang", "weight_probe": False}
    plain = tiny_options(model_path)
    given = [
        changed(plain, actor=replace(plain.actor, strategy=strategy), rollout=replace(plain.rollout, **rollout))
        for strategy in ("ddp", "fsdp2")
    ]
    first, second = run_ranks(2, hand_over_a_folder, given, folder=tmp_path)
    assert first == second
    assert [(same, kept) for _, same, kept in first] == [(True, 1)] * 2


def test_an_engine_gets_memory_for_its_cache_only_after_its_weights(model_path, monkeypatch):
    """vLLM's and SGLang's tags; the allocator gives back what the update held first."""
    rollout = {"name": "sglang", "weight_probe": False, "free_cache_engine": True, "weight_transfer": "cuda_ipc"}
    worker = TrainWorker(tiny_options(model_path, rollout=rollout), rank=0, world_size=1)
    worker.init_model()
    calls = []

    class Engine:
        shares_weights = False

        async def update_weights(self, source, version):
            calls.append("load")

        async def sleep(self):
            calls.append("sleep")

        async def wake(self, *parts):
            calls.append(parts)

    monkeypatch.setattr("torch.cuda.is_initialized", lambda: True)
    monkeypatch.setattr("torch.cuda.empty_cache", lambda: calls.append("freed"))
    link = EngineLink(Engine(), worker.options.rollout, worker.bundle.chat, worker._actor, "float32")
    for step in (link.rest(), link.push(1), link.rest(), link.ready()):
        asyncio.run(step)
    assert calls == ["sleep", "freed", ("weights",), "load", "freed", ("kv_cache",), "sleep", "freed", ()]


def test_a_mixture_reaches_an_engine_on_its_gpu_under_the_names_of_its_checkpoint(tmp_path):
    """With cuda_ipc as in a folder; Transformers holds the experts of a layer in one tensor, under names of its own."""
    tokenizer = build_tiny_tokenizer(TEXTS, 400)
    save_pretrained(build_tiny_model(replace(SPEC, architecture="qwen3_moe"), tokenizer), tokenizer, tmp_path)
    rollout = {"name": "vllm", "weight_probe": False, "weight_transfer": "cuda_ipc"}
    worker = TrainWorker(tiny_options(str(tmp_path), rollout=rollout), rank=0, world_size=1)
    worker.init_model()
    sent = {}

    async def update_weights(source, version):
        sent.update(source)

    engine = SimpleNamespace(shares_weights=False, update_weights=update_weights)
    link = EngineLink(engine, worker.options.rollout, worker.bundle.chat, worker._actor, "float32")
    asyncio.run(link.push(1))
    written = load_file(tmp_path / "model.safetensors")
    assert "model.layers.1.mlp.experts.3.down_proj.weight" in written
    assert sent.keys() == written.keys()
    assert all(torch.equal(sent[name], tensor) for name, tensor in written.items())


def load_where_the_weights_are(rank, ranks, given):
    """Elements of the models that this rank loads, and whether the parts of each are the folder's."""
    found, load = [], loading._from_pretrained
    for worker_cls, options in given:
        loaded = []

        def watch(source, *arguments, **named):
            model = load(source, *arguments, **named)
            loaded.extend(p.numel() for p in model[0].parameters()) if "output_loading_info" in named else None  # noqa: B023
            return model

        with mock.patch.object(loading, "_from_pretrained", watch):
            worker = worker_cls(options, rank=rank, world_size=ranks)
            worker.init_model()
        folder = load_causal_lm(options.model.path).state_dict()
        parts = {name.removeprefix("backbone."): full_tensor(own) for name, own in own_weights(worker.model).items()}
        known = {name: folder.get(name, folder.get(f"model.{name}")) for name in parts if ".lora_" not in name}
        same = [torch.equal(parts[name], own) for name, own in known.items() if own is not None]
        tied = worker.model.get_output_embeddings() if worker_cls is TrainWorker else None
        found.append(
            (sum(loaded), len(same), all(same), tied and tied.weight is worker.model.model.embed_tokens.weight)
        )
    return found


@pytest.mark.slow
def test_only_the_first_rank_of_a_sharded_model_loads_it(model_path, tmp_path):
    options = tiny_options(model_path)
    options = changed(
        options,
        actor=replace(options.actor, strategy="fsdp2"),
        critic=replace(options.critic, strategy="fsdp2", model=replace(options.critic.model, path=model_path)),
    )
    lora = changed(options, model=replace(options.model, lora_rank=4, target_modules=("q_proj",)))
    given = [(TrainWorker, options), (CriticWorker, options), (TrainWorker, lora)]
    first, second = run_ranks(2, load_where_the_weights_are, given, folder=tmp_path)
    size = sum(parameter.numel() for parameter in load_causal_lm(model_path).parameters())
    assert [loaded for loaded, *_ in first] == [size] * 3
    assert [loaded for loaded, *_ in second] == [0] * 3
    assert [each[1:] for each in first] == [each[1:] for each in second]
    assert all(count > 20 and same and tied is not False for _, count, same, tied in first)


class Collectives(TorchDispatchMode):
    """Counts the calls of each collective."""

    def __init__(self):
        super().__init__()
        self.calls = Counter()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if function.namespace == "c10d":
            self.calls[function.name().removeprefix("c10d::")] += 1
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize(("limit", "reductions"), [(2 << 30, 1), (0, 2)])
def test_gradients_that_fit_are_reduced_once_a_step(model_path, monkeypatch, limit, reductions):
    """64 ranks without a network: the size of a shard, and the collectives of a step with several micro-batches."""
    monkeypatch.setattr(sharding, "_WHOLE_GRADIENT_BYTES", limit)
    monkeypatch.setattr(TrainWorker, "prepare_saves", lambda self: None)  # has a group of its own, over gloo
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=64)
    try:
        options = tiny_options(model_path)
        short = replace(options.actor, strategy="fsdp2", ppo_max_token_len_per_gpu=30)
        worker = TrainWorker(changed(options, actor=short), rank=0, world_size=64)
        worker.init_model()
        whole, held = (sum(count(p) for p in worker.model.parameters()) for count in (sizes, shard_sizes))
        assert whole / 64 <= held < whole / 16  # a shard has at least one row
        batch = uneven_batch().select_idxs([0, 1, 6, 10])
        batch.meta_info |= count_scored(batch) | {"compare_rollout": False}
        passes = len(micro_batches(batch, 30))
        with Collectives() as seen:
            worker.update_actor(batch)
    finally:
        dist.destroy_process_group()
    groups = sum(isinstance(part, FSDPModule) for part in worker.model.modules())
    assert passes == 2
    assert seen.calls["_reduce_scatter_base_"] == groups * reductions
    assert seen.calls["_allgather_base_"] <= 2 * groups * passes


def sizes(parameter):
    return parameter.numel()


def shard_sizes(parameter):
    return parameter.to_local().numel()


def test_determinism_on_a_gpu_is_no_warning(monkeypatch):
    """PyTorch's flash attention is deterministic only where an operation that cannot be would stop the run."""
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    found = {}
    monkeypatch.setattr("torch.use_deterministic_algorithms", lambda on, **given: found.update(on=on, **given))
    monkeypatch.setattr("torch.backends.cuda.enable_cudnn_sdp", lambda on: found.update(cudnn=on))
    start_process((), RunOptions(deterministic=True))
    assert found == {"on": True, "cudnn": False}
