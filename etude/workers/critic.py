"""The critic: values of contexts, trained on returns."""

from __future__ import annotations

from pathlib import Path

from etude.agents.batch import IMAGES
from etude.distributed import Dispatch, register
from etude.errors import ConfigError
from etude.metrics import Metrics
from etude.models import load_value_model, save_pretrained, torch_dtype
from etude.models.lora import ADAPTER_FOLDER, save_adapters
from etude.protocol import DataProto
from etude.training import OptimizerSet, ValueEngine, round_weights
from etude.workers.checkpoint import read_tensors, write_tensors
from etude.workers.role import TOKENS, RoleWorker


class CriticWorker(RoleWorker):
    """A value model with its optimizer, started from `critic.model.path` (by default the policy's)."""

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def init_model(self, total_steps: int | None = None) -> None:
        """Loads the model and builds the optimizer, whose learning-rate schedule ends after `total_steps` training steps."""
        critic, model = self.options.critic, self.options.model
        path = critic.model.path or model.path
        if path is None:
            raise ConfigError("critic.model.path is not set: give the folder of a Hugging Face model")
        self.model = load_value_model(path, device=self.device, trust_remote_code=model.trust_remote_code)
        self.prepare_training(self.model.backbone, critic.model)
        exact = round_weights(self.model.backbone, torch_dtype(model.dtype))
        self._optimizer = OptimizerSet(
            self.model, critic.optim, total_steps, exact=exact, rank=self.rank, world_size=self.world_size
        )
        self._engine = ValueEngine(self.model, max_tokens=critic.ppo_max_token_len_per_gpu, optimizer=self._optimizer)

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO, columns=TOKENS, optional=(IMAGES,))
    def compute_values(self, data: DataProto) -> DataProto:
        """`values` (batch, response_len): the value of the context before each sampled token."""
        return DataProto.from_single_dict({"values": self._engine.values(data)})

    @register(
        dispatch_mode=Dispatch.DP_COMPUTE, columns=(*TOKENS, "values", "returns"), optional=("rollout_tokens", IMAGES)
    )
    def update_critic(self, data: DataProto) -> Metrics:
        """One optimizer step towards `returns` on this rank's part of a mini-batch; meta_info: `global_step`, and the counts
        of `etude.training.count_scored`. Metrics are named `critic/*`."""
        critic = self.options.critic
        self._optimizer.training_step = data.meta_info["global_step"]
        return self._engine.update(
            data,
            cliprange_value=critic.cliprange_value,
            loss_agg_mode=critic.loss_agg_mode,
            loss_scale_factor=self.options.rollout.response_length,
        )

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def save_checkpoint(self, folder: str) -> None:
        """Writes `critic/huggingface` and `critic/optimizer.pt`."""
        if self.rank == 0:
            target = Path(folder) / "critic"
            save_pretrained(self.model, None, target / "huggingface")
            state = {"optimizer": self._optimizer.state_dict()}
            if self.options.critic.model.lora_rank:
                save_adapters(self.model, target / ADAPTER_FOLDER)
                state["trained"] = {name: p.detach() for name, p in self.model.named_parameters() if p.requires_grad}
            write_tensors(state, target / "optimizer.pt")

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def load_checkpoint(self, folder: str) -> None:
        """Restores weights, in place, and the optimizer's state, bit for bit.

        Raises:
            ConfigError, CheckpointError: the folder's model, or its optimizer's state, cannot be read.
        """
        source, model = Path(folder) / "critic", self.options.model
        state = read_tensors(source / "optimizer.pt", self.device)
        if self.options.critic.model.lora_rank:
            self.model.load_state_dict(state["trained"], strict=False)
        else:
            saved = load_value_model(
                source / "huggingface", dtype=model.dtype, device=self.device, trust_remote_code=model.trust_remote_code
            )
            self.model.load_state_dict(saved.state_dict())
        self._optimizer.load_state_dict(state["optimizer"])
