"""`environment_score`: a finished trajectory as the one-row `DataProto` that an `Env` scores."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from etude.agents.environments.env import Env
from etude.errors import EtudeError
from etude.protocol import DataProto
from etude.rewards.number import as_reward
from etude.trajectory import Trajectory


def environment_score(env: Env, trajectory: Trajectory, row: Mapping[str, Any], tokenizer: Any) -> float:
    """The last score that `env.compute_score` returns for the trajectory.

    Raises:
        EtudeError: it returns none.
    """
    row = dict(row)
    if env.use_verify_tool:
        row["reward_model"] = _verified(env, trajectory, row, tokenizer)
    data = _one_row(trajectory, row)
    scores = env.compute_score(None, None, tokenizer, data, bool(row.get("validate")), False)
    try:
        return as_reward(scores[0][-1], f"{type(env).__name__}.compute_score")
    except (TypeError, IndexError, KeyError) as error:
        raise EtudeError(f"{type(env).__name__}.compute_score must return a list of scores for each row") from error


def _verified(env: Env, trajectory: Trajectory, row: Mapping[str, Any], tokenizer: Any) -> dict[str, Any]:
    reward_model = dict(row.get("reward_model") or {})
    truth = reward_model.get("ground_truth")
    solution = tokenizer.decode(trajectory.response_ids)
    found = env.verify_tool(str(row.get("data_source")), solution, truth, row.get("extra_info"))
    known = dict(truth) if isinstance(truth, Mapping) else {"target": truth}
    return reward_model | {"ground_truth": known | {"verified_results": found}}


def _one_row(trajectory: Trajectory, row: Mapping[str, Any]) -> DataProto:
    prompts, responses = torch.tensor([trajectory.prompt_ids]), torch.tensor([trajectory.response_ids])
    columns: dict[str, Any] = {
        "prompts": prompts,
        "responses": responses,
        "response_mask": torch.tensor([trajectory.response_mask]),
        "attention_mask": torch.ones(1, prompts.shape[1] + responses.shape[1], dtype=torch.long),
    }
    scores: dict[int, float] = {}
    for turn, _, value in trajectory.rewards.steps:
        scores[turn] = scores.get(turn, 0.0) + value
    for name, value in {**row, "tool_use_scores": [scores[turn] for turn in sorted(scores)]}.items():
        columns[name] = [value]
    return DataProto.from_single_dict(columns)
