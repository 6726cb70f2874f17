"""Engines that turn batches into gradients: packing, chunked log-probs, optimizers, supervised fine-tuning."""

from etude.options import OptimOptions
from etude.training.demonstrations import demonstrations_to_batch, sft_step
from etude.training.log_probs import token_log_probs
from etude.training.loss_scale import LossScale, MicroLoss, count_scored
from etude.training.optim import OptimizerSet
from etude.training.partitions import balanced_partitions, token_budget_batches
from etude.training.policy import PolicyLearner
from etude.training.precision import round_weights
from etude.training.sharding import build_mesh, is_sharded, mesh_shape, shard_model
from etude.training.value import ValueLearner

__all__ = [
    "LossScale",
    "MicroLoss",
    "OptimOptions",
    "OptimizerSet",
    "PolicyLearner",
    "ValueLearner",
    "balanced_partitions",
    "build_mesh",
    "count_scored",
    "demonstrations_to_batch",
    "is_sharded",
    "mesh_shape",
    "round_weights",
    "sft_step",
    "shard_model",
    "token_budget_batches",
    "token_log_probs",
]
