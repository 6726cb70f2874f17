"""What the model reads about code that ran: its output, and how it ended.

Invariant: the text always says what happened; it is never empty, and never hides that a program failed, was cut off or
was killed. Output is unchanged, except that a long stderr keeps its end, where Python puts the reason.
"""

from __future__ import annotations

import signal

from etude.sandbox import CellResult, Limits, RunResult, RunStatus

MAX_STDERR_CHARS = 2000
NOTHING = "(the code ran to its end and printed nothing)"


def run_report(result: RunResult, limits: Limits) -> str:
    """The text for a program that ran."""
    if result.status is RunStatus.COMPILE_FAILED:
        compiled = result.compile
        late = compiled is not None and compiled.status is RunStatus.TIME_LIMIT
        reason = "the compiler timed out" if late else "compilation failed"
        return _joined(f"({reason})", tail(compiled.stderr or compiled.stdout) if compiled else "")
    ending = _ending(result.status, limits.wall_seconds, limits)
    code = result.return_code or 0
    stderr = tail(result.stderr)
    if not ending and code < 0:
        ending = f"(killed by {_signal_name(-code)})"
    elif not ending and code > 0 and not stderr:
        ending = f"(ended with exit status {code} and no error message)"
    return _joined(result.stdout.rstrip("\n"), stderr, ending) or NOTHING


def cell_report(result: CellResult, limits: Limits, seconds: float) -> str:
    """The text for a cell of a session that was given `seconds`."""
    ending = _ending(result.status, seconds, limits)
    if not result.session_alive:
        ending = _joined(ending, "(the interpreter ended: its variables are lost, the next call starts a new one)")
    images = f"({len(result.images)} image{'s' * (len(result.images) > 1)} shown)" if result.images else ""
    error = tail(result.error.traceback) if result.error and result.status is RunStatus.FINISHED else ""
    parts = (result.stdout.rstrip("\n"), result.text or "", images, tail(result.stderr), error, ending)
    return _joined(*parts) or NOTHING


def tail(text: str, limit: int = MAX_STDERR_CHARS) -> str:
    """The last `limit` or so characters of `text`, from the start of a line."""
    text = text.rstrip()
    if len(text) <= limit:
        return text
    end = text[-limit:]
    _, newline, rest = end.partition("\n")
    return f"... (only the end)\n{rest if newline and rest else end}"


def _ending(status: RunStatus, seconds: float, limits: Limits) -> str:
    return {
        RunStatus.TIME_LIMIT: f"(timed out after {seconds:g} s)",
        RunStatus.MEMORY_LIMIT: f"(killed: it used more than {limits.memory_mb} MiB of memory)",
        RunStatus.KILLED: "(killed: it interfered with its sandbox)",
    }.get(status, "")


def _joined(*parts: str) -> str:
    return "\n".join(part for part in parts if part)


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
