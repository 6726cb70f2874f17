"""The packed policy engine against an unpadded forward a row, through eager attention: values, gradients, cuts, masks."""

import copy
from array import array

import pytest
import torch
from torch.distributions import Categorical
from transformers import Gemma3ForCausalLM, Gemma3TextConfig, MambaConfig, MambaForCausalLM

from etude.algorithms import LOSS_AGG_MODES, agg_loss, kl_penalty, policy_loss
from etude.errors import ConfigError, DataError
from etude.metrics import finish_metrics
from etude.models import TinyModelSpec, build_tiny_model, build_tiny_tokenizer
from etude.protocol import DataProto, object_array
from etude.training import OptimizerSet, OptimOptions, PolicyLearner
from etude.training.packing import needed_tokens, pack
from etude.trajectory import KEPT_IDS

EVERYTHING = 10_000
CPU = torch.device("cpu")


class Recorder(OptimizerSet):
    """An optimizer that also keeps the gradients it was given."""

    def step(self):
        self.gradients = [None if p.grad is None else p.grad.clone() for p in self._parameters]
        return super().step()


def engine_of(model, max_tokens=EVERYTHING, **options):
    return PolicyLearner(model, max_tokens=max_tokens, optimizer=Recorder(model, OptimOptions(**options), None))


def eager(model):
    reference = copy.deepcopy(model)
    reference.set_attn_implementation("eager")
    return reference


def reference_log_probs(model, batch, row_ids, temperature):
    """(rows, response_len) log-probs and entropies, differentiable, from one full unpadded forward a row."""
    mask = batch.batch["response_mask"]
    log_probs, entropies = torch.zeros(mask.shape), torch.zeros(mask.shape)
    for i in range(len(batch)):
        ids, prompt = row_ids(i)
        logits = model(input_ids=ids[None]).logits[0] / temperature
        for column in mask[i].nonzero().flatten().tolist():
            given = logits[prompt + column - 1]
            if KEPT_IDS in batch.non_tensor_batch and (kept := batch.non_tensor_batch[KEPT_IDS][i][column]):
                left_out = torch.ones(len(given), dtype=torch.bool)
                left_out[list(kept)] = False
                given = given.masked_fill(left_out, -torch.inf)
            distribution = Categorical(logits=given)
            log_probs[i, column] = distribution.log_prob(ids[prompt + column])
            entropies[i, column] = distribution.entropy()
    return log_probs, entropies


def restrict(batch):
    """`batch` as an engine with top-k or top-p leaves it: a token in four was drawn without them."""
    generator, mask = torch.Generator().manual_seed(3), batch.batch["response_mask"]
    width, labels = mask.shape[1], batch.batch["input_ids"][:, -mask.shape[1] :]
    kept = object_array([()] * len(batch))
    for i in mask.any(dim=1).nonzero().flatten().tolist():
        drawn = [{*torch.randint(0, 97, (9,), generator=generator).tolist(), int(labels[i, c])} for c in range(width)]
        kept[i] = tuple(array("i", sorted(ids)) if mask[i, c] and c % 4 else None for c, ids in enumerate(drawn))
    batch.non_tensor_batch[KEPT_IDS] = kept
    return batch


def objective(mode="token-mean", seen=None):
    """A loss with every part that uses log-probs: clipped surrogate, entropy bonus, KL."""

    def loss_of(log_probs, entropy, micro, scale):
        if seen is not None:
            seen.append(len(micro))
        columns = micro.batch
        scaling = {"batch_num_tokens": scale.batch_num_tokens, "global_batch_size": scale.global_batch_size}
        mask = columns["response_mask"]
        loss, metrics = policy_loss(
            "vanilla",
            old_log_prob=columns["old_log_probs"],
            log_prob=log_probs,
            advantages=columns["advantages"],
            response_mask=mask,
            loss_agg_mode=mode,
            **scaling,
        )
        loss = loss - 0.3 * agg_loss(entropy, mask, mode, **scaling)
        penalty = kl_penalty(log_probs, columns["old_log_probs"], "low_var_kl")
        return loss + 0.1 * agg_loss(penalty, mask, mode, **scaling), metrics

    return loss_of


def update(model, batch, max_tokens=EVERYTHING, mode="token-mean", temperature=0.8):
    """Gradients, figures and new weights of one update of a copy of `model`."""
    engine = engine_of(copy.deepcopy(model), max_tokens, lr=0.01)
    figures = finish_metrics(engine.update(batch, objective(mode), temperature, entropy_grad=True, loss_agg_mode=mode))
    return engine.optimizer.gradients, figures, [p.detach() for p in engine.model.parameters()]


def assert_same_bits(one, other):
    for left, right in zip(one[0] + one[2], other[0] + other[2]):
        assert torch.equal(left, right)
    assert one[1] == other[1]


@pytest.mark.parametrize("restricted", [False, True])
@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("max_tokens", [1, 20, EVERYTHING])
def test_log_probs_are_those_of_unpadded_rows(model, batch, row_ids, temperature, max_tokens, restricted):
    batch = restrict(batch) if restricted else batch
    with torch.no_grad():
        expected = reference_log_probs(eager(model), batch, row_ids, temperature)
    engine = PolicyLearner(model, max_tokens=max_tokens)
    for ours, theirs in zip(engine.log_probs(batch, temperature), expected):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)
        assert not ours[batch.batch["response_mask"] == 0].any()


@pytest.mark.parametrize("architecture", ["qwen3", "gemma2"])  # the second caps its logits
@pytest.mark.parametrize("max_tokens", [1, 20, EVERYTHING])
def test_sums_of_squares_are_those_of_unpadded_rows(batch, row_ids, architecture, max_tokens):
    spec = TinyModelSpec(
        hidden_size=32,
        num_layers=2,
        intermediate_size=48,
        vocab_size=270,
        architecture=architecture,
        initializer_range=1.0,
    )
    model = build_tiny_model(spec, build_tiny_tokenizer([], 270)).eval()
    assert (model.config.get_text_config().to_dict().get("final_logit_softcapping") is None) == (
        architecture == "qwen3"
    )
    mask, exact = batch.batch["response_mask"], eager(model).double()
    expected = torch.zeros(mask.shape, dtype=torch.float64)
    for i in range(len(batch)):
        ids, prompt = row_ids(i)
        with torch.no_grad():
            probs = (exact(input_ids=ids[None]).logits[0] / 0.7).softmax(dim=-1)
        places = mask[i].nonzero().flatten()
        expected[i, places] = probs[prompt + places - 1].square().sum(dim=-1)
    engine = PolicyLearner(model, max_tokens=max_tokens)
    log_probs, _, squares = engine.log_probs(batch, 0.7, sum_pi_squared=True)
    torch.testing.assert_close(squares.double(), expected, rtol=1e-4, atol=1e-5)
    assert torch.equal(log_probs, engine.log_probs(batch, 0.7)[0])


@pytest.mark.parametrize("restricted", [False, True])
@pytest.mark.parametrize("mode", LOSS_AGG_MODES)
def test_gradients_are_those_of_unpadded_rows(model, batch, row_ids, mode, restricted):
    batch = restrict(batch) if restricted else batch
    reference = eager(model)
    log_probs, entropy = reference_log_probs(reference, batch, row_ids, 0.8)
    columns = batch.batch
    mask = columns["response_mask"]
    loss, _ = policy_loss(
        "vanilla",
        old_log_prob=columns["old_log_probs"],
        log_prob=log_probs,
        advantages=columns["advantages"],
        response_mask=mask,
        loss_agg_mode=mode,
    )
    loss = loss - 0.3 * agg_loss(entropy, mask, mode)
    loss = loss + 0.1 * agg_loss(kl_penalty(log_probs, columns["old_log_probs"], "low_var_kl"), mask, mode)
    loss.backward()
    gradients, figures, _ = update(model, batch, mode=mode)
    assert figures["loss"] == pytest.approx(loss.item(), rel=2e-5)  # sums of float32 that cancel
    for ours, parameter in zip(gradients, reference.parameters()):
        scale = float(parameter.grad.abs().max())
        torch.testing.assert_close(ours, parameter.grad, rtol=1e-4, atol=1e-5 * scale)


@pytest.mark.parametrize("mode", LOSS_AGG_MODES)
@pytest.mark.parametrize("max_tokens", [1, 20])
def test_the_cut_into_micro_batches_changes_only_rounding(model, batch, mode, max_tokens):
    gradients, figures, _ = update(model, batch, EVERYTHING, mode)
    cut_gradients, cut_figures, _ = update(model, batch, max_tokens, mode)
    for whole, cut in zip(gradients, cut_gradients):
        torch.testing.assert_close(cut, whole, rtol=1e-4, atol=1e-5 * float(whole.abs().max()))
    assert cut_figures == pytest.approx(figures, rel=1e-4, abs=1e-6)
    assert {"loss", "grad_norm", "lr", "actor/pg_clipfrac"} <= set(figures)


def test_gradients_of_parts_add_up_to_the_next_step(model, batch):
    expected, figures, _ = update(model, batch, mode="token-sum")
    engine = engine_of(copy.deepcopy(model))
    how = {"temperature": 0.8, "entropy_grad": True, "loss_agg_mode": "token-sum"}
    with torch.no_grad():
        assert finish_metrics(engine.accumulate(batch, objective("token-sum"), **how))["loss"] == pytest.approx(
            figures["loss"]
        )
    for part in (range(2), range(2, len(batch))):
        engine.accumulate(batch.select_idxs(list(part)), objective("token-sum"), **how)
    engine.optimizer.step()
    for whole, summed in zip(expected, engine.optimizer.gradients):
        torch.testing.assert_close(summed, whole, rtol=1e-4, atol=1e-5 * float(whole.abs().max()))


def test_micro_batches_keep_to_the_budget(model, batch):
    seen = []
    engine_of(model, max_tokens=20).update(batch, objective(seen=seen), 1.0)
    assert sum(seen) == 3  # the rows with something to learn
    assert len(seen) == 2


@pytest.mark.parametrize("column", ["advantages", "old_log_probs"])
@pytest.mark.parametrize("junk", [100.0, float("inf"), float("nan")])
def test_columns_at_masked_positions_change_no_bit(model, batch, column, junk):
    before = update(model, batch)
    masked = batch.batch["response_mask"] == 0
    batch.batch[column] = batch.batch[column].masked_fill(masked, junk)
    assert_same_bits(update(model, batch), before)


def test_the_label_of_a_masked_token_changes_no_bit(model, batch):
    """A token that conditions no scored one is nothing but a label. Those are the tokens after the last scored one;
    for all others see the next two tests."""
    before = update(model, batch)
    batch.batch["input_ids"][4, -8:-6] += 1  # row 4: prompt, one sampled token, then two of a tool's answer
    assert int(batch.batch["response_mask"][4, 1:].sum()) == 0
    assert int(batch.batch["attention_mask"][4, -8:-6].sum()) == 2
    assert_same_bits(update(model, batch), before)


def test_a_masked_token_is_context_and_never_a_label(model, batch):
    """A tool's token in mid-row: what was sampled before it keeps its log-prob to the bit, what follows is conditioned
    on it, and it never stands among the labels."""
    engine = PolicyLearner(model, max_tokens=EVERYTHING)
    before, _ = engine.log_probs(batch, 1.0)
    batch.batch["input_ids"][0, 6 + 3] += 1  # column 3 of row 0, whose mask is 1110011
    after, _ = engine.log_probs(batch, 1.0)
    changed = (before != after).nonzero().tolist()
    assert changed == [[0, 5], [0, 6]]
    packed = pack(batch, [0, 3, 4], CPU)
    mask = batch.batch["response_mask"][[0, 3, 4]].bool()
    assert torch.equal(packed.labels, batch.batch["input_ids"][[0, 3, 4], 6:][mask])


def test_swapping_a_scored_label_does_change_the_loss(model, batch):
    """The guard of the tests above: they would see a label that counts."""
    before = update(model, batch)[1]["loss"]
    batch.batch["input_ids"][4, 6] += 1  # the last sampled token of row 4: a label that conditions nothing scored
    assert update(model, batch)[1]["loss"] != before


def test_rows_without_scored_tokens_are_not_computed(model, batch):
    tokens = []
    hook = model.get_input_embeddings().register_forward_hook(lambda _, inputs, __: tokens.append(inputs[0].numel()))
    PolicyLearner(model, max_tokens=EVERYTHING).log_probs(batch, 1.0)
    hook.remove()
    # Prompt and response of rows 0, 3, 4 up to the token before the last sampled one.
    assert tokens == [(3 + 6) + (5 + 7) + 4]
    assert [len(ids) for ids in needed_tokens(batch, [0, 3, 4])] == [9, 12, 4]


def test_padding_changes_no_bit_of_the_gradient(model, batch):
    plain = update(model, batch.select_idxs([0, 3, 4]))
    assert_same_bits(update(model, batch), plain)
    wide = {}
    for name, tensor in batch.batch.items():
        lead = 5 if name in ("input_ids", "attention_mask") else 0
        wide[name] = torch.nn.functional.pad(tensor, (lead, 4))
    gradients, figures, _ = update(model, DataProto.from_single_dict(wide))
    assert all(torch.equal(a, b) for a, b in zip(gradients, plain[0]))
    assert figures == pytest.approx(plain[1], rel=1e-6)  # a wider matrix of zeros is summed in another order


def test_a_batch_with_nothing_to_learn_moves_nothing(model, batch):
    engine = engine_of(model, lr=0.1)
    before = [p.detach().clone() for p in model.parameters()]
    figures = finish_metrics(engine.update(batch.select_idxs([1, 2]), objective(), 1.0))
    assert "loss" not in figures  # a mean of nothing
    assert figures["grad_norm"] == 0
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters()))
    assert not engine.log_probs(batch.select_idxs([1, 2]), 1.0)[0].any()


def test_a_first_token_without_context_is_refused(model, batch):
    row = batch.select_idxs([3, 0])
    row.batch["attention_mask"][1, :6] = 0  # row 0 without its prompt
    with pytest.raises(DataError, match="row 1: its first token"):
        PolicyLearner(model, max_tokens=EVERYTHING).log_probs(row, 1.0)


def test_a_failed_update_leaves_no_gradient_behind(model, batch):
    clean = update(model, batch)
    engine = engine_of(model, max_tokens=1, lr=0.01)
    calls = []

    def fails_at_the_second_micro_batch(*arguments):
        calls.append(1)
        if len(calls) == 2:
            raise MemoryError
        return objective()(*arguments)

    with pytest.raises(MemoryError):
        engine.update(batch, fails_at_the_second_micro_batch, 0.8, entropy_grad=True)
    assert any(p.grad is not None for p in model.parameters())
    engine._max_tokens = EVERYTHING
    engine.update(batch, objective(), 0.8, entropy_grad=True)
    assert all(torch.equal(a, b) for a, b in zip(engine.optimizer.gradients, clean[0]))


def test_a_loss_that_is_not_finite_skips_the_step_and_shows(model, batch):
    engine = engine_of(model, lr=0.1)
    before = [p.detach().clone() for p in model.parameters()]
    figures = finish_metrics(engine.update(batch, lambda lp, *_: (lp.sum() * float("nan"), {}), 1.0))
    assert not torch.isfinite(torch.tensor([figures["loss"], figures["grad_norm"]])).any()
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters()))


def test_a_model_that_cannot_be_packed_computes_one_row_a_forward_pass(batch, row_ids, caplog):
    torch.manual_seed(0)
    sizes = {"vocab_size": 97, "hidden_size": 32, "state_size": 8, "num_hidden_layers": 2, "expand": 2}
    model = MambaForCausalLM(MambaConfig(**sizes, pad_token_id=0, initializer_range=0.3)).eval()
    alone, fed = copy.deepcopy(model), []
    with torch.no_grad():
        expected = reference_log_probs(alone, batch, row_ids, 0.8)
    engine = engine_of(model, lr=0.01)
    assert "computes one sequence a forward pass" in caplog.text
    model.backbone.register_forward_hook(lambda part, args, given, out: fed.append(given), with_kwargs=True)
    for ours, theirs in zip(engine.log_probs(batch, 0.8), expected):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)
    assert len(fed) == int(batch.batch["response_mask"].any(dim=1).sum())
    weights = batch.batch["advantages"] * batch.batch["response_mask"]
    (reference_log_probs(alone, batch, row_ids, 0.8)[0] * weights).sum().backward()
    engine.update(batch, lambda ours, entropy, micro, scale: ((ours * micro.batch["advantages"]).sum(), {}), 0.8)
    for ours, parameter in zip(engine.optimizer.gradients, alone.parameters()):
        torch.testing.assert_close(ours, parameter.grad, rtol=1e-4, atol=1e-5)


def test_a_model_whose_tokens_see_later_ones_is_refused():
    sizes = {"vocab_size": 97, "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "head_dim": 8}
    config = Gemma3TextConfig(**sizes, num_attention_heads=4, num_key_value_heads=2, use_bidirectional_attention=True)
    model = Gemma3ForCausalLM(config)
    with pytest.raises(ConfigError, match="its tokens see later ones"):
        PolicyLearner(model, max_tokens=EVERYTHING)
