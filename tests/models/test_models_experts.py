"""Replayed routing is the router's own computation with another choice: same weights of the experts, same output."""

import pytest
import torch

from etude.models import TinyModelSpec, build_tiny_model, build_tiny_tokenizer
from etude.models.experts import record_experts, replay_experts, routers

TOKENIZER = build_tiny_tokenizer(["A few words to have tokens from."], 300)
SPEC = TinyModelSpec(
    architecture="qwen3_moe", hidden_size=32, num_layers=2, intermediate_size=48, initializer_range=0.3
)
IDS = torch.tensor([list(range(20, 40))])


@pytest.fixture(params=[True, False], ids=["weights add up to 1", "weights are the router's shares"])
def model(request):
    made = build_tiny_model(SPEC, TOKENIZER).double()
    made.set_experts_implementation("eager")  # the grouped product takes no float64
    for router in routers(made):
        router.norm_topk_prob = request.param
    return made


def forward(model, experts=None):
    """The logits, and the experts that were chosen (tokens, layers, k)."""
    with torch.no_grad(), replay_experts(model, experts), record_experts(model) as chosen:
        logits = model(input_ids=IDS, use_cache=False).logits
    return logits, torch.stack(chosen, dim=1)


def test_a_replay_of_the_routers_own_choice_changes_nothing(model):
    logits, chosen = forward(model)
    replayed, again = forward(model, chosen)
    assert torch.equal(chosen, again)
    torch.testing.assert_close(replayed, logits, rtol=0, atol=1e-6)


def test_a_replay_of_another_choice_changes_the_output(model):
    logits, chosen = forward(model)
    others = (chosen + 1) % SPEC.num_experts
    replayed, again = forward(model, others)
    assert torch.equal(again, others)
    assert not torch.allclose(replayed, logits, atol=1e-3)
    unknown, own = forward(model, torch.full_like(chosen, -1))
    assert torch.equal(own, chosen)
    torch.testing.assert_close(unknown, logits, rtol=0, atol=1e-6)
