"""The data card: a README.md next to prepared files that says where they come from.

Invariant: it depends on the files and the command alone, so that the same command writes the same card; a README.md
written by anyone else is never touched.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path

import pyarrow.parquet as pq

from etude.data.files import located_rows
from etude.jsonl import write_atomically
from etude.scratch import sha256_of

_MARK = "<!-- written by etude data -->"


def write_card(
    title: str, paths: Mapping[str, Path], sources: Iterable[Path], *, licence: str, command: str
) -> Path | None:
    """Writes the card of `paths` (by split), made from the files `sources`; None if there is another README.md.

    Raises:
        EtudeError: it cannot be written.
    """
    folder = next(iter(paths.values())).parent
    path = folder / "README.md"
    if path.exists() and not path.read_text(encoding="utf-8", errors="replace").startswith(_MARK):
        return None
    lines = [_MARK, f"# {title}", "", f"Made by `{command}`.", "", f"Licence of the source: {licence}.", ""]
    lines += ["| file | rows | bytes | sha256 |", "|---|---|---|---|"]
    lines += [f"| {file.name} | {count_rows(file)} | {_cells(file)} |" for file in paths.values()]
    made_from = [file for file in sources if file.is_file()]
    if made_from:
        lines += ["", "| made from | bytes | sha256 |", "|---|---|---|"]
        lines += [f"| {file.name} | {_cells(file)} |" for file in made_from]
    first = next(iter(paths.values()))
    if first.suffix == ".parquet":
        schema = pq.read_schema(first)
        lines += ["", "| column | type |", "|---|---|"]
        lines += [f"| {field.name} | `{field.type}` |" for field in schema]
    with write_atomically(path) as file:
        file.write(("\n".join(lines) + "\n").encode())
    return path


def count_rows(file: Path) -> int:
    """Counts the rows of a data file without keeping them in memory."""
    return pq.read_metadata(file).num_rows if file.suffix == ".parquet" else sum(1 for _ in located_rows(file))


def _cells(file: Path) -> str:
    return f"{file.stat().st_size} | `{sha256_of(file)}`"


def licence_beside(sources: Iterable[Path]) -> str | None:
    """Returns the first line of a licence file next to the sources, if there is one."""
    for source in sources:
        folder = source if source.is_dir() else source.parent
        for file in sorted(folder.glob("LICENSE*")):
            first = next((line.strip() for line in file.read_text(errors="replace").splitlines() if line.strip()), "")
            return f"{first} ({file.name})"
    return None
