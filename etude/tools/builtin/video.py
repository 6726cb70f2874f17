"""Decodes frames of a video at given times, within limits (PyAV).

Invariant: a video is read only through an open file, never a URL, and only in one of the container formats below, so that a
file cannot make the decoder open others. Duration and frame size are checked before decoding, which stops at a deadline. The
frame at `t` is the last one that starts at or before `t`.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from etude.errors import DataError, MissingExtraError, one_line
from etude.options.types import Count, Positive
from etude.tools.options import ToolOptions

if TYPE_CHECKING:
    from PIL.Image import Image

_CONTAINERS = frozenset({"mov", "mp4", "m4a", "3gp", "mj2", "matroska", "webm", "avi", "flv", "mpegts", "mpeg", "ogg"})


class VideoOptions(ToolOptions):
    """`config` that the video tools share: `max_seconds` of duration, `max_pixels` of a frame, `decode_seconds` of work for
    one call, which `num_workers` do at once."""

    max_seconds: Positive = 7200.0
    max_pixels: Count = 40_000_000
    decode_seconds: Positive = 60.0
    num_workers: Count = 4


def require_av() -> Any:
    """Imports and returns the module `av` (PyAV).

    Raises:
        MissingExtraError: PyAV is not installed.
    """
    try:
        import av
    except ImportError:
        raise MissingExtraError("reading videos", "video") from None
    return av


def video_seconds(path: str | Path, limits: VideoOptions) -> float:
    """Returns the duration of a video in seconds.

    Raises:
        DataError: the file is missing, not a video, or exceeds the limits; names it.
    """
    with _open(path, limits) as video:
        return video.seconds


def read_frames(path: str | Path, times: Sequence[float], longest: int, limits: VideoOptions) -> list[Image]:
    """Returns the frame at each of `times` (seconds, ascending), its longer side scaled down to at most `longest` pixels.

    Raises:
        DataError: the video cannot be read or decoded within the limits; names the file.
    """
    with _open(path, limits) as video:
        return [video.frame_at(seconds, longest) for seconds in times]


@contextmanager
def _open(path: str | Path, limits: VideoOptions) -> Iterator[_Video]:
    """Opens a video; converts every error of the decoder within the block to a `DataError` that names the file."""
    av = require_av()
    path = Path(path).expanduser()
    if not path.is_file():
        raise DataError(f"video not found: {path}")
    try:
        with (
            path.open("rb") as file,
            av.open(file, mode="r", options={"protocol_whitelist": "none"}) as container,
        ):
            yield _Video(container, limits, f"video {path}")
    except (av.FFmpegError, OSError, ValueError) as error:
        raise DataError(f"video {path}: cannot be read: {one_line(error)}") from error


class _Video:
    def __init__(self, container: Any, limits: VideoOptions, name: str) -> None:
        self._container, self._limits, self._name = container, limits, name
        self._deadline = time.monotonic() + limits.decode_seconds
        formats = set(container.format.name.split(","))
        if not formats & _CONTAINERS or not container.streams.video:
            raise DataError(f"{name}: no video stream in a known container ({', '.join(sorted(formats))})")
        self._stream = container.streams.video[0]
        width, height = self._stream.codec_context.width, self._stream.codec_context.height
        if not 0 < width * height <= limits.max_pixels:
            raise DataError(f"{name}: frames of {width} x {height}; {limits.max_pixels} pixels are allowed")
        if self._stream.duration is not None and self._stream.time_base is not None:
            self.seconds = float(self._stream.duration * self._stream.time_base)
        else:
            self.seconds = (container.duration or 0) / 1_000_000  # a container counts microseconds
        if not 0 < self.seconds <= limits.max_seconds:
            raise DataError(f"{name}: a duration of {self.seconds:g} s; {limits.max_seconds:g} s are allowed")

    def frame_at(self, seconds: float, longest: int) -> Image:
        """Decodes the frame at `seconds`."""
        start = self._stream.start_time or 0
        self._container.seek(start + int(seconds / self._stream.time_base), stream=self._stream, backward=True)
        origin = float(start * self._stream.time_base)
        current: Any = None
        for frame in self._container.decode(self._stream):
            if time.monotonic() > self._deadline:
                raise DataError(f"{self._name}: not decoded within {self._limits.decode_seconds:g} s")
            if frame.width * frame.height > self._limits.max_pixels:
                raise DataError(f"{self._name}: a frame of {frame.width} x {frame.height} is too large")
            if current is not None and frame.time is not None and frame.time - origin > seconds + 1e-6:
                break
            current = frame
        if current is None:
            raise DataError(f"{self._name}: there is no frame at {seconds:.2f} s")
        scale = min(1.0, longest / max(current.width, current.height))
        width, height = (max(1, round(side * scale)) for side in (current.width, current.height))
        return current.reformat(width=width, height=height, format="rgb24").to_image()
