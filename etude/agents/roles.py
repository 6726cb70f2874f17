"""Roles: which agent of several a sequence of a rollout is of (players, a proposer and its solvers), and its rewards.

A role is a name of `rollout.agent.roles`, or NAME/NUMBER for one of several agents under the same name; "" is none. The last
sequence of a role carries the role's rewards. If only the main sequence has any, they are those of every role.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

from etude.registry import did_you_mean
from etude.trajectory import Trajectory, role_name

_NUMBER = re.compile(r"[0-9]{1,3}")


def check_role(role: object, known: Sequence[str]) -> str:
    """Returns `role` if its name is one of `known`, or if it is "".

    Raises:
        ValueError: it is another; names the known ones.
    """
    if not isinstance(role, str):
        raise ValueError(f"a role is a text, not {role!r:.40}")
    _, slash, number = role.partition("/")
    if role and (role_name(role) not in known or (slash and not _NUMBER.fullmatch(number))):
        there = ", ".join(known) or "none: set actor_rollout_ref.rollout.agent.roles"
        hint = did_you_mean(role_name(role)[:40], known)
        raise ValueError(f"there is no role '{role[:40]}'{hint} (roles: {there}; NAME/NUMBER for one of several)")
    return role


def carriers(sequences: Sequence[Trajectory]) -> dict[str, Trajectory]:
    """The sequence of each role that carries its rewards: the main one, and of other roles the last with sampled tokens."""
    found = {each.role: each for each in sequences if any(each.response_mask)}
    return found | {sequences[-1].role: sequences[-1]}


def unrewarded(sequences: Sequence[Trajectory]) -> list[str]:
    """The roles beside the main sequence's that have no reward."""
    return [role for role, each in carriers(sequences).items() if each is not sequences[-1] and not each.rewards.given]


def have_own_rewards(earlier: Iterable[Trajectory]) -> bool:
    """Whether roles have rewards of their own; `earlier` are the sequences of a rollout before the main one."""
    return any(each.rewards.given for each in earlier)
