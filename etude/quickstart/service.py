"""`run_service`: runs a server, such as a search service or a judge, for the duration of an example."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

from etude.errors import EtudeError


@contextmanager
def run_service(*arguments: str, python: str = sys.executable) -> Iterator[str]:
    """Runs `python ARGUMENTS` in a separate process, and yields the address that it prints first.

    Raises:
        EtudeError: it exited before it was ready; its own message is on stderr.
    """
    with subprocess.Popen((python, *arguments), stdout=subprocess.PIPE, text=True) as server:
        assert server.stdout is not None
        try:
            words = server.stdout.readline().split()
            if not words:
                raise EtudeError(f"python {' '.join(arguments)} did not start")
            yield words[0]
        finally:
            server.terminate()
