"""Rollouts are divided among ranks by whole prompt groups, without copies, and come back in the order of the rows."""

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from etude.agents.batch import BY_GROUP, IMAGES
from etude.distributed import BatchRef, InProcessWorkerGroup, Worker, register
from etude.distributed.plane import InProcessStore
from etude.protocol import DataProto, object_array


class Roller(Worker):
    """Answers as wide as its part is long, as ranks do whose longest answers differ."""

    def __init__(self, **place):
        super().__init__(**place)
        self.seen = []

    @register(dispatch_mode=BY_GROUP)
    def roll(self, data, extra=0):
        if not len(data):
            return DataProto()
        uids, numbers = data.non_tensor_batch["uid"].tolist(), data.non_tensor_batch["number"].tolist()
        self.seen.append((uids, numbers))
        width = len(data)
        made = torch.tensor(numbers)[:, None].expand(-1, width).clone() + extra
        columns = dict.fromkeys(("prompts", "responses"), made) | {"attention_mask": torch.ones(width, 2 * width)}
        return DataProto.from_dict(columns, {"number": object_array(numbers)}, {"metrics": {"rows": width}})


@settings(max_examples=60)
@given(st.lists(st.integers(0, 6), min_size=1, max_size=24), st.integers(1, 5))
def test_groups_stay_whole_and_rows_keep_their_places(uids, ranks):
    group = InProcessWorkerGroup(Roller, ranks)
    data = DataProto.from_dict(non_tensors={"uid": object_array(uids), "number": object_array(range(len(uids)))})
    made = group.roll(data, extra=1)
    assert made.non_tensor_batch["number"].tolist() == list(range(len(uids)))
    assert made.batch["responses"][:, 0].tolist() == [number + 1 for number in range(len(uids))]
    seen = [part for worker in group._workers for part in worker.seen]
    assert sorted(number for _, numbers in seen for number in numbers) == list(range(len(uids)))  # none twice
    assert sum(len(set(part)) for part, _ in seen) == len(set(uids))
    assert sum(made.meta_info["metrics"]["rows"]) == len(uids)


def test_equal_groups_are_shared_evenly():
    group = InProcessWorkerGroup(Roller, 3)
    group.roll(DataProto.from_dict(non_tensors={"uid": [f"u{n // 4}" for n in range(24)], "number": list(range(24))}))
    assert [len(worker.seen[0][0]) for worker in group._workers] == [8, 8, 8]


def test_references_are_joined_where_only_one_rank_has_images():
    asked = DataProto.from_dict(non_tensors={"uid": ["a", "b", "a"], "number": [0, 1, 2]})
    store, images = InProcessStore(), {0: ("first",), 2: ("third",)}
    results = []
    for (part,), _ in BY_GROUP.divide(2, (asked,), {}):
        numbers = part.non_tensor_batch["number"].tolist()
        made = dict.fromkeys(("prompts", "responses"), torch.tensor(numbers)[:, None].repeat(1, len(numbers)))
        made["attention_mask"] = torch.ones(len(numbers), 2 * len(numbers))
        own = {IMAGES: object_array([images[n] for n in numbers])} if numbers[0] in images else {}
        results.append(BatchRef.of(DataProto.from_dict(made, own, {"metrics": {"rows": len(numbers)}}), store))
    assert len({ref.columns for ref in results}) == 2
    whole = BY_GROUP.collect(results, (asked,), {}).fetch()
    assert whole.batch["responses"][:, 0].tolist() == [0, 1, 2]
    assert whole.non_tensor_batch[IMAGES].tolist() == [("first",), (), ("third",)]
    assert whole.meta_info["metrics"] == {"rows": [2, 1]}
