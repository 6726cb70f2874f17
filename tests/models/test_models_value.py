"""ValueModel: zero at birth, one value a position, the same after saving."""

import pytest
import torch

from etude.errors import ConfigError
from etude.models import (
    TinyModelSpec,
    ValueModel,
    build_tiny_model,
    build_tiny_tokenizer,
    load_value_model,
    save_pretrained,
)
from etude.models.value import VALUE_HEAD_FILE

SPEC = TinyModelSpec(hidden_size=16, num_layers=1, num_heads=2, num_kv_heads=1, intermediate_size=24, vocab_size=300)
TOKENIZER = build_tiny_tokenizer(["1 + 2"], SPEC.vocab_size)
IDS = torch.tensor([[5, 6, 7, 8], [9, 10, 11, 12]])


def fresh():
    return ValueModel(build_tiny_model(SPEC, TOKENIZER).model)


def trained():
    model = fresh()
    with torch.no_grad():
        model.head.weight.normal_(generator=torch.Generator().manual_seed(0))
        model.head.bias.fill_(0.5)
    return model


def test_a_new_head_says_nothing_but_learns():
    model = fresh()
    values = model(IDS)
    assert values.shape == (2, 4)
    assert torch.equal(values, torch.zeros(2, 4))
    (values - 1).square().mean().backward()
    assert model.head.weight.grad.abs().sum() > 0


def test_arguments_reach_the_backbone():
    model = trained()
    mask = torch.tensor([[0, 0, 1, 1]])
    positions = torch.tensor([[0, 0, 0, 1]])
    padded = model(IDS[:1], attention_mask=mask, position_ids=positions)
    assert torch.allclose(padded[:, 2:], model(IDS[:1, 2:]), atol=1e-6)
    assert not torch.allclose(model(IDS[:1])[:, 2:], padded[:, 2:], atol=1e-4)
    embedded = model(inputs_embeds=model.backbone.embed_tokens(IDS))
    assert torch.allclose(embedded, model(IDS))


def test_half_precision_backbones_give_float32_values():
    model = trained()
    model.backbone.to(torch.bfloat16)
    assert model(IDS).dtype == torch.float32


def test_saved_and_loaded(tmp_path):
    model = trained()
    save_pretrained(model, TOKENIZER, tmp_path)
    assert (tmp_path / "config.json").is_file()
    assert (tmp_path / VALUE_HEAD_FILE).is_file()
    assert torch.equal(load_value_model(tmp_path)(IDS), model(IDS))


def test_a_causal_lm_becomes_a_value_model(tmp_path):
    causal = build_tiny_model(SPEC, TOKENIZER)
    save_pretrained(causal, TOKENIZER, tmp_path)
    model = load_value_model(tmp_path)
    assert torch.equal(model(IDS), torch.zeros(2, 4))
    hidden = causal.model(IDS).last_hidden_state
    assert torch.equal(model.backbone(IDS).last_hidden_state, hidden)


@pytest.mark.parametrize("damage", ["width", "junk"])
def test_a_head_that_does_not_fit(damage, tmp_path):
    model = trained()
    if damage == "width":
        model.head = torch.nn.Linear(8, 1)
    save_pretrained(model, TOKENIZER, tmp_path)
    if damage == "junk":
        (tmp_path / VALUE_HEAD_FILE).write_bytes(b"junk")
    with pytest.raises(ConfigError, match="not the value head") as error:
        load_value_model(tmp_path)
    assert "\n" not in str(error.value)
    assert VALUE_HEAD_FILE in str(error.value)
