"""The configuration: a tree of YAML files, composed by Hydra, validated before anything is loaded, passed as dataclasses."""

from etude.config.compose import DEFAULT_ROOT, Composition, compose, compose_with_sources
from etude.config.layers import COMMAND_LINE, package_roots, quoted

__all__ = [
    "COMMAND_LINE",
    "DEFAULT_ROOT",
    "Composition",
    "compose",
    "compose_with_sources",
    "package_roots",
    "quoted",
]
