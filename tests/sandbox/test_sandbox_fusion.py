"""Sandbox Fusion's messages: what each result becomes, and that nothing is lost on the way there and back."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from etude.sandbox import (
    CellError,
    CellResult,
    Language,
    Limits,
    RunRequest,
    RunResult,
    RunStatus,
    SandboxError,
    SandboxRequestError,
    fusion,
)

text = st.text(st.characters(codec="utf-8"), max_size=40)
names = st.from_regex(r"[a-z]{1,8}(/[a-z]{1,8})?\.txt", fullmatch=True)


@given(
    st.builds(
        RunRequest,
        code=text,
        language=st.sampled_from(Language),
        stdin=st.none() | text,
        files=st.dictionaries(names, st.binary(max_size=20), max_size=3),
        fetch_files=st.lists(names, max_size=3, unique=True).map(tuple),
        args=st.lists(text.filter(lambda arg: "\0" not in arg), max_size=3).map(tuple),
        compile_seconds=st.floats(0.1, 60),
        limits=st.builds(Limits, wall_seconds=st.floats(0.1, 30), memory_mb=st.integers(16, 1024)),
    )
)
def test_a_request_survives_the_api(request):
    message = fusion.RunCodeRequest.model_validate_json(fusion.run_code_request(request).model_dump_json())
    limits = fusion.with_limits(Limits(), message.run_timeout, message.memory_limit_MB)
    assert limits == request.limits
    back = fusion.run_request(message, fusion.known_language(message.language), limits)
    for name in ("code", "language", "stdin", "compile_seconds"):
        assert getattr(back, name) == getattr(request, name)
    for name, kind in {"files": dict, "fetch_files": list, "args": list}.items():
        assert kind(getattr(back, name)) == kind(getattr(request, name))


def ended(status, code, out="", err="", **compiled):
    return RunResult(RunStatus[status], code, out, err, **compiled)


def compiled(status, code, err):
    """Of a program that was compiled first."""
    return {"compile": RunResult(RunStatus[status], code, "", err, wall_seconds=0.5)}


TOO_MUCH, BROKE = "e\nkilled: the memory limit was exceeded", "killed: the program broke its own sandbox"
LATE = ("TimeLimitExceeded", None)


@pytest.mark.parametrize(
    ("result", "status", "compile_part", "run_part"),
    [
        (ended("FINISHED", 0, "o", "e"), "Success", None, ("Finished", 0, "o", "e")),
        (ended("FINISHED", 3, "o"), "Failed", None, ("Finished", 3, "o", "")),
        (ended("FINISHED", -11), "Failed", None, ("Finished", -11, "", "")),
        (ended("TIME_LIMIT", None, "o"), "Failed", None, (*LATE, "o", "")),
        (ended("MEMORY_LIMIT", None, "o", "e"), "Failed", None, ("Finished", -9, "o", TOO_MUCH)),
        (ended("KILLED", None), "Failed", None, ("Finished", -9, "", BROKE)),
        (
            ended("FINISHED", 0, "o", **compiled("FINISHED", 0, "warning")),
            "Success",
            ("Finished", 0),
            ("Finished", 0, "o", ""),
        ),
        (ended("COMPILE_FAILED", None, **compiled("FINISHED", 1, "no")), "Failed", ("Finished", 1), None),
        (ended("COMPILE_FAILED", None, **compiled("TIME_LIMIT", None, "")), "Failed", LATE, None),
    ],
)
def test_the_status_rules(result, status, compile_part, run_part):
    response = fusion.run_code_response(result)
    assert response.status.value == status
    found = response.compile_result
    assert (found and (found.status.value, found.return_code)) == compile_part
    ran = response.run_result
    assert (ran and (ran.status.value, ran.return_code, ran.stdout, ran.stderr)) == run_part
    back = fusion.run_result(fusion.RunCodeResponse.model_validate_json(response.model_dump_json()))
    same = {RunStatus.MEMORY_LIMIT: RunStatus.FINISHED, RunStatus.KILLED: RunStatus.FINISHED}
    assert back.status is same.get(result.status, result.status)
    assert back.stdout == result.stdout
    assert back.compile == result.compile


@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        ({"status": "SandboxError", "message": "no disk"}, "no disk"),
        ({"status": "SandboxError", "message": ""}, "no reason given"),
        ({"status": "Failed", "message": "", "run_result": {"status": "Error", "stderr": "lost"}}, "lost"),
        ({"status": "Success", "message": ""}, "without a result"),
    ],
)
def test_a_sandbox_that_failed_is_never_a_result(answer, reason):
    with pytest.raises(SandboxError, match=reason):
        fusion.run_result(fusion.RunCodeResponse.model_validate(answer))


@pytest.mark.parametrize(
    "result",
    [
        CellResult(RunStatus.FINISHED, "o", "e", text="42", images=(b"\x89PNG\r\n\x1a\n",), wall_seconds=0.5),
        CellResult(RunStatus.TIME_LIMIT, "", "", session_alive=False, stdout_truncated=True),
        CellResult(RunStatus.FINISHED, "", "", error=CellError("ValueError", "no", "line 1\nValueError: no")),
    ],
)
def test_a_cell_survives_the_api(result):
    response = fusion.CellResponse.model_validate_json(fusion.cell_response(result).model_dump_json())
    assert fusion.cell_result(response) == result


def test_every_language_of_sandbox_fusion_is_known_and_no_other():
    for name in fusion.FUSION_LANGUAGES:
        fusion.known_language(name)
    assert len(fusion.FUSION_LANGUAGES) == 29
    assert fusion.known_language("nodejs") is Language.JAVASCRIPT
    assert fusion.known_language("sql") is None
    with pytest.raises(ValueError, match="unknown language 'brainfuck'"):
        fusion.known_language("brainfuck")


def test_defaults_are_sandbox_fusions():
    message = fusion.RunCodeRequest(code="", language="python")
    assert (message.compile_timeout, message.run_timeout, message.memory_limit_MB) == (10.0, 10.0, -1)
    assert (message.stdin, message.files, message.fetch_files) == (None, {}, [])
    jupyter = fusion.RunJupyterRequest(cells=[])
    assert (jupyter.cell_timeout, jupyter.total_timeout, jupyter.kernel) == (0, 45, "python3")


def test_a_file_without_content_is_left_out_and_one_that_is_no_base64_refused():
    assert fusion.decode_files({"a": None, "b": "AAE="}) == {"b": b"\0\1"}
    with pytest.raises(SandboxRequestError, match="the content of 'a' is not base64"):
        fusion.decode_files({"a": "A"})
