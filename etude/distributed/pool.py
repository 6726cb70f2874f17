"""`ResourcePool`: how many worker processes run on which node. Starting them is left to the groups."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class ResourcePool:
    """A pool of processes, `process_on_nodes[i]` of them on node i.

    Raises:
        ValueError: no node, or a node with fewer than one process.
    """

    process_on_nodes: list[int]

    def __post_init__(self) -> None:
        if not self.process_on_nodes or any(processes < 1 for processes in self.process_on_nodes):
            raise ValueError(f"process_on_nodes needs at least one process on each node, is {self.process_on_nodes}")

    @property
    def world_size(self) -> int:
        """Total number of processes."""
        return sum(self.process_on_nodes)
