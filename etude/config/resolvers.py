"""The `${etude.…}` interpolations of our YAML.

`${etude.builtin_tools:calculator}` is the path of a built-in tool file; with several names it is the list of their
paths, which `tool_config_path` accepts.
"""

from __future__ import annotations

from omegaconf import OmegaConf


def builtin_tools(*names: str) -> str | list[str]:
    """Path of the built-in tool file `names[0]`, or the list of paths where there are several names."""
    from etude.tools.builtin import builtin_config

    paths = [str(builtin_config(name)) for name in names]
    return paths[0] if len(paths) == 1 else paths


def register_resolvers() -> None:
    """Makes `${etude.…}` known to OmegaConf; calling it again changes nothing."""
    OmegaConf.register_new_resolver("etude.builtin_tools", builtin_tools, replace=True)
