"""Tool schemas, tool calls, tool responses and preprocessed images: the data exchanged between the model, the chat code and
the tools.

Invariant: a schema keeps the *whole* JSON Schema it was given (items, nested properties, enum, default, $defs …), so that
the model sees what the tool's author wrote.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from pydantic import BaseModel, ConfigDict, Field, field_validator

from etude.errors import DataError

if TYPE_CHECKING:
    from torch import Tensor

_DIGEST_BITS = 63


class OpenAIFunctionPropertySchema(BaseModel):
    """One property of a parameter object; every JSON Schema keyword is kept."""

    model_config = ConfigDict(extra="allow")

    type: str | list[str] | None = None
    description: str | None = None
    enum: list[Any] | None = None


class OpenAIFunctionParametersSchema(BaseModel):
    """The parameter object of a function; every JSON Schema keyword ($defs, additionalProperties …) is kept."""

    model_config = ConfigDict(extra="allow")

    type: str = "object"
    properties: dict[str, OpenAIFunctionPropertySchema] = Field(default_factory=dict)
    required: list[str] = Field(default_factory=list)


class OpenAIFunctionSchema(BaseModel):
    """Name, description and parameters of one function."""

    model_config = ConfigDict(extra="allow")

    name: str = Field(min_length=1)
    description: str = ""
    parameters: OpenAIFunctionParametersSchema = Field(default_factory=OpenAIFunctionParametersSchema)


class OpenAIFunctionToolSchema(BaseModel):
    """A tool as the chat template sees it."""

    type: str = "function"
    function: OpenAIFunctionSchema

    def to_openai(self) -> dict[str, Any]:
        """Converts to the plain dictionary that it was built from: only keys that were set."""
        return self.model_dump(exclude_unset=True) | {"type": self.type}


class OpenAIFunctionParsedSchema(BaseModel):
    """A call as a parser finds it: arguments still text."""

    name: str
    arguments: str


class OpenAIFunctionCallSchema(BaseModel):
    """A call with decoded arguments."""

    name: str
    arguments: dict[str, Any]

    @staticmethod
    def from_openai_function_parsed_schema(
        parsed: OpenAIFunctionParsedSchema,
    ) -> tuple[OpenAIFunctionCallSchema, bool]:
        """Decodes the arguments; returns (call, has_decode_error), with empty arguments on an error."""
        try:
            arguments = json.loads(parsed.arguments)
        except (ValueError, RecursionError):
            arguments = None
        if not isinstance(arguments, dict):
            return OpenAIFunctionCallSchema(name=parsed.name, arguments={}), True
        return OpenAIFunctionCallSchema(name=parsed.name, arguments=arguments), False


class OpenAIFunctionToolCall(BaseModel):
    """A call with its identifier, as chat messages carry it."""

    id: str
    type: str = "function"
    function: OpenAIFunctionCallSchema


class FunctionCall(BaseModel):
    """A tool call of the model: `arguments` is the JSON text of an object.

    `id` is the model's label of the call, in formats that have one; it does not count for equality.
    """

    model_config = ConfigDict(frozen=True)

    name: str
    arguments: str
    id: str | None = None

    def __eq__(self, other: object) -> bool:
        return isinstance(other, FunctionCall) and (self.name, self.arguments) == (other.name, other.arguments)

    def __hash__(self) -> int:
        return hash((self.name, self.arguments))


class ToolResponse(BaseModel):
    """What a tool answers: text, and images or videos where the model can see them."""

    text: str | None = None
    image: list[Any] | None = None
    video: list[Any] | None = None

    @field_validator("image", "video", mode="before")
    @classmethod
    def _must_be_list(cls, value: Any) -> Any:
        if value is not None and not isinstance(value, list):
            raise ValueError(f"must be a list, got {type(value).__name__}")
        return value

    def is_empty(self) -> bool:
        """True if the response has no content for the model."""
        return not self.text and not self.image and not self.video

    def is_text_only(self) -> bool:
        """True if the response has text and no media."""
        return bool(self.text) and not self.image and not self.video


_MAX_EXAMPLE_DEPTH = 8
_MAX_EXAMPLE_VALUES = 1000  # references may double at each level


def example_of(schema: Mapping[str, Any], number: int = 0) -> Any:
    """Returns a value valid under a JSON Schema: its default or first example if given, else the simplest one; None for
    what is nested too deeply or too large. Any other `number` gives another value, though not always a valid one."""
    left = _MAX_EXAMPLE_VALUES

    def make(given: Any, depth: int) -> Any:
        nonlocal left
        left -= 1
        if not isinstance(given, Mapping) or depth > _MAX_EXAMPLE_DEPTH or left < 0:
            return None
        for key in ("const", "default"):
            if key in given and not (number and key == "default"):
                return given[key]
        for key in ("examples", "enum"):
            if given.get(key):
                return given[key][number % len(given[key])]
        if isinstance(ref := given.get("$ref"), str):
            target: Any = schema
            for part in ref.removeprefix("#/").split("/"):
                target = target.get(part, {}) if isinstance(target, Mapping) else {}
            return make(target, depth + 1)
        for key in ("anyOf", "oneOf", "allOf"):
            if given.get(key):
                return make(given[key][0], depth + 1)
        kind = given.get("type", "object" if "properties" in given else "string")
        kind = next((each for each in kind if each != "null"), "null") if isinstance(kind, list) else kind
        if kind == "object":
            properties, required = given.get("properties") or {}, given.get("required")
            names: Iterable[str] = properties if required is None else required
            return {name: make(properties.get(name) or {}, depth + 1) for name in names}
        if kind == "array":
            return [make(given.get("items") or {}, depth + 1)] * min(
                _MAX_EXAMPLE_VALUES, max(1, int(given.get("minItems", 1)))
            )
        lowest, longest = given.get("minimum", 1), int(given.get("maxLength", 100))
        value = lowest + number % max(1, given.get("maximum", math.inf) - lowest + 1)
        text = f"{number or ''}example"
        return {
            "integer": int(value),
            "number": float(value),
            "boolean": number % 2 == 0,
            "null": None,
            "string": text[:longest].ljust(min(_MAX_EXAMPLE_VALUES, int(given.get("minLength", 0))), "x"),
        }.get(kind, "example")

    return make(schema, 0)


@dataclass(frozen=True, eq=False)
class ImageInput:
    """One preprocessed image, the model input that chat messages, trainer and engines pass around. In a context, it is a run
    of `tokens` placeholder ids. Decoding and splitting into patches is done by the model's processor.

    Two images have the same digest exactly when their pixel values and grids are the same (up to a hash collision,
    probability 2⁻⁶³), so caches are keyed by the digest.

    Attributes:
    pixel_values: (patches, patch_dim) float32, as the Hugging Face image processor returns them for one image.
    grid: frames, height and width in patches (the processor's `image_grid_thw`); their product is `patches`.
    tokens: number of placeholder ids that the image replaces.
    digest: 63-bit hash of pixel values and grid.
    """

    pixel_values: Tensor
    grid: tuple[int, int, int]
    tokens: int
    digest: int

    def to_record(self) -> dict[str, Any]:
        """The record in a rollout dump: everything but the pixels."""
        return {"grid": list(self.grid), "tokens": self.tokens, "digest": f"{self.digest:016x}"}

    @classmethod
    def of(cls, pixel_values: Tensor, grid: tuple[int, int, int], merge_size: int) -> ImageInput:
        """Builds it from the processor's output for one image; `merge_size` × `merge_size` patches become one token.

        Raises:
            DataError: the grid does not fit the patches or the merge size.
        """
        frames, height, width = grid = (int(grid[0]), int(grid[1]), int(grid[2]))
        pixels = pixel_values.detach().float().cpu().contiguous()
        patches = frames * height * width
        if pixels.ndim != 2 or len(pixels) != patches or patches < 1 or height % merge_size or width % merge_size:
            raise DataError(
                f"an image of {tuple(pixels.shape)} pixel values does not fit a grid of {frames}x{height}x{width} "
                f"patches merged {merge_size} by {merge_size}"
            )
        digest = hashlib.blake2b(f"{frames},{height},{width},{pixels.shape[1]};".encode(), digest_size=8)
        digest.update(pixels.numpy().reshape(-1).data)
        number = int.from_bytes(digest.digest(), "big") & ((1 << _DIGEST_BITS) - 1)
        return cls(pixels, grid, patches // merge_size**2, number)
