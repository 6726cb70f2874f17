"""Stateful sessions: one box whose interpreter keeps its variables from cell to cell.

Invariant: cells of one session run one after the other, and what one printed is never part of the next one's result.
The interpreter's answers are untrusted: they are checked part by part, bounded, and never evaluated. A cell that
exceeds its time is interrupted first, so that the session survives; only if that fails is it killed. A box that vanishes
without a report, or a session closed while a cell runs, never counts as the cell's own ending.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from etude.errors import one_line
from etude.sandbox.connection import Connection
from etude.sandbox.guest import cells, frames
from etude.sandbox.guests import BoxGone, Guest
from etude.sandbox.output import Capture, Feed
from etude.sandbox.runs import failure, pack, unpack
from etude.sandbox.types import (
    BoxLostError,
    CellError,
    CellResult,
    Limits,
    RunStatus,
    SandboxError,
    SandboxRequestError,
    SessionClosedError,
    UnknownSessionError,
    checked_files,
    checked_paths,
)

START_SECONDS = 20.0
INTERRUPT_SECONDS = 1.0
"""Time for an interrupted cell to end."""
MAX_PIXELS = 25_000_000
_PNG = b"\x89PNG\r\n\x1a\n"
_STALE_ANSWERS = 100
_MARK = 100  # characters of the mark for text omitted

Answer = dict[str, list[bytes]]
"""An interpreter's answer to a cell: kind → parts of that kind, in order."""


class Session:
    """One session, bound to its event loop."""

    def __init__(self, guest: Guest, limits: Limits) -> None:
        self._guest = guest
        self._limits = limits
        stdin, stdout, stderr = guest.take_pipes()
        Feed(stdin, b"")
        self._stdout = Capture(stdout, limits.output_bytes)
        self._stderr = Capture(stderr, limits.output_bytes)
        self._cells = Connection(guest.cells, cells.MAX_HEADER, cells.MAX_ANSWER)
        self._lock = asyncio.Lock()
        self._count = 0
        self.used = time.monotonic()
        self.alive = True

    @classmethod
    async def open(cls, guest: Guest, limits: Limits, files: Mapping[str, bytes]) -> Session:
        """Starts the interpreter of a session in `guest`.

        Raises:
            BoxGone: the box failed.
            SandboxRequestError: the files do not fit.
        """
        session = cls(guest, limits)
        sizes, payload = pack(checked_files(files))
        request = {"kind": "session", "source": "", "code": "", "files": sizes, "address_space": True}
        try:
            message = {**request, "args": [], "limits": asdict(limits)}
            await asyncio.wait_for(session._ask(message, payload, "started"), START_SECONDS)
        except BaseException as error:
            await session.close()
            if isinstance(error, SandboxError):
                raise BoxGone(str(error)) from error
            raise
        return session

    @property
    def busy(self) -> bool:
        """Whether a cell runs."""
        return self._lock.locked()

    async def run_cell(self, code: str, timeout: float | None = None) -> CellResult:
        """Runs one cell after the previous ones; `timeout` in seconds, by default the session's `wall_seconds`.

        Raises:
            UnknownSessionError: the session had ended before; the cell did not run.
            SessionClosedError: it was closed while the cell ran.
            BoxLostError: its box was presumably killed from outside.
        """
        async with self._lock:
            if not self.alive:
                raise UnknownSessionError("the session has ended")
            self._count += 1
            self._stdout.take()
            self._stderr.take()
            started = time.monotonic()
            try:
                with contextlib.suppress(ConnectionError):  # the answer reveals a dead interpreter
                    await self._guest.control.send({"do": "watch"})
                    await self._cells.send({"cell": self._count, "code": code})
                status, answer = await self._answer(timeout or self._limits.wall_seconds)
                if not self.alive:
                    raise SessionClosedError("the session was closed while its cell ran")
                if answer is None:
                    await self.close()
            except BaseException:
                await self.close()
                raise
            self.used = time.monotonic()
            return self._result(answer, status, self.used - started)

    async def _answer(self, seconds: float) -> tuple[RunStatus, Answer | None]:
        """How the cell ended, and its answer; None if the interpreter is no longer usable."""
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

    async def _receive(self) -> Answer | None:
        """The answer to the current cell; None when the interpreter has hung up.

        Raises:
            FrameError: it is not an answer, or too many belong to other cells.
        """
        for _ in range(_STALE_ANSWERS):  # only forged answers can be stale
            received = await self._cells.receive()
            if received is None or received[0].get("cell") == self._count:
                return None if received is None else _parts(*received)
        raise frames.FrameError("answers to other cells")

    async def _cause_of_death(self) -> RunStatus:
        try:
            report, _ = await asyncio.wait_for(self._expect("ended"), INTERRUPT_SECONDS)
            return RunStatus(report["status"])
        except BoxLostError:  # without isolation, the cell may have killed its supervisor
            if self._guest.isolated or not await self._guest.outlived():
                raise
        except (OSError, frames.FrameError, SandboxError, asyncio.TimeoutError):  # it hung up but is still alive
            pass
        return RunStatus.KILLED

    def _result(self, answer: Answer | None, status: RunStatus, seconds: float) -> CellResult:
        (out, out_cut), (err, err_cut) = self._stdout.take(), self._stderr.take()
        found = answer or {}
        return CellResult(
            status=status,
            stdout=out,
            stderr=err,
            text=_text(found["text"], cells.MAX_TEXT + _MARK) if "text" in found else None,
            images=_images(found.get("image", ())),
            error=_error(found),
            stdout_truncated=out_cut,
            stderr_truncated=err_cut,
            wall_seconds=seconds,
            session_alive=self.alive,
        )

    async def write_files(self, files: Mapping[str, bytes]) -> None:
        """Writes files into the work directory, replacing existing ones.

        Raises:
            SandboxRequestError: a path is not allowed, or there is no room.
            UnknownSessionError: the session has ended.
        """
        sizes, payload = pack(checked_files(files))
        await self._command({"do": "write", "files": sizes}, payload, "written")

    async def fetch_files(self, paths: Sequence[str]) -> dict[str, bytes]:
        """The regular files among `paths`.

        Raises:
            SandboxRequestError: a path is not allowed.
            UnknownSessionError: the session has ended.
        """
        wanted = list(checked_paths("fetch_files", paths))
        return unpack(*await self._command({"do": "fetch", "fetch_files": wanted}, b"", "fetched"))

    async def _command(self, message: dict[str, Any], payload: bytes, event: str) -> tuple[dict[str, Any], bytes]:
        async with self._lock:
            if not self.alive:
                raise UnknownSessionError("the session has ended")
            self.used = time.monotonic()
            try:
                return await asyncio.wait_for(self._ask(message, payload, event), START_SECONDS)
            except SandboxRequestError:
                raise
            except UnknownSessionError:
                await self.close()
                raise
            except BaseException:
                await self.close()
                raise

    async def _ask(self, message: dict[str, Any], payload: bytes, event: str) -> tuple[dict[str, Any], bytes]:
        try:
            with contextlib.suppress(ConnectionError):  # its last message says why it is gone
                await self._guest.control.send(message, payload)
            return await self._expect(event)
        except (OSError, frames.FrameError) as error:
            raise SandboxError(f"the session's box broke off: {one_line(error)}") from error

    async def _expect(self, event: str) -> tuple[dict[str, Any], bytes]:
        received = await self._guest.control.receive()
        if received is None:
            raise BoxLostError("the session's box is gone")
        if received[0].get("event") == event:
            return received
        if received[0].get("event") == "ended":
            raise UnknownSessionError("the session has ended: its interpreter exited")
        raise failure(received[0])

    async def close(self) -> None:
        """Kills everything in the session's box and waits until it is gone."""
        self.alive = False
        self._cells.close()  # before the guest closes the same socket
        try:
            await self._guest.close()
        finally:
            for capture in (self._stdout, self._stderr):
                capture.drain()
                capture.close()


def _parts(header: Mapping[str, Any], payload: bytes) -> Answer:
    """The parts of an answer.

    Raises:
        FrameError: the header does not describe the payload.
    """
    sizes, found, start = header.get("parts"), Answer(), 0
    if not isinstance(sizes, list) or len(sizes) > cells.MAX_PARTS:
        raise frames.FrameError("an answer without its parts, or with too many")
    for part in sizes:
        if not (isinstance(part, list) and [type(field) for field in part] == [str, int] and part[1] >= 0):
            raise frames.FrameError("a part of an answer is not [kind, bytes]")
        found.setdefault(part[0], []).append(payload[start : start + part[1]])
        start += part[1]
    if start != len(payload):
        raise frames.FrameError("the parts of an answer do not add up to its length")
    return found


def _images(images: Sequence[bytes]) -> tuple[bytes, ...]:
    """The valid PNG files among an interpreter's images."""
    return tuple(
        image
        for image in images[: cells.MAX_IMAGES]
        if len(image) <= cells.MAX_IMAGE_BYTES and 0 < _pixels(image) <= MAX_PIXELS
    )


def _pixels(image: bytes) -> int:
    """Pixels of a PNG file, by its header, so that decoding it is safe; 0 if it is not a PNG."""
    if not image.startswith(_PNG) or image[12:16] != b"IHDR" or len(image) < 33:
        return 0
    return int.from_bytes(image[16:20], "big") * int.from_bytes(image[20:24], "big")


def _error(answer: Answer) -> CellError | None:
    """The cell's exception, as reported by its interpreter."""
    if "name" not in answer:
        return None
    return CellError(*(_text(answer.get(kind, []), cells.MAX_TRACEBACK) for kind in ("name", "value", "traceback")))


def _text(parts: Sequence[bytes], longest: int) -> str:
    return b"".join(parts[:1]).decode("utf-8", "replace")[:longest]
