"""Chunked log-probs against torch.distributions: values, gradients, temperature, and what is kept for the backward."""

from array import array

import numpy as np
import pytest
import torch
from torch.distributions import Categorical

from etude.training import log_probs, token_log_probs
from etude.training.log_probs import Support, tokens_per_chunk

TOKENS, HIDDEN, VOCAB = 11, 6, 23


@pytest.fixture
def inputs():
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(TOKENS, HIDDEN, generator=generator)
    weight = torch.randn(VOCAB, HIDDEN, generator=generator)
    bias = torch.randn(VOCAB, generator=generator)
    return hidden, weight, bias, torch.randint(0, VOCAB, (TOKENS,), generator=generator)


def values_and_gradients(function, hidden, weight, bias, entropy_weight):
    leaves = [x.clone().requires_grad_() for x in (hidden, weight, bias)]
    probs, entropy = function(*leaves)
    ramp = torch.linspace(-1, 1, TOKENS)
    ((probs * ramp).sum() + entropy_weight * (entropy * ramp.flip(0)).sum()).backward()
    return [probs.detach(), entropy.detach(), *(leaf.grad for leaf in leaves)]


@pytest.mark.parametrize("temperature", [1.0, 0.6, 2.5])
@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("entropy_weight", [0.0, 0.7])
@pytest.mark.parametrize("chunk", [1, 4, 100])
def test_chunks_equal_the_whole(inputs, monkeypatch, temperature, recompute, entropy_weight, chunk):
    hidden, weight, bias, labels = inputs
    if recompute:
        monkeypatch.setattr(log_probs, "_KEEP", 0)

    def chunked(h, w, b):
        return token_log_probs(
            h, w, labels, bias=b, temperature=temperature, entropy_grad=entropy_weight != 0, chunk=chunk
        )

    def plain(h, w, b):
        distribution = Categorical(logits=(h @ w.T + b) / temperature)
        return distribution.log_prob(labels), distribution.entropy()

    ours = values_and_gradients(chunked, hidden, weight, bias, entropy_weight)
    expected = values_and_gradients(plain, hidden, weight, bias, entropy_weight)
    for a, b in zip(ours, expected):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("entropy_weight", [0.0, 0.7])
@pytest.mark.parametrize("chunk", [1, 4, 100])
@pytest.mark.parametrize("masks", [False, True])
def test_distributions_are_renormalised_over_their_support(
    inputs, monkeypatch, recompute, entropy_weight, chunk, masks
):
    """Whether it is given as ids or, every other one, as a bit per id."""
    hidden, weight, bias, labels = inputs
    if recompute:
        monkeypatch.setattr(log_probs, "_KEEP", 0)
    generator = torch.Generator().manual_seed(1)
    kept = torch.rand(TOKENS, VOCAB, generator=generator) < 0.3
    kept[torch.arange(TOKENS), labels] = True
    kept[3] = False
    kept[3, labels[3]] = True  # the only one
    given = [row.nonzero().squeeze(1) for row in kept]
    given[5], kept[5] = given[5][:0], True  # none given: all
    lists = [array("i", ids.tolist()) if len(ids) else None for ids in given]
    if masks:
        bits = [np.packbits(row.numpy(), bitorder="little").tobytes() for row in kept]
        lists = [ids if place % 2 or ids is None else bits[place] for place, ids in enumerate(lists)]
    support = Support.of(lists, torch.device("cpu"))

    def chunked(h, w, b):
        asks = entropy_weight != 0
        return token_log_probs(h, w, labels, bias=b, temperature=0.7, entropy_grad=asks, support=support, chunk=chunk)

    def plain(h, w, b):
        logits = ((h @ w.T + b) / 0.7).masked_fill(~kept, -torch.inf)
        logs = logits.log_softmax(dim=-1)
        entropy = -(logs.exp() * logs.masked_fill(~kept, 0.0)).sum(dim=-1)
        return logs.gather(1, labels[:, None]).squeeze(1), entropy

    ours = values_and_gradients(chunked, hidden, weight, bias, entropy_weight)
    expected = values_and_gradients(plain, hidden, weight, bias, entropy_weight)
    assert ours[0][3] == 0
    for a, b in zip(ours, expected):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)


def test_entropies_of_sure_distributions_are_exact_in_float32():
    """Of large logits, log Σ exp - Σ p · logit is off by 1e-5: by as much as such an entropy itself."""
    torch.manual_seed(0)
    hidden, weight, labels = torch.randn(400, 32), torch.randn(300, 32) * 3, torch.zeros(400, dtype=torch.long)
    _, found = token_log_probs(hidden, weight, labels)
    _, exact = token_log_probs(hidden.double(), weight.double(), labels)
    assert float(exact.min()) < 1e-3  # a sure one is among them
    torch.testing.assert_close(found.double(), exact, rtol=2e-5, atol=5e-7)


@pytest.mark.parametrize("recompute", [False, True])
def test_a_reported_entropy_carries_no_gradient(inputs, monkeypatch, recompute):
    if recompute:
        monkeypatch.setattr(log_probs, "_KEEP", 0)
    hidden, weight, _, labels = inputs
    probs, entropy = token_log_probs(hidden.requires_grad_(), weight, labels)
    assert probs.requires_grad
    assert not entropy.requires_grad


@pytest.mark.parametrize("recompute", [False, True])
def test_recomputation_keeps_no_logits(inputs, monkeypatch, recompute):
    if recompute:
        monkeypatch.setattr(log_probs, "_KEEP", 0)
    hidden, weight, _, labels = inputs
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: kept.append(x.shape) or x, lambda x: x):
        token_log_probs(hidden.requires_grad_(), weight, labels, chunk=4)
    assert any(shape == (4, VOCAB) for shape in kept) != recompute


def test_no_tokens_give_no_log_probs(inputs):
    hidden, weight, _, labels = inputs
    for result in token_log_probs(hidden[:0], weight, labels[:0]):
        assert result.shape == (0,)


def test_half_precision_states_give_float32_log_probs(inputs):
    hidden, weight, _, labels = inputs
    probs, entropy = token_log_probs(hidden.bfloat16(), weight.bfloat16(), labels)
    assert probs.dtype == entropy.dtype == torch.float32
    torch.testing.assert_close(probs, token_log_probs(hidden, weight, labels)[0], rtol=0.05, atol=0.05)


@pytest.mark.parametrize("keep", [True, False])
@pytest.mark.parametrize("entropy_grad", [True, False])
@pytest.mark.parametrize("finish", [None, lambda z: 3.0 * torch.tanh(z / 3.0)])
def test_the_gradient_is_that_of_finite_differences(inputs, monkeypatch, keep, entropy_grad, finish):
    monkeypatch.setattr(log_probs, "_KEEP", 1 << 20 if keep else 0)
    hidden, weight, bias, labels = inputs
    leaves = [x.double().requires_grad_() for x in (hidden, weight, bias)]

    def both(h, w, b):
        return token_log_probs(h, w, labels, bias=b, finish=finish, temperature=0.7, entropy_grad=entropy_grad, chunk=4)

    assert torch.autograd.gradcheck(both, leaves)


def test_extreme_logits_stay_exact(inputs):
    """Probabilities that underflow, and one that is 1 to the last bit, against float64."""
    hidden, weight, _, labels = inputs
    sharp = hidden * 40
    ours = token_log_probs(sharp.clone().requires_grad_(), weight, labels, entropy_grad=True)
    exact = Categorical(logits=sharp.double() @ weight.double().T)
    torch.testing.assert_close(ours[0].double(), exact.log_prob(labels), rtol=1e-6, atol=1e-4)
    torch.testing.assert_close(ours[1].double(), exact.entropy(), rtol=1e-4, atol=1e-4)
    leaf = sharp.clone().requires_grad_()
    sum(result.sum() for result in token_log_probs(leaf, weight, labels, entropy_grad=True)).backward()
    assert leaf.grad.isfinite().all()


def test_the_backward_pass_may_run_twice(inputs):
    hidden, weight, _, labels = inputs
    leaf = hidden.requires_grad_()
    total = token_log_probs(leaf, weight, labels)[0].sum()
    total.backward(retain_graph=True)
    once = leaf.grad.clone()
    total.backward()
    torch.testing.assert_close(leaf.grad, 2 * once)


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("chunk", [1, 4, 100])
def test_several_labels_of_a_distribution_share_its_softmax(inputs, monkeypatch, recompute, chunk):
    """Among them the same one twice, as a sampled token that is among the likeliest is."""
    if recompute:
        monkeypatch.setattr(log_probs, "_KEEP", 0)
    hidden, weight, bias, labels = inputs
    several = torch.stack([labels, labels.roll(1), labels, (labels + 3) % VOCAB], dim=1)
    ramp = torch.linspace(-1, 2, TOKENS * 4).view(TOKENS, 4)

    def found(function):
        leaves = [x.double().requires_grad_() for x in (hidden, weight, bias)]
        values, entropy = function(*leaves)
        ((values * ramp).sum() + entropy.sum()).backward()
        return [values.detach(), *(leaf.grad for leaf in leaves)]

    def chunked(h, w, b):
        return token_log_probs(h, w, several, bias=b, temperature=0.7, entropy_grad=True, chunk=chunk)

    def dense(h, w, b):
        distribution = Categorical(logits=(h @ w.T + b) / 0.7)
        return distribution.logits.gather(1, several), distribution.entropy()

    for ours, expected in zip(found(chunked), found(dense)):
        torch.testing.assert_close(ours, expected)


@pytest.mark.parametrize("chunk", [1, 4, 100])
def test_the_likeliest_are_those_of_a_dense_softmax(inputs, chunk):
    hidden, weight, bias, labels = inputs
    expected = ((hidden.double() @ weight.double().T + bias.double()) / 0.7).log_softmax(dim=-1).topk(5, dim=-1)
    likeliest = torch.full((TOKENS, 5), -1), torch.full((TOKENS, 5), torch.nan)
    given = {"bias": bias, "temperature": 0.7, "top_k": likeliest, "chunk": chunk}
    token_log_probs(hidden.clone().requires_grad_(), weight, labels, **given)
    assert torch.equal(likeliest[0], expected.indices)
    torch.testing.assert_close(likeliest[1].double(), expected.values, rtol=1e-5, atol=1e-5)
    assert not likeliest[1].requires_grad


@pytest.mark.parametrize("finish", [None, lambda z: 3.0 * torch.tanh(z / 3.0)])
@pytest.mark.parametrize("temperature", [1.0, 0.6])
@pytest.mark.parametrize("chunk", [1, 4, 100])
def test_sums_of_squares_are_those_of_a_dense_softmax(inputs, finish, temperature, chunk):
    hidden, weight, bias, labels = inputs
    logits = hidden.double() @ weight.double().T + bias.double()
    expected = ((logits if finish is None else finish(logits)) / temperature).softmax(dim=-1).square().sum(dim=-1)
    given = {"bias": bias, "finish": finish, "temperature": temperature, "chunk": chunk}
    squares = torch.full((TOKENS,), torch.nan)
    leaf = hidden.clone().requires_grad_()
    with_squares = token_log_probs(leaf, weight, labels, sum_pi_squared=squares, **given)
    torch.testing.assert_close(squares.double(), expected, rtol=1e-5, atol=1e-7)
    assert not squares.requires_grad
    for one, other in zip(with_squares, token_log_probs(leaf, weight, labels, **given)):
        assert torch.equal(one, other)


def test_a_gpu_computes_more_logits_at_a_time():
    """At 152 k ids: 64 tokens fit a CPU's cache, and a GPU would read the whole matrix from memory for them."""
    sizes = [tokens_per_chunk(torch.empty(152_000, 8, device=device)) for device in ("cpu", "meta")]
    assert sizes == [64, 883]
