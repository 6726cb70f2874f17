"""`FrameExtractionTool`: extracts frames of a row's video for the model; `FRAMES` keeps references to them for the other
video tools.

Invariant: frames are taken at the midpoints of equal parts of the requested span, so that equal arguments give equal
frames; a call returns at most `max_frames`. A trajectory sees only its own frames, numbered from 0 in the order of
extraction; its references are deleted when the extracting tool is released. A reference is a file and a time: each tool
decodes the frame at its own resolution.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from pydantic import Field

from etude.errors import DataError, ToolError
from etude.options.types import Count
from etude.schemas import OpenAIFunctionToolSchema, ToolResponse
from etude.timeouts import BlockingCalls
from etude.tools.base import Execution, StatefulTool, function_schema
from etude.tools.builtin.video import VideoOptions, read_frames, require_av, video_seconds
from etude.tools.options import read_options
from etude.trace import rollout_trace_op

_SCHEMA = function_schema(
    "execute_frame_extraction",
    "Shows frames of the video, evenly spread over it or over a part of it.",
    start={"type": "number", "description": "Seconds at which the part begins; default: the beginning"},
    end={"type": "number", "description": "Seconds at which the part ends; default: the end"},
    num_frames={"type": "integer", "description": "How many frames to show"},
)
MAX_FRAMES = 256  # per trajectory


@dataclass(frozen=True)
class FrameReference:
    """The frame of the video `path` at `seconds`."""

    path: str
    seconds: float


class FrameReferences:
    """The extracted frames of each trajectory; one object is shared by the tools of a process."""

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
        """Returns (number, frame) of frame `number`, or of the last one if `number` is None.

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
        self._of.pop(trajectory, None)


FRAMES = FrameReferences()


def trajectory_of(instance_id: str, tool_name: str) -> str:
    """Returns the trajectory of an instance of `tool_name`; its id is `<trajectory>:<tool>`."""
    return instance_id.removesuffix(f":{tool_name}")


class FrameExtractionOptions(VideoOptions):
    """`config` of `execute_frame_extraction`."""

    max_frames: int = Field(default=16, ge=1, le=256)
    max_resolution: Count = 2048


@dataclass(frozen=True)
class _Clip:
    path: str
    seconds: float
    num_frames: int
    resolution: int


class FrameExtractionTool(StatefulTool[_Clip]):
    """`create_kwargs`: `video_path` (required), `num_frames` (4) and `resolution` (224: pixels of the longer side)."""

    name = "execute_frame_extraction"
    schema = _SCHEMA

    def __init__(self, config: dict[str, Any], tool_schema: OpenAIFunctionToolSchema | None = None) -> None:
        """Raises ConfigError if an option is invalid, MissingExtraError if PyAV is not installed."""
        super().__init__(config, tool_schema)
        self._options = read_options(FrameExtractionOptions, config, self.name)
        self._threads = BlockingCalls("etude-frames", self._options.num_workers)
        require_av()

    async def begin(
        self,
        video_path: str | None = None,
        num_frames: int = 4,
        resolution: int = 224,
        **create_kwargs: Any,
    ) -> _Clip:
        """Opens the row's video to read its duration.

        Raises:
            DataError: the row has no video for this tool, or it cannot be read.
        """
        where = f"tools_kwargs.{self.name}.create_kwargs"
        if video_path is None:
            raise DataError(f"{where}.video_path is missing")
        if not 1 <= num_frames <= self._options.max_frames or not 1 <= resolution <= self._options.max_resolution:
            raise DataError(
                f"{where}: num_frames may be from 1 to {self._options.max_frames} and resolution from 1 to "
                f"{self._options.max_resolution}, not {num_frames} and {resolution}"
            )
        seconds = await self._threads.run(video_seconds, video_path, self._options)
        return _Clip(str(video_path), seconds, num_frames, resolution)

    @rollout_trace_op
    async def execute(self, instance_id: str, parameters: dict[str, Any], **execute_kwargs: Any) -> Execution:
        """Returns frames of the video as images, and their numbers and times as text; step reward 0.0.

        Raises:
            ToolError: the span or the number of frames is invalid.
        """
        clip = self._instance_dict[instance_id]
        times = self._times(clip, parameters)
        images = await self._threads.run(read_frames, clip.path, times, clip.resolution, self._options)
        references = [FrameReference(clip.path, seconds) for seconds in times]
        first = FRAMES.add(trajectory_of(instance_id, self.name), references)
        lines = [f"Frame {first + n} at {seconds:.2f} s" for n, seconds in enumerate(times)]
        text = f"The video is {clip.seconds:.2f} s long.\n" + "\n".join(lines)
        return ToolResponse(text=text, image=list(images)), 0.0, {"num_frames": len(images)}

    async def release(self, instance_id: str, **release_kwargs: Any) -> None:
        await super().release(instance_id)
        FRAMES.forget(trajectory_of(instance_id, self.name))

    def _times(self, clip: _Clip, parameters: dict[str, Any]) -> list[float]:
        start = _seconds(parameters.get("start"), 0.0, "start")
        end = min(_seconds(parameters.get("end"), clip.seconds, "end"), clip.seconds)
        if not 0 <= start < end:
            raise ToolError(
                f"Error: start and end must be within the {clip.seconds:.2f} s of the video, start before end"
            )
        count = parameters.get("num_frames")
        count = clip.num_frames if count is None else count
        if not isinstance(count, int) or isinstance(count, bool) or not 1 <= count <= self._options.max_frames:
            raise ToolError(f"Error: num_frames must be a whole number from 1 to {self._options.max_frames}")
        return [start + (end - start) * (n + 0.5) / count for n in range(count)]


def _seconds(value: object, default: float, name: str) -> float:
    if value is None:
        return default
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise ToolError(f"Error: {name} must be a number of seconds")
    return float(value)
