"""Requests that cannot be made, and the languages' other names."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from etude.errors import is_infrastructure
from etude.sandbox import Language, Limits, RunRequest, SandboxError, SandboxRequestError, UnknownSessionError
from etude.sandbox.types import check_path, check_paths

OUTSIDE = ["/etc/passwd", "../x", "a/../../x", "a/..", "..", "", ".", "./", "a/", "a\0b", "x" * 2000, "\udcff", "//x"]


@pytest.mark.parametrize("path", OUTSIDE)
def test_a_path_outside_the_work_directory_is_refused(path):
    with pytest.raises(SandboxRequestError, match="files"):
        RunRequest("", files={path: b""})
    with pytest.raises(SandboxRequestError, match="fetch_files"):
        RunRequest("", fetch_files=[path])


@given(st.text())
def test_a_checked_path_stays_inside(path):
    try:
        checked = check_path("files", path)
    except SandboxRequestError:
        return
    parts = checked.split("/")
    assert parts
    assert not {"", ".", ".."} & set(parts)
    assert check_path("files", checked) == checked


@pytest.mark.parametrize(
    "files",
    [{"a": b"", "a/b": b""}, {"a": b"", "./a": b""}, {"a": "text"}, {str(n): b"" for n in range(1001)}],
    ids=["a file that is a folder", "one file by two names", "text", "too many"],
)
def test_files_that_cannot_be_are_refused(files):
    with pytest.raises(SandboxRequestError, match="files"):
        RunRequest("", files=files)


def test_paths_are_a_list():
    with pytest.raises(SandboxRequestError, match="list"):
        check_paths("fetch_files", "abc")
    assert check_paths("fetch_files", ["a", "./a", "b", "a"]) == ("a", "./a", "b"), (
        "under the names they were asked for by"
    )


@pytest.mark.parametrize("name", ["wall_seconds", "cpu_seconds", "memory_mb", "processes", "disk_mb", "output_bytes"])
@pytest.mark.parametrize("value", [0, -1, float("inf"), float("nan")])
def test_a_limit_is_positive(name, value):
    with pytest.raises(SandboxRequestError, match=name):
        Limits(**{name: value})


def test_other_refusals():
    with pytest.raises(SandboxRequestError, match="compile_seconds"):
        RunRequest("", compile_seconds=0)
    with pytest.raises(SandboxRequestError, match="NUL"):
        RunRequest("", args=["a\0b"])
    with pytest.raises(ValueError, match="cobol"):
        RunRequest("", language="cobol")


@pytest.mark.parametrize(
    ("name", "language"),
    [("nodejs", Language.JAVASCRIPT), ("Python3", Language.PYTHON), ("c++", Language.CPP), ("sh", Language.BASH)],
)
def test_a_language_has_other_names(name, language):
    assert RunRequest("", language=name).language is language


def test_a_broken_sandbox_is_infrastructure_and_a_bad_request_is_not():
    assert is_infrastructure(SandboxError("x"))
    assert not is_infrastructure(SandboxRequestError("x"))
    assert not is_infrastructure(UnknownSessionError("x"))
    assert str(UnknownSessionError("no session 'x'")) == "no session 'x'"
