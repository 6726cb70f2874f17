"""What a role saves: whole or an error of one line, the moment of the copy, and the same for every number of ranks."""

import os
import pickle
import re
import threading
from dataclasses import replace

import pytest
import torch
from ranks_stage import run_ranks, shortened, uneven_batch, updates, whole_weights
from safetensors.torch import load_file
from workers_stage import learnable, policy, prompts, save_model, tiny_options, update, weights_of

from etude.distributed.dispatch import registered_methods
from etude.errors import CheckpointError
from etude.models import load_causal_lm
from etude.models.named_weights import full_tensor
from etude.options import FSDPOptions
from etude.workers import ActorRolloutRefWorker, CriticWorker, TrainWorker
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
    group, worker = policy(model_path, model=replace(tiny_options(model_path).model, dtype=dtype))
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


def test_a_copied_state_has_the_critic_on_the_policys_trunk(model_path, tmp_path):
    critic = replace(tiny_options(model_path).critic, share_trunk=True)
    group, _ = policy(model_path, critic=critic)

    def train(seed):
        batch = learnable(group, prompts(seed=seed))
        mask = batch.batch["response_mask"]
        batch.batch["old_values"], batch.batch["value_targets"] = torch.zeros(mask.shape), torch.ones(mask.shape)
        update(group, batch)

    train(1)
    group.save_checkpoint(str(tmp_path / "now"))
    group.copy_state()
    train(2)
    group.save_checkpoint(str(tmp_path / "copied"))
    group.save_checkpoint(str(tmp_path / "later"))
    now, copied, later = (read_state(tmp_path / name / "critic" / "state") for name in ("now", "copied", "later"))
    assert now.keys() == copied.keys() == later.keys()
    assert all(torch.equal(now[name], tensor) for name, tensor in copied.items())
    assert not all(torch.equal(copied[name], tensor) for name, tensor in later.items())


@pytest.mark.parametrize("role", [TrainWorker, ActorRolloutRefWorker, CriticWorker])
def test_every_role_saves_beside_its_other_calls(role):
    """Else ranks that get a save and an update in another order wait for each other for ever."""
    assert registered_methods(role)["save_checkpoint"].in_background


# -- ranks -------------------------------------------------------------------------------------------------------


def train_as_a_rank(rank, ranks, options, batch, load, save):
    """Resumes from `load`, takes a step, and saves in the background while it takes another; returns the saved state."""
    worker = TrainWorker(options, rank=rank, world_size=ranks)
    worker.init_model()

    def state():
        return {name: full_tensor(tensor).clone() for name, tensor in worker._optimizer.state_dict().items()}

    if load is not None:
        worker.load_checkpoint(str(load))
        resumed, saved = state(), torch.load(load / "state.pt", weights_only=True)
        assert resumed.keys() == saved.keys()
        assert all(torch.equal(saved[name], tensor) for name, tensor in resumed.items())
    updates(worker, options, batch)
    saved = state()
    worker.copy_state()
    writing = threading.Thread(target=worker.save_checkpoint, args=(str(save),))
    writing.start()
    updates(worker, options, batch)  # its collective operations are not those of the save
    writing.join()
    return saved if rank == 0 else None


@pytest.mark.slow
def test_another_number_of_ranks_resumes(tmp_path):
    """Four ranks save, two go on, then one, and two again, with parts of the model or with all of it: each with the very
    tensors that were saved."""
    options = shortened(tiny_options(save_model(tmp_path / "model")))
    load = None
    for ranks, strategy in ((4, "fsdp2"), (2, "ddp"), (1, "ddp"), (2, "fsdp2")):
        save = tmp_path / f"of-{ranks}-{strategy}"
        save.mkdir()
        given = shortened(options, strategy=strategy, fsdp_config=FSDPOptions(fsdp_size=2))
        state, *_ = run_ranks(ranks, train_as_a_rank, given, uneven_batch(), load, save, folder=tmp_path)
        torch.save(state, save / "state.pt")
        assert len(list((save / "actor" / "state").glob("*.distcp"))) == ranks  # all write, each a part
        weights = load_file(save / "actor" / "huggingface" / "model.safetensors")
        assert all(torch.equal(state[f"model.{name}"], tensor) for name, tensor in weights.items())
        load = save


@pytest.mark.slow
def test_a_checkpoint_of_shards_that_does_not_fit_changes_nothing(tmp_path):
    options = shortened(tiny_options(save_model(tmp_path / "model")), strategy="fsdp2")
    worker = TrainWorker(options, rank=0, world_size=1)
    worker.init_model()
    state = worker._optimizer.state_dict()
    write_state({**state, "model.model.norm.weight": torch.ones(5)}, tmp_path / "other" / "actor" / "state")
    (tmp_path / "none" / "actor").mkdir(parents=True)
    given = {"other": r"24 weights saved, 24 in use: they are not of this model", "none": r"state: cannot be read"}
    for name, message in given.items():
        for failure in run_ranks(2, fail_to_load, options, tmp_path / name, folder=tmp_path):
            assert re.search(message, failure), failure


def fail_to_load(rank, ranks, options, folder):
    worker = TrainWorker(options, rank=rank, world_size=ranks)
    worker.init_model()
    before = whole_weights(worker)
    with pytest.raises(CheckpointError) as caught:
        worker.load_checkpoint(str(folder))
    assert all(torch.equal(before[name], tensor) for name, tensor in whole_weights(worker).items())
    return str(caught.value)
