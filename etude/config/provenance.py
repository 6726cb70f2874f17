"""Where each value of a configuration came from.

Invariant: the source of a key is the last layer that sets it; what `etude config` shows is computed from the layers
that were merged, never from a second reading.
"""

from __future__ import annotations

from collections.abc import Iterable

from etude.config.layers import Layer, flatten, plain


def provenance(layers: Iterable[Layer]) -> dict[str, str]:
    """Dotted key → source (a file, or "command line") of its value; `layers` lowest first."""
    sources: dict[str, str] = {}
    for layer in layers:
        for key, _ in flatten(plain(layer)):
            sources[key] = layer.source
    return sources
