"""`ValueModel`: a language model's backbone with a scalar head, one value per position.

Invariant: an untrained head returns exactly 0 everywhere, so a fresh critic adds no noise. On disk it is an ordinary model
folder plus `value_head.safetensors`; the loss and its masks are elsewhere.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from etude.errors import ConfigError, one_line

if TYPE_CHECKING:
    from transformers import PreTrainedModel

VALUE_HEAD_FILE = "value_head.safetensors"


class ValueModel(nn.Module):
    """A critic; `backbone` is the base model of a causal LM: it takes ids and returns `last_hidden_state`."""

    def __init__(self, backbone: PreTrainedModel) -> None:
        super().__init__()
        self.backbone = backbone
        self.config = backbone.config
        self.head = _new_head(backbone)

    def forward(self, input_ids: torch.Tensor | None = None, **kwargs: Any) -> torch.Tensor:
        """Returns values (batch, seq), at least float32; `kwargs` go to the backbone (attention_mask, position_ids …)."""
        return self.values_of(self.backbone(input_ids=input_ids, **kwargs).last_hidden_state)

    def values_of(self, hidden: torch.Tensor) -> torch.Tensor:
        """Values (...) of final hidden states (..., hidden)."""
        return self.head(hidden.to(self.head.weight.dtype)).squeeze(-1)

    def save_pretrained(self, folder: str | Path, state_dict: Mapping[str, torch.Tensor] | None = None) -> None:
        """Writes the backbone as a model folder and the head next to it; `state_dict`: used instead of the model's own."""
        from safetensors.torch import save_file

        weights = self.state_dict() if state_dict is None else state_dict
        body, head = (
            {name.removeprefix(part): tensor for name, tensor in weights.items() if name.startswith(part)}
            for part in ("backbone.", "head.")
        )
        self.backbone.save_pretrained(folder, state_dict=body)
        save_file(
            {name: tensor.detach().cpu().contiguous() for name, tensor in head.items()}, Path(folder) / VALUE_HEAD_FILE
        )

    def load_head(self, file: Path) -> None:
        """Loads the head's weights.

        Raises:
            ConfigError: the file cannot be read or belongs to a model of another width.
        """
        from safetensors import SafetensorError
        from safetensors.torch import load_file

        try:
            self.head.load_state_dict(load_file(file))
        except (OSError, RuntimeError, SafetensorError) as error:
            raise ConfigError(f"{file}: not the value head of this model: {one_line(error)}") from error


class SharedValueHead(nn.Module):
    """A value head on the trunk of `policy`, which is not a submodule: its weights belong to the actor."""

    def __init__(self, policy: PreTrainedModel) -> None:
        super().__init__()
        self.head, self._policy, self.config = _new_head(policy), (policy,), policy.config

    @property
    def backbone(self) -> PreTrainedModel:
        """The policy."""
        return self._policy[0]

    def train(self, mode: bool = True) -> SharedValueHead:
        """Sets the mode of the policy, too, so that values are computed without dropout in evaluation mode."""
        self.backbone.train(mode)
        return super().train(mode)

    def values_of(self, hidden: torch.Tensor, *, to_trunk: bool = False) -> torch.Tensor:
        """Values (...) of final hidden states (..., hidden); the gradient reaches the trunk only with `to_trunk`."""
        hidden = hidden if to_trunk else hidden.detach()
        return self.head(hidden.to(self.head.weight.dtype)).squeeze(-1)


def _new_head(model: PreTrainedModel) -> nn.Linear:
    kind = torch.promote_types(model.dtype, torch.float32)
    head = nn.Linear(model.config.get_text_config().hidden_size, 1, dtype=kind, device=model.device)
    nn.init.zeros_(head.weight)
    nn.init.zeros_(head.bias)
    return head
