"""The vision part of a vision-language model: its vision tower, and how image features enter the language model.

An image's features depend only on its pixel values and the weights. They replace the embeddings of the image's placeholders;
in Qwen3-VL, further features are added to the hidden states after the first layers (DeepStack, Meng et al. 2024, arXiv
2406.04334). The tower runs with Transformers' own attention; only the language model is packed.

Placeholders are never sampled: engine and trainer both mask them out of the distribution (`etude.models.packed`), because a
placeholder without an image is invalid and would shift all later images.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from etude.errors import ConfigError
from etude.schemas import ImageInput

KINDS = {"qwen2_vl": "Qwen2VLProcessor", "qwen2_5_vl": "Qwen2_5_VLProcessor", "qwen3_vl": "Qwen3VLProcessor"}
"""Model types whose images are supported, with Transformers' processor class."""


@dataclass(frozen=True)
class Vision:
    """A model's image format: the placeholder ids, and the number of patches per side that are merged into one token."""

    image_token_id: int
    video_token_id: int
    merge_size: int

    @classmethod
    def of(cls, config: Any) -> Vision | None:
        """Reads a model's configuration; None if images are not supported: a text model, or an unsupported type."""
        if config.model_type not in KINDS:
            return None
        return cls(config.image_token_id, config.video_token_id, config.vision_config.spatial_merge_size)


@dataclass(frozen=True)
class ImageFeatures:
    """`embedding` (tokens, hidden) for the placeholders; `deep`: features added after the first layers, same shape each."""

    embedding: Tensor
    deep: tuple[Tensor, ...] = ()

    def part(self, begin: int, end: int) -> ImageFeatures:
        """Returns the features of the tokens [begin, end)."""
        return ImageFeatures(self.embedding[begin:end], tuple(each[begin:end] for each in self.deep))

    def rows(self, index: Tensor) -> ImageFeatures:
        """Returns the features of the tokens `index`; gradients of duplicates are added in a fixed order."""
        return ImageFeatures(self.embedding.index_select(0, index), tuple(d.index_select(0, index) for d in self.deep))

    @classmethod
    def concat(cls, parts: Sequence[ImageFeatures]) -> ImageFeatures:
        """Concatenates the features of several images or parts of images."""
        if len(parts) == 1:
            return parts[0]
        deep = tuple(torch.cat(each) for each in zip(*(part.deep for part in parts)))
        return cls(torch.cat([part.embedding for part in parts]), deep)


@dataclass(frozen=True)
class PlacedFeatures:
    """Image features for the indices `places` (tokens,) of a packed row; places are unique."""

    places: Tensor
    features: ImageFeatures


def image_features(model: Any, images: Sequence[ImageInput]) -> list[ImageFeatures]:
    """Computes the features of each image with the model's vision tower; differentiable if gradients are enabled."""
    body = model.base_model
    device = body.get_input_embeddings().weight.device
    pixels = torch.cat([image.pixel_values for image in images]).to(device)
    grids = torch.tensor([image.grid for image in images], device=device)
    made = body.get_image_features(pixels, grids, return_dict=True)
    sizes = [len(each) for each in made.pooler_output]
    deep = [  # Transformers before 5.24 does not split them by image
        layer.split(sizes) if isinstance(layer, Tensor) else layer
        for layer in getattr(made, "deepstack_features", None) or ()
    ]
    return [ImageFeatures(each, tuple(layer[i] for layer in deep)) for i, each in enumerate(made.pooler_output)]


def hidden_with_images(
    model: Any, token_ids: Tensor, position_ids: Tensor, layout: Any, shown: PlacedFeatures
) -> Tensor:
    """`etude.models.packed.packed_hidden` with images among the tokens; `position_ids` (3, 1, tokens)."""
    body = model.base_model
    features, places = shown.features, shown.places
    embedded = body.get_input_embeddings()(token_ids)
    embedded = embedded.index_put((places,), features.embedding.to(embedded.dtype))
    options: dict[str, Any] = {}
    if features.deep:
        # DeepStack features are added in the order of the mask's positions.
        order = places.argsort()
        mask = torch.zeros_like(token_ids, dtype=torch.bool).index_fill(0, places, True)
        options = {"visual_pos_masks": mask[None], "deepstack_visual_embeds": [each[order] for each in features.deep]}
    output = body.language_model(
        inputs_embeds=embedded[None],
        attention_mask=torch.ones_like(token_ids)[None],
        position_ids=position_ids,
        use_cache=False,
        layout=layout,
        **options,
    )
    return output.last_hidden_state[0]


def no_images_error(config: Any) -> ConfigError:
    """Builds the error that says why a model with this configuration does not take images."""
    if getattr(config, "vision_config", None) is None:
        return ConfigError(f"model type '{config.model_type}' reads text only: it cannot be shown images")
    known = ", ".join(KINDS)
    return ConfigError(f"images are not supported for model type '{config.model_type}', only for {known}")
