"""`ImageZoomInTool`: crops a region of a row's image, so that the model can look closer.

Invariant: a crop lies inside the image, is at least `min_dimension` pixels wide and high (as a vision model's patches
require), and its sides differ by a factor of at most 100. A box that is too small is enlarged around its centre; if none
fits, the response gives the reason and the step reward is -0.05.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Literal

from etude.errors import DataError
from etude.options.types import Count
from etude.schemas import OpenAIFunctionToolSchema, ToolResponse
from etude.timeouts import BlockingCalls
from etude.tools.base import Execution, StatefulTool, function_schema
from etude.tools.builtin.images import load_image
from etude.tools.options import ToolOptions, read_options
from etude.trace import rollout_trace_op

if TYPE_CHECKING:
    from PIL.Image import Image

Box = tuple[int, int, int, int]

BAD_BOX_REWARD = -0.05
MAX_ASPECT_RATIO = 100
MAX_LABEL_CHARS = 200
_SCHEMA = function_schema(
    "image_zoom_in_tool",
    "Shows a region of the image by itself, given its bounding box and, if you like, a label.",
    ["bbox_2d"],
    bbox_2d={
        "type": "array",
        "items": {"type": "number"},
        "minItems": 4,
        "maxItems": 4,
        "description": "[x1, y1, x2, y2]: left, top, right and bottom of the region",
    },
    label={"type": "string", "description": "What the region shows"},
)


class ImageZoomOptions(ToolOptions):
    """`config` of `image_zoom_in_tool`.

    `coordinates` of the box: pixels of the row's image, pixels of the image `resized` as Qwen2-VL's processor does it
    (within `min_pixels` and `max_pixels`, the processor's own), or `thousandths` of the sides.
    """

    min_dimension: Count = 28
    coordinates: Literal["pixels", "resized", "thousandths"] = "pixels"
    min_pixels: Count = 3136
    max_pixels: Count = 12_845_056
    max_image_pixels: Count = 50_000_000
    num_workers: Count = 4


class ImageZoomInTool(StatefulTool["Image"]):
    """`create_kwargs`: `image` (required), in any form that `load_image` accepts."""

    name = "image_zoom_in_tool"
    schema = _SCHEMA

    def __init__(self, config: dict[str, Any], tool_schema: OpenAIFunctionToolSchema | None = None) -> None:
        """Raises ConfigError if an option is invalid."""
        super().__init__(config, tool_schema)
        self._options = read_options(ImageZoomOptions, config, self.name)
        self._threads = BlockingCalls("etude-image-zoom", self._options.num_workers)

    async def begin(self, image: Any = None, **create_kwargs: Any) -> Image:
        """Loads the row's image.

        Raises:
            DataError: the row has no image for this tool, or it cannot be loaded.
        """
        if image is None:
            raise DataError(f"tools_kwargs.{self.name}.create_kwargs.image is missing")
        return await self._threads.run(load_image, image, self._options.max_image_pixels)

    @rollout_trace_op
    async def execute(self, instance_id: str, parameters: dict[str, Any], **execute_kwargs: Any) -> Execution:
        """Returns the region `parameters["bbox_2d"]` as an image; step reward 0.0, or -0.05 for an invalid box."""
        image, wanted = self._instance_dict[instance_id], parameters.get("bbox_2d")
        numbers = _four_numbers(wanted)
        if numbers is None:
            return _refusal("bbox_2d must be a list of four numbers [x1, y1, x2, y2]")
        seen = self._size_seen(image.size)
        numbers = [value * image.size[n % 2] / seen[n % 2] for n, value in enumerate(numbers)]
        box = crop_box(numbers, image.size, self._options.min_dimension)
        if box is None:
            least = self._options.min_dimension
            return _refusal(
                f"the bounding box {wanted} is empty, too narrow, or gives less than {least} x {least} pixels of the "
                f"image of {image.size[0]} x {image.size[1]}"
            )
        crop = await self._threads.run(image.crop, box)
        label = " ".join(str(parameters.get("label") or "").split())[:MAX_LABEL_CHARS]
        text = f"Zoomed in on the image to the region {wanted}{f' with label {label}' if label else ''}."
        return ToolResponse(text=text, image=[crop]), 0.0, {"success": True}

    def _size_seen(self, size: tuple[int, int]) -> tuple[int, int]:
        """Returns (width, height) of the model's coordinate system."""
        options = self._options
        if options.coordinates == "resized":
            return resized(size, options.min_dimension, options.min_pixels, options.max_pixels)
        return (1000, 1000) if options.coordinates == "thousandths" else size


def resized(size: tuple[int, int], factor: int, min_pixels: int, max_pixels: int) -> tuple[int, int]:
    """Returns the size that Qwen2-VL's image processor resizes to: multiples of `factor`, their product within limits."""
    width, height = (max(factor, round(side / factor) * factor) for side in size)
    if width * height > max_pixels:
        shrink = math.sqrt(size[0] * size[1] / max_pixels)
        width, height = (max(factor, math.floor(side / shrink / factor) * factor) for side in size)
    elif width * height < min_pixels:
        growth = math.sqrt(min_pixels / (size[0] * size[1]))
        width, height = (math.ceil(side * growth / factor) * factor for side in size)
    return width, height


def crop_box(wanted: Sequence[float], size: tuple[int, int], min_dimension: int) -> Box | None:
    """Returns (left, top, right, bottom) in whole pixels inside an image of `size` (width, height), or None if no box fits.

    The box is clipped to the image. If a side is then shorter than `min_dimension`, the box is enlarged around its centre,
    keeping its shape as far as the image allows, and moved inward at an edge.
    """
    spans = [(max(0.0, wanted[axis]), min(float(size[axis]), wanted[axis + 2])) for axis in (0, 1)]
    sides = [end - start for start, end in spans]
    if min(sides) <= 0 or max(sides) > MAX_ASPECT_RATIO * min(sides):
        return None
    if min(sides) < min_dimension:
        growth = min_dimension / min(sides)
        growth = min(growth, *(extent / side for extent, side in zip(size, sides)))
        centres = [(start + end) / 2 for start, end in spans]
        sides = [side * growth for side in sides]
        starts = [min(max(0.0, centre - side / 2), extent - side) for centre, side, extent in zip(centres, sides, size)]
        spans = [(start, start + side) for start, side in zip(starts, sides)]
    (left, right), (top, bottom) = [
        (max(0, math.floor(start + 1e-9)), min(extent, math.ceil(end - 1e-9)))
        for (start, end), extent in zip(spans, size)
    ]
    return (left, top, right, bottom) if min(right - left, bottom - top) >= min_dimension else None


def _four_numbers(value: object) -> list[float] | None:
    if not isinstance(value, list | tuple) or len(value) != 4:
        return None
    if not all(isinstance(each, int | float) and not isinstance(each, bool) for each in value):
        return None
    try:
        numbers = [float(each) for each in value]
    except OverflowError:
        return None
    return numbers if all(map(math.isfinite, numbers)) else None


def _refusal(reason: str) -> Execution:
    return ToolResponse(text=f"Error: {reason}."), BAD_BOX_REWARD, {"success": False}
