"""Weights that travel by name: chunks of full tensors, their copy in another model, and its checksums."""

import pytest
import torch

from etude.errors import EtudeError
from etude.models import TinyModelSpec, ValueModel, build_tiny_model, build_tiny_tokenizer
from etude.models.lora import add_adapters, merged_weights
from etude.models.named_weights import (
    WeightCopy,
    checksum,
    full_state,
    value_checksum,
    weight_checksums,
)
from etude.options import TrainedModelOptions

SPEC = TinyModelSpec(hidden_size=32, num_layers=2, intermediate_size=64, vocab_size=300, seed=3)


def copy_weights(model, chunks):
    copy = WeightCopy(model)
    for chunk in chunks:
        copy.copy(chunk)
    copy.check()


@pytest.fixture(scope="module")
def tokenizer():
    return build_tiny_tokenizer(["What is 2 + 3?"] * 4, 300)


def tiny(tokenizer, seed, dtype=torch.float32, **spec):
    return build_tiny_model(TinyModelSpec(**{**vars(SPEC), "seed": seed, **spec}), tokenizer).to(dtype)


def test_a_copy_has_the_tensors_that_were_sent(tokenizer):
    source, target = tiny(tokenizer, 1), tiny(tokenizer, 2)
    places = {name: tensor.data_ptr() for name, tensor in target.state_dict().items()}
    copy_weights(target, full_state(source, bucket_bytes=10_000))
    for name, tensor in source.state_dict().items():
        assert torch.equal(target.state_dict()[name], tensor)
        assert target.state_dict()[name].data_ptr() == places[name]
    assert weight_checksums(source) == weight_checksums(target)


def test_chunks_are_bounded_and_hold_every_tensor_once(tokenizer):
    model = tiny(tokenizer, 1)
    chunks = list(full_state(model, bucket_bytes=10_000))
    assert len(chunks) > 3
    assert all(len(chunk) == 1 or sum(tensor.nbytes for _, tensor in chunk) <= 10_000 for chunk in chunks)
    names = [name for chunk in chunks for name, _ in chunk]
    tied = model.get_output_embeddings().weight is model.get_input_embeddings().weight
    assert tied
    assert sorted(names) == sorted(name for name, _ in model.named_parameters())


def test_adapters_are_merged_and_weights_rounded_once(tokenizer):
    adapted, target = tiny(tokenizer, 1), tiny(tokenizer, 2, torch.bfloat16)
    add_adapters(adapted, TrainedModelOptions(lora_rank=4))
    with torch.no_grad():
        for name, parameter in adapted.named_parameters():
            if "lora_B" in name:
                parameter.normal_(std=0.1)
    copy_weights(target, full_state(adapted, dtype=torch.bfloat16))
    merged = dict(merged_weights(adapted))
    assert merged.keys() == target.state_dict().keys()
    assert all(torch.equal(tensor, merged[name].to(torch.bfloat16)) for name, tensor in target.state_dict().items())


def test_a_value_model_has_its_head(tokenizer):
    source, target = (ValueModel(tiny(tokenizer, seed).model) for seed in (1, 2))
    with torch.no_grad():
        source.head.weight.normal_()
    copy_weights(target, full_state(source))
    assert torch.equal(source.head.weight, target.head.weight)


def test_what_does_not_fit_names_the_tensor(tokenizer):
    source, target = tiny(tokenizer, 1), tiny(tokenizer, 2)
    chunks = list(full_state(source, bucket_bytes=10_000))
    with pytest.raises(EtudeError, match=r"'model\.norm\.weight' of the engine's model was not sent"):
        copy_weights(target, [[(n, t) for n, t in chunk if n != "model.norm.weight"] for chunk in chunks])
    with pytest.raises(EtudeError, match=r"the engine's model has no tensor 'model\.x'"):
        copy_weights(target, [[("model.x", torch.zeros(1))]])
    with pytest.raises(EtudeError, match=r"'model\.norm\.weight' has shape \(3,\), in the engine's model \(32,\)"):
        copy_weights(target, [[("model.norm.weight", torch.zeros(3))]])
    overwritten = [*chunks, [("lm_head.weight", source.lm_head.weight + 1)]]  # tied: the embedding is not what was sent
    with pytest.raises(EtudeError, match=r"'model\.embed_tokens\.weight' is not in the engine's model what was sent"):
        copy_weights(target, overwritten)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64, torch.int8])
def test_a_checksum_depends_on_every_bit_and_its_place(dtype):
    tensor = torch.arange(24).reshape(2, 3, 4).to(dtype)
    changed = [tensor.flip(axis) for axis in range(3)] + [tensor.roll(1, 2)]
    swapped = tensor.flatten().clone()
    swapped[[3, 17]] = swapped[[17, 3]]
    flipped = tensor.clone()
    flipped.view(torch.uint8).view(-1)[40 % flipped.nbytes] ^= 1
    others = {checksum(other) for other in (*changed, swapped.view(2, 3, 4), flipped)}
    assert len(others) == 6
    assert checksum(tensor.clone()) == checksum(tensor) not in others
    assert checksum(torch.tensor(1.0)) != checksum(torch.tensor(2.0))
    assert checksum(torch.zeros(0, 3)) == 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_checksum_of_values_depends_on_every_value_and_on_no_place(dtype):
    tensor = torch.randn(4, 6).to(dtype)
    moved = torch.cat([tensor.flatten()[torch.randperm(24)], torch.zeros(5, dtype=dtype)])
    assert value_checksum(moved) == value_checksum(tensor)
    for bit in range(8 * tensor.element_size()):
        other = tensor.clone()
        other.view(torch.uint8).view(-1)[bit // 8] ^= 1 << bit % 8
        assert value_checksum(other) != value_checksum(tensor)
