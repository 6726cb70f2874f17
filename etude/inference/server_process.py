"""`ServerProcess`: an inference server that this process starts, and starts again when the router asks for it.

Invariant: the server does not outlive this process, however that ends: between the two is a guard, which ends the server's
process group when its pipe closes. A server that was started anew has none of the trainer's weights: the router sends it
these before it gets a request.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from etude.errors import EngineError, one_line

_GUARD = """
import os, signal, subprocess, sys, threading
try:
    server = subprocess.Popen(sys.argv[1:], stdin=subprocess.DEVNULL)
except OSError as error:
    sys.exit(str(error))
def watch():
    os.read(0, 1)
    os.killpg(0, signal.SIGKILL)
threading.Thread(target=watch, daemon=True).start()
sys.exit(server.wait())
"""
_LOG_BYTES = 1000


class ServerProcess:
    """`command` with `{port}` and `{model}` filled in; it runs from `start` on, and writes into a log file."""

    def __init__(self, command: Sequence[str], model: str) -> None:
        with socket.create_server(("127.0.0.1", 0)) as free:
            port = free.getsockname()[1]
        self.url = f"http://127.0.0.1:{port}"
        self._command = [word.replace("{port}", str(port)).replace("{model}", model) for word in command]
        self._process: subprocess.Popen[bytes] | None = None
        self._log: Path | None = None

    def start(self) -> None:
        """Starts the server, after whatever is left of the last one has ended."""
        self.end()
        descriptor, log = tempfile.mkstemp(prefix="etude-server-", suffix=".log")
        self._log = Path(log)
        with os.fdopen(descriptor, "wb") as output:
            self._process = subprocess.Popen(
                [sys.executable, "-c", _GUARD, *self._command],
                stdin=subprocess.PIPE,
                stdout=output,
                stderr=output,
                start_new_session=True,  # a Ctrl-C is the trainer's, which still needs the server for its step
            )

    @property
    def is_alive(self) -> bool:
        """Whether it was started and has not ended."""
        return self._process is not None and self._process.poll() is None

    def last_words(self) -> str:
        """The end of its log, in one line."""
        try:
            text = self._log.read_bytes()[-_LOG_BYTES:].decode("utf-8", "replace") if self._log else ""
        except OSError:
            text = ""
        return one_line(EngineError(text.strip().replace("\n", " | ")), _LOG_BYTES) if text.strip() else "(no output)"

    def end(self) -> None:
        """Kills the server and forgets its log."""
        process, self._process = self._process, None
        if process is not None:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            assert process.stdin is not None
            process.stdin.close()
        if self._log is not None:
            self._log.unlink(missing_ok=True)
