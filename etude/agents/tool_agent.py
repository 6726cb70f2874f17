"""`tool_agent`: generate, run the tools the model called, generate again, until an ending is reached.

    PENDING → GENERATING ⇄ PROCESSING_TOOLS → TERMINATED

PENDING creates the tools that the row names and renders the prompt; one that does not fit, or leaves no room for an
answer, ends the trajectory (`PROMPT_TOO_LONG`). The order in which endings are checked after a generation:

1. the response budget is used up, or the engine stopped for length → `RESPONSE_LENGTH`;
2. the turn holds neither a call nor a malformed one → `COMPLETED`;
3. the turn's tools run (in the last allowed turn too: what they return is not shown any more, but their rewards count);
4. `max_assistant_turns` reached → `MAX_ASSISTANT_TURNS`; `max_user_turns` reached → `MAX_USER_TURNS`;
5. the tools' answers, with room for one more token, do not fit → `TOOL_RESPONSE_OVERFLOW`.

Invariant: the context that the model sees is the prompt followed by the trajectory's segments, token for token, and
tools are released in every ending.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

from etude.agents.agent_data import AgentState
from etude.agents.base import AgentLoopBase, register
from etude.agents.truncation import shorten
from etude.chat import ParsedResponse
from etude.errors import DataError
from etude.inference import SamplingParams
from etude.registry import did_you_mean
from etude.schemas import ToolResponse
from etude.tools import BaseTool, ToolOutcome, ToolSession
from etude.trace import collect_spans
from etude.trajectory import AgentLoopOutput, Provenance, StopReason, ToolCallRecord, Trajectory

_MEDIA = "(the tool returned media that a text model cannot see)"


@dataclass
class _Conversation:
    """What one run knows: the growing trajectory, and the turn in hand."""

    trajectory: Trajectory
    session: ToolSession
    sampling: SamplingParams
    tool_schemas: list[dict[str, Any]]
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
        active = self._active_tools(row)
        trajectory = Trajectory(row["request_id"], [], messages=[dict(m) for m in row["raw_prompt"]])
        with collect_spans() as spans:
            async with ToolSession(active, row.get("tools_kwargs"), request_id=row["request_id"]) as session:
                data = _Conversation(
                    trajectory,
                    session,
                    SamplingParams.of(sampling_params),
                    [tool.get_openai_tool_schema().to_openai() for tool in active.values()],
                )
                state = AgentState.PENDING
                while state is not AgentState.TERMINATED:
                    state = await getattr(self, self._handlers[state])(data)
                if trajectory.stop_reason is not StopReason.PROMPT_TOO_LONG:
                    trajectory.rewards.final = await session.calc_rewards()
            trajectory.metrics["release_failures"] = float(session.release_failures)
        trajectory.timings["tool_spans"] = sum(span.seconds for span in spans)
        return trajectory.to_output()

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

    async def _handle_pending(self, data: _Conversation) -> AgentState:
        trajectory = data.trajectory
        for response in data.session.initial_responses:
            _append_to_last_user(trajectory.messages, self.chat.disarmed(self._shown(response)))
        trajectory.prompt_ids = self.chat.initial_ids(trajectory.messages, data.tool_schemas or None)
        if not self.prompt_fits(trajectory):
            return _end(data, StopReason.PROMPT_TOO_LONG)
        return AgentState.GENERATING

    async def _handle_generating(self, data: _Conversation) -> AgentState:
        trajectory = data.trajectory
        room = self.room(trajectory)
        started = time.perf_counter()
        output = await self.server_manager.generate(
            prompt_ids=trajectory.prompt_ids + trajectory.response_ids,
            sampling_params=_with_max_tokens(data.sampling, room, self.context.parser.stop_token_ids),
        )
        _add_time(trajectory, "generate_sequences", started)
        trajectory.append(
            output.token_ids, Provenance.SAMPLED, log_probs=output.log_probs, weight_versions=output.weight_versions
        )
        turn = trajectory.assistant_turns
        trajectory.assistant_turns += 1
        data.parsed = await self.context.parser.parse_ids(output.token_ids, data.tool_schemas or None)
        message: dict[str, Any] = {"role": "assistant", "content": self.chat.decode(output.token_ids)}
        trajectory.messages.append(message)
        data.after_stop = output.token_ids[-1:] == [self.chat.end_of_turn_id]
        if output.stop_reason != "stop" or self.room(trajectory) < 1:
            for error in data.parsed.errors:  # a call cut off by the length limit is no habit worth answering
                trajectory.tool_calls.append(ToolCallRecord(turn, "", "", error, error="malformed"))
            return _end(data, StopReason.RESPONSE_LENGTH)
        if not data.parsed.calls and not data.parsed.errors:
            return _end(data, StopReason.COMPLETED)
        return AgentState.PROCESSING_TOOLS

    async def _handle_tools(self, data: _Conversation) -> AgentState:
        trajectory, limits = data.trajectory, self.context.options.multi_turn
        turn = trajectory.assistant_turns - 1
        started = time.perf_counter()
        allowed, extra = data.parsed.calls[: limits.max_parallel_calls], data.parsed.calls[limits.max_parallel_calls :]
        outcomes = await data.session.execute(allowed, turn)
        _add_time(trajectory, "tool_calls", started)
        texts = []
        for outcome in outcomes:
            texts.append(self._shown(outcome.response))
            _record(trajectory, outcome, texts[-1])
        for call in extra:
            texts.append(f"Not executed: at most {limits.max_parallel_calls} calls are executed in one turn.")
            trajectory.tool_calls.append(ToolCallRecord(turn, call.name, call.arguments, texts[-1], error="malformed"))
        for error in data.parsed.errors:
            texts.append(error)
            trajectory.tool_calls.append(ToolCallRecord(turn, "", "", error, error="malformed"))
        return self._feed_back(data, texts)

    def _feed_back(self, data: _Conversation, texts: Sequence[str]) -> AgentState:
        """Checks endings 4 and 5; otherwise adds the tools' answers to the context."""
        trajectory, limits = data.trajectory, self.context.options.multi_turn
        messages = [{"role": "tool", "content": text} for text in texts]
        trajectory.messages += messages
        if limits.max_assistant_turns is not None and trajectory.assistant_turns >= limits.max_assistant_turns:
            return _end(data, StopReason.MAX_ASSISTANT_TURNS)
        if limits.max_user_turns is not None and trajectory.user_turns >= limits.max_user_turns:
            return _end(data, StopReason.MAX_USER_TURNS)
        context = self.chat.context_ids(messages, after_stop=data.after_stop)
        if sum(len(ids) for ids, _ in context) >= self.room(trajectory):
            return _end(data, StopReason.TOOL_RESPONSE_OVERFLOW)
        for ids, provenance in context:
            trajectory.append(ids, provenance)
        trajectory.user_turns += 1
        return AgentState.GENERATING

    def _shown(self, response: ToolResponse) -> str:
        """What the model sees of a response: its text within `max_tool_response_length` tokens."""
        options = self.context.options.multi_turn
        return shorten(
            response.text or ("" if response.is_empty() else _MEDIA),
            limit=options.max_tool_response_length,
            side=options.tool_response_truncate_side,
            tokenizer=self.tokenizer,
            count=self._tool_tokens,
        )

    def _tool_tokens(self, text: str) -> int:
        context = self.chat.context_ids([{"role": "tool", "content": text}], after_stop=True)
        return sum(len(ids) for ids, provenance in context if provenance is Provenance.TOOL)

    _handlers: ClassVar[dict[AgentState, str]] = {  # by name, so that a subclass may override one
        AgentState.PENDING: "_handle_pending",
        AgentState.GENERATING: "_handle_generating",
        AgentState.PROCESSING_TOOLS: "_handle_tools",
    }


def _end(data: _Conversation, reason: StopReason) -> AgentState:
    data.trajectory.stop_reason = reason
    return AgentState.TERMINATED


def _with_max_tokens(sampling: SamplingParams, room: int, parser_stops: Sequence[int]) -> SamplingParams:
    stops = tuple(dict.fromkeys([*sampling.stop_token_ids, *parser_stops]))
    return replace(sampling, max_tokens=min(sampling.max_tokens, room), stop_token_ids=stops)


def _add_time(trajectory: Trajectory, name: str, started: float) -> None:
    trajectory.timings[name] = trajectory.timings.get(name, 0.0) + time.perf_counter() - started


def _append_to_last_user(messages: list[dict[str, Any]], text: str) -> None:
    """DESIGN: a non-empty initial response is appended to the last user message."""
    for message in reversed(messages):
        if message["role"] == "user":
            message["content"] = f"{message['content']}\n{text}"
            return
    messages.append({"role": "user", "content": text})


def _record(trajectory: Trajectory, outcome: ToolOutcome, text: str) -> None:
    trajectory.tool_calls.append(replace(outcome.to_record(), response=text))
    if outcome.error is None:
        trajectory.rewards.steps.append((outcome.turn, outcome.call.name, outcome.reward))
