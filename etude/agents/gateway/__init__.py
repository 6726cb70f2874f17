"""The gateway: agents written with an OpenAI client, served by the policy and recorded token by token.

The server is in `etude.agents.gateway.server`, apart, because importing FastAPI takes a while.
"""

from etude.agents.gateway.loop import OpenAIAgentLoop, check_openai_agent, openai_agent
from etude.agents.gateway.session import GatewaySession, SessionRules

__all__ = [
    "GatewaySession",
    "OpenAIAgentLoop",
    "SessionRules",
    "check_openai_agent",
    "openai_agent",
]
