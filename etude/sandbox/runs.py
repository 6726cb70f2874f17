"""Runs one request in one box: talks to its supervisor and turns the report into a result.

Invariant: the result is built after every process of the box has exited and all its output has been read. A report of
`broken`, or a missing one because the program never started or the whole sandbox died, is a failure of the sandbox;
anything else is how the program itself ended.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from etude.bounded import uninterrupted, within
from etude.errors import one_line
from etude.sandbox.guest import frames
from etude.sandbox.guests import BoxGoneError, Guest
from etude.sandbox.languages import RECIPES
from etude.sandbox.types import RunRequest, RunResult, RunStatus, SandboxError, SandboxRequestError

GRACE_SECONDS = 10.0
"""Seconds that a supervisor may take beyond its program's limits before the host kills the box."""


async def run(guest: Guest, request: RunRequest) -> RunResult:
    """Runs `request` in `guest`, which cannot be reused.

    Raises:
        BoxGoneError: the box failed before the program started.
        SandboxError: the box failed later.
        SandboxRequestError: the files do not fit into the box.
    """
    compiling = request.compile_seconds if RECIPES[request.language].compile else 0.0
    seconds = request.limits.wall_seconds + compiling + GRACE_SECONDS
    try:
        await guest.feed((request.stdin or "").encode("utf-8", "surrogatepass"))
        try:
            report, files = await within(seconds, _converse, guest, run_message(request), request.files)
        except TimeoutError:
            report, files = {"status": RunStatus.TIME_LIMIT.value, "wall_seconds": seconds}, []
        except OSError as error:
            raise BoxGoneError(f"the box broke off: {one_line(error)}") from error
        except frames.FrameError as error:
            raise SandboxError(f"the box answered nonsense: {error}") from error
        await guest.close()
        if report["status"] == RunStatus.KILLED.value and not await guest.outlived():
            raise SandboxError("the sandbox died while the program ran")
        if guest.out_of_memory and report["status"] in (RunStatus.FINISHED.value, RunStatus.KILLED.value):
            report = {**report, "status": RunStatus.MEMORY_LIMIT.value, "code": None}
        return _result(report, files, guest)
    finally:
        await uninterrupted(guest.close())


def run_message(request: RunRequest, session: bool = False) -> dict[str, Any]:
    """Returns the message to the supervisor for a request, without the files; for a `session`, only its limits matter.

    Raises:
        SandboxRequestError: a file has the name of the code's file.
    """
    recipe = RECIPES[request.language]
    if not session and any(name == recipe.source or name.startswith(f"{recipe.source}/") for name in request.files):
        raise SandboxRequestError(f"files: {recipe.source!r} is the name of the code itself; choose another")
    return {
        "kind": "session" if session else "run",
        "source": "" if session else recipe.source,
        "code": request.code,
        "command": recipe.command,
        "compile": recipe.compile,
        "args": list(request.args),
        "address_space": recipe.address_space,
        "limits": asdict(request.limits),
        "wall_seconds": None if session else request.limits.wall_seconds,
        "compile_seconds": request.compile_seconds,
        "fetch_files": list(request.fetch_files),
    }


def failure(answer: Mapping[str, Any]) -> Exception:
    """Returns the exception for a supervisor's unexpected answer."""
    if answer.get("event") == "refused":
        return SandboxRequestError(f"files: {answer.get('error')}")
    return BoxGoneError(f"the box could not be set up: {answer.get('error')}")


async def _converse(
    guest: Guest, message: dict[str, Any], files: Mapping[str, bytes]
) -> tuple[dict[str, Any], frames.Parts]:
    """Sends the request and waits for the report."""
    await guest.control.send(message, list(files.items()))
    started = False
    while (received := await guest.control.receive()) is not None:
        event = received[0].get("event")
        if event == "ended":
            return received
        if event == "started":
            started = True
        elif started:  # a program that has started may have tampered with its supervisor
            break
        else:
            raise failure(received[0])
    if not started:
        raise BoxGoneError("the box ended before its program started")
    return {"status": RunStatus.KILLED.value}, []


def _result(report: Mapping[str, Any], files: frames.Parts, guest: Guest) -> RunResult:
    (out, out_cut), (err, err_cut) = guest.stdout.take(), guest.stderr.take()
    compiled = report.get("compile")
    return RunResult(
        **_ending(report),
        stdout=out,
        stderr=err,
        stdout_truncated=out_cut,
        stderr_truncated=err_cut,
        compile=compiled and RunResult(**_ending(compiled), stdout=compiled["stdout"], stderr=compiled["stderr"]),
        files=dict(files),
        refused_files=report.get("refused", {}),
    )


def _ending(report: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "status": RunStatus(report["status"]),
        "return_code": report.get("code"),
        "wall_seconds": report.get("wall_seconds", 0.0),
        "cpu_seconds": report.get("cpu_seconds", 0.0),
    }
