"""The HTTP API: Sandbox Fusion's messages for `/run_code` and `/run_jupyter`, our session messages, and their conversion
to and from this package's types.

Invariant: fields, their defaults and the status rules are Sandbox Fusion's, so that its clients work with our server and
our client with its servers. A conversion keeps everything that the other side has a field for. Only the status
`SandboxError` in a response means that the sandbox failed.
"""

from __future__ import annotations

import base64
import binascii
from collections.abc import Mapping
from dataclasses import replace
from enum import Enum
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator

from etude.sandbox.types import (
    CellError,
    CellResult,
    Language,
    Limits,
    RunRequest,
    RunResult,
    RunStatus,
    SandboxError,
    SandboxRequestError,
)

MAX_CELLS = 1000
SIGKILL_CODE = -9
"""Return code of a program killed for exceeding its memory limit."""

FUSION_LANGUAGES = (
    *("python", "cpp", "nodejs", "go", "go_test", "java", "php", "csharp", "bash", "typescript", "sql", "rust", "cuda"),
    *("lua", "R", "perl", "D_ut", "ruby", "scala", "julia", "pytest", "junit", "kotlin_script", "jest", "verilog"),
    *("python_gpu", "lean", "swift", "racket"),
)
"""Sandbox Fusion's languages; a server answers `SandboxError` for those without an interpreter."""

_FUSION_NAMES = {Language.JAVASCRIPT: "nodejs"}


class CommandRunStatus(str, Enum):
    """How a compiler, a program or a session's driver ended."""

    Finished = "Finished"
    Error = "Error"
    TimeLimitExceeded = "TimeLimitExceeded"


class ResponseStatus(str, Enum):
    """The verdict on a whole request (`RunStatus` in Sandbox Fusion)."""

    Success = "Success"
    """Everything exited with 0."""
    Failed = "Failed"
    """Something timed out or did not exit with 0."""
    SandboxError = "SandboxError"
    """The sandbox failed, not the code."""


class _Message(BaseModel):
    model_config = ConfigDict(allow_inf_nan=False)


class RunCodeRequest(_Message):
    """Body of POST /run_code."""

    compile_timeout: float = Field(10.0, gt=0, description="seconds for the compiler, if any")
    run_timeout: float = Field(10.0, gt=0, description="seconds for the program")
    memory_limit_MB: int = Field(-1, description="MiB for all processes together; -1 for the server's default")
    code: str = Field(examples=['print("hello")'], description="the program")
    stdin: str | None = Field(None, description="text on standard input")
    language: str = Field(examples=["python"], description="language of the program")
    files: dict[str, str | None] = Field({}, description="path in the work directory → content in base64")
    fetch_files: list[str] = Field([], description="paths in the work directory to send back")
    args: list[str] = Field([], description="command-line arguments of the program")

    @field_validator("language")
    @classmethod
    def _known(cls, name: str) -> str:
        known_language(name)
        return name


class CommandRunResult(_Message):
    """The result of a compiler, a program or a session's driver."""

    status: CommandRunStatus
    execution_time: float | None = None
    cpu_time: float | None = None
    return_code: int | None = None
    stdout: str | None = None
    stderr: str | None = None


class RunCodeResponse(_Message):
    """Answer of POST /run_code."""

    status: ResponseStatus
    message: str = ""
    compile_result: CommandRunResult | None = None
    run_result: CommandRunResult | None = None
    executor_pod_name: str | None = None
    files: dict[str, str] = {}


class RunJupyterRequest(_Message):
    """Body of POST /run_jupyter."""

    cells: list[str] = Field(max_length=MAX_CELLS, examples=[["a = 1", "a + 1"]], description="run in order")
    cell_timeout: float = Field(0.0, ge=0, description="seconds for each cell; 0 for what is left of total_timeout")
    total_timeout: float = Field(45.0, gt=0, description="seconds for all cells together")
    memory_limit_MB: int = Field(-1, description="MiB for all processes together; -1 for the server's default")
    kernel: Literal["python3"] = "python3"
    files: dict[str, str | None] = Field({}, description="path in the work directory → content in base64")
    fetch_files: list[str] = Field([], description="paths in the work directory to send back")


class CellRunResult(_Message):
    """The result of one cell: `display` holds MIME bundles, `error` at most one of `{ename, evalue, traceback}`."""

    stdout: str
    stderr: str
    display: list[dict[str, Any]] = []
    error: list[dict[str, Any]] = []


class RunJupyterResponse(_Message):
    """Answer of POST /run_jupyter."""

    status: ResponseStatus
    message: str = ""
    driver: CommandRunResult | None = None
    cells: list[CellRunResult] = []
    executor_pod_name: str | None = None
    files: dict[str, str] = {}


class SessionRequest(_Message):
    """Body of POST /v1/sessions, which Sandbox Fusion does not have."""

    memory_limit_MB: int = -1
    files: dict[str, str | None] = {}


class SessionResponse(_Message):
    """Answer of POST /v1/sessions."""

    session_id: str


class CellRequest(_Message):
    """Body of POST /v1/sessions/{session_id}/cells."""

    code: str
    timeout: float = Field(30.0, gt=0)


class CellResponse(_Message):
    """Answer of POST /v1/sessions/{session_id}/cells: Sandbox Fusion's cell, and how it ended."""

    status: RunStatus
    cell: CellRunResult
    stdout_truncated: bool = False
    stderr_truncated: bool = False
    execution_time: float = 0.0
    session_alive: bool = True


def known_language(name: str) -> Language | None:
    """Returns the language of a request; None for a language of Sandbox Fusion's that we cannot run.

    Raises:
        ValueError: the language is unknown.
    """
    try:
        return Language(name)
    except ValueError:
        if name in FUSION_LANGUAGES:
            return None
    known = sorted({*FUSION_LANGUAGES, *(language.value for language in Language)})
    raise ValueError(f"unknown language {name[:40]!r} (known: {', '.join(known)})")


def with_limits(limits: Limits, run_timeout: float, memory_limit_mb: int) -> Limits:
    """Returns `limits` with a request's wall-clock limit, and its memory limit unless that is -1.

    Raises:
        SandboxRequestError: one of them is above `limits`, or invalid.
    """
    if run_timeout > limits.wall_seconds:
        raise SandboxRequestError(f"run_timeout: {run_timeout:g} s is above this sandbox's {limits.wall_seconds:g} s")
    if memory_limit_mb > limits.memory_mb:
        raise SandboxRequestError(f"memory_limit_MB: {memory_limit_mb} is above this sandbox's {limits.memory_mb}")
    if memory_limit_mb < 1 and memory_limit_mb != -1:
        raise SandboxRequestError(f"memory_limit_MB: must be from 1, or -1 for the default, not {memory_limit_mb}")
    memory = limits.memory_mb if memory_limit_mb == -1 else memory_limit_mb
    return replace(limits, wall_seconds=run_timeout, memory_mb=memory)


def run_request(message: RunCodeRequest, language: Language, limits: Limits) -> RunRequest:
    """Converts a `/run_code` body to a request.

    Raises:
        SandboxRequestError: a path leaves the work directory, or content is not base64.
    """
    return RunRequest(
        code=message.code,
        language=language,
        stdin=message.stdin,
        files=decode_files(message.files),
        fetch_files=message.fetch_files,
        args=message.args,
        compile_seconds=message.compile_timeout,
        limits=limits,
    )


def run_code_request(request: RunRequest) -> RunCodeRequest:
    """Converts a request to a `/run_code` body."""
    return RunCodeRequest(
        compile_timeout=request.compile_seconds,
        run_timeout=request.limits.wall_seconds,
        memory_limit_MB=request.limits.memory_mb,
        code=request.code,
        stdin=request.stdin,
        language=_FUSION_NAMES.get(request.language, request.language.value),
        files=dict(encode_files(request.files)),
        fetch_files=list(request.fetch_files),
        args=list(request.args),
    )


def run_code_response(result: RunResult) -> RunCodeResponse:
    """Converts a result to a `/run_code` response by Sandbox Fusion's rules: a time limit or any return code but 0 is
    `Failed`; `message` lists the `fetch_files` that were not read, and why."""
    compiled = None if result.compile is None else _command_result(result.compile)
    ran = None if result.status is RunStatus.COMPILE_FAILED else _command_result(result)
    good = all(part.status is CommandRunStatus.Finished and part.return_code == 0 for part in (compiled, ran) if part)
    return RunCodeResponse(
        status=ResponseStatus.Success if good and ran is not None else ResponseStatus.Failed,
        message=refused_message(result.refused_files),
        compile_result=compiled,
        run_result=ran,
        files=encode_files(result.files),
    )


def run_result(response: RunCodeResponse) -> RunResult:
    """Converts a `/run_code` response to a result.

    Raises:
        SandboxError: the response says that the sandbox failed, has no result, or is invalid.
    """
    commands = [command for command in (response.compile_result, response.run_result) if command is not None]
    failed = next((command for command in commands if command.status is CommandRunStatus.Error), None)
    if response.status is ResponseStatus.SandboxError or failed is not None:
        reason = response.message or (failed.stderr if failed else "") or "no reason given"
        raise SandboxError(f"the sandbox failed: {reason[:500]}")
    compiled = None if response.compile_result is None else _from_command(response.compile_result)
    if response.run_result is not None:
        files = decode_files(response.files, SandboxError)
        return replace(_from_command(response.run_result), compile=compiled, files=files)
    if compiled is None:
        raise SandboxError(f"the sandbox answered '{response.status.value}' without a result")
    return RunResult(status=RunStatus.COMPILE_FAILED, return_code=None, stdout="", stderr="", compile=compiled)


def cell_run_result(result: CellResult) -> CellRunResult:
    """Converts a cell's result to Jupyter's format."""
    display: list[dict[str, Any]] = [{"image/png": base64.b64encode(image).decode()} for image in result.images]
    if result.text is not None:
        display.append({"text/plain": result.text})
    error = []
    if result.error is not None:
        lines = result.error.traceback.splitlines()
        error.append({"ename": result.error.name, "evalue": result.error.value, "traceback": lines})
    return CellRunResult(stdout=result.stdout, stderr=result.stderr, display=display, error=error)


def cell_response(result: CellResult) -> CellResponse:
    """Converts a result of a session's cell to a response."""
    return CellResponse(
        status=result.status,
        cell=cell_run_result(result),
        stdout_truncated=result.stdout_truncated,
        stderr_truncated=result.stderr_truncated,
        execution_time=result.wall_seconds,
        session_alive=result.session_alive,
    )


def cell_result(response: CellResponse) -> CellResult:
    """Converts a response to the result of a session's cell.

    Raises:
        SandboxError: an image is not base64.
    """
    images = [bundle["image/png"] for bundle in response.cell.display if "image/png" in bundle]
    texts = [str(bundle["text/plain"]) for bundle in response.cell.display if "text/plain" in bundle]
    error = None
    if response.cell.error:
        first = response.cell.error[0]
        trace = first.get("traceback") or []
        error = CellError(str(first.get("ename")), str(first.get("evalue")), "\n".join(map(str, trace)))
    return CellResult(
        status=response.status,
        stdout=response.cell.stdout,
        stderr=response.cell.stderr,
        text=texts[-1] if texts else None,
        images=tuple(_decode("display", image, SandboxError) for image in images),
        error=error,
        stdout_truncated=response.stdout_truncated,
        stderr_truncated=response.stderr_truncated,
        wall_seconds=response.execution_time,
        session_alive=response.session_alive,
    )


def decode_files(files: Mapping[str, str | None], failure: type[Exception] = SandboxRequestError) -> dict[str, bytes]:
    """Decodes contents from base64; an entry without content is skipped, as in Sandbox Fusion.

    Raises:
        SandboxRequestError, or `failure`: a content is not base64.
    """
    return {path: _decode(path, content, failure) for path, content in files.items() if content is not None}


def encode_files(files: Mapping[str, bytes]) -> dict[str, str]:
    """Encodes contents as base64."""
    return {path: base64.b64encode(content).decode() for path, content in files.items()}


def _decode(path: str, content: str, failure: type[Exception]) -> bytes:
    try:
        return base64.b64decode(content, validate=True)
    except (binascii.Error, ValueError) as error:
        raise failure(f"files: the content of {path[:80]!r} is not base64: {error}") from error


def _command_result(result: RunResult) -> CommandRunResult:
    """Converts a program's result; one killed for its memory, or for killing its own supervisor, gets return code -9 and
    a note in stderr."""
    late = result.status is RunStatus.TIME_LIMIT
    notes = {
        RunStatus.MEMORY_LIMIT: "killed: the memory limit was exceeded",
        RunStatus.KILLED: "killed: the program broke its own sandbox",
    }
    note = notes.get(result.status)
    return CommandRunResult(
        status=CommandRunStatus.TimeLimitExceeded if late else CommandRunStatus.Finished,
        execution_time=result.wall_seconds,
        cpu_time=result.cpu_seconds,
        return_code=None if late else SIGKILL_CODE if note else result.return_code,
        stdout=result.stdout,
        stderr="\n".join(filter(None, (result.stderr, note))) if note else result.stderr,
    )


def _from_command(command: CommandRunResult) -> RunResult:
    late = command.status is CommandRunStatus.TimeLimitExceeded
    return RunResult(
        status=RunStatus.TIME_LIMIT if late else RunStatus.FINISHED,
        return_code=command.return_code,
        stdout=command.stdout or "",
        stderr=command.stderr or "",
        wall_seconds=command.execution_time or 0.0,
        cpu_seconds=command.cpu_time or 0.0,
    )


def refused_message(files: Mapping[str, str]) -> str:
    """Returns the `message` of a response whose `fetch_files` were not all read."""
    return f"fetch_files: {'; '.join(f'{path!r}: {why}' for path, why in files.items())}"[:2000] if files else ""
