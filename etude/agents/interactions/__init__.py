"""Interactions: simulated users that reply to the policy between its turns."""

from etude.agents.interactions.base import BaseInteraction, load_interactions
from etude.agents.interactions.gsm8k import Gsm8kInteraction
from etude.agents.interactions.simulated_user import SimulatedUser

__all__ = [
    "BaseInteraction",
    "Gsm8kInteraction",
    "SimulatedUser",
    "load_interactions",
]
