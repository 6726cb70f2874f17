"""The critic worker: values of contexts, updates towards returns, checkpoints."""

import pytest
import torch
from workers_stage import learn, learnable, policy, prompts, tiny_options

from etude.distributed import InProcessWorkerGroup
from etude.errors import CheckpointError, ConfigError
from etude.metrics import add_metrics, finish_metrics
from etude.workers import CriticWorker


@pytest.fixture(scope="module")
def batch(model_path):
    """Rolled-out rows with made-up returns: one for each prompt."""
    group, _ = policy(model_path)
    rolled = learnable(group, prompts())
    mask = rolled.batch["response_mask"]
    rolled.batch["returns"] = torch.tensor([0.0, 0.0, 1.0, 1.0, 2.0, 2.0, 3.0, 3.0])[:, None] * mask
    return rolled


def critic(model_path, **given):
    group = InProcessWorkerGroup(CriticWorker, 1, tiny_options(model_path, **given))
    group.init_model()
    return group, group._workers[0]


def distance(group, batch):
    mask = batch.batch["response_mask"].bool()
    return float((group.compute_values(batch).batch["values"] - batch.batch["returns"])[mask].square().mean())


def with_values(group, batch):
    columns = batch.select(deepcopy=True)
    columns.batch["values"] = group.compute_values(batch).batch["values"]
    return columns


def test_a_new_head_values_nothing_and_updates_approach_the_returns(model_path, batch):
    group, _ = critic(model_path)
    assert not group.compute_values(batch).batch["values"].any()
    errors = [distance(group, batch)]
    for _ in range(6):
        figures = finish_metrics(add_metrics(learn(group, with_values(group, batch), "critic")))
        errors.append(distance(group, batch))
    assert {"critic/vf_loss", "critic/grad_norm", "critic/lr"} <= figures.keys()
    assert errors[-1] < 0.5 * errors[0]
    values = group.compute_values(batch).batch["values"]
    assert not values[~batch.batch["response_mask"].bool()].any()


def test_a_damaged_checkpoint_and_a_missing_model_are_one_line(model_path, tmp_path):
    group, _ = critic(model_path)
    group.save_checkpoint(str(tmp_path))
    (tmp_path / "critic" / "state" / ".metadata").write_text("nonsense")
    with pytest.raises(CheckpointError, match=r"critic/state: cannot be read"):
        group.load_checkpoint(str(tmp_path))
    with pytest.raises(ConfigError, match=r"critic\.model\.path is not set"):
        critic(None)
