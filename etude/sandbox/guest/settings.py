"""The settings that the host starts a fork server with, and the paths inside the jail.

Invariant: the same for every run of one fork server; what differs between runs travels with the run. Nothing here is secret.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass

BOX = "/box"
"""Where a run's own tmpfs is mounted; its folders are bound to the three below, so that they share one size limit."""
WORK = "/sandbox"
TMP = "/tmp"
SHM = "/dev/shm"
GUEST = "/opt/etude"
"""Contains the folder of these modules, and those of third-party packages."""

PROGRAM_ID = 1000
"""User and group id that a program sees as its own."""


@dataclass(frozen=True)
class Settings:
    """The settings of a fork server and all its runs."""

    isolated: bool
    """False only for `isolation: none`: no namespace, no filter, the host's own file system."""
    scratch: str
    """Where runs without isolation make their folders; empty with it."""
    search_path: tuple[str, ...]
    """Appended to `sys.path` of Python programs: third-party libraries."""
    environment: dict[str, str]
    """The whole environment of every program."""

    def encode(self) -> str:
        """As one command-line argument."""
        return json.dumps(asdict(self))

    @classmethod
    def decode(cls, text: str) -> Settings:
        """The reverse of `encode`."""
        values = json.loads(text)
        return cls(**{**values, "search_path": tuple(values["search_path"])})
