"""The configuration: a tree of YAML, composed by Hydra, checked before anything is loaded, handed on as dataclasses."""

from etude.config.compose import DEFAULT_ROOT, Composition, compose, compose_with_sources
from etude.config.layers import COMMAND_LINE, package_roots

__all__ = [
    "COMMAND_LINE",
    "DEFAULT_ROOT",
    "Composition",
    "compose",
    "compose_with_sources",
    "package_roots",
]
