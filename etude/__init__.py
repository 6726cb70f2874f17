"""Étude: reinforcement learning of LLM agents over multi-turn rollouts with real tools.

Importing the package is cheap: no room is imported until it is asked for.
"""

import warnings

# A model's words that are read as Python, such as a calculator's expression, may look odd: no matter for the log.
warnings.filterwarnings("ignore", category=SyntaxWarning, module="<unknown>")

__version__ = "0.1.0"
