"""Stateful sessions: one container whose interpreter keeps its variables from cell to cell.

Invariant: cells of one session run one after the other, and output of one cell is never part of the next one's result.
The interpreter's answers are untrusted: each part is checked and limited in size, and none is evaluated. A cell that
exceeds its time is interrupted first, so that the session survives; the session is killed only if that fails. A container
that vanishes without a report, or a session closed while a cell runs, never counts as an ending caused by the cell. Between
cells the processes of a session are stopped, so that what a cell leaves running computes only while a later cell does.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Mapping, Sequence
from typing import Any

from etude.errors import one_line
from etude.sandbox.container import Container, ContainerGoneError, failure, run_message
from etude.sandbox.guest import cells, messages
from etude.sandbox.types import (
    CellError,
    CellResult,
    ContainerLostError,
    Limits,
    RunRequest,
    RunStatus,
    SandboxError,
    SandboxRequestError,
    SessionClosedError,
    UnknownSessionError,
    check_files,
    check_paths,
)
from etude.timeouts import within

START_SECONDS = 20.0
INTERRUPT_SECONDS = 3.0
"""Seconds for an interrupted cell to end."""
MAX_PIXELS = 25_000_000
_PNG = b"\x89PNG\r\n\x1a\n"
_NOTE = 100  # maximum characters of the note for omitted text


class Session:
    """One session. Bound to its event loop."""

    def __init__(self, container: Container, limits: Limits) -> None:
        self._container = container
        self._limits = limits
        self._lock = asyncio.Lock()
        self._count = 0
        self.used = time.monotonic()
        self.alive = True

    @classmethod
    async def open(cls, container: Container, limits: Limits, files: Mapping[str, bytes]) -> Session:
        """Starts a session's interpreter in `container`.

        Raises:
            ContainerGoneError: the container failed.
            SandboxRequestError: the files do not fit.
        """
        session = cls(container, limits)
        try:
            await container.feed(b"")
            request = RunRequest("", files=files, limits=limits)
            await within(START_SECONDS, session._ask, run_message(request, session=True), request.files, "started")
        except BaseException as error:
            await session.close()
            if isinstance(error, SandboxError):
                raise ContainerGoneError(str(error)) from error
            raise
        return session

    @property
    def busy(self) -> bool:
        """Whether a cell is running."""
        return self._lock.locked()

    async def run_cell(self, code: str, timeout: float | None = None) -> CellResult:
        """Runs a cell like `Executor.run_cell`, after the previous cells.

        Raises:
            UnknownSessionError: the session had already ended; the cell did not run.
            SessionClosedError: the session was closed while the cell ran.
            ContainerLostError: the session's container was presumably killed from outside.
        """
        async with self._lock:
            if not self.alive:
                raise UnknownSessionError("the session has ended")
            container = self._container
            self._count += 1
            container.stdout.take()
            container.stderr.take()
            started = time.monotonic()
            try:
                status, answer = await self._answer(code, timeout or self._limits.wall_seconds)
                if not self.alive:
                    raise SessionClosedError("the session was closed while its cell ran")
                if answer is None:
                    await self.close()
                else:
                    with contextlib.suppress(OSError):
                        await container.control.send({"do": "stop"})
            except BaseException:
                await self.close()
                raise
            self.used = time.monotonic()
            (out, out_cut), (err, err_cut) = container.stdout.take(), container.stderr.take()
            parts = answer or []
            texts = {kind: content.decode("utf-8", "replace") for kind, content in parts if kind != "image"}
            trace = (texts.get(kind, "")[: cells.MAX_TRACEBACK] for kind in ("name", "value", "traceback"))
            return CellResult(
                status=status,
                stdout=out,
                stderr=err,
                text=texts["text"][: cells.MAX_TEXT + _NOTE] if "text" in texts else None,
                images=valid_images([content for kind, content in parts if kind == "image"]),
                error=CellError(*trace) if "name" in texts else None,
                stdout_truncated=out_cut,
                stderr_truncated=err_cut,
                wall_seconds=self.used - started,
                session_alive=self.alive,
            )

    async def _answer(self, code: str, seconds: float) -> tuple[RunStatus, messages.Parts | None]:
        """Sends a cell; returns how it ended, and its answer, or None if the interpreter is no longer usable."""
        container, loop = self._container, asyncio.get_running_loop()
        late = False
        timer: asyncio.TimerHandle

        def interrupt() -> None:
            nonlocal late, timer
            late = True
            container.control.send_now({"do": "interrupt"})
            timer = loop.call_later(INTERRUPT_SECONDS, container.kill)

        timer = loop.call_later(seconds, interrupt)
        try:
            with contextlib.suppress(OSError):  # `receive` detects a dead interpreter
                await container.control.send({"do": "resume"})
                await container.cells.send({"cell": self._count, "code": code})
            received = await container.cells.receive()
        except messages.MessageError:
            return RunStatus.KILLED, None
        finally:
            timer.cancel()
        if received is not None:
            forged = received[0].get("cell") != self._count
            status = RunStatus.KILLED if forged else RunStatus.TIME_LIMIT if late else RunStatus.FINISHED
            return status, None if forged else received[1]
        if late or not self.alive:
            return RunStatus.TIME_LIMIT, None
        try:
            report, _ = await within(INTERRUPT_SECONDS, self._expect, "ended")
            return RunStatus(report["status"]), None
        except ContainerLostError:  # without isolation, the cell may have killed its supervisor
            if container.isolated or not await container.server_answers():
                raise
        except (OSError, messages.MessageError, SandboxError):  # the interpreter disconnected, but is still alive
            pass
        return RunStatus.KILLED, None

    async def write_files(self, files: Mapping[str, bytes]) -> None:
        """Writes files like `Executor.write_files`."""
        await self._command({"do": "write"}, check_files(files), "written")

    async def fetch_files(self, paths: Sequence[str]) -> dict[str, bytes]:
        """Fetches files like `Executor.fetch_files`."""
        wanted = list(check_paths("fetch_files", paths))
        return dict(await self._command({"do": "fetch", "fetch_files": wanted}, {}, "fetched"))

    async def _command(self, message: dict[str, Any], files: Mapping[str, bytes], event: str) -> messages.Parts:
        async with self._lock:
            if not self.alive:
                raise UnknownSessionError("the session has ended")
            self.used = time.monotonic()
            try:
                return await within(START_SECONDS, self._ask, message, files, event)
            except SandboxRequestError:
                raise
            except BaseException:
                await self.close()
                raise

    async def _ask(self, message: dict[str, Any], files: Mapping[str, bytes], event: str) -> messages.Parts:
        """Sends the supervisor a message, and returns the parts of its answer."""
        try:
            with contextlib.suppress(OSError):  # the supervisor's last message says why it is gone
                await self._container.control.send(message, list(files.items()))
            return (await self._expect(event))[1]
        except (OSError, messages.MessageError) as error:
            raise SandboxError(f"the session's container broke off: {one_line(error)}") from error

    async def _expect(self, event: str) -> tuple[dict[str, Any], messages.Parts]:
        received = await self._container.control.receive()
        if received is None:
            raise ContainerLostError("the session's container is gone")
        if received[0].get("event") == event:
            return received
        if received[0].get("event") == "ended":
            raise UnknownSessionError("the session has ended: its interpreter exited")
        raise failure(received[0])

    async def close(self) -> None:
        """Kills all processes in the session's container and waits until they have exited."""
        self.alive = False
        await self._container.close()


def valid_images(images: Sequence[bytes]) -> tuple[bytes, ...]:
    """Returns the PNG files of permitted size among an interpreter's images. Pixels are those of the file's header, so that
    huge images are never decoded."""
    return tuple(
        image
        for image in images[: cells.MAX_IMAGES]
        if 33 <= len(image) <= cells.MAX_IMAGE_BYTES
        and image.startswith(_PNG)
        and image[12:16] == b"IHDR"
        and 0 < int.from_bytes(image[16:20], "big") * int.from_bytes(image[20:24], "big") <= MAX_PIXELS
    )
