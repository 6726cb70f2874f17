"""Sandbox requests, results, limits and errors: data that validates its own fields, without other behaviour.

Invariant: a `RunResult` or `CellResult` always describes what the *code* did. If the sandbox itself fails, `SandboxError` is
raised instead, an `InfrastructureError`, so a broken sandbox never counts as a wrong answer. Paths in `files` and
`fetch_files` are relative to the work directory; a request with any other path cannot be constructed.
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
MAX_ARGS_BYTES = 1_000_000  # Linux: a quarter of the stack limit, including environment and pointers
_ARG_OVERHEAD = 9  # a pointer and the terminating NUL


class SandboxError(InfrastructureError):
    """The sandbox failed, not the code in it: the run is retried, then dropped, never scored."""


class SandboxRequestError(EtudeError, ValueError):
    """An invalid request (a path outside the work directory, a limit of 0); names the field."""


class SandboxUnavailableError(EtudeError):
    """No isolation mode holds its guarantees on this machine; the message says what failed and what to install."""


class ContainerLostError(SandboxError):
    """A container vanished without a report while code ran in it: presumably killed from outside."""


class SessionClosedError(SandboxError):
    """The session was closed while its cell ran, by its owner or with the whole sandbox."""


class UnknownSessionError(EtudeError, KeyError):
    """There is no session with this id: it never existed, was closed, expired, or died with its interpreter."""

    __str__ = EtudeError.__str__


class Language(str, Enum):
    """The language of the code."""

    PYTHON = "python"
    BASH = "bash"
    JAVASCRIPT = "javascript"
    C = "c"
    CPP = "cpp"
    PYTEST = "pytest"
    """Python code whose tests are run by pytest."""

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
    """The first of `BUBBLEWRAP` and `NAMESPACES` whose guarantees hold on this machine."""
    BUBBLEWRAP = "bubblewrap"
    NAMESPACES = "namespaces"
    """Linux namespaces, seccomp and Landlock, set up by the interpreter without any other program."""
    NONE = "none"
    """No isolation; must be requested explicitly."""


class RunStatus(str, Enum):
    """How a run ended."""

    FINISHED = "finished"
    """The program exited or was killed by a signal; `return_code` says which."""
    TIME_LIMIT = "time_limit"
    """The program exceeded its wall or CPU time and was killed."""
    MEMORY_LIMIT = "memory_limit"
    """All processes together used more than `memory_mb`, and the program was killed."""
    COMPILE_FAILED = "compile_failed"
    """The program was not started; `RunResult.compile` says why."""
    KILLED = "killed"
    """The program killed its own supervisor (only code that attacks the sandbox does)."""


@dataclass(frozen=True)
class Limits:
    """Resource limits of one run, or of a whole session.

    Raises:
        SandboxRequestError: a limit is not positive.
    """

    wall_seconds: float = 30.0
    """Wall-clock seconds of a run, without compilation; in a session, of a cell."""
    cpu_seconds: float = 60.0
    """CPU seconds of all processes together; in a session, over its whole life."""
    memory_mb: int = 1024
    """MiB of resident memory of all processes together; also the address space of each process (except for JavaScript)."""
    processes: int = 64
    """Processes and threads alive at once."""
    file_size_mb: int = 64
    """MiB per file."""
    disk_mb: int = 256
    """MiB of all files together: work directory, /tmp and /dev/shm."""
    open_files: int = 256
    """File descriptors per process."""
    output_bytes: int = 1 << 20
    """Bytes kept of stdout and of stderr each: half from the start, half from the end; the middle is truncated."""

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if not value > 0 or value == float("inf"):
                raise SandboxRequestError(f"limits.{name} must be positive and finite, not {value}")


@dataclass(frozen=True)
class RunRequest:
    """A program to run from a fresh state.

    Raises:
        SandboxRequestError: a path is absolute, leaves the work directory or is not a file name.
    """

    code: str
    language: Language = Language.PYTHON
    stdin: str | None = None
    """Text on standard input; None and "" both mean empty."""
    files: Mapping[str, bytes] = field(default_factory=dict)
    """Path → content, written into the work directory before the run."""
    fetch_files: Sequence[str] = ()
    """Paths to read back after the run; missing files are omitted from the result."""
    args: Sequence[str] = ()
    """Command-line arguments of the program."""
    compile_seconds: float = 10.0
    """Wall-clock limit of the compiler, if any."""
    limits: Limits = field(default_factory=Limits)

    def __post_init__(self) -> None:
        if not self.compile_seconds > 0:
            raise SandboxRequestError(f"compile_seconds must be positive, not {self.compile_seconds}")
        object.__setattr__(self, "language", Language(self.language))
        object.__setattr__(self, "files", check_files(self.files))
        object.__setattr__(self, "fetch_files", check_paths("fetch_files", self.fetch_files))
        _check_args(self.args)


@dataclass(frozen=True)
class CommandRequest(RunRequest):
    """A program with its words, instead of code."""

    code: str = ""
    command: Sequence[str] = ()
    """Its name, found in the sandbox, and its arguments."""
    environment: Mapping[str, str] = field(default_factory=dict)
    """Variables of this program alone."""
    folder: bytes | None = None
    """The work directory, an archive of `etude.sandbox.guest.files.pack`; `RunResult.folder` is then what became of it."""
    port: int | None = None
    """TCP port of this machine's 127.0.0.1 that the program reaches under the same address; None: it reaches nothing."""

    def __post_init__(self) -> None:
        super().__post_init__()
        _check_args(self.command)


@dataclass(frozen=True)
class RunResult:
    """The result of a run, or of its compiler. Output is decoded as UTF-8, with undecodable bytes replaced."""

    status: RunStatus
    return_code: int | None
    """0 to 255, or minus the signal number; None if the program was killed at a limit or never started."""
    stdout: str
    stderr: str
    stdout_truncated: bool = False
    stderr_truncated: bool = False
    wall_seconds: float = 0.0
    cpu_seconds: float = 0.0
    """CPU time of all processes that the program waited for and those alive at its end."""
    compile: RunResult | None = None
    """The compiler's result; None for languages that are not compiled."""
    files: Mapping[str, bytes] = field(default_factory=lambda: MappingProxyType({}))
    """Path → content of the `fetch_files` that existed as regular files after the run."""
    refused_files: Mapping[str, str] = field(default_factory=lambda: MappingProxyType({}))
    """Path → reason for the `fetch_files` that existed but were not read: a link, a pipe, too large."""
    folder: bytes | None = None
    """An archive of the work directory of a `CommandRequest` with a `folder`; None if it is too large or was lost."""


@dataclass(frozen=True)
class CellError:
    """The exception that ended a cell."""

    name: str
    """The exception's class name, such as `ZeroDivisionError`."""
    value: str
    traceback: str
    """The traceback as the interpreter prints it, with the cell's source lines."""


@dataclass(frozen=True)
class CellResult:
    """The result of one cell of a session."""

    status: RunStatus
    stdout: str
    stderr: str
    text: str | None = None
    """`repr` of the last expression's value; None if the cell does not end in an expression, or its value is None."""
    images: Sequence[bytes] = ()
    """PNG files in display order: values with `_repr_png_` and open matplotlib figures."""
    error: CellError | None = None
    stdout_truncated: bool = False
    stderr_truncated: bool = False
    wall_seconds: float = 0.0
    session_alive: bool = True
    """False if the interpreter ended or was killed: its variables are lost, and the session is closed."""


def _check_args(args: Sequence[str]) -> None:
    """Rejects arguments that the kernel would reject, so that they do not look like a sandbox failure."""
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
    """Normalises `path`, which is relative to the work directory.

    Raises:
        SandboxRequestError: `path` is absolute, leaves the work directory, or does not name a file.
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
    """Validates each path by `check_path`; returns them unchanged and in order, without duplicates."""
    if isinstance(paths, str) or len(paths) > MAX_FILES:
        raise SandboxRequestError(f"{field_name} must be a list of at most {MAX_FILES} paths")
    for path in paths:
        check_path(field_name, path)
    return tuple(dict.fromkeys(paths))


def check_files(files: Mapping[str, bytes]) -> Mapping[str, bytes]:
    """Returns a read-only copy of `files` with normalised paths.

    Raises:
        SandboxRequestError: an invalid path, two paths to one file, a file that is also a directory, content that is not
            bytes, or too many files.
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
