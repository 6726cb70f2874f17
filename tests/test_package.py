"""The wheel and the sdist: built as a release is, they hold the package whole and nothing else, and run from where pip puts
them."""

import os
import re
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

import etude

pytest.importorskip("build", reason="pip install 'etude[dev]'")
pytest.importorskip("hatchling", reason="pip install 'etude[dev]'")

ROOT = Path(etude.__file__).parents[1]
NOT_PACKED = {"__pycache__", ".mypy_cache", ".ruff_cache"}


WITHOUT_LINUX = """
import ctypes, os, resource, select, signal, socket
ONLY_LINUX = {
    os: "copy_file_range eventfd getxattr memfd_create pidfd_open pipe2 posix_fadvise sched_getaffinity sched_setaffinity"
        " setns setxattr splice unshare O_DIRECT O_PATH O_TMPFILE",
    resource: "prlimit", select: "epoll", signal: "pidfd_send_signal", socket: "AF_NETLINK SO_PEERCRED",
}
for module, names in ONLY_LINUX.items():
    for name in names.split():
        vars(module).pop(name, None)
def no_library(name, *rest, **options):
    raise OSError(f"no {name} here")
ctypes.CDLL = no_library
import etude, etude.cli.runs, etude.run_folder
from etude.cli.main import cli, run
for command in ([], ["check"], ["train"], ["view"]):
    assert run(cli, [*command, "--help"]) == 0
"""


def run(*command, cwd, **environment):
    kept = {name: os.environ[name] for name in ("PATH", "HOME", "LANG") if name in os.environ}
    done = subprocess.run(
        command, cwd=cwd, env=kept | environment, capture_output=True, text=True, timeout=240, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    """(sdist, wheel): the wheel is made from the sdist, as `python -m build` does."""
    folder = tmp_path_factory.mktemp("dist")
    run(sys.executable, "-m", "build", "--no-isolation", "--outdir", str(folder), str(ROOT), cwd=folder)
    [sdist], [wheel] = folder.glob("*.tar.gz"), folder.glob("*.whl")
    return sdist, wheel


def files_of_the_package():
    files = (path.relative_to(ROOT) for path in (ROOT / "etude").rglob("*") if path.is_file())
    return {str(path) for path in files if not NOT_PACKED & set(path.parts)}


def test_the_wheel_holds_the_package_with_all_its_data_and_nothing_else(built):
    names = set(zipfile.ZipFile(built[1]).namelist())
    packed = {name for name in names if not name.split("/")[0].endswith(".dist-info")}
    assert packed == files_of_the_package()
    for kind in (
        ".yaml",
        ".jinja",
        ".html",
        ".js",
        ".css",
        ".jsonl",
        "py.typed",
    ):  # the comparison above means something
        assert any(name.endswith(kind) for name in packed), kind


def test_the_sdist_holds_what_the_wheel_is_made_of(built):
    with tarfile.open(built[0]) as archive:
        names = {name.split("/", 1)[1] for name in archive.getnames()}
    others = {"README.md", "LICENSE", "CHANGELOG.md", "constraints.txt", "pyproject.toml", "PKG-INFO", ".gitignore"}
    assert names == files_of_the_package() | others


def test_the_version_is_semantic_and_in_one_place(built):
    assert re.fullmatch(r"\d+\.\d+\.\d+((a|b|rc)\d+)?(\.dev\d+)?", etude.__version__)
    assert built[1].name == f"etude-{etude.__version__}-py3-none-any.whl"
    assert etude.__version__ not in (ROOT / "pyproject.toml").read_text()


def test_the_wheel_runs_from_where_pip_puts_it(built, tmp_path):
    """Without the checkout: the command that pip writes, `python -m etude`, and the data that commands read."""
    target, empty = tmp_path / "target", tmp_path / "empty"
    empty.mkdir()
    pip = (sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--no-compile", "--no-index")
    run(*pip, "--target", str(target), str(built[1]), cwd=empty)
    here = {"PYTHONPATH": str(target), "PYTHONDONTWRITEBYTECODE": "1"}
    where = run(sys.executable, "-c", "import etude; print(etude.__file__)", cwd=empty, **here)
    assert where.startswith(str(target))
    assert run(str(target / "bin" / "etude"), "--version", cwd=empty, **here) == f"etude, version {etude.__version__}\n"
    assert "quickstart" in run(sys.executable, "-m", "etude", "--help", cwd=empty, **here)
    assert "total_training_steps" in run(sys.executable, "-m", "etude", "config", "--yaml", cwd=empty, **here)
    run(sys.executable, "-m", "etude", "new", "agent", "shop", cwd=empty, **here)
    run(sys.executable, "-c", WITHOUT_LINUX, cwd=empty, **here)
    assert (empty / "shop" / "agent.yaml").is_file()
