"""`DataOptions`: the keys of the `data` section.

Invariant: an instance that exists is usable; a value that cannot work is refused here, before a file is opened.
Reading the files is left to `dataset` and `loader`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from etude.errors import ConfigError


@dataclass(frozen=True)
class DataOptions:
    """What to read and how much of it. Lengths are in tokens, batch sizes in prompts.

    A prompt longer than `max_prompt_length` is left out when `filter_overlong_prompts` is true or `truncation` is
    "drop", and is an error otherwise; it is never cut. `val_batch_size` None means all validation rows at once,
    `val_max_samples` -1 all of them.

    Raises:
        ConfigError: a value is out of range; the message names its key.
    """

    train_files: tuple[str, ...] = ()
    val_files: tuple[str, ...] = ()
    train_batch_size: int = 64
    val_batch_size: int | None = None
    val_max_samples: int = -1
    max_prompt_length: int = 1024
    max_response_length: int = 2048
    filter_overlong_prompts: bool = True
    truncation: str = "error"
    shuffle: bool = True
    seed: int = 1
    prompt_key: str = "prompt"
    image_key: str | None = "images"
    apply_chat_template_kwargs: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for key in ("train_files", "val_files"):
            object.__setattr__(self, key, file_list(getattr(self, key)))
        for key in ("train_batch_size", "max_prompt_length", "max_response_length"):
            if getattr(self, key) < 1:
                raise ConfigError(f"data.{key} must be at least 1, got {getattr(self, key)}")
        if self.val_batch_size is not None and self.val_batch_size < 1:
            raise ConfigError(f"data.val_batch_size must be null (all rows) or at least 1, got {self.val_batch_size}")
        if self.val_max_samples != -1 and self.val_max_samples < 1:
            raise ConfigError(f"data.val_max_samples must be -1 (all rows) or at least 1, got {self.val_max_samples}")
        if self.seed < 0:
            raise ConfigError(f"data.seed must not be negative, got {self.seed}")
        if self.truncation not in ("error", "drop"):
            raise ConfigError(f"data.truncation must be 'error' or 'drop' (prompts are never cut): '{self.truncation}'")

    @property
    def drops_overlong(self) -> bool:
        """Whether an over-long prompt is left out rather than an error."""
        return self.filter_overlong_prompts or self.truncation == "drop"


def file_list(files: str | list[str] | tuple[str, ...] | None) -> tuple[str, ...]:
    """One name, several or none, as a tuple."""
    if not files:
        return ()
    return (files,) if isinstance(files, str) else tuple(str(name) for name in files)
