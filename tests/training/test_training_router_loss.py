"""The load-balancing loss of a mixture's routers: Transformers' own over the whole mini-batch, however that is cut."""

import copy

import numpy as np
import pytest
import torch
from transformers.models.qwen3_moe.modeling_qwen3_moe import load_balancing_loss_func

from etude.errors import ConfigError
from etude.metrics import finish_metrics
from etude.models import TinyModelSpec, build_tiny_model, build_tiny_tokenizer
from etude.protocol import DataProto
from etude.training import OptimizerSet, OptimOptions, PolicyLearner
from etude.trajectory import ROUTED_EXPERTS, RoutedExperts

COEF, MANY = 0.7, 10_000
TOKENIZER = build_tiny_tokenizer(["A few words to have tokens from."], 300)
SPEC = TinyModelSpec(
    architecture="qwen3_moe", hidden_size=32, num_layers=2, intermediate_size=48, initializer_range=0.3
)
PROMPT = list(range(20, 40))
# (prompt, response, its mask)
ROWS = [
    (PROMPT, [50, 51, 52, 53], [1, 1, 0, 1]),
    (PROMPT, [60, 61], [1, 1]),  # shares its prompt
    (PROMPT, [50, 51, 70, 71, 72], [1, 1, 1, 0, 0]),  # and more; two tokens after all that is learned
    ([7, 8, 9], [80, 81, 82], [0, 1, 1]),
    ([7], [90], [0]),  # nothing is learned
]


@pytest.fixture
def model():
    made = build_tiny_model(SPEC, TOKENIZER).double()
    made.set_experts_implementation("eager")  # the grouped product takes no float64
    return made


def build_batch(rows=ROWS, experts=None):
    before, after = (max(len(row[part]) for row in rows) for part in (0, 1))
    ids, attention = torch.zeros(2, len(rows), before + after, dtype=torch.long)
    mask = torch.zeros(len(rows), after, dtype=torch.long)
    for i, (prompt, response, scored) in enumerate(rows):
        span = slice(before - len(prompt), before + len(response))
        ids[i, span], attention[i, span] = torch.tensor(prompt + response), 1
        mask[i, : len(response)] = torch.tensor(scored)
    columns = {"input_ids": ids, "attention_mask": attention, "response_mask": mask}
    if experts is not None:
        columns[ROUTED_EXPERTS] = np.array([*experts, None], dtype=object)[:-1]
    return DataProto.from_single_dict(columns)


def computed(row):
    """The tokens of a row that lead to something learned."""
    prompt, response, mask = row
    return (prompt + response)[: len(prompt) + max(i for i, flag in enumerate(mask) if flag)]


def expected_gradients(model):
    """(the loss, gradients of -Σ log p / count + COEF · Transformers' loss)."""
    logits, log_probs = [], []
    for row in ROWS[:-1]:
        prompt, response, mask = row
        output = model(input_ids=torch.tensor([computed(row)]), use_cache=False, output_router_logits=True)
        logits.append(output.router_logits)
        log_p = output.logits[0].log_softmax(-1)
        log_probs += [log_p[len(prompt) + i - 1, response[i]] for i, flag in enumerate(mask) if flag]
    layers = tuple(torch.cat(layer) for layer in zip(*logits))
    uneven = load_balancing_loss_func(layers, SPEC.num_experts, SPEC.num_experts_per_tok)
    (-torch.stack(log_probs).mean() + COEF * uneven).backward()
    return float(uneven.detach()), {name: p.grad for name, p in model.named_parameters()}


def update(model, batch, max_tokens, coef=COEF):
    """(figures, gradients) of an update whose weights stay."""
    optimizer, found = OptimizerSet(model, OptimOptions(lr=0.0, weight_decay=0.0, clip_grad=None), None), {}
    step = optimizer.step
    optimizer.step = lambda: found.update({n: p.grad.clone() for n, p in model.named_parameters()}) or step()
    engine = PolicyLearner(model, max_tokens=max_tokens, optimizer=optimizer, router_aux_loss_coef=coef)

    def loss(log_probs, _, micro, scale):
        return -(log_probs * micro.batch["response_mask"]).sum() / scale.batch_num_tokens, {}

    return finish_metrics(engine.update(batch, loss, 1.0)), found


@pytest.mark.parametrize("max_tokens", [MANY, 30, 1])
@pytest.mark.parametrize("checkpointing", [False, True])
def test_loss_and_gradients_are_transformers_own_over_the_whole_mini_batch(model, max_tokens, checkpointing):
    uneven, expected = expected_gradients(copy.deepcopy(model))
    if checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    figures, found = update(model, build_batch(), max_tokens)
    assert figures["router_aux_loss"] == pytest.approx(uneven, rel=1e-6)
    assert uneven > SPEC.num_experts_per_tok * 1.01  # not even: its least is k
    for name, gradient in expected.items():
        torch.testing.assert_close(found[name], gradient, atol=1e-6, rtol=0, msg=lambda m, name=name: f"{name}: {m}")
    _, without = update(copy.deepcopy(model), build_batch(), max_tokens, 0.0)
    assert any(not torch.allclose(found[name], without[name], atol=1e-6) for name in found)


def test_replayed_experts_are_what_is_counted(model):
    rows, layers = ROWS[:1], SPEC.num_layers
    tokens = len(computed(rows[0]))
    sent = np.tile(np.array([0, 1], dtype=np.uint16), (tokens, layers, 1))
    experts = RoutedExperts(sent.tobytes(), layers, 2)
    figures, _ = update(model, build_batch(rows, [experts]), MANY)
    shares = []
    for part in model.modules():
        if type(part).__name__ == "Qwen3MoeTopKRouter":
            part.register_forward_hook(lambda r, given, out: shares.append(out[0].detach().softmax(-1)[:, :2].sum()))
    update(model, build_batch(rows, [experts]), MANY, 0.0)
    assert len(shares) == layers
    expected = SPEC.num_experts * sum(map(float, shares)) / (tokens * layers)
    assert figures["router_aux_loss"] == pytest.approx(expected, rel=1e-6)


def test_a_model_without_routers_is_refused():
    dense = build_tiny_model(TinyModelSpec(hidden_size=16, num_layers=1), TOKENIZER)
    with pytest.raises(ConfigError, match="router_aux_loss_coef is above 0, and the model has no routers"):
        PolicyLearner(dense, max_tokens=MANY, router_aux_loss_coef=0.1)
