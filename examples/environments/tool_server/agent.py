"""Rows of the stockroom behind `server.py`, after two worked examples; the server runs in the interpreter OPENENV_PYTHON."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from etude.errors import EtudeError
from etude.quickstart import run_service
from etude.registry import import_module

HERE = Path(__file__).parent
EXAMPLES = tuple(
    {"role": role, "content": content}
    for wanted, counted, pieces in (("tile", "brush", "417"), ("glove", "stool", "286"))
    for role, content in (
        ("user", f"Order a {wanted} for each {counted}."),
        ("assistant", f'[count(item="{counted}")]'),
        ("tool", pieces),
        ("assistant", f'[order(item="{wanted}", pieces={pieces})]'),
        ("tool", "Ordered."),
        ("assistant", "Done."),
    )
)


def prepare(folder: Path, seed: int, rows: Any) -> Any:
    """Makes the rows."""
    return import_module(str(HERE.parent / "play.py")).tables(HERE, seed, rows, shown=EXAMPLES)


@contextmanager
def serve(folder: Path) -> Iterator[dict[str, str]]:
    """Runs the server; yields its address.

    Raises:
        EtudeError: OPENENV_PYTHON names no interpreter that has openenv.
    """
    if not (python := os.environ.get("OPENENV_PYTHON")):
        raise EtudeError("OPENENV_PYTHON must name an interpreter with openenv: python -m venv, pip install openenv")
    with run_service(str(HERE / "server.py"), python=python) as address:
        yield {"STOCKROOM": address}
