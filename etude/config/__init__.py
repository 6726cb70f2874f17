"""The configuration: a tree of YAML, composed by Hydra, checked before anything is loaded, handed on as dataclasses."""

from etude.config.compose import DEFAULT_ROOT, Composition, compose, compose_with_sources
from etude.config.layers import COMMAND_LINE, flatten, package_roots
from etude.config.options import to_options

__all__ = [
    "COMMAND_LINE",
    "DEFAULT_ROOT",
    "Composition",
    "compose",
    "compose_with_sources",
    "flatten",
    "package_roots",
    "to_options",
]
