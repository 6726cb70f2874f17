"""Validates what an agent loop returned against what the engine sampled for it.

Invariant: in a trajectory that passes, every token marked as sampled was sampled by the engine after exactly the ids and
images before it, and no sampled token is claimed twice; its log-probs are the engine's; every sequence fits
`data.max_response_length`; only the last one, and the last of another role, carries rewards; the last one has those of the
calls that the loop's tool sessions ran. Marking tokens that were not sampled, or were sampled in another context, is a bug
in the loop and always an error. A loop may still drop a turn or mask one out.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any, NamedTuple

from etude.agents.base import AgentContext
from etude.agents.client import TrajectoryClient, is_empty, token_ids
from etude.agents.roles import carriers, check_role, have_own_rewards, unrewarded
from etude.chat.encoding import common_beginning
from etude.chat.placeholders import image_count
from etude.chat.template import TOOLS_IN_SYSTEM, unnamed
from etude.errors import WARNING, ConfigError, EtudeError, one_line
from etude.rewards.finite import as_float
from etude.tools import ToolSession
from etude.trajectory import (
    AgentLoopOutput,
    Kept,
    KeptIds,
    Provenance,
    Rewards,
    RoutedExperts,
    StopReason,
    ToolCallRecord,
    Trajectory,
)

logger = logging.getLogger(__name__)


class Draw(NamedTuple):
    """A run of sampled tokens, matched to the engine's: it begins at response position `place` of the sequence, and at
    position `start` of the client's history number `history`."""

    place: int
    log_probs: list[float]
    kept_ids: KeptIds
    history: int
    start: int


def validate_output(
    returned: object, client: TrajectoryClient, name: str, response_length: int, roles: Sequence[str] = ()
) -> list[Trajectory]:
    """Returns the sequences that the loop `name` returned, in time order; the last is the main one.

    Raises:
        EtudeError: the return value has the wrong type, claims tokens that were not sampled or that another sequence claims,
            has log-probs other than the engine's, rewards a sequence that is not the last of its role, leaves a role without
            the reward that others have, or names one that is not in `roles`.
        ConfigError: a sequence is longer than `data.max_response_length`.
    """
    given = returned if isinstance(returned, list) else [returned]
    outputs = [each for each in given if isinstance(each, Trajectory | AgentLoopOutput)]
    if not outputs or len(outputs) < len(given):
        wrong = (type(each).__name__ for each in given if not isinstance(each, Trajectory | AgentLoopOutput))
        found = next(wrong, "an empty list")
        raise EtudeError(
            f"the agent loop '{name}' must return a Trajectory or AgentLoopOutput, or several, not {found}"
        )
    sequences = [_as_trajectory(each, client, name) for each in outputs]
    all_draws = check_sampled(sequences, client)
    for sequence, draws in zip(sequences, all_draws):
        if sequence.response_length > response_length:
            raise ConfigError(
                f"the agent loop '{name}' returned {sequence.response_length} response tokens, more "
                f"than data.max_response_length={response_length}"
            )
        _set_log_probs(sequence, draws)
        _add_kept_ids(sequence, draws)
        sequence.routed_experts = _routed_experts(sequence, client)
    _check_roles(sequences, name, roles)
    # of the run's tools under any id; RL-Factory's managers open sessions of tools of their own
    own = [each for each in client.sessions if each.request_id == client.request_id or each.runs(client.tools)]
    _add_outcomes(sequences[-1], own)
    for tool in {each for session in own for each in session.unasked}:
        _warn_of_final_reward(name, tool)
    return sequences


@cache
def _warn_of_final_reward(loop: str, tool: str) -> None:
    line = (
        f"the agent loop '{loop}' never calls session.calc_rewards(): what calc_reward of '{tool}' gives is no reward"
    )
    logger.warning(
        WARNING,
        line,
        "trajectory.rewards.final = await session.calc_rewards(), at the end; nothing to do if it is not meant to count",
    )


def _check_roles(sequences: Sequence[Trajectory], name: str, roles: Sequence[str]) -> None:
    """Raises EtudeError if a role is unknown, or rewards are not where those of roles belong."""
    last = carriers(sequences)
    for number, sequence in enumerate(sequences):
        try:
            check_role(sequence.role, roles)
        except ValueError as error:
            raise EtudeError(f"the agent loop '{name}', sequence {number} of {len(sequences)}: {error}") from error
        if sequence.rewards.given and last.get(sequence.role) is not sequence:
            raise EtudeError(
                f"the agent loop '{name}' gave sequence {number} of {len(sequences)} a reward; the last one stands for the "
                "whole rollout, or its role, and carries all of its rewards"
            )
    if have_own_rewards(sequences[:-1]) and (missing := unrewarded(sequences)):
        raise EtudeError(f"the agent loop '{name}' gave rewards per role, and none to the role '{missing[0]}'")


def _add_outcomes(main: Trajectory, sessions: Sequence[ToolSession]) -> None:
    """Adds the step rewards and records of the calls that the loop's sessions ran, unless the loop added its own."""
    outcomes = [outcome for session in sessions for outcome in session.outcomes]
    sources = {source for _, source, _ in main.rewards.steps}
    known = {(turn, value) for turn, _, value in main.rewards.steps}
    for outcome in outcomes:
        if outcome.reward and outcome.requested.name not in sources and (outcome.turn, outcome.reward) not in known:
            main.add_step_reward(outcome.requested.name, outcome.reward, outcome.turn)
    if not main.tool_calls:
        main.tool_calls += [outcome.to_record() for outcome in outcomes]


def check_tools_shown(
    first: Trajectory, sessions: Sequence[ToolSession], context: AgentContext, name: str, row: Mapping[str, Any]
) -> None:
    """Rejects a loop that runs tools, and whose prompt is the row's messages rendered without them.

    Raises:
        EtudeError: neither the chat template nor the messages show the model the tools that the loop's sessions run.
    """
    if context.parser.result_tag is not None or (
        first.prompt_ids == row.get("raw_prompt_ids") and context.chat.shows_tools
    ):
        return
    messages = row["raw_prompt"]
    active = row.get("active_tools", list(context.tools))
    names = {tool["function"]["name"] for session in sessions for tool in session.schemas}
    unknown = sorted(unnamed(names.intersection(active), messages))
    images = [image.tokens for image in first.images][: sum(map(image_count, messages))]
    if unknown and first.prompt_ids == context.chat.initial_ids(messages, None, images):
        fix = "render it with  self.render_prompt(row)" if context.chat.shows_tools else f"set {TOOLS_IN_SYSTEM}"
        raise EtudeError(
            f"agent loop '{name}': its prompt does not show the model its tools ({', '.join(unknown)}): {fix}"
        )


def _routed_experts(sequence: Trajectory, client: TrajectoryClient) -> RoutedExperts | None:
    """The engine's routed experts for the longest prefix that the sequence shares with a history; None if the engine returns
    none."""
    context, candidates = sequence.context_ids(), list[RoutedExperts]()
    for history in client.histories:
        if history.experts is not None:
            candidates.append(history.experts.first(common_beginning(history.context, context)))
    return max(candidates, key=len, default=None)


def _as_trajectory(output: Trajectory | AgentLoopOutput, client: TrajectoryClient, name: str) -> Trajectory:
    """Converts to a `Trajectory` with ids as plain lists; raises EtudeError for invalid ids, and for media that are not
    passed as `images`."""
    where = f"the agent loop '{name}' returned a wrong {type(output).__name__}:"
    output.prompt_ids = token_ids(output.prompt_ids, f"{where} prompt_ids")
    response_ids = token_ids(output.response_ids, f"{where} response_ids")
    if isinstance(output, Trajectory):
        return _checked_parts(output, where)
    output.response_ids = response_ids
    for media in ("multi_modal_data", "mm_processor_kwargs", "mm_processor_output", "routed_experts"):
        if not is_empty(getattr(output, media)):
            raise EtudeError(f"{where} {media} is not used here: hand over the row's `read_images` as images")
    try:
        return _checked_parts(output.to_trajectory(client.request_id), where)
    except ValueError as error:
        raise EtudeError(f"{where} {one_line(error)}") from error


_PARTS = {"messages": list, "tool_calls": list, "rewards": Rewards, "assistant_turns": int, "user_turns": int}


def _checked_parts(made: Trajectory, where: str) -> Trajectory:
    """Returns `made`, its stop reason and rewards converted; raises EtudeError, which begins with `where`, for a part of
    another type than its declaration, which would fail far from the loop that set it."""
    for name, wanted in _PARTS.items():
        if not isinstance(value := getattr(made, name), wanted):
            raise EtudeError(f"{where} {name} must be of type {wanted.__name__}, not {type(value).__name__}")
    for name, members, kind in (("messages", made.messages, Mapping), ("tool_calls", made.tool_calls, ToolCallRecord)):
        if wrong := [each for each in members if not isinstance(each, kind)]:
            raise EtudeError(f"{where} {name} must contain {kind.__name__}s only, not {wrong[0]!r:.60}")
    rewards = made.rewards
    try:
        rewards.steps = [(turn, source, _given(value)) for turn, source, value in rewards.steps]
        rewards.final = {tool: _given(value) for tool, value in rewards.final.items()}
        rewards.score = None if rewards.score is None else as_float(rewards.score)
    except (AttributeError, TypeError, ValueError) as error:
        raise EtudeError(f"{where} {rewards!r:.150}: {one_line(error)}") from error
    try:
        made.stop_reason = StopReason(made.stop_reason)
    except ValueError as error:
        raise EtudeError(f"{where} stop_reason: {one_line(error)}") from error
    return made


def _given(reward: object) -> float:
    if reward is None:
        raise TypeError("None is no reward")
    return as_float(reward)


def check_sampled(sequences: Sequence[Trajectory], client: TrajectoryClient) -> list[list[Draw]]:
    """Matches the sampled tokens of each sequence to the engine's.

    Raises:
        EtudeError: a token marked as sampled was not sampled there, or two sequences claim the same sampled token.
    """
    all_draws = [_match_draws(sequence, client) for sequence in sequences]
    for sequence, draws in zip(sequences, all_draws):
        mask = bytes(sequence.response_mask)
        drawn = bytearray(len(mask))
        for draw in draws:
            drawn[draw.place : draw.place + len(draw.log_probs)] = bytes([1]) * len(draw.log_probs)
        wrong = None if mask == drawn else next((i for i, (a, b) in enumerate(zip(mask, drawn)) if a > b), None)
        if wrong is not None:
            raise EtudeError(
                f"the agent loop marked response token {wrong} (id {sequence.response_ids[wrong]}) of {client.request_id} "
                "as sampled, but the engine did not sample it after the ids before it: keep token_ids as generate() "
                "returned them"
            )
    if len(sequences) > 1:
        _check_claimed_once(sequences, all_draws, client.request_id)
    return all_draws


def _check_claimed_once(sequences: Sequence[Trajectory], all_draws: Sequence[list[Draw]], request_id: str) -> None:
    """Checks that a token is in as many sequences as times it was sampled after the same ids, usually one."""
    claimed: set[tuple[int, int]] = set()
    for number, (sequence, draws) in enumerate(zip(sequences, all_draws)):
        missing = {i for i, sampled in enumerate(sequence.response_mask) if sampled}
        for draw in draws:
            for i in range(len(draw.log_probs)):
                token = (draw.history, draw.start + i)
                if draw.place + i in missing and token not in claimed:
                    missing.discard(draw.place + i)
                    claimed.add(token)
        if missing:
            raise EtudeError(
                f"sequence {number} of {request_id} marks response token {min(missing)} as sampled, but an earlier "
                "sequence claims that draw: mask it out in all but one, or it would be trained on twice"
            )


def _match_draws(sequence: Trajectory, client: TrajectoryClient) -> list[Draw]:
    first_response = len(sequence.prompt_ids)
    context, shown = sequence.context_ids(), tuple([image.digest for image in sequence.images])
    draws = []
    for number, history in enumerate(client.histories):
        shared = common_beginning(history.context, context)
        for place, log_probs, kept_ids, seen in history.turns:
            if seen != shown[: len(seen)]:
                continue
            first, last = max(place, first_response), min(place + len(log_probs), shared)
            if first < last:
                part = slice(first - place, last - place)
                draws.append(Draw(first - first_response, log_probs[part], kept_ids[part], number, first))
    return draws


def _set_log_probs(trajectory: Trajectory, draws: Sequence[Draw]) -> None:
    """Sets every sampled token's log-prob to the engine's; raises EtudeError if the loop gave a different one."""
    expected = [0.0] * trajectory.response_length
    for draw in draws:
        expected[draw.place : draw.place + len(draw.log_probs)] = draw.log_probs
    start = 0
    for number, segment in enumerate(trajectory.segments):
        end = start + len(segment.token_ids)
        if segment.provenance is Provenance.SAMPLED and segment.log_probs != (kept := tuple(expected[start:end])):
            if segment.log_probs is not None:
                kept = tuple(_engine_log_prob(draws, i, v, trajectory) for i, v in enumerate(segment.log_probs, start))
            trajectory.segments[number] = segment._replace(log_probs=kept)
        start = end


def _add_kept_ids(trajectory: Trajectory, draws: Sequence[Draw]) -> None:
    """Adds to sampled segments the ids that a grammar, top-k or top-p left, if one was on. If a token was sampled several
    times after the same ids, takes those of the draw with its log-prob: only some of them may have had a grammar."""
    if not any(kept is not None for draw in draws for kept in draw.kept_ids):
        return
    ours: list[Kept | None] = [None] * trajectory.response_length
    log_probs = trajectory.response_log_probs
    for draw in draws:
        for place, (kept, log_prob) in enumerate(zip(draw.kept_ids, draw.log_probs), draw.place):
            if log_prob == log_probs[place]:
                ours[place] = kept
    start = 0
    for number, segment in enumerate(trajectory.segments):
        end = start + len(segment.token_ids)
        if segment.provenance is Provenance.SAMPLED:
            trajectory.segments[number] = segment._replace(kept_ids=tuple(ours[start:end]))
        start = end


def _engine_log_prob(draws: Sequence[Draw], position: int, claimed: float, trajectory: Trajectory) -> float:
    """Returns the engine's log-prob of the token at a response position; the loop's, `claimed`, must equal it up to float32
    rounding. If the token was sampled several times after the same ids, takes the matching one."""
    drawn = [d.log_probs[position - d.place] for d in draws if 0 <= position - d.place < len(d.log_probs)]
    ours = next((each for each in drawn if math.isclose(each, claimed, rel_tol=1e-5, abs_tol=1e-6)), None)
    if ours is None:
        raise EtudeError(
            f"the agent loop gave response token {position} of {trajectory.request_id} the log-prob {claimed:.6g}, and the "
            f"engine drew it with {drawn[-1]:.6g}: keep log_probs as generate() returned them, or give none"
        )
    return ours
