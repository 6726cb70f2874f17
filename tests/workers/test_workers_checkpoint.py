"""What a role saves: whole or an error of one line, the moment of the copy, and the same for every number of ranks."""

import os
import pickle
import threading
from dataclasses import replace
from multiprocessing import get_context

import pytest
import torch
from ranks_stage import uneven_batch
from safetensors.torch import load_file
from workers_stage import learnable, policy, prompts, roles, save_model, update, weights_of

from etude.errors import CheckpointError
from etude.models import load_causal_lm
from etude.trainer.minibatches import update_batches
from etude.workers import TrainWorker
from etude.workers.checkpoint import read_state, write_state


def files_of(folder):
    return {path.relative_to(folder): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


class Runs:
    """Code in a pickle."""

    def __reduce__(self):
        return os.mkdir, (self.place,)


DAMAGE = {
    "missing": lambda index, data: index.unlink(),
    "index cut short": lambda index, data: index.write_bytes(index.read_bytes()[:100]),
    "tensors cut short": lambda index, data: data.write_bytes(data.read_bytes()[:100]),
    "tensors gone": lambda index, data: data.unlink(),
    "not an index": lambda index, data: index.write_bytes(pickle.dumps([1, 2])),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_checkpoint_is_one_line_and_changes_nothing(model_path, tmp_path, damage):
    group, worker = policy(model_path)
    group.save_checkpoint(str(tmp_path))
    state = tmp_path / "actor" / "state"
    DAMAGE[damage](state / ".metadata", state / "__0_0.distcp")
    with torch.no_grad():
        worker.model.get_input_embeddings().weight.add_(1.0)
    before = weights_of(worker.model)
    with pytest.raises(CheckpointError, match=r"actor/state: cannot be read: .") as caught:
        group.load_checkpoint(str(tmp_path))
    assert "\n" not in str(caught.value)
    assert all(torch.equal(before[name], tensor) for name, tensor in worker.model.state_dict().items())


def test_a_foreign_checkpoint_runs_no_code(tmp_path):
    code = Runs()
    code.place = str(tmp_path / "ran")
    write_state({"a": torch.ones(3)}, tmp_path / "state")
    (tmp_path / "state" / ".metadata").write_bytes(pickle.dumps(code))
    with pytest.raises(CheckpointError, match=r"names posix\.mkdir, which no index of tensors holds"):
        read_state(tmp_path / "state")
    assert not (tmp_path / "ran").exists()


def test_a_checkpoint_of_the_earlier_format_says_what_to_do(model_path, tmp_path):
    group, _ = policy(model_path)
    (tmp_path / "actor").mkdir()
    (tmp_path / "actor" / "optimizer.pt").write_bytes(b"")
    with pytest.raises(CheckpointError, match=r"older version.*start a new run from the model in .*actor/huggingface"):
        group.load_checkpoint(str(tmp_path))


def test_a_full_disk_is_one_line(tmp_path):
    (tmp_path / "state").write_text("a file where the folder goes")
    with pytest.raises(CheckpointError, match=r"state: cannot be written: .") as caught:
        write_state({"a": torch.ones(3)}, tmp_path / "state")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_copied_state_is_written_whatever_is_trained_meanwhile(model_path, tmp_path, dtype):
    group, worker = policy(model_path, model=replace(roles(model_path).model, dtype=dtype))
    update(group, learnable(group, prompts()))
    group.save_checkpoint(str(tmp_path / "now"))
    group.copy_state()
    before = weights_of(worker.model)
    update(group, learnable(group, prompts(seed=2)), 2)
    assert not all(torch.equal(before[name], tensor) for name, tensor in worker.model.state_dict().items())
    group.save_checkpoint(str(tmp_path / "copied"))
    now, copied = (read_state(tmp_path / name / "actor" / "state") for name in ("now", "copied"))
    assert now.keys() == copied.keys()
    assert all(torch.equal(now[name], tensor) for name, tensor in copied.items())
    now, copied = (files_of(tmp_path / name / "actor" / "huggingface") for name in ("now", "copied"))
    assert now == copied
    loaded = load_causal_lm(tmp_path / "copied" / "actor" / "huggingface", dtype=dtype).state_dict()
    assert all(torch.equal(before[name], tensor) for name, tensor in loaded.items())
    group.save_checkpoint(str(tmp_path / "later"))  # the copy was for one save
    assert files_of(tmp_path / "later" / "actor" / "huggingface") != copied


# -- ranks -------------------------------------------------------------------------------------------------------


def train_as_a_rank(rank, ranks, options, batch, meeting, load, save):
    """Resumes from `load`, takes a step, and saves in the background while it takes another."""
    torch.set_num_threads(1)
    if ranks > 1:
        torch.distributed.init_process_group("gloo", init_method=f"file://{meeting}", rank=rank, world_size=ranks)
    worker = TrainWorker(options, rank=rank, world_size=ranks)
    worker.init_model()
    if load is not None:
        worker.load_checkpoint(str(load))
        resumed = worker._optimizer.state_dict()
        saved = torch.load(load / "state.pt", weights_only=True)
        assert resumed.keys() == saved.keys()
        assert all(torch.equal(saved[name], tensor) for name, tensor in resumed.items())

    def step():
        for parts in update_batches(batch, options.actor, shuffle=True, seed=3, ranks=ranks):
            worker.update_actor(parts[rank])

    step()
    if rank == 0:
        torch.save(worker._optimizer.state_dict(), save / "state.pt")
    worker.copy_state()
    writing = threading.Thread(target=worker.save_checkpoint, args=(str(save),))
    writing.start()
    step()  # its collective operations are not those of the save
    writing.join()
    if ranks > 1:
        torch.distributed.destroy_process_group()


@pytest.mark.slow
def test_another_number_of_ranks_resumes(tmp_path):
    """Four ranks save, two go on, then one: each with the very tensors that were saved."""
    options = roles(save_model(tmp_path / "model"))
    context = get_context("forkserver")  # imports once
    context.set_forkserver_preload(["test_workers_checkpoint", "etude.trainer.run", "house_stage"])
    load = None
    for ranks in (4, 2, 1):
        save = tmp_path / f"of-{ranks}"
        save.mkdir()
        given = (ranks, options, uneven_batch(), tmp_path / f"meeting-{ranks}", load, save)
        processes = [context.Process(target=train_as_a_rank, args=(rank, *given)) for rank in range(ranks)]
        for process in processes:
            process.start()
        for process in processes:
            process.join(300)
            assert process.exitcode == 0
        assert len(list((save / "actor" / "state").glob("*.distcp"))) == ranks  # all write, each a part
        weights = load_file(save / "actor" / "huggingface" / "model.safetensors")
        state = torch.load(save / "state.pt", weights_only=True)
        assert all(torch.equal(state[f"model.{name}"], tensor) for name, tensor in weights.items())
        load = save
