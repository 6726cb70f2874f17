"""Stateful sessions: one box whose interpreter keeps its variables from cell to cell.

Invariant: cells of one session run one after the other, and output of one cell is never part of the next one's result.
The interpreter's answers are untrusted: each part is checked and limited in size, and none is evaluated. A cell that
exceeds its time is interrupted first, so that the session survives; the session is killed only if that fails. A box that
vanishes without a report, or a session closed while a cell runs, never counts as an ending caused by the cell. Between cells
the processes of a session are stopped, so that what a cell leaves running computes only while a later cell does.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Mapping, Sequence
from typing import Any

from etude.bounded import within
from etude.errors import one_line
from etude.sandbox.guest import cells, frames
from etude.sandbox.guests import BoxGoneError, Guest
from etude.sandbox.runs import failure, run_message
from etude.sandbox.types import (
    BoxLostError,
    CellError,
    CellResult,
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

START_SECONDS = 20.0
INTERRUPT_SECONDS = 1.0
"""Seconds for an interrupted cell to end."""
MAX_PIXELS = 25_000_000
_PNG = b"\x89PNG\r\n\x1a\n"
_MARK = 100  # maximum characters of the note for omitted text


class Session:
    """One session. Bound to its event loop."""

    def __init__(self, guest: Guest, limits: Limits) -> None:
        self._guest = guest
        self._limits = limits
        self._lock = asyncio.Lock()
        self._count = 0
        self.used = time.monotonic()
        self.alive = True

    @classmethod
    async def open(cls, guest: Guest, limits: Limits, files: Mapping[str, bytes]) -> Session:
        """Starts a session's interpreter in `guest`.

        Raises:
            BoxGoneError: the box failed.
            SandboxRequestError: the files do not fit.
        """
        session = cls(guest, limits)
        try:
            await guest.feed(b"")
            request = RunRequest("", files=files, limits=limits)
            message = run_message(request, session=True)
            await within(START_SECONDS, session._ask, message, request.files, "started")
        except BaseException as error:
            await session.close()
            if isinstance(error, SandboxError):
                raise BoxGoneError(str(error)) from error
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
            BoxLostError: the session's box was presumably killed from outside.
        """
        async with self._lock:
            if not self.alive:
                raise UnknownSessionError("the session has ended")
            self._count += 1
            self._guest.stdout.take()
            self._guest.stderr.take()
            started = time.monotonic()
            try:
                with contextlib.suppress(ConnectionError):  # `_answer` detects a dead interpreter
                    await self._guest.control.send({"do": "resume"})
                    await self._guest.cells.send({"cell": self._count, "code": code})
                status, answer = await self._answer(timeout or self._limits.wall_seconds)
                if not self.alive:
                    raise SessionClosedError("the session was closed while its cell ran")
                if answer is None:
                    await self.close()
                else:
                    with contextlib.suppress(ConnectionError):
                        await self._guest.control.send({"do": "stop"})
            except BaseException:
                await self.close()
                raise
            self.used = time.monotonic()
            return self._result(answer, status, self.used - started)

    async def _answer(self, seconds: float) -> tuple[RunStatus, frames.Parts | None]:
        """Returns how the cell ended, and its answer; None if the interpreter is no longer usable."""
        receiving = asyncio.ensure_future(self._receive())
        status = RunStatus.FINISHED
        try:
            await asyncio.wait({receiving}, timeout=seconds)
            if not receiving.done():
                status = RunStatus.TIME_LIMIT
                with contextlib.suppress(ConnectionError):
                    await self._guest.control.send({"do": "interrupt"})
                await asyncio.wait({receiving}, timeout=INTERRUPT_SECONDS)
                if not receiving.done():
                    return status, None
            answer = receiving.result()
            if answer is None and status is RunStatus.FINISHED and self.alive:
                status = await self._cause_of_death()
            return status, answer
        except frames.FrameError:
            return RunStatus.KILLED, None
        finally:
            if not receiving.done():
                receiving.cancel()
                with contextlib.suppress(asyncio.CancelledError):
                    await receiving

    async def _receive(self) -> frames.Parts | None:
        """Receives the answer to the current cell; returns None if the interpreter has disconnected.

        Raises:
            FrameError: the data is not an answer, or is one to another cell.
        """
        received = await self._guest.cells.receive()
        if received is None:
            return None
        header, parts = received
        if header.get("cell") != self._count:  # forged
            raise frames.FrameError("an answer to another cell")
        return parts

    async def _cause_of_death(self) -> RunStatus:
        try:
            report, _ = await within(INTERRUPT_SECONDS, self._expect, "ended")
            return RunStatus(report["status"])
        except BoxLostError:  # without isolation, the cell may have killed its supervisor
            if self._guest.isolated or not await self._guest.outlived():
                raise
        except (OSError, frames.FrameError, SandboxError):  # the interpreter disconnected, but is still alive
            pass
        return RunStatus.KILLED

    def _result(self, answer: frames.Parts | None, status: RunStatus, seconds: float) -> CellResult:
        (out, out_cut), (err, err_cut) = self._guest.stdout.take(), self._guest.stderr.take()
        texts = {kind: content.decode("utf-8", "replace") for kind, content in answer or () if kind != "image"}
        trace = (texts.get(kind, "")[: cells.MAX_TRACEBACK] for kind in ("name", "value", "traceback"))
        return CellResult(
            status=status,
            stdout=out,
            stderr=err,
            text=texts["text"][: cells.MAX_TEXT + _MARK] if "text" in texts else None,
            images=_images([content for kind, content in answer or () if kind == "image"]),
            error=CellError(*trace) if "name" in texts else None,
            stdout_truncated=out_cut,
            stderr_truncated=err_cut,
            wall_seconds=seconds,
            session_alive=self.alive,
        )

    async def write_files(self, files: Mapping[str, bytes]) -> None:
        """Writes files like `Executor.write_files`."""
        await self._command({"do": "write"}, check_files(files), "written")

    async def fetch_files(self, paths: Sequence[str]) -> dict[str, bytes]:
        """Fetches files like `Executor.fetch_files`."""
        wanted = list(check_paths("fetch_files", paths))
        return dict(await self._command({"do": "fetch", "fetch_files": wanted}, {}, "fetched"))

    async def _command(self, message: dict[str, Any], files: Mapping[str, bytes], event: str) -> frames.Parts:
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

    async def _ask(self, message: dict[str, Any], files: Mapping[str, bytes], event: str) -> frames.Parts:
        try:
            with contextlib.suppress(ConnectionError):  # the supervisor's last message says why it is gone
                await self._guest.control.send(message, list(files.items()))
            return (await self._expect(event))[1]
        except (OSError, frames.FrameError) as error:
            raise SandboxError(f"the session's box broke off: {one_line(error)}") from error

    async def _expect(self, event: str) -> tuple[dict[str, Any], frames.Parts]:
        received = await self._guest.control.receive()
        if received is None:
            raise BoxLostError("the session's box is gone")
        if received[0].get("event") == event:
            return received
        if received[0].get("event") == "ended":
            raise UnknownSessionError("the session has ended: its interpreter exited")
        raise failure(received[0])

    async def close(self) -> None:
        """Kills all processes in the session's box and waits until they have exited."""
        self.alive = False
        await self._guest.close()


def _images(images: Sequence[bytes]) -> tuple[bytes, ...]:
    """Returns the valid PNG files among an interpreter's images."""
    return tuple(
        image
        for image in images[: cells.MAX_IMAGES]
        if len(image) <= cells.MAX_IMAGE_BYTES and 0 < _pixels(image) <= MAX_PIXELS
    )


def _pixels(image: bytes) -> int:
    """Returns the number of pixels in a PNG file's header, so that huge images are not decoded; 0 if it is not a PNG."""
    if not image.startswith(_PNG) or image[12:16] != b"IHDR" or len(image) < 33:
        return 0
    return int.from_bytes(image[16:20], "big") * int.from_bytes(image[20:24], "big")
