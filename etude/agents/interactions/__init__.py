"""Interactions: simulated users that reply to the policy between its turns."""

from etude.agents.interactions.base import BaseInteraction
from etude.agents.interactions.gsm8k import Gsm8kInteraction
from etude.agents.interactions.loader import load_interactions
from etude.agents.interactions.session import InteractionSession, UserTurn
from etude.agents.interactions.simulated_user import SimulatedUser

__all__ = [
    "BaseInteraction",
    "Gsm8kInteraction",
    "InteractionSession",
    "SimulatedUser",
    "UserTurn",
    "load_interactions",
]
