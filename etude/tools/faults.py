"""Fault injection, so that a model learns to cope with failing tools; reproducible, for tests.

Invariant: whether and how a call fails depends only on the seed, the tool, the trajectory, the call's place in it and the
attempt (each retry draws again), never on the clock or concurrent work.
"""

from __future__ import annotations

import random
from enum import Enum
from typing import NamedTuple

from etude.seeds import chance
from etude.tools.options import FaultPolicy


class CallPlace(NamedTuple):
    """The position of a call: `number` counts the calls of this tool in the trajectory from 0."""

    tool: str
    trajectory: str
    turn: int
    number: int

    def chance(self, *salt: object) -> float:
        """Returns a pseudo-random number in [0, 1), determined by the place and `salt`."""
        return chance("\0".join(map(str, (*salt, self.tool, self.trajectory, self.turn, self.number))))


class Fault(Enum):
    """The kinds of injected faults."""

    TIMEOUT = "timeout"  # no answer in time: an infrastructure failure
    ERROR = "error"  # the tool raises: see `config.on_exception`
    GARBAGE = "garbage"  # the tool runs, and its text is replaced by garbage


class InjectedError(Exception):
    """Raised for an injected `Fault.ERROR`."""


def draw(policy: FaultPolicy, place: CallPlace, attempt: int) -> Fault | None:
    """Draws the fault of this attempt; None for no fault."""
    left = place.chance("fault", policy.seed, attempt)
    for fault, share in ((Fault.TIMEOUT, policy.timeout), (Fault.ERROR, policy.error), (Fault.GARBAGE, policy.garbage)):
        if left < share:
            return fault
        left -= share
    return None


def garbage(policy: FaultPolicy, place: CallPlace) -> str:
    """Returns up to 400 characters of garbage, including control characters, brackets and parts of tags."""
    source = random.Random(f"{policy.seed} {place}")
    pieces = ["\x00", "\ufffd", "{", "}", "[", '"', "<", "</", ">", "\n", "é", "漢", "🙂", *map(chr, range(32, 127))]
    return "".join(source.choices(pieces, k=source.randint(0, 400)))[:400]
