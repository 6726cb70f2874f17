"""`RLHFDataset`: `RLDataset` with verl's constructor: files, a tokenizer and the `data` section.

Invariant: the same rows, checks and items as `RLDataset`; keys of verl's that have no effect here are logged once.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

from etude.chat import ChatTemplate
from etude.data.dataset import RLDataset
from etude.data.files import Row, file_list, plain, without_nulls
from etude.errors import ConfigError, DataError, EtudeError, describe_error
from etude.options import DataOptions
from etude.registry import import_object
from etude.tools import load_function_tools, load_tools

logger = logging.getLogger(__name__)

_TOOL_FILES = {"tool_config_path": load_tools, "function_tool_path": load_function_tools}
_OF_TOOLS = ("tools_kwargs", "interaction_kwargs")


class RLHFDataset(RLDataset):
    """The prompts of `data_files`; their lengths include the schemas of the tools in `config.tool_config_path`, if set.

    Args:
        data_files: .parquet, .jsonl or .json, one or several.
        tokenizer: with a chat template.
        config: the `data` section; verl's other keys are listed in a warning.
        processor: of a vision-language model; None if rows have no images.
        max_samples: stop after this many rows; -1 for all.

    Raises:
        ConfigError: a key has an unsupported value, or a tool file is invalid.
        DataError: as `RLDataset`.
    """

    def __init__(
        self,
        data_files: str | Sequence[str],
        tokenizer: Any,
        config: Mapping[str, Any],
        processor: Any = None,
        max_samples: int = -1,
    ) -> None:
        given = {str(key): config[key] for key in config if config[key] is not None}
        files = {key: given.pop(key) for key in _TOOL_FILES if key in given}
        known = {field.name for field in fields(DataOptions)} - {"sampler", "custom_cls"}  # handled by the run
        if unread := sorted(given.keys() - known - {"sampler", "custom_cls"}):
            logger.warning("RLHFDataset: no effect here: %s", ", ".join(f"data.{key}" for key in unread))
        options = DataOptions(**{key: value for key, value in given.items() if key in known})
        tools = [tool for key, paths in files.items() for path in file_list(paths) for tool in _TOOL_FILES[key](path)]
        names = [tool.name for tool in tools]
        if len(set(names)) < len(names):
            raise ConfigError(f"two tools have one name: {', '.join(sorted(names))}")
        self.tokenizer, self.processor, self.config, images = tokenizer, processor, config, None
        if processor is not None:
            from etude.models import ImageReader  # imported lazily: reading rows needs no torch

            images = ImageReader(processor)
        super().__init__(
            file_list(data_files),
            ChatTemplate(tokenizer, processor=processor, **dict(options.apply_chat_template_kwargs)),
            {tool.name: tool.get_openai_tool_schema().to_openai() for tool in tools} if files else None,
            options,
            images=images,
            max_samples=max_samples,
        )

    def _check(self, raw: Row, folder: Path, where: str) -> tuple[Row, tuple[int, ...], bool]:
        """As `RLDataset`; without a tool file the tools are unknown here, and rows keep what they say of them."""
        row, image_tokens, fits = super()._check(raw, folder, where)
        if self.tool_schemas is None:
            said = plain(raw).get("extra_info") or {}
            row["extra_info"] |= {name: without_nulls(said[name]) for name in _OF_TOOLS if said.get(name)}
        return row, image_tokens, fits


def custom_rows(
    options: DataOptions,
    files: Sequence[str],
    tokenizer: Any,
    processor: Any,
    tools: Mapping[str, Any],
    max_samples: int,
) -> Iterator[dict[str, Any]]:
    """Yields the rows of `data.custom_cls`, made as in verl: `cls(data_files, tokenizer, config, processor, max_samples)`.

    `tools` are extra keys of its `config`. An item may have its messages in `raw_prompt`, as in verl's datasets, and its
    images in `multi_modal_data`, or in `images` whatever `data.image_key` is.

    Raises:
        ConfigError: there is no such class, or its constructor fails.
        DataError: an item is not a row; names its number.
    """
    key, given = f"{options.custom_cls.path}:{options.custom_cls.name}", options.custom_cls
    cls = import_object(key)
    config = OmegaConf.create({**asdict(options), **tools})
    try:
        made = cls(
            data_files=list(files), tokenizer=tokenizer, config=config, processor=processor, max_samples=max_samples
        )
        count = len(made)
    except EtudeError:
        raise
    except Exception as error:
        raise ConfigError(f"data.custom_cls.name={given.name}: {describe_error(error)}") from error
    for number in range(count):
        row = made[number]
        if not isinstance(row, Mapping):
            raise DataError(f"data.custom_cls: item {number} must be a row, got {type(row).__name__}")
        yield _as_row(dict(row), options)


def _as_row(item: dict[str, Any], options: DataOptions) -> dict[str, Any]:
    """Converts an item of verl's datasets, or of ours, to the columns of a file."""
    if "raw_prompt" not in item:
        return item
    row = {options.prompt_key: item["raw_prompt"], **item}
    media = row.pop("multi_modal_data", None) or {}
    inline = any(isinstance(part, Mapping) and part.get("image") for m in item["raw_prompt"] for part in m["content"])
    images = next(
        (found for found in (media.get("image"), media.get("images"), row.pop("images", None)) if found), None
    )
    if images and not inline and options.image_key is not None:
        row[options.image_key] = list(images)
    return row | {f"{name}s": media[name] for name in ("video", "audio") if media.get(name)}
