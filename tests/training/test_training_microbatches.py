"""Micro-batches: every row once, within the budget, prompts' groups whole where they fit."""

import torch
from hypothesis import given
from hypothesis import strategies as st

from etude.protocol import DataProto
from etude.training.microbatches import micro_batches
from etude.training.packing import needed_tokens, pack

CPU = torch.device("cpu")


def batch_of(prompts, responses, *, scored=None):
    """Prompts padded on the left, responses on the right; every response token scored unless told."""
    before, after = max(map(len, prompts)), max(map(len, responses))
    ids = torch.zeros(len(prompts), before + after, dtype=torch.long)
    attention, mask = torch.zeros_like(ids), torch.zeros(len(prompts), after, dtype=torch.long)
    for i, (prompt, response) in enumerate(zip(prompts, responses)):
        span = slice(before - len(prompt), before + len(response))
        ids[i, span], attention[i, span] = torch.tensor([*prompt, *response]), 1
        mask[i, : len(response)] = 1 if scored is None or scored[i] else 0
    return DataProto.from_single_dict({"input_ids": ids, "attention_mask": attention, "response_mask": mask})


def grouped(sizes, *, prompt=40, response=12):
    """Groups of so many answers to a prompt each, interleaved so that a group's rows are not neighbours."""
    rows = [(group, answer) for group, size in enumerate(sizes) for answer in range(size)]
    rows.sort(key=lambda row: (row[1], row[0]))
    prompts = [[10 + group] * prompt for group, _ in rows]
    responses = [[100 + answer * 50 + i for i in range(response)] for _, answer in rows]
    return batch_of(prompts, responses), [group for group, _ in rows]


def packed_size(batch, rows):
    return len(pack(batch, rows, CPU).token_ids)


def test_a_group_is_not_cut_and_its_prompt_counts_once():
    batch, group_of = grouped([4, 4, 4])
    parts = micro_batches(batch, 2 * (40 + 4 * 11))  # a group takes 40 + 4 x 11: the last token is only a label
    assert [len(part) for part in parts] in ([4, 8], [8, 4])
    for part in parts:
        assert len({group_of[row] for row in part}) == len(part) // 4
        assert packed_size(batch, part) == len(part) // 4 * 40 + len(part) * 11


def test_a_group_larger_than_the_budget_is_cut_into_parts_that_share_the_prompt():
    batch, _ = grouped([8])
    parts = micro_batches(batch, 40 + 4 * 11)
    assert [len(part) for part in parts] == [4, 4]
    assert all(packed_size(batch, part) <= 40 + 4 * 11 for part in parts)


def test_a_row_longer_than_the_budget_stands_alone():
    batch, _ = grouped([3])
    assert micro_batches(batch, 20) == [[0], [1], [2]]


def test_rows_without_scored_tokens_are_left_out_and_none_leave_nothing():
    prompts, responses = [[1, 2], [1, 2], [3]], [[4], [5, 6], [7]]
    assert micro_batches(batch_of(prompts, responses, scored=[True, False, True]), 100) == [[0, 2]]
    assert micro_batches(batch_of(prompts, responses, scored=[False] * 3), 100) == []


def test_demonstrations_have_no_prompt_part():
    ids = torch.tensor([[1, 2, 3, 4], [1, 2, 5, 6]])
    mask = torch.tensor([[0, 0, 1, 1], [0, 0, 1, 1]])
    batch = DataProto.from_single_dict(
        {"input_ids": ids, "attention_mask": torch.ones_like(ids), "response_mask": mask}
    )
    assert micro_batches(batch, 6) == [[0, 1]]
    assert micro_batches(batch, 5) == [[0], [1]]


@given(
    st.lists(st.tuples(st.integers(0, 3), st.integers(1, 30)), min_size=1, max_size=24),
    st.integers(1, 200),
)
def test_every_row_once_and_within_the_budget(rows, budget):
    lengths = {0: 3, 1: 9, 2: 20, 3: 47}
    prompts = [[10 + group] * lengths[group] for group, _ in rows]
    responses = [[100 + i * 40 + j for j in range(length)] for i, (_, length) in enumerate(rows)]
    batch = batch_of(prompts, responses)
    parts = micro_batches(batch, budget)
    assert sorted(row for part in parts for row in part) == list(range(len(rows)))
    assert parts == micro_batches(batch, budget) == sorted(sorted(part) for part in parts)
    for part in parts:
        assert packed_size(batch, part) <= budget or len(part) == 1
    alone = [len(ids) for ids in needed_tokens(batch, range(len(rows)))]
    if sum(alone) <= budget:
        assert len(parts) == 1
