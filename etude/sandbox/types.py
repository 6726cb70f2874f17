"""The requests and results of a sandbox: data with validation of its own fields, no other behaviour.

Invariant: a `RunResult` or `CellResult` always describes what the *code* did. When the sandbox itself fails there is no
result: `SandboxError` is raised, which is an `InfrastructureError`, so that a broken sandbox is never a wrong answer.
Paths in `files` and `fetch_files` are relative to the work directory, and a request with any other path cannot be made.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from pathlib import PurePosixPath
from types import MappingProxyType

from etude.errors import EtudeError, InfrastructureError

MAX_PATH_BYTES = 1024
MAX_FILES = 1000
MAX_ARG_BYTES = 100_000  # Linux: 131,072
MAX_ARGS_BYTES = 1_000_000  # Linux: a quarter of the stack's limit, environment and pointers included
_ARG_OVERHEAD = 9  # a pointer and the final NUL


class SandboxError(InfrastructureError):
    """The sandbox failed, not the code in it: retried, then dropped, never scored."""


class SandboxRequestError(EtudeError, ValueError):
    """An invalid request (a path outside the work directory, a limit of 0); names the field."""


class SandboxUnavailableError(EtudeError):
    """No mode of isolation holds its guarantees on this machine; the message says what failed and what to install."""


class BoxLostError(SandboxError):
    """A box vanished while code ran in it, and nothing in it says why: presumably killed from outside."""


class SessionClosedError(SandboxError):
    """The session was closed, by its owner or with the whole sandbox, while its cell ran."""


class UnknownSessionError(EtudeError, KeyError):
    """There is no session with that id: it never existed, was closed, expired, or died with its interpreter."""

    __str__ = EtudeError.__str__


class Language(str, Enum):
    """The language of the code."""

    PYTHON = "python"
    BASH = "bash"
    JAVASCRIPT = "javascript"
    C = "c"
    CPP = "cpp"
    PYTEST = "pytest"
    """Python whose tests pytest collects and runs."""

    @classmethod
    def _missing_(cls, value: object) -> Language | None:
        return _ALIASES.get(str(value).lower())


_ALIASES = {
    "py": Language.PYTHON,
    "python3": Language.PYTHON,
    "sh": Language.BASH,
    "shell": Language.BASH,
    "js": Language.JAVASCRIPT,
    "node": Language.JAVASCRIPT,
    "nodejs": Language.JAVASCRIPT,
    "c++": Language.CPP,
}


class Isolation(str, Enum):
    """How runs are isolated from the host."""

    AUTO = "auto"
    """The first of `BUBBLEWRAP` and `NAMESPACES` whose guarantees hold here."""
    BUBBLEWRAP = "bubblewrap"
    NAMESPACES = "namespaces"
    """Linux namespaces, seccomp and Landlock, set up without any program but the interpreter."""
    NONE = "none"
    """No isolation at all; must be requested by name."""


class RunStatus(str, Enum):
    """How a run ended."""

    FINISHED = "finished"
    """The program exited or was ended by a signal; `return_code` says which."""
    TIME_LIMIT = "time_limit"
    """Its wall or CPU time ran out, and it was killed."""
    MEMORY_LIMIT = "memory_limit"
    """All its processes together held more than `memory_mb`, and it was killed."""
    COMPILE_FAILED = "compile_failed"
    """It was never started; `RunResult.compile` says why."""
    KILLED = "killed"
    """It killed its own supervisor (only code that attacks the sandbox does)."""


@dataclass(frozen=True)
class Limits:
    """The limits of one run, or of one session as a whole.

    Raises:
        SandboxRequestError: a limit is not positive.
    """

    wall_seconds: float = 30.0
    """Of the run, after compilation; of a cell in a session."""
    cpu_seconds: float = 60.0
    """CPU seconds of all processes together; in a session, over its whole life."""
    memory_mb: int = 1024
    """MiB that all processes together may hold resident; also the address space of each (but for JavaScript)."""
    processes: int = 64
    """Processes and threads alive at once."""
    file_size_mb: int = 64
    """MiB of one file."""
    disk_mb: int = 256
    """MiB of all files together: work directory, /tmp and /dev/shm."""
    open_files: int = 256
    """File descriptors of one process."""
    output_bytes: int = 1 << 20
    """Bytes kept of each of stdout and stderr: the first and the last halves; the rest is read and dropped."""

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if not value > 0 or value == float("inf"):
                raise SandboxRequestError(f"limits.{name} must be positive and finite, not {value}")


@dataclass(frozen=True)
class RunRequest:
    """One program to run from a fresh state.

    Raises:
        SandboxRequestError: a path is absolute, leaves the work directory or is not a file name.
    """

    code: str
    language: Language = Language.PYTHON
    stdin: str | None = None
    """Text on standard input; None and "" both mean empty."""
    files: Mapping[str, bytes] = field(default_factory=dict)
    """Written into the work directory first."""
    fetch_files: Sequence[str] = ()
    """Read back at the end; missing ones are omitted from the result."""
    args: Sequence[str] = ()
    """Command-line arguments of the program."""
    compile_seconds: float = 10.0
    """Wall-time limit of the compiler, if any."""
    limits: Limits = field(default_factory=Limits)

    def __post_init__(self) -> None:
        if not self.compile_seconds > 0:
            raise SandboxRequestError(f"compile_seconds must be positive, not {self.compile_seconds}")
        object.__setattr__(self, "language", Language(self.language))
        object.__setattr__(self, "files", check_files(self.files))
        object.__setattr__(self, "fetch_files", check_paths("fetch_files", self.fetch_files))
        _check_args(self.args)


@dataclass(frozen=True)
class RunResult:
    """The result of a run, or of its compiler. Text is UTF-8 with undecodable bytes replaced."""

    status: RunStatus
    return_code: int | None
    """0 to 255, minus the number of the signal that ended it, or None when it was killed at a limit or never started."""
    stdout: str
    stderr: str
    stdout_truncated: bool = False
    stderr_truncated: bool = False
    wall_seconds: float = 0.0
    cpu_seconds: float = 0.0
    """CPU time of all processes it waited for and those alive at its end."""
    compile: RunResult | None = None
    """None for languages that are not compiled."""
    files: Mapping[str, bytes] = field(default_factory=lambda: MappingProxyType({}))
    """The `fetch_files` that existed as regular files at the end."""
    refused_files: Mapping[str, str] = field(default_factory=lambda: MappingProxyType({}))
    """Why each of the other `fetch_files` that existed was not read: a link, a pipe, too large."""


@dataclass(frozen=True)
class CellError:
    """The exception that ended a cell."""

    name: str
    """Its class, such as `ZeroDivisionError`."""
    value: str
    traceback: str
    """As printed by the interpreter, lines of the cell included."""


@dataclass(frozen=True)
class CellResult:
    """The result of one cell of a session."""

    status: RunStatus
    stdout: str
    stderr: str
    text: str | None = None
    """`repr` of the last expression's value; None when the cell does not end in an expression, or its value is None."""
    images: Sequence[bytes] = ()
    """PNG files, in the order they were shown: values with `_repr_png_` and open matplotlib figures."""
    error: CellError | None = None
    stdout_truncated: bool = False
    stderr_truncated: bool = False
    wall_seconds: float = 0.0
    session_alive: bool = True
    """False when the interpreter had to be killed: its variables are lost, and the session is closed."""


def _check_args(args: Sequence[str]) -> None:
    """Rejects what the kernel would, so that a bad argument never looks like a sandbox failure."""
    total = 0
    for number, arg in enumerate(args):
        try:
            size = len(arg.encode("utf-8"))
        except UnicodeEncodeError as error:
            raise SandboxRequestError(f"args: argument {number} is not valid UTF-8") from error
        if "\0" in arg:
            raise SandboxRequestError(f"args: argument {number} holds a NUL character")
        if size > MAX_ARG_BYTES:
            raise SandboxRequestError(f"args: argument {number} has {size} bytes (at most {MAX_ARG_BYTES})")
        total += size + _ARG_OVERHEAD
    if total > MAX_ARGS_BYTES:
        raise SandboxRequestError(f"args: {len(args)} arguments take {total} bytes together (at most {MAX_ARGS_BYTES})")


def check_path(field_name: str, path: str) -> str:
    """`path` normalised, relative to the work directory.

    Raises:
        SandboxRequestError: it is absolute, leaves the work directory, or names no file.
    """
    if not isinstance(path, str) or not path or "\0" in path or len(path.encode("utf-8", "replace")) > MAX_PATH_BYTES:
        raise SandboxRequestError(f"{field_name}: {str(path)[:80]!r} is not a file name")
    try:
        path.encode("utf-8")
    except UnicodeEncodeError as error:
        raise SandboxRequestError(f"{field_name}: {path[:80]!r} is not valid UTF-8") from error
    pure = PurePosixPath(path)
    if pure.is_absolute():
        raise SandboxRequestError(f"{field_name}: {path!r} is absolute; give a path relative to the work directory")
    if ".." in pure.parts:
        raise SandboxRequestError(f"{field_name}: {path!r} leaves the work directory; '..' is not allowed")
    if not pure.parts or path.endswith("/"):
        raise SandboxRequestError(f"{field_name}: {path!r} names a directory, not a file")
    return str(pure)


def check_paths(field_name: str, paths: Sequence[str]) -> tuple[str, ...]:
    """`paths` unchanged and in order, each validated by `check_path`; without duplicates."""
    if isinstance(paths, str) or len(paths) > MAX_FILES:
        raise SandboxRequestError(f"{field_name} must be a list of at most {MAX_FILES} paths")
    for path in paths:
        check_path(field_name, path)
    return tuple(dict.fromkeys(paths))


def check_files(files: Mapping[str, bytes]) -> Mapping[str, bytes]:
    """`files` with normalised paths, read-only.

    Raises:
        SandboxRequestError: a bad path, two names of one file, a file that is also a directory, or content not bytes.
    """
    if len(files) > MAX_FILES:
        raise SandboxRequestError(f"files: {len(files)} are too many (at most {MAX_FILES})")
    checked: dict[str, bytes] = {}
    for path, content in files.items():
        name = check_path("files", path)
        if name in checked:
            raise SandboxRequestError(f"files: {path!r} names a file that is there already")
        if not isinstance(content, bytes):
            raise SandboxRequestError(f"files: the content of {path!r} must be bytes, not {type(content).__name__}")
        checked[name] = content
    for name in checked:
        for parent in PurePosixPath(name).parents:
            if str(parent) in checked:
                raise SandboxRequestError(f"files: {str(parent)!r} is both a file and a directory")
    return MappingProxyType(checked)
