"""The critic: estimates the value of contexts; trained on returns."""

from __future__ import annotations

from typing import Any

from etude.agents.batch import IMAGES
from etude.distributed import Dispatch, register
from etude.errors import ConfigError
from etude.metrics import Metrics
from etude.models import load_value_model
from etude.options import TrainOptions
from etude.protocol import DataProto
from etude.training import ValueLearner
from etude.workers.checkpoint import TrainedWorker
from etude.workers.role import TOKENS

CRITIC_COLUMNS = (*TOKENS, "values", "returns")


class CriticWorker(TrainedWorker):
    """A value model with its optimizer, initialised from `critic.model.path` (default: the policy's model)."""

    role = "critic"

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def init_model(self, total_steps: int | None = None) -> None:
        """Loads the model and builds the optimizer, whose learning-rate schedule ends after `total_steps` training steps."""
        critic, model = self.options.critic, self.options.model
        path = critic.model.path or model.path
        device = self.loading_device(critic)
        if path is None:
            raise ConfigError("critic.model.path is not set: give the folder of a Hugging Face model")
        self.model = load_value_model(
            path,
            dtype=self.dtype if critic.model.quantization else self.loading_dtype(critic.model, device),
            device=device,
            trust_remote_code=model.trust_remote_code,
            quantization=critic.model.quantization,
        )
        self.prepare_training(self.model.backbone, critic.model)
        self._optimizer = self.build_optimizer(critic, total_steps)
        self._engine = ValueLearner(
            self.model,
            max_tokens=critic.ppo_max_token_len_per_gpu,
            optimizer=self._optimizer,
            team=self.join_team(critic),
        )
        self.prepare_saves()

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO, columns=TOKENS, optional=(IMAGES,))
    def compute_values(self, data: DataProto) -> DataProto:
        """Returns `values` (batch, response_len): the value of the context before each sampled token."""
        return DataProto.from_single_dict({"values": self._engine.values(data)})

    @register(dispatch_mode=Dispatch.DP_COMPUTE, columns=CRITIC_COLUMNS, optional=("rollout_tokens", IMAGES))
    def update_critic(self, data: DataProto) -> Metrics:
        """Takes one optimizer step towards `returns` on this rank's part of a mini-batch; meta_info: `global_step`, and the
        counts of `etude.training.count_scored`. Metrics are named `critic/*`."""
        self._optimizer.training_step = data.meta_info["global_step"]
        return self._engine.update(data, **value_options(self.options))


def value_options(options: TrainOptions) -> dict[str, Any]:
    """Arguments of the value loss other than columns and counts."""
    critic, scale = options.critic, options.rollout.response_length
    return {
        "cliprange_value": critic.cliprange_value,
        "loss_agg_mode": critic.loss_agg_mode,
        "loss_scale_factor": scale,
    }
