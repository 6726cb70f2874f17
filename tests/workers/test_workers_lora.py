"""LoRA in the workers: only adapters learn, the engine samples with them, the reference is the model without them."""

import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from options_stage import changed
from ranks_stage import Case, World, assert_alike, uneven_batch
from safetensors.torch import load_file
from workers_stage import (
    SPEC,
    TEXTS,
    WITH_REF,
    gap,
    learn,
    learnable,
    policy,
    prompts,
    save_model,
    tiny_options,
    update,
    weights_of,
)

from etude.distributed import InProcessWorkerGroup
from etude.errors import ConfigError, MissingExtraError
from etude.models import build_tiny_model, build_tiny_tokenizer, load_causal_lm, load_value_model, save_pretrained
from etude.models.lora import ADAPTER_FOLDER, has_adapters, merged_weights
from etude.models.quantized import quantized_layers
from etude.options import ActorOptions, OptimOptions, RefOptions
from etude.options.training import ModelOptions, ValueModelOptions
from etude.workers import CriticWorker, TrainWorker

peft = pytest.importorskip("peft")
LORA = {"lora_rank": 4, "lora_alpha": 8.0}


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    return save_model(tmp_path_factory.mktemp("lora"))


def adapted(path, **given):
    model = ModelOptions(path=path, **{**LORA, **given.pop("model", {})})
    actor = ActorOptions(ppo_mini_batch_size=2, optim=OptimOptions(lr=3e-2))
    return policy(path, **{"model": model, "actor": actor, **given})


def critic(path, **model):
    """(group, its only worker), with no model loaded yet."""
    options = tiny_options(path)
    options = changed(options, critic=replace(options.critic, model=ValueModelOptions(**model)))
    group = InProcessWorkerGroup(CriticWorker, 1, options)
    return group, group._workers[0]


def learn_a_little(group, steps=3):
    for step in range(steps):
        figures = update(group, learnable(group, prompts(seed=step + 1)), step + 1)
    return figures


def test_new_adapters_change_no_bit(path):
    (plain, _), (group, worker) = policy(path), adapted(path)
    assert has_adapters(worker.model)
    one, other = (learnable(each, prompts()) for each in (plain, group))
    for column in ("responses", "rollout_log_probs", "old_log_probs"):
        assert torch.equal(one.batch[column], other.batch[column])


@pytest.mark.parametrize(
    ("given", "tolerance"),
    [({}, 1e-4), ({"rollout": {"dtype": "bfloat16"}}, 0.3), ({"model": {"enable_gradient_checkpointing": True}}, 1e-4)],
)
def test_the_engine_samples_with_what_was_learned(path, given, tolerance):
    group, _ = adapted(path, **given)
    before = learnable(group, prompts(seed=9))
    learn_a_little(group)
    after = learnable(group, prompts(seed=9))
    assert gap(after) <= tolerance
    again = before.batch["old_log_probs"] - group.compute_log_prob(before).batch["old_log_probs"]
    assert float(again.abs().max()) > 0.5  # it learned something


def test_only_adapters_learn(path):
    group, worker = adapted(path)
    before = weights_of(worker.model)
    learn_a_little(group, 2)
    moved = {name for name, tensor in worker.model.state_dict().items() if not torch.equal(tensor, before[name])}
    assert moved == {name for name in before if ".lora_" in name}
    assert set(worker._optimizer._parameters) == {p for name, p in worker.model.named_parameters() if ".lora_" in name}


def test_the_reference_is_the_base_bit_for_bit_and_no_second_model(path, monkeypatch):
    loaded = []
    load = TrainWorker.load_policy
    monkeypatch.setattr(
        TrainWorker, "load_policy", lambda self, dtype, *place: loaded.append(dtype) or load(self, dtype)
    )
    group, worker = adapted(path, algorithm=WITH_REF, ref=RefOptions())
    assert loaded == ["float32"]
    learn_a_little(group)
    rows = learnable(group, prompts(seed=4))
    plain, _ = policy(path)
    expected = plain.compute_log_prob(rows).batch["old_log_probs"]
    assert torch.equal(group.compute_ref_log_prob(rows).batch["ref_log_prob"], expected)
    assert not torch.equal(rows.batch["old_log_probs"], expected)
    assert {n for n, p in worker.model.named_parameters() if p.requires_grad} == {
        n for n in weights_of(worker.model) if ".lora_" in n
    }
    assert torch.equal(group.compute_log_prob(rows).batch["old_log_probs"], rows.batch["old_log_probs"])


def test_a_checkpoint_holds_the_merged_model_and_a_peft_folder(path, tmp_path):
    group, worker = adapted(path)
    learn_a_little(group)
    rows = learnable(group, prompts(seed=4))
    expected = rows.batch["old_log_probs"]
    group.save_checkpoint(str(tmp_path))
    merged = load_causal_lm(tmp_path / "actor" / "huggingface")
    assert not has_adapters(merged)
    with_peft = peft.PeftModel.from_pretrained(load_causal_lm(path), tmp_path / "actor" / ADAPTER_FOLDER)
    for model in (merged, with_peft.get_base_model()):
        worker._actor.model = model
        model.set_attn_implementation("etude_packed")
        found = group.compute_log_prob(rows).batch["old_log_probs"]
        torch.testing.assert_close(found, expected, atol=1e-5, rtol=0)
    assert (tmp_path / "actor" / ADAPTER_FOLDER / "adapter_config.json").is_file()


def test_a_restored_run_goes_on_bit_for_bit(path, tmp_path):
    group, worker = adapted(path)
    learn_a_little(group, 2)
    group.save_checkpoint(str(tmp_path))
    rows = learnable(group, prompts(seed=4))
    update(group, rows, 3)
    other, restored = adapted(path)
    other.load_checkpoint(str(tmp_path))
    update(other, rows, 3)
    expected = weights_of(worker.model)
    assert all(torch.equal(expected[name], tensor) for name, tensor in restored.model.state_dict().items())


def test_a_critic_learns_with_adapters_and_its_head(path, tmp_path):
    group, worker = critic(path, **LORA)
    group.init_model()
    before = weights_of(worker.model)
    batch = uneven_batch()
    for _ in range(2):
        learn(group, batch, "critic")
    moved = {name for name, tensor in worker.model.state_dict().items() if not torch.equal(tensor, before[name])}
    assert moved == {name for name in before if ".lora_" in name or name.startswith("head.")}
    expected = group.compute_values(batch).batch["values"]
    group.save_checkpoint(str(tmp_path))
    other, _ = critic(path, **LORA)
    other.init_model()
    other.load_checkpoint(str(tmp_path))
    assert torch.equal(other.compute_values(batch).batch["values"], expected)
    worker._engine.model = load_value_model(tmp_path / "critic" / "huggingface")
    worker._engine.model.backbone.set_attn_implementation("etude_packed")
    torch.testing.assert_close(group.compute_values(batch).batch["values"], expected, atol=1e-5, rtol=0)


@pytest.mark.parametrize("role", ["actor", "critic"])
def test_two_ranks_learn_as_one(path, role, monkeypatch):
    options = changed(tiny_options(path), model=ModelOptions(path=path, **LORA))
    options = changed(options, critic=replace(options.critic, model=ValueModelOptions(**LORA)))
    worker_cls = {"actor": TrainWorker, "critic": CriticWorker}[role]
    one, two = (
        World(worker_cls, options, ranks).learn(monkeypatch, Case({}, role=worker_cls.role)) for ranks in (1, 2)
    )
    assert_alike(one, two)


def test_the_keys_choose_rank_scale_and_layers(path, tmp_path):
    def factors(**given):
        _, worker = adapted(path, model=given)
        return {n: tuple(p.shape) for n, p in worker.model.named_parameters() if p.requires_grad}, worker.model

    some, _ = factors(lora_rank=3, target_modules=("q_proj", "v_proj"), exclude_modules=r".*layers\.1\..*")
    assert {name.split(".lora_")[0] for name in some} == {f"model.layers.0.self_attn.{x}_proj" for x in "qv"}
    assert {min(shape) for shape in some.values()} == {3}
    everything, model = factors(lora_alpha=2.0)
    assert {name.split(".")[4] for name in everything} == {
        *(f"{x}_proj" for x in ("q", "k", "v", "o", "gate", "up", "down"))
    }
    layer = model.model.layers[0].mlp.up_proj
    torch.nn.init.ones_(layer.lora_B["default"].weight)
    added = dict(merged_weights(model))["model.layers.0.mlp.up_proj.weight"] - layer.base_layer.weight
    torch.testing.assert_close(added, 0.5 * layer.lora_A["default"].weight.sum(0).expand_as(added))


def test_the_critics_keys_are_its_own(path):
    group, worker = critic(
        path, lora_rank=2, lora_alpha=6.0, target_modules=("q_proj",), exclude_modules=r".*layers\.1\..*"
    )
    group.init_model()
    layers = {n: part for n, part in worker.model.named_modules() if hasattr(part, "lora_A")}
    assert list(layers) == ["backbone.layers.0.self_attn.q_proj"]
    assert [part.scaling["default"] for part in layers.values()] == [3.0]


def test_what_cannot_be_adapted_is_one_line(path, monkeypatch):
    with pytest.raises(ConfigError, match=r"model.target_modules=nothing: .*nothing"):
        adapted(path, model={"target_modules": ("nothing",)})
    monkeypatch.setitem(__import__("sys").modules, "peft", None)
    with pytest.raises(MissingExtraError, match=r"pip install 'etude\[lora\]'"):
        adapted(path)


def test_of_a_mixture_the_linear_layers_are_adapted(tmp_path):
    """Its experts are one tensor, which adapters of linear layers do not fit."""
    tokenizer = build_tiny_tokenizer(TEXTS, 400)
    save_pretrained(build_tiny_model(replace(SPEC, architecture="qwen3_moe"), tokenizer), tokenizer, tmp_path)
    group, worker = adapted(str(tmp_path))
    learn_a_little(group)
    assert {name.rpartition(".")[2] for name, part in worker.model.named_modules() if hasattr(part, "lora_A")} == {
        *("q_proj", "k_proj", "v_proj", "o_proj")
    }
    group.update_weights(4)
    assert gap(learnable(group, prompts(seed=9))) <= 1e-4
    group.save_checkpoint(str(tmp_path / "saved"))
    saved = load_file(tmp_path / "saved" / "actor" / "huggingface" / "model.safetensors")
    assert saved.keys() == load_file(tmp_path / "model.safetensors").keys()
    with pytest.raises(ConfigError, match=r"model\.target_modules=q_proj,down_proj: .*experts is no linear layer"):
        adapted(str(tmp_path), model={"target_modules": ("q_proj", "down_proj")})


def test_other_engines_get_merged_weights(path, tmp_path):
    group, worker = adapted(path)
    learn_a_little(group, 2)
    save_pretrained(worker.model, None, tmp_path)
    written = load_file(Path(tmp_path) / "model.safetensors")
    assert written.keys() == load_file(Path(path) / "model.safetensors").keys()
    for name, tensor in dict(merged_weights(worker.model)).items():
        assert name not in written or torch.equal(tensor, written[name])


# -- a base in 4 bits ----------------------------------------------------------------------------------------------


def quantised(path, **given):
    pytest.importorskip("bitsandbytes")
    return adapted(path, **{**given, "model": {"quantization": "nf4", **given.get("model", {})}})


def plain_twin(worker, folder):
    """The same model without bitsandbytes: its layers have, as floats, the weights that the quantised ones compute with."""
    save_pretrained(worker.model, worker.tokenizer, folder)
    return str(folder)


def test_a_base_in_four_bits_computes_and_learns_as_the_same_weights_in_floats(path, tmp_path):
    group, worker = quantised(path, algorithm=WITH_REF, ref=RefOptions())
    layers = dict(quantized_layers(worker.model))
    assert len(layers) == 14  # all but the head
    assert all(layer.weight.dtype == torch.uint8 for layer in layers.values())
    assert {p.dtype for p in worker.model.parameters() if p.requires_grad} == {torch.float32}
    twin_path = plain_twin(worker, tmp_path)
    other, twin = adapted(twin_path, algorithm=WITH_REF, ref=RefOptions())
    original = load_file(Path(path) / "model.safetensors")["model.layers.0.mlp.up_proj.weight"]
    rounded = load_file(tmp_path / "model.safetensors")["model.layers.0.mlp.up_proj.weight"]
    assert 0.02 < float((rounded - original).norm() / original.norm()) < 0.2  # 4 bits are coarse
    for step in (1, 2, 3):
        rows = learnable(group, prompts(seed=step))
        assert gap(rows) <= 1e-4  # the engine samples from what the trainer computes with
        expected = other.compute_log_prob(rows).batch["old_log_probs"]
        torch.testing.assert_close(rows.batch["old_log_probs"], expected, atol=1e-4, rtol=0)
        references = [each.compute_ref_log_prob(rows).batch["ref_log_prob"] for each in (group, other)]
        torch.testing.assert_close(*references, atol=1e-4, rtol=0)
        for each in (group, other):
            update(each, rows, step)
        adapters = dict(twin.model.named_parameters())
        for name, parameter in worker.model.named_parameters():
            if parameter.requires_grad:
                torch.testing.assert_close(parameter, adapters[name], atol=3e-3, rtol=0)
    assert float((rows.batch["old_log_probs"] - references[0]).abs().max()) > 0.1  # it learned something


@pytest.mark.parametrize(("given", "tolerance"), [({}, 1e-4), ({"rollout": {"dtype": "bfloat16"}}, 0.3)])
def test_what_was_learned_over_four_bits_is_sampled_saved_and_restored(path, tmp_path, given, tolerance):
    group, worker = quantised(path, **given)
    learn_a_little(group)
    rows = learnable(group, prompts(seed=4))
    assert gap(rows) <= tolerance
    group.save_checkpoint(str(tmp_path))
    saved = load_file(tmp_path / "actor" / "huggingface" / "model.safetensors")
    assert {name: tensor.shape for name, tensor in saved.items()} == {
        name: tensor.shape for name, tensor in load_file(Path(path) / "model.safetensors").items()
    }
    other, restored = quantised(path, **given)
    other.load_checkpoint(str(tmp_path))
    for each in (group, other):
        update(each, rows, 4)
    expected = weights_of(worker.model)
    assert all(torch.equal(expected[name], tensor) for name, tensor in restored.model.state_dict().items())
    restored.load_checkpoint(str(tmp_path))
    merged = load_causal_lm(tmp_path / "actor" / "huggingface")
    merged.set_attn_implementation("etude_packed")
    restored._actor.model = merged
    found = other.compute_log_prob(rows).batch["old_log_probs"]
    torch.testing.assert_close(found, rows.batch["old_log_probs"], atol=1e-4, rtol=0)


def test_a_critic_over_four_bits_learns_with_adapters_and_its_head(path):
    pytest.importorskip("bitsandbytes")
    group, worker = critic(path, **LORA, quantization="nf4")
    group.init_model()
    assert len(list(quantized_layers(worker.model))) == 14
    before = weights_of(worker.model)
    for _ in range(2):
        learn(group, uneven_batch(), "critic")
    moved = {name for name, tensor in worker.model.state_dict().items() if not torch.equal(tensor, before[name])}
    assert moved == {name for name in before if ".lora_" in name or name.startswith("head.")}


@pytest.mark.parametrize("role", ["actor", "critic"])
def test_weights_that_cannot_be_quantised_are_one_line(path, monkeypatch, role):
    monkeypatch.setitem(sys.modules, "bitsandbytes", None)
    if role == "actor":
        options = tiny_options(path, model=ModelOptions(path=path, **LORA, quantization="nf4"))
        group = InProcessWorkerGroup(TrainWorker, 1, options)
    else:
        group, _ = critic(path, **LORA, quantization="nf4")
    with pytest.raises(MissingExtraError, match=r"model.quantization=nf4.*pip install 'etude\[bitsandbytes\]'"):
        group.init_model()


def test_a_device_without_four_bit_kernels_is_one_line(path):
    pytest.importorskip("bitsandbytes")
    with pytest.raises(
        ConfigError, match=r"model.quantization=nf4: bitsandbytes .* cannot compute on meta: "
    ) as raised:
        load_causal_lm(path, device="meta", quantization="nf4")
    assert "\n" not in str(raised.value)
