"""The images of packed rows: rotary positions of all packed tokens, and which image features go to which token.

Invariant: rows share a packed token only if they agree on everything before it, images included, because packing compares
keyed ids (see `etude.models.image_positions`). An image that occurs in several rows is encoded once, and its gradient is the
sum over these rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from etude.errors import DataError
from etude.models.image_positions import ImagePositions
from etude.models.vision import ImageFeatures, PlacedFeatures, Vision, image_features, no_images_error
from etude.protocol import DataProto
from etude.schemas import ImageInput

COLUMN = "multi_modal_inputs"
"""A tuple of `ImageInput` per row, in the order of their positions in `input_ids`."""


@dataclass(frozen=True)
class PackedImages:
    """`positions` (3, 1, tokens); `images` are distinct; `places` (shown,) are the packed tokens that get image features,
    and `features` (shown,) is the index of each one's features among those of all images, concatenated."""

    positions: Tensor
    images: Sequence[ImageInput]
    places: Tensor
    features: Tensor

    def encode(self, model: Any) -> PlacedFeatures:
        """Encodes the images with the model's current weights."""
        made = ImageFeatures.concat(image_features(model, self.images))
        return PlacedFeatures(self.places, made.rows(self.features))


def locate_images(batch: DataProto, rows: Sequence[int], vision: Vision | None) -> list[ImagePositions | None]:
    """Locates the images of each row; None for rows without images.

    Raises:
        DataError: a row's images and placeholders do not match.
    """
    column = batch.non_tensor_batch.get(COLUMN)
    if vision is None:
        return [None] * len(rows)
    placed = []
    for row in rows:
        ids = batch.batch["input_ids"][row][batch.batch["attention_mask"][row].bool()].tolist()
        try:
            placed.append(ImagePositions.of(ids, () if column is None else column[row], vision))
        except DataError as error:
            raise DataError(f"row {row}: {error}") from error
    return placed


def check_images(batch: DataProto, config: Any) -> None:
    """Raises ConfigError if a row has images but the model with this configuration takes none."""
    column = batch.non_tensor_batch.get(COLUMN)
    if column is not None and Vision.of(config) is None and any(map(len, column)):
        raise no_images_error(config)


def pack_images(
    placed: Sequence[ImagePositions | None], places: Sequence[Tensor], plain: Tensor, device: torch.device
) -> PackedImages | None:
    """Packs the images of packed rows; None if there are no images.

    Args:
        placed: the images of each row.
        places: for each row, the packed index of each of its tokens, (row's tokens,).
        plain: (1, tokens), each packed token's distance from the start of its rows.
    """
    positions = plain.expand(3, -1).clone()
    images: dict[int, tuple[int, ImageInput]] = {}
    held = 0
    shown: list[Tensor] = []
    features: list[Tensor] = []
    for row, at in zip(placed, places):
        if row is None:
            continue
        positions[:, at] = row.positions(0, len(at)).to(plain.device)
        for each, first, last in row.within(0, len(at)):
            image = each.image
            if image.digest not in images:
                images[image.digest] = held, image
                held += image.tokens
            shown.append(at[first:last])
            features.append(torch.arange(last - first) + images[image.digest][0])
    if not images:
        return None
    where, which = torch.cat(shown), torch.cat(features)
    # A position shared by several rows is filled once, so that its gradient is not counted twice.
    order = torch.from_numpy(np.unique(where.numpy(), return_index=True)[1])
    return PackedImages(
        positions[:, None].to(device),
        [image for _, image in images.values()],
        where[order].to(device),
        which[order].to(device),
    )
