"""What an agent loop returned, as the trajectories that are scored and trained on.

Invariant: what is accepted marks as sampled only what the engine drew right there, and no draw twice; an output says the
same as the trajectory behind it; every sequence fits `data.max_response_length`; only the last one carries rewards.
Anything else is a bug of the loop, and says so.
"""

from __future__ import annotations

from etude.agents.client import TrajectoryClient
from etude.errors import ConfigError, EtudeError, one_line
from etude.trajectory import AgentLoopOutput, Trajectory


def accepted(returned: object, client: TrajectoryClient, name: str, response_length: int) -> list[Trajectory]:
    """The sequences that the loop `name` returned, one or several in time order; the last is the main one.

    Raises:
        EtudeError: it is not what loops return, claims tokens that were not sampled or are claimed already, or rewards a
            sequence that is not the last.
        ConfigError: a sequence is longer than `data.max_response_length`.
    """
    given = returned if isinstance(returned, list) else [returned]
    outputs = [output for output in given if isinstance(output, AgentLoopOutput)]
    if not outputs or len(outputs) < len(given):
        found = [type(output).__name__ for output in given if not isinstance(output, AgentLoopOutput)]
        wrong = found[0] if found else "an empty list"
        raise EtudeError(f"the agent loop '{name}' must return an AgentLoopOutput, or several, not {wrong}")
    client.check(*outputs)
    sequences = [_sequence(output, client, name, response_length) for output in outputs]
    for number, earlier in enumerate(sequences[:-1]):
        rewards = earlier.rewards
        if rewards.steps or rewards.final or rewards.score is not None:
            raise EtudeError(
                f"the agent loop '{name}' gave sequence {number} of {len(sequences)} a reward; the last one stands for the "
                "whole rollout and carries all of its rewards"
            )
    return sequences


def _sequence(output: AgentLoopOutput, client: TrajectoryClient, name: str, response_length: int) -> Trajectory:
    if output.response_logprobs is None and output.trajectory is None:
        output.response_logprobs = client.log_probs(output)
    try:
        trajectory = output.to_trajectory(client.request_id)
    except ValueError as error:
        raise EtudeError(f"the agent loop '{name}' returned a wrong AgentLoopOutput: {one_line(error)}") from error
    if trajectory.response_length > response_length:
        raise ConfigError(
            f"the agent loop '{name}' returned {trajectory.response_length} response tokens, more "
            f"than data.max_response_length={response_length}"
        )
    return trajectory
