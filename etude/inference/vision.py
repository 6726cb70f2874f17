"""Inputs of an engine step whose contexts have images: token ids, rotary positions, and image features.

Scheduler, prefixes and cache only see keyed ids (see `etude.models.image_positions`), in which every placeholder is
replaced by a number that stands for its image: equal keyed ids are equal inputs to the model. Here keyed ids become token
ids again.

Invariant: an image's features are computed separately, so they do not depend on which rows share a step, and once for all
rows with that image while they are cached; the cache is cleared when the weights change.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from etude.inference.layout import StepInput
from etude.models.vision import ImageFeatures, PlacedFeatures, Vision, image_features
from etude.schemas import ImageInput


class StepImages:
    """Prepares the images for the steps of one engine; `most_tokens`: maximum number of tokens whose features are cached
    (a step's own images may exceed it)."""

    def __init__(self, model: Any, vision: Vision, most_tokens: int) -> None:
        self._model, self.vision, self._most_tokens = model, vision, most_tokens
        self._known: OrderedDict[int, ImageFeatures] = OrderedDict()
        self.encoded = 0

    def forget(self) -> None:
        """Clears the cached features: the weights have changed."""
        self._known.clear()

    def token_ids(self, keyed: Tensor) -> Tensor:
        """Converts keyed ids (tokens,) to token ids: placeholders become `image_token_id`."""
        return keyed.masked_fill(keyed < 0, self.vision.image_token_id)

    def rotary(self, feeds: Sequence[StepInput], positions: Tensor) -> Tensor:
        """Returns the rotary positions (3, 1, tokens) of a step's tokens, given their places in their contexts (tokens,)."""
        shifts: list[int] = []
        spans: list[tuple[int, Tensor]] = []
        for feed in feeds:
            begin, count = feed.base + feed.start, len(feed.ids)
            placed = feed.images
            if placed is not None and begin < placed.end:
                spans.append((len(shifts), placed.positions(begin, begin + count)))
            shifts += [placed.shift if placed is not None else 0] * count
        shifted = (positions + torch.tensor(shifts, device=positions.device)).expand(3, -1)
        if spans:
            shifted = shifted.clone()
            for offset, grid in spans:
                shifted[:, offset : offset + grid.shape[1]] = grid
        return shifted[:, None]

    def features_of(self, feeds: Sequence[StepInput]) -> PlacedFeatures | None:
        """Returns the images among a step's tokens, with their features; None if there are none."""
        places: list[Tensor] = []
        parts: list[ImageFeatures] = []
        used: set[int] = set()
        offset = 0
        for feed in feeds:
            begin, count = feed.base + feed.start, len(feed.ids)
            if feed.images is not None and begin < feed.images.end:
                for each, first, last in feed.images.within(begin, begin + count):
                    features = self._features(each.image)
                    used.add(each.image.digest)
                    parts.append(features.part(first - each.start, last - each.start))
                    places.append(torch.arange(first, last) + (offset - begin))
            offset += count
        if not parts:
            return None
        self._trim(used)
        features = ImageFeatures.concat(parts)
        return PlacedFeatures(torch.cat(places).to(features.embedding.device), features)

    def _features(self, image: ImageInput) -> ImageFeatures:
        known = self._known.get(image.digest)
        if known is None:
            known = self._known[image.digest] = image_features(self._model, [image])[0]
            self.encoded += 1
        self._known.move_to_end(image.digest)
        return known

    def _trim(self, used: set[int]) -> None:
        held = sum(len(each.embedding) for each in self._known.values())
        for digest in [digest for digest in self._known if digest not in used]:
            if held <= self._most_tokens:
                return
            held -= len(self._known.pop(digest).embedding)
