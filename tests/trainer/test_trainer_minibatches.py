"""Mini-batches of whole groups, as properties."""

from collections import Counter

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from etude.protocol import DataProto
from etude.trainer.minibatches import mini_batches


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
    minis = rows(mini_batches(data, groups, shuffle=shuffle, seed=(seed, 1, 2)))
    assert sorted(row for mini in minis for row in mini) == list(range(len(uids)))
    homes = Counter(uid for mini in minis for uid in {uids[row] for row in mini})
    assert set(homes.values()) == {1}
    sizes = [len({uids[row] for row in mini}) for mini in minis]
    assert max(sizes) <= groups
    assert max(sizes) - min(sizes) <= 1
    assert len(minis) == -(-len(set(uids)) // groups)
    assert minis == rows(mini_batches(data, groups, shuffle=shuffle, seed=(seed, 1, 2)))


def test_the_order_is_the_seeds():
    data = batch_of(list("abcdefgh"))
    orders = {tuple(map(tuple, rows(mini_batches(data, 1, shuffle=True, seed=(s,))))) for s in range(20)}
    assert len(orders) > 10
    assert rows(mini_batches(data, 3, shuffle=False, seed=(1,))) == [[0, 1, 2], [3, 4, 5], [6, 7]]


def test_no_rows_no_mini_batches():
    assert rows(mini_batches(batch_of(["a"])[:0], 4, shuffle=True, seed=(1,))) == []
