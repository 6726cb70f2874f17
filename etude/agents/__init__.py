"""Agent loops: how trajectories come about, and the manager that runs many at once."""

from etude.agents.base import AGENT_LOOPS, AgentContext, AgentLoopBase, TrajectoryClient, register
from etude.agents.batch import to_batch, token_level_scores
from etude.agents.manager import AgentLoopManager, RolloutResult, Sampling
from etude.agents.options import MultiTurnOptions, RolloutOptions, ValSamplingOptions
from etude.agents.single_turn import SingleTurnAgentLoop
from etude.agents.tool_agent import AgentData, AgentState, ToolAgentLoop
from etude.trajectory import AgentLoopOutput

__all__ = [
    "AGENT_LOOPS",
    "AgentContext",
    "AgentData",
    "AgentLoopBase",
    "AgentLoopManager",
    "AgentLoopOutput",
    "AgentState",
    "MultiTurnOptions",
    "RolloutOptions",
    "RolloutResult",
    "Sampling",
    "SingleTurnAgentLoop",
    "ToolAgentLoop",
    "TrajectoryClient",
    "ValSamplingOptions",
    "register",
    "to_batch",
    "token_level_scores",
]
