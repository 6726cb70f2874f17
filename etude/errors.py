"""The failure classes, and the one rule that tells "wrong" from "broken".

Vocabulary
- *The model was wrong*: `ToolError`. The text goes to the model; the trajectory goes on.
- *The world was broken*: `InfrastructureError`, time-outs, connection and operating-system errors. The trajectory is
  retried from fresh state, then dropped and counted. It never becomes a reward.
- *The user must change something*: `ConfigError`, `DataError`, `CheckpointError`, `MissingExtraError`. One line that
  names the file, key or row, printed without a traceback by every command.

Classification lives in `is_infrastructure` and nowhere else.
"""

from __future__ import annotations

import asyncio


class EtudeError(Exception):
    """Base of every error a user is meant to read: its text is one line that names what to change."""

    exit_status = 2
    """Of a command that ends with it."""


class ConfigError(EtudeError):
    """A configuration key or file is wrong; names the key or file."""


class DataError(EtudeError):
    """A data file or one of its rows is wrong; names the file and the row."""


class CheckpointError(EtudeError):
    """A checkpoint cannot be written or read; names the folder."""


class MissingExtraError(EtudeError):
    """An optional dependency is not installed; names the pip line to run."""

    def __init__(self, feature: str, extra: str) -> None:
        super().__init__(f"{feature} needs an optional dependency: run  pip install 'etude[{extra}]'")


class ToolError(Exception):
    """Raised by a tool to tell the model something: the message is the tool's answer."""


class InfrastructureError(Exception):
    """Something outside the model failed (a server, a sandbox, an engine): retried, then dropped, never rewarded."""


class EngineError(InfrastructureError):
    """The inference engine died or refused a request for a reason that is not the model's."""


class TrainingStopped(EtudeError):
    """The run ended early on purpose (too few valid trajectories, Ctrl-C); what was done is in the last checkpoint."""


_INFRASTRUCTURE = (InfrastructureError, TimeoutError, asyncio.TimeoutError, ConnectionError, OSError)


def is_infrastructure(error: BaseException) -> bool:
    """Whether `error` means that the world was broken rather than that the model was wrong."""
    return isinstance(error, _INFRASTRUCTURE)


def one_line(error: BaseException, limit: int = 300) -> str:
    """`error` as a single line of at most `limit` characters, for logs and for messages to the model."""
    text = " ".join(str(error).split()) or type(error).__name__
    return text if len(text) <= limit else text[: limit - 1] + "…"
