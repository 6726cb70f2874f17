"""The colours of provenance: one legend for every command that prints tokens."""

from __future__ import annotations

PROVENANCE_COLOURS = {"sampled": "green", "tool": "cyan", "user": "yellow", "template": "bright_black"}
