"""What an agent loop returned, as the trajectories that are scored and trained on.

Invariant: what is accepted marks as sampled only what the engine drew right there, and no draw twice; its log-probs are
the engine's; an output says the same as the trajectory behind it; every sequence fits `data.max_response_length`; only
the last one carries rewards. Anything else is a bug of the loop, and says so.
"""

from __future__ import annotations

from etude.agents.client import TrajectoryClient, is_empty, token_ids
from etude.errors import ConfigError, EtudeError, one_line
from etude.trajectory import AgentLoopOutput, Provenance, Trajectory


def accepted(returned: object, client: TrajectoryClient, name: str, response_length: int) -> list[Trajectory]:
    """The sequences that the loop `name` returned, one or several in time order; the last is the main one.

    Raises:
        EtudeError: it is not what loops return, claims tokens that were not sampled or are claimed already, or other
            log-probs than the engine's, or rewards a sequence that is not the last.
        ConfigError: a sequence is longer than `data.max_response_length`.
    """
    given = returned if isinstance(returned, list) else [returned]
    outputs = [output for output in given if isinstance(output, AgentLoopOutput)]
    if not outputs or len(outputs) < len(given):
        found = [type(output).__name__ for output in given if not isinstance(output, AgentLoopOutput)]
        wrong = found[0] if found else "an empty list"
        raise EtudeError(f"the agent loop '{name}' must return an AgentLoopOutput, or several, not {wrong}")
    for output in outputs:
        _normalise(output, name)
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
    try:
        trajectory = output.to_trajectory(client.request_id)
    except ValueError as error:
        raise EtudeError(f"the agent loop '{name}' returned a wrong AgentLoopOutput: {one_line(error)}") from error
    if trajectory.response_length > response_length:
        raise ConfigError(
            f"the agent loop '{name}' returned {trajectory.response_length} response tokens, more "
            f"than data.max_response_length={response_length}"
        )
    _settle_log_probs(trajectory, output, client)
    return trajectory


def _normalise(output: AgentLoopOutput, name: str) -> None:
    """Ids as plain lists; raises EtudeError for what are none, and for media that are not handed over as `images`."""
    where = f"the agent loop '{name}' returned a wrong AgentLoopOutput:"
    output.prompt_ids = token_ids(output.prompt_ids, f"{where} prompt_ids")
    output.response_ids = token_ids(output.response_ids, f"{where} response_ids")
    for media in ("multi_modal_data", "mm_processor_kwargs", "mm_processor_output", "routed_experts"):
        if not is_empty(getattr(output, media)):
            raise EtudeError(f"{where} {media} is not used here: hand over the row's `read_images` as images")


def _settle_log_probs(trajectory: Trajectory, output: AgentLoopOutput, client: TrajectoryClient) -> None:
    """Gives every sampled token the engine's log-prob; raises EtudeError where the loop says another."""
    ours, start = client.log_probs(output), 0
    for number, segment in enumerate(trajectory.segments):
        end = start + len(segment.token_ids)
        if segment.provenance is Provenance.SAMPLED and segment.log_probs != tuple(ours[start:end]):
            if segment.log_probs is not None:
                ours[start:end] = client.settled(output, start, segment.log_probs)
            trajectory.segments[number] = segment._replace(log_probs=tuple(ours[start:end]))
        start = end
