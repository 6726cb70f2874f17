"""Rows to roll out; mini-batches of whole groups, as properties."""

from collections import Counter

import numpy as np
import pytest
import torch
from batches_stage import update_batches
from hypothesis import given, settings
from hypothesis import strategies as st

from etude.options import ActorOptions
from etude.options.training import PolicyLossOptions
from etude.protocol import DataProto
from etude.seeds import group_seed
from etude.trainer.minibatches import mini_rows, rank_parts
from etude.trainer.rollouts import rollout_batch


def batch_of(uids):
    column = np.empty(len(uids), dtype=object)
    column[:] = uids
    return DataProto.from_single_dict({"row": torch.arange(len(uids)), "uid": column})


def rows(minis):
    return [mini.batch["row"].tolist() for mini in minis]


@settings(max_examples=100, deadline=None)
@given(
    uids=st.lists(st.sampled_from("abcdefghij"), min_size=1, max_size=40),
    groups=st.integers(1, 12),
    shuffle=st.booleans(),
    seed=st.integers(0, 99),
)
def test_every_row_once_groups_whole_sizes_even(uids, groups, shuffle, seed):
    data = batch_of(uids)
    minis = mini_rows(data, groups, shuffle=shuffle, seed=(seed, 1, 2))
    assert sorted(row for mini in minis for row in mini) == list(range(len(uids)))
    homes = Counter(uid for mini in minis for uid in {uids[row] for row in mini})
    assert set(homes.values()) == {1}
    sizes = [len({uids[row] for row in mini}) for mini in minis]
    assert max(sizes) <= groups
    assert max(sizes) - min(sizes) <= 1
    assert len(minis) == -(-len(set(uids)) // groups)
    assert minis == mini_rows(data, groups, shuffle=shuffle, seed=(seed, 1, 2))


def test_the_order_is_the_seeds():
    data = batch_of(list("abcdefgh"))
    orders = {tuple(map(tuple, mini_rows(data, 1, shuffle=True, seed=(s,)))) for s in range(20)}
    assert len(orders) > 10
    assert mini_rows(data, 3, shuffle=False, seed=(1,)) == [[0, 1, 2], [3, 4, 5], [6, 7]]


def test_no_rows_no_mini_batches():
    assert mini_rows(batch_of(["a"])[:0], 4, shuffle=True, seed=(1,)) == []


# -- ranks -------------------------------------------------------------------------------------------------------


def uneven(uids, lengths, scored):
    """A row for each uid, of so many tokens, of which the last `scored` are."""
    width = max(lengths)
    data = batch_of(uids)
    place = torch.arange(width)
    data.batch["attention_mask"] = (place < torch.tensor(lengths)[:, None]).long()
    data.batch["response_mask"] = data.batch["attention_mask"] * torch.tensor(scored)[:, None]
    return data


@settings(max_examples=100, deadline=None)
@given(
    members=st.lists(
        st.tuples(st.sampled_from("abcdef"), st.integers(1, 30), st.integers(0, 1)), min_size=1, max_size=40
    ),
    ranks=st.integers(1, 5),
)
def test_every_row_is_some_ranks_and_each_part_knows_the_whole(members, ranks):
    uids, lengths, scored = map(list, zip(*members))
    mini = uneven(uids, lengths, scored)
    parts = rank_parts(mini, ranks)
    assert len(parts) == ranks
    assert sorted(row for part in rows(parts) for row in part) == list(range(len(uids)))
    assert all(part == sorted(part) for part in rows(parts))
    tokens = sum(length for length, one in zip(lengths, scored) if one)
    for part in parts:
        assert (part.meta_info["batch_num_tokens"], part.meta_info["global_batch_size"]) == (tokens, sum(scored))
    if len(set(uids)) >= 4 * ranks:
        homes = Counter(uid for part in rows(parts) for uid in {uids[row] for row in part})
        assert set(homes.values()) == {1}


def test_rollouts_count_once_however_many_sequences_they_have():
    data = uneven(list("aaabb"), [4, 2, 3, 5, 1], [1, 1, 1, 0, 1])
    data.batch["main_sequence"] = torch.tensor([1, 0, 1, 1, 0])  # two rollouts of a, one of b
    for part in rank_parts(data, 2):
        assert part.meta_info["global_batch_size"] == 3
        expected = {0: 6, 1: 6, 2: 3, 3: 1, 4: 1}
        assert part.batch["rollout_tokens"].tolist() == [expected[row] for row in rows([part])[0]]


COLUMNS = {"old_log_probs", "ref_log_prob", "rollout_log_probs", "values", "entropys", "token_level_scores"}


@pytest.mark.parametrize(
    ("options", "kept"),
    [
        ({}, {"old_log_probs"}),
        ({"use_kl_loss": True}, {"old_log_probs", "ref_log_prob"}),
        ({"policy_loss": PolicyLossOptions(loss_mode="kl_cov")}, {"old_log_probs", "selected_tokens"}),
    ],
)
def test_only_columns_that_the_update_reads_are_sent(options, kept):
    data = uneven(list("aabb"), [3] * 4, [1] * 4)
    for name in (*COLUMNS, "advantages"):
        data.batch[name] = torch.rand(4, 3)
    data.meta_info |= {"global_step": 0, "compare_rollout": True}
    chosen = ActorOptions(ppo_mini_batch_size=1, **options)
    for (part,) in update_batches(data, chosen, shuffle=False, seed=0, ranks=1):
        assert (COLUMNS | {"selected_tokens"}) & set(part.batch.keys()) == kept | {"rollout_log_probs"}


def test_ranks_have_about_as_many_tokens_each():
    lengths = [30, 1, 1, 28, 2, 1, 25, 5]
    parts = rank_parts(uneven(list("aabbccdd"), lengths, [1] * 8), 3)
    loads = [sum(lengths[row] for row in part) for part in rows(parts)]
    assert max(loads) - min(loads) <= 2


def test_epochs_go_through_all_rows_each_in_another_order():
    data = uneven(list("aabbccdd"), [3] * 8, [1] * 8)
    data.meta_info |= {"global_step": 3, "compare_rollout": True}
    options = ActorOptions(ppo_epochs=2, ppo_mini_batch_size=2)
    steps = list(update_batches(data, options, shuffle=True, seed=5, ranks=2))
    assert len(steps) == 4
    assert all(len(parts) == 2 for parts in steps)
    for epoch in (0, 1):
        minis = mini_rows(data, 2, shuffle=True, seed=(5, 3, epoch))
        found = [{row for part in rows(parts) for row in part} for parts in steps[2 * epoch : 2 * epoch + 2]]
        assert found == [set(mini) for mini in minis]
    assert [parts[0].meta_info["compare_rollout"] for parts in steps] == [True, False, False, False]


def test_rows_to_roll_out_are_columns_of_objects():
    rows = [{"raw_prompt_ids": [5, 6], "tools_kwargs": {"a": 1}}, {"raw_prompt_ids": [8], "agent_name": "m"}]
    batch = rollout_batch(rows, n=2, label="3.0", seed=7, validate=False, first=4)
    columns = {name: column.tolist() for name, column in batch.non_tensor_batch.items()}
    assert columns == {
        "raw_prompt_ids": [[5, 6], [5, 6], [8], [8]],
        "tools_kwargs": [{"a": 1}, {"a": 1}, None, None],
        "agent_name": [None, None, "m", "m"],
        "uid": ["3.0-2", "3.0-2", "3.0-3", "3.0-3"],
        "group_seed": [group_seed(7, place) for place in (2, 2, 3, 3)],
        "rollout_index": [4, 5, 6, 7],
    }
    assert batch.meta_info == {"seed": 7, "validate": False}
