"""Rollouts are divided among ranks by whole prompt groups, without copies, and come back in the order of the rows."""

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from etude.agents.batch import BY_GROUP
from etude.distributed import InProcessWorkerGroup, Worker, register
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
