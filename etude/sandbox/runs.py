"""One request in one box: talks to its supervisor and turns the report into a result.

Invariant: the result is built after every process of the box is gone and all its output has been read. A report of
`broken`, or a missing one because the program never started or the whole sandbox died, is the sandbox's failure; anything
else is the program's own ending.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from etude.errors import one_line
from etude.sandbox.guest import frames
from etude.sandbox.guests import BoxGone, Guest
from etude.sandbox.languages import RECIPES
from etude.sandbox.output import Capture, Feed
from etude.sandbox.types import CompileResult, RunRequest, RunResult, RunStatus, SandboxError, SandboxRequestError

GRACE_SECONDS = 10.0
"""Time a supervisor may take beyond its program's limits before the host ends the box itself."""


async def run(guest: Guest, request: RunRequest) -> RunResult:
    """Runs `request` in `guest`, which cannot be reused.

    Raises:
        BoxGone: the box failed before the program could start.
        SandboxError: the box failed.
        SandboxRequestError: the files do not fit into it.
    """
    stdin, stdout, stderr = guest.take_pipes()
    captures = Capture(stdout, request.limits.output_bytes), Capture(stderr, request.limits.output_bytes)
    feed = Feed(stdin, (request.stdin or "").encode("utf-8", "surrogatepass"))
    compiling = request.compile_seconds if RECIPES[request.language].compile else 0.0
    seconds = request.limits.wall_seconds + compiling + GRACE_SECONDS
    try:
        sizes, payload = pack(request.files)
        conversation = _converse(guest, {**_encoded(request), "files": sizes}, payload)
        try:
            report, payload = await asyncio.wait_for(conversation, seconds)
        except asyncio.TimeoutError:
            report, payload = {"status": RunStatus.TIME_LIMIT.value, "wall_seconds": seconds}, b""
        except OSError as error:
            raise BoxGone(f"the box broke off: {one_line(error)}") from error
        except frames.FrameError as error:
            raise SandboxError(f"the box answered nonsense: {error}") from error
        await guest.close()
        await asyncio.gather(*(capture.ended for capture in captures))
        if report["status"] == RunStatus.KILLED.value and not await guest.outlived():
            raise SandboxError("the sandbox died while the program ran")
        if guest.out_of_memory and report["status"] in (RunStatus.FINISHED.value, RunStatus.KILLED.value):
            report = {**report, "status": RunStatus.MEMORY_LIMIT.value, "code": None}
        return _result(report, payload, *captures)
    finally:
        feed.close()
        guest.discard()
        for capture in captures:
            capture.close()


def _encoded(request: RunRequest) -> dict[str, Any]:
    recipe = RECIPES[request.language]
    return {
        "kind": "run",
        "source": _free_name(recipe.source, request.files),
        "code": request.code,
        "command": recipe.command,
        "compile": recipe.compile,
        "args": list(request.args),
        "address_space": recipe.address_space,
        "limits": asdict(request.limits),
        "compile_seconds": request.compile_seconds,
        "fetch_files": list(request.fetch_files),
    }


def _free_name(source: str, files: Mapping[str, bytes]) -> str:
    if source in files or any(name.startswith(f"{source}/") for name in files):
        raise SandboxRequestError(f"files: {source!r} is the name of the code itself; choose another")
    return source


def pack(files: Mapping[str, bytes]) -> tuple[list[list[Any]], bytes]:
    """The header of names and sizes, and the concatenated contents.

    Raises:
        SandboxRequestError: too large for one message.
    """
    payload = b"".join(files.values())
    if len(payload) > frames.MAX_PAYLOAD:
        raise SandboxRequestError(f"files: {len(payload)} bytes are too many (at most {frames.MAX_PAYLOAD})")
    return [[path, len(content)] for path, content in files.items()], payload


def unpack(message: Mapping[str, Any], payload: bytes) -> dict[str, bytes]:
    """The reverse of `pack`, from a supervisor's answer."""
    files, start = {}, 0
    for path, size in message.get("files", ()):
        files[path] = payload[start : start + size]
        start += size
    return files


def failure(answer: Mapping[str, Any]) -> Exception:
    """The exception for an unexpected answer of a supervisor."""
    if answer.get("event") == "refused":
        return SandboxRequestError(f"files: {answer.get('error')}")
    return BoxGone(f"the box could not be set up: {answer.get('error')}")


async def _converse(guest: Guest, message: dict[str, Any], payload: bytes) -> tuple[dict[str, Any], bytes]:
    """Sends the request and waits for the report."""
    await guest.control.send(message, payload)
    started = False
    while (received := await guest.control.receive()) is not None:
        event = received[0].get("event")
        if event == "ended":
            return received
        if event == "started":
            started = True
        elif started:  # otherwise the program has broken its supervisor
            break
        else:
            raise failure(received[0])
    if not started:
        raise BoxGone("the box ended before its program started")
    return {"status": RunStatus.KILLED.value}, b""


def _result(report: Mapping[str, Any], payload: bytes, stdout: Capture, stderr: Capture) -> RunResult:
    (out, out_cut), (err, err_cut) = stdout.take(), stderr.take()
    compiled = report.get("compile")
    return RunResult(
        status=RunStatus(report["status"]),
        return_code=report.get("code"),
        stdout=out,
        stderr=err,
        stdout_truncated=out_cut,
        stderr_truncated=err_cut,
        wall_seconds=report.get("wall_seconds", 0.0),
        cpu_seconds=report.get("cpu_seconds", 0.0),
        compile=None if compiled is None else _compile_result(compiled),
        files=unpack(report, payload),
        refused_files=report.get("refused", {}),
    )


def _compile_result(compiled: Mapping[str, Any]) -> CompileResult:
    return CompileResult(
        status=RunStatus(compiled["status"]),
        return_code=compiled["code"],
        stdout=compiled["stdout"],
        stderr=compiled["stderr"],
        wall_seconds=compiled["wall_seconds"],
    )
