"""The processor of a vision-language model: turns images into patches, and inserts an image's placeholders into text.

It is Transformers' own processor without its video part, so that neither that part nor torchvision is needed. Images are
always resized by Pillow: pixel values do not depend on which packages are installed. The supported architectures are listed
in `etude.models.vision`.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from etude.errors import ConfigError, DataError, one_line
from etude.models.loading import load_tokenizer, model_config
from etude.models.vision import KINDS
from etude.options.model_path import local_folder
from etude.schemas import ImageInput

if TYPE_CHECKING:
    from PIL.Image import Image
    from transformers import PreTrainedTokenizerBase, ProcessorMixin

IMAGE_TOKEN = "<|image_pad|>"
VIDEO_TOKEN = "<|video_pad|>"
VIDEO_FILE = "video_preprocessor_config.json"


def load_processor(path: str | Path, *, trust_remote_code: bool = False) -> ProcessorMixin | None:
    """Loads the processor of a model's folder or hub name; None for a text model, or one whose images are not supported.

    Called with `text` and `images`, it returns what Transformers' processor returns; `image_processor` and `tokenizer` are
    its parts, `image_token_id` is the placeholder.

    Raises:
        ConfigError: as `load_tokenizer`; or the image processor is missing or does not fit the model; or the tokenizer's
            image placeholder is missing or differs from the model's.
    """
    from transformers import AutoConfig, AutoImageProcessor

    if model_config(path).get("model_type") not in KINDS:
        return None
    name = str(local_folder(path) or path)
    tokenizer = load_tokenizer(path, trust_remote_code=trust_remote_code)
    try:
        images = AutoImageProcessor.from_pretrained(name, backend="pil", trust_remote_code=trust_remote_code)
        config, video = AutoConfig.from_pretrained(name), _video_config(name)
    except Exception as error:  # for a broken folder, transformers raises anything
        raise ConfigError(
            f"{path}: cannot load the image processor (preprocessor_config.json): {one_line(error)}"
        ) from error
    return make_processor(config, tokenizer, images, video)


def make_processor(
    config: Any, tokenizer: PreTrainedTokenizerBase, image_processor: Any, video_config: dict[str, Any] | None = None
) -> ProcessorMixin:
    """Builds the processor of a model with this configuration; `video_config` is only kept for saving.

    Raises:
        ConfigError: the parts do not fit the configuration.
    """
    name, vision = config.name_or_path or config.model_type, config.vision_config
    placeholder = tokenizer.convert_tokens_to_ids(IMAGE_TOKEN)
    if placeholder != config.image_token_id:
        raise ConfigError(
            f"{name}: the tokenizer's id of {IMAGE_TOKEN} is {placeholder}, the model's image_token_id "
            f"{config.image_token_id}: use the tokenizer the model was trained with"
        )
    for ours, theirs in (
        ("patch_size", vision.patch_size),
        ("temporal_patch_size", vision.temporal_patch_size),
        ("merge_size", vision.spatial_merge_size),
    ):
        if getattr(image_processor, ours, None) != theirs:
            raise ConfigError(
                f"{name}: the image processor's {ours} is {getattr(image_processor, ours, None)}, the model's {theirs}: "
                "use the preprocessor_config.json the model was trained with"
            )
    made = _processor_class(KINDS[config.model_type])(image_processor, tokenizer, tokenizer.chat_template)
    made.video_config = video_config
    return made


def image_input(processor: Any, picture: Image) -> ImageInput:
    """Converts an image to the model's input, resized within the image processor's limits.

    Raises:
        DataError: the image processor rejects it, for instance for an aspect ratio above 200.
    """
    images = processor.image_processor
    try:
        in_rgb = picture if picture.mode == "RGB" else picture.convert("RGB")
        made = images(images=[in_rgb], return_tensors="pt", do_convert_rgb=False)  # do_convert_rgb would copy it
    except (ValueError, OSError) as error:
        raise DataError(f"a picture of {picture.width} by {picture.height} pixels: {one_line(error)}") from error
    frames, height, width = made["image_grid_thw"][0].tolist()
    return ImageInput.of(made["pixel_values"], (frames, height, width), images.merge_size)


def _video_config(name: str) -> dict[str, Any] | None:
    """Reads the video part of the processor, unused here, for other programs that read the checkpoint."""
    from transformers.utils import cached_file

    for file, key in ((VIDEO_FILE, None), ("processor_config.json", "video_processor")):
        found = cached_file(name, file, _raise_exceptions_for_missing_entries=False)
        if found is not None:
            read = json.loads(Path(found).read_text(encoding="utf-8"))
            part = read if key is None else read.get(key)
            if isinstance(part, dict):
                return part
    return None


def _processor_class(name: str) -> Any:
    """Derives Transformers' class `name` without its video part: Transformers infers the parts from `__init__`."""
    import transformers

    base = getattr(transformers, name)

    def init(self: Any, image_processor: Any = None, tokenizer: Any = None, chat_template: str | None = None) -> None:
        self.image_token, self.video_token = IMAGE_TOKEN, VIDEO_TOKEN
        self.image_token_id = tokenizer.convert_tokens_to_ids(IMAGE_TOKEN)
        self.video_token_id = tokenizer.convert_tokens_to_ids(VIDEO_TOKEN)
        transformers.ProcessorMixin.__init__(self, image_processor, tokenizer, chat_template=chat_template)

    def call(self: Any, images: Any = None, text: Any = None, videos: Any = None, **options: Any) -> Any:
        if videos is not None:
            raise DataError("videos are not supported: images are")
        return base.__call__(self, images=images, text=text, **options)

    def save_pretrained(self: Any, folder: str | Path, **options: Any) -> None:
        self.tokenizer.save_pretrained(folder)
        self.image_processor.save_pretrained(folder)
        if self.video_config is not None:
            (Path(folder) / VIDEO_FILE).write_text(json.dumps(self.video_config, indent=2) + "\n", encoding="utf-8")

    return type(name, (base,), {"__init__": init, "__call__": call, "save_pretrained": save_pretrained})
