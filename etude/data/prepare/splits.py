"""Finds the files of a dataset's splits among the user's inputs.

Invariant: each split is read from one file; a file whose name has no split, or a duplicate split, is an error.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

from etude.errors import DataError


def find_split_files(
    inputs: Iterable[str | Path], splits: Sequence[str], *, folders: Sequence[str] = ("",), endings: Sequence[str]
) -> dict[str, Path]:
    """The file of each split among `inputs`: files whose names begin with a split, or folders that hold them.

    In a folder, and in its `folders`, a split's file is `<split><ending>` for the first of `endings` that exists.

    Raises:
        DataError: nothing is found, a split is duplicate, or a file's name has no split.
    """
    found: dict[str, Path] = {}
    sources = [Path(name).expanduser() for name in inputs]
    for source in sources:
        for path in _files_in(source, splits, folders, endings) if source.is_dir() else [source]:
            split = next((split for split in splits if path.name.startswith(split)), None)
            if split is None:
                raise DataError(f"{path}: the name must start with {' or '.join(splits)}, which tells its split")
            if split in found:
                raise DataError(f"{path}: the {split} split is already read from {found[split]}")
            found[split] = path
    if not found:
        names = " or ".join(f"{split}{endings[0]}" for split in splits)
        raise DataError(f"no {names} in {', '.join(map(str, sources)) or 'no input'}")
    return found


def _files_in(folder: Path, splits: Sequence[str], folders: Sequence[str], endings: Sequence[str]) -> list[Path]:
    files = []
    for split in splits:
        candidates = [folder / inner / f"{split}{ending}" for inner in folders for ending in endings]
        files += [path for path in candidates if path.is_file()][:1]
    return files
