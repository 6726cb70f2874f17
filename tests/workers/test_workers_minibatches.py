"""Mini-batches of whole groups, as properties."""

from collections import Counter

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from etude.metrics import Max, Mean, finish_metrics
from etude.protocol import DataProto
from etude.workers.minibatches import mini_batches, update_epochs


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


def test_epochs_weigh_means_and_add_counts_up():
    data = batch_of(list("aabbccdd"))
    data.meta_info["global_step"] = 3
    seen = []

    def update(mini):
        seen.append(mini.batch["row"].tolist())
        number = len(seen)
        return {"loss": Mean(number * number, number), "skipped_steps": float(number % 2), "worst": Max(-number)}

    metrics = update_epochs(data, update, epochs=2, groups=2, shuffle=True, seed=5)
    assert metrics == {"loss": Mean(30, 10), "skipped_steps": 2.0, "worst": Max(-1)}
    assert finish_metrics(metrics) == {"loss": 3.0, "skipped_steps": 2.0, "worst": -1.0}
    for epoch in (0, 1):
        minis = mini_batches(data, 2, shuffle=True, seed=(5, 3, epoch))
        assert seen[2 * epoch : 2 * epoch + 2] == rows(minis)
