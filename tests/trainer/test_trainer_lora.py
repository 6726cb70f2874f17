"""Whole runs with LoRA: the engine follows, the base stays, a resumed run ends with the same bits."""

import pytest
import torch
from house_stage import ACTOR, same, weights
from safetensors.torch import load_file

from etude.trainer.interrupts import Interrupts
from etude.trainer.ppo import PPOTrainer
from etude.trainer.run import train
from etude.trainer.setup import prepare

pytest.importorskip("peft")
LORA = ("actor_rollout_ref.model.lora_rank=4", f"{ACTOR}.optim.lr=1e-2")


def test_three_steps_with_a_reference(tiny, tmp_path):
    config = tiny.config(tmp_path, *LORA, f"{ACTOR}.use_kl_loss=true", f"{ACTOR}.ppo_epochs=2")
    trainer = PPOTrainer(prepare(config))
    trainer.init_workers()
    worker = trainer.groups.actor._workers[0]
    distances = []
    for _ in range(3):
        figures = trainer.training_step(Interrupts(lambda text: None))
        assert figures["training/rollout_probs_diff_mean"] < 1e-4
        distances.append(figures["actor/kl_loss"])
    assert 0 < distances[0] < distances[-1]  # the first step's second epoch already differs from the base
    saved = load_file(tiny.model / "model.safetensors")
    base = {name.replace(".base_layer", ""): tensor for name, tensor in worker.model.state_dict().items()}
    assert all(torch.equal(base[name], tensor) for name, tensor in saved.items())


def test_a_resumed_run_ends_with_the_same_bits(tiny, tmp_path):
    common = (*LORA, "algorithm.adv_estimator=gae", "critic.model.lora_rank=2", "trainer.save_freq=1")
    common = (*common, "trainer.max_actor_ckpt_to_keep=null")
    train(tiny.config(tmp_path / "whole", *common, "trainer.total_training_steps=3"))
    train(tiny.config(tmp_path / "parts", *common, "trainer.total_training_steps=2"))
    train(tiny.config(tmp_path / "parts", *common, "trainer.total_training_steps=3"))
    for role in ("actor", "critic"):
        ended = [tmp_path / run / "global_step_3" / role for run in ("whole", "parts")]
        assert same(*(weights(tmp_path / run, 3, role) for run in ("whole", "parts")))
        assert (ended[0] / "lora_adapter" / "adapter_model.safetensors").is_file()
