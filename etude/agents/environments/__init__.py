"""Environments: RL-Factory's `Env` and `ToolManager`, and Gymnasium-style environments, driven by one agent loop."""

from etude.agents.environments.env import ENVIRONMENTS, Env, TextEnv, register_env
from etude.agents.environments.loop import load_environment
from etude.agents.environments.tool_manager import (
    TOOL_MANAGERS,
    QwenManager,
    RenderedPrompt,
    ToolManager,
    register_tool_manager,
)
from etude.options import EnvOptions

__all__ = [
    "ENVIRONMENTS",
    "TOOL_MANAGERS",
    "Env",
    "EnvOptions",
    "QwenManager",
    "RenderedPrompt",
    "TextEnv",
    "ToolManager",
    "load_environment",
    "register_env",
    "register_tool_manager",
]
