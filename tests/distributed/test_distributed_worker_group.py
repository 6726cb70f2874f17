"""Every dispatch mode through a real group, at world sizes 1 and 3, with a batch that three ranks cannot share evenly."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from etude.distributed import (
    OUTPUT_PADDING_ROWS,
    PADDING_ROWS,
    Dispatch,
    DispatchMode,
    Execute,
    InProcessWorkerGroup,
    MeshPlace,
    ResourcePool,
    Worker,
    WorkerGroup,
    register,
)
from etude.errors import InfrastructureError, is_infrastructure
from etude.protocol import DataProto, DataProtoFuture


class Doubler(Worker):
    """Tells what reached it; doubles numbers."""

    def __init__(self, factor: int = 2, **place: Any) -> None:
        super().__init__(**place)
        self.factor = factor
        self.seen: list[tuple[list[int], int]] = []

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def configure(self, names: list[str], data: DataProto | None = None) -> tuple[int, list[str]]:
        if data is not None:
            data.meta_info["rank"] = self.rank
            data.union(DataProto.from_dict({"mine": torch.full((len(data),), self.rank)}))
        return self.rank, names

    @register()
    def swap(self, value: str, *, suffix: str = "") -> str:
        return f"{self.rank}{value}{suffix}"

    @register(dispatch_mode=Dispatch.DP_COMPUTE)
    def square(self, value: int) -> int:
        return value * value

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO, columns=("x",), optional=("cells", "z"))
    def tell_columns(self, data: DataProto, other: DataProto | None = None) -> DataProto:
        seen = [sorted([*part.batch.keys(), *part.non_tensor_batch]) for part in (data, other) if part is not None]
        return DataProto.from_dict(non_tensors={"seen": [seen] * len(data)})

    @register(dispatch_mode=Dispatch.DP_COMPUTE, columns=("x",))
    def tell_rows(self, data: DataProto) -> tuple[int, list[str]]:
        return len(data), list(data.batch.keys())

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO)
    def double(self, data: DataProto, other: DataProto | None = None, names: list[str] | None = None) -> DataProto:
        self.seen.append((data.batch["x"].tolist(), data.meta_info[PADDING_ROWS]))
        tensors = {"y": data.batch["x"] * self.factor}
        if other is not None:
            tensors["y"] = tensors["y"] + other.batch["z"]
        cells = {"who": [str(names or [])] * len(data)}
        return DataProto.from_dict(tensors, cells, data.meta_info)

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO)
    def train(self, data: DataProto) -> DataProto:
        real = len(data) - data.meta_info[PADDING_ROWS]
        return DataProto(meta_info={"metrics": {"sum": float(data.batch["x"][:real].sum())}})

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO)
    def forget(self, data: DataProto) -> None:
        return None

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO)
    def wrong_type(self, data: DataProto) -> list[int]:
        return [len(data)]

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO)
    def twice(self, data: DataProto, say: bool = True) -> DataProto:
        out = data.repeat(2)
        if say:
            out.meta_info[OUTPUT_PADDING_ROWS] = 2 * data.meta_info[PADDING_ROWS]
        return out

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO_WITH_FUNC)
    def apply(self, function: Any, data: DataProto) -> DataProto:
        return function(self, data)

    @register(dispatch_mode=Dispatch.DP_COMPUTE_METRIC)
    def mean(self, data: DataProto) -> tuple[int, float]:
        self.seen.append((data.batch["x"].tolist(), data.meta_info[PADDING_ROWS]))
        return len(data), float(data.batch["x"].float().mean())

    @register(dispatch_mode=Dispatch.DIRECT_ROLLOUT_METHOD)
    async def generate(self, prompt: str) -> str:
        return f"{self.rank}:{prompt}"

    @register(dispatch_mode=Dispatch.ONE_TO_ALL, execute_mode=Execute.RANK_ZERO)
    def save(self, path: str) -> str:
        return f"{path}@{self.rank}"

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def greet(self, name: str, registration: str) -> str:
        return f"{name} {registration}"

    @register(execute_mode=Execute.RANK_ZERO)
    def count(self, items: list[int]) -> int:
        return len(items) + self.rank

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO, blocking=False)
    def double_later(self, data: DataProto) -> DataProto:
        return self.double(data)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL, blocking=False)
    def fail_later(self) -> None:
        raise KeyError("later")

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def fail_on(self, rank: int) -> int:
        self.seen.append(([], 0))
        if self.rank == rank:
            raise InfrastructureError("the sandbox is gone")
        return self.rank

    def hidden(self) -> None:
        """Not registered."""


def batch(n: int, name: str = "x", **meta: Any) -> DataProto:
    return DataProto.from_dict({name: torch.arange(n)}, {"uid": [f"u{i}" for i in range(n)]}, meta)


@pytest.fixture(params=[1, 3])
def world(request) -> int:
    return request.param


@pytest.fixture
def group(world) -> InProcessWorkerGroup:
    return InProcessWorkerGroup(Doubler, world)


def test_workers_learn_their_place_and_get_the_groups_arguments():
    group = InProcessWorkerGroup(Doubler, 3, 5, device="meta")
    assert [(w.rank, w.world_size, w.factor, w.device.type) for w in group._workers] == [
        (rank, 3, 5, "meta") for rank in range(3)
    ]


def test_a_group_knows_the_columns_that_a_method_declares(group):
    assert group.columns_of("tell_columns") == {"x", "cells", "z"}
    assert group.columns_of("double") is None


def test_one_to_all_hands_a_list_whole_to_every_rank(group, world):
    names = ["a"] * world
    assert group.configure(names) == [(rank, names) for rank in range(world)]


def test_keywords_named_like_the_groups_own_arguments_pass_through(group, world):
    assert group.greet(name="a", registration="b") == ["a b"] * world


def test_one_to_all_gives_each_rank_a_batch_of_its_own(group):
    data = batch(7, temperature=1.0)
    group.configure([], data=data)
    assert set(data.batch.keys()) == {"x"}
    assert data.meta_info == {"temperature": 1.0}


def test_all_to_all_deals_the_callers_lists(group, world):
    letters = list("abc")[:world]
    assert group.swap(letters, suffix=["!"] * world) == [f"{rank}{letter}!" for rank, letter in enumerate(letters)]


def test_dp_compute_deals_the_callers_lists(group, world):
    assert group.square([2, 3, 4][:world]) == [4, 9, 16][:world]
    assert group.square(tuple(range(world))) == [0, 1, 4][:world]


@pytest.mark.parametrize("method", ["swap", "square"])
@pytest.mark.parametrize("value", [[1, 2], "abc", 5, batch(3)])
def test_a_list_mode_wants_exactly_one_entry_a_rank(group, method, value):
    with pytest.raises(ValueError, match="one entry for each of"):
        getattr(group, method)(value)


def test_proto_divides_pads_and_unpads(group, world):
    names = ["not", "dealt", "out"]
    out = group.double(batch(7, temperature=0.5), other=batch(7, "z"), names=names)
    assert out.batch["y"].tolist() == [3 * i for i in range(7)]
    assert out.non_tensor_batch["who"].tolist() == [str(names)] * 7
    assert out.meta_info == {"temperature": 0.5}
    seen = [worker.seen[0] for worker in group._workers]
    assert seen == ([(list(range(7)), 0)] if world == 1 else [([0, 1, 2], 0), ([3, 4, 5], 0), ([6, 0, 1], 2)])


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 12), st.integers(1, 5))
def test_no_padding_row_is_ever_seen_by_the_caller(n, world):
    group = InProcessWorkerGroup(Doubler, world)
    assert group.double(batch(n)).batch["y"].tolist() == [2 * i for i in range(n)]
    assert group.twice(batch(n)).batch["x"].tolist() == [i for i in range(n) for _ in range(2)]
    if n:
        measured = group.mean(batch(n))
        assert sum(size for size, _ in measured) == n
        assert sum(size * value for size, value in measured) == pytest.approx(sum(range(n)))
        assert sum(group.train(batch(n)).meta_info["metrics"]["sum"]) == sum(range(n))


def test_metrics_alone_come_back_gathered_and_idle_ranks_left_out():
    group = InProcessWorkerGroup(Doubler, 3)
    assert group.train(batch(7)).meta_info == {"metrics": {"sum": [3.0, 12.0, 6.0]}}
    assert group.train(batch(1)).meta_info == {"metrics": {"sum": [0.0]}}
    assert group.train(batch(4)).meta_info == {"metrics": {"sum": [1.0, 5.0]}}


def test_none_from_every_rank_is_none(group):
    assert group.forget(batch(7)) is None


def test_the_callers_batch_stays_as_it_was(group):
    data = batch(7, nested={"a": [1]})
    group.double(data)
    group.mean(data)
    assert data.meta_info == {"nested": {"a": [1]}}
    assert set(data.batch.keys()) == {"x"}


def test_proto_wants_batches_back(group):
    with pytest.raises(TypeError, match="rank 0 returned a list"):
        group.wrong_type(batch(7))


def test_an_output_of_another_size_must_say_what_is_padding(group):
    assert group.twice(batch(7)).batch["x"].tolist() == [i for i in range(7) for _ in range(2)]
    with pytest.raises(ValueError, match=r"rank 0 returned .* rows for a chunk of .*output_padding_rows"):
        group.twice(batch(7), say=False)


@pytest.mark.parametrize("method", ["double", "mean"])
def test_proto_modes_want_batches_of_one_size(group, method):
    call = getattr(group, method)
    with pytest.raises(ValueError, match="of none"):
        call(data=[1, 2, 3])
    with pytest.raises(ValueError, match=r"\[3, 7\]"):
        call(batch(7), batch(3))
    with pytest.raises(TypeError, match="from_tensordict"):
        call(batch(7).to_tensordict())
    with pytest.raises(ValueError, match="padded chunk already"):
        call(batch(7, padding_rows=1))


def test_proto_with_func_hands_the_function_to_all(group, world):
    def tag(worker: Worker, data: DataProto) -> DataProto:
        return DataProto.from_dict({"rank": torch.full((len(data),), worker.rank)})

    ranks = group.apply(tag, batch(7)).batch["rank"].tolist()
    assert ranks == ([0] * 7 if world == 1 else [0, 0, 0, 1, 1, 1, 2])
    with pytest.raises(ValueError, match="needs a function"):
        group.apply(batch(7), tag)
    with pytest.raises(ValueError, match="needs a function"):
        group.apply(data=batch(7))


def test_metric_chunks_hold_real_rows_only(group, world):
    assert group.mean(batch(7)) == ([(7, 3.0)] if world == 1 else [(3, 1.0), (3, 4.0), (1, 6.0)])
    assert all(padding == 0 for worker in group._workers for _, padding in worker.seen)


def test_a_rank_of_padding_only_runs_but_has_no_say_in_a_metric():
    group = InProcessWorkerGroup(Doubler, 3)
    assert group.mean(batch(1)) == [(1, 0.0)]
    assert [worker.seen for worker in group._workers] == [[([0], 0)], [([0], 1)], [([0], 1)]]


async def test_direct_methods_bypass_the_controller(group, world):
    assert await group.direct("generate", rank=world - 1)("hi") == f"{world - 1}:hi"
    with pytest.raises(RuntimeError, match="bypasses the controller"):
        group.generate("hi")
    with pytest.raises(ValueError, match="not a DIRECT_ROLLOUT_METHOD"):
        group.direct("double")
    with pytest.raises(ValueError, match="no rank"):
        group.direct("generate", rank=world)
    with pytest.raises(AttributeError, match="'hidden'"):
        group.direct("hidden")


def test_rank_zero_alone_gets_the_arguments_as_they_are(group):
    assert group.save("ckpt") == "ckpt@0"
    assert group.count([1, 2, 3]) == 3
    assert group.count(items=[]) == 0


def test_without_blocking_the_result_is_waited_for_with_get(group):
    pending = group.double_later(batch(7))
    assert isinstance(pending, DataProtoFuture)
    assert pending.get(timeout=5).batch["y"].tolist() == [2 * i for i in range(7)]
    failed = group.fail_later()
    with pytest.raises(KeyError, match="later"):
        failed.get()


def test_a_pending_result_can_be_an_argument(group):
    pending = group.double_later(batch(7))
    assert group.double(batch(7), other=pending_as(pending, "z")).batch["y"].tolist() == [4 * i for i in range(7)]


def pending_as(pending: DataProtoFuture[DataProto], name: str) -> DataProtoFuture[DataProto]:
    return DataProtoFuture([], lambda _: DataProto.from_dict({name: pending.get().batch["y"]}))


def test_an_error_keeps_its_type_and_names_its_rank(world, caplog):
    group = InProcessWorkerGroup(Doubler, world)
    with pytest.raises(InfrastructureError, match="sandbox") as caught:
        group.fail_on(world - 1)
    assert is_infrastructure(caught.value)
    assert caught.value.__notes__ == [f"raised on rank {world - 1} of {world} in Doubler.fail_on"]
    assert f"rank {world - 1} of {world}" in caplog.text
    assert [len(worker.seen) for worker in group._workers] == [1] * world  # the others ran


def test_what_is_not_registered_cannot_be_reached(group):
    with pytest.raises(AttributeError, match=r"no registered method 'hidden'.*apply, configure, count, double"):
        group.hidden()
    with pytest.raises(AttributeError, match="did you mean 'double'"):
        group.doubel(batch(1))
    assert not hasattr(group, "_nothing")


def test_a_group_can_be_copied(group):
    assert copy.copy(group).double(batch(3)).batch["y"].tolist() == [0, 2, 4]


def test_an_override_keeps_the_registration():
    class Tripler(Doubler):
        def square(self, value: int) -> int:
            return value**3

        @register(dispatch_mode=Dispatch.ONE_TO_ALL)
        def swap(self, value: str, *, suffix: str = "") -> str:
            return value

    group = InProcessWorkerGroup(Tripler, 2)
    assert group.square([2, 3]) == [8, 27]
    assert group.swap("whole") == ["whole", "whole"]


def test_a_registered_method_must_not_hide_the_groups_own():
    class Clash(Worker):
        @register()
        def direct(self) -> None: ...

    class ClashWithField(Worker):
        @register()
        def world_size(self) -> None: ...

    for cls in (Clash, ClashWithField):
        with pytest.raises(ValueError, match="cannot be registered"):
            InProcessWorkerGroup(cls, 1)


def test_register_leaves_the_method_as_it_is_and_checks_its_options():
    worker = Doubler(rank=0, world_size=1)
    assert worker.square(3) == 9
    with pytest.raises(TypeError, match="takes a Dispatch"):
        register(lambda self: None)
    with pytest.raises(TypeError, match="takes a Dispatch"):
        register(execute_mode="all")
    with pytest.raises(ValueError, match="RANK_ZERO does not go with DP_COMPUTE_PROTO"):
        register(Dispatch.DP_COMPUTE_PROTO, Execute.RANK_ZERO)
    with pytest.raises(TypeError, match="is async"):

        @register(Dispatch.ONE_TO_ALL)
        async def later(self) -> None: ...


def test_the_modes_are_the_seven_documented_ones():
    assert {mode.name for mode in Dispatch} == {
        "ONE_TO_ALL",
        "ALL_TO_ALL",
        "DP_COMPUTE",
        "DP_COMPUTE_PROTO",
        "DP_COMPUTE_PROTO_WITH_FUNC",
        "DP_COMPUTE_METRIC",
        "DIRECT_ROLLOUT_METHOD",
    }
    assert {mode.name for mode in Execute} == {"ALL", "RANK_ZERO"}


def test_places_that_do_not_exist():
    with pytest.raises(ValueError, match="rank 3"):
        Worker(rank=3, world_size=3)
    with pytest.raises(ValueError, match="world_size"):
        InProcessWorkerGroup(Doubler, 0)
    with pytest.raises(TypeError):
        WorkerGroup(Doubler, 1)  # abstract


def test_resource_pool():
    assert ResourcePool([2, 3]).world_size == 5
    for bad in ([], [1, 0]):
        with pytest.raises(ValueError, match="process_on_nodes"):
            ResourcePool(bad)


def test_only_declared_columns_are_sent():
    group = InProcessWorkerGroup(Doubler, 2)
    tensors = {"x": torch.arange(3), "y": torch.arange(3)}
    batch = DataProto.from_dict(tensors, {"cells": [1, 2, 3], "rollout": ["a", "b", "c"]}, {"step": 1})
    assert group.tell_columns(batch).non_tensor_batch["seen"].tolist() == [[["cells", "x"]]] * 3
    bare = DataProto.from_dict({"x": torch.arange(3)})
    assert group.tell_columns(batch, other=bare).non_tensor_batch["seen"].tolist() == [[["cells", "x"], ["x"]]] * 3
    assert set(batch.batch.keys()) == {"x", "y"}  # the caller's keeps them
    assert group.tell_rows([batch, batch[:0]]) == [(3, ["x"]), (0, ["x"])]
    with pytest.raises(ValueError, match=r"^Doubler\.tell_columns needs the column 'x', which the batch does not have"):
        group.tell_columns(DataProto.from_dict({"y": torch.arange(3)}))


def every_other(shards, args, kwargs):
    return [((args[0][shard::shards],), kwargs) for shard in range(shards)]


class Teams(Worker):
    """Ranks in teams of two, the second of which has the output; `broken`: one says otherwise."""

    def __init__(self, broken: bool = False, **place: Any) -> None:
        super().__init__(**place)
        self.broken, self.seen = broken, []

    def mesh_place(self, mesh: str) -> MeshPlace:
        if mesh != "teams":
            return super().mesh_place(mesh)
        wrong = self.broken and self.rank == 0
        return MeshPlace(self.rank // 2, self.world_size // 2 + wrong, collects=self.rank % 2 == 1)

    @register(DispatchMode(every_other, lambda results, args, kwargs: [*results, args[0]]), mesh="teams")
    def words(self, words: list[str]) -> str:
        return "".join(words)

    @register(DispatchMode(lambda shards, args, kwargs: [], lambda results, args, kwargs: results))
    def nothing(self) -> None: ...

    @register(Dispatch.DP_COMPUTE, mesh="teams")
    def label(self, data: DataProto) -> int:
        data.meta_info["label"] = self.rank
        self.seen.append(data)
        return self.rank

    @register(Dispatch.ALL_TO_ALL)
    def each(self, value: int) -> int:
        return value


def test_a_mode_of_ones_own_divides_among_the_shards_of_a_mesh():
    group = InProcessWorkerGroup(Teams, 4)
    assert group.words(["a", "b", "c"]) == ["ac", "b", ["a", "b", "c"]]
    assert group.each([1, 2, 3, 4]) == [1, 2, 3, 4]
    with pytest.raises(ValueError, match="0 parts for 4 shards"):
        group.nothing()
    with pytest.raises(ValueError, match="RANK_ZERO does not go with a mode of one's own"):
        register(DispatchMode(every_other, every_other), Execute.RANK_ZERO)


def test_ranks_of_a_team_have_copies_of_one_part_and_one_answers():
    group = InProcessWorkerGroup(Teams, 4)
    assert group.label([batch(2), batch(1)]) == [1, 3]
    assert [len(worker.seen[0]) for worker in group._workers] == [2, 2, 1, 1]
    assert [worker.seen[0].meta_info["label"] for worker in group._workers] == [0, 1, 2, 3]
    assert group.dp_size == 4  # of the training mesh, which has no teams here
    with pytest.raises(ValueError, match="one entry for each of 2"):
        group.label([batch(1)] * 4)


def test_ranks_that_contradict_one_another_are_refused():
    group = InProcessWorkerGroup(Teams, 4, broken=True)
    with pytest.raises(ValueError, match="the mesh 'teams' of Teams has shards that no rank holds"):
        group.words(["a"])
