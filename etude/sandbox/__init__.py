"""The code sandbox: runs model-written code isolated from the host, limited in time and memory, with milliseconds of
overhead."""

from etude.sandbox.client import SandboxClient
from etude.sandbox.executor import SESSION_LIMITS, Executor, ExecutorOptions
from etude.sandbox.types import (
    CellError,
    CellResult,
    CommandRequest,
    ContainerLostError,
    Isolation,
    Language,
    Limits,
    RunRequest,
    RunResult,
    RunStatus,
    SandboxError,
    SandboxRequestError,
    SandboxUnavailableError,
    SessionClosedError,
    UnknownSessionError,
)

BoxLostError = ContainerLostError
"""The former name, which users' `except` clauses may still have."""

__all__ = [
    "SESSION_LIMITS",
    "BoxLostError",
    "CellError",
    "CellResult",
    "CommandRequest",
    "ContainerLostError",
    "Executor",
    "ExecutorOptions",
    "Isolation",
    "Language",
    "Limits",
    "RunRequest",
    "RunResult",
    "RunStatus",
    "SandboxClient",
    "SandboxError",
    "SandboxRequestError",
    "SandboxUnavailableError",
    "SessionClosedError",
    "UnknownSessionError",
]
