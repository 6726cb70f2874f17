"""`GatewaySession`: one trajectory behind a base URL.

Checks requests against the limits, samples them, and records each one once it is answered; several may be in flight at
once. `prefix` finds the recorded turn that a request continues, `turn` parses the sampled turn for its response.

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

from etude.agents.base import AgentContext, tightest_budget
from etude.agents.client import TrajectoryClient
from etude.agents.gateway.chat_api import Dialect
from etude.agents.gateway.messages import (
    ImageHeader,
    Message,
    decode_images,
    plain_messages,
    read_image_sizes,
)
from etude.agents.gateway.prefix import Prefix, longest_sequence, match_prefix
from etude.agents.gateway.request import TOO_LONG, ChatRequest, GatewayError, TooLong, grammar_of, read_request
from etude.agents.gateway.rollout_tree import Completion, History, RolloutTree, Turn
from etude.agents.gateway.turn import ParsedTurn, parse_turn
from etude.agents.roles import check_role
from etude.errors import GrammarError, InfrastructureError, is_infrastructure, one_line
from etude.inference import SamplingParams, TokenOutput
from etude.rewards.finite import MAX_REWARD, as_reward
from etude.seeds import client_draw
from etude.timeouts import settle
from etude.trajectory import StopReason, Trajectory

if TYPE_CHECKING:
    from etude.schemas import ImageInput

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
        takes_rewards: whether step rewards may be posted; off where a verifier alone gives the reward, since programs that
            the model writes may have the agent's key.
    """

    own_sampling: bool = False
    max_n: int = 16
    max_turns: int = 1000
    request_seconds: float | None = None
    max_image_mb: int | None = None
    takes_rewards: bool = True


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
        self.tree = RolloutTree()
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
        self.rewards_roles = False
        """Whether a reward named its role."""
        self._rewarded: set[str | None] = set()  # the idempotency keys of rewards
        self._closed = False
        self._requests = self._answered = self._admitted = 0
        self._images_in_flight: list[tuple[ImageInput, ...]] = []

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

    def read(self, body: bytes, dialect: Dialect, role: str = "") -> ChatRequest:
        """Parses a request body written in `dialect`, of the agent `role`.

        Raises:
            GatewayError: it is malformed, asks for something unsupported, or is too long (which sets `refused`); or there
                is no such role.
        """
        self._check_role(role, "X-Agent-Role")
        longest = longest_sequence(self._context.options)
        try:
            return read_request(body, longest, lambda request: dialect.read(request, self.replies), dialect.names)
        except TooLong as error:
            raise self._too_long(str(error), longest) from error

    def _check_role(self, role: object, param: str) -> str:
        try:
            return check_role(role, self._context.options.agent.roles)
        except ValueError as error:
            raise GatewayError(str(error), param=param) from error

    async def complete(self, request: ChatRequest, role: str = "") -> Completion:
        """Answers a request of the agent `role`.

        Raises:
            GatewayError: it is rejected, or the engine or another part of Étude failed (which sets `broken`).
        """
        try:
            return await self._complete(request, role)
        except GatewayError:
            raise
        except GrammarError as error:
            raise GatewayError(one_line(error), code="grammar") from error
        except Exception as error:
            raise self.failed(error) from error

    async def _complete(self, request: ChatRequest, role: str) -> Completion:
        arrived = self.last_used = time.monotonic()
        self._check_limits(request)
        messages, addresses = plain_messages(request.messages)
        longest = longest_sequence(self._context.options)
        if (count := sum(map(len, addresses))) > longest:  # each takes at least one token
            raise self._too_long(f"{count} images", longest)
        headers: list[list[ImageHeader]] = [[]] * len(messages)
        if any(addresses):
            roles = [message["role"] for message in messages]
            [headers] = await self._gather([read_image_sizes(addresses, roles, self._context)], arrived)
            self._check_limits(request)  # again: other requests may have arrived meanwhile
        params = self._params(request)
        sampling = {name: getattr(params, name) for name in _SAMPLING}
        history = History(messages, headers, json.dumps([request.tools, sampling, role]))
        prefix = match_prefix(self.tree, history, request, self._context)
        self._check_room(prefix)
        images: tuple[ImageInput, ...] = ()
        turns: list[Turn] = []
        self._admitted += 1
        try:
            if prefix.image_headers:
                [decoded] = await self._gather([decode_images(prefix.image_headers, self._context)], arrived)
                images = self._share_images(decoded)
            parser = self._context.parser
            prompt_end = parser.decode(prefix.ids[-_TAIL:])
            params = replace(params, grammar=grammar_of(request, parser, prompt_end))
            number = self._requests
            self._requests += 1
            self.refused = None
            started = time.perf_counter()
            room = prefix.room, prefix.ending
            most, cut_by = tightest_budget(room, self.tree.sampled, self._context.options.multi_turn)
            most = max(most, 1)
            outputs = await self._sample(prefix, images, params, request, arrived, most)
            thinking = parser.opens_reasoning(prompt_end)
            parsed_turns = [await parse_turn(parser, output, request, thinking) for output in outputs]
            if self._closed:
                raise self._session_over()
            seconds = (time.perf_counter() - started) / len(outputs)
            self._answered += 1
            for choice, parsed in enumerate(parsed_turns):
                order, output = (number, -choice), parsed.output
                message = _message_of(parsed, order)
                limit = cut_by if len(output.token_ids) >= most else StopReason.TURN_LENGTH  # else the request's own
                turn = Turn(
                    prefix.parent,
                    order,
                    prefix.context,
                    prefix.new_messages,
                    images,
                    message,
                    parsed,
                    limit if output.stop_reason == "length" else None,
                    sampling,
                    seconds,
                    bool(request.tools),
                    role,
                )
                self.tree.add(turn, history.after(message))
                turns.append(turn)
        finally:
            self._admitted -= 1
            self.last_used = time.monotonic()
            self._images_in_flight = [each for each in self._images_in_flight if each is not images]
        return Completion(request, prefix.ids, f"{self.name}-{number}", turns)

    def keep_reply(self, name: str, conversation: Iterable[Message]) -> None:
        """Keeps the conversation up to a response. Conversations overlap, so each distinct message is stored once."""
        digests = [(hashlib.blake2b(json.dumps(each).encode(), digest_size=16).digest(), each) for each in conversation]
        self.replies[name] = [self._kept_messages.setdefault(digest, each) for digest, each in digests]

    def reward(self, body: object, once: str | None = None) -> None:
        """Adds `{"reward": number, "name": text?, "role": text?}` as a step reward of the last turn, or of that role's.
        `once` is its idempotency key: the rewards of a key count once.

        Raises:
            GatewayError: it is malformed, nothing was sampled yet, or a verifier alone gives the reward.
        """
        if not self.rules.takes_rewards:
            raise GatewayError("openai_agent.verifier alone gives the reward of this rollout", status=403)
        if once in self._rewarded:
            return
        given = body if isinstance(body, Mapping) else {}
        name = given.get("name", "agent")
        if not isinstance(name, str) or set(given) - {"reward", "name", "role"} or given.get("reward") is None:
            raise GatewayError("a reward is {'reward': number}, with an optional 'name' and 'role'", param="reward")
        try:
            value = as_reward(given["reward"], "the agent")
        except InfrastructureError as error:
            raise GatewayError(one_line(error), param="reward") from error
        turns = self.tree.turns
        if "role" in given:
            role = self._check_role(given["role"], "role")
            turns = [turn for turn in turns if turn.role == role]
        if not turns:
            raise GatewayError("there is no turn yet that a reward could be for")
        if len(self.tree.rewards) >= MOST_REWARDS:
            raise GatewayError(f"this session's {MOST_REWARDS} rewards are used up", param="reward")
        if sum(abs(each) for _, _, each in self.tree.rewards) + abs(value) > MAX_REWARD:
            raise GatewayError(f"a session's rewards may add up to {MAX_REWARD:g} in size", param="reward")
        self.last_used = time.monotonic()
        self._rewarded |= {once} - {None}
        self.rewards_roles |= "role" in given
        self.tree.rewards.append((max(turns, key=lambda turn: turn.order), name[:100], value))

    def trajectories(self, *, by_role: bool = True) -> list[Trajectory]:
        """Returns the sequences in time order, the main one last; a single empty one if there are no turns. `by_role`: see
        `RolloutTree.sequences`."""
        name = self.request_id
        train = self._context.options.agent.openai_agent.train
        made = [Trajectory(name, [])]
        if self.tree.turns:
            made = self.tree.sequences(name, train, by_role=by_role)
        if self.refused is not None:
            made[-1].stop_reason = self.refused
        return made

    # -- before sampling -----------------------------------------------------------------------------------------

    def _check_limits(self, request: ChatRequest) -> None:
        options = self._context.options.multi_turn
        if self._closed:
            raise self._session_over()
        if (request.n or 1) > self.rules.max_n:
            raise GatewayError(f"n: at most {self.rules.max_n} choices", param="n")
        most = self.rules.max_turns if options.max_assistant_turns is None else options.max_assistant_turns
        if self._answered + self._admitted >= most:
            raise self._refuse(StopReason.MAX_ASSISTANT_TURNS, f"this session's {most} turns are used up")
        budget = options.max_trajectory_tokens
        if budget is not None and self.tree.turns and budget - self.tree.sampled < options.min_answer_tokens:
            raise self._refuse(StopReason.TRAJECTORY_LENGTH, f"this session's {budget} sampled tokens are used up")
        if options.max_seconds is not None and time.monotonic() - self.started >= options.max_seconds:
            raise self._refuse(StopReason.TIME_LIMIT, f"this session's {options.max_seconds:g} seconds have passed")

    def _share_images(self, decoded: Sequence[ImageInput]) -> tuple[ImageInput, ...]:
        """Returns the images of a request, which is now in flight: of those that turns or other requests have, theirs.

        Raises:
            GatewayError: all of them together exceed the limit.
        """
        held = (*self._images_in_flight, *(turn.images for turn in self.tree.turns))
        known = {image.digest: image for images in held for image in images}
        shared = tuple([known.setdefault(image.digest, image) for image in decoded])
        most = self.rules.max_image_mb
        if most is not None and sum(image.pixel_values.nbytes for image in known.values()) > most << 20:
            raise GatewayError(f"this session's {most} MB of images are used up", param="messages")
        self._images_in_flight.append(shared)
        return shared

    def _refuse(self, reason: StopReason, message: str, code: str | None = None) -> GatewayError:
        self.refused = reason
        return GatewayError(message, code=code or reason.value)

    def _params(self, request: ChatRequest) -> SamplingParams:
        own: dict[str, Any] = {name: getattr(self._sampling, name) for name in _SAMPLING}
        if self.rules.own_sampling:
            own |= {name: value for name in _SAMPLING if (value := getattr(request, name)) is not None}
            own["top_k"] = own["top_k"] or -1
        sampling = self._context.with_stops(self._sampling, self._context.parser)
        seed = 0 if self.rules.own_sampling and request.seed is not None else sampling.seed
        return replace(sampling, **own, stop=(*sampling.stop, *request.stops), seed=seed)

    def _check_room(self, prefix: Prefix) -> None:
        options, first = self._context.options, not self.tree.turns
        malformed = options.multi_turn.max_consecutive_malformed_calls
        if malformed is not None and prefix.parent is not None and prefix.parent.malformed_in_a_row() >= malformed:
            raise self._refuse(StopReason.MAX_MALFORMED_CALLS, f"{malformed} malformed calls in a row")
        least = 1 if first else options.multi_turn.min_answer_tokens
        if prefix.room < least or (first and len(prefix.ids) > options.prompt_length):
            raise self._too_long(f"{len(prefix.ids)}", longest_sequence(options), prefix.ending)

    def _too_long(self, length: str, longest: int, ending: StopReason = StopReason.RESPONSE_LENGTH) -> GatewayError:
        options = self._context.options
        reason = ending if self.tree.turns else StopReason.PROMPT_TOO_LONG
        return self._refuse(
            reason,
            f"This model's maximum context length is {longest} tokens, of which the first prompt may have "
            f"{options.prompt_length} and what follows a prompt {options.response_length}; these messages have {length}.",
            TOO_LONG,
        )

    # -- sampling ------------------------------------------------------------------------------------------------

    async def _gather(self, works: Iterable[Coroutine[Any, Any, T]], arrived: float) -> list[T]:
        """Runs the coroutines of one request concurrently and returns their results; ending the session cancels them."""
        limit = self.rules.request_seconds
        timeout = None if limit is None else max(arrived + limit - time.monotonic(), 0.0)
        tasks = [asyncio.ensure_future(work) for work in works]
        self._at_work.update(tasks)
        try:
            _, waiting = await asyncio.wait(tasks, timeout=timeout, return_when=asyncio.FIRST_EXCEPTION)
            if any(task.cancelled() for task in tasks):
                raise self._session_over()
            results = [task.result() for task in tasks if task.done()]
            if waiting:
                raise GatewayError(f"no answer within {limit:g} s", code="timeout", status=504)
        finally:
            await settle(tasks)
            self._at_work.difference_update(tasks)
        if self._closed:
            raise self._session_over()
        return results

    async def _sample(
        self,
        prefix: Prefix,
        images: tuple[ImageInput, ...],
        params: SamplingParams,
        request: ChatRequest,
        arrived: float,
        room: int,
    ) -> list[TokenOutput]:
        most = min(request.most_tokens or room, room)
        all_images = (*(() if prefix.parent is None else prefix.parent.all_images()), *images)
        ask = partial(
            self._client.generate,
            prompt_ids=prefix.ids,
            sampling_params=replace(params, max_tokens=most),
            images=all_images or None,
        )
        draws: list[int | None] = [None] * (request.n or 1)
        if request.seed is not None:
            draws = [client_draw(request.seed, choice, prefix.ids) for choice in range(len(draws))]
        outputs = await self._gather([ask(draw=draw) for draw in draws], arrived)
        if not all(output.token_ids for output in outputs):  # the model's own limit is below the configured ones
            raise self._too_long(f"{len(prefix.ids)}", len(prefix.ids))
        return outputs

    def _session_over(self) -> GatewayError:
        return GatewayError(f"the session '{self.name}' is over", code="session_not_found", status=404)

    def failed(self, error: Exception) -> GatewayError:
        """Sets `broken` and returns the error response, for a failure that is not the request's fault."""
        if not self.broken.done():
            self.broken.set_result(error)
        status = 503 if is_infrastructure(error) else 500
        return GatewayError(f"{type(error).__name__}: {one_line(error)}", code="engine_failed", status=status)


def _message_of(parsed: ParsedTurn, order: tuple[int, int]) -> Message:
    """Returns the assistant message of a turn. A call of a format in which the model writes no ids gets one of nine letters
    and digits, as Mistral's template requires, and the same in every run, since templates may render it."""
    message: Message = {"role": "assistant", "content": parsed.content}
    if parsed.reasoning:
        message["reasoning_content"] = parsed.reasoning
    if parsed.calls:
        message["tool_calls"] = [
            {
                "id": call.id or hashlib.blake2b(f"{order}/{number}".encode(), digest_size=8).hexdigest()[:9],
                "type": "function",
                "function": {"name": call.name, "arguments": call.arguments},
            }
            for number, call in enumerate(parsed.calls)
        ]
    return message
