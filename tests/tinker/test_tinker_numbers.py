"""Losses and updates of the server against Étude's own trainer, and against the formulas written out."""

import pytest

pytest.importorskip("tinker.types")
import numpy as np
import torch
from safetensors.torch import load_file
from tinker import types
from tinker_stage import datum

from etude.models.loading import load_causal_lm
from etude.models.lora import add_adapters, is_factor, peft_name
from etude.options import OptimOptions, TrainedModelOptions
from etude.protocol import DataProto
from etude.tinker.checkpoints import Place
from etude.training import OptimizerSet, PolicyLearner, sft_step

ROWS = [[5, 9, 3, 17, 4, 8], [5, 9, 3, 2, 11], [30, 31, 32, 33, 34, 35, 36]]
WEIGHTS = [[0, 0, 1, 0.5, 2], [0, 1, 1, 1], [0, 1, 0, 0, 1, 1.0]]
ADAM = types.AdamParams(learning_rate=0.01, beta1=0.9, beta2=0.95, eps=1e-8, weight_decay=0.1, grad_clip_norm=0.5)


def with_adapters(folder):
    """The model of the server's adapters of rank 4 and seed 3."""
    model = load_causal_lm(folder)
    add_adapters(model, TrainedModelOptions(path=str(folder), lora_rank=4, lora_alpha=32.0), seed=3)
    return model


def own_batch():
    width = max(map(len, ROWS))
    padded = {"input_ids": [], "attention_mask": [], "response_mask": [], "token_weights": []}
    for row, weights in zip(ROWS, WEIGHTS):
        pad = [0] * (width - len(row))
        padded["input_ids"].append(row + pad)
        padded["attention_mask"].append([1] * len(row) + pad)
        padded["token_weights"].append([0.0, *weights, *map(float, pad)])
        padded["response_mask"].append([0, *(int(w != 0) for w in weights), *pad])
    return DataProto.from_single_dict({name: torch.tensor(value) for name, value in padded.items()})


def test_a_loss_and_an_update_are_those_of_the_supervised_trainer(server, client, folder):
    trainer = client.create_lora_training_client("tiny", rank=4, seed=3).result()
    own = with_adapters(folder)
    options = OptimOptions(lr=0.01, betas=(0.9, 0.95), weight_decay=0.1, clip_grad=0.5)
    learner = PolicyLearner(own, max_tokens=1000, optimizer=OptimizerSet(own, options, None))
    data = [datum(row, weights=weights) for row, weights in zip(ROWS, WEIGHTS)]
    for _ in range(3):
        expected = float(trainer.forward(data, "cross_entropy").result().metrics["loss:sum"])
        parts = [trainer.forward_backward([each], "cross_entropy") for each in data]  # gradients add up over requests
        trainer.optim_step(ADAM).result()
        sft_step(learner, own_batch())
        assert sum(each.result().metrics["loss:sum"] for each in parts) == pytest.approx(expected, rel=1e-5)
    path = trainer.save_state("numbers").result().path
    saved = load_file(server.service.checkpoints.path(Place.of(path)) / "adapter_model.safetensors")
    for name, weight in own.named_parameters():
        if is_factor(name):
            assert torch.allclose(saved[peft_name(name)], weight, atol=1e-5), name


def formula(name, new, old, advantage):
    """Tinker's documented loss of one sequence, and its default options."""
    ratio = (new - old).exp()
    if name == "importance_sampling":
        return -(ratio * advantage).sum()
    if name == "ppo":
        return -torch.minimum(ratio * advantage, ratio.clamp(0.8, 1.2) * advantage).sum()
    if name == "cispo":
        return -(ratio.clamp(0.8, 1.2).detach() * new * advantage).sum()
    return -(new * advantage - 0.5 * 0.05 * (new - old) ** 2).sum()


@pytest.mark.parametrize("name", ["importance_sampling", "ppo", "cispo", "dro"])
def test_a_policy_loss_and_its_gradient_are_the_formulas(client, folder, name):
    trainer = client.create_lora_training_client("tiny", rank=4, seed=3).result()
    own, random, data, total = with_adapters(folder), np.random.default_rng(0), [], 0.0
    for row in ROWS:
        log_probs = own(torch.tensor([row])).logits[0, :-1].log_softmax(-1)
        new = log_probs.gather(1, torch.tensor(row[1:])[:, None])[:, 0]
        old = (new.detach() + torch.tensor(random.normal(0, 0.3, len(new)), dtype=torch.float32)).clamp(max=-1e-3)
        advantage = torch.tensor(random.normal(0, 1, len(new)), dtype=torch.float32)
        old[0] = advantage[0] = 0.0  # a prompt's token, as the cookbook marks it
        total = total + formula(name, new[1:], old[1:], advantage[1:])
        data.append(datum(row, logprobs=old.tolist(), advantages=advantage.tolist()))
    total.backward()
    gradients = [p.grad for _, p in own.named_parameters() if p.grad is not None]
    norm = float(torch.stack([g.norm() for g in gradients]).norm())
    for run in (trainer.forward, trainer.forward_backward):
        assert run(data, name).result().metrics["loss:sum"] == pytest.approx(float(total), rel=1e-5)
    step = trainer.optim_step(types.AdamParams(learning_rate=1e-4)).result()
    assert step.metrics["grad_norm"] == pytest.approx(norm, rel=1e-4)


def test_an_adapter_changes_no_other(client):
    one, other = (client.create_lora_training_client("tiny", rank=rank, seed=1).result() for rank in (2, 4))
    data = [datum(ROWS[0], weights=[1.0] * 5)]
    before = other.forward(data, "cross_entropy").result().metrics["loss:sum"]
    waiting = [one.forward_backward(data, "cross_entropy"), other.forward_backward(data, "cross_entropy")]
    one.optim_step(types.AdamParams(learning_rate=0.1)).result()
    assert [each.result().metrics["loss:sum"] for each in waiting] == [before, before]
    assert other.forward(data, "cross_entropy").result().metrics["loss:sum"] == before
    assert one.forward(data, "cross_entropy").result().metrics["loss:sum"] != before
