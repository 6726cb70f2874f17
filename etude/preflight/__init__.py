"""Steps before training: check a configuration, test its tools, play a rollout by hand, scaffold a new agent."""
