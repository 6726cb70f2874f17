"""Every configuration key, declared once: frozen sections that import no torch, and of other rooms
the records of `etude.algorithms` alone.

`types` are what values may be, `declare` says how a key is declared, `validate` makes sections of values, `tree` puts the
sections together.
"""

from etude.options.data import DataOptions, SFTDataOptions, TargetSuccessOptions
from etude.options.declare import Declaration, declarations
from etude.options.distillation import DistillationOptions
from etude.options.environments import EnvironmentOptions
from etude.options.reward import CustomRewardOptions, RewardOptions
from etude.options.rollout import (
    AgentOptions,
    AgentSandboxOptions,
    CompactOptions,
    EnvOptions,
    MultiTurnOptions,
    OpenAIAgentOptions,
    RolloutOptions,
    TraceOptions,
    ValSamplingOptions,
)
from etude.options.run import AlgorithmOptions, RayOptions, RolloutCorrectionOptions, RunOptions, TrainerOptions
from etude.options.training import (
    ActorOptions,
    CriticOptions,
    FSDPOptions,
    ModelOptions,
    OptimOptions,
    RefOptions,
    TrainedModelOptions,
    has_several_updates,
)
from etude.options.tree import Options, SFTOptions, TrainOptions

__all__ = [
    "ActorOptions",
    "AgentOptions",
    "AgentSandboxOptions",
    "AlgorithmOptions",
    "CompactOptions",
    "CriticOptions",
    "CustomRewardOptions",
    "DataOptions",
    "Declaration",
    "DistillationOptions",
    "EnvOptions",
    "EnvironmentOptions",
    "FSDPOptions",
    "ModelOptions",
    "MultiTurnOptions",
    "OpenAIAgentOptions",
    "OptimOptions",
    "Options",
    "RayOptions",
    "RefOptions",
    "RewardOptions",
    "RolloutCorrectionOptions",
    "RolloutOptions",
    "RunOptions",
    "SFTDataOptions",
    "SFTOptions",
    "TargetSuccessOptions",
    "TraceOptions",
    "TrainOptions",
    "TrainedModelOptions",
    "TrainerOptions",
    "ValSamplingOptions",
    "declarations",
    "has_several_updates",
]
