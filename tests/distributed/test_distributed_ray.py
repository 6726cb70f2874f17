"""A worker group whose ranks are processes on two nodes: it divides, gathers and fails as one in process does, and no call
outlives its processes."""

import asyncio
import logging
import os
import re
import signal
import socket
import threading
from contextlib import suppress

import pytest
import torch
import torch.distributed as dist
from ray_stage import ray_cluster
from test_distributed_worker_group import Doubler, batch
from wait_stage import is_running, until

from etude.distributed import (
    Dispatch,
    InProcessWorkerGroup,
    MeshPlace,
    RayWorkerGroup,
    ResourcePool,
    ray_group,
    register,
)
from etude.distributed.rank_process import RankProcess, Reply
from etude.distributed.ray_store import RayStore
from etude.errors import ConfigError, InfrastructureError, MissingExtraError, WorkerLost, describe_error
from etude.protocol import DataProto

pytest.importorskip("ray")


class Odd(Exception):
    """Does not build from its args, and holds what cannot be pickled."""

    def __init__(self, name, number):
        super().__init__(f"{name} is odd")
        self.number, self.lock = number, threading.Lock()


class Prober(Doubler):
    """Tells where it runs; waits, fails and logs on request."""

    def __init__(self, factor=2, fail=None, **place):
        super().__init__(factor, **place)
        if fail == self.rank:
            raise ConfigError("actor_rollout_ref.model.path: no such folder")
        self.stopped = threading.Event()
        self.waits = 0

    @register(Dispatch.ONE_TO_ALL)
    def tell_place(self):
        names = ("WORLD_SIZE", "RANK", "LOCAL_WORLD_SIZE", "LOCAL_RANK")
        total = torch.tensor([self.rank + 1])
        dist.all_reduce(total)
        return [int(os.environ[name]) for name in names], os.getpid(), int(total), os.getcwd(), os.getppid()

    @register(Dispatch.ONE_TO_ALL)
    def tell_pid(self):
        return os.getpid()

    @register(Dispatch.ONE_TO_ALL)
    def tell_threads(self):
        return [thread.name for thread in threading.enumerate()]

    @register(Dispatch.ONE_TO_ALL, in_background=True)
    def tell_waits(self):
        return self.waits

    @register(Dispatch.ALL_TO_ALL)
    def wait(self, how):
        """Until interrupted; `meet`: in a collective operation that never ends; `die`, `fail`, `exit`: no longer."""
        self.waits += 1
        if how == "fail":
            raise Odd("three", 3)
        if how == "die":
            os.kill(os.getpid(), signal.SIGKILL)
        if how == "exit":
            raise SystemExit(3)
        if how == "meet":
            dist.barrier()
        assert self.stopped.wait(60)
        raise RuntimeError("interrupted")

    @register(Dispatch.DIRECT_ROLLOUT_METHOD)
    def progress(self):
        return self.waits

    @register(Dispatch.ONE_TO_ALL)
    def warn(self, text):
        logging.getLogger("etude.tests").warning(text)

    @register(Dispatch.DP_COMPUTE_PROTO)
    def make(self, data):
        return DataProto.from_dict({"x": data.batch["x"], "y": data.batch["x"] * 1.0}, {"here": ["cell"] * len(data)})

    @register(Dispatch.DP_COMPUTE_PROTO, columns=("y",))
    def read(self, data):
        return DataProto.from_dict(
            {"y": data.batch["y"].clone(), "columns": torch.full((len(data),), len(data.columns))}
        )

    @register(Dispatch.DP_COMPUTE_PROTO, columns=("y",))
    def spoil(self, data):
        data.batch["y"].add_(1)

    @register(Dispatch.DP_COMPUTE_PROTO, mesh="teams")
    def by_team(self, data):
        return DataProto.from_dict({"x": data.batch["x"], "rank": torch.full((len(data),), self.rank)})

    @register(Dispatch.ONE_TO_ALL)
    def share(self, data):
        return data.batch["x"].sum().item()

    def mesh_place(self, mesh):
        if mesh == "teams":  # of two ranks, the second of which has the output, and of one
            return MeshPlace(self.rank // 2, (self.world_size + 1) // 2, collects=self.rank > 0)
        return super().mesh_place(mesh)

    def interrupt(self):
        self.stopped.set()


@pytest.fixture(scope="module")
def cluster():
    with ray_cluster(4, 4) as nodes:
        yield nodes


@pytest.fixture(scope="module")
def pool(cluster):
    made = ResourcePool([2, 1])
    yield made
    made.close()


@pytest.fixture(scope="module")
def group(pool):
    made = RayWorkerGroup(Prober, pool, 2)
    yield made
    made.close()


@pytest.fixture
def quick(monkeypatch):
    """What takes seconds by default, in tenths."""
    monkeypatch.setattr(ray_group, "_PING_SECONDS", 0.1)
    monkeypatch.setattr(ray_group, "_SETTLE_SECONDS", 1.0)


def test_ranks_know_their_place_and_one_another(group):
    found = group.tell_place()
    assert [numbers for numbers, *_ in found] == [[3, 0, 2, 0], [3, 1, 2, 1], [3, 2, 1, 0]]
    assert {total for _, _, total, *_ in found} == {1 + 2 + 3}
    assert {folder for *_, folder, _ in found} == {os.getcwd()}
    assert len({pid for _, pid, *_ in found}) == 3
    raylets = [parent for *_, parent in found]
    assert raylets[0] == raylets[1] != raylets[2]  # two on one node, one on the other


def test_every_rank_looks_whether_its_raylet_is_alive(group):
    """What it does when the raylet is not is tried in test_distributed_cluster.py."""
    assert all("etude-parent" in names for names in group.tell_threads())


def test_calls_are_divided_and_gathered_as_in_process(group):
    local = InProcessWorkerGroup(Prober, 3, 2)
    for count in (1, 3, 7):
        data, other = batch(count, temperature=0.5), batch(count, "z")
        mine, its = group.double(data, other=other, names=["a"]), local.double(data, other=other, names=["a"])
        assert (mine.batch["y"].tolist(), mine.meta_info) == (its.batch["y"].tolist(), its.meta_info)
        assert mine.non_tensor_batch["who"].tolist() == its.non_tensor_batch["who"].tolist()
        assert group.mean(data) == local.mean(data)
        assert group.train(data).meta_info == local.train(data).meta_info
        seen = group.tell_columns(data).non_tensor_batch["seen"].tolist()
        assert seen == local.tell_columns(data).non_tensor_batch["seen"].tolist()
    assert group.swap(list("abc"), suffix=["!"] * 3) == ["0a!", "1b!", "2c!"]
    assert group.save("ckpt") == "ckpt@0"
    assert group.double_later(batch(7)).get(timeout=60).batch["y"].tolist() == [2 * i for i in range(7)]


def test_ranks_of_a_team_get_one_shard_and_one_answers(group, monkeypatch):
    local = InProcessWorkerGroup(Prober, 3, 2)
    put, kept = group._ray.put, []
    monkeypatch.setattr(group._ray, "put", lambda value: kept.append(value) or put(value))
    for each in (local, group):
        made = each.by_team(batch(5))
        assert made.batch["x"].tolist() == [0, 1, 2, 3, 4]
        assert made.batch["rank"].tolist() == [1, 1, 1, 2, 2]
    assert len(kept) == 1  # for the shard that two ranks hold
    assert group.share(batch(100)) == [4950] * 3
    assert len(kept) == 2


def test_batches_stay_in_a_store_and_only_declared_columns_are_read(group):
    group.store = RayStore()
    try:
        ref = group.make(batch(6))
        here = group.read(ref).fetch().batch
        assert (here["y"].tolist(), here["columns"].tolist()) == ([0, 1, 2, 3, 4, 5], [1] * 6)
        picked = group.read(ref.select_idxs([5, 3, 1, 1, 0, 2])).fetch().batch  # each has rows of two others
        assert picked["y"].tolist() == [5, 3, 1, 1, 0, 2]
        assert ref.fetch().non_tensor_batch["here"].tolist() == ["cell"] * 6  # by the driver
        assert group.read(group.keep(batch(6, "y"))).fetch().batch["y"].tolist() == list(range(6))
        with pytest.raises(RuntimeError, match="spoil wrote into the column 'y'"):
            group.spoil(ref)
    finally:
        group.store = None


def test_an_error_of_a_rank_is_the_callers(group, caplog):
    with pytest.raises(InfrastructureError, match="sandbox is gone") as caught:
        group.fail_on(2)
    assert caught.value.__notes__ == ["raised on rank 2 of 3 in Prober.fail_on"]
    assert "rank 2 of 3" in caplog.text
    assert "test_distributed_worker_group.py" in str(caught.value.__cause__)  # its traceback there
    assert "test_distributed_worker_group.py:" in describe_error(caught.value)
    assert group.fail_on(7) == [0, 1, 2]  # no harm done


def test_an_error_that_cannot_be_pickled_arrives(group):
    with pytest.raises(Odd, match="three is odd") as caught:
        group.wait(["fail"] * 3)
    assert caught.value.number == 3
    with pytest.raises(SystemExit):
        group.wait(["exit"] * 3)


def test_what_ranks_log_is_logged_once(group, caplog):
    group.warn("mind the gap")
    (said,) = [record.getMessage() for record in caplog.records if "gap" in record.getMessage()]
    assert re.fullmatch("rank [012]: mind the gap", said)
    group.warn("mind the gap")  # what happens again is said again
    assert [record.getMessage() for record in caplog.records if "gap" in record.getMessage()] == [said, said]


def test_what_is_known_of_logs_is_bounded(group, monkeypatch):
    monkeypatch.setattr(ray_group, "_MAX_LOGGED", 4)
    monkeypatch.setattr(group, "_logged", {})
    for number in range(20):
        group._log([("etude.tests", logging.WARNING, f"warning {number}")], rank=0)
    assert len(group._logged) == 4


def test_a_reply_that_cannot_be_read_leaves_nobody_waiting(group, monkeypatch):
    monkeypatch.setattr(group, "_lost", None)  # as they are afterwards
    monkeypatch.setattr(group, "_gone", set())
    reply = group._ray.put(Reply(1, records=5))
    future = group._supervise("share", [reply], ranks=group._ranks[:1])
    with pytest.raises(WorkerLost, match="could not be waited for"):
        future.result(timeout=30)


async def test_a_direct_method_answers_while_a_call_runs(group):
    assert await group.direct("generate", rank=2)("hi") == "2:hi"
    before, failed = group.direct("progress", 1)(), []

    def call():
        try:
            group.wait(["go"] * 3)
        except RuntimeError as error:
            failed.append(str(error))

    thread = threading.Thread(target=call)
    thread.start()
    try:
        await asyncio.to_thread(until, lambda: group.direct("progress", 1)() > before, "the call never began")
    finally:
        await asyncio.to_thread(group.interrupt)  # as Ctrl-C does
        thread.join(60)
    assert failed == ["interrupted"]


def test_groups_share_slots_and_leave_nothing(cluster):
    pool = ResourcePool([1], max_colocate_count=2)
    other = RayWorkerGroup(Prober, pool, 3)
    with pytest.raises(ConfigError, match="no such folder") as caught:
        RayWorkerGroup(Prober, pool, fail=0)
    assert caught.value.__notes__ == ["raised on rank 0 of 1 in Prober.__init__"]
    assert other.double(batch(2)).batch["y"].tolist() == [0, 3]
    (pid,) = other.tell_pid()
    other.close()
    other.close()
    until(lambda: not is_running(pid), "processes are left")
    for call in (other.double, other.by_team):  # of a mesh that the group knows, and of one that it does not
        with pytest.raises(WorkerLost, match="closed"):
            call(batch(2))
    pool.close()


def test_a_cluster_that_is_too_small_is_one_line(cluster, pool):
    for nodes, what in (([5], r"5 processes with a CPU each \(5 on nodes"), ([1, 1, 1], "3 processes")):
        with pytest.raises(ConfigError, match=what + r".*the cluster has 2 nodes \(4 CPU; 4 CPU\)"):
            ResourcePool(nodes).place()
    with pytest.raises(ConfigError, match="with a CPU and a GPU each"):
        ResourcePool([1], use_gpu=True).place()
    with pytest.raises(ConfigError, match=r"of which [45] CPU were free for 0.2 s"):  # three are taken
        ResourcePool([4]).place(seconds=0.2)


# -- processes that are lost ------------------------------------------------------------------------------------------


def lost(group, what):
    """The error of a call during which something happens to a rank."""
    with pytest.raises(WorkerLost) as caught:
        what()
    with pytest.raises(WorkerLost):
        group.share(batch(1))  # no further call is tried
    group.close()
    return str(caught.value)


def test_a_rank_that_dies_in_a_call_is_an_error(cluster, quick):
    pool = ResourcePool([1, 1])
    group = RayWorkerGroup(Prober, pool)
    group.warn("the last words")
    text = lost(group, lambda: group.wait(["meet", "die"]))
    assert "Prober, rank 1 of 2, on node" in text
    assert "died" in text
    assert "in Prober.wait" in text
    assert "the last words" in text
    pool.close()


def test_a_rank_that_stops_answering_is_an_error(cluster, quick):
    pool = ResourcePool([1, 1])
    group = RayWorkerGroup(Prober, pool, silent_seconds=1.0)
    pids = group.tell_pid()
    os.kill(pids[0], signal.SIGSTOP)
    text = lost(group, lambda: group.wait(["meet", "meet"]))
    assert "rank 0 of 2" in text
    assert "silent for" in text
    pool.close()
    until(lambda: not any(map(is_running, pids)), "processes are left")


def test_a_call_has_a_deadline_and_nobody_waits_for_a_rank_that_failed_or_was_asked_to_end(cluster, quick):
    pool = ResourcePool([2])
    group = RayWorkerGroup(Prober, pool)
    with pytest.raises(Odd):  # of the second rank; the first is asked to end, and says so
        group.wait(["go", "fail"])
    with pytest.raises(Odd):  # and now it waits for the second in vain
        group.wait(["meet", "fail"])
    group.close()
    other = RayWorkerGroup(Prober, pool)

    def wait():
        with suppress(WorkerLost, RuntimeError):  # of the second rank in the end, or the first's answer to `interrupt`
            other.wait(["go", "meet"])

    waiting = threading.Thread(target=wait)
    waiting.start()
    until(lambda: other.tell_waits() == [1, 1], "the call never began")
    other.interrupt()
    assert other.tell_waits() == [1, 1]  # the second rank does not end its call; a run may still be saved
    other._call_seconds = 2.0
    assert "did not end within 2 s in Prober.tell_pid" in lost(other, other.tell_pid)
    waiting.join(60)
    pool.close()


def test_without_ray_the_extra_is_named(monkeypatch):
    monkeypatch.setattr("etude.limits.cluster.importlib.util.find_spec", lambda name: None)
    with pytest.raises(MissingExtraError, match=r"pip install 'etude\[ray\]'"):
        RayWorkerGroup(Prober, ResourcePool([1]))


def test_ranks_meet_on_one_address_alone():
    rank = RankProcess.__new__(RankProcess)
    port = rank.open_store("127.0.0.1", 2, 5.0)
    with socket.create_connection(("127.0.0.1", port), timeout=5):
        pass
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.2", port), timeout=5)
