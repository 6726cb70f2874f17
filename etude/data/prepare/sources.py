"""Shared steps of dataset preparation: input files, fields of examples, rows of the RL contract, and output tables.

Invariant: each split is read from one file; a file whose name has no split, or a duplicate one, is an error. All rows of
all files are made before any is written, in the files' order.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from etude.data.files import SUFFIXES, Row, located_rows, write_parquet
from etude.errors import DataError, one_line

MakeRow = Callable[[Row, str, str, int], Row]
"""(example, its location for errors, the table's name, the example's index) → row."""


def texts(example: Mapping[str, Any], where: str, *names: str) -> list[str]:
    """Returns the fields `names` of an example.

    Raises:
        DataError: one is missing, empty or not text; names `where`.
    """
    found = [example.get(name) for name in names]
    held = [text for text in found if isinstance(text, str) and text.strip()]
    if len(held) < len(found):
        wanted = " and ".join(f"'{name}'" for name in names)
        raise DataError(f"{where}: needs {wanted} as text (columns: {', '.join(example)})")
    return held


def training_row(
    data_source: str,
    prompt: Sequence[tuple[str, str]],
    truth: object,
    create_kwargs: Mapping[str, Mapping[str, Any]],
    *,
    ability: str,
    extra: Mapping[str, Any],
    **columns: Any,
) -> Row:
    """Makes a row of the RL contract. `prompt`: (role, content) pairs; `create_kwargs`: by tool; `extra`: for
    extra_info."""
    tools = {tool: {"create_kwargs": kwargs} for tool, kwargs in create_kwargs.items()}
    return {
        "data_source": data_source,
        "prompt": [{"role": role, "content": content} for role, content in prompt],
        **columns,
        "ability": ability,
        "reward_model": {"style": "rule", "ground_truth": truth},
        "extra_info": {**extra, **({"need_tools_kwargs": True, "tools_kwargs": tools} if tools else {})},
    }


def make_tables(files: Mapping[str, Path], make_row: MakeRow) -> dict[str, list[Row]]:
    """Makes the rows of each file, by name; raises DataError as `located_rows` and `make_row`."""
    return {
        name: [make_row(example, where, name, index) for index, (where, example) in enumerate(located_rows(path))]
        for name, path in files.items()
    }


def write_tables(tables: Mapping[str, Sequence[Row]], output_dir: str | Path) -> dict[str, Path]:
    """Writes `<name>.parquet` for each table; returns the paths by name. Raises DataError as `write_parquet`."""
    folder = Path(output_dir).expanduser()
    return {name: write_parquet(rows, folder / f"{name}.parquet") for name, rows in tables.items()}


_HUB = "hub:"
_DATA = ["*.parquet", "*.jsonl", "*.json", "LICENSE*"]


def fetch_inputs(inputs: Sequence[str | Path]) -> list[Path]:
    """Returns `inputs` as local paths; `hub:OWNER/NAME` is downloaded from the Hugging Face Hub: a dataset's files as
    they are.

    Raises:
        DataError: it cannot be fetched; names it.
    """
    return [_fetch(str(n).removeprefix(_HUB)) if str(n).startswith(_HUB) else Path(n).expanduser() for n in inputs]


def _fetch(name: str) -> Path:
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(name, repo_type="dataset", allow_patterns=_DATA))
    except Exception as error:  # network, name and permission errors of several libraries
        raise DataError(f"hub:{name}: cannot be fetched: {one_line(error)}") from error


def files_by_name(inputs: Sequence[str | Path]) -> dict[str, Path]:
    """Returns the files by their names without suffix; of a folder, those directly in it.

    Raises:
        DataError: two have the same name, or a folder has none.
    """
    paths: list[Path] = []
    for path in (Path(name).expanduser() for name in inputs):
        found = sorted(file for file in path.iterdir() if file.suffix in SUFFIXES) if path.is_dir() else [path]
        if not found:
            raise DataError(f"{path}: no file *{', *'.join(SUFFIXES)} in this folder")
        paths += found
    files = {path.stem: path for path in paths}
    if len(files) < len(paths):
        raise DataError("two input files have the same name: rename one, since it names the file that is written")
    return files


def write_each(inputs: Sequence[str | Path], make_row: MakeRow, output_dir: str | Path) -> dict[str, Path]:
    """Writes the rows of each of `inputs` under its own name, which is their split; returns the paths by name.

    Raises:
        DataError: a file or row is invalid.
    """
    return write_tables(make_tables(files_by_name(inputs), make_row), output_dir)


def find_split_files(
    inputs: Iterable[str | Path], splits: Sequence[str], *, folders: Sequence[str] = ("",), endings: Sequence[str]
) -> dict[str, Path]:
    """Finds the file of each split among `inputs`: files whose names begin with a split, or folders that hold them.

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
