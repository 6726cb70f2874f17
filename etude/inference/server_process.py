"""`ServerProcess`: an inference server that this process starts, and that the router restarts when it dies.

Invariant: the server does not outlive this process, however this one ends: a guard process between the two kills the
server's process group when its pipe closes. A restarted server does not have the trainer's weights: the router sends them
before any request.
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
    """Runs `command`, with `{port}` and `{model}` filled in, from `start` on; its output goes to a log file."""

    def __init__(self, command: Sequence[str], model: str) -> None:
        with socket.create_server(("127.0.0.1", 0)) as free:
            port = free.getsockname()[1]
        self.url = f"http://127.0.0.1:{port}"
        self._command = [word.replace("{port}", str(port)).replace("{model}", model) for word in command]
        self._process: subprocess.Popen[bytes] | None = None
        self._log: Path | None = None

    def start(self) -> None:
        """Starts the server, after killing what is left of the last one."""
        self.end()
        descriptor, log = tempfile.mkstemp(prefix="etude-server-", suffix=".log")
        self._log = Path(log)
        with os.fdopen(descriptor, "wb") as output:
            self._process = subprocess.Popen(
                [sys.executable, "-c", _GUARD, *self._command],
                stdin=subprocess.PIPE,
                stdout=output,
                stderr=output,
                start_new_session=True,  # Ctrl-C goes to the trainer only, which needs the server to finish its step
            )

    @property
    def is_alive(self) -> bool:
        """Whether the server was started and has not ended."""
        return self._process is not None and self._process.poll() is None

    def log_tail(self) -> str:
        """Returns the end of the server's log, in one line."""
        try:
            text = self._log.read_bytes()[-_LOG_BYTES:].decode("utf-8", "replace") if self._log else ""
        except OSError:
            text = ""
        return one_line(EngineError(text.strip().replace("\n", " | ")), _LOG_BYTES) if text.strip() else "(no output)"

    def end(self) -> None:
        """Kills the server and deletes its log."""
        process, self._process = self._process, None
        if process is not None:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            assert process.stdin is not None
            process.stdin.close()
        if self._log is not None:
            self._log.unlink(missing_ok=True)
