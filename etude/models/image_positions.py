"""The images of one context: their places among the token ids, their keys, and rotary positions.

Invariant: image i occupies `tokens` consecutive placeholders, in order, and no other placeholder is left; so ids and images
that do not match are rejected before anything is computed with them.

`keyed` ids distinguish the images behind placeholders: each placeholder is replaced by a negative number derived from its
image's digest, the same for all placeholders of one image. Contexts whose keyed ids share a prefix have the same prefix for
the model, and may share computation and cache; contexts with two different images of equal size do not.

Positions are those of Qwen2-VL (Wang et al. 2024, arXiv 2409.12191, section 2.1): three rows, for time, height and width. A
text token has the same number in each, one above the largest before it. An image's tokens count their grid coordinates from
there, so that n tokens in a grid of h by w advance the following text by max(h, w) instead of n. So after an image, the
position of a token is its index plus a constant, which is all that decoding needs (`shift`).
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from etude.errors import DataError
from etude.models.vision import Vision
from etude.schemas import ImageInput


@dataclass(frozen=True)
class PlacedImage:
    """An image at index `start` of its context. Text after it has position index + `shift`, text before it index +
    `before`."""

    image: ImageInput
    start: int
    before: int
    shift: int

    @property
    def end(self) -> int:
        """The index after the image's last token."""
        return self.start + self.image.tokens


class ImagePositions:
    """The images of a context, in the order of their positions."""

    def __init__(self, placed: Sequence[PlacedImage], merge_size: int) -> None:
        self.placed, self._merge_size = tuple(placed), merge_size
        self._starts = [each.start for each in placed]
        self.end = placed[-1].end if placed else 0
        self.shift = placed[-1].shift if placed else 0

    @classmethod
    def of(cls, ids: Sequence[int], images: Sequence[ImageInput], vision: Vision) -> ImagePositions | None:
        """Locates `images` among `ids`; None if there are no images.

        Raises:
            DataError: placeholders and images do not match, or the ids contain video placeholders.
        """
        token, placed, at, shift = vision.image_token_id, list[PlacedImage](), 0, 0
        if vision.video_token_id in ids:
            raise DataError("the context holds placeholders of a video: videos are not supported")
        for image in images:
            merged = [side // vision.merge_size for side in image.grid[1:]]
            start = _index(ids, token, at)
            at = start + image.tokens
            if list(ids[start:at]) != [token] * image.tokens:
                break
            after = shift + max(merged) - image.tokens
            placed.append(PlacedImage(image, start, shift, after))
            shift = after
        if len(placed) < len(images) or _index(ids, token, at) < len(ids):
            sizes = ", ".join(str(image.tokens) for image in images) or "none"
            raise DataError(
                f"the context has {sum(each == token for each in ids)} image placeholders (id {token}) and {len(images)} "
                f"images, which stand for {sizes}: each image needs that many placeholders in a row, in order"
            )
        return cls(placed, vision.merge_size) if placed else None

    def keyed(self, ids: Sequence[int]) -> list[int]:
        """Returns `ids` with each placeholder replaced by its image's key, see `key_of`; `ids` may be a prefix."""
        keyed = list(ids)
        for each in self.placed:
            end = min(each.end, len(keyed))
            keyed[each.start : end] = [key_of(each.image)] * max(end - each.start, 0)
        return keyed

    def positions(self, begin: int, end: int) -> Tensor:
        """Returns the rotary positions of the tokens [begin, end): (3, end - begin)."""
        parts = []
        at = begin
        for each in self.placed[max(bisect_right(self._starts, begin) - 1, 0) :]:
            if each.start >= end:
                break
            if at < each.start:
                parts.append(torch.arange(at, each.start).expand(3, -1) + each.before)
                at = each.start
            if at < each.end:
                until = min(each.end, end)
                parts.append(self._grid(each)[:, at - each.start : until - each.start])
                at = until
        if at < end:
            known = bisect_right(self._starts, at) - 1
            shift = self.placed[known].shift if known >= 0 else 0
            parts.append(torch.arange(at, end).expand(3, -1) + shift)
        return torch.cat(parts, dim=1)

    def _grid(self, placed: PlacedImage) -> Tensor:
        frames, height, width = placed.image.grid
        sizes = frames, height // self._merge_size, width // self._merge_size
        axes = torch.meshgrid(*map(torch.arange, sizes), indexing="ij")
        return torch.stack(axes).reshape(3, -1) + (placed.start + placed.before)

    def within(self, begin: int, end: int) -> Iterator[tuple[PlacedImage, int, int]]:
        """Yields the images with tokens in [begin, end), each with its first index there and the index after its last."""
        for each in self.placed[max(bisect_right(self._starts, begin) - 1, 0) :]:
            if each.start >= end:
                return
            first, last = max(each.start, begin), min(each.end, end)
            if first < last:
                yield each, first, last


def key_of(image: ImageInput) -> int:
    """Returns the image's key among keyed ids: negative, unlike any token id."""
    return -1 - image.digest


def _index(ids: Sequence[int], token: int, start: int) -> int:
    """Returns the first index of `token` from `start` on; the length of `ids` if there is none."""
    try:
        return ids.index(token, start)
    except ValueError:
        return len(ids)
