"""Scores finished rollouts: `score_rollout` adds retries and a timeout, `TrajectoryScorer` calls the reward manager. A
rollout is scored as soon as it ends, or with its whole batch (`rollout.mode=sync`).

Invariant: afterwards the main trajectory has its score, or infrastructure failed and the rollout is dropped; a failing
scorer never yields a score. The manager sees exactly the trajectory's token ids and mask, unpadded, and a copy of the
row's `extra_info`; the row itself is never changed. Combining the score with tool rewards is left to the caller.
"""

from __future__ import annotations

import asyncio
import copy
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from etude.errors import EtudeError, InfrastructureError, Unjudged, describe_error, is_infrastructure
from etude.rewards import usage
from etude.rewards.finite import as_score
from etude.rewards.manager import AbstractRewardManager, RewardManagerBase, RewardResult
from etude.rewards.view import TrajectoryView
from etude.timeouts import BlockingCalls, called, result_of
from etude.trajectory import Rollout, StopReason, Trajectory, plain_numbers

if TYPE_CHECKING:
    from etude.protocol import DataProto

_batch_managers = BlockingCalls("etude-reward-manager", limit=4)


_SCORED = ("data_source", "reward_model", "extra_info")  # what of a row a reward manager gets
TIMEOUT_KEY = "rollout.trajectory_timeout"  # limits a trajectory, and its scoring
AsyncScorer = Callable[[Trajectory, Mapping[str, Any]], Awaitable[None]]


async def score_rollout(
    rollout: Rollout,
    row: Mapping[str, Any],
    scorer: AsyncScorer,
    *,
    retries: int,
    timeout: float,
    on_failure: Callable[[str, InfrastructureError], None],
) -> None:
    """Scores the main trajectory, if there is one, with up to `retries` retries; each attempt times out after `timeout`
    seconds.

    Each infrastructure failure is counted and reported to `on_failure(request_id, error)`; after the last attempt, or one
    that ends as `Unjudged`, the rollout is dropped. Records `timings["compute_score"]`, in seconds.

    Raises:
        Exception: the scorer failed for a reason that is not infrastructure.
    """
    trajectory = rollout.trajectory
    if trajectory is None:
        return
    for _ in range(retries + 1):
        started = time.perf_counter()
        try:
            with usage.counting(rollout.judge_usage):
                scoring = asyncio.ensure_future(called(scorer, trajectory, row))
                await result_of(scoring, timeout, key=TIMEOUT_KEY)
        except Exception as error:
            if not is_infrastructure(error):
                raise
            rollout.failures += 1
            failure = InfrastructureError(f"scoring: {describe_error(error)}")
            failure.__cause__ = error
            rollout.cause = describe_error(failure)
            on_failure(trajectory.request_id, failure)
            if isinstance(error, Unjudged):
                break
            continue
        trajectory.add_time("compute_score", time.perf_counter() - started)
        return
    rollout.drop(StopReason.INFRASTRUCTURE)


class TrajectoryScorer:
    """Async callable `scorer(trajectory, row)`; safe to share between trajectories."""

    def __init__(self, manager: AbstractRewardManager, components: Sequence[str] = ()) -> None:
        """`components`: further numbers of a score's details that are trained on."""
        self._manager, self._numbers = manager, ("acc", *components)

    async def __call__(self, trajectory: Trajectory, row: Mapping[str, Any]) -> None:
        """Sets `trajectory.rewards.score` and `.score_info`.

        Raises:
            EtudeError: the manager reported an error that the user must fix.
            InfrastructureError: the manager failed otherwise, or returned no finite number; the trajectory is unchanged.
        """
        data = one_row(trajectory, row)
        where = f"the reward manager {type(self._manager).__name__}"
        try:
            result = await self._run(data)
            value = result["reward_score"]
        except (EtudeError, InfrastructureError):
            raise
        except Exception as error:
            raise InfrastructureError(f"{where} failed: {describe_error(error)}") from error
        if value is None:
            raise InfrastructureError(f"{where} returned no score")
        score = as_score(value, where)
        info = plain_numbers(result.get("reward_extra_info") or {})
        for name in self._numbers:
            if info.get(name) is not None:
                as_score(info[name], f"{where}, as {name},")
        trajectory.rewards.score_info, trajectory.rewards.score = info, score

    async def _run(self, data: DataProto) -> RewardResult:
        if isinstance(self._manager, RewardManagerBase):
            return await self._manager.run_single(data)
        return await _batch_managers.run(_batch_result, self._manager, data)


def one_row(trajectory: Trajectory, row: Mapping[str, Any]) -> DataProto:
    """Converts the trajectory to a batch of one row.

    Tensors: prompts (1, prompt_len), responses and response_mask (1, response_len), attention_mask (1, both). The row's
    `extra_info` gains `num_turns`, `tool_rewards` (every step reward, in order), `turn_scores` (their sum per assistant
    turn), `rollout_reward_scores` (tool → its `calc_reward`), and then the loop's `extra_fields`.
    """
    rewards, row = trajectory.rewards, copy.deepcopy({name: row.get(name) for name in _SCORED})
    objects = {
        "data_source": row["data_source"],
        "reward_model": row["reward_model"],
        "extra_info": scored_extra_info(trajectory, row),
        "messages": trajectory.messages,
        "reward_scores": dict(rewards.final),
        "__num_turns__": trajectory.num_turns,
        "trajectory": TrajectoryView.of(trajectory),
    }
    return to_row(trajectory, objects)


def to_row(trajectory: Trajectory, objects: Mapping[str, Any]) -> DataProto:
    """Makes a batch of one row of a trajectory's tensors (see `one_row`) and the object columns `objects`."""
    import torch  # imported lazily: `etude.tools` imports this package and needs no torch

    from etude.protocol import DataProto

    prompt, response = trajectory.prompt_ids, trajectory.response_ids
    columns = {
        "prompts": prompt,
        "responses": response,
        "response_mask": trajectory.response_mask,
        "attention_mask": [1] * (len(prompt) + len(response)),
    }
    tensors = {name: torch.tensor([values], dtype=torch.long) for name, values in columns.items()}
    return DataProto.from_dict(tensors=tensors, non_tensors={key: [value] for key, value in objects.items()})


def scored_extra_info(trajectory: Trajectory, row: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the row's `extra_info` with the entries that `one_row` adds."""
    rewards = trajectory.rewards
    turn_scores = [0.0] * max(trajectory.assistant_turns, *(turn + 1 for turn, _, _ in rewards.steps), 0)
    for turn, _, value in rewards.steps:
        turn_scores[turn] += value
    return dict(row.get("extra_info") or {}) | {
        "num_turns": trajectory.num_turns,
        "tool_rewards": [value for _, _, value in rewards.steps],
        "turn_scores": turn_scores,
        "rollout_reward_scores": dict(rewards.final),
        **trajectory.extra_fields,
    }


def duplicate_judge(row: Mapping[str, Any], tools_kwargs: Mapping[str, Mapping[str, Any] | None] | None) -> bool:
    """Whether a tool of the row is created with the same `ground_truth` that the reward manager scores against, or its
    interaction is.

    If so, a right answer is rewarded twice: worth a warning when the manager's score is enabled.
    """
    judged = _plain((row.get("reward_model") or {}).get("ground_truth"))
    if judged is None:
        return False
    given = [(kwargs or {}).get("create_kwargs") or {} for kwargs in (tools_kwargs or {}).values()]
    given.append(row.get("interaction_kwargs") or {})
    return any(_plain(kwargs.get("ground_truth")) == judged for kwargs in given)


def _batch_result(manager: AbstractRewardManager, data: DataProto) -> RewardResult:
    returned = manager(data, return_dict=True)
    if not isinstance(returned, Mapping):  # only the tensor
        return {"reward_score": float(returned.sum()), "reward_extra_info": {}}
    info = {key: values[0] for key, values in (returned.get("reward_extra_info") or {}).items() if len(values)}
    return {"reward_score": float(returned["reward_tensor"].sum()), "reward_extra_info": info}


def _plain(value: object) -> object:
    return value.tolist() if isinstance(value, np.ndarray) else value
