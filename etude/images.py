"""`ImageInput`: one preprocessed image, the model input that chat messages, trainer and engines pass around.

Invariant: two images have the same digest exactly when their pixel values and grids are the same (up to a hash collision,
probability 2⁻⁶³), so caches are keyed by the digest. In a context, an image is a run of `tokens` placeholder ids. Decoding
and splitting into patches is done by the model's processor.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from etude.errors import DataError

if TYPE_CHECKING:
    from torch import Tensor

DIGEST_BITS = 63


@dataclass(frozen=True, eq=False)
class ImageInput:
    """Attributes:
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
        number = int.from_bytes(digest.digest(), "big") & ((1 << DIGEST_BITS) - 1)
        return cls(pixels, grid, patches // merge_size**2, number)
