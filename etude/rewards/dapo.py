"""The reward manager `dapo`: the score, less a penalty for answers close to the maximum length.

Source: DAPO (arXiv:2503.14476), "soft overlong punishment". With L tokens in a response of at most `max_resp_len`, and a
buffer of `len` tokens before that limit: penalty = min(0, (max_resp_len − len − L) / len) · penalty_factor.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any

from etude.errors import ConfigError
from etude.registry import did_you_mean
from etude.rewards.manager import NaiveRewardManager, RewardResult, register

if TYPE_CHECKING:
    from etude.protocol import DataProto

_KEY = "reward_model.reward_kwargs"


@dataclass(frozen=True)
class OverlongBuffer:
    """`overlong_buffer_cfg`: `len` in tokens; `log` reports `overlong_reward` and `overlong` beside the score."""

    enable: bool = True
    len: int = 0
    penalty_factor: float = 1.0
    log: bool = False


@register("dapo")
class DAPORewardManager(NaiveRewardManager):
    """Its `reward_kwargs`: `overlong_buffer_cfg`, and `max_resp_len` in tokens (null: `data.max_response_length`)."""

    def __init__(self, *parts: Any, **named: Any) -> None:
        super().__init__(*parts, **named)
        options = dict(self.reward_kwargs)
        self.buffer = _read_buffer(options.pop("overlong_buffer_cfg", None))
        self.max_resp_len = options.pop("max_resp_len", None)
        if options:
            raise ConfigError(f"the reward manager 'dapo' has no {_KEY}.{next(iter(options))}")
        if self.buffer is None:
            return
        if self.max_resp_len is None and self.config is not None:
            self.max_resp_len = self.config.data.max_response_length
        if not isinstance(self.max_resp_len, int) or not 0 < self.buffer.len <= self.max_resp_len:
            limits = f"{self.buffer.len}, {self.max_resp_len}"
            raise ConfigError(f"{_KEY}.overlong_buffer_cfg.len must be from 1 to max_resp_len tokens: {limits}")

    async def run_single(self, data: DataProto) -> RewardResult:
        """As `NaiveRewardManager`, less the penalty; the length is that of the whole response, tools' answers included."""
        result = await super().run_single(data)
        if self.buffer is None:
            return result
        assert data.batch is not None
        assert self.max_resp_len is not None
        width = data.batch["responses"].shape[-1]
        tokens = int(data.batch["attention_mask"][:, -width:].sum()) if width else 0
        room = (self.max_resp_len - self.buffer.len - tokens) / self.buffer.len
        penalty = min(0.0, room) * self.buffer.penalty_factor
        logged = {"overlong_reward": penalty, "overlong": penalty < 0} if self.buffer.log else {}
        info = {**result["reward_extra_info"], **logged}
        return {"reward_score": result["reward_score"] + penalty, "reward_extra_info": info}


def _read_buffer(section: Mapping[str, Any] | None) -> OverlongBuffer | None:
    """The section as options; None where it is absent or off."""
    known = {field.name for field in fields(OverlongBuffer)}
    for key in section or {}:
        if key not in known:
            raise ConfigError(f"unknown key {_KEY}.overlong_buffer_cfg.{key}{did_you_mean(str(key), known)}")
    buffer = OverlongBuffer(**(section or {"enable": False}))
    is_number = isinstance(buffer.len, int) and isinstance(buffer.penalty_factor, int | float)
    if not is_number or buffer.penalty_factor < 0:
        raise ConfigError(f"{_KEY}.overlong_buffer_cfg: len is a count of tokens, penalty_factor at least 0")
    return buffer if buffer.enable else None
