"""`openai_agent`: the agent loop of agents that talk to their policy over OpenAI's interface.

The agent runs as it is; its base URL leads to a `GatewaySession` of this trajectory, inside this process. When it has
returned, the session's sequences are what is trained on: see `recording`.

How an agent's end is read: it returned → `completed`, or `response_length` where its last turn filled the context. It was
refused a request for a limit's sake → that limit, whether it returned then or let the refusal through. The engine failed
it → the trajectory is run again, whatever the agent made of that; something else of ours failed it, a parser for instance →
that ends the run. It raised something else → broken infrastructure if that, or what caused it, is (`is_infrastructure`);
else the user's bug, which ends the run.

Invariant: no trajectory comes of a session in which the engine, or anything else of ours, failed; no request is under way
when `run` has returned or raised.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from etude.agents.base import AGENT_LOOPS, AgentContext, AgentLoopBase
from etude.agents.gateway.agent import Agent, CommandAgent, CommandFailed, Endpoint, FunctionAgent
from etude.agents.gateway.images import row_for_clients
from etude.agents.gateway.session import GatewaySession
from etude.bounded import called, settle
from etude.errors import ConfigError, EtudeError, InfrastructureError, http_status, is_infrastructure, one_line
from etude.inference import SamplingParams
from etude.options import OpenAIAgentOptions
from etude.registry import import_object
from etude.rewards.number import as_reward
from etude.trajectory import StopReason, Trajectory


@AGENT_LOOPS.register("openai_agent")
class OpenAIAgentLoop(AgentLoopBase):
    """Runs `function`, an object or `path/to/file.py:name`, or `command`, a list of words.

    Without either it is what `rollout.agent.openai_agent` names.

    Raises:
        ConfigError: neither or both are given, or the function cannot be used.
    """

    def __init__(
        self,
        trainer_config: AgentContext,
        *,
        function: Callable[..., Any] | str | None = None,
        command: Sequence[str] = (),
        **kwargs: Any,
    ) -> None:
        super().__init__(trainer_config, **kwargs)
        if function is None and not command:
            options = trainer_config.options.agent.openai_agent
            function, command = options.function, options.command
        self._agent = agent_of(function, command)

    async def run(self, sampling_params: dict[str, Any], **row: Any) -> list[Trajectory]:
        """See `AgentLoopBase.run`: one trajectory a sequence.

        Raises:
            EtudeError: the agent never asked the policy anything, or nothing that could be answered.
            InfrastructureError: the engine failed.
        """
        from etude.agents.gateway.serving import LocalGateway  # FastAPI: only for those who need it

        name, row = row["request_id"].replace("/", "~"), await row_for_clients(row)
        sampling = SamplingParams.of(sampling_params)
        session = GatewaySession(name, self.server_manager, self.context, sampling)
        async with LocalGateway.here().opened(session, self.tokenizer) as (base_url, api_key):
            try:
                reward = await self._reward(session, Endpoint(base_url, api_key), row)
            finally:
                await session.close()
        trajectories = session.trajectories()
        main = trajectories[-1]
        if not session.recording.turns and main.stop_reason is StopReason.COMPLETED:
            raise EtudeError(f"agent '{self._agent.name}' {_unanswered(session)}")
        main.rewards.score = reward
        return trajectories

    async def _reward(self, session: GatewaySession, endpoint: Endpoint, row: Mapping[str, Any]) -> float | None:
        """What the agent returned; None where a limit ended it."""
        agent = asyncio.ensure_future(called(self._agent.run, endpoint, row))
        try:
            await asyncio.wait({agent, session.broken}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            await settle({agent})
        if session.broken.done():
            raise session.broken.result()
        try:
            returned = agent.result()
        except Exception as error:
            if (cause := broken_by(error)) is not None:
                raise InfrastructureError(f"agent '{self._agent.name}': {one_line(error)}") from cause
            if session.refused is not None and _tells_of_refusal(error):
                return None
            raise
        if returned is None:
            return None
        try:
            return as_reward(returned, f"agent '{self._agent.name}'")
        except InfrastructureError as error:  # a wrong return value is no weather
            raise EtudeError(str(error)) from error


def check_openai_agent(options: OpenAIAgentOptions) -> None:
    """Imports the configured function, or looks for the program of the command, if there is one.

    Raises:
        ConfigError: it cannot be used.
        MissingExtraError: it wants an `openai` client, and the package is not installed.
    """
    if options.function is not None or options.command:
        agent_of(options.function, options.command)


def agent_of(function: Callable[..., Any] | str | None, command: Sequence[str]) -> Agent:
    """The agent that a function, or its name, or a command stands for.

    Raises:
        ConfigError: neither or both are given, or the function cannot be used.
    """
    if (function is None) == (not command):
        raise ConfigError(
            "agent loop 'openai_agent': set either rollout.agent.openai_agent.function or rollout.agent.openai_agent.command"
        )
    if function is None:
        return CommandAgent(command)
    return FunctionAgent(import_object(function) if isinstance(function, str) else function)


def broken_by(error: BaseException) -> BaseException | None:
    """What in the chain of an exception's causes is a failure of infrastructure, or of some server, if anything is."""
    for each in _chain(error, with_contexts=False):
        if isinstance(each, EtudeError):  # which says what the user must change
            return None
        if is_infrastructure(each):
            return each
    return None


def _tells_of_refusal(error: BaseException) -> bool:
    """Whether an answer 400 is what ended the agent: its exception, one that it stems from, or what a program made of it."""
    return isinstance(error, CommandFailed) or any(http_status(each) == 400 for each in _chain(error))


def _chain(error: BaseException, with_contexts: bool = True) -> Iterator[BaseException]:
    """`error`, what it was raised from, the members of a group, and, if so wanted, what was being handled meanwhile."""
    waiting: list[BaseException | None] = [error]
    seen: set[int] = set()
    while waiting:
        each = waiting.pop()
        if each is None or id(each) in seen:
            continue
        seen.add(id(each))
        yield each
        members = getattr(each, "exceptions", ())
        waiting += [member for member in members if isinstance(member, BaseException)] if _is_group(each) else []
        waiting += [each.__cause__, each.__context__ if with_contexts else None]


def _is_group(error: BaseException) -> bool:
    return any(each.__name__ == "BaseExceptionGroup" for each in type(error).__mro__)  # builtin from Python 3.11 on


def _unanswered(session: GatewaySession) -> str:
    if session.declined is None:
        return "returned without asking its policy anything: does it use the base URL that it was given?"
    return f"returned although none of its requests was answered; the last one was told: {one_line(session.declined)}"


def openai_agent(name: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Decorator for a file named in `plugins`: registers a function as the agent loop `name`.

        @openai_agent("my_agent")
        async def run(client, row): ...

    Raises:
        ConfigError: the name is taken, or the function wants what nobody gives.
    """

    def enter(function: Callable[..., Any]) -> Callable[..., Any]:
        FunctionAgent(function)

        def loop(**given: Any) -> OpenAIAgentLoop:
            return OpenAIAgentLoop(**given, function=function)

        for attribute in ("__module__", "__qualname__", "__wrapped__"):
            setattr(loop, attribute, function if attribute == "__wrapped__" else getattr(function, attribute, name))
        AGENT_LOOPS.register(name)(loop)
        return function

    return enter
