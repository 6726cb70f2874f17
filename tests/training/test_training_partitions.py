"""Balanced cuts as properties."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from etude.training import balanced_partitions, token_budget_batches

LENGTHS = st.lists(st.integers(0, 1000), min_size=1, max_size=40)


def sums(parts, lengths):
    return [sum(lengths[i] for i in part) for part in parts]


@given(LENGTHS, st.data())
def test_every_item_is_in_one_part_and_no_part_is_empty(lengths, data):
    k = data.draw(st.integers(1, len(lengths)))
    parts = balanced_partitions(lengths, k)
    assert len(parts) == k
    assert all(parts)
    assert sorted(i for part in parts for i in part) == list(range(len(lengths)))
    assert parts == sorted(sorted(part) for part in parts)
    assert parts == balanced_partitions(tuple(lengths), k)


@given(LENGTHS, st.data())
def test_parts_differ_by_no_more_than_the_longest_item(lengths, data):
    """Merging heavy with light never widens the larger of two spreads, and the first spread is one item."""
    loads = sums(balanced_partitions(lengths, data.draw(st.integers(1, len(lengths)))), lengths)
    assert max(loads) - min(loads) <= max(lengths)


def karmarkar_karp(lengths, k):
    """The largest part's sum by the largest differencing method, of sums alone."""
    solutions = [[length] + [0] * (k - 1) for length in lengths]
    while len(solutions) > 1:
        solutions.sort(key=lambda sums: max(sums) - min(sums))
        one, other = solutions.pop(), solutions.pop()
        solutions.append([a + b for a, b in zip(sorted(one), sorted(other, reverse=True))])
    return max(solutions[0])


@given(st.lists(st.integers(1, 30_000), min_size=1, max_size=60), st.data())
def test_the_heaviest_part_is_karmarkars_and_karps(lengths, data):
    """Within 2 %: ties may be broken in another order."""
    k = data.draw(st.integers(1, min(len(lengths), 8)))
    assert max(sums(balanced_partitions(lengths, k), lengths)) <= 1.02 * karmarkar_karp(lengths, k)


@given(st.lists(st.integers(1, 1000), min_size=1, max_size=40), st.integers(1000, 8000))
def test_the_heaviest_micro_batch_is_karmarkars_and_karps(lengths, budget):
    parts = token_budget_batches(lengths, budget)
    assert max(sums(parts, lengths)) <= 1.02 * karmarkar_karp(lengths, len(parts))


@given(st.integers(1, 6), st.integers(1, 8), st.data())
def test_equal_sizes(k, size, data):
    lengths = data.draw(st.lists(st.integers(0, 1000), min_size=k * size, max_size=k * size))
    parts = balanced_partitions(lengths, k, equal_size=True)
    assert [len(part) for part in parts] == [size] * k
    assert sorted(i for part in parts for i in part) == list(range(k * size))
    loads = sums(parts, lengths)
    assert max(loads) - min(loads) <= max(lengths) - min(lengths)


def test_the_differencing_method_by_hand():
    """Karmarkar and Karp's example: 8−7, 6−5, 4: differences 1, 1, 4 leave 2."""
    assert sorted(sums(balanced_partitions([8, 7, 6, 5, 4], 2), [8, 7, 6, 5, 4])) == [14, 16]
    assert sums(balanced_partitions([5, 5, 5, 5], 2, equal_size=True), [5] * 4) == [10, 10]


@pytest.mark.parametrize(("lengths", "k", "equal"), [([1, 2], 0, False), ([1, 2], 3, False), ([1, 2, 3], 2, True)])
def test_impossible_cuts_are_refused(lengths, k, equal):
    with pytest.raises(ValueError, match="cannot split"):
        balanced_partitions(lengths, k, equal)


@given(LENGTHS, st.integers(1, 1500))
def test_batches_keep_to_the_budget_with_as_few_as_balance_allows(lengths, budget):
    parts = token_budget_batches(lengths, budget)
    assert sorted(i for part in parts for i in part) == list(range(len(lengths)))
    assert parts == token_budget_batches(lengths, budget)
    assert all(len(part) == 1 or load <= budget for part, load in zip(parts, sums(parts, lengths)))
    short = [n for n in lengths if n <= budget]
    k = len(parts) - (len(lengths) - len(short))
    for fewer in range(1, k):
        assert max(sums(balanced_partitions(short, fewer), short)) > budget


def test_one_long_row_does_not_scatter_the_others():
    assert token_budget_batches([10, 5, 500, 5, 10], 100) == [[0, 1, 3, 4], [2]]


def test_rows_just_over_half_the_budget_stand_alone_at_once():
    assert token_budget_batches([51] * 400, 100) == [[i] for i in range(400)]


def test_no_rows_need_no_batches():
    assert token_budget_batches([], 10) == []
