"""`GatewaySession`: one trajectory behind a base URL.

Checks requests against the limits, samples them, and records each one once it is answered; several may be in flight at
once. `placing` decides where in the recording a request belongs, `reading` parses the sampled turn for its response.

Invariant: the recording is exactly what the engine saw and sampled. A request that fails, is rejected or cancelled leaves no
trace in it.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import time
from collections.abc import Coroutine, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

from etude.agents.base import AgentContext, turn_budget
from etude.agents.client import TrajectoryClient
from etude.agents.gateway.constraint import grammar_of
from etude.agents.gateway.dialect import Dialect
from etude.agents.gateway.images import ImageHeader, KeptImages, decode_images, read_image_sizes
from etude.agents.gateway.messages import History, Message, plain_messages
from etude.agents.gateway.placing import Place, longest_sequence, place_request
from etude.agents.gateway.reading import ReadTurn, read_turn
from etude.agents.gateway.recording import Completion, Recording, RenderedRequest, Turn
from etude.agents.gateway.streaming import LiveAnswer
from etude.agents.gateway.wire import TOO_LONG, ChatRequest, GatewayError, TooLong, read_request
from etude.bounded import settle
from etude.errors import GrammarError, InfrastructureError, is_infrastructure, one_line
from etude.inference import SamplingParams, TokenOutput
from etude.inference.types import OnTokens
from etude.rewards.number import MAX_REWARD, as_reward
from etude.seeds import client_draw
from etude.trajectory import StopReason, Trajectory

if TYPE_CHECKING:
    from etude.images import ImageInput

T = TypeVar("T")

MOST_REWARDS = 10_000
"""Maximum number of step rewards per session."""
_SAMPLING = ("temperature", "top_p", "top_k")
_TAIL = 32  # tokens at a prompt's end that are checked for an opened reasoning block


@dataclass(frozen=True)
class SessionRules:
    """Limits on a session's requests.

    Attributes:
        own_sampling: whether a request's temperature, top_p and top_k apply, and its seed alone determines its samples. Off
            in training: old and new log-probs are compared at the rollout's values, and the samples of one prompt must
            differ whatever seed the agent sets.
        max_n: maximum choices per request.
        max_turns: maximum requests per session, answered or in flight.
        request_seconds: timeout of one request; None if the trajectory has its own time limit.
        max_image_mb: MiB of pixel values that the session's images may take up; None: unlimited.
    """

    own_sampling: bool = False
    max_n: int = 16
    max_turns: int = 1000
    request_seconds: float | None = None
    max_image_mb: int | None = None


class GatewaySession:
    """One trajectory; `sampling` holds the default sampling parameters of its requests."""

    def __init__(
        self,
        name: str,
        client: TrajectoryClient,
        context: AgentContext,
        sampling: SamplingParams,
        rules: SessionRules | None = None,
    ) -> None:
        self.name, self.rules = name, rules or SessionRules()
        self._client, self._context, self._sampling = client, context, sampling
        self.recording = Recording()
        self.replies: dict[str, list[Message]] = {}
        """The conversation up to each response that `previous_response_id` may name, by response id."""
        self._kept_messages: dict[bytes, Message] = {}
        self.refused: StopReason | None = None
        """The limit that rejected the last request, if any."""
        self.broken: asyncio.Future[Exception] = asyncio.get_running_loop().create_future()
        """Set to the exception when a request fails through no fault of its own."""
        self.started = self.last_used = time.monotonic()
        self._at_work: set[asyncio.Task[Any]] = set()
        self.declined: GatewayError | None = None
        """The error response of the last request that failed."""
        self._closed = False
        self._requests = self._answered = self._admitted = 0
        self._images = KeptImages(self.rules.max_image_mb)

    @property
    def in_flight(self) -> int:
        """Number of running tasks that sample choices or decode images."""
        return len(self._at_work)

    @property
    def request_id(self) -> str:
        """The trajectory's request id at the engine."""
        return self._client.request_id

    def end(self) -> None:
        """Cancels all requests in flight; later ones are rejected."""
        self._closed = True
        for task in self._at_work:
            task.cancel()

    async def close(self) -> None:
        """Like `end`, but also waits until the cancelled tasks are done."""
        self.end()
        await settle(set(self._at_work))

    def read(self, body: bytes, dialect: Dialect) -> ChatRequest:
        """Parses a request body written in `dialect`.

        Raises:
            GatewayError: it is malformed, asks for something unsupported, or is too long (which sets `refused`).
        """
        longest = longest_sequence(self._context.options)
        try:
            return read_request(body, longest, lambda request: dialect.read(request, self.replies), dialect.names)
        except TooLong as error:
            raise self._too_long(error.length, longest) from error

    async def complete(self, request: ChatRequest, live: LiveAnswer | None = None) -> Completion:
        """Answers a request; `live` gets the tokens as they are sampled, if the engine streams them.

        Raises:
            GatewayError: it is rejected, or the engine or another part of Étude failed (which sets `broken`).
        """
        try:
            return await self._complete(request, live or LiveAnswer())
        except GatewayError:
            raise
        except GrammarError as error:
            raise GatewayError(400, one_line(error), code="grammar") from error
        except Exception as error:
            raise self.failed(error) from error

    async def _complete(self, request: ChatRequest, live: LiveAnswer) -> Completion:
        arrived = self.last_used = time.monotonic()
        self._check_limits(request)
        messages, addresses = plain_messages(request.messages)
        longest = longest_sequence(self._context.options)
        if (count := sum(map(len, addresses))) > longest:  # each takes at least one token
            raise self._too_long(f"{count} images", longest)
        image_headers: list[list[ImageHeader]] = [[]] * len(messages)
        if any(addresses):
            roles = [message["role"] for message in messages]
            [image_headers] = await self._gather([read_image_sizes(addresses, roles, self._context)], arrived)
            self._check_limits(request)  # again: other requests may have arrived meanwhile
        params = self._params(request)
        digests = [[header.digest for header in shown] for shown in image_headers]
        history = History(messages, digests, json.dumps([request.tools, _sampling_of(params)]))
        place = place_request(self.recording, messages, image_headers, history, request, self._context)
        self._check_room(place)
        images: tuple[ImageInput, ...] = ()
        turns: list[Turn] = []
        self._admitted += 1
        try:
            if place.image_headers:
                [decoded] = await self._gather([decode_images(place.image_headers, self._context)], arrived)
                images = self._images.take(decoded)
            parser = self._context.parser
            prompt_end = parser.decode(place.ids[-_TAIL:])
            thinking = parser.opens_reasoning(prompt_end)
            params = replace(params, grammar=grammar_of(request, parser, prompt_end))
            number = self._requests
            self._requests += 1
            self.refused = None
            started = time.perf_counter()
            rendered = RenderedRequest(request, place.ids, f"{self.name}-{number}")
            callbacks = live.begin(rendered, parser, thinking)
            options = self._context.options.multi_turn
            most, cut_by = turn_budget((place.room, place.ending), self.recording.sampled, options)
            budget = max(most, 1), cut_by
            outputs = await self._sample(place, images, params, request, arrived, budget[0], callbacks)
            reads = [await read_turn(parser, output, request, thinking) for output in outputs]
            if self._closed:
                raise self._session_over()
            seconds = (time.perf_counter() - started) / len(outputs)
            self._answered += 1
            turns = [
                self._record(place, images, history, read, (number, -choice), budget, _sampling_of(params), seconds)
                for choice, read in enumerate(reads)
            ]
        finally:
            self._admitted -= 1
            self.last_used = time.monotonic()
            if not turns:
                self._images.give_back(images)
        return Completion(request, place.ids, rendered.name, turns)

    def keep_reply(self, name: str, conversation: Iterable[Message]) -> None:
        """Keeps the conversation up to a response. Conversations overlap, so each distinct message is stored once."""
        digests = [(hashlib.blake2b(json.dumps(each).encode(), digest_size=16).digest(), each) for each in conversation]
        self.replies[name] = [self._kept_messages.setdefault(digest, each) for digest, each in digests]

    def reward(self, body: object) -> None:
        """Adds `{"reward": number, "name": text?}` as a step reward of the last turn.

        Raises:
            GatewayError: it is malformed, or nothing was sampled yet.
        """
        given = body if isinstance(body, Mapping) else {}
        name = given.get("name", "agent")
        if not isinstance(name, str) or set(given) - {"reward", "name"} or given.get("reward") is None:
            raise GatewayError(400, "a reward is {'reward': number}, with an optional 'name'", param="reward")
        try:
            value = as_reward(given["reward"], "the agent")
        except InfrastructureError as error:
            raise GatewayError(400, one_line(error), param="reward") from error
        if not self.recording.turns:
            raise GatewayError(400, "there is no turn yet that a reward could be for")
        if len(self.recording.rewards) >= MOST_REWARDS:
            raise GatewayError(400, f"this session's {MOST_REWARDS} rewards are used up", param="reward")
        if sum(abs(each) for _, _, each in self.recording.rewards) + abs(value) > MAX_REWARD:
            raise GatewayError(400, f"a session's rewards may add up to {MAX_REWARD:g} in size", param="reward")
        self.last_used = time.monotonic()
        self.recording.rewards.append((self.recording.last, name[:100], value))

    def trajectories(self) -> list[Trajectory]:
        """Returns the sequences in time order, the main one last; a single empty one if there are no turns."""
        name = self.request_id
        made = self.recording.sequences(name) if self.recording.turns else [Trajectory(name, [])]
        if self.refused is not None:
            made[-1].stop_reason = self.refused
        return made

    # -- before sampling -----------------------------------------------------------------------------------------

    def _check_limits(self, request: ChatRequest) -> None:
        options = self._context.options.multi_turn
        if self._closed:
            raise self._session_over()
        if (request.n or 1) > self.rules.max_n:
            raise GatewayError(400, f"n: at most {self.rules.max_n} choices", param="n")
        most = self.rules.max_turns if options.max_assistant_turns is None else options.max_assistant_turns
        if self._answered + self._admitted >= most:
            raise self._refuse(StopReason.MAX_ASSISTANT_TURNS, f"this session's {most} turns are used up")
        budget = options.max_trajectory_tokens
        if budget is not None and self.recording.turns and budget - self.recording.sampled < options.min_answer_tokens:
            raise self._refuse(StopReason.TRAJECTORY_LENGTH, f"this session's {budget} sampled tokens are used up")
        if options.max_seconds is not None and time.monotonic() - self.started >= options.max_seconds:
            raise self._refuse(StopReason.TIME_LIMIT, f"this session's {options.max_seconds:g} seconds have passed")

    def _refuse(self, reason: StopReason, message: str, code: str | None = None) -> GatewayError:
        self.refused = reason
        return GatewayError(400, message, code=code or reason.value)

    def _params(self, request: ChatRequest) -> SamplingParams:
        own: dict[str, Any] = {name: getattr(self._sampling, name) for name in _SAMPLING}
        if self.rules.own_sampling:
            own |= {name: value for name in _SAMPLING if (value := getattr(request, name)) is not None}
            own["top_k"] = own["top_k"] or -1
        sampling = self._context.with_stops(self._sampling, self._context.parser)
        seed = 0 if self.rules.own_sampling and request.seed is not None else sampling.seed
        return replace(sampling, **own, stop=(*sampling.stop, *request.stops), seed=seed)

    def _check_room(self, place: Place) -> None:
        options, first = self._context.options, not self.recording.turns
        malformed = options.multi_turn.max_consecutive_malformed_calls
        if malformed is not None and place.parent is not None and place.parent.malformed_in_a_row() >= malformed:
            raise self._refuse(StopReason.MAX_MALFORMED_CALLS, f"{malformed} malformed calls in a row")
        least = 1 if first else options.multi_turn.min_answer_tokens
        if place.room < least or (first and len(place.ids) > options.prompt_length):
            raise self._too_long(f"{len(place.ids)}", longest_sequence(options), place.ending)

    def _too_long(self, length: str, longest: int, ending: StopReason = StopReason.RESPONSE_LENGTH) -> GatewayError:
        options = self._context.options
        reason = ending if self.recording.turns else StopReason.PROMPT_TOO_LONG
        return self._refuse(
            reason,
            f"This model's maximum context length is {longest} tokens, of which the first prompt may have "
            f"{options.prompt_length} and what follows a prompt {options.response_length}; these messages have {length}.",
            TOO_LONG,
        )

    # -- sampling ------------------------------------------------------------------------------------------------

    async def _gather(self, works: Iterable[Coroutine[Any, Any, T]], arrived: float) -> list[T]:
        """Runs the coroutines of one request concurrently and returns their results; ending the session cancels them."""
        tasks = [asyncio.ensure_future(work) for work in works]
        self._at_work.update(tasks)
        try:
            _, waiting = await asyncio.wait(
                tasks, timeout=self._seconds_left(arrived), return_when=asyncio.FIRST_EXCEPTION
            )
            results = [self._result(task) for task in tasks if task.done()]
            if waiting:
                raise GatewayError(504, f"no answer within {self.rules.request_seconds:g} s", code="timeout")
        finally:
            await settle(tasks)
            self._at_work.difference_update(tasks)
        if self._closed:
            raise self._session_over()
        return results

    def _result(self, task: asyncio.Task[T]) -> T:
        if task.cancelled():
            raise self._session_over()
        return task.result()

    def _seconds_left(self, arrived: float) -> float | None:
        limit = self.rules.request_seconds
        return None if limit is None else max(arrived + limit - time.monotonic(), 0.0)

    async def _sample(
        self,
        place: Place,
        images: tuple[ImageInput, ...],
        params: SamplingParams,
        request: ChatRequest,
        arrived: float,
        room: int,
        callbacks: Sequence[OnTokens],
    ) -> list[TokenOutput]:
        most = min(request.most_tokens or room, room)
        all_images = (*(() if place.parent is None else place.parent.all_images()), *images)
        ask = partial(
            self._client.generate,
            prompt_ids=place.ids,
            sampling_params=replace(params, max_tokens=most),
            images=all_images or None,
        )
        draws: list[int | None] = [None] * (request.n or 1)
        if request.seed is not None:
            draws = [client_draw(request.seed, choice, place.ids) for choice in range(len(draws))]
        outputs = await self._gather([ask(draw=draw, on_tokens=take) for draw, take in zip(draws, callbacks)], arrived)
        if not all(output.token_ids for output in outputs):  # the model's own limit is below the configured ones
            raise self._too_long(f"{len(place.ids)}", len(place.ids))
        return outputs

    def _session_over(self) -> GatewayError:
        return GatewayError(404, f"the session '{self.name}' is over", code="session_not_found")

    def failed(self, error: Exception) -> GatewayError:
        """Sets `broken` and returns the error response, for a failure that is not the request's fault."""
        if not self.broken.done():
            self.broken.set_result(error)
        status = 503 if is_infrastructure(error) else 500
        return GatewayError(status, f"{type(error).__name__}: {one_line(error)}", code="engine_failed")

    def _record(
        self,
        place: Place,
        images: tuple[ImageInput, ...],
        history: History,
        read: ReadTurn,
        order: tuple[int, int],
        budget: tuple[int, StopReason],
        sampling: dict[str, float],
        seconds: float,
    ) -> Turn:
        room, cut_by = budget
        message: Message = {"role": "assistant", "content": read.content}
        if read.reasoning:
            message["reasoning_content"] = read.reasoning
        if read.calls:
            message["tool_calls"] = [
                {
                    "id": call.id or _call_id(order, n),
                    "type": "function",
                    "function": {"name": call.name, "arguments": call.arguments},
                }
                for n, call in enumerate(read.calls)
            ]
        length = len(read.output.token_ids)
        turn = Turn(
            place.parent,
            order,
            place.context,
            place.new_messages,
            images,
            message,
            read,
            len(place.ids) + length,
            place.response_length + length,
            cut_by if read.output.stop_reason == "length" and length >= room else None,
            sampling,
            seconds,
        )
        self.recording.add(turn, history.after(message))
        return turn


def _sampling_of(params: SamplingParams) -> dict[str, float]:
    return {name: getattr(params, name) for name in _SAMPLING}


def _call_id(order: tuple[int, int], number: int) -> str:
    """A call id for formats in which the model writes none: nine letters and digits, as Mistral's template requires, and
    the same in every run, since templates may render it."""
    return hashlib.blake2b(f"{order}/{number}".encode(), digest_size=8).hexdigest()[:9]
