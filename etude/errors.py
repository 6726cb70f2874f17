"""The exception classes, and the one rule that separates the model's mistakes from infrastructure failures.

- *The model made a mistake*: `ToolError`. The text goes to the model; the trajectory continues.
- *The infrastructure failed*: `InfrastructureError`, timeouts, connection and operating-system errors, the equivalents that
  HTTP clients raise, and a server's 408, 429 or 5xx. The trajectory is retried from fresh state, then dropped and counted.
  It never becomes a reward.
- *The user's agent failed* in one rollout: `AgentError`. The rollout is dropped and counted.
- *The user must change something*: `ConfigError`, `DataError`, `CheckpointError`, `MissingExtraError`. One line that
  names the file, key or row, printed without a traceback by every command. Its `fix` is what the user changes, and its
  `key` the configuration key, where there is one: nobody has to find them in the text.

The classification is in `is_infrastructure` and nowhere else.
"""

from __future__ import annotations

import asyncio
import importlib.util
import os
import shutil
import sys
import sysconfig
import time
import traceback
from collections.abc import Iterable, Sequence
from email.utils import parsedate_to_datetime
from functools import cache
from pathlib import Path
from typing import Any, TypeVar

from typing_extensions import Self

E = TypeVar("E", bound="EtudeError")
WARNING = "%s; %s"
"""Format of a warning with its fix, `logger.warning(WARNING, problem, fix)`: `etude check` prints the two apart."""


class EtudeError(Exception):
    """Base of all errors meant for users, as one line: `message; fix`."""

    exit_status = 2
    """Exit status of a command that ends with this error."""

    def __init__(self, message: str = "", *, fix: str = "", key: str = "") -> None:
        """`message` says what is wrong, `fix` what the user changes, `key` which configuration key it is about."""
        super().__init__(f"{message}; {fix}" if fix else message)
        self.message, self.fix, self.key = message, fix, key

    def __reduce__(self) -> tuple[Any, ...]:  # a subclass may have parameters of its own
        return _restore, (type(self), self.args, vars(self))

    def at(self, place: str) -> Self:
        """The same error as one line with `place`, such as a row, before its message."""
        line, message = (" ".join(f"{place}: {each}".split()) for each in (self, self.message))
        return _restore(type(self), (line,), vars(self) | {"message": message})


def _restore(kind: type[E], args: tuple[Any, ...], state: dict[str, Any]) -> E:
    error = kind.__new__(kind, *args)
    vars(error).update(state)
    return error


class ConfigError(EtudeError):
    """A configuration key or file is wrong; names the key or file."""


class ConfigErrors(ConfigError):
    """Several settings are wrong (`faults`); one line each, so that all can be fixed at once."""

    def __init__(self, faults: Sequence[ConfigError]) -> None:
        super().__init__("\n".join([f"{len(faults)} settings are invalid:", *map(str, faults)]))
        self.faults = tuple(faults)


def raise_faults(faults: Iterable[ConfigError]) -> None:
    """Raises if there are faults: a single line for one fault, a list for several.

    Raises:
        ConfigError: there are faults.
    """
    if found := [each for fault in faults for each in (fault.faults if isinstance(fault, ConfigErrors) else [fault])]:
        raise ConfigErrors(found) if len(found) > 1 else found[0]


class GrammarError(ConfigError):
    """A grammar cannot constrain what is sampled: it is invalid, too complex, or not supported; says why."""


class DataError(EtudeError):
    """A data file or one of its rows is wrong; names the file and the row."""


class CheckpointError(EtudeError):
    """A checkpoint cannot be written or read; names the folder."""


class MissingExtraError(EtudeError):
    """An optional dependency is not installed; names the pip line to run."""

    def __init__(self, feature: str, extra: str) -> None:
        super().__init__(f"{feature} needs an optional dependency", fix=f"run  {pip_install(f'etude[{extra}]')}")


def pip_install(what: str) -> str:
    """The command that installs `what` into the environment of this process, whose pip may not be the one on the PATH."""
    folder, pip = os.path.dirname(sys.executable), shutil.which("pip")
    if pip and os.path.dirname(pip) == folder:
        return f"pip install '{what}'"
    python = os.path.relpath(sys.executable)
    python = sys.executable if python.startswith("..") else python
    if importlib.util.find_spec("pip") is None:  # an environment made by uv
        return f"uv pip install '{what}' --python {python}"
    return f"{python} -m pip install '{what}'"


class ToolError(Exception):
    """Raised by a tool to report an error to the model: the message becomes the tool response."""


class InfrastructureError(Exception):
    """Something outside the model failed (a server, a sandbox, an engine): retried, then dropped, never rewarded."""


class Unjudged(InfrastructureError):
    """One answer of a group has no score while others have: dropped and counted at once, for a retry would be alone."""


class AgentError(Exception):
    """A user's agent failed and left its rollout without a reward: not retried, dropped and counted, never rewarded."""


class EngineError(InfrastructureError):
    """The inference engine died, or refused a request for a reason other than the model's output."""


class Stalled(InfrastructureError):
    """No progress for `trainer.stall_timeout`."""


class WorkerLost(EtudeError, InfrastructureError):
    """A worker's process died, does not answer or hangs; names its role, rank, node and last log lines. Its group is
    unusable: the run restarts its workers from the last checkpoint, or ends (`trainer.max_restarts`)."""


class MemoryExhausted(EtudeError):
    """A process of the run ran out of memory."""


class TrainingStopped(EtudeError):
    """The run ended early on purpose (too few valid trajectories, Ctrl-C); the last checkpoint has its progress."""


_BROKEN = (TimeoutError, asyncio.TimeoutError, ConnectionError, OSError)
_OURS = (EtudeError, ToolError, AgentError)
_CONNECTION_CLASSES = frozenset(
    {
        "NetworkError",  # httpx, as are the next three
        "ProxyError",
        "RemoteProtocolError",
        "TimeoutException",
        "ClientConnectionError",  # aiohttp
        "ClientPayloadError",
        "APIConnectionError",  # openai, anthropic
    }
)
"""Exceptions of HTTP clients that do not derive from `ConnectionError`; matched by name, so that no client is imported."""
_SERVER_FAULTS = (408, 429)


def is_infrastructure(error: BaseException) -> bool:
    """Whether `error` is an infrastructure failure rather than the model's mistake."""
    if isinstance(error, (InfrastructureError, *_OURS)):
        return isinstance(error, InfrastructureError)
    status = http_status(error)
    if status is not None and status >= 400:  # some clients derive all HTTP errors from OSError
        return status >= 500 or status in _SERVER_FAULTS
    return isinstance(error, _BROKEN) or any(each.__name__ in _CONNECTION_CLASSES for each in type(error).__mro__)


def is_out_of_memory(error: BaseException) -> bool:
    """Whether Python, or torch on a CPU or GPU, could not allocate memory; works without importing torch."""
    return (
        isinstance(error, MemoryError)
        or type(error).__name__ == "OutOfMemoryError"
        or "can't allocate memory" in str(error)  # torch's CPU allocator raises a RuntimeError
    )


def http_status(error: BaseException) -> int | None:
    """The HTTP status of the response that caused `error`, if its client reports one: aiohttp, httpx, openai, requests …"""
    for holder in (error, getattr(error, "response", None)):
        for name in ("status_code", "status"):
            status = getattr(holder, name, None)
            if isinstance(status, int) and 100 <= status < 600:
                return status
    return None


def retry_after(error: BaseException) -> float:
    """The seconds to wait that the service which caused `error` asked for, if its client reports them; else 0.0."""
    for holder in (error, getattr(error, "response", None)):
        if isinstance(asked := getattr(holder, "retry_after", None), int | float):
            return asked
        header = getattr(getattr(holder, "headers", None), "get", None)
        if callable(header) and isinstance(asked := header("Retry-After"), str):
            return seconds_of(asked)
    return 0.0


def seconds_of(retry_after: str) -> float:
    """Returns the seconds to wait that a `Retry-After` header asks for, as a number or a date; 0.0 if it is neither."""
    if retry_after.strip().isdecimal():
        return float(retry_after.strip()[:9])
    try:
        date = parsedate_to_datetime(retry_after)
    except ValueError:
        return 0.0
    return max(0.0, date.timestamp() - time.time())


def one_line(error: BaseException, limit: int = 300) -> str:
    """Formats `error` as a single line of at most `limit` characters, for logs and for messages to the model."""
    text = " ".join(str(error).split()) or type(error).__name__
    return text if len(text) <= limit else text[: limit - 1] + "…"


def plural(count: int, noun: str) -> str:
    """`count` with its noun, such as `1 turn` and `2,000 turns`."""
    return f"{count:,} {noun}{'' if count == 1 else 's'}"


def describe_error(error: BaseException) -> str:
    """Formats type, message and, if any, the line of the user's file that raised: `KeyError: 'answer' (reward.py:12)`."""
    kind = "" if isinstance(error, InfrastructureError | AgentError) else f"{type(error).__name__}: "
    text, place = f"{kind}{one_line(error)}", user_place(error)
    return text if place is None or place in text else f"{text} ({place})"


def user_place(error: BaseException) -> str | None:
    """`path:line` of the innermost frame in the user's own code, in the earliest cause that has one; a cause from another
    process carries it as `place`."""
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
    """The path of one of the user's files, relative if below the working directory; None for any other file."""
    path = os.path.realpath(name)
    roots = [Path(sysconfig.get_paths()[which]) for which in ("stdlib", "platstdlib", "purelib", "platlib")]
    if not os.path.isfile(path) or any(root in Path(path).parents for root in (*roots, Path(__file__).parent)):
        return None
    relative = os.path.relpath(path)
    return path if relative.startswith("..") else relative


def debugging() -> bool:
    """Whether `ETUDE_DEBUG` requests full tracebacks."""
    return os.environ.get("ETUDE_DEBUG", "") not in ("", "0")
