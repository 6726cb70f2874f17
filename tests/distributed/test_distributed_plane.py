"""The data plane: what is put is read back, bit for bit, whichever store holds it, or the reader is told what is gone."""

from __future__ import annotations

import os
import pickle
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from wait_stage import until

from etude.distributed import BatchRef, DataPlane, InProcessStore, LostSamplesError, PlaneFullError
from etude.distributed.plane import Block, check_unwritten, fetch_batches, keep_batches, tensor_bytes
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
    assert (len(plane), plane.nbytes, plane._blocks) == (0, 0, {})


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
        ("ab", some(), "2 sample ids for 4 rows"),
        ("eeff", some(name="y"), "repeated"),
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
    assert (len(plane), plane.nbytes) == (4, tensor_bytes(some()) + tensor_bytes(some(2)))


def test_a_put_waits_for_room_until_something_is_evicted():
    nbytes = tensor_bytes(some())
    plane = DataPlane(max_bytes=2 * nbytes, timeout=60)
    plane.put("abcd", some())
    plane.put("efgh", some())
    with ThreadPoolExecutor() as threads:
        waiting = threads.submit(plane.put, "ijkl", some())
        plane.evict("abc")  # its block stays: 'd' is in it
        time.sleep(0.05)
        assert not waiting.done()
        plane.evict("d")
        waiting.result(timeout=30)
    assert plane.nbytes == 2 * nbytes


def test_writers_at_once_never_exceed_the_limit():
    nbytes, most = tensor_bytes(some()), []
    plane = DataPlane(max_bytes=2 * nbytes, timeout=60)
    written = threading.Semaphore(0)

    def write(number: int) -> None:
        plane.put([f"{number}/{row}" for row in range(4)], some())
        most.append(plane.nbytes)
        written.release()

    with ThreadPoolExecutor(8) as threads:
        jobs = [threads.submit(write, number) for number in range(8)]
        for _ in jobs:
            assert written.acquire(timeout=30)
            plane.evict([sample for sample in list(plane._samples) if sample.endswith("/3")])
            plane.evict(list(plane._samples))
        for job in jobs:
            job.result(timeout=30)
    assert max(most) <= 2 * nbytes


def test_what_is_reserved_is_never_counted_beside_the_block_it_was_reserved_for():
    seen = []

    class Watched(DataPlane):
        def __setattr__(self, name, value):
            super().__setattr__(name, value)
            if name == "nbytes":
                seen.append(value)

    nbytes = tensor_bytes(some())
    Watched(max_bytes=nbytes).put("abcd", some())
    assert max(seen) == seen[-1] == nbytes


def test_a_write_that_fails_gives_its_room_to_who_waits_for_it():
    waits = threading.Event()

    class Full(InProcessStore):
        def write(self, data):
            if data.batch["x"].isnan().any():
                assert waits.wait(30)
                raise OSError("no space left on device")
            return super().write(data)

    nbytes = tensor_bytes(some())
    plane = DataPlane(Full(), max_bytes=nbytes, timeout=60)
    with ThreadPoolExecutor() as threads:
        failing = threads.submit(plane.put, "abcd", DataProto.from_dict({"x": some().batch["x"] * float("nan")}))
        until(lambda: plane.nbytes, "the write does not begin")
        waiting = threads.submit(plane.put, "efgh", some())
        until(lambda: plane._room._waiters, "nobody waits for room")
        waits.set()
        with pytest.raises(OSError, match="no space"):
            failing.result(timeout=30)
        waiting.result(timeout=30)
    assert (len(plane), plane.nbytes) == (4, nbytes)


def test_a_full_plane_says_so():
    nbytes = tensor_bytes(some())
    plane = DataPlane(max_bytes=nbytes, timeout=0.01)
    with pytest.raises(PlaneFullError, match="does not fit into a data plane of 96"):
        plane.put("abcdefgh", some(8))
    plane.put("abcd", some())
    with pytest.raises(PlaneFullError, match=r"no room for 96 bytes within 0.01 s.* 96 of 96 bytes, of 4 samples"):
        plane.put("efgh", some())
    assert plane.nbytes == nbytes


class Holder:
    """A worker that writes to the driver's store, and reads what it is sent."""

    def write(self, store, data):
        return store.write(data)

    def total(self, batch):
        data = batch.fetch()
        return sorted(columns_of(data)), float(data.batch["x"].sum()), dict(data.meta_info)


@pytest.mark.parametrize("name", STORES[1:])
def test_workers_write_and_read_while_the_driver_holds_references(cluster, stores, workers, name):
    plane = DataPlane(stores[name])
    writer, reader = workers
    data = DataProto.from_dict({"x": torch.arange(40_000.0).reshape(4, -1), "y": torch.zeros(4)})
    block: Block = cluster.get(writer.write.remote(stores[name], data), timeout=60)
    plane.adopt("abcd", block)
    sent = plane.refer("db", ["x"], {"temperature": 0.5})
    assert len(sent) == 2
    assert sent.columns == {"x"}
    assert len(cluster.cloudpickle.dumps(block)) + len(cluster.cloudpickle.dumps(sent)) < 4000  # of 160 kB
    found = cluster.get(reader.total.remote(sent), timeout=60)
    assert found == (["x"], float(data.batch["x"][[1, 3]].sum()), {"temperature": 0.5})
    plane.evict("abcd")


def test_a_row_gone_from_transfer_queue_is_an_error(stores):
    import transfer_queue

    plane = DataPlane(stores["transfer queue"])
    plane.put("abcd", some())
    name = next(iter(plane._blocks.values())).block.handles["x"][0]
    transfer_queue.kv_clear([f"{name}/2"], "etude")
    assert len(plane.get("abd")) == 3
    with pytest.raises(LostSamplesError, match=r"samples 'b', 'c', held by a storage unit.*1 of 2 rows"):
        plane.get("bc")
    plane.evict("abcd")


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
        plane.adopt(ids, cluster.get(holder.write.remote(stores["ray"], some(6)), timeout=60))
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
    assert plane.nbytes == 0


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
    assert set(columns_of(ref.select(some_names).fetch())) == set(some_names)


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
