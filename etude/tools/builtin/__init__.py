"""The tools that come along, and their ready configurations."""

from __future__ import annotations

from pathlib import Path

from etude.errors import ConfigError
from etude.registry import did_you_mean

_CONFIGS = Path(__file__).parent / "configs"


def builtin_config(name: str) -> Path:
    """The YAML of the built-in tool `name`, to be given to `load_tools`.

    Raises:
        ConfigError: there is no such tool; lists those there are.
    """
    known = builtin_names()
    if name not in known:
        raise ConfigError(f"no built-in tool '{name}'{did_you_mean(name, known)} (known: {', '.join(known)})")
    return _CONFIGS / f"{name}.yaml"


def builtin_names() -> list[str]:
    """The names that `builtin_config` knows."""
    return sorted(path.stem for path in _CONFIGS.glob("*.yaml"))


__all__ = ["builtin_config", "builtin_names"]
