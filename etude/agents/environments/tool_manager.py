"""`ToolManager`: RL-Factory's class that parses responses and runs the tools they call.

    parse_response → ("answer", text) | ("actions", [{"name", "args"}, …])
    execute_actions(responses) → (actions, results)

A subclass may override any of its methods: the loop bypasses none.

Invariant: tools run in a `ToolSession`, with its limits and lifecycle: the current trajectory's if an agent loop has bound
one, otherwise a temporary one per call. A response is one turn: its tools run concurrently, and results are in call order.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from etude.chat.parsers.rl_factory import EMPTY_TOOL, final_answer, read_tools
from etude.chat.turns import Stub
from etude.errors import ConfigError, InfrastructureError
from etude.registry import Registry
from etude.schemas import FunctionCall, ToolResponse
from etude.tools import BaseTool, QwenTool, ToolCall, ToolSession, load_tools
from etude.tools.loader import load_entry

ACTIONS, ANSWER = "actions", "answer"
Called = list[dict[str, str]]

_THREAD_SECONDS = 600.0  # timeout of a synchronous `step` waiting for its tools


@dataclass(frozen=True)
class Turn:
    """A trajectory's current turn, bound by its agent loop."""

    session: ToolSession
    number: int
    loop: asyncio.AbstractEventLoop
    outcomes: list[ToolCall] = field(default_factory=list)


_TURNS: ContextVar[Sequence[Turn]] = ContextVar("etude_environment_turns", default=())


@contextmanager
def bind_turns(turns: Sequence[Turn]) -> Iterator[None]:
    """Binds turns within the block: the i-th response's tools run in the i-th turn's session."""
    token = _TURNS.set(turns)
    try:
        yield
    finally:
        _TURNS.reset(token)


class RenderedPrompt(str):
    """Text rendered by a chat template, together with its messages, which the loop appends instead of the text."""

    messages: list[dict[str, Any]]

    @classmethod
    def of(cls, text: str, messages: Sequence[Mapping[str, Any]]) -> RenderedPrompt:
        """`text` and its messages."""
        made = cls(text)
        made.messages = [dict(message) for message in messages]
        return made


class ToolManager:
    """Base class of all tool managers.

    Attributes:
        verl_config: the section `actor_rollout_ref.env` as a mapping.
        tool_map: the tools by name; those of an MCP server are named `server-tool`.
        functions: the `function` part of each tool's OpenAI schema, in order.
    """

    def __init__(self, verl_config: Mapping[str, Any], tools: Mapping[str, BaseTool] | None = None) -> None:
        """`tools` are those configured for the run; if None, tools are loaded from `config_path`."""
        self.verl_config = verl_config
        self.tool_map: dict[str, BaseTool] = {}
        self.functions: list[dict[str, Any]] = []
        self._given = tools
        self._build_tools()
        self.tool_map = {name: _as_tool(name, tool) for name, tool in self.tool_map.items()}

    def _build_tools(self) -> None:
        """Fills `tool_map` and `functions`."""
        path = self.verl_config.get("config_path")
        for tool in list(self._given.values()) if self._given is not None else load_tools(path) if path else []:
            self._init_tool(tool)

    def _init_tool(self, tool: BaseTool | str | Mapping[str, Any]) -> None:
        """Adds a tool, given as an object, a registered name, or an item as in `mcp_tools.pydata`."""
        if isinstance(tool, BaseTool):
            made = [tool]
        else:
            where = "mcpServers" if isinstance(tool, Mapping) and "mcpServers" in tool else "tool"
            made = load_entry(tool, Path.cwd() / "tools", where)
        for each in made:
            self.tool_map[each.name] = each
            self.functions.append(each.get_openai_tool_schema().to_openai()["function"])

    def get_tool(self, name_or_short_name: str) -> BaseTool | None:
        """Returns the tool of that name, or the first MCP tool of that short name (`query_rag` of `search-query_rag`)."""
        return self.tool_map.get(self.full_name(name_or_short_name))

    def full_name(self, name_or_short_name: str) -> str:
        """Returns the matching name in `tool_map`, or the given one if there is none."""
        if name_or_short_name in self.tool_map:
            return name_or_short_name
        matches = (name for name in self.tool_map if name.endswith(f"-{name_or_short_name}"))
        return next(matches, name_or_short_name)

    @property
    def all_tools(self) -> dict[str, BaseTool]:
        """The tools by name."""
        return self.tool_map

    # -- reading ---------------------------------------------------------------------------------------------------

    def parse_response(self, response_content: str) -> tuple[str, str | Called]:
        """Returns ("answer", the answer) or ("actions", the called tools); a response with neither is the answer itself."""
        if self.parse_end_flag(response_content):
            return ANSWER, final_answer(response_content) or response_content
        tools = self.parse_tools(response_content)
        return (ANSWER, tools) if isinstance(tools, str) else (ACTIONS, tools)

    def parse_end_flag(self, response_content: str) -> bool:
        """Whether the response contains an answer, which ends the conversation."""
        return final_answer(response_content) is not None

    def parse_tools(self, response: str) -> str | Called:
        """Returns the called tools, each `{"name", "args"}`, with `<empty>` for a malformed one; if there are none, returns
        the response."""
        return read_tools(response) or response

    # -- running ---------------------------------------------------------------------------------------------------

    def execute_actions(self, responses: Sequence[str]) -> tuple[list[str], list[Any]]:
        """Parses and runs a batch of responses, all concurrently.

        Returns:
            The actions and, for each, the answer (a string) or the tools' messages.

        Raises:
            InfrastructureError: a tool had an infrastructure failure.
        """
        actions, tools = self.parsed(responses)
        turns = _TURNS.get()
        work = self.execute_all_tools(actions, tools)
        if not turns:
            return actions, asyncio.run(work)
        future = asyncio.run_coroutine_threadsafe(work, turns[0].loop)
        try:
            return actions, future.result(_THREAD_SECONDS)
        except TimeoutError as error:
            future.cancel()
            raise InfrastructureError(f"tools gave no answer within {_THREAD_SECONDS:g} s") from error

    def parsed(self, responses: Sequence[str]) -> tuple[list[str], list[Any]]:
        """Calls `parse_response` on each; returns (actions, answers or tools)."""
        pairs = [self.parse_response(response_content=response) for response in responses]
        return [action for action, _ in pairs], [what for _, what in pairs]

    async def execute_all_tools(self, actions: Sequence[str], tool_list: Sequence[Any]) -> list[Any]:
        """Runs the tools of all responses concurrently; returns one result per response."""
        turns: Sequence[Turn | None] = _TURNS.get() or [None] * len(actions)
        if len(turns) != len(actions):
            raise ValueError(f"{len(actions)} responses for the {len(turns)} trajectories at hand")

        async def batch(action: str, tools: Any, turn: Turn | None) -> Any:
            with bind_turns([] if turn is None else [turn]):
                return await self._execute_tool_batch(action, tools)

        return list(await asyncio.gather(*(batch(*each) for each in zip(actions, tool_list, turns))))

    async def _execute_tool_batch(self, action: str, tools: Any) -> Any:
        """Returns an answer as it is; otherwise runs the tools and returns one message for each."""
        if action != ACTIONS:
            return tools
        turn = next(iter(_TURNS.get()), None)
        given = [(self.full_name(tool["name"]), tool["args"]) for tool in tools]
        known = [(n, args if isinstance(args, str) else json.dumps(args, ensure_ascii=False)) for n, args in given]
        calls = [FunctionCall(name=name, arguments=args) for name, args in known if name in self.tool_map]
        if turn is not None:
            outcomes = await turn.session.execute(calls, turn.number)
        else:
            async with ToolSession(self.tool_map, request_id="env.step") as session:
                outcomes = await session.execute(calls, 0)
        found = iter(outcomes)
        number = 0 if turn is None else turn.number
        whole = [next(found) if n in self.tool_map else self._missing(n, args, number) for n, args in known]
        if turn is not None:
            turn.outcomes.extend(whole)
        return [{"role": "tool", "content": self.result_text(outcome)} for outcome in whole]

    def _missing(self, name: str, args: str, turn: int) -> ToolCall:
        error = "malformed" if name == EMPTY_TOOL["name"] else "unknown_tool"
        response = ToolResponse(text=self.missing_text(name))
        return ToolCall(FunctionCall(name=name, arguments=args), turn, response=response, error=error)

    def result_text(self, outcome: ToolCall) -> str:
        """Returns the text that the model sees for a tool call that ran or was rejected."""
        return outcome.response.text or ""

    def missing_text(self, name: str) -> str:
        """Returns the text that the model sees for a call of an unknown tool, or for a malformed call."""
        if name == EMPTY_TOOL["name"]:
            example = '{"name": "...", "arguments": {...}}'
            return f"The tool call was not read: write <tool_call>{example}</tool_call>."
        return f"Failed to find the tool '{name}'. Available tools: {', '.join(self.tool_map) or 'none'}."

    # -- prompts ---------------------------------------------------------------------------------------------------

    def get_prompt(
        self,
        input_data: str | Mapping[str, Any] | Sequence[Mapping[str, Any]],
        tokenizer: Any,
        mode: str = "initial",
        add_generation_prompt: bool = True,
    ) -> str:
        """Renders messages with the model's chat template.

        Args:
            input_data: one message, a list of them, or a string: the user's in mode `initial`, the tool's in mode
                `tool_call`, the assistant's in mode `assistant_response`.
            mode: `initial` renders a whole prompt with the tools; the other two render the continuation of a conversation.

        Raises:
            ConfigError: an unknown mode.
        """
        roles = {"initial": "user", "tool_call": "tool", "assistant_response": "assistant"}
        if mode not in roles:
            raise ConfigError(f"get_prompt: mode must be one of {', '.join(roles)}, not '{mode}'")
        messages = _messages(input_data, roles[mode])

        def render(conversation: list[dict[str, Any]], **options: Any) -> str:
            return str(tokenizer.apply_chat_template(conversation, tokenize=False, **options))

        if mode == "initial":
            tools = [{"type": "function", "function": function} for function in self.functions] or None
            text = render(messages, tools=tools, add_generation_prompt=add_generation_prompt)
        else:
            base: list[dict[str, Any]] = [{"role": "system", "content": "."}, {"role": "user", "content": "."}]
            shown = messages
            if mode == "tool_call":
                base.append({"role": "assistant", "content": "."})
                try:
                    render([*base, *messages])
                except Exception:  # the template requires calls before tool messages; it may raise anything
                    called = [dict(message) for message in Stub.CALLS.conversation(messages)]
                    base[1:], shown = called[:2], called[2:]
            whole = render([*base, *shown], add_generation_prompt=add_generation_prompt)
            text = whole.removeprefix(render(base))
        return RenderedPrompt.of(text, messages)


TOOL_MANAGERS: Registry[type[ToolManager]] = Registry("tool manager")
register_tool_manager = TOOL_MANAGERS.register


@register_tool_manager("adaptive", "qwen3", "qwen2_5", "llama3")
class QwenManager(ToolManager):
    """RL-Factory's manager: `<tool_call>` blocks hold JSON5, `<answer>` ends the trajectory. The chat template renders tool
    schemas and results, so one manager serves every model family."""


def _as_tool(name: str, tool: Any) -> BaseTool:
    """Converts an entry that a subclass's `_build_tools` put into `tool_map`; it may have Qwen-Agent's interface."""
    if isinstance(tool, BaseTool):
        return tool
    if callable(getattr(tool, "call", None)):
        return QwenTool(tool, {}, name=name)
    raise ConfigError(f"tool_map['{name}'] is a {type(tool).__name__}, neither a BaseTool nor in Qwen-Agent's shape")


def _messages(data: str | Mapping[str, Any] | Sequence[Mapping[str, Any]], role: str) -> list[dict[str, Any]]:
    if isinstance(data, str):
        return [{"role": role, "content": data}]
    if isinstance(data, Mapping):
        return [dict(data)]
    return [dict(message) for message in data]
