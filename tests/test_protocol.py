"""`DataProto`: the properties every batch operation promises, and each way to misuse it."""

from __future__ import annotations

import copy
import gc
import math
import pickle
import warnings
from concurrent.futures import Future
from itertools import chain

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tensordict import NonTensorData, TensorDict

from etude.errors import DataError
from etude.protocol import (
    DataProto,
    DataProtoFuture,
    DataProtoItem,
    collate_fn,
    pad_dataproto_to_divisor,
    unpad_dataproto,
)

SIZES = [0, 1, 3, 7]
sizes = st.sampled_from(SIZES)
quick = settings(max_examples=25, deadline=None)


def make(n: int, **meta: object) -> DataProto:
    """n rows whose columns all tell the row number."""
    tensors = {"ids": torch.arange(n), "hidden": torch.arange(n * 2.0).reshape(n, 2) / 3}
    cells = {
        "uid": [f"row{i}" for i in range(n)],
        "chat": [[{"role": "user", "content": str(i)}] * (i % 3) for i in range(n)],
    }
    return DataProto.from_dict(tensors, cells, {"temperature": 0.7, "nested": {"stop": [1, 2]}, **meta})


def rows(data: DataProto) -> list[int]:
    """The row numbers of `data`, after checking that all its columns agree on them."""
    ids = data.batch["ids"].tolist()
    assert data.non_tensor_batch["uid"].tolist() == [f"row{i}" for i in ids]
    assert [len(chat) for chat in data.non_tensor_batch["chat"]] == [i % 3 for i in ids]
    assert torch.equal(data.batch["hidden"], torch.tensor([[2.0 * i, 2.0 * i + 1] for i in ids]).reshape(-1, 2) / 3)
    data.check_consistency()
    return ids


def assert_equal(a: DataProto, b: DataProto) -> None:
    assert (a.batch is None) == (b.batch is None)
    if a.batch is not None and b.batch is not None:
        assert a.batch.batch_size == b.batch.batch_size
        assert set(a.batch.keys()) == set(b.batch.keys())
        for key in a.batch.keys():  # noqa: SIM118
            assert a.batch[key].dtype == b.batch[key].dtype
            assert torch.equal(a.batch[key], b.batch[key])
    assert a.non_tensor_batch.keys() == b.non_tensor_batch.keys()
    for key, column in a.non_tensor_batch.items():
        assert column.dtype == object
        assert column.tolist() == b.non_tensor_batch[key].tolist()
    assert a.meta_info == b.meta_info


# Construction


def test_from_single_dict_sorts_columns_by_type():
    data = DataProto.from_single_dict({"a": torch.zeros(2, 3), "b": np.array(["x", "y"]), "c": [[1], [2, 3]]}, {"m": 1})
    assert set(data.batch.keys()) == {"a"}
    assert data.non_tensor_batch["b"].tolist() == ["x", "y"]
    assert data.non_tensor_batch["c"].shape == (2,)
    assert data.non_tensor_batch["c"][1] == [2, 3]
    assert data.meta_info == {"m": 1}


def test_lists_of_equal_lists_stay_one_cell_a_row():
    data = DataProto.from_dict(non_tensors={"pairs": [[1, 2], [3, 4]]})
    assert data.non_tensor_batch["pairs"].shape == (2,)
    assert data.batch is None
    assert len(data) == 2


def test_the_length_comes_from_tensors_then_objects_then_is_zero():
    assert len(DataProto()) == 0
    assert len(DataProto(meta_info={"a": 1})) == 0
    assert len(DataProto.from_dict(non_tensors={"x": ["a"]})) == 1
    assert len(DataProto(TensorDict({}, batch_size=[5]))) == 5


@pytest.mark.parametrize(
    ("build", "told"),
    [
        (lambda: DataProto.from_single_dict({"bad": 3}), "'bad'"),
        (lambda: DataProto.from_dict({"a": torch.zeros(2), "b": torch.zeros(3)}), "'b'"),
        (lambda: DataProto.from_dict({"a": torch.tensor(1.0)}), "'a'"),
        (lambda: DataProto.from_dict({"a": [1, 2]}), "'a'"),
        (lambda: DataProto.from_dict({"a": torch.zeros(2)}, {"b": ["x"]}), "'b' has 1 rows, the batch has 2"),
        (lambda: DataProto.from_dict({"a": torch.zeros(1)}, {"a": ["x"]}), "'a' is in batch and"),
        (lambda: DataProto.from_dict(non_tensors={"a": np.array("x")}), "'a'"),
        (lambda: DataProto(TensorDict({}, batch_size=[2, 2])), "one batch dimension"),
        (lambda: DataProto(TensorDict({"n": NonTensorData("x", batch_size=[2])}, batch_size=[2])), "'n'"),
    ],
)
def test_inconsistent_columns_are_named(build, told):
    with pytest.raises(ValueError, match=told):
        build()


def test_check_consistency_finds_a_column_replaced_later():
    data = make(3)
    data.non_tensor_batch["uid"] = np.array(["a"], dtype=object)
    with pytest.raises(ValueError, match="'uid' has 1 rows"):
        data.check_consistency()
    data.non_tensor_batch["uid"] = np.arange(3)
    with pytest.raises(ValueError, match="'uid'"):
        data.check_consistency()


def test_a_plain_list_put_in_later_is_a_column():
    cells = ["p", [1], {"z": 1}, None]

    def with_list() -> DataProto:
        data = DataProto.from_dict({"ids": torch.arange(4)})
        data.non_tensor_batch["x"] = cells
        return data

    data = with_list()
    data.check_consistency()
    assert data[[3, 0]].non_tensor_batch["x"].tolist() == [None, "p"]
    assert data.repeat(2).non_tensor_batch["x"].tolist() == [cell for cell in cells for _ in range(2)]
    assert DataProto.concat([data, with_list()]).non_tensor_batch["x"].tolist() == cells * 2
    assert pad_dataproto_to_divisor(data, 3)[0].non_tensor_batch["x"].tolist() == [*cells, "p", [1]]
    assert [part.non_tensor_batch["x"].tolist() for part in data.chunk(2)] == [cells[:2], cells[2:]]
    assert data.union(DataProto.from_dict({}, {"x": cells})).select().non_tensor_batch["x"].tolist() == cells
    assert "4 objects" in data.print_size()
    data.reorder([3, 2, 1, 0])
    assert data.non_tensor_batch["x"].tolist() == cells[::-1]
    data.non_tensor_batch["x"] = cells[:2]
    with pytest.raises(ValueError, match="column 'x' has 2 rows, the batch has 4"):
        data.check_consistency()


def test_none_stands_for_nothing_and_auto_padding_for_what_is_always_done():
    data = DataProto(batch=TensorDict({"ids": torch.arange(3)}, batch_size=[3]), non_tensor_batch=None, meta_info=None)
    assert (len(data), data.non_tensor_batch, data.meta_info) == (3, {}, {})
    assert len(DataProto(non_tensor_batch=None)) == 0
    for padding in (True, False):
        assert_equal(DataProto.from_dict({"ids": torch.arange(3)}, auto_padding=padding), data)
        assert_equal(DataProto.from_single_dict({"ids": torch.arange(3)}, auto_padding=padding), data)


@pytest.mark.parametrize("n", SIZES)
def test_tensordict_round_trip(n):
    data = make(n)
    packed = data.to_tensordict()
    assert isinstance(packed, TensorDict)
    assert packed.batch_size == torch.Size([n])
    assert_equal(DataProto.from_tensordict(packed), data)


def test_equal_cells_are_still_a_column_after_the_tensordict_round_trip():
    data = DataProto.from_dict({"a": torch.zeros(2)}, {"same": ["x", "x"]}, {"same_meta": "x"})
    back = DataProto.from_tensordict(data.to_tensordict())
    assert back.non_tensor_batch["same"].tolist() == ["x", "x"]
    assert back.meta_info == {"same_meta": "x"}


def test_to_tensordict_refuses_a_meta_key_that_is_a_column():
    with pytest.raises(ValueError, match="'uid'"):
        make(2, uid=1).to_tensordict()


# Rows


def test_an_int_gives_an_item():
    item = make(3)[-1]
    assert isinstance(item, DataProtoItem)
    assert int(item.batch["ids"]) == 2
    assert item.non_tensor_batch["uid"] == "row2"
    assert len(list(make(3))) == 3
    with pytest.raises(IndexError, match="row 3 of a batch of 3"):
        make(3)[3]


@quick
@given(sizes, st.slices(7))
def test_slices_are_those_of_a_list(n, cut):
    assert rows(make(n)[cut]) == list(range(n))[cut]


@quick
@given(sizes.filter(bool).flatmap(lambda n: st.tuples(st.just(n), st.lists(st.integers(-n, n - 1)))))
def test_indices_of_every_kind_pick_the_same_rows(case):
    n, picked = case
    expected = [range(n)[i] for i in picked]
    data = make(n)
    assert rows(data[picked]) == expected
    assert rows(data[np.array(picked, dtype=np.int64)]) == expected
    assert rows(data.select_idxs(torch.tensor(picked, dtype=torch.long))) == expected


@quick
@given(st.lists(st.booleans(), max_size=7))
def test_masks_pick_their_true_rows(mask):
    expected = [i for i, keep in enumerate(mask) if keep]
    assert rows(make(len(mask))[mask]) == expected
    assert rows(make(len(mask))[torch.tensor(mask, dtype=torch.bool)]) == expected


@pytest.mark.parametrize(
    ("idxs", "error"),
    [
        ([0, 3], IndexError),
        ([-4], IndexError),
        ([True, False], ValueError),
        ([0.5], ValueError),
        (torch.tensor([[0, 1]]), ValueError),
        (np.zeros(0, dtype=bool), ValueError),
    ],
)
def test_bad_row_numbers_are_refused(idxs, error):
    with pytest.raises(error):
        make(3).select_idxs(idxs)


def test_slice_method_is_the_slice():
    assert rows(make(7).slice(1, 6, 2)) == [1, 3, 5]
    assert rows(make(7).slice(end=2)) == [0, 1]


def test_a_slice_is_a_view_and_an_index_is_a_copy():
    data = make(3)
    data[:2].batch["ids"][0] = 9
    assert data.batch["ids"].tolist() == [9, 1, 2]
    data[[0]].batch["ids"][0] = 5
    assert data.batch["ids"].tolist() == [9, 1, 2]


@quick
@given(st.permutations(range(7)))
def test_reorder_and_its_inverse(order):
    data = make(7)
    assert data.reorder(order) is None
    assert rows(data) == order
    data.reorder(torch.tensor(order).argsort())
    assert_equal(data, make(7))


@pytest.mark.parametrize("indices", [[0, 0, 1], [0, 1]])
def test_reorder_refuses_what_loses_rows(indices):
    with pytest.raises(ValueError, match="permutation"):
        make(3).reorder(indices)


@quick
@given(sizes, st.integers(1, 4))
def test_repeat(n, times):
    assert rows(make(n).repeat(times)) == [i for i in range(n) for _ in range(times)]
    assert rows(make(n).repeat(times, interleave=False)) == list(range(n)) * times
    with pytest.raises(ValueError, match="repeat_times"):
        make(n).repeat(0)


def test_sample_level_repeat():
    assert rows(make(3).sample_level_repeat([2, 0, 1])) == [0, 0, 2]
    assert rows(make(0).sample_level_repeat([])) == []
    for bad in ([1, 1], [1, -1, 1]):
        with pytest.raises(ValueError, match="3 counts"):
            make(3).sample_level_repeat(bad)


@quick
@given(sizes, st.integers(1, 4))
def test_concat_undoes_chunk(size, chunks):
    data = make(size * chunks)
    parts = data.chunk(chunks)
    assert [len(part) for part in parts] == [size] * chunks
    assert_equal(DataProto.concat(parts), data)


@quick
@given(sizes, st.integers(1, 8))
def test_concat_undoes_split(n, split_size):
    parts = make(n).split(split_size)
    assert all(len(part) == split_size for part in parts[:-1])
    assert_equal(DataProto.concat(parts), make(n))


@pytest.mark.parametrize(("n", "chunks"), [(7, 3), (3, 0), (1, 2)])
def test_uneven_chunks_are_refused(n, chunks):
    with pytest.raises(ValueError, match=f"{n} rows cannot be divided into {chunks}"):
        make(n).chunk(chunks)


def test_split_needs_a_size():
    with pytest.raises(ValueError, match="split_size"):
        make(3).split(0)


@quick
@given(sizes, st.integers(1, 9))
def test_unpad_undoes_pad(n, divisor):
    padded, pad_size = pad_dataproto_to_divisor(make(n), divisor)
    assert len(padded) % divisor == 0
    assert pad_size < divisor
    assert rows(padded) == [i % n for i in range(n + pad_size)]
    assert_equal(unpad_dataproto(padded, pad_size), make(n))


def test_padding_starts_at_the_head_and_goes_round():
    assert rows(pad_dataproto_to_divisor(make(3), 4)[0]) == [0, 1, 2, 0]
    assert rows(pad_dataproto_to_divisor(make(1), 3)[0]) == [0, 0, 0]
    with pytest.raises(ValueError, match="size_divisor"):
        pad_dataproto_to_divisor(make(1), 0)
    for bad in (-1, 2):
        with pytest.raises(ValueError, match="rows of padding"):
            unpad_dataproto(make(1), bad)


def test_an_iterator_goes_through_all_rows_each_epoch():
    plain = [rows(part) for part in make(6).make_iterator(2, epochs=2)]
    assert plain == [[0, 1], [2, 3], [4, 5]] * 2
    shuffled = [rows(part) for part in make(6).make_iterator(2, 2, seed=1, dataloader_kwargs={"shuffle": True})]
    assert shuffled == [rows(part) for part in make(6).make_iterator(2, 2, 1, {"shuffle": True})]
    first, second = [*chain(*shuffled[:3])], [*chain(*shuffled[3:])]
    assert sorted(first) == sorted(second) == list(range(6))
    assert first != second
    assert list(make(0).make_iterator(2, 1)) == []


def test_an_iterator_complains_before_it_starts():
    with pytest.raises(ValueError, match="7 rows"):
        make(7).make_iterator(2, 1)
    with pytest.raises(ValueError, match="num_workers"):
        make(6).make_iterator(2, 1, dataloader_kwargs={"num_workers": 2})


@pytest.mark.parametrize("n", [1, 3])
def test_collate_undoes_taking_rows(n):
    assert_equal(collate_fn([make(n)[i] for i in range(n)]), make(n))


def test_collate_refuses_what_is_not_one_batch():
    with pytest.raises(ValueError, match="nothing"):
        collate_fn([])
    with pytest.raises(ValueError, match="'seed'"):
        collate_fn([make(1, seed=1)[0], make(1, seed=2)[0]])


# meta_info


@pytest.mark.parametrize(
    "derive",
    [
        lambda d: d[:2],
        lambda d: d[[0, 1]],
        lambda d: d[0],
        lambda d: d.slice(0, 1),
        lambda d: d.chunk(3)[0],
        lambda d: d.split(2)[0],
        lambda d: d.repeat(2),
        lambda d: d.sample_level_repeat([1, 1, 1]),
        lambda d: d.select(),
        lambda d: DataProto.concat([d]),
        lambda d: DataProto().union(d),
        lambda d: DataProto.from_dict(meta_info=d.meta_info),
        lambda d: DataProto.from_tensordict(d.to_tensordict()),
        lambda d: pad_dataproto_to_divisor(d, 3)[0],
        lambda d: pad_dataproto_to_divisor(d, 4)[0],
        lambda d: unpad_dataproto(d, 0),
        lambda d: next(d.make_iterator(3, 1)),
        lambda d: collate_fn([d[0]]),
        copy.copy,
        copy.deepcopy,
    ],
)
def test_meta_info_is_never_shared(derive):
    data = make(3, weights=np.zeros(2), tensor=torch.zeros(2), pair=([1], {"k": {2}}))
    other = derive(data).meta_info
    assert other["nested"] == {"stop": [1, 2]}
    other["new"] = 1
    other["nested"]["stop"].append(3)
    other["pair"][0].append(2)
    other["pair"][1]["k"].add(3)
    other["weights"] += 1
    other["tensor"] += 1
    assert "new" not in data.meta_info
    assert data.meta_info["nested"] == {"stop": [1, 2]}
    assert data.meta_info["pair"] == ([1], {"k": {2}})
    assert data.meta_info["weights"].tolist() == [0, 0]
    assert data.meta_info["tensor"].tolist() == [0, 0]


def test_objects_in_meta_info_that_are_no_containers_are_shared():
    thing = object()
    assert make(1, thing=thing)[:].meta_info["thing"] is thing


def test_a_column_added_to_all_rows_stays_theirs():
    data = make(3)
    data[:].batch["more"] = torch.ones(3)
    assert "more" not in data.batch


def test_concat_gathers_metrics_and_wants_the_rest_equal():
    parts = [make(1, metrics={"loss": 1.0}), make(1, metrics=[{"loss": 2.0, "kl": 0.1}, {"loss": 3.0}], extra=5)]
    merged = DataProto.concat(parts).meta_info
    assert merged["metrics"] == {"loss": [1.0, 2.0, 3.0], "kl": [0.1]}
    assert merged["extra"] == 5
    with pytest.raises(ValueError, match="meta_info 'seed'"):
        DataProto.concat([make(1, seed=1), make(1, seed=2)])


def test_concat_of_settings_only():
    merged = DataProto.concat([DataProto(meta_info={"metrics": {"loss": x}}) for x in (1.0, 2.0)])
    assert merged.batch is None
    assert merged.meta_info == {"metrics": {"loss": [1.0, 2.0]}}


@pytest.mark.parametrize(
    ("other", "told"),
    [
        (DataProto.from_dict({"a": torch.zeros(1), "b": torch.zeros(1)}), "column 'b'"),
        (DataProto.from_dict(non_tensors={"a": ["x"]}), "column 'a'"),
        (DataProto.from_dict({"a": torch.zeros(1, 2)}), "column 'a'"),
        (DataProto.from_dict({"a": torch.zeros(1, dtype=torch.long)}), "column 'a'"),
        (DataProto(), "column 'a'"),
    ],
)
def test_concat_names_the_column_that_does_not_fit(other, told):
    with pytest.raises(ValueError, match=told):
        DataProto.concat([DataProto.from_dict({"a": torch.zeros(1)}), other])


def test_concat_of_nothing_is_an_error():
    with pytest.raises(ValueError, match="nothing"):
        DataProto.concat([])


# Columns


def test_select_takes_columns_and_leaves_the_rest():
    data = make(3)
    part = data.select(["ids"], ["uid"], ["nested"])
    assert list(part.batch.keys()) == ["ids"]
    assert list(part.non_tensor_batch) == ["uid"]
    assert part.meta_info == {"nested": {"stop": [1, 2]}}
    assert len(data.select(batch_keys=[], non_tensor_batch_keys=[])) == 3
    assert_equal(data.select(), data)


def test_select_copies_only_when_asked():
    data = make(3)
    data.select(["ids"]).batch["ids"][0] = 7
    assert data.batch["ids"][0] == 7
    deep = data.select(deepcopy=True)
    deep.batch["ids"][0] = 8
    deep.non_tensor_batch["chat"][1].append("more")
    assert data.batch["ids"][0] == 7
    assert len(data.non_tensor_batch["chat"][1]) == 1


@pytest.mark.parametrize("method", ["select", "pop"])
@pytest.mark.parametrize("keys", [(["ids", "nope"],), ((), ["nope"]), ((), (), ["nope"])])
def test_unknown_keys_are_named_and_nothing_is_removed(method, keys):
    data = make(3)
    with pytest.raises(ValueError, match="no 'nope' in"):
        getattr(data, method)(*keys)
    assert_equal(data, make(3))


def test_pop_moves_columns():
    data = make(3)
    popped = data.pop(["hidden"], ["uid"], ["temperature"])
    assert list(popped.batch.keys()) == ["hidden"]
    assert popped.non_tensor_batch["uid"].tolist() == ["row0", "row1", "row2"]
    assert popped.meta_info == {"temperature": 0.7}
    assert list(data.batch.keys()) == ["ids"]
    assert list(data.non_tensor_batch) == ["chat"]
    assert "temperature" not in data.meta_info
    data.pop(["ids"], ["chat"])
    assert len(data) == 3
    assert make(3).pop(non_tensor_batch_keys=["uid"]).batch is None


def test_rename_either_kind_and_swap():
    data = make(2)
    assert data.rename("ids", "numbers") is data
    data.rename(["uid", "numbers", "hidden"], ["name", "hidden", "numbers"])
    assert data.batch["hidden"].tolist() == [0, 1]
    assert data.batch["numbers"].shape == (2, 2)
    assert data.non_tensor_batch["name"].tolist() == ["row0", "row1"]


@pytest.mark.parametrize(
    ("old", "new", "told"),
    [("nope", "x", "no column 'nope'"), ("ids", "uid", "one name"), (["ids", "uid"], ["x"], "2 old names for 1")],
)
def test_rename_refuses(old, new, told):
    data = make(2)
    with pytest.raises(ValueError, match=told):
        data.rename(old, new)
    assert_equal(data, make(2))


@quick
@given(sizes)
def test_union_with_itself_changes_nothing(n):
    data = make(n)
    assert data.union(make(n)) is data
    assert_equal(data, make(n))


def test_union_adds_columns_in_place():
    data = make(2).select(["ids"], [])
    data.union(DataProto.from_dict({"new": torch.ones(2)}, {"tag": ["a", "b"]}, {"extra": 1}))
    assert set(data.batch.keys()) == {"ids", "new"}
    assert data.non_tensor_batch["tag"].tolist() == ["a", "b"]
    assert data.meta_info["extra"] == 1
    assert_equal(DataProto().union(make(3)), make(3))
    objects = DataProto.from_dict(non_tensors={"tag": ["a", "b"]})
    assert objects.union(DataProto.from_dict({"new": torch.ones(2)})).batch["new"].shape == (2,)


def test_union_takes_nan_for_equal_to_nan():
    def nans() -> DataProto:
        cells = [{"a": [math.nan, np.array([math.nan, 1.0])], "t": torch.tensor([math.nan])}]
        return DataProto.from_dict({"x": torch.tensor([math.nan])}, {"y": cells}, {"z": float("nan")})

    nans().union(nans())


@pytest.mark.parametrize(
    ("other", "told"),
    [
        (DataProto.from_dict({"ids": torch.tensor([0, 5])}), "column 'ids'"),
        (DataProto.from_dict({"ids": torch.tensor([0.0, 1.0])}), "column 'ids'"),
        (DataProto.from_dict({"hidden": torch.zeros(2)}), "column 'hidden'"),
        (DataProto.from_dict(non_tensors={"uid": ["row0", "other"]}), "column 'uid'"),
        (DataProto.from_dict(non_tensors={"ids": [0, 1]}), "column 'ids'"),
        (DataProto(meta_info={"nested": {"stop": [1]}}), "meta_info 'nested'"),
        (DataProto(meta_info={"temperature": np.array([0.7])}), "meta_info 'temperature'"),
        (DataProto.from_dict({"new": torch.zeros(3)}), "2 rows with 3"),
    ],
)
def test_union_names_the_conflict_and_adds_nothing(other, told):
    data = make(2)
    with pytest.raises(ValueError, match=told):
        data.union(other)
    assert_equal(data, make(2))


def test_to_moves_in_place():
    data = make(2)
    assert data.to("meta") is data
    assert data.batch["ids"].device.type == "meta"
    assert DataProto().to("cpu").batch is None


# Serialisation

DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.bool, torch.int64, torch.uint8]


def out_of_band(data: DataProto) -> tuple[DataProto, list[bytes]]:
    buffers: list[pickle.PickleBuffer] = []
    stream = pickle.dumps(data, protocol=5, buffer_callback=buffers.append)
    sent = [buffer.raw().tobytes() for buffer in buffers]  # read-only, as in Ray's object store
    return pickle.loads(stream, buffers=sent), sent


@quick
@given(st.sampled_from(DTYPES), st.lists(st.integers(0, 3), min_size=1, max_size=3), st.integers(2, 5))
def test_pickles_are_bit_exact(dtype, shape, protocol):
    tensor = torch.rand(shape).mul(300).to(dtype)
    data = DataProto.from_dict({"x": tensor}, {"o": [{"k": [i]} for i in range(shape[0])]}, {"m": [1]})
    for back in (pickle.loads(pickle.dumps(data, protocol=protocol)), out_of_band(data)[0]):
        assert_equal(back, data)
    back = pickle.loads(pickle.dumps(data, protocol=protocol))
    back.batch["x"].zero_()  # memory of its own, and writable
    assert torch.equal(data.batch["x"], tensor)


def test_received_buffers_are_read_in_place_and_outlive_what_brought_them():
    data = make(5)
    back, sent = out_of_band(data)
    places = {np.frombuffer(buffer, dtype=np.uint8).ctypes.data for buffer in sent}
    assert {tensor.data_ptr() for tensor in back.batch.values()} <= places
    del sent
    gc.collect()
    assert_equal(back, data)


def test_a_worker_adds_columns_to_a_received_batch():
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # PyTorch warns of memory that is not to be written to
        back, sent = out_of_band(make(4))
    before = [bytes(buffer) for buffer in sent]
    back.batch["doubled"] = back.batch["ids"] * 2
    back.non_tensor_batch["note"] = ["a", "b", "c", "d"]
    back.meta_info["seen"] = True
    both = back.union(DataProto.from_dict({"more": torch.ones(4)}))
    assert torch.equal(both.select_idxs([3, 1]).batch["doubled"], make(4).batch["ids"][[3, 1]] * 2)
    assert [bytes(buffer) for buffer in sent] == before


def test_arrays_within_rows_are_sent_out_of_band():
    rows = [{"image": np.full((50, 50), i), "more": [torch.tensor([i])]} for i in range(3)]
    data = DataProto.from_dict({"x": torch.arange(3)}, {"rows": rows})
    back, sent = out_of_band(data)
    assert sorted(map(len, sent)) == [24, *[50 * 50 * 8] * 3]
    for row, same in zip(back.non_tensor_batch["rows"], rows):
        assert np.array_equal(row["image"], same["image"])
        assert torch.equal(row["more"][0], same["more"][0])


def test_pickles_keep_nan_payloads():
    bits = torch.tensor([0x7FC00001, -1], dtype=torch.int32)
    back = pickle.loads(pickle.dumps(DataProto.from_dict({"x": bits.view(torch.float32)}), protocol=5))
    assert torch.equal(back.batch["x"].view(torch.int32), bits)


def test_a_slice_is_sent_as_one_buffer_of_its_own_bytes():
    big = DataProto.from_dict({"x": torch.arange(100_000.0).reshape(1000, 100)})
    back, sent = out_of_band(big[3:5])
    assert [len(buffer) for buffer in sent] == [2 * 100 * 4]
    assert torch.equal(back.batch["x"], big.batch["x"][3:5])
    assert len(pickle.dumps(big[3:5], protocol=5)) < 3000
    transposed = DataProto.from_dict({"x": torch.arange(6.0).reshape(2, 3).t()})
    back, sent = out_of_band(transposed)
    assert [len(buffer) for buffer in sent] == [24]
    assert torch.equal(back.batch["x"], transposed.batch["x"])


@pytest.mark.parametrize("tensor", [torch.arange(6.0).reshape(3, 2)[:1, 1:], torch.arange(8.0)[1::9], torch.ones(2, 0)])
def test_single_elements_with_a_stride_are_sent(tensor):
    back = pickle.loads(pickle.dumps(DataProto.from_dict({"x": tensor}), protocol=5))
    assert torch.equal(back.batch["x"], tensor)


def test_out_of_band_buffers_are_the_tensors_own_memory():
    data = DataProto.from_dict({"x": torch.zeros(4)})
    buffers: list[pickle.PickleBuffer] = []
    pickle.dumps(data, protocol=5, buffer_callback=buffers.append)
    data.batch["x"][0] = 1.0
    assert np.frombuffer(buffers[0].raw(), dtype=np.float32)[0] == 1.0


@pytest.mark.parametrize(
    "data", [DataProto(), DataProto(TensorDict({}, batch_size=[4])), make(0), make(7), make(7)[::2]]
)
def test_every_shape_of_batch_survives_a_pickle(data):
    assert_equal(pickle.loads(pickle.dumps(data)), data)
    assert_equal(out_of_band(data)[0], data)


@pytest.mark.parametrize("n", SIZES)
def test_saved_is_loaded(tmp_path, n):
    path = tmp_path / "batch.pkl"
    make(1).save_to_disk(path)
    make(n).save_to_disk(path)
    assert_equal(DataProto.load_from_disk(str(path)), make(n))
    assert list(tmp_path.iterdir()) == [path]


def test_a_failed_save_leaves_the_old_file(tmp_path):
    path = tmp_path / "batch.pkl"
    make(1).save_to_disk(path)
    with pytest.raises(Exception, match="pickle"):
        make(1, unpicklable=lambda: None).save_to_disk(path)
    assert_equal(DataProto.load_from_disk(path), make(1))
    assert list(tmp_path.iterdir()) == [path]


def test_bad_files_are_named(tmp_path):
    with pytest.raises(DataError, match=r"missing\.pkl"):
        DataProto.load_from_disk(tmp_path / "missing.pkl")
    other = tmp_path / "other.pkl"
    other.write_bytes(pickle.dumps([1]))
    with pytest.raises(DataError, match=r"other\.pkl' holds a list"):
        DataProto.load_from_disk(other)
    make(3).save_to_disk(other)
    other.write_bytes(other.read_bytes()[:-20])
    with pytest.raises(DataError, match=r"other\.pkl"):
        DataProto.load_from_disk(other)


def test_descriptions_are_text():
    info = make(3).get_data_info()
    assert "3 rows" in info
    assert "hidden: (3, 2) torch.float32 on cpu" in info
    assert "uid: (3,) objects, the first a str" in info
    assert "meta_info 'temperature': float" in info
    assert "the first a nothing" in make(0).get_data_info()
    assert make(3).print_size("here: ").startswith("here: 3 rows: 0.000 MiB of tensors, 6 objects")


# Futures


def done(value: object) -> Future:
    future: Future = Future()
    future.set_result(value)
    return future


def test_a_future_gathers_once_and_chunks_lazily():
    parts: list[Future] = [done(make(4)[:2]), Future()]
    future = DataProtoFuture.concat(parts)
    chunks = future.chunk(2)
    with pytest.raises(TimeoutError, match="1 of 2"):
        chunks[1].get(timeout=0.001)
    parts[1].set_result(make(4)[2:])
    assert [rows(chunk.get()) for chunk in chunks] == [[0, 1], [2, 3]]
    assert_equal(future.get(), make(4))
    assert future.get() is future.get()


def test_a_future_raises_what_its_part_raised():
    broken: Future = Future()
    broken.set_exception(ConnectionError("gone"))
    future = DataProtoFuture.concat([done(make(1)), broken])
    for _ in range(2):
        with pytest.raises(ConnectionError, match="gone"):
            future.get(timeout=1)
    with pytest.raises(ValueError, match="3 rows"):
        DataProtoFuture.concat([done(make(3))]).chunk(2)[0].get()
