"""Packing: what is laid down, where, and that rows which share a beginning share nothing else."""

import copy
from itertools import combinations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from etude.metrics import finish_metrics
from etude.models import ValueModel
from etude.models.packed import CausalSequences, packed_hidden
from etude.protocol import DataProto
from etude.training import OptimizerSet, OptimOptions, PolicyLearner, ValueLearner, packing
from etude.training.packing import pack

CPU = torch.device("cpu")


@pytest.fixture
def grouped(batch, monkeypatch):
    """Two groups of three around a row of its own, shared from two tokens on; one row needs no more than its prompt."""
    monkeypatch.setattr(packing, "MIN_SHARED", 2)
    rows = batch.select_idxs([0, 3, 4, 0, 3, 0, 3])
    generator = torch.Generator().manual_seed(1)
    for i in (3, 4, 5, 6):  # other answers to the prompts of rows 0 and 1
        response = rows.batch["input_ids"][i, 6:]
        response.copy_(torch.randint(1, 97, response.shape, generator=generator))
    rows.batch["response_mask"][4, 1:] = 0
    rows.batch["response_mask"][4, 0] = 1
    rows.batch["advantages"] = torch.randn(7, 9, generator=generator)
    return rows


def weighted(log_probs, entropy, micro, _):
    return (log_probs * micro.batch["advantages"] + 0.1 * entropy).sum(), {}


def update(model, batch, max_tokens, kind="adamw"):
    """Loss, and the new weights, of one update of a copy."""
    twin = copy.deepcopy(model)
    optimizer = OptimizerSet(twin, OptimOptions(name=kind, lr=0.01, betas=(0.9, 0.9), clip_grad=None), None)
    gradients = []
    step = optimizer.step
    optimizer.step = lambda: gradients.extend(p.grad.clone() for p in twin.parameters()) or step()
    figures = PolicyLearner(twin, max_tokens=max_tokens, optimizer=optimizer).update(batch, weighted, 0.9, True)
    return finish_metrics(figures), gradients


@given(st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=14), min_size=1, max_size=9), st.integers(1, 4))
def test_a_tree_holds_every_sequence_and_shares_what_it_can(sequences, min_shared):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(packing, "MIN_SHARED", min_shared)
        tokens, layout, places = packing.prefix_tree(sequences)
    assert sum(layout.lengths) == len(tokens) <= sum(map(len, sequences))
    positions = layout.position_ids()[0]
    runs = [run for run, length in enumerate(layout.lengths) for _ in range(length)]  # the run of each laid-out token
    rest = iter(places)
    for sequence in sequences:
        mine = [next(rest) for _ in sequence]
        assert [tokens[p] for p in mine] == sequence
        assert positions[mine].tolist() == list(range(len(sequence)))
        last = runs[mine[-1]]  # what its last token sees is exactly the sequence
        seen = [p for p in range(len(tokens)) if runs[p] in (*layout.ancestors[last], last) and p <= mine[-1]]
        assert seen == mine
    for one, other in combinations(range(len(sequences)), 2):
        common = packing.common_beginning(sequences[one], sequences[other])
        starts = [sum(map(len, sequences[:i])) for i in (one, other)]
        both = sum(places[starts[0] + i] == places[starts[1] + i] for i in range(common))
        assert both > common - min_shared  # what is left out is shorter than the least shared run


def test_a_shared_prompt_is_laid_down_once(grouped):
    packed = pack(grouped, range(7), CPU)
    # Prompts of 3, 5 and 4 tokens; responses of 7 and 9 lack their last token, row 4's and row 2's are not needed.
    assert len(packed.token_ids) <= (3 + 6 + 6 + 6) + (5 + 7 + 7) + 4
    columns = grouped.batch
    mask = columns["response_mask"].bool()
    assert torch.equal(packed.labels, columns["input_ids"][:, 6:][mask])
    positions = packed.layout.position_ids()[0]
    before = columns["attention_mask"][:, :6].sum(dim=1)
    assert torch.equal(positions[packed.source], before[packed.row] + packed.column - 1)
    for source, row, column in zip(packed.source, packed.row, packed.column):
        assert packed.token_ids[source] == columns["input_ids"][row, 6 + column - 1]  # the token before the label


def test_sharing_changes_only_rounding(model, grouped):
    """With a budget of one token each row is computed alone; that this is right is shown elsewhere."""
    together, alone = (PolicyLearner(model, max_tokens=n).log_probs(grouped, 0.9) for n in (10_000, 1))
    for ours, theirs in zip(together, alone):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)
    (figures, gradients), (alone_figures, alone_gradients) = (update(model, grouped, n) for n in (10_000, 1))
    assert figures["loss"] == pytest.approx(alone_figures["loss"], rel=1e-5)
    for ours, theirs in zip(gradients, alone_gradients):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5 * float(theirs.abs().max()))


def test_sharing_is_deterministic(model, grouped):
    (first, first_gradients), (second, second_gradients) = (update(model, grouped, 10_000) for _ in range(2))
    assert first == second
    assert all(torch.equal(a, b) for a, b in zip(first_gradients, second_gradients))


def test_the_critic_shares_prompts_too(model, grouped):
    critic = ValueModel(model.base_model)
    torch.nn.init.normal_(critic.head.weight, generator=torch.Generator().manual_seed(0))
    optimizer = OptimizerSet(critic, OptimOptions(), None)
    together, alone = (ValueLearner(critic, max_tokens=n, optimizer=optimizer).values(grouped) for n in (10_000, 1))
    assert together.any()
    torch.testing.assert_close(together, alone, rtol=1e-5, atol=1e-5)


def test_runs_see_their_ancestors_and_themselves(model):
    """Each path from a root equals the same tokens as a sequence of its own, and no other run is felt."""
    PolicyLearner(model, max_tokens=1)  # switches the model to packed attention
    layout = CausalSequences([3, 2, 4, 1, 4], [[], [0], [0], [0, 2], []])
    ids = torch.randint(1, 97, (14,), generator=torch.Generator().manual_seed(0))

    def hidden(tokens, of):
        with torch.no_grad():
            return packed_hidden(model, tokens, of.position_ids(), of)

    states = hidden(ids, layout)
    assert layout.position_ids()[0].tolist() == [0, 1, 2, 3, 4, 3, 4, 5, 6, 7, 0, 1, 2, 3]
    for chosen in ([0, 1, 2, 3, 4], [0, 1, 2, 5, 6, 7, 8, 9], [10, 11, 12, 13]):
        torch.testing.assert_close(states[chosen], hidden(ids[chosen], CausalSequences([len(chosen)])))
    other = ids.clone()
    other[3:5] += 1
    changed = (hidden(other, layout) != states).any(dim=1)
    assert changed.tolist() == [False] * 3 + [True] * 2 + [False] * 9


def test_prompts_that_differ_early_share_nothing(batch):
    same_length = DataProto.concat([batch.select_idxs([0]), batch.select_idxs([0])])
    same_length.batch["input_ids"][1, :6] += 1
    packed = pack(same_length, [0, 1], CPU)
    assert packed.layout.ancestors == [(), ()]
    assert len(packed.token_ids) == 2 * 9
    assert int(batch.batch["attention_mask"][0].sum()) == 10
