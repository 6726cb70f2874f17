"""The reward role: scores finished trajectories, one at a time as they end or in batches."""

from __future__ import annotations

import asyncio
import logging
from typing import Any, cast

from etude.agents.batch import BY_GROUP, place_scores, rows_of
from etude.distributed import Dispatch, register
from etude.errors import ConfigError, InfrastructureError, one_line
from etude.models import is_sequence_classifier
from etude.options import TrainOptions
from etude.protocol import DataProto
from etude.rewards import Scorer, TrajectoryScorer, build_manager, load_compute_score, load_rewards, score_rollout
from etude.rewards.reward_model import LABEL, RewardModel
from etude.rewards.user_functions import user_function
from etude.timeouts import gather
from etude.trajectory import Rollout
from etude.workers.generative import GenerativeRewardModel
from etude.workers.role import HERE, Placement, RoleWorker, user_config

logger = logging.getLogger(__name__)


def open_reward_model(options: TrainOptions, device: Any) -> RewardModel | GenerativeRewardModel | None:
    """Opens the model of `reward_model.model.path`, without loading its weights yet; None if there is no path.

    Raises:
        ConfigError: the folder, its tokenizer or its chat template is missing or broken.
    """
    reward, path = options.reward_model, options.reward_model.model.path
    if path is None:
        return None
    given: dict[str, Any] = {
        "dtype": options.model.dtype_on(str(device)),
        "device": device,
        "trust_remote_code": options.model.trust_remote_code,
    }
    if is_sequence_classifier(path):
        # With one row per batch, a conversation's score does not depend on which others end at the same time.
        rows = 1 if options.trainer.deterministic else reward.micro_batch_size_per_gpu
        return RewardModel(path, rows=rows, max_length=reward.max_length, **given)
    return GenerativeRewardModel(
        path, response_length=reward.response_length, deterministic=options.trainer.deterministic, **given
    )


def build_scorer(options: TrainOptions, tokenizer: Any, model: Any = None) -> TrajectoryScorer | None:
    """Builds the configured scorer, with the `model` that `open_reward_model` opened; None if `reward_model.enable=false`.

    Raises:
        ConfigError: the reward manager is unknown or cannot be built, a custom function cannot be loaded, or nothing uses a
            generative reward model.
    """
    if not options.scores:
        return None
    function = _scorer(options, model)
    manager = build_manager(
        options.reward_model.reward_manager,
        config=user_config(options),
        tokenizer=tokenizer,
        compute_score=function,
        reward_kwargs=options.reward_model.reward_kwargs,
        score_text=options.reward_model.score_text,
    )
    return TrajectoryScorer(manager, options.algorithm.gdpo_reward_keys)


def _scorer(options: TrainOptions, model: Any) -> Scorer | None:
    """Combines the user's functions and a discriminative reward model; None: the built-in scorers."""
    custom = options.custom_reward_function
    offered = {"reward_model": model} if isinstance(model, GenerativeRewardModel) else {}
    function: Any = None
    if isinstance(model, RewardModel):
        own = {"path": custom.path, "name": custom.name, "reward_kwargs": custom.reward_kwargs}
        entries = custom.rewards or ((own,) if custom.path else ())
        return load_rewards(entries, further=[(LABEL, options.reward_model.model.weight, model)])
    if custom.rewards:
        function = load_rewards(custom.rewards, offered)
    elif custom.path:
        function = load_compute_score(custom.path, custom.name, dict(custom.reward_kwargs), offered=offered)
    if offered and not getattr(user_function(function), "taken", None):
        raise ConfigError(
            f"reward_model.model.path={options.reward_model.model.path} is a language model, and nothing asks it: write "
            "custom_reward_function.path=etude.rewards.judge, or a function of yours with an argument reward_model"
        )
    return cast("Scorer | None", function)


class RewardWorker(RoleWorker):
    """Scores batches, for lock-step rollouts (`rollout.mode=sync`) and for re-scoring."""

    def __init__(self, options: TrainOptions, placement: Placement = HERE, **place: Any) -> None:
        super().__init__(options, placement, **place)
        self._model = open_reward_model(options, self.device) if options.scores else None
        self._scorer = build_scorer(options, self.tokenizer, self._model)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def init_model(self) -> None:
        """Loads the reward model, if there is one.

        Raises:
            ConfigError: its weights are missing or broken.
        """
        if self._model is not None:
            self._model.load()

    @register(dispatch_mode=BY_GROUP)
    def compute_scores(self, data: DataProto) -> DataProto:
        """Scores the trajectories in the column `rollout`, replacing earlier scores; returns that column, and the rewards in
        `token_level_scores` (rows, response_len), as wide as `response_mask`."""
        rollouts: list[Rollout] = data.non_tensor_batch["rollout"].tolist()
        rows = rows_of(data)
        if (scorer := self._scorer) is not None:
            retries, timeout = self.options.rollout.infrastructure_retries, self.options.rollout.trajectory_timeout
            scoring = (
                score_rollout(rollout, row, scorer, retries=retries, timeout=timeout, on_failure=_log_failure)
                for rollout, row in zip(rollouts, rows)
            )
            asyncio.run(gather(scoring))
        scored = DataProto.from_single_dict({"rollout": rollouts, "response_mask": data.batch["response_mask"]})
        place_scores(scored, self.options.reward_model, rows)
        return scored.restrict({"rollout", "token_level_scores"})


def _log_failure(request_id: str, error: InfrastructureError) -> None:
    logger.warning("trajectory %s: %s", request_id, one_line(error))
