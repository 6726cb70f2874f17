"""Whole runs in bfloat16 and float16: what learns, what the engine samples from, what a checkpoint holds."""

import pytest
import torch
from house_stage import ACTOR, metrics, same, weights
from safetensors.torch import load_file

from etude.models import load_causal_lm
from etude.trainer.interrupts import Interrupts
from etude.trainer.ppo import PPOTrainer
from etude.trainer.run import train
from etude.trainer.setup import prepare
from etude.workers.checkpoint import read_state

GAE = "algorithm.adv_estimator=gae"


def half(dtype):
    return f"actor_rollout_ref.model.dtype={dtype}"


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_small_steps_add_up_and_the_engine_follows(tiny, tmp_path, dtype):
    trainer = PPOTrainer(*prepare(tiny.config(tmp_path, half(dtype), f"{ACTOR}.optim.lr=1e-6")))
    trainer.init_workers()
    worker = trainer.groups.actor._workers[0]
    start = [p.detach().clone() for p in worker._optimizer._parameters]
    assert {p.dtype for p in start} == {torch.float32}
    for _ in range(3):
        figures = trainer.training_step(Interrupts(lambda text: None))
        assert figures["actor/skipped_steps"] == 0
        assert figures["training/rollout_probs_diff_mean"] < 0.02  # the engine has the actor's weights, up to rounding
    moved = [not torch.equal(a, b) for a, b in zip(start, worker._optimizer._parameters)]
    assert all(moved)
    seen = [torch.equal(p, m.to(p.dtype)) for p, m in zip(worker.model.parameters(), worker._optimizer._parameters)]
    assert all(seen)
    assert worker._manager.engine._model is worker.model
    assert worker.model.dtype == getattr(torch, dtype)


def test_what_learns_starts_from_the_saved_weights_and_computes_with_rounded_ones(tiny, tmp_path):
    trainer = PPOTrainer(*prepare(tiny.config(tmp_path, half("bfloat16"), GAE)))
    trainer.init_workers()
    saved = load_file(tiny.model / "model.safetensors")
    actor, critic = trainer.groups.actor._workers[0], trainer.groups.critic._workers[0]
    known = [
        (saved[place], rounded, exact)
        for model, optimizer in ((actor.model, actor._optimizer), (critic.model, critic._optimizer))
        for (name, rounded), exact in zip(model.named_parameters(), optimizer._parameters)
        if (place := name.replace("backbone.", "model.")) in saved
    ]
    assert len(known) >= 2 * len(saved) - 1  # the critic has a head of its own
    for weight, rounded, exact in known:
        assert torch.equal(exact, weight)
        assert torch.equal(rounded, weight.bfloat16())
    assert any(not torch.equal(weight, weight.bfloat16().float()) for weight in saved.values())


def test_a_resumed_bfloat16_run_ends_with_the_same_bits(tiny, tmp_path):
    common = (half("bfloat16"), GAE, "trainer.save_freq=1", "trainer.max_actor_ckpt_to_keep=null")
    train(tiny.config(tmp_path / "whole", *common, "trainer.total_training_steps=3"))
    for last in (2, 3):
        train(tiny.config(tmp_path / "parts", *common, f"trainer.total_training_steps={last}"))
    for role in ("actor", "critic"):
        assert same(weights(tmp_path / "whole", 3, role), weights(tmp_path / "parts", 3, role))
        whole, parts = (read_state(tmp_path / name / "global_step_3" / role / "state") for name in ("whole", "parts"))
        assert same(whole, parts)
        exact = {key: value for key, value in whole.items() if key.startswith("model.")}
        assert len(exact) > 10
        assert {tensor.dtype for tensor in exact.values()} == {torch.float32}
    assert metrics(tmp_path / "whole")[-1]["actor/loss"] == metrics(tmp_path / "parts")[-1]["actor/loss"]
    saved = load_causal_lm(tmp_path / "whole" / "global_step_3" / "actor" / "huggingface", dtype="bfloat16")
    assert {tensor.dtype for tensor in weights(tmp_path / "whole", 3).values()} == {torch.bfloat16}
    assert saved.config.dtype == torch.bfloat16
