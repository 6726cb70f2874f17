"""`write_agent`: creates a folder with a new agent that runs out of the box, from the templates in `scaffold/`.

Invariant: the folder is written completely or not at all, and existing files are never touched.
"""

from __future__ import annotations

import keyword
import os
import re
import tempfile
from pathlib import Path

from etude.errors import ConfigError, one_line

_SCAFFOLD = Path(__file__).parent / "scaffold"
_NAME = re.compile(r"[a-z][a-z0-9_]{0,39}")
_TAKEN = frozenset({"etude", "test", "tests", "runs", "data", "model", "models"})


def write_agent(name: str, parent: Path) -> list[Path]:
    """Writes the agent to `parent/name` and returns the paths of its files.

    Raises:
        ConfigError: the name is invalid, the path exists, or the folder cannot be written.
    """
    if not _NAME.fullmatch(name) or keyword.iskeyword(name) or name in _TAKEN:
        raise ConfigError(
            f"'{name}' cannot name an agent: give a lower-case word of up to 40 letters, digits and _ that begins with a "
            f"letter and is not a word of Python's nor one of {', '.join(sorted(_TAKEN))}"
        )
    folder = parent.expanduser() / name
    if folder.exists() or folder.is_symlink():
        raise ConfigError(f"{folder} exists already: give another name")
    try:
        parent.expanduser().mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=f".{name}-", dir=folder.parent) as temporary:
            made = Path(temporary) / name
            made.mkdir()
            for source in _files():
                text = source.read_text(encoding="utf-8").replace("AGENT_NAME", name)
                (made / source.name).write_text(text, encoding="utf-8")
            os.rename(made, folder)
    except OSError as error:
        raise ConfigError(f"{folder} cannot be written: {one_line(error)}") from error
    return [folder / source.name for source in _files()]


def _files() -> list[Path]:
    return sorted(file for file in _SCAFFOLD.iterdir() if file.is_file() and file.name != "__init__.py")
