"""Injected faults, so that a model learns to cope with them and tests are reproducible.

Invariant: whether and how a call fails depends only on the seed, the tool, the trajectory and the call's place in it,
never on the clock or concurrent work; each retry draws again.
"""

from __future__ import annotations

import random
from enum import Enum
from typing import NamedTuple

from etude.seeds import chance
from etude.tools.options import FaultPolicy


class CallPlace(NamedTuple):
    """Where a call stands: `number` counts the calls of this tool in the trajectory from 0."""

    tool: str
    trajectory: str
    turn: int
    number: int

    def chance(self, *salt: object) -> float:
        """A number in [0, 1) determined by the place and `salt`."""
        return chance("\0".join(map(str, (*salt, self.tool, self.trajectory, self.turn, self.number))))


class Fault(Enum):
    """What goes wrong."""

    TIMEOUT = "timeout"  # no answer in time: an infrastructure failure
    ERROR = "error"  # the tool raises: see `config.on_exception`
    GARBAGE = "garbage"  # the tool runs, and its text is replaced by garbage


class InjectedError(Exception):
    """The exception of an injected error."""


def draw(policy: FaultPolicy, place: CallPlace, attempt: int) -> Fault | None:
    """The fault of this attempt, if any."""
    left = place.chance("fault", policy.seed, attempt)
    for fault, share in ((Fault.TIMEOUT, policy.timeout), (Fault.ERROR, policy.error), (Fault.GARBAGE, policy.garbage)):
        if left < share:
            return fault
        left -= share
    return None


def garbage(policy: FaultPolicy, place: CallPlace) -> str:
    """Up to 400 characters of garbage, including control characters, brackets and tags."""
    source = random.Random(f"{policy.seed} {place}")
    pieces = ["\x00", "\ufffd", "{", "}", "[", '"', "<", "</", ">", "\n", "é", "漢", "🙂", *map(chr, range(32, 127))]
    return "".join(source.choices(pieces, k=source.randint(0, 400)))[:400]
