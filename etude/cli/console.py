"""`open_console`: the Rich console that commands print tables to.

Invariant: on a terminal, lines fit its width; in a pipe or a file they are not wrapped.
"""

from __future__ import annotations

from rich.console import Console

_PIPE_WIDTH = 1000  # columns: a table is never wider than its content


def open_console() -> Console:
    """Returns a console on standard output."""
    console = Console(highlight=False)
    return console if console.is_terminal else Console(highlight=False, width=_PIPE_WIDTH)
