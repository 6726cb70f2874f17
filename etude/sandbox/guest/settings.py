"""The settings with which the host starts a fork server, and the paths inside the jail.

Invariant: settings are the same for every run of one fork server; what differs is in the run's request. None is secret.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass

FILES = "/box"
"""Mount point of a run's tmpfs; its folders are bound to the next three paths, so that these share one size limit."""
WORK = "/sandbox"
TMP = "/tmp"
SHM = "/dev/shm"
GUEST = "/opt/etude"
"""Folder with these modules and the third-party packages."""

PROGRAM_ID = 1000
"""User and group id of a program, as it sees them."""


@dataclass(frozen=True)
class Settings:
    """The settings of a fork server and all its runs."""

    isolated: bool
    """False only for `isolation: none`: no namespaces, no system-call filter, the host's own file system."""
    scratch: str
    """Folder for the folders of runs without isolation; empty with isolation."""
    search_path: tuple[str, ...]
    """Folders of third-party libraries, appended to `sys.path` of Python programs."""
    environment: dict[str, str]
    """The complete environment of every program."""

    def encode(self) -> str:
        """Encodes the settings as one command-line argument."""
        return json.dumps(asdict(self))

    @classmethod
    def decode(cls, text: str) -> Settings:
        """The reverse of `encode`."""
        values = json.loads(text)
        return cls(**{**values, "search_path": tuple(values["search_path"])})
