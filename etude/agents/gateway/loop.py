"""`openai_agent`: the agent loop of agents that talk to their policy through OpenAI's API.

The agent runs unchanged; its base URL points to this trajectory's `GatewaySession`, inside this process. After it returns,
the session's sequences are what is trained on: see `recording`.

How an agent's ending is classified: it returned → `completed`, or `response_length` if its last turn filled the context. A
limit rejected one of its requests → that limit, whether it then returned or raised the error. The engine failed → the
trajectory is retried, whatever the agent did about it; another part of ours failed, a parser for instance → the run fails.
It raised something else → an infrastructure failure if that, or its cause, is one (`is_infrastructure`); else a bug of the
user's, which fails the run.

Invariant: a session in which the engine, or any other part of ours, failed yields no trajectory; no request is in flight
once `run` has returned or raised.
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

    With neither, the agent is that of `rollout.agent.openai_agent`.

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
        """See `AgentLoopBase.run`: one trajectory per sequence.

        Raises:
            EtudeError: the agent sent no request, or none that could be answered.
            InfrastructureError: the engine failed.
        """
        from etude.agents.gateway.serving import LocalGateway  # FastAPI: imported only when needed

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
        """What the agent returned; None if a limit ended it."""
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
        except InfrastructureError as error:  # a wrong return value is not infrastructure
            raise EtudeError(str(error)) from error


def check_openai_agent(options: OpenAIAgentOptions) -> None:
    """Imports the configured function, or looks up the command's program, if there is one.

    Raises:
        ConfigError: it cannot be used.
        MissingExtraError: it needs an `openai` client, and the package is not installed.
    """
    if options.function is not None or options.command:
        agent_of(options.function, options.command)


def agent_of(function: Callable[..., Any] | str | None, command: Sequence[str]) -> Agent:
    """The agent of a function, its name, or a command.

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
    """The infrastructure (or server) failure in the chain of an exception's causes, if any."""
    for each in _chain(error, with_contexts=False):
        if isinstance(each, EtudeError):  # which says what the user must change
            return None
        if is_infrastructure(each):
            return each
    return None


def _tells_of_refusal(error: BaseException) -> bool:
    """Whether a 400 response ended the agent: its exception, a cause of it, or a program's failure after one."""
    return isinstance(error, CommandFailed) or any(http_status(each) == 400 for each in _chain(error))


def _chain(error: BaseException, with_contexts: bool = True) -> Iterator[BaseException]:
    """`error`, its causes, the members of a group, and, if asked for, its contexts."""
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
    return (
        f"returned although none of its requests was answered; the last one failed with: {one_line(session.declined)}"
    )


def openai_agent(name: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Decorator for a file named in `plugins`: registers a function as the agent loop `name`.

        @openai_agent("my_agent")
        async def run(client, row): ...

    Raises:
        ConfigError: the name is taken, or the function has unknown parameters.
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
