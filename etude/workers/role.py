"""`RoleWorker`: the base class of the workers of all roles.

Invariant: a worker is built from the run's options and its `Placement` alone: it imports the user's plugins, sets up its
process and loads what it needs, each once.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
from omegaconf import DictConfig, OmegaConf

from etude.agents.base import register_agent_loops
from etude.distributed import Dispatch, Worker, register
from etude.errors import ConfigError, MissingExtraError
from etude.models import check_vocabulary, load_causal_lm, torch_dtype
from etude.models.checkpointing import checkpoint_layers
from etude.models.lora import add_adapters
from etude.models.packable import share_check, use_packing
from etude.options import ActorOptions, CriticOptions, RunOptions, TrainedModelOptions, TrainOptions
from etude.options.validate import plain
from etude.registry import load_plugins
from etude.training import build_mesh, mesh_shape, shard_model
from etude.training.ulysses import SequenceTeam
from etude.workers.tokenizer_bundle import TokenizerBundle, load_tokenizer_bundle

TOKENS = ("input_ids", "attention_mask", "response_mask")
"""The columns that every forward pass reads, apart from images."""


@dataclass(frozen=True)
class Placement:
    """Where a worker runs and what its group is for, beside the run's options.

    `device`: torch's name of it. `trains`: whether the run has an actor. `recomputes`: whether a trained model whose options
    leave it open uses gradient checkpointing. `teacher`: the folder or server with which a `TeacherWorker` scores.
    """

    device: str = "cpu"
    trains: bool = True
    recomputes: bool | None = None
    teacher: str | None = None


HERE = Placement()
"""The CPU of this process."""


def user_config(options: TrainOptions) -> DictConfig:
    """The whole configuration for user code, with attribute access; unknown keys raise."""
    config = OmegaConf.create(plain(options))
    OmegaConf.set_struct(config, True)
    return config


def start_process(plugins: Sequence[str], run: RunOptions, agent_loop_config_path: str | None = None) -> None:
    """Imports the user's plugins in this process and sets threads, seed and determinism; idempotent.

    Raises:
        ConfigError: a plugin or the file of agent loops cannot be loaded.
    """
    load_plugins(plugins)
    if agent_loop_config_path is not None:
        register_agent_loops(agent_loop_config_path)
    if run.num_threads is not None:
        torch.set_num_threads(run.num_threads)
    torch.manual_seed(run.seed)
    if run.deterministic and torch.cuda.is_available():
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.backends.cuda.enable_cudnn_sdp(False)  # its backward pass adds up in no fixed order
        torch.use_deterministic_algorithms(True)  # an operation without such an algorithm stops the run, with its name


class RoleWorker(Worker):
    """Base class of the roles; `bundle` (tokenizer, chat template, image processor) is loaded on first use."""

    def __init__(self, options: TrainOptions, placement: Placement = HERE, **place: Any) -> None:
        start_process(options.plugins, options.trainer, options.rollout.agent.agent_loop_config_path)
        super().__init__(device=placement.device, **place)
        self.options, self.placement = options, placement
        self.dtype = options.model.dtype_on(placement.device)  # of the arithmetic

    @cached_property
    def bundle(self) -> TokenizerBundle:
        """The bundle of the policy's model.

        Raises:
            ConfigError: the model's folder is not set, or something in it is missing or broken.
        """
        options = self.options
        return load_tokenizer_bundle(options.model, options.data.apply_chat_template_kwargs, options.rollout.multi_turn)

    @property
    def tokenizer(self) -> Any:
        return self.bundle.tokenizer

    @register(dispatch_mode=Dispatch.DIRECT_ROLLOUT_METHOD)
    def run(self, function: Callable[..., Any], *args: Any, with_chat: bool = False) -> Any:
        """Returns `function(*args)`, or `function(chat, *args)` if `with_chat`; the function must be a module-level one. If
        this worker is another process, batches among the arguments may be references, and returned batches become ones."""
        return function(self.bundle.chat, *args) if with_chat else function(*args)

    def is_spread(self, options: ActorOptions | CriticOptions) -> bool:
        """Whether this role's model is sharded over the ranks.

        Raises:
            ConfigError: the ranks do not fit the mesh of `options`, or the optimizer or quantization cannot be sharded.
        """
        if self.world_size == 1 or options.strategy == "ddp":
            return False
        mesh_shape(options.fsdp_config, self.world_size)
        model = options.model if isinstance(options, CriticOptions) else self.options.model
        for refused, key in (
            (options.optim.name == "adamw_8bit", "optim.name=adamw_8bit"),
            (model.quantization is not None, f"model.quantization={model.quantization}"),
        ):
            if refused:
                raise ConfigError(
                    f"{key} does not go with strategy={options.strategy}: write strategy=ddp, or change it"
                )
        return True

    def sequence_ranks(self, options: ActorOptions | CriticOptions) -> int:
        """How many ranks compute each row of this role's batches together; a single rank computes all of it.

        Raises:
            ConfigError: the ranks do not form such teams.
        """
        size = options.ulysses_sequence_parallel_size if self.world_size > 1 else 1
        fault = f"does not divide {self.world_size} ranks" if self.world_size % size else ""
        if size > 1 and self.is_spread(options) and options.fsdp_config.tensor_parallel_size > 1:
            fault = "does not go with fsdp_config.tensor_parallel_size above 1"
        if fault:
            key = self._sequence_key(options)
            raise ConfigError(f"{key}={size} {fault}", fix=f"write {key}=1", key=key)
        return size

    def join_team(self, options: ActorOptions | CriticOptions) -> SequenceTeam | None:
        """Forms the teams of `sequence_ranks` (collective); None if each rank computes rows alone. Raises as it does."""
        return SequenceTeam.join(self.sequence_ranks(options), self._sequence_key(options))

    def _sequence_key(self, options: ActorOptions | CriticOptions) -> str:
        section = "critic" if isinstance(options, CriticOptions) else "actor_rollout_ref.actor"
        return f"{section}.ulysses_sequence_parallel_size"

    def loading_device(self, options: ActorOptions | CriticOptions) -> torch.device:
        """Where this role's model is loaded: if it is sharded, by the first rank alone, on the CPU; `shard` sends the others
        their parts. Raises as `is_spread`."""
        if not self.is_spread(options):
            return self.device
        return torch.device("meta" if self.rank else "cpu")

    def loading_dtype(self, options: TrainedModelOptions, device: torch.device) -> str:
        """The dtype in which a trained model is loaded on `device`: float32, but `model.dtype` on a GPU where all but LoRA's
        adapters is frozen, because a float32 base might exceed its memory."""
        return self.dtype if options.lora_rank and device.type not in ("cpu", "meta") else "float32"

    def load_policy(self, dtype: str, device: torch.device | str | None = None) -> Any:
        """Loads the policy's network from `model.path`, on `device` (default: the worker's), in `dtype`; a quantised one,
        whose own weights are never trained, in `model.dtype`."""
        tokenizer, model = self.tokenizer, self.options.model
        assert model.path is not None
        network = load_causal_lm(
            model.path,
            dtype=self.dtype if model.quantization else dtype,
            device=device or self.device,
            trust_remote_code=model.trust_remote_code,
            quantization=model.quantization,
        )
        check_vocabulary(tokenizer, network)
        return network

    def shard(self, model: Any, options: ActorOptions | CriticOptions) -> bool:
        """Shards `model` over the ranks if there are several and `options` say so; returns whether it did.

        Raises:
            ConfigError: it cannot be sharded as `options` say.
        """
        if not self.is_spread(options):
            return False
        share_check(getattr(model, "backbone", model))
        use_packing(getattr(model, "backbone", model))  # before the weights are shards
        mesh = build_mesh(options.fsdp_config, self.world_size, self.device)
        given = replace(options.fsdp_config, param_offload=options.fsdp_config.param_offload or options.optim.offload)
        shard_model(model, given, mesh, torch_dtype(self.dtype))
        return True

    def prepare_training(self, network: Any, options: TrainedModelOptions) -> None:
        """Prepares `network` for training: Liger kernels, LoRA adapters and gradient checkpointing, as `options` say.

        Raises:
            MissingExtraError: a package that they need is not installed.
            ConfigError: `network` has no modules with the names of LoRA's target modules.
        """
        if options.use_liger:  # before adapters, because it replaces the forward passes of whole modules
            try:
                from liger_kernel.transformers import _apply_liger_kernel_to_instance
            except ImportError as error:
                raise MissingExtraError("model.use_liger", "liger") from error
            _apply_liger_kernel_to_instance(model=network)
        if options.lora_rank:
            add_adapters(network, options, self.options.trainer.seed)
        given = options.checkpointing
        if self.placement.recomputes if given is None else given:
            checkpoint_layers(network, offload=options.enable_activation_offload and self.device.type != "cpu")
