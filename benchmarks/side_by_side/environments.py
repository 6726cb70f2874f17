"""The peers' Python environments, installed from PyPI when first needed.

Invariant: a complete environment holds a file with the packages it was made from; a changed list rebuilds it.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

PACKAGES = {
    "trl": ("torch==2.13.0", "trl==1.16.0", "transformers", "datasets"),
    "verl": ("torch==2.13.0", "verl==0.9.1", "cachetools", "uvicorn", "fastapi", "aiohttp"),
}
_DONE = "packages.txt"


def python_of(name: str, folder: Path, *, given: Path | None = None) -> Path:
    """Returns the interpreter of environment `name`: `etude` is the running one, `given` an existing environment.

    Raises:
        subprocess.CalledProcessError: the packages could not be installed.
    """
    if name == "etude":
        return Path(sys.executable)
    if given is not None:
        return given / "bin" / "python"
    home = folder / name
    wanted = "\n".join(PACKAGES[name])
    done = home / _DONE
    if not done.exists() or done.read_text() != wanted:
        print(f"making the environment of {name} in {home} (minutes, and some gigabytes)", flush=True)
        shutil.rmtree(home, ignore_errors=True)
        subprocess.run([sys.executable, "-m", "venv", str(home)], check=True)
        pip = [str(home / "bin" / "python"), "-m", "pip", "install", "-q", "--disable-pip-version-check"]
        subprocess.run([*pip, *PACKAGES[name]], check=True)
        done.write_text(wanted)
    return home / "bin" / "python"
