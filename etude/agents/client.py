"""`TrajectoryClient`: one trajectory's access to the engine; it records everything that the engine sampled.

Invariant: `histories` hold every sampled token after exactly the ids and images of its input; what a loop returns is
validated against them (`etude.agents.validation`).
"""

from __future__ import annotations

import math
import time
from array import array
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from etude.errors import ConfigError, EngineError, EtudeError, InfrastructureError
from etude.inference import Engine, SamplingParams, TokenOutput
from etude.schemas import ImageInput
from etude.seeds import request_seed
from etude.tools import BaseTool, ToolSession
from etude.trace import span
from etude.trajectory import KeptIds, Provenance, RoutedExperts, StopReason, Trajectory


class TrajectoryClient:
    """The `server_manager` of agent loops.

    Request t of a trajectory, counted in order of submission, samples with a seed derived from the trajectory's seed and t:
    no two turns, branches or sequences share random numbers. Several requests may be in flight at once; each then has its
    own id at the engine (see `RequestIds`).
    """

    def __init__(self, engine: Engine, request_id: str, decode: Callable[[Sequence[int]], str] | None = None) -> None:
        """`decode` turns ids into the texts of a generation's trace span; without it, the span has only lengths."""
        self._engine, self.request_id, self._decode = engine, request_id, decode
        self.histories: list[History] = []
        self.sessions: list[ToolSession] = []  # that the agent loop entered
        self.tools: Mapping[str, BaseTool] = {}  # that the run has
        self._ended = False
        self._num_requests = self._num_answered = 0
        self.num_sampled = 0  # tokens, over all turns and sequences
        self._ids = RequestIds(engine, request_id)

    async def generate(
        self,
        request_id: str | None = None,
        *,
        prompt_ids: Sequence[int],
        sampling_params: SamplingParams | Mapping[str, Any],
        draw: int | None = None,
        images: Sequence[ImageInput] | None = None,
        **media: Any,
    ) -> TokenOutput:
        """Samples one turn. `request_id` is ignored: the engine gets the trajectory's own id.

        `draw` replaces the request's number in its seed: the same draw gives the same random numbers.

        Raises:
            ConfigError: an unknown sampling parameter, or media that engines do not take.
            EtudeError: `prompt_ids` are not token ids.
            EngineError: the engine failed, aborted the request, or returned a log-prob that is not finite.
            InfrastructureError: the trajectory is over (the loop kept running after its time limit).
        """
        if self._ended:
            raise InfrastructureError(f"trajectory {self.request_id} is over: nothing more is sampled for it")
        params = SamplingParams.of(sampling_params)
        seed = request_seed(params.seed, self._num_requests if draw is None else draw)
        self._num_requests += 1  # before the await: concurrent requests must not share a seed
        prompt, shown_images = token_ids(prompt_ids, "prompt_ids"), _images(images, media) if images or media else ()
        # A text-only engine need not have the parameter `images`.
        given: dict[str, Any] = {"images": shown_images} if shown_images else {}
        with span("generation", "generate") as recorded:
            name = self._ids.enter()
            try:
                output = await self._engine.generate(name, prompt, params.seeded(seed), **given)
            finally:
                self._ids.leave(name)
            if recorded is not None:
                recorded.set(
                    turn=self._num_answered,
                    prompt_tokens=len(prompt),
                    response_tokens=len(output.token_ids),
                    stop_reason=output.stop_reason,
                )
                if self._decode is not None:
                    recorded.set(prompt=self._decode(prompt), response=self._decode(output.token_ids))
        if output.stop_reason == "aborted":
            raise EngineError(f"the engine aborted the request of trajectory {self.request_id}")
        if not all(map(math.isfinite, output.log_probs)):
            raise EngineError(
                f"the engine drew a token of trajectory {self.request_id} with a log-prob that is not finite"
            )
        last = self.histories[-1].context if self.histories else None
        if last is None or prompt[: len(last)] != last:
            self.histories.append(History())
        self.histories[-1].add(prompt, output, tuple([image.digest for image in shown_images]))
        self._num_answered += 1
        self.num_sampled += len(output.token_ids)
        return output

    async def sample_turn(
        self,
        trajectory: Trajectory,
        sampling: SamplingParams,
        budget: tuple[int, StopReason],
        decode: Callable[[Sequence[int]], str],
    ) -> tuple[TokenOutput, StopReason | None]:
        """Samples the next assistant turn within a budget (see `tightest_budget`) and adds it to the trajectory; returns the
        output, and the stop reason if the turn was truncated."""
        most, reason = budget
        started = time.perf_counter()
        output = await self.generate(
            prompt_ids=trajectory.context_ids(),
            sampling_params=sampling.within(most),
            images=tuple(trajectory.images) or None,
        )
        trajectory.add_time("generate_sequences", time.perf_counter() - started)
        trajectory.append(
            output.token_ids, Provenance.SAMPLED, log_probs=output.log_probs, weight_versions=output.weight_versions
        )
        trajectory.assistant_turns += 1
        trajectory.messages.append({"role": "assistant", "content": decode(output.token_ids)})
        if output.stop_reason == "stop":
            return output, None
        whole = len(output.token_ids) >= min(most, sampling.max_tokens)  # else the engine's own context limit cut it
        return output, reason if whole else StopReason.CONTEXT_LENGTH

    @property
    def progress(self) -> int:
        """Number of generations and tool calls that have ended."""
        return self._num_answered + sum(session.ended for session in self.sessions)

    @property
    def waits_for(self) -> str:
        """What the trajectory waits for: a tool, the engine, or else its agent."""
        tools = (f"tool {call.requested.name}" for session in self.sessions for call in session.running)
        return next(tools, "the engine" if self._ids.in_flight else "its agent's own code")

    def end(self) -> None:
        """Ends the trajectory: later requests are rejected."""
        self._ended = True
        self._ids.end()


class RequestIds:
    """Ids of one trajectory's requests at the engine. `own` is the trajectory's id, which the caller opens before the first
    request and closes after the last.

    The engine serves one request per id at a time; it keeps an id's KV cache from turn to turn, and in deterministic mode
    waits for the id's next request. A request made while another is in flight gets a temporary id, closed when it is done.

    Invariant: no id has two requests in flight. The engine never waits for a trajectory that is itself waiting: while only
    temporary ids are in flight, `own` is closed; it is reopened once none is.
    """

    def __init__(self, engine: Engine, own: str) -> None:
        self._engine, self.own = engine, own
        self.in_flight: set[str] = set()
        self._num_temporary = 0
        self._own_is_open = True
        self._ended = False

    def end(self) -> None:
        """Marks the trajectory as over: `own` is not reopened."""
        self._ended = True

    def enter(self) -> str:
        """Returns the id for a new request; pass it to `leave` when the request is done."""
        if not self.in_flight:
            name = self.own
        else:
            self._num_temporary += 1
            name = f"{self.own}#{self._num_temporary}"
            self._engine.open([name])
        self.in_flight.add(name)
        return name

    def leave(self, name: str) -> None:
        """Releases the id of a request that has ended, successfully or not."""
        self.in_flight.discard(name)
        if name != self.own:
            self._engine.close(name)
        elif self.in_flight:
            self._engine.close(name)
            self._own_is_open = False
        if not self.in_flight and not self._own_is_open and not self._ended:
            self._engine.open([self.own])
            self._own_is_open = True


class History:
    """A context that grew turn by turn.

    Attributes:
        context: its token ids.
        turns: per sampled turn, (its start in `context`, log-probs, kept ids as in `TokenOutput`, digests of the images
            before it).
        experts: the routed experts of its tokens, if the engine returns them.
    """

    def __init__(self) -> None:
        self.context: list[int] = []
        self.turns: list[tuple[int, list[float], KeptIds, tuple[int, ...]]] = []
        self.experts: RoutedExperts | None = None

    def add(self, prompt: list[int], output: TokenOutput, seen: tuple[int, ...]) -> None:
        """Adds a turn, whose prompt begins with this context and shows the images `seen`."""
        self.context += prompt[len(self.context) :]
        kept = tuple(output.kept_ids or ()) or (None,) * len(output.token_ids)
        self.turns.append((len(self.context), list(output.log_probs[: len(output.token_ids)]), kept, seen))
        self.context += output.token_ids
        self.experts = output.routed_experts if self.experts is None else self.experts.extended(output.routed_experts)


def token_ids(given: Any, name: str) -> list[int]:
    """Converts a sequence, an array or tensor of one row, or a tokenizer's `BatchEncoding` to a list of token ids.

    Raises:
        EtudeError: `given` is anything else; the message begins with `name`.
    """
    ids: Any = given
    if type(ids) is not list:
        ids = ids.get("input_ids") if isinstance(ids, Mapping) else ids
        ids = ids.tolist() if hasattr(ids, "tolist") else ids
    if isinstance(ids, list | tuple) and len(ids) == 1 and isinstance(ids[0], list | tuple):
        ids = ids[0]
    if isinstance(ids, list | tuple):
        try:
            whole = array("I", ids)  # the fastest check that all are non-negative integers
            return list(ids) if set(map(type, ids[:1])) <= {int} else whole.tolist()
        except (TypeError, OverflowError):
            wrong = next(each for each in ids if not (hasattr(each, "__index__") and 0 <= int(each) < 1 << 32))
            found = f"{wrong!r:.40} ({type(wrong).__name__})"
    else:
        found = type(ids).__name__
    raise EtudeError(
        f"{name} must be a list of token ids, and holds {found}: of what a tokenizer returns, take input_ids "
        "(apply_chat_template with tokenize=True returns a BatchEncoding unless return_dict=False)"
    )


def _images(images: Sequence[ImageInput] | None, media: Mapping[str, Any]) -> Sequence[ImageInput]:
    """Returns the images to pass to the engine; loops written for verl call them `image_data`, and pass None or empty media
    if there are none."""
    others = {name: value for name, value in media.items() if name == "image_data" or not is_empty(value)}
    shown: Sequence[ImageInput] = others.pop("image_data", images) or ()
    if others:
        raise ConfigError(f"generate() takes no '{next(iter(others))}'")
    for image in shown:
        if not isinstance(image, ImageInput):
            raise ConfigError(f"generate() takes images as `read_images` gives them, not {type(image).__name__}")
    return shown


def is_empty(value: Any) -> bool:
    """Whether `value` is empty: None, 0, or a container of only such values, like `{"images": None}`."""
    if isinstance(value, Mapping):
        return all(map(is_empty, value.values()))
    if isinstance(value, list | tuple):
        return all(map(is_empty, value))
    return value is None or (isinstance(value, int | float | str) and not value)
