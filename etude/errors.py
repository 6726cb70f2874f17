"""The failure classes, and the one rule that distinguishes "wrong" from "broken".

Vocabulary
- *The model was wrong*: `ToolError`. The text goes to the model; the trajectory goes on.
- *The world was broken*: `InfrastructureError`, time-outs, connection and operating-system errors, what HTTP clients raise
  for these, and another server's 408, 429 or 5xx. The trajectory is retried from fresh state, then dropped and counted. It
  never becomes a reward.
- *The user must change something*: `ConfigError`, `DataError`, `CheckpointError`, `MissingExtraError`. One line that
  names the file, key or row, printed without a traceback by every command.

Classification lives in `is_infrastructure` and nowhere else.
"""

from __future__ import annotations

import asyncio
import os
import sysconfig
import traceback
from collections.abc import Sequence
from functools import cache
from pathlib import Path


class EtudeError(Exception):
    """Base of all errors meant for users: the message is one line that says what to change."""

    exit_status = 2
    """Of a command that ends with it."""


class ConfigError(EtudeError):
    """A configuration key or file is wrong; names the key or file."""


class ConfigErrors(ConfigError):
    """Several settings are wrong: one line each, so that all can be fixed at once."""

    def __init__(self, faults: Sequence[str]) -> None:
        super().__init__("\n".join([f"{len(faults)} settings are invalid:", *faults]))


def raise_faults(faults: Sequence[str]) -> None:
    """Raises if there are faults: one line for a single fault, a list for several.

    Raises:
        ConfigError: there are faults.
    """
    if faults:
        raise ConfigErrors(faults) if len(faults) > 1 else ConfigError(faults[0])


class DataError(EtudeError):
    """A data file or one of its rows is wrong; names the file and the row."""


class CheckpointError(EtudeError):
    """A checkpoint cannot be written or read; names the folder."""


class MissingExtraError(EtudeError):
    """An optional dependency is not installed; names the pip line to run."""

    def __init__(self, feature: str, extra: str) -> None:
        super().__init__(f"{feature} needs an optional dependency: run  pip install 'etude[{extra}]'")


class ToolError(Exception):
    """Raised by a tool to tell the model something: the message becomes the tool's answer."""


class InfrastructureError(Exception):
    """Something outside the model failed (a server, a sandbox, an engine): retried, then dropped, never rewarded."""


class EngineError(InfrastructureError):
    """The inference engine died or refused a request for a reason that is not the model's."""


class Stalled(InfrastructureError):
    """Nothing had progressed for `trainer.stall_timeout`."""


class WorkerLost(EtudeError, InfrastructureError):
    """A worker's process died, is silent or stuck; names its role, rank, node and last log lines. Its group is of no use any
    more: the run starts its workers again, from its last checkpoint, or ends (`trainer.max_restarts`)."""


class MemoryExhausted(EtudeError):
    """A process of the run had no memory left for what it was doing."""


class TrainingStopped(EtudeError):
    """The run ended early on purpose (too few valid trajectories, Ctrl-C); what was done is in the last checkpoint."""


_BROKEN = (TimeoutError, asyncio.TimeoutError, ConnectionError, OSError)
_OURS = (EtudeError, ToolError)
_CONNECTION_CLASSES = frozenset(
    {
        "NetworkError",  # httpx, and so are the next three
        "ProxyError",
        "RemoteProtocolError",
        "TimeoutException",
        "ClientConnectionError",  # aiohttp
        "ClientPayloadError",
        "APIConnectionError",  # openai, anthropic
    }
)
"""Of HTTP clients: they do not derive from `ConnectionError`, and need not be installed to be recognised by name."""
_SERVER_FAULTS = (408, 429)


def is_infrastructure(error: BaseException) -> bool:
    """Whether `error` means that the world was broken rather than that the model was wrong."""
    if isinstance(error, (InfrastructureError, *_OURS)):
        return isinstance(error, InfrastructureError)
    status = http_status(error)
    if status is not None and status >= 400:  # some clients' errors are operating-system errors whatever the status
        return status >= 500 or status in _SERVER_FAULTS
    return isinstance(error, _BROKEN) or any(each.__name__ in _CONNECTION_CLASSES for each in type(error).__mro__)


def is_out_of_memory(error: BaseException) -> bool:
    """Whether Python, or torch on a CPU or GPU, could not allocate memory; torch need not be imported to tell."""
    return (
        isinstance(error, MemoryError)
        or type(error).__name__ == "OutOfMemoryError"
        or "can't allocate memory" in str(error)  # torch's allocator of a CPU raises a RuntimeError
    )


def http_status(error: BaseException) -> int | None:
    """The status of the HTTP response behind `error`, where its client reports one: aiohttp, httpx, openai, requests …"""
    for holder in (error, getattr(error, "response", None)):
        for name in ("status_code", "status"):
            status = getattr(holder, name, None)
            if isinstance(status, int) and 100 <= status < 600:
                return status
    return None


def one_line(error: BaseException, limit: int = 300) -> str:
    """`error` as a single line of at most `limit` characters, for logs and for messages to the model."""
    text = " ".join(str(error).split()) or type(error).__name__
    return text if len(text) <= limit else text[: limit - 1] + "…"


def describe_error(error: BaseException) -> str:
    """`KeyError: 'answer' (reward.py:12)`: type, message, and the line of the user's file that raised it, if one did."""
    kind = "" if isinstance(error, InfrastructureError) else f"{type(error).__name__}: "
    text, place = f"{kind}{one_line(error)}", user_place(error)
    return text if place is None or place in text else f"{text} ({place})"


def user_place(error: BaseException) -> str | None:
    """`path:line` of the last frame in a file that is neither ours nor a library's, in the first cause that has one; a cause
    from another process brings its `place`."""
    causes = [error]
    while (cause := causes[-1].__cause__) is not None and cause not in causes:
        causes.append(cause)
    for each in reversed(causes):
        if isinstance(place := getattr(each, "place", None), str):
            return place
        for frame, line in reversed(list(traceback.walk_tb(each.__traceback__))):
            if place := user_file(frame.f_code.co_filename):
                return f"{place}:{line}"
    return None


@cache
def user_file(name: str) -> str | None:
    """A file of the user's as its path from the working directory, or its full path; None for any other file."""
    path = os.path.realpath(name)
    roots = [Path(sysconfig.get_paths()[which]) for which in ("stdlib", "platstdlib", "purelib", "platlib")]
    if not os.path.isfile(path) or any(root in Path(path).parents for root in (*roots, Path(__file__).parent)):
        return None
    relative = os.path.relpath(path)
    return path if relative.startswith("..") else relative


def debugging() -> bool:
    """Whether `ETUDE_DEBUG` asks for the tracebacks of errors."""
    return os.environ.get("ETUDE_DEBUG", "") not in ("", "0")
