"""The built-in tools and their ready-made configurations."""

from __future__ import annotations

from pathlib import Path

from etude.errors import ConfigError
from etude.registry import did_you_mean

_CONFIGS = Path(__file__).parent / "configs"


def builtin_config(name: str) -> Path:
    """Returns the YAML file of the built-in tool `name`, for `load_tools`.

    Raises:
        ConfigError: there is no such tool; lists the known ones.
    """
    known = builtin_names()
    if name not in known:
        raise ConfigError(f"no built-in tool '{name}'{did_you_mean(name, known)} (known: {', '.join(known)})")
    return _CONFIGS / f"{name}.yaml"


def builtin_names() -> list[str]:
    """Returns the names that `builtin_config` accepts."""
    return sorted(path.stem for path in _CONFIGS.glob("*.yaml"))


__all__ = ["builtin_config", "builtin_names"]
