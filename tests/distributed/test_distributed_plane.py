"""The data plane: what is put is read back, bit for bit, whichever store holds it, or the reader is told what is gone."""

from __future__ import annotations

import os
import pickle
import sys
import time

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from etude.distributed import BatchRef, DataPlane, InProcessStore, LostSamplesError
from etude.distributed.plane import check_unwritten, fetch_batches, keep_batches
from etude.errors import ConfigError, MissingExtraError
from etude.protocol import DataProto, byte_view

pytestmark = [pytest.mark.slow, pytest.mark.timeout(240)]
STORES = ["in process", "ray", "transfer queue"]


@pytest.fixture(scope="module")
def cluster(tmp_path_factory):
    ray = pytest.importorskip("ray")
    ray.cloudpickle.register_pickle_by_value(sys.modules[__name__])  # workers cannot import tests
    ray.init(
        address="local",
        num_cpus=8,
        include_dashboard=False,
        log_to_driver=False,
        object_store_memory=200 << 20,
        _temp_dir=f"/tmp/etude-plane-{os.getpid()}",
    )
    yield ray
    ray.shutdown()


@pytest.fixture(scope="module")
def stores(cluster):
    """One of each, by name; TransferQueue is started once."""
    from etude.distributed.queue_store import QueueStore
    from etude.distributed.ray_store import RayStore

    queue = QueueStore.start()
    yield {"in process": InProcessStore(), "ray": RayStore(), "transfer queue": queue}
    queue.close()


@pytest.fixture(scope="module")
def workers(cluster):
    return [cluster.remote(Holder).options(num_cpus=0).remote() for _ in range(2)]


def rows_of(data: DataProto) -> list[dict[str, object]]:
    """Each row's columns as comparable values, dtypes and shapes included."""
    return [{name: value_of(column[row]) for name, column in columns_of(data).items()} for row in range(len(data))]


def columns_of(data: DataProto) -> dict:
    return {**({} if data.batch is None else dict(data.batch.items())), **data.non_tensor_batch}


def value_of(cell: object) -> object:
    if isinstance(cell, torch.Tensor):
        return cell.dtype, tuple(cell.shape), byte_view(cell).tolist()
    if isinstance(cell, np.ndarray):
        return cell.dtype.str, cell.shape, [value_of(each) for each in cell.ravel().tolist()]
    if isinstance(cell, dict):
        return {key: value_of(each) for key, each in cell.items()}
    return type(cell), cell


DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.bool, torch.int64, torch.uint8]
CELLS = [None, 1, 0.5, "é", {"image": np.arange(4.0)}, [{"role": "user"}], np.zeros((2, 2)), torch.ones(3)]


@st.composite
def columns(draw, rows: int, name: str):
    """A batch of one or two columns of any kind, in any memory layout."""
    dtype, tail = draw(st.sampled_from(DTYPES)), draw(st.lists(st.integers(0, 3), max_size=2))
    tensor = torch.randint(0, 100, (rows, *tail), generator=torch.Generator().manual_seed(draw(st.integers(0, 99))))
    tensor = tensor.to(dtype)
    if draw(st.booleans()):  # not contiguous
        tensor = torch.stack([tensor, tensor], dim=-1)[..., 0]
    objects = {f"{name} objects": draw(st.lists(st.sampled_from(CELLS), min_size=rows, max_size=rows))}
    return DataProto.from_dict({name: tensor}, objects if draw(st.booleans()) else None)


@st.composite
def histories(draw):
    """Puts of disjoint sets of columns for overlapping samples, evictions, and reads in any order."""
    actions, alive = [], dict[str, set[str]]()
    pool = [f"s{i}" for i in range(8)]
    for number in range(draw(st.integers(1, 5))):
        ids = draw(st.lists(st.sampled_from(pool), min_size=1, max_size=6, unique=True))
        data = draw(columns(len(ids), f"c{number}"))
        actions.append(("put", ids, data))
        for sample in ids:
            alive.setdefault(sample, set()).update(columns_of(data))
        asked = draw(st.lists(st.sampled_from(sorted(alive)), max_size=6))
        shared = set.intersection(*(alive[sample] for sample in asked)) if asked else set()
        actions.append(("get", asked, draw(st.sets(st.sampled_from(sorted(shared)))) if shared else set()))
        if draw(st.booleans()):
            gone = draw(st.lists(st.sampled_from(sorted(alive)), max_size=3, unique=True))
            actions.append(("evict", gone, None))
            for sample in gone:
                del alive[sample]
            if not alive:
                break
    return actions


@pytest.mark.parametrize("name", STORES)
@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(history=histories())
def test_any_store_gives_back_what_was_put(stores, name, history):
    plane, model = DataPlane(stores[name]), dict[str, dict[str, object]]()
    for action, ids, what in history:
        if action == "put":
            plane.put(ids, what)
            for sample, row in zip(ids, rows_of(what)):
                model.setdefault(sample, {}).update(row)
        elif action == "get":
            found = plane.get(ids, what)
            assert rows_of(found) == ([{key: model[sample][key] for key in what} for sample in ids] if what else [])
        else:
            plane.evict(ids)
            for sample in ids:
                del model[sample]
                with pytest.raises(KeyError, match=sample):
                    plane.get([sample])
    assert len(plane) == len(model)
    plane.evict(list(model))
    assert len(plane) == 0


@settings(max_examples=20, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(chosen=st.lists(st.integers(0, 9), min_size=1, max_size=12), rows=st.integers(1, 4))
def test_any_rows_of_a_column_in_slices_are_read(stores, monkeypatch, chosen, rows):
    data = DataProto.from_dict({"x": torch.arange(30).reshape(10, 3)}, {"cells": list(range(10))})
    monkeypatch.setattr("etude.distributed.ray_store._SLICE_BYTES", rows * 24)
    ref = BatchRef.of(data, stores["ray"])
    assert len(ref.layouts[0].blocks[0].handles["x"].refs) == -(-10 // rows)
    assert rows_of(ref.select_idxs(chosen).fetch()) == rows_of(data.select_idxs(chosen))
    assert rows_of(ref.fetch()) == rows_of(data)


def some(rows: int = 4, name: str = "x", width: int = 3) -> DataProto:
    return DataProto.from_dict({name: torch.arange(rows * width).reshape(rows, width)})


def test_a_batch_in_one_block_is_read_without_a_copy():
    data, plane = some(), DataPlane()
    plane.put("abcd", data)
    assert plane.get("abcd").batch["x"].data_ptr() == data.batch["x"].data_ptr()
    assert plane.get("bcd").batch["x"].data_ptr() == data.batch["x"][1:].data_ptr()


def test_misuse_is_refused_and_changes_nothing():
    plane = DataPlane()
    plane.put("abcd", some())
    for ids, data, told in [
        ("ab", some(), "2 different sample ids for 4 rows"),
        ("eeff", some(name="y"), "2 different sample ids for 4 rows"),
        ("defg", some(), "sample 'd' has a column 'x' already"),
    ]:
        with pytest.raises(ValueError, match=told):
            plane.put(ids, data)
    plane.put("ab", some(2, "y"))
    with pytest.raises(KeyError, match="sample 'c' has no column 'y'"):
        plane.get("abc", ["y"])
    with pytest.raises(KeyError, match="sample 'c' has no column 'y'"):
        plane.get("bc")
    with pytest.raises(KeyError, match=r"no samples 'p', 'q', 'r' and 1 more"):
        plane.evict("apqrs")
    assert rows_of(plane.get("abcd", ["x"])) == rows_of(some())


class Holder:
    """A worker that writes to the driver's store, and reads what it is sent."""

    def write(self, store, data):
        return BatchRef.of(data, store)

    def total(self, batch):
        data = batch.fetch()
        return sorted(columns_of(data)), float(data.batch["x"].sum()), dict(data.meta_info)


@pytest.mark.parametrize("name", STORES[1:])
def test_workers_write_and_read_while_the_driver_holds_references(cluster, stores, workers, name):
    plane = DataPlane(stores[name])
    writer, reader = workers
    data = DataProto.from_dict({"x": torch.arange(40_000.0).reshape(4, -1), "y": torch.zeros(4)})
    written: BatchRef = cluster.get(writer.write.remote(stores[name], data), timeout=60)
    plane.put("abcd", written)
    sent = plane.refer("db", ["x"], {"temperature": 0.5})
    assert len(sent) == 2
    assert sent.columns == {"x"}
    assert len(cluster.cloudpickle.dumps(written)) + len(cluster.cloudpickle.dumps(sent)) < 5000  # of 160 kB
    found = cluster.get(reader.total.remote(sent), timeout=60)
    assert found == (["x"], float(data.batch["x"][[1, 3]].sum()), {"temperature": 0.5})
    plane.evict("abcd")


def test_a_row_gone_from_transfer_queue_is_an_error(stores):
    import transfer_queue

    plane = DataPlane(stores["transfer queue"])
    plane.put("abcd", some())
    name = plane.refer("a").layouts[0].blocks[0].handles["x"][0]
    transfer_queue.kv_clear([f"{name}/2"], "etude")
    assert len(plane.get("abd")) == 3
    with pytest.raises(LostSamplesError, match=r"samples 'b', 'c', held by a storage unit.*1 of 2 rows"):
        plane.get("bc")
    plane.evict("abcd")


def test_transfer_queue_frees_what_nothing_refers_to(stores):
    import transfer_queue

    plane, queue = DataPlane(stores["transfer queue"]), stores["transfer queue"]
    before = len(transfer_queue.kv_list("etude").get("etude", {}))
    plane.put("abcd", some())
    other = BatchRef.of(some(name="y"), queue).watched()
    assert len(transfer_queue.kv_list("etude")["etude"]) == before + 8
    plane.evict("abc")  # the block stays: 'd' is in it
    assert len(transfer_queue.kv_list("etude")["etude"]) == before + 8
    plane.evict("d")
    assert len(transfer_queue.kv_list("etude")["etude"]) == before + 4
    del other
    queue.sweep()
    assert len(transfer_queue.kv_list("etude").get("etude", {})) == before


def test_transfer_queue_that_cannot_start_is_refused(cluster, stores, monkeypatch):
    from etude.distributed.queue_store import QueueStore

    with pytest.raises(ConfigError, match="needs 101 free CPUs in the cluster"):
        QueueStore.start(units=100)
    monkeypatch.setitem(sys.modules, "transfer_queue", None)
    with pytest.raises(MissingExtraError, match=r"etude\[transferqueue\]"):
        QueueStore.start()


def test_a_reference_crosses_a_pickle_in_process():
    plane = DataPlane()
    plane.put("abcd", some())
    back = pickle.loads(pickle.dumps(plane.refer("ca", ["x"])))
    assert torch.equal(back.fetch().batch["x"], some().batch["x"][[2, 0]])


def test_samples_of_a_killed_holder_are_named_with_its_node(cluster, stores, workers):
    plane = DataPlane(stores["ray"], timeout=30)
    for ids, holder in zip(("abcdef", "ghijkl"), workers):
        plane.put(ids, cluster.get(holder.write.remote(stores["ray"], some(6)), timeout=60))
    cluster.kill(workers[0])
    node = cluster.get_runtime_context().get_node_id()[:8]
    lost, end = "", time.monotonic() + 60
    while not lost and time.monotonic() < end:  # the node frees them when it hears of the death
        try:
            plane.get("bgdhae")
        except LostSamplesError as error:
            lost = str(error)
    assert lost.startswith(f"samples 'b', 'd', 'a' and 1 more, held by node {node}")
    assert "OwnerDiedError" in lost
    assert plane.get("gh").batch["x"].shape == (2, 3)  # the others are there
    plane.evict("abcdefghijkl")


# References


@st.composite
def operations(draw):
    """Selections, joins and unions, as pairs of an operation's name and its argument."""
    found = []
    for _ in range(draw(st.integers(0, 5))):
        name = draw(st.sampled_from(["rows", "mask", "slice", "concat", "union", "chunk"]))
        found.append((name, draw(st.integers(0, 2**30))))
    return found


def apply(data, name, seed, made):
    """An operation on a batch or on a reference; `made` gives a fresh batch of as many rows, in the same form."""
    pick = np.random.default_rng(seed)
    if name == "rows":
        return data.select_idxs(pick.integers(0, len(data), size=len(data) + 1).tolist())
    if name == "mask":
        return data.select_idxs(torch.from_numpy(pick.random(len(data)) < 0.8))
    if name == "slice":
        return data[: max(1, len(data) - 1)]
    if name == "concat":
        return type(data).concat([data, data.select_idxs(pick.permutation(len(data)).tolist())])
    if name == "chunk":
        return type(data).concat(data.chunk(2)[::-1]) if len(data) % 2 == 0 else data
    return data.union(made(len(data), f"u{seed}"))


@given(history=operations(), rows=st.integers(1, 5))
@settings(max_examples=60, deadline=None)
def test_references_are_selected_joined_and_united_as_batches_are(history, rows):
    store = InProcessStore()

    def plain(count, name):
        ids = torch.arange(count) + len(name)
        return DataProto.from_dict(
            {name: ids, f"{name} wide": ids[:, None] * torch.ones(2)}, {f"{name} o": list(range(count))}
        )

    def referred(count, name):
        return BatchRef.of(plain(count, name), store)

    data, ref = plain(rows, "x"), referred(rows, "x")
    for name, seed in history:
        if name == "union" and f"u{seed}" in columns_of(data):
            continue
        data, ref = apply(data, name, seed, plain), apply(ref, name, seed, referred)
        assert len(ref) == len(data)
        if not len(data):
            return
    assert rows_of(ref.fetch()) == rows_of(data)
    assert (ref.columns, ref.objects) == (set(columns_of(data)), set(data.non_tensor_batch))
    some_names = sorted(ref.columns)[::2]
    assert set(columns_of(ref.restrict(some_names).fetch())) == set(some_names)


def test_references_that_do_not_fit_together_are_refused():
    store = InProcessStore()
    one, other = BatchRef.of(some(), store), BatchRef.of(some(name="y"), store)
    with pytest.raises(ValueError, match="column 'x' is in both"):
        one.union(one)
    with pytest.raises(ValueError, match="cannot unite 4 rows with 2"):
        one.union(other[:2])
    with pytest.raises(ValueError, match="parts with the same columns"):
        BatchRef.concat([one, other])
    with pytest.raises(ValueError, match="4 rows cannot be divided into 3"):
        one.chunk(3)


def test_batches_in_a_result_are_kept_and_in_an_argument_fetched():
    result = {"metrics": 1.0, "parts": [some(), some(2)], "empty": DataProto(meta_info={"a": 1})}
    kept = keep_batches((iter([some()]), result), InProcessStore())
    assert isinstance(kept[0][0], BatchRef)
    assert [len(part) for part in kept[1]["parts"]] == [4, 2]
    assert kept[1]["empty"].meta_info == {"a": 1}
    fetched = []
    back = fetch_batches(kept, fetched)
    assert torch.equal(back[1]["parts"][1].batch["x"], some(2).batch["x"])
    assert (back[1]["metrics"], len(fetched)) == (1.0, 3)


def test_a_method_that_writes_into_what_it_may_only_read_is_named():
    ref, fetched = BatchRef.of(some(), InProcessStore()), []
    data = fetch_batches(ref, fetched)
    data.batch["more"] = data.batch["x"] + 1
    data.batch["more"].add_(1)
    check_unwritten(fetched, "Actor.update")
    data[1:].batch["x"].mul_(2)
    with pytest.raises(RuntimeError, match=r"Actor\.update wrote into the column 'x'"):
        check_unwritten(fetched, "Actor.update")
