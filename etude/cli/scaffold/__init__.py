"""The files that `etude new agent` writes, AGENT_NAME standing for its name; they pass their own tests as they are."""
