"""`save_svg`: saves plots reproducibly, the same file each time."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def save_svg(figure: Figure, path: Path) -> None:
    """Writes the figure, without a date and with fixed ids, and closes it."""
    import matplotlib.pyplot as plt

    figure.tight_layout()
    with plt.rc_context({"svg.hashsalt": "etude"}):
        figure.savefig(path, format="svg", metadata={"Date": None})
    plt.close(figure)
