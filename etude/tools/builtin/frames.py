"""`FrameReferences`: the frames that one trajectory has extracted, for the other tools of the set.

Invariant: a trajectory sees only its own frames, numbered from 0 in the order of extraction; nothing is kept after the
extracting tool is released. A reference is a file and a time: each tool decodes it at its own resolution.

The session names an instance `<trajectory>:<tool>`; an instance id without that ending is the trajectory's own.
"""

from __future__ import annotations

from dataclasses import dataclass

from etude.errors import ToolError

MAX_FRAMES = 256  # per trajectory


@dataclass(frozen=True)
class FrameReference:
    """The frame of the video `path` at `seconds`."""

    path: str
    seconds: float


class FrameReferences:
    """Frames by trajectory; one object is shared by the tools of a process."""

    def __init__(self) -> None:
        self._of: dict[str, list[FrameReference]] = {}

    def add(self, trajectory: str, frames: list[FrameReference]) -> int:
        """Appends `frames`; returns the number of the first.

        Raises:
            ToolError: the trajectory would have more than `MAX_FRAMES`.
        """
        held = self._of.setdefault(trajectory, [])
        if len(held) + len(frames) > MAX_FRAMES:
            raise ToolError(f"Error: a conversation may extract {MAX_FRAMES} frames; use those you have")
        held.extend(frames)
        return len(held) - len(frames)

    def get(self, trajectory: str, number: object) -> tuple[int, FrameReference]:
        """(number, frame): frame `number`, or the last one where `number` is None.

        Raises:
            ToolError: there is no such frame.
        """
        held = self._of.get(trajectory)
        if not held:
            raise ToolError("Error: no frame has been extracted yet; call execute_frame_extraction first")
        chosen = len(held) - 1 if number is None else number
        if not isinstance(chosen, int) or isinstance(chosen, bool) or not 0 <= chosen < len(held):
            raise ToolError(f"Error: there is no frame {chosen!r}; frames are numbered from 0 to {len(held) - 1}")
        return chosen, held[chosen]

    def forget(self, trajectory: str) -> None:
        """Drops what the trajectory extracted."""
        self._of.pop(trajectory, None)


FRAMES = FrameReferences()


def trajectory_of(instance_id: str, tool_name: str) -> str:
    """The trajectory that an instance of `tool_name` belongs to."""
    return instance_id.removesuffix(f":{tool_name}")
