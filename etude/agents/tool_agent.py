"""`tool_agent`: generate, run the tools the model called, generate again, until an ending is reached.

    state              goes to
    PENDING            GENERATING, or TERMINATED where the prompt does not fit
    GENERATING         PROCESSING_TOOLS (the turn calls), INTERACTING (it does not, and the row has an interaction),
                       TERMINATED
    PROCESSING_TOOLS   GENERATING, TERMINATED
    INTERACTING        GENERATING, TERMINATED

PENDING creates the tools that the row names and renders the prompt; one that does not fit, or leaves no room for an
answer, ends the trajectory (`PROMPT_TOO_LONG`). The order in which endings are checked after a generation:

1. the response budget is used up, or the engine stopped for length → `RESPONSE_LENGTH`;
2. the turn holds neither a call nor a malformed one, and no interaction answers it → `COMPLETED`;
3. the turn holds a malformed call and `malformed_calls` is `end` → `MALFORMED_CALL`;
4. the turn's tools run, or the interaction answers (in the last allowed turn too: what they say is not shown any more,
   but their rewards count); the interaction may end the conversation → `COMPLETED`;
5. `max_assistant_turns` reached → `MAX_ASSISTANT_TURNS`; `max_user_turns` reached → `MAX_USER_TURNS`; `max_seconds`
   have passed → `TIME_LIMIT`;
6. the answers, with room for `min_answer_tokens` more, do not fit → `TOOL_RESPONSE_OVERFLOW`.

Invariant: the context that the model sees is the prompt followed by the trajectory's segments, token for token, and
tools and interactions are released in every ending.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

from etude.agents.agent_data import AgentState
from etude.agents.base import AgentLoopBase, register
from etude.agents.interactions import InteractionSession
from etude.chat import ParsedResponse
from etude.errors import DataError
from etude.inference import SamplingParams, TokenOutput
from etude.registry import did_you_mean
from etude.schemas import ToolResponse
from etude.tools import BaseTool, TokenLimit, ToolOutcome, ToolSession
from etude.trajectory import AgentLoopOutput, Provenance, StopReason, ToolCallRecord, Trajectory

INTERACTION, MALFORMED = "interaction", "malformed"  # sources of step rewards that no tool gave
_MEDIA = "(the tool returned media that a text model cannot see)"


@dataclass
class Conversation:
    """What one run knows: the growing trajectory, and the turn in hand."""

    trajectory: Trajectory
    session: ToolSession
    sampling: SamplingParams
    tool_schemas: list[dict[str, Any]]
    user: InteractionSession | None = None
    started: float = field(default_factory=time.perf_counter)
    parsed: ParsedResponse = field(default_factory=lambda: ParsedResponse("", [], []))
    after_stop: bool = True  # whether the sampled ids end with the template's end-of-turn token


@register("tool_agent")
class ToolAgentLoop(AgentLoopBase):
    """See the module's docstring."""

    async def run(self, sampling_params: dict[str, Any], **row: Any) -> AgentLoopOutput:
        """See `AgentLoopBase.run`; the row's `active_tools` (default: all) are those the model is shown.

        Raises:
            DataError: the row selects a tool that is not configured, or hands arguments to one that it does not select.
        """
        active, user = self._active_tools(row), self._interaction(row)
        trajectory = Trajectory(row["request_id"], [], messages=[dict(m) for m in row["raw_prompt"]])
        limits = self.context.options.multi_turn
        side, tokenizer = limits.tool_response_truncate_side, self.tokenizer
        counted = TokenLimit(limits.max_tool_response_length, side, tokenizer, self._tool_tokens)
        async with ToolSession(
            active, row.get("tools_kwargs"), request_id=row["request_id"], token_limit=counted
        ) as session:
            data = Conversation(
                trajectory,
                session,
                _with_stops(SamplingParams.of(sampling_params), self.context.parser.stop_token_ids),
                [tool.get_openai_tool_schema().to_openai() for tool in active.values()],
                user,
            )
            async with user or nullcontext():
                await self.converse(data, row)
            if trajectory.stop_reason is not StopReason.PROMPT_TOO_LONG:
                trajectory.rewards.final = await session.calc_rewards()
        trajectory.metrics["release_failures"] = float(session.release_failures)
        return trajectory.to_output()

    async def converse(self, data: Conversation, row: dict[str, Any]) -> None:
        """Goes from state to state until the trajectory has ended."""
        state = AgentState.PENDING
        while state is not AgentState.TERMINATED:
            state = await getattr(self, self._handlers[state])(data)

    def _active_tools(self, row: dict[str, Any]) -> dict[str, BaseTool]:
        names: Sequence[str] = row.get("active_tools", list(self.tools))
        for name in names:
            if name not in self.tools:
                hint = did_you_mean(name, self.tools)
                raise DataError(f"row {row['request_id']}: the selected tool '{name}' is not configured{hint}")
        for name, kwargs in (row.get("tools_kwargs") or {}).items():
            if kwargs is not None and name in self.tools and name not in names:
                raise DataError(f"row {row['request_id']}: tools_kwargs names the tool '{name}', which is not selected")
        return {name: self.tools[name] for name in names}

    def _interaction(self, row: dict[str, Any]) -> InteractionSession | None:
        kwargs = row.get("interaction_kwargs")
        if not kwargs:
            return None
        name = kwargs.get("name")
        if name not in self.context.interactions:
            hint = did_you_mean(str(name), self.context.interactions)
            raise DataError(f"row {row['request_id']}: the interaction '{name}' is not configured{hint}")
        return InteractionSession(self.context.interactions[name], kwargs, request_id=row["request_id"])

    async def _handle_pending(self, data: Conversation) -> AgentState:
        trajectory = data.trajectory
        for response in data.session.initial_responses:
            append_to_last_user(trajectory.messages, self.chat.disarmed(shown(response)))
        trajectory.prompt_ids = self.chat.initial_ids(trajectory.messages, data.tool_schemas or None)
        if not self.prompt_fits(trajectory):
            return end(data, StopReason.PROMPT_TOO_LONG)
        return AgentState.GENERATING

    async def _handle_generating(self, data: Conversation) -> AgentState:
        trajectory = data.trajectory
        output = await self.sample(data)
        data.parsed = await self.context.parser.parse_ids(output.token_ids, data.tool_schemas or None)
        if output.stop_reason != "stop" or self.room(trajectory) < 1:
            self._note_malformed(data)  # a call cut off by the length limit is no habit worth answering
            return end(data, StopReason.RESPONSE_LENGTH)
        if data.parsed.errors and self.context.options.multi_turn.malformed_calls == "end":
            self._note_malformed(data)
            return end(data, StopReason.MALFORMED_CALL)
        if data.parsed.calls or data.parsed.errors:
            return AgentState.PROCESSING_TOOLS
        return end(data, StopReason.COMPLETED) if data.user is None else AgentState.INTERACTING

    async def sample(self, data: Conversation) -> TokenOutput:
        """Samples the next assistant turn and adds it to the trajectory."""
        trajectory = data.trajectory
        room = self.room(trajectory)
        started = time.perf_counter()
        sampling = data.sampling if data.sampling.max_tokens <= room else replace(data.sampling, max_tokens=room)
        output = await self.server_manager.generate(
            prompt_ids=trajectory.prompt_ids + trajectory.response_ids, sampling_params=sampling
        )
        add_time(trajectory, "generate_sequences", started)
        trajectory.append(
            output.token_ids, Provenance.SAMPLED, log_probs=output.log_probs, weight_versions=output.weight_versions
        )
        trajectory.assistant_turns += 1
        trajectory.messages.append({"role": "assistant", "content": self.chat.decode(output.token_ids)})
        data.after_stop = output.token_ids[-1:] == [self.chat.end_of_turn_id]
        return output

    async def _handle_tools(self, data: Conversation) -> AgentState:
        trajectory, limits = data.trajectory, self.context.options.multi_turn
        turn = trajectory.assistant_turns - 1
        started = time.perf_counter()
        allowed, extra = data.parsed.calls[: limits.max_parallel_calls], data.parsed.calls[limits.max_parallel_calls :]
        outcomes = await data.session.execute(allowed, turn)
        add_time(trajectory, "tool_calls", started)
        texts = []
        for outcome in outcomes:
            texts.append(shown(outcome.response))
            record(trajectory, outcome, texts[-1])
        for call in extra:
            texts.append(f"Not executed: at most {limits.max_parallel_calls} calls are executed in one turn.")
            trajectory.tool_calls.append(ToolCallRecord(turn, call.name, call.arguments, texts[-1], error="malformed"))
        texts += data.parsed.errors
        self._note_malformed(data)
        unreadable = len(data.parsed.errors) + sum(outcome.error == "malformed" for outcome in outcomes)
        if unreadable and limits.malformed_calls == "penalise":
            trajectory.rewards.steps.append((turn, MALFORMED, -limits.malformed_call_penalty * unreadable))
        return self.feed_back(data, [data.parsed.result_message(text) for text in texts])

    def _note_malformed(self, data: Conversation) -> None:
        turn = data.trajectory.assistant_turns - 1
        for error in data.parsed.errors:
            data.trajectory.tool_calls.append(ToolCallRecord(turn, "", "", error, error="malformed"))

    async def _handle_interacting(self, data: Conversation) -> AgentState:
        trajectory = data.trajectory
        assert data.user is not None
        started = time.perf_counter()
        answer = await data.user.answer(trajectory.messages)
        add_time(trajectory, "interaction", started)
        trajectory.rewards.steps.append((trajectory.assistant_turns - 1, INTERACTION, answer.reward))
        if answer.over:
            return end(data, StopReason.COMPLETED)
        return self.feed_back(data, [{"role": "user", "content": answer.text}])

    def feed_back(self, data: Conversation, messages: Sequence[dict[str, Any]]) -> AgentState:
        """Checks endings 5 and 6; otherwise adds what tools or the user said to the context."""
        trajectory, limits = data.trajectory, self.context.options.multi_turn
        trajectory.messages += messages
        if limits.max_assistant_turns is not None and trajectory.assistant_turns >= limits.max_assistant_turns:
            return end(data, StopReason.MAX_ASSISTANT_TURNS)
        if limits.max_user_turns is not None and trajectory.user_turns >= limits.max_user_turns:
            return end(data, StopReason.MAX_USER_TURNS)
        if limits.max_seconds is not None and time.perf_counter() - data.started >= limits.max_seconds:
            return end(data, StopReason.TIME_LIMIT)
        context = self.chat.context_ids(messages, after_stop=data.after_stop)
        if sum(len(ids) for ids, _ in context) + limits.min_answer_tokens > self.room(trajectory):
            return end(data, StopReason.TOOL_RESPONSE_OVERFLOW)
        for ids, provenance in context:
            trajectory.append(ids, provenance)
        trajectory.user_turns += 1
        return AgentState.GENERATING

    def _tool_tokens(self, text: str) -> int:
        context = self.chat.context_ids([{"role": "tool", "content": text}], after_stop=True)
        return sum(len(ids) for ids, provenance in context if provenance is Provenance.TOOL)

    _handlers: ClassVar[dict[AgentState, str]] = {  # by name, so that a subclass may override one
        AgentState.PENDING: "_handle_pending",
        AgentState.GENERATING: "_handle_generating",
        AgentState.PROCESSING_TOOLS: "_handle_tools",
        AgentState.INTERACTING: "_handle_interacting",
    }


def shown(response: ToolResponse) -> str:
    """What a text model sees of a response, which the session has cut to `max_tool_response_length` tokens."""
    return response.text or ("" if response.is_empty() else _MEDIA)


def end(data: Conversation, reason: StopReason) -> AgentState:
    data.trajectory.stop_reason = reason
    return AgentState.TERMINATED


def _with_stops(sampling: SamplingParams, parser_stops: Sequence[int]) -> SamplingParams:
    return replace(sampling, stop_token_ids=tuple(dict.fromkeys([*sampling.stop_token_ids, *parser_stops])))


def add_time(trajectory: Trajectory, name: str, started: float) -> None:
    trajectory.timings[name] = trajectory.timings.get(name, 0.0) + time.perf_counter() - started


def append_to_last_user(messages: list[dict[str, Any]], text: str) -> None:
    """DESIGN: a non-empty initial response is appended to the last user message."""
    for message in reversed(messages):
        if message["role"] == "user":
            message["content"] = f"{message['content']}\n{text}"
            return
    messages.append({"role": "user", "content": text})


def record(trajectory: Trajectory, outcome: ToolOutcome, text: str) -> None:
    trajectory.tool_calls.append(replace(outcome.to_record(), response=text))
    if outcome.error is None:
        trajectory.rewards.steps.append((outcome.turn, outcome.call.name, outcome.reward))
