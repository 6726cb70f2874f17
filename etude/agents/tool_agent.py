"""`tool_agent`: generates, runs the tools that the model called, and generates again, until the trajectory ends; and
`env_agent`, the same loop for rows whose turns an environment answers.

    state              next state
    PENDING            GENERATING, or TERMINATED if the prompt does not fit
    GENERATING         PROCESSING_TOOLS (the turn has tool calls), INTERACTING (it has none, and there is somebody who
                       answers: an interaction or an environment), TERMINATED
    PROCESSING_TOOLS   GENERATING, COMPACTING (the context is longer than `compact.at_tokens`), TERMINATED
    INTERACTING        GENERATING, COMPACTING, TERMINATED
    COMPACTING         GENERATING, in a new sequence (see `compaction`), TERMINATED

PENDING renders the prompt; if it does not fit, or leaves no room for an answer, the trajectory ends (`PROMPT_TOO_LONG`).
After each generation, stop conditions are checked in this order:

1. the turn was truncated by, or used up, the response length, the context length, or the token budget of the trajectory or
   the turn → `RESPONSE_LENGTH`, `CONTEXT_LENGTH`, `TRAJECTORY_LENGTH`, `TURN_LENGTH`;
2. the turn has no tool call, not even a malformed one, and nobody answers it → `COMPLETED`;
3. the turn has a malformed call and `malformed_calls` is `end` → `MALFORMED_CALL`;
4. the turn's tools run, or the interaction or environment answers (after the last allowed turn too: the model never sees the
   results, but their rewards count) and may end the conversation, in a tool of its own too → `COMPLETED`. A call that times
   out or is unreachable after its retries is an infrastructure failure, never text for the model: it ends the rollout, which
   is tried again from fresh state, and then dropped;
5. `max_consecutive_malformed_calls` reached → `MAX_MALFORMED_CALLS`; `max_assistant_turns` reached →
   `MAX_ASSISTANT_TURNS`; `max_user_turns` reached → `MAX_USER_TURNS`; `max_seconds` have passed → `TIME_LIMIT`;
   fewer than `min_answer_tokens` of `max_trajectory_tokens` left → `TRAJECTORY_LENGTH`;
6. the chat template can render neither the tool results nor a placeholder for them → `CONTEXT_REFUSED` (the row is
   dropped);
7. the tool results plus `min_answer_tokens` do not fit, even truncated to the minimum → `TOOL_RESPONSE_OVERFLOW`.

A subclass may override the state handlers, `_handle_*_state`, and `_call_tool`, which have verl's names and arguments.
`agent_data` is a `Conversation`; its token lists are read-only.

Invariant: the context that the model sees is the prompt followed by the trajectory's segments, token for token. Tools and
environments are released however the trajectory ends.
"""

from __future__ import annotations

import inspect
import json
import logging
import time
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from functools import cache, partial
from typing import Any, ClassVar

from etude.agents.agent_data import AgentState, Conversation, end
from etude.agents.base import AgentContext, AgentLoopBase, register, response_room, tightest_budget
from etude.agents.compaction import request_of, summary_room, with_summary
from etude.agents.images import read_all
from etude.agents.interactions.base import entry_of
from etude.agents.tool_messages import (
    NOT_EXECUTED,
    drop_images,
    malformed_record,
    refused_calls,
    render_response,
    replace_unwritable,
    shorten_results,
    tool_messages,
    unrun_record,
    with_result_tag,
)
from etude.chat import ToolParser
from etude.chat.parsers import find_other_format
from etude.chat.placeholders import append_to_last_user
from etude.environments import EnvironmentEntry, EnvironmentSession
from etude.errors import ConfigError, DataError, EtudeError, InfrastructureError, one_line
from etude.inference import SamplingParams, TokenOutput
from etude.models import ImageReader
from etude.registry import did_you_mean
from etude.rewards.finite import as_reward
from etude.schemas import FunctionCall, ToolResponse
from etude.timeouts import called, gather
from etude.tools import BaseTool, TokenLimit, ToolCall, ToolSession
from etude.tools.contract import read_execution
from etude.trajectory import TRUNCATED, Provenance, Run, StopReason, Trajectory

MALFORMED = "malformed"  # a source of step rewards, besides tools and environments
logger = logging.getLogger(__name__)


@register("tool_agent")
class ToolAgentLoop(AgentLoopBase):
    """The tool-calling agent loop; see the module's docstring.

    A subclass may also set `max_user_turns`, `max_assistant_turns`, `max_parallel_calls`, `max_tool_response_length`,
    `tool_response_truncate_side` and `tool_parser`, on the class or the object; defaults come from the configuration.
    """

    max_user_turns: int | None
    max_assistant_turns: int | None
    max_parallel_calls: int
    max_tool_response_length: int
    tool_response_truncate_side: str
    tool_parser: ToolParser

    def __init__(self, trainer_config: AgentContext, *args: Any, **kwargs: Any) -> None:
        super().__init__(trainer_config, *args, **kwargs)
        limits = trainer_config.options.multi_turn
        self._default(
            max_user_turns=limits.max_user_turns,
            max_assistant_turns=limits.max_assistant_turns,
            max_parallel_calls=limits.max_parallel_calls,
            max_tool_response_length=limits.max_tool_response_length,
            tool_response_truncate_side=limits.tool_response_truncate_side,
            tool_parser=trainer_config.parser,
        )
        self._outcomes: dict[int, ToolCall] = {}  # of calls that a subclass's `_call_tool` forwards, by id()
        self._broken: InfrastructureError | None = None  # set when such a call has an infrastructure failure

    @property
    def prompt_length(self) -> int:
        """`data.max_prompt_length`."""
        return self.context.options.prompt_length

    @property
    def response_length(self) -> int:
        """`data.max_response_length`."""
        return self.context.options.response_length

    async def run(self, sampling_params: dict[str, Any], **row: Any) -> Trajectory | list[Trajectory]:
        """See `AgentLoopBase.run`; the model sees the row's `active_tools` (default: all). Several sequences if the
        conversation was compacted.

        Raises:
            DataError: the row selects a tool or interaction that is not configured, or has arguments for a tool that it does
                not select.
        """
        self._row, active, entry = row, self._active_tools(row), self.environment_of(row)
        trajectory = Trajectory(row["request_id"], [], messages=[dict(m) for m in row["raw_prompt"]])
        trajectory.images = await self.read_images(row)
        counted, kwargs = self._token_limit(), row.get("tools_kwargs") or {}
        environment = None if entry is None else EnvironmentSession(entry, row, run_tools=active)
        async with environment or nullcontext():
            if environment is not None:
                active = environment.tools
                kwargs = {name: each for name, each in kwargs.items() if name in active or name not in self.tools}
                self._show_first(trajectory, environment)
            async with ToolSession(active, kwargs, request_id=row["request_id"], token_limit=counted) as session:
                data = self._data = session.agent_data = Conversation(
                    trajectory,
                    session,
                    self.context.with_stops(SamplingParams.of(sampling_params), self.tool_parser),
                    session.schemas,
                    counted,
                    kwargs,
                    environment=environment,
                    context=self.context,
                )
                if environment is not None:
                    environment.bind(data)
                state = AgentState.PENDING
                while state is not AgentState.TERMINATED:
                    if not isinstance(state, AgentState):
                        raise EtudeError(
                            f"agent loop {type(self).__name__}: a handler returned {state!r:.80}, not an AgentState"
                        )
                    handler = getattr(self, self._handlers[state])
                    begins = state in (AgentState.PENDING, AgentState.GENERATING)
                    state = await (handler(data, dict(vars(data.sampling))) if begins else handler(data))
                if trajectory.stop_reason is not StopReason.PROMPT_TOO_LONG:
                    if environment is not None:
                        await self._score(trajectory, environment)
                    trajectory.rewards.final = await session.calc_rewards()
        trajectory.metrics["release_failures"] = float(session.release_failures)
        trajectory.extra_fields |= {name: value for name, value in data.extra_fields.items() if _is_json(value)}
        return [*data.compaction.earlier, trajectory] if data.compaction.earlier else trajectory

    def environment_of(self, row: Mapping[str, Any]) -> EnvironmentEntry | None:
        """Returns who answers the turns of a row: its interaction; None if there is none.

        Raises:
            DataError: the interaction is not configured.
        """
        kwargs = row.get("interaction_kwargs")
        if not kwargs:
            return None
        name = kwargs.get("name")
        if name not in self.context.interactions:
            hint = did_you_mean(str(name), self.context.interactions)
            raise DataError(f"row {row['request_id']}: the interaction '{name}' is not configured{hint}")
        return entry_of(self.context.interactions[name])

    def _show_first(self, trajectory: Trajectory, environment: EnvironmentSession) -> None:
        """Adds what `reset` returned to the prompt: text to the last user message; messages after it, or, if the row's
        prompt is empty, in its place."""
        observation = environment.observation
        if isinstance(observation, str):
            if observation:
                append_to_last_user(trajectory.messages, self.chat.disarm(observation))
            return
        shown = [
            {**message, "content": self.chat.disarm(message["content"])}
            if isinstance(message["content"], str)
            else message
            for message in observation
        ]
        is_empty = not any(message["content"] for message in trajectory.messages)
        trajectory.messages[:] = shown if is_empty else [*trajectory.messages, *shown]

    async def _score(self, trajectory: Trajectory, environment: EnvironmentSession) -> None:
        """Charges the environment's price of a cut, sets its score, and records its name and metrics for the run's."""
        if trajectory.stop_reason in TRUNCATED and (charge := environment.charge_cut()) is not None:
            trajectory.add_step_reward(environment.entry.source, charge)
        score, info = await environment.score(completed=trajectory.stop_reason is StopReason.COMPLETED)
        trajectory.rewards.score, trajectory.rewards.score_info = score, info
        if environment.entry.noun == "environment":
            numbers = {name: value for name, value in environment.metrics.items() if isinstance(value, int | float)}
            trajectory.extra_fields["environment"] = {"name": environment.entry.name, "metrics": numbers}

    def _token_limit(self) -> TokenLimit:
        in_tokens = self.context.options.multi_turn.tool_response_length_unit == "tokens"
        longest = self.max_tool_response_length
        tokens, chars = (longest, None) if in_tokens else (None, longest)
        return TokenLimit(tokens, self.tool_response_truncate_side, self.tokenizer, self._tool_tokens, chars)

    def _active_tools(self, row: dict[str, Any]) -> dict[str, BaseTool]:
        own = [name for name in self.tools if name not in self.context.tools]  # from a subclass's class attribute
        names: Sequence[str] = [*row.get("active_tools", self.context.tools), *own]
        for name in names:
            if name not in self.tools:
                hint = did_you_mean(name, self.tools)
                raise DataError(f"row {row['request_id']}: the selected tool '{name}' is not configured{hint}")
        for name, kwargs in (row.get("tools_kwargs") or {}).items():
            if kwargs is not None and name in self.tools and name not in names:
                raise DataError(f"row {row['request_id']}: tools_kwargs names the tool '{name}', which is not selected")
        return {name: self.tools[name] for name in names}

    async def _handle_pending_state(self, data: Conversation, sampling_params: Mapping[str, Any]) -> AgentState:
        trajectory = data.trajectory
        for response in data.session.initial_responses:
            await self._add_initial_response(data, response)
        messages, images = trajectory.messages, trajectory.images
        trajectory.prompt_ids = self.render_prompt(self._row, messages, data.tool_schemas, images)
        if not self.prompt_fits(trajectory):
            return end(data, StopReason.PROMPT_TOO_LONG)
        data.compaction.begin(trajectory)
        return AgentState.GENERATING

    async def _add_initial_response(self, data: Conversation, response: ToolResponse) -> None:
        trajectory, reader = data.trajectory, self._reader_for("user")
        text, decoded, _ = await render_response(response, reader, data.token_limit)
        images = [] if reader is None else await read_all(reader, decoded)
        place = append_to_last_user(trajectory.messages, self.chat.disarm(text), len(images))
        trajectory.images[place:place] = images

    def _reader_for(self, role: str) -> ImageReader | None:
        """Returns the image reader for messages of `role`; None if model or template do not support images there."""
        return self.context.images if role in self.chat.image_roles else None

    async def _handle_generating_state(
        self, data: Conversation, sampling_params: Mapping[str, Any], ignore_termination: bool = False
    ) -> AgentState:
        if ignore_termination:
            raise EtudeError("ignore_termination=True is not supported: a response never exceeds its budget")
        if sampling_params != vars(data.sampling):  # by a subclass
            data.sampling = SamplingParams.of(sampling_params)
        trajectory, output = data.trajectory, await self.sample(data)
        used_up = data.cut_by
        if used_up is None and self.room(trajectory) < 1:  # for another token
            used_up = self.turn_budget(trajectory)[1]
        if data.environment is not None and data.environment.reads_calls:
            return AgentState.INTERACTING if used_up is None else end(data, used_up)
        data.parsed = await self.tool_parser.parse_ids(output.token_ids, data.tool_schemas or None)
        data.spoken[len(trajectory.messages) - 1] = data.parsed.spoken
        if used_up is not None:
            self._record_malformed(data)  # no result is rendered for a call that the length limit cut off
            calls, turn = data.parsed.calls, trajectory.assistant_turns - 1
            trajectory.tool_calls += [unrun_record(turn, call) for call in calls]
            return end(data, used_up)
        if data.parsed.errors and self.context.options.multi_turn.malformed_calls == "end":
            self._record_malformed(data)
            return end(data, StopReason.MALFORMED_CALL)
        if not data.parsed.calls:
            self._note_other_format(data)
        if data.parsed.calls or data.parsed.errors:
            return AgentState.PROCESSING_TOOLS
        return end(data, StopReason.COMPLETED) if data.environment is None else AgentState.INTERACTING

    async def sample(self, data: Conversation) -> TokenOutput:
        """Samples the next assistant turn and adds it to the trajectory."""
        if self.context.options.multi_turn.compact.at_tokens is not None:
            data.compaction.mark_turn(data.trajectory)
        budget = self.turn_budget(data.trajectory)
        turn = self.server_manager.sample_turn(data.trajectory, data.sampling, budget, self.chat.decode)
        output, data.cut_by = await turn
        data.sampled = output.token_ids
        return output

    def _note_other_format(self, data: Conversation) -> None:
        """Counts a turn that calls a tool in a format that the parser does not read, until a call of the trajectory was
        read."""
        trajectory, names = data.trajectory, [schema["function"]["name"] for schema in data.tool_schemas]
        text = trajectory.messages[-1]["content"]
        if trajectory.tool_calls or not isinstance(text, str):
            return
        if find_other_format(text, self.tool_parser, names) is not None:
            trajectory.metrics["unread_calls"] = trajectory.metrics.get("unread_calls", 0.0) + 1

    def _record_malformed(self, data: Conversation) -> None:
        turn = data.trajectory.assistant_turns - 1
        data.trajectory.tool_calls += [malformed_record(turn, error) for error in data.parsed.errors]

    async def _handle_processing_tools_state(self, data: Conversation) -> AgentState:
        trajectory, limits = data.trajectory, self.context.options.multi_turn
        turn, most = trajectory.assistant_turns - 1, self.max_parallel_calls
        data.parsed = with_result_tag(data.parsed, self.chat, self.tool_parser)
        started = time.perf_counter()
        if type(self)._call_tool is ToolAgentLoop._call_tool:
            calls = await data.session.execute(data.parsed.calls[:most], turn)
        else:
            calls = await gather(self._call_overridden(data, call, turn) for call in data.parsed.calls[:most])
        trajectory.add_time("tool_calls", time.perf_counter() - started)
        reader = self._reader_for("tool" if data.parsed.result_tag is None else "user")
        for call in calls:
            call.shown, call.images, call.image_tokens = await render_response(call.response, reader, data.token_limit)
        calls += refused_calls(data.parsed, turn, most)
        if data.environment is not None:
            data.tool_answers.update(range(len(trajectory.messages), len(trajectory.messages) + len(calls)))
        malformed = sum(call.error == "malformed" for call in calls)
        data.malformed_in_a_row += malformed
        if any(call.error not in ("malformed", NOT_EXECUTED) for call in calls):
            data.malformed_in_a_row = 0
        state = self.feed_back(data, calls=calls)
        for call in calls:
            if self.context.images is not None and state is not AgentState.TERMINATED:  # the results fit
                trajectory.images += await read_all(self.context.images, call.images)
            trajectory.tool_calls.append(call.to_record())
            if call.error is None or call.reward:
                trajectory.add_step_reward(call.requested.name, call.reward)
        if limits.malformed_calls == "penalise" and malformed:
            trajectory.add_step_reward(MALFORMED, -limits.malformed_call_penalty * malformed)
        return state

    def feed_back(
        self, data: Conversation, messages: Sequence[dict[str, Any]] = (), calls: Sequence[ToolCall] = ()
    ) -> AgentState:
        """Checks stop conditions 4 to 7; if none applies, appends the user's `messages`, or those that answer `calls`,
        shortened to the room that is left, to the context, and the request for a summary if it is to be compacted."""
        trajectory, limits = data.trajectory, self.context.options.multi_turn
        messages = messages or tool_messages(data.parsed, calls, self.chat.needs_tool_names)
        image_tokens = [tokens for call in calls for tokens in call.image_tokens]
        trajectory.messages += messages
        ended = partial(self._end_unseen, data, len(messages))
        if data.environment is not None and data.environment.done:  # by a tool of its own
            return ended(StopReason.COMPLETED)
        most_malformed = limits.max_consecutive_malformed_calls
        if most_malformed is not None and data.malformed_in_a_row >= most_malformed:
            return ended(StopReason.MAX_MALFORMED_CALLS)
        turns = trajectory.assistant_turns - len(data.compaction.earlier)  # without summaries
        if self.max_assistant_turns is not None and turns >= self.max_assistant_turns:
            return ended(StopReason.MAX_ASSISTANT_TURNS)
        if self.max_user_turns is not None and trajectory.user_turns >= self.max_user_turns:
            return ended(StopReason.MAX_USER_TURNS)
        if limits.max_seconds is not None and time.perf_counter() - data.started >= limits.max_seconds:
            return ended(StopReason.TIME_LIMIT)
        if limits.max_trajectory_tokens is not None:
            left = limits.max_trajectory_tokens - self.server_manager.num_sampled
            if left < limits.min_answer_tokens:
                return ended(StopReason.TRAJECTORY_LENGTH)
        room = self.room(trajectory) - limits.min_answer_tokens
        context = self._encode_context(data, messages, image_tokens)
        summary = None
        if limits.compact.at_tokens is not None and context is not None:
            summary = self._summary_room(data, context, room)
        room = room if summary is None else self.room(trajectory) - summary
        while context is not None and (excess := sum(len(ids) for ids, _ in context) - room) > 0:
            if not (calls and shorten_results(calls, excess, data.token_limit)):
                return ended(StopReason.TOOL_RESPONSE_OVERFLOW)
            messages = tool_messages(data.parsed, calls, self.chat.needs_tool_names)
            trajectory.messages[-len(messages) :] = messages
            context = self._encode_context(data, messages, image_tokens)
        if context is None:
            return ended(StopReason.CONTEXT_REFUSED)
        if summary is not None:
            data.compaction.ask(trajectory, context)
            shown = trajectory.messages[-len(messages) :]  # which may be placeholders
            request = request_of(limits.compact)
            context = self._context_after(data, [*shown, request], image_tokens)
            if context is None:
                return ended(StopReason.CONTEXT_REFUSED)
            trajectory.messages.append(request)
        for ids, provenance in context:
            trajectory.append(ids, provenance)
        trajectory.user_turns += 1
        return AgentState.GENERATING if summary is None else AgentState.COMPACTING

    async def _handle_interacting_state(self, data: Conversation) -> AgentState:
        trajectory, environment = data.trajectory, data.environment
        assert environment is not None
        started, last = time.perf_counter(), len(trajectory.messages) - 1
        answer, messages = await environment.step(data.spoken.get(last, trajectory.messages[last]["content"]))
        trajectory.add_time("interaction", time.perf_counter() - started)
        if answer.reward is not None:
            trajectory.add_step_reward(environment.entry.source, as_reward(answer.reward, environment.label))
        if environment.done:
            return end(data, StopReason.COMPLETED)
        if any(self.chat.disarm(text) != text for m in messages if isinstance(text := m["content"], str)):
            _warn_of_control_tokens()
        return self.feed_back(data, messages)

    def _summary_room(self, data: Conversation, context: list[Run], room: int) -> int | None:
        """Number of tokens that the request for a summary and the summary take; None if none is due: the context with the
        new messages is within `compact.at_tokens`, and leaves room for one later."""
        compact = self.context.options.multi_turn.compact
        assert compact.at_tokens is not None
        needed = summary_room(compact, self.chat)
        new, trajectory = sum(len(ids) for ids, _ in context), data.trajectory
        length = len(trajectory.prompt_ids) + trajectory.response_length + new
        return needed if length > compact.at_tokens or new + needed > room else None

    async def _handle_compacting_state(self, data: Conversation) -> AgentState:
        trajectory, limits = data.trajectory, self.context.options.multi_turn
        compact = limits.compact
        most, reason = self.turn_budget(trajectory)
        if most >= compact.summary_tokens or reason is StopReason.TURN_LENGTH:  # its own limit, which ends nothing
            most, reason = min(most, compact.summary_tokens), StopReason.TURN_LENGTH
        turn = self.server_manager.sample_turn(trajectory, data.sampling, (most, reason), self.chat.decode)
        output, cut_by = await turn
        if cut_by not in (None, StopReason.TURN_LENGTH):
            return end(data, cut_by)
        parsed = await self.tool_parser.parse_ids(output.token_ids, None)
        first, images = with_summary(data.compaction.question, self.chat.disarm(parsed.spoken)), data.compaction.images
        head = self.render_prompt(self._row, first, data.tool_schemas, images)
        tail = data.compaction.kept(len(head), compact)
        room = response_room(self.context.options, len(head) + len(tail.ids), 0)
        most, reason = tightest_budget(room, self.server_manager.num_sampled, limits)
        if most < limits.min_answer_tokens:
            return end(data, reason)
        moved = data.compaction.restart(trajectory, first, head, tail)
        data.spoken = {moved + number: text for number, text in data.spoken.items() if number >= tail.message}
        data.tool_answers = {moved + number for number in data.tool_answers if number >= tail.message}
        return AgentState.GENERATING

    def _end_unseen(self, data: Conversation, messages: int, reason: StopReason) -> AgentState:
        """Ends the trajectory; the model never sees its last messages, so their images are dropped."""
        first = len(data.trajectory.messages) - messages
        data.trajectory.messages[first:] = map(drop_images, data.trajectory.messages[first:])
        return end(data, reason)

    def _encode_context(
        self, data: Conversation, messages: Sequence[dict[str, Any]], image_tokens: Sequence[int]
    ) -> list[Run] | None:
        """Encodes the last messages, or placeholders if the template cannot render them; None if neither works."""
        context, trajectory = self._context_after(data, messages, image_tokens), data.trajectory
        if context is not None:
            return context
        # The template passed the start-up check: the cause is the messages' text.
        trajectory.metrics["unwritable_answers"] = trajectory.metrics.get("unwritable_answers", 0.0) + 1
        replaced = replace_unwritable(self.chat, messages, image_tokens)
        if not replaced:
            return None
        trajectory.messages[-len(messages) :] = replaced
        return self._context_after(data, replaced, image_tokens)

    def _context_after(
        self, data: Conversation, messages: Sequence[dict[str, Any]], image_tokens: Sequence[int]
    ) -> list[Run] | None:
        """Encodes messages after the last turn; logs why, and returns None, if the template cannot render them."""
        try:
            return self.chat.context_ids(messages, after=data.sampled, image_tokens=image_tokens)
        except ConfigError as error:
            logger.info("trajectory %s: %s", data.trajectory.request_id, one_line(error))
            return None

    def _tool_tokens(self, text: str) -> int:
        """Number of tokens of a tool result in its context; on its own, if the template writes it in its own way."""
        role = "tool" if self.chat.answers_tools else "user"
        try:
            context = self.chat.context_ids([{"role": role, "content": text}])
        except ConfigError:  # handled for the whole tool result in `_encode_context`
            context = []
        labelled = sum(len(ids) for ids, provenance in context if provenance is not Provenance.TEMPLATE)
        return labelled or len(self.tokenizer(text, add_special_tokens=False)["input_ids"])

    _handlers: ClassVar[dict[AgentState, str]] = {  # names, so that a subclass may override handlers
        AgentState.PENDING: "_handle_pending_state",
        AgentState.GENERATING: "_handle_generating_state",
        AgentState.PROCESSING_TOOLS: "_handle_processing_tools_state",
        AgentState.INTERACTING: "_handle_interacting_state",
        AgentState.COMPACTING: "_handle_compacting_state",
    }

    # -- for subclasses written for verl ---------------------------------------------------------------------------

    _not_called: ClassVar[frozenset[str]] = frozenset(  # methods that subclasses override in verl
        {"_build_assistant_message", "_initialize_interactions", "_make_request_id", "_get_mm_processor_kwargs"}
        | {"_assert_mm_supported", "_cap_text_prompt_length", "build_sglang_video_payload"}
        | {"ct_build_initial_tokens", "ct_merge_context_msg", "ct_merge_assistant_token"}
    )

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        for name in vars(cls):
            handlers = cls._handlers.values()
            if name in cls._not_called or (name.startswith("_handle_") and name not in handlers):
                hooks = ", ".join(each for each in (*handlers, "_call_tool", "run") if each not in cls._not_called)
                raise ConfigError(
                    f"agent loop {cls.__qualname__}: nothing here calls '{name}'; override {hooks}, or derive from "
                    "AgentLoopBase"
                )

    async def _call_overridden(self, data: Conversation, call: FunctionCall, turn: int) -> ToolCall:
        """Runs one call through a subclass's `_call_tool`, with as many of verl's three arguments as it takes.

        Raises:
            InfrastructureError: the call had an infrastructure failure, even if the subclass handled it.
            EtudeError: it returned anything other than response, reward and metrics.
        """
        arguments: tuple[Any, ...] = (call, data.tools_kwargs, data)
        kinds = [p.kind for p in inspect.signature(self._call_tool).parameters.values()]
        if inspect.Parameter.VAR_POSITIONAL not in kinds:
            arguments = arguments[: kinds.count(inspect.Parameter.POSITIONAL_OR_KEYWORD)]
        started = time.perf_counter()
        returned = await called(self._call_tool, *arguments)
        if self._broken is not None:
            raise self._broken
        try:
            result = read_execution(returned)
            reward = as_reward(result.reward, "")
        except (TypeError, InfrastructureError) as error:
            raise EtudeError(f"agent loop {type(self).__name__}: _call_tool {one_line(error)}") from error
        made = self._outcomes.pop(id(call), None) or ToolCall(call, turn)
        made.response, made.reward, made.metrics = data.session.truncate(result.response), reward, dict(result.metrics)
        made.seconds = time.perf_counter() - started
        return made

    async def _call_tool(
        self, tool_call: FunctionCall, tools_kwargs: Mapping[str, Any] | None = None, agent_data: Any = None
    ) -> tuple[ToolResponse, float, dict[str, Any]]:
        """Runs one call of the current turn; returns (response, step reward, metrics). A subclass may override it.

        Raises:
            InfrastructureError: see `ToolSession.execute`.
        """
        data = self._data
        try:
            [outcome] = await data.session.execute([tool_call], data.trajectory.assistant_turns - 1)
        except InfrastructureError as error:
            self._broken = error
            raise
        self._outcomes[id(tool_call)] = outcome
        return outcome.response, outcome.reward, dict(outcome.metrics)


@register("env_agent")
class EnvAgentLoop(ToolAgentLoop):
    """The same loop, where the run's environment answers: the default for rows without an `agent_name` if one is configured
    (`env`, `actor_rollout_ref.env`)."""

    _not_called = ToolAgentLoop._not_called | {"_call_tool"}  # an environment may run the calls itself

    def environment_of(self, row: Mapping[str, Any]) -> EnvironmentEntry:
        """Returns the environment that the row picks.

        Raises:
            EtudeError: none is configured, or the row picks none of several.
        """
        if self.context.environment is None:
            raise EtudeError("the agent loop 'env_agent' needs an environment: set env, or actor_rollout_ref.env.name")
        return self.context.environment.pick(row)


@cache
def _warn_of_control_tokens() -> None:
    logger.warning(
        "an environment observed text that spells out control tokens, which the model sees as plain characters: if it is a "
        "rendered prompt, return messages, or what tool_manager.get_prompt returned"
    )


def _is_json(value: object) -> bool:
    """Whether a value can be serialized as JSON, and so passed to the scorer and the rollout dump."""
    try:
        json.dumps(value)
    except (TypeError, ValueError, RecursionError):
        return False
    return True
