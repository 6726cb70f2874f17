"""Whole runs with what the training engine offers: LoRA, a mixture of experts, optimizers of other packages."""

import pytest
import torch
from house_stage import ACTOR, metrics, same, weights
from safetensors.torch import load_file

from etude.models import TinyModelSpec, build_tiny_model, load_tokenizer, save_pretrained
from etude.trainer.interrupts import Interrupts
from etude.trainer.ppo import PPOTrainer
from etude.trainer.run import train
from etude.trainer.setup import prepare

LORA = ("actor_rollout_ref.model.lora_rank=4", f"{ACTOR}.optim.lr=1e-2")


def test_three_steps_with_adapters_and_their_base_as_reference(tiny, tmp_path):
    pytest.importorskip("peft")
    config = tiny.config(tmp_path, *LORA, f"{ACTOR}.use_kl_loss=true", f"{ACTOR}.ppo_epochs=2")
    trainer = PPOTrainer(*prepare(config))
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


def test_a_resumed_run_with_adapters_ends_with_the_same_bits(tiny, tmp_path):
    pytest.importorskip("peft")
    common = (*LORA, "algorithm.adv_estimator=gae", "critic.model.lora_rank=2", "trainer.save_freq=1")
    common = (*common, "trainer.max_actor_ckpt_to_keep=null")
    train(tiny.config(tmp_path / "whole", *common, "trainer.total_training_steps=3"))
    train(tiny.config(tmp_path / "parts", *common, "trainer.total_training_steps=2"))
    train(tiny.config(tmp_path / "parts", *common, "trainer.total_training_steps=3"))
    for role in ("actor", "critic"):
        ended = [tmp_path / run / "global_step_3" / role for run in ("whole", "parts")]
        assert same(*(weights(tmp_path / run, 3, role) for run in ("whole", "parts")))
        assert (ended[0] / "lora_adapter" / "adapter_model.safetensors").is_file()


def test_three_steps_of_a_mixture_that_repeats_the_engines_routes(tiny, tmp_path):
    tokenizer = load_tokenizer(tiny.model)
    spec = TinyModelSpec(hidden_size=64, num_layers=2, intermediate_size=48, architecture="qwen3_moe", seed=1)
    save_pretrained(build_tiny_model(spec, tokenizer), tokenizer, tmp_path / "model")
    config = tiny.config(
        tmp_path / "run",
        f"actor_rollout_ref.model.path={tmp_path}/model",
        "actor_rollout_ref.rollout.enable_rollout_routing_replay=true",
        "actor_rollout_ref.model.enable_gradient_checkpointing=true",
        f"{ACTOR}.ppo_epochs=2",
        "trainer.total_training_steps=3",
    )
    train(config)
    assert all(line["training/rollout_probs_diff_mean"] < 1e-4 for line in metrics(tmp_path / "run") if line["step"])
    before, after = load_file(tmp_path / "model" / "model.safetensors"), weights(tmp_path / "run", 3)
    assert not any(torch.equal(before[name], after[name]) for name in before if "mlp.gate" in name)


@pytest.mark.parametrize(("name", "package"), [("adamw_schedule_free", "schedulefree"), ("adamw_8bit", "bitsandbytes")])
def test_a_resumed_run_with_another_packages_optimizer_ends_with_the_same_bits(tiny, tmp_path, name, package):
    pytest.importorskip(package)
    common = (f"{ACTOR}.optim.name={name}", f"{ACTOR}.optim.lr=1e-2", "trainer.max_actor_ckpt_to_keep=null")
    train(tiny.config(tmp_path / "whole", *common, "trainer.total_training_steps=3"))
    train(tiny.config(tmp_path / "parts", *common, "trainer.total_training_steps=2"))
    train(tiny.config(tmp_path / "parts", *common, "trainer.total_training_steps=3"))
    assert same(weights(tmp_path / "whole", 3), weights(tmp_path / "parts", 3))
    seen = [line for line in metrics(tmp_path / "whole") if line["step"]]
    # Old log-probs are those of the weights that sampled, also where gradients are taken at others.
    assert all(line["training/rollout_probs_diff_mean"] < 1e-4 for line in seen)
    assert any(line["actor/ppo_kl"] != 0 for line in seen) == (name == "adamw_schedule_free")


def test_weights_that_did_not_sample_are_not_compared_with_the_engine(tiny, tmp_path):
    """In bypass mode nothing computes the log-probs of those that did, from which schedule-free gradients step apart."""
    pytest.importorskip("schedulefree")
    bypass = "algorithm.rollout_correction.bypass_mode=true"
    common = (bypass, f"{ACTOR}.optim.lr=1e-2", "trainer.total_training_steps=2")
    for name in ("adamw", "adamw_schedule_free"):
        train(tiny.config(tmp_path / name, *common, f"{ACTOR}.optim.name={name}"))
    compared = [
        {"rollout_corr/k3_kl" in line for line in metrics(tmp_path / each) if line["step"]} for each in ("adamw", name)
    ]
    assert compared == [{True}, {False}]
