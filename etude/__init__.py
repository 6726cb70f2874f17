"""Étude: reinforcement learning of LLM agents over multi-turn rollouts with real tools.

Importing the package is cheap: no room is imported until it is asked for.
"""

__version__ = "0.1.0"
