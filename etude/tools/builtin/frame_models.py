"""Tools that run a user's model on one frame: object detection and captioning.

Invariant: without a model the run does not start. The model is loaded once per process, on first use, and called in a thread
(and awaited, if asynchronous), at most `num_workers` calls at once; its output is validated before the policy sees it.
Keeping track of frames is left to `frame_extraction`.
"""

from __future__ import annotations

import inspect
import math
import threading
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar

from etude.errors import ConfigError, InfrastructureError, ToolError, one_line
from etude.options.types import Count
from etude.registry import import_object
from etude.schemas import OpenAIFunctionToolSchema, ToolResponse
from etude.timeouts import BlockingCalls
from etude.tools.base import Execution, StatefulTool, function_schema
from etude.tools.builtin.frame_extraction import FRAMES, trajectory_of
from etude.tools.builtin.video import VideoOptions, read_frames, require_av
from etude.tools.options import read_options
from etude.trace import rollout_trace_op

if TYPE_CHECKING:
    from PIL.Image import Image

MAX_TEXT_CHARS = 1000
MAX_LABELS = 50
MAX_DETECTIONS = 100
_FRAME = {"type": "integer", "description": "Number of an extracted frame; default: the last one"}


class FrameModelOptions(VideoOptions):
    """`config` of both tools: `model` names the callable, the rest are limits."""

    model: str = ""
    num_workers: Count = 1


class FrameModelTool(StatefulTool[dict[str, Any]]):
    """Runs the model on one frame and returns its output as text.

    `config.model` is `path/to/file.py:name` or `package.module.name`: a function, or a class that is constructed
    without arguments and then called. `create_kwargs`: `resolution` (448: pixels of the longer side of the frame that the
    model gets); all others are passed to the model as keyword arguments in every call.
    """

    call: ClassVar[str]
    """The model's signature, for the error message if there is no model."""

    def __init__(self, config: dict[str, Any], tool_schema: OpenAIFunctionToolSchema | None = None) -> None:
        """Imports the model's function or class, without loading the model.

        Raises:
            ConfigError: `config.model` is missing or does not name a callable.
            MissingExtraError: PyAV is not installed.
        """
        super().__init__(config, tool_schema)
        self._options = read_options(FrameModelOptions, config, self.name)
        if not self._options.model:
            raise ConfigError(
                f"tool '{self.name}': config.model names no model; set it to 'path/to/file.py:name' or "
                f"'package.module.name' of a callable used as {self.call}"
            )
        self._named: Any = import_object(self._options.model)
        if not callable(self._named):
            raise ConfigError(f"tool '{self.name}': config.model '{self._options.model}' cannot be called")
        require_av()
        self._model: Any = None
        self._loading = threading.Lock()
        self._threads = BlockingCalls(f"etude-{self.name}", self._options.num_workers)

    async def begin(self, resolution: int = 448, **create_kwargs: Any) -> dict[str, Any]:
        """Stores the row's arguments for the model."""
        return {"resolution": int(resolution), "arguments": create_kwargs}

    @rollout_trace_op
    async def execute(self, instance_id: str, parameters: dict[str, Any], **execute_kwargs: Any) -> Execution:
        """Returns the model's output for the frame `parameters["frame"]`; step reward 0.0.

        Raises:
            ToolError: there is no such frame, or an argument is invalid.
            InfrastructureError: the model failed, or returned something invalid.
        """
        state = self._instance_dict[instance_id]
        number, frame = FRAMES.get(trajectory_of(instance_id, self.name), parameters.get("frame"))
        asked = self.asked(parameters)
        given = frame.path, [frame.seconds], state["resolution"]
        [image] = await self._threads.run(read_frames, *given, self._options)
        try:
            said = await self._threads.run(self._call_model, image, {**state["arguments"], **asked})
            text = self.report(await said if inspect.isawaitable(said) else said, image)
        except Exception as error:
            line = f"{type(error).__name__}: {one_line(error)}"
            raise InfrastructureError(f"the model '{self._options.model}' failed: {line}") from error
        return ToolResponse(text=f"Frame {number} at {frame.seconds:.2f} s: {text}"), 0.0, {}

    def asked(self, parameters: Mapping[str, Any]) -> dict[str, Any]:
        """Returns the model's keyword arguments from the policy's call; raises ToolError if they are invalid."""
        raise NotImplementedError

    def report(self, said: Any, image: Image) -> str:
        """Returns the model's output as text; raises TypeError or ValueError if the output is invalid."""
        raise NotImplementedError

    def _call_model(self, image: Image, arguments: dict[str, Any]) -> Any:
        with self._loading:
            if self._model is None:
                self._model = self._named() if inspect.isclass(self._named) else self._named
        return self._model(image, **arguments)


class ObjectDetectionTool(FrameModelTool):
    """`model(image, labels=None | [text, …], **create_kwargs)` returns `[{"label", "score", "box": [x1, y1, x2, y2]}]`.

    The model's box is in pixels of `image`; the policy gets it as fractions of the frame's width and height, which are valid
    at any resolution.
    """

    name = "execute_object_detection"
    call = 'model(image, labels=None) -> [{"label": text, "score": number, "box": [x1, y1, x2, y2]}, …]'
    schema = function_schema(
        name,
        "Finds objects in a frame of the video. Boxes are fractions of its width and height.",
        frame=_FRAME,
        labels={"type": "array", "items": {"type": "string"}, "description": "What to look for"},
    )

    def asked(self, parameters: Mapping[str, Any]) -> dict[str, Any]:
        """Returns `labels`: a list of texts, or None for all labels that the model knows."""
        labels = parameters.get("labels")
        if labels is None:
            return {"labels": None}
        texts = isinstance(labels, list) and all(isinstance(label, str) for label in labels)
        if not texts or not 1 <= len(labels) <= MAX_LABELS:
            raise ToolError(f"Error: labels must be a list of 1 to {MAX_LABELS} texts")
        return {"labels": [label[:MAX_TEXT_CHARS] for label in labels]}

    def report(self, said: Any, image: Image) -> str:
        """Returns one line per object, highest score first."""
        if not isinstance(said, list | tuple):
            raise TypeError(f"expected a list of detections, not {type(said).__name__}")
        found = sorted((_detection(each, image.size) for each in said), key=lambda each: -each[1])
        lines = [f"{label} {score:.2f} [{', '.join(f'{x:.3f}' for x in box)}]" for label, score, box in found]
        return "\n".join([f"{len(found)} found", *lines[:MAX_DETECTIONS]]) if found else "nothing found"


class FrameCaptionTool(FrameModelTool):
    """`model(image, prompt=None | text, **create_kwargs)` returns a text; rows may set `model_name`."""

    name = "execute_frame_caption"
    call = "model(image, prompt=None, model_name=…) -> text"
    schema = function_schema(
        name,
        "Describes a frame of the video in words.",
        frame=_FRAME,
        prompt={"type": "string", "description": "What to attend to"},
    )

    def asked(self, parameters: Mapping[str, Any]) -> dict[str, Any]:
        """Returns `prompt`: a text or None."""
        prompt = parameters.get("prompt")
        if prompt is not None and not isinstance(prompt, str):
            raise ToolError("Error: prompt must be a text")
        return {"prompt": None if prompt is None else prompt[:MAX_TEXT_CHARS]}

    def report(self, said: Any, image: Image) -> str:
        """Returns the caption, truncated."""
        if not isinstance(said, str):
            raise TypeError(f"expected a text, not {type(said).__name__}")
        return said.strip()[:MAX_TEXT_CHARS]


def _detection(found: Any, size: tuple[int, int]) -> tuple[str, float, list[float]]:
    """Validates one detection of a model; returns (label, score, box as fractions)."""
    if not isinstance(found, Mapping) or not {"label", "score", "box"} <= found.keys():
        raise TypeError('a detection is {"label": text, "score": number, "box": [x1, y1, x2, y2]}')
    score, box = float(found["score"]), [float(value) for value in found["box"]]
    if len(box) != 4 or not all(map(math.isfinite, [score, *box])):
        raise ValueError("a detection has a finite score and a box of four finite numbers")
    label = " ".join(str(found["label"]).split())[:MAX_TEXT_CHARS]
    return label, score, [min(max(value / size[n % 2], 0.0), 1.0) for n, value in enumerate(box)]
