"""Agent loops, which roll out trajectories, and the manager that runs many at once."""

from etude.agents.agent_data import AgentData, AgentState
from etude.agents.base import AGENT_LOOPS, AgentContext, AgentLoopBase, register
from etude.agents.batch import to_batch, token_level_scores
from etude.agents.client import TrajectoryClient
from etude.agents.gateway.loop import OpenAIAgentLoop
from etude.agents.manager import AgentLoopManager, Sampling
from etude.agents.single_turn import SingleTurnAgentLoop
from etude.agents.tool_agent import EnvAgentLoop, ToolAgentLoop
from etude.options import AgentOptions, MultiTurnOptions, RolloutOptions, ValSamplingOptions
from etude.trajectory import AgentLoopMetrics, AgentLoopOutput, Rollout

__all__ = [
    "AGENT_LOOPS",
    "AgentContext",
    "AgentData",
    "AgentLoopBase",
    "AgentLoopManager",
    "AgentLoopMetrics",
    "AgentLoopOutput",
    "AgentOptions",
    "AgentState",
    "EnvAgentLoop",
    "MultiTurnOptions",
    "OpenAIAgentLoop",
    "Rollout",
    "RolloutOptions",
    "Sampling",
    "SingleTurnAgentLoop",
    "ToolAgentLoop",
    "TrajectoryClient",
    "ValSamplingOptions",
    "register",
    "to_batch",
    "token_level_scores",
]
