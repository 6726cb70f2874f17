"""From a serving engine's response to a `TokenOutput`, with everything checked that training relies on.

Invariant: one finite log-prob per token, none positive beyond rounding; a turn that ended with "stop" ends with a stop id
of the request, or at one of the request's stop texts. A response that violates this is an `EngineError`: no token of it
reaches a trajectory.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from etude.errors import EngineError
from etude.inference.types import SamplingParams, TokenOutput

_ROUNDING = 1e-3  # a probability of one, computed in bfloat16, may come out as slightly more


@dataclass(frozen=True)
class Answer:
    """What an engine says it sampled; `ending` is one of stop, length, abort, as servers call them.

    `versions`: spans (version, start, end) over the tokens, or None if the engine reports none.
    """

    token_ids: Any
    log_probs: Any
    ending: Any
    versions: Sequence[tuple[int, int, int]] | None = None


def checked_output(answer: Answer, params: SamplingParams, version: int, source: str) -> TokenOutput:
    """`answer` as a `TokenOutput`; log-probs of greedy decoding are 0, those of a point mass.

    Args:
        version: weight version of tokens that the answer's spans do not cover.
        source: named in errors.

    Raises:
        EngineError: the answer cannot be trained on; says why.
    """
    ids, log_probs = answer.token_ids, answer.log_probs
    if not isinstance(ids, list) or not all(type(token) is int and token >= 0 for token in ids):
        raise EngineError(f"{source}: the response has no list of token ids")
    if params.temperature == 0:
        log_probs = [0.0] * len(ids)
    if not isinstance(log_probs, list) or len(log_probs) != len(ids):
        count = len(log_probs) if isinstance(log_probs, list) else "no"
        raise EngineError(f"{source}: {count} log-probs for {len(ids)} tokens")
    for place, value in enumerate(log_probs):
        if isinstance(value, bool) or not isinstance(value, float | int) or not math.isfinite(value):
            raise EngineError(f"{source}: the log-prob of token {place} is not a finite number: {value!r:.40}")
        if value > _ROUNDING:
            raise EngineError(f"{source}: the log-prob of token {place} is positive: {value}")
    if len(ids) > params.max_tokens:
        raise EngineError(f"{source}: {len(ids)} tokens, though {params.max_tokens} were asked for at most")
    return TokenOutput(
        ids,
        [float(value) for value in log_probs],
        _reason(answer.ending, ids, params, source),
        _spread(answer, version),
    )


def _reason(ending: Any, ids: list[int], params: SamplingParams, source: str) -> str:
    if ending == "abort":
        return "aborted"
    if ids and (ids[-1] in params.stop_token_ids or (params.stop and ending == "stop")):
        return "stop"
    if ending != "length":
        last = f"token {ids[-1]}" if ids else "no token"
        raise EngineError(f"{source}: ended as {ending!r:.40} after {last}, which is no stop id of the request")
    return "length"


def _spread(answer: Answer, version: int) -> list[int]:
    versions = [version] * len(answer.token_ids)
    for named, start, end in answer.versions or ():
        for place in range(max(start, 0), min(end, len(versions))):
            versions[place] = named
    return versions
