"""Slots of the key/value cache: seen as one batch in whatever way."""

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from etude.inference.kv_cache import KVShape, SlabCache
from etude.inference.layout import AttendedSlots, Slots, by_slab
from etude.models.attention import Scoring, partial_attention, visibility

HEADS, DIM = 2, 4
SHAPE = KVShape(widths=((HEADS, DIM),) * 2, dtype=torch.float32, device=torch.device("cpu"))
CPU = torch.device("cpu")


def filled(cache, lengths):
    """Slots with random keys and values in their first places."""
    held = []
    for length in lengths:
        slot = cache.take(length)
        for layer in range(len(SHAPE.widths)):
            for kind in (slot.slab.keys, slot.slab.values):
                kind[layer][slot.index, :, :length] = torch.randn(HEADS, length, DIM)
        held.append((slot, length))
    return held


def thinned(cache, held, kept):
    for place, (slot, _) in enumerate(held):
        if place not in kept:
            cache.give_back(slot)
    return [held[place] for place in kept]


def expected(query, slot, length, scoring, window):
    keys, values = (kind[0][slot.index, None, :, :length] for kind in (slot.slab.keys, slot.slab.values))
    places = torch.arange(length)
    bias = visibility((places > length - 1 - (window or length))[None, None, None], query.dtype)
    out, lse = partial_attention(query[None], keys, values, bias, scoring)
    return out[0], lse[0]


@given(st.lists(st.integers(1, 200), min_size=1, max_size=40), st.data(), st.sampled_from([None, 3]))
@settings(max_examples=40, deadline=None)
def test_rows_attend_over_their_slots_whatever_lies_between(lengths, data, window):
    cache, scoring = SlabCache(SHAPE), Scoring(0.5, window)
    kept = data.draw(st.lists(st.integers(0, len(lengths) - 1), min_size=1, unique=True))
    held = thinned(cache, filled(cache, lengths), kept)
    seen = 0
    for batch in by_slab(held):
        query = torch.randn(len(batch), HEADS, 3, DIM)
        ends = [length - 1 for _, length in batch]
        parts = [(slot, [row]) for row, (slot, _) in enumerate(batch)]
        own = AttendedSlots(parts, [end + 1 for end in ends], ends, [0] * len(ends), CPU)
        with torch.inference_mode():
            for _ in range(2):  # what was copied for one layer must not outlive it
                out, lse = own.attend(0, query, scoring)
            for row, (slot, length) in enumerate(batch):
                assert_close((out[row], lse[row]), expected(query[row], slot, length, scoring, window))
                seen += 1
    assert seen == len(held)


@given(st.lists(st.integers(1, 200), min_size=1, max_size=12), st.data())
@settings(max_examples=40, deadline=None)
def test_rows_attend_over_the_part_of_their_prefix_that_they_see(lengths, data):
    cache, scoring = SlabCache(SHAPE), Scoring(0.5)
    held = filled(cache, lengths)
    owners = data.draw(st.lists(st.integers(0, len(held) - 1), min_size=1, max_size=20))
    bases = [data.draw(st.integers(1, held[owner][1])) for owner in owners]
    rows = {owner: [row for row, each in enumerate(owners) if each == owner] for owner in sorted(set(owners))}
    query = torch.randn(len(owners), HEADS, 2, DIM)
    found = {}
    for batch in by_slab((held[owner][0], numbers) for owner, numbers in rows.items()):
        shared = AttendedSlots(batch, bases, bases, [0] * len(bases), CPU)
        with torch.inference_mode():
            out, lse = shared.attend(0, query, scoring)
        found |= {row: (out[place], lse[place]) for row, place in zip(shared.rows, shared.grid)}
    assert sorted(found) == list(range(len(owners)))
    for row, owner in enumerate(owners):
        assert_close(found[row], expected(query[row], held[owner][0], bases[row], scoring, None))


def assert_close(found, wanted):
    for ours, theirs in zip(found, wanted):
        torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=1e-5)


def test_neighbours_are_read_in_place_and_scattered_slots_are_copied():
    cache = SlabCache(SHAPE)
    slots = [slot for slot, _ in filled(cache, [10] * 30)]
    near, far = Slots(slots[3:9], 10, CPU), Slots(slots[::9], 10, CPU)
    base = slots[0].slab.keys[0].untyped_storage().data_ptr()
    assert near.keys_and_values(0)[0].untyped_storage().data_ptr() == base
    assert far.keys_and_values(0)[0].untyped_storage().data_ptr() != base
    assert [len(view.keys_and_values(1)[1]) for view in (near, far)] == [6, 4]
