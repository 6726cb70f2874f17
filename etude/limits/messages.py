"""What a holder of permits (a process) and the keeper of a limit say to each other: plain data.

Invariant: both directions are numbered, so that a message that is lost can be sent again and one that arrives twice
counts once. A holder's turns count from 1; the keeper's events for that holder count from 1; each side names the last
one it has heard.
"""

from __future__ import annotations

from dataclasses import dataclass

LeaseId = str
"""Unique for all time: the keeper's own id and a number."""


@dataclass(frozen=True)
class Turn:
    """All that a holder had to say at one moment. Every turn renews all leases of its owner."""

    owner: str
    number: int
    heard: int
    """Number of the last event that was heard."""
    requests: tuple[int, ...] = ()
    """New waiters, in order."""
    cancels: tuple[int, ...] = ()
    """Requests that no longer wait, whether cancelled or served by a lease that the holder had."""
    releases: tuple[tuple[LeaseId, bool], ...] = ()
    """Leases that return, each with whether it was never used."""
    adopt: tuple[LeaseId, ...] = ()
    """Only in a first turn: leases of an earlier keeper of this limit that are still in force."""
    leaves: bool = False
    """The last turn: whatever the owner holds returns now."""


@dataclass(frozen=True)
class Grant:
    """A lease for `request`, or for no request in particular (one of a batch)."""

    number: int
    request: int | None
    lease: LeaseId


@dataclass(frozen=True)
class Crowded:
    """Whether other holders wait: while they do, leases return to the keeper as soon as they are free."""

    number: int
    crowded: bool


@dataclass(frozen=True)
class Refused:
    """A lease offered for adoption is not in force."""

    number: int
    lease: LeaseId


Event = Grant | Crowded | Refused


@dataclass(frozen=True)
class Reply:
    """The events that the owner has not heard yet."""

    keeper: str
    """Changes when the keeper lost its memory."""
    owner: str
    known: bool
    """False: the owner's leases have expired, or the keeper never heard of it. It must begin again under a new name."""
    events: tuple[Event, ...] = ()
