"""The reward manager `dapo`: the score minus a penalty for responses close to the maximum length (see `overlong.py`)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from etude.errors import ConfigError
from etude.options.declare import key, options
from etude.options.types import Flag, Natural, NonNegative
from etude.options.validate import to_options
from etude.rewards.default import COMPONENTS
from etude.rewards.manager import KEY, NaiveRewardManager, RewardResult, register
from etude.rewards.overlong import overlong_penalty

if TYPE_CHECKING:
    from etude.protocol import DataProto


@options
class OverlongBuffer:
    """`overlong_buffer_cfg`."""

    enable: Flag = key("Whether long answers are punished.", default=True)
    len: Natural = key("The length over which the penalty grows.", default=0, unit="tokens")
    penalty_factor: NonNegative = key("The penalty at the maximum length.", default=1.0)
    log: Flag = key("Reports `overlong_reward` and `overlong` beside the score.", default=False)


@register("dapo", "gdpo")  # verl's gdpo is dapo that also reports each score component, as every manager here does
class DAPORewardManager(NaiveRewardManager):
    """Options in `reward_kwargs`: `overlong_buffer_cfg`, and `max_resp_len` in tokens (null:
    `data.max_response_length`)."""

    def __init__(self, *parts: Any, **named: Any) -> None:
        super().__init__(*parts, **named)
        given = dict(self.reward_kwargs)
        section = given.pop("overlong_buffer_cfg", None) or {"enable": False}
        buffer = to_options(OverlongBuffer, section, f"{KEY}.overlong_buffer_cfg")
        self.buffer = buffer if buffer.enable else None
        self.max_resp_len = given.pop("max_resp_len", None)
        if given:
            raise ConfigError(f"the reward manager 'dapo' has no {KEY}.{next(iter(given))}")
        if self.buffer is None:
            return
        if self.max_resp_len is None and self.config is not None:
            self.max_resp_len = self.config.data.max_response_length
        if not isinstance(self.max_resp_len, int) or not 0 < self.buffer.len <= self.max_resp_len:
            limits = f"{self.buffer.len}, {self.max_resp_len}"
            raise ConfigError(f"{KEY}.overlong_buffer_cfg.len must be from 1 to max_resp_len tokens: {limits}")

    async def run_single(self, data: DataProto) -> RewardResult:
        """Scores as the base class, minus the penalty; tool responses count towards the response's length."""
        result = await super().run_single(data)
        if self.buffer is None:
            return result
        assert data.batch is not None
        assert self.max_resp_len is not None
        width = data.batch["responses"].shape[-1]
        tokens = int(data.batch["attention_mask"][:, -width:].sum()) if width else 0
        penalty = overlong_penalty(tokens, self.max_resp_len, self.buffer.len, self.buffer.penalty_factor)
        logged = {"overlong_reward": penalty, "overlong": penalty < 0} if self.buffer.log else {}
        score, info = result["reward_score"], result["reward_extra_info"]
        parts = {**(info.get(COMPONENTS) or {"answer": score}), "overlong_reward": penalty}
        return {"reward_score": score + penalty, "reward_extra_info": {**info, **logged, COMPONENTS: parts}}
