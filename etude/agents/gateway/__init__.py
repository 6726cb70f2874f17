"""The gateway: serves the policy to agents written with an OpenAI client, and records every token.

The server is in a separate module, `etude.agents.gateway.server`, because importing FastAPI takes a while.
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
