"""Scoring a finished rollout: the retries and the time limit around a scorer, the same wherever it runs.

Invariant: afterwards the trajectory has its score, or infrastructure kept it from one and it is dropped; a broken scorer
is never a score. What a score is made of is the scorer's business.
"""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from etude.agents.result import RolloutResult
from etude.bounded import within
from etude.errors import InfrastructureError, describe_error, is_infrastructure, one_line
from etude.trajectory import StopReason, Trajectory

Scorer = Callable[[Trajectory, Mapping[str, Any]], Awaitable[None]]


async def score_result(
    result: RolloutResult,
    row: Mapping[str, Any],
    scorer: Scorer,
    *,
    retries: int,
    timeout: float,
    on_failure: Callable[[str, InfrastructureError], None],
) -> None:
    """Scores `result.trajectory` if there is one, at most `retries` + 1 times `timeout` seconds.

    Each failure of infrastructure is counted and told to `on_failure(request_id, error)`; after the last one the
    trajectory is dropped. Sets `timings["compute_score"]`, in seconds.

    Raises:
        Exception: the scorer failed for a reason that is not infrastructure.
    """
    trajectory = result.trajectory
    if trajectory is None:
        return
    for _ in range(retries + 1):
        started = time.perf_counter()
        try:
            await within(timeout, scorer, trajectory, row)
        except Exception as error:
            if not is_infrastructure(error):
                raise
            result.failures += 1
            failure = InfrastructureError(f"scoring: {describe_error(error)}")
            failure.__cause__ = error
            result.cause = one_line(failure)
            on_failure(trajectory.request_id, failure)
            continue
        trajectory.timings["compute_score"] = time.perf_counter() - started
        return
    result.drop(StopReason.INFRASTRUCTURE)
