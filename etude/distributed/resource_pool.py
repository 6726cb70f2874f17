"""`ResourcePool`: how many worker processes run on each node, and their placement in a Ray cluster.

Invariant: the processes of an entry share a node, those of different entries do not (if Ray can select nodes by label). If
a process cannot get its CPU or GPU, a one-line error says what was requested and what is available, in bounded time.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from etude.distributed.cluster import check_head
from etude.errors import ConfigError, WorkerLost
from etude.limits.cluster import require_ray

_PLACE_SECONDS = 60.0  # for resources that another run may be about to release


@dataclass(frozen=True)
class Slot:
    """Where a rank's process runs: one bundle of a placement group, on the pool's node `node`, with rank `local_rank`
    there."""

    placement_group: Any
    bundle: int
    node: int
    local_rank: int


@dataclass(frozen=True)
class ResourcePool:
    """A pool of processes, `process_on_nodes[i]` of them on node i, each with a CPU and, with `use_gpu`, a GPU; up to
    `max_colocate_count` groups share these. `each`: other resources per process instead of these.

    Raises:
        ValueError: no node, or a node without processes.
    """

    process_on_nodes: list[int]
    use_gpu: bool = False
    max_colocate_count: int = 1
    each: Mapping[str, float] | None = None
    _slots: list[Slot] = field(default_factory=list, init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        if not self.process_on_nodes or any(processes < 1 for processes in self.process_on_nodes):
            raise ValueError(f"process_on_nodes needs at least one process on each node, is {self.process_on_nodes}")

    @property
    def world_size(self) -> int:
        return sum(self.process_on_nodes)

    @property
    def resources(self) -> dict[str, float]:
        """The resources of each process."""
        if self.each is not None:
            return dict(self.each)
        return {"CPU": 1.0, "GPU": 1.0} if self.use_gpu else {"CPU": 1.0}

    @property
    def share(self) -> float:
        """The fraction of `resources` that each group takes."""
        return int(10_000 / self.max_colocate_count) / 10_000

    def place(self, seconds: float = _PLACE_SECONDS) -> list[Slot]:
        """Returns a slot for each rank; the first call reserves them, later calls return the same ones.

        Raises:
            ConfigError: the cluster does not have the resources, or they are not free within `seconds`.
        """
        require_ray("a resource pool")
        import ray
        from ray.util.placement_group import placement_group, placement_group_table

        if self._slots:
            return self._slots
        present = [node["Resources"] for node in ray.nodes() if node["Alive"]]
        if present and not self._fits(present):
            raise ConfigError(f"{self._request()}; the cluster has {_list_nodes(present)}")
        by_label = "bundle_label_selector" in inspect.signature(placement_group).parameters
        taken: list[str] = []
        for node, processes in enumerate(self.process_on_nodes):
            others = {"ray.io/node-id": f"!in({','.join(taken)})"}
            chosen = {"bundle_label_selector": [others] * processes} if by_label and taken else {}
            group = placement_group([self.resources] * processes, strategy="STRICT_PACK", **chosen)
            self._slots.extend(Slot(group, rank, node, rank) for rank in range(processes))
            if not group.wait(seconds):
                self.close()
                free = {kind: f"{ray.available_resources().get(kind, 0):g}" for kind in self.resources}
                left = ", ".join(f"{value} {kind}" for kind, value in free.items())
                raise ConfigError(
                    f"{self._request()}; the cluster has {_list_nodes(present)}, of which {left} were free for {seconds:g} s"
                )
            taken += sorted({*placement_group_table(group)["bundles_to_node_id"].values()})
        return self._slots

    @property
    def node_ids(self) -> list[str]:
        """The ids of the nodes with its slots, once placed."""
        from ray.util.placement_group import placement_group_table

        groups = {id(slot.placement_group): slot.placement_group for slot in self._slots}.values()
        return sorted({node for each in groups for node in placement_group_table(each)["bundles_to_node_id"].values()})

    def close(self) -> None:
        """Releases the slots, unless the cluster's head node, which manages them, is lost."""
        from ray.util.placement_group import remove_placement_group

        with suppress(WorkerLost):
            check_head()
            for group in {id(slot.placement_group): slot.placement_group for slot in self._slots}.values():
                remove_placement_group(group)
        self._slots.clear()

    def _fits(self, nodes: list[Mapping[str, float]]) -> bool:
        """Whether the nodes would suffice if nothing else used them."""
        rooms = sorted((int(min(node.get(kind, 0) for kind in self.resources)) for node in nodes), reverse=True)
        wanted = sorted(self.process_on_nodes, reverse=True)
        return len(rooms) >= len(wanted) and all(room >= processes for room, processes in zip(rooms, wanted))

    def _request(self) -> str:
        kinds = " and a ".join(self.resources)
        counts = ", ".join(map(str, self.process_on_nodes))
        return f"{self.world_size} processes with a {kinds} each ({counts} on nodes of their own) are asked for"


def _list_nodes(nodes: Iterable[Mapping[str, float]]) -> str:
    texts = [
        " and ".join(f"{node.get(kind, 0):g} {kind}" for kind in ("CPU", "GPU") if node.get(kind)) for node in nodes
    ]
    return f"{len(texts)} nodes ({'; '.join(text or 'nothing' for text in texts)})" if len(texts) != 1 else texts[0]
