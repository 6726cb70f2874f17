"""What an update keeps for its backward pass: with gradient checkpointing less, and the gradients stay."""

import platform
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import psutil
import pytest
import torch
from options_stage import changed
from ranks_stage import uneven_batch
from workers_stage import learn, save_model, tiny_options

from etude.checks.setup import check_placement
from etude.distributed import InProcessWorkerGroup
from etude.errors import ConfigError
from etude.models.heap import trim_heap
from etude.options.training import ModelOptions, ValueModelOptions
from etude.workers import CriticWorker, TrainWorker
from etude.workers.role import HERE, Placement


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    return save_model(tmp_path_factory.mktemp("memory"))


def update(role, options, placement=HERE):
    """Bytes kept for the backward pass of one update, beside the weights, and the gradients that it stepped with."""
    group = InProcessWorkerGroup({"actor": TrainWorker, "critic": CriticWorker}[role], 1, options, placement)
    group.init_model(1)
    worker, kept, gradients = group._workers[0], {}, []
    weights = {parameter.data_ptr() for parameter in worker.model.parameters()}
    step = worker._optimizer.step

    def recorded():
        gradients.extend(p.grad.clone() for p in worker._optimizer._parameters)
        return step()

    def keep(tensor):
        if tensor.untyped_storage().data_ptr() not in weights:
            kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    worker._optimizer.step = recorded
    if role == "critic":  # with the new head's zeros no layer has a gradient
        torch.nn.init.normal_(worker.model.head.weight, generator=torch.Generator().manual_seed(1))
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        learn(group, uneven_batch(), role)
    return sum(kept.values()), gradients


@pytest.mark.parametrize("decided", ["options", "placement"])
@pytest.mark.parametrize("role", ["actor", "critic"])
def test_checkpointing_keeps_less_and_changes_no_gradient(path, role, decided):
    usual = frugal = tiny_options(path)
    if decided == "placement":
        pass
    elif role == "actor":
        frugal = changed(usual, model=ModelOptions(path=path, enable_gradient_checkpointing=True))
    else:
        model = ValueModelOptions(enable_gradient_checkpointing=True)
        frugal = changed(usual, critic=replace(usual.critic, model=model))
    plain, expected = update(role, usual)
    less, gradients = update(role, frugal, Placement(recomputes=decided == "placement"))
    assert less < plain / 2
    assert len(gradients) == len(expected)
    for found, wanted in zip(gradients, expected):
        torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("key", ["actor_rollout_ref.model", "critic.model"])
def test_ligers_kernels_need_a_gpu(path, key):
    usual = tiny_options(path)
    actor, critic = ModelOptions(path=path, use_liger=key[0] == "a"), ValueModelOptions(use_liger=key[0] == "c")
    with pytest.raises(ConfigError, match=rf"{key}.use_liger=true needs a GPU"):
        check_placement(changed(usual, model=actor, critic=replace(usual.critic, model=critic)), "cpu")


@pytest.mark.slow
@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="only glibc says what its heaps hold")
def test_a_large_free_heap_goes_back_to_the_system():
    def fill_heap_and_free():  # blocks too small for a mapping of their own, below one that stays
        blocks = [torch.ones(200_000) for _ in range(2_000)]
        kept.append(torch.ones(200_000))
        del blocks

    kept, process = [], psutil.Process()
    with ThreadPoolExecutor(1) as pool:
        pool.submit(fill_heap_and_free).result()
        before = process.memory_info().rss
        trim_heap()
        assert before - process.memory_info().rss > 2**30
