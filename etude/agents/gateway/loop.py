"""`openai_agent`: the agent loop for agents that call the policy through OpenAI's API.

The agent runs unchanged; its base URL points to this trajectory's `GatewaySession`, inside this process. After it returns,
the session's sequences are trained on: see `rollout_tree`.

How a run of the agent is classified:

- It returned: `completed`, or `response_length` if its last turn filled the context.
- A limit rejected its last request: that limit, whether the agent then returned or raised the error.
- The engine failed: the trajectory is retried, however the agent handled the error.
- Another part of Étude failed, a parser for instance: the run fails.
- It raised anything else: an infrastructure failure if the exception or one of its causes is one (`is_infrastructure`);
  otherwise `agent_error`. So does a program that exits with a nonzero status.
- It ended without a reward, and no reward manager scores it: an `AgentError`.

Invariant: a session in which the engine or another part of Étude failed yields no trajectory, nor does one that has no
reward and gets none: a missing reward is not 0. No request is in flight once `run` has returned or raised.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from etude.agents.base import AGENT_LOOPS, AgentContext, AgentLoopBase
from etude.agents.gateway.agent import (
    REWARD_FILE,
    VERIFIER_SECONDS,
    CommandAgent,
    CommandFailed,
    FunctionAgent,
    Reward,
    WrongReward,
    give_rewards,
    read_agent_reward,
)
from etude.agents.gateway.command_sandbox import check_sandbox
from etude.agents.gateway.messages import row_for_clients
from etude.agents.gateway.session import GatewaySession, SessionRules
from etude.environments import EnvironmentSession
from etude.errors import (
    AgentError,
    ConfigError,
    EtudeError,
    InfrastructureError,
    describe_error,
    http_status,
    is_infrastructure,
    one_line,
)
from etude.inference import SamplingParams
from etude.options import AgentSandboxOptions, OpenAIAgentOptions
from etude.registry import import_object
from etude.timeouts import called, settle
from etude.trajectory import StopReason, Trajectory

logger = logging.getLogger(__name__)

_logged: set[tuple[str, type[Exception]]] = set()  # kinds of errors whose traceback was logged


@AGENT_LOOPS.register("openai_agent")
class OpenAIAgentLoop(AgentLoopBase):
    """Runs `function`, a callable or `path/to/file.py:name`, or `command`, a program with its arguments, with `workspace`,
    `verifier`, `verifier_seconds` and `sandbox` as in `rollout.agent.openai_agent`.

    With neither, runs the agent configured in `rollout.agent.openai_agent`.

    Raises:
        ConfigError: neither or both are given, or the function cannot be used, or is given what only a command can have.
    """

    def __init__(
        self,
        trainer_config: AgentContext,
        *,
        function: Callable[..., Any] | str | None = None,
        command: Sequence[str] = (),
        workspace: str | None = None,
        verifier: Sequence[str] = (),
        sandbox: AgentSandboxOptions | Mapping[str, Any] | None = None,
        verifier_seconds: float = VERIFIER_SECONDS,
        **kwargs: Any,
    ) -> None:
        super().__init__(trainer_config, **kwargs)
        if isinstance(sandbox, Mapping):
            sandbox = AgentSandboxOptions(**sandbox)
        if function is None and not command:
            own = trainer_config.options.agent.openai_agent
            self._agent = agent_of(
                own.function, own.command, own.workspace, own.verifier, own.sandbox, own.verifier_seconds
            )
        else:
            self._agent = agent_of(function, command, workspace, verifier, sandbox, verifier_seconds)

    async def run(self, sampling_params: dict[str, Any], **row: Any) -> list[Trajectory]:
        """See `AgentLoopBase.run`: one trajectory per sequence.

        Raises:
            AgentError: the agent failed or ended, and there is no reward, or nothing was sampled.
            EtudeError: the agent returned though none of its requests was answered, or it sent none.
            InfrastructureError: the engine failed.
        """
        from etude.agents.gateway.local import LocalGateway  # FastAPI: imported only when needed

        name, row = row["request_id"].replace("/", "~"), await row_for_clients(row)
        sampling = SamplingParams.of(sampling_params)
        rules = SessionRules(takes_rewards=not self._agent.has_verifier)
        session = GatewaySession(name, self.server_manager, self.context, sampling, rules)
        async with LocalGateway.here().opened(session, self.tokenizer) as (base_url, api_key):
            try:
                reward, failure = await self._outcome(session, base_url, api_key, row)
            finally:
                await session.close()
        by_role = isinstance(reward, Mapping) or not self.context.scored or session.rewards_roles
        trajectories = session.trajectories(by_role=by_role)
        main, sampled = trajectories[-1], bool(session.tree.turns)
        rewarded = reward is not None or bool(session.tree.rewards)
        if failure is None and not sampled and main.stop_reason is StopReason.COMPLETED:
            why = "without asking its policy anything: does it use the base URL that it was given?"
            if session.declined is not None:
                last = one_line(session.declined)
                why = f"although none of its requests was answered; the last one failed with: {last}"
            raise EtudeError(f"agent '{self._agent.name}' returned {why}")
        if failure is None and sampled and not (rewarded or self.context.scored):
            failure = AgentError(f"it ended ({main.stop_reason.value}) without a reward: {_GIVE_ONE}")
        if sampled and by_role and rewarded:
            try:
                give_rewards(trajectories, reward, scored=self.context.scored)
            except WrongReward as missing:
                failure = missing
        elif sampled and not isinstance(reward, Mapping):
            main.rewards.score = reward
        if failure is not None:
            error = self._failed(failure)
            wrong = isinstance(failure, WrongReward)
            kept = self.context.scored or (rewarded and not wrong)
            if not sampled or not kept or (wrong and isinstance(reward, Mapping)):
                raise error
            main.stop_reason = StopReason.AGENT_ERROR
        return trajectories

    def _failed(self, failure: Exception) -> AgentError:
        """Logs an agent's failure, with its traceback if it is the first of its kind; returns it as an `AgentError`."""
        error = AgentError(f"agent '{self._agent.name}': {describe_error(failure)}")
        error.__cause__ = failure
        kind, name = (self._agent.name, type(failure)), self.server_manager.request_id
        first = kind not in _logged
        logger.log(
            logging.WARNING if first else logging.INFO, "trajectory %s: %s", name, error, exc_info=first and failure
        )
        _logged.add(kind)
        return error

    async def _outcome(
        self, session: GatewaySession, base_url: str, api_key: str, row: Mapping[str, Any]
    ) -> tuple[Reward | None, Exception | None]:
        """Runs the agent; returns its reward, if it gave one, and the error that ended it, unless a limit caused that."""
        agent = asyncio.ensure_future(called(self._agent.run, base_url, api_key, row))
        try:
            await asyncio.wait({agent, session.broken}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            await settle({agent})
        if session.broken.done():
            raise session.broken.result()
        if agent.cancelled():
            return None, AgentError("it cancelled itself")
        failure: Exception | None = None
        try:
            returned = agent.result()
        except Exception as error:
            if (cause := broken_by(error)) is not None:
                raise InfrastructureError(f"agent '{self._agent.name}': {one_line(error)}") from cause
            if isinstance(error, EtudeError):  # it says what the user must change
                raise
            returned = error.reward if isinstance(error, CommandFailed) else None
            # A rejected request may have ended the agent: a 400 is in the exception's chain, or a command failed.
            refused = isinstance(error, CommandFailed) or any(http_status(each) == 400 for each in _chain(error))
            failure = None if refused and session.refused is not None else error
        try:
            roles = self.context.options.agent.roles
            return None if returned is None else read_agent_reward(returned, "it", roles), failure
        except WrongReward as error:
            return None, error


@AGENT_LOOPS.register("driving_agent")
class DrivingAgentLoop(OpenAIAgentLoop):
    """The same, where the environment that the row picks is the agent, as one that drives itself."""

    def __init__(self, trainer_config: AgentContext, **kwargs: Any) -> None:
        super().__init__(trainer_config, function=self.drive, **kwargs)
        self._played: dict[str, Any] = {}
        self._info: dict[str, Any] = {}

    async def run(self, sampling_params: dict[str, Any], **row: Any) -> list[Trajectory]:
        """See `OpenAIAgentLoop.run`."""
        trajectories = await super().run(sampling_params, **row)
        trajectories[-1].extra_fields["environment"] = self._played
        trajectories[-1].rewards.score_info = self._info
        return trajectories

    async def drive(self, row: dict[str, Any], base_url: str, api_key: str) -> Reward | None:
        """Plays the episode; returns its score."""
        assert self.context.environment is not None
        entry = self.context.environment.pick(row)
        self._played = {"name": entry.name, "metrics": {}}
        async with EnvironmentSession(entry, row) as session:
            score, self._info = await session.drive(base_url, api_key)
        self._played["metrics"] = {name: value for name, value in self._info.items() if isinstance(value, int | float)}
        return score


def check_openai_agent(options: OpenAIAgentOptions) -> None:
    """Imports the configured function, or looks up the command's program, and tries its sandbox; does nothing if neither is
    set.

    Raises:
        ConfigError: it cannot be used.
        MissingExtraError: the function needs an `openai` client, and the package is not installed.
    """
    if options.function is not None or options.command:
        agent_of(options.function, options.command, options.workspace, options.verifier, options.sandbox)
        if options.sandbox.enable:
            check_sandbox(options.sandbox)


def agent_of(
    function: Callable[..., Any] | str | None,
    command: Sequence[str],
    workspace: str | None,
    verifier: Sequence[str],
    sandbox: AgentSandboxOptions | None,
    verifier_seconds: float = VERIFIER_SECONDS,
) -> FunctionAgent | CommandAgent:
    """Makes an agent of a function, its import path, or a command.

    Raises:
        ConfigError: neither or both are given, or the function cannot be used, or is given what only a command can have.
    """
    if (function is None) == (not command):
        raise ConfigError(
            "agent loop 'openai_agent': set either rollout.agent.openai_agent.function or rollout.agent.openai_agent.command"
        )
    if function is None:
        return CommandAgent(command, workspace, verifier, sandbox, verifier_seconds)
    walled = sandbox is not None and sandbox.enable
    of_commands = {"sandbox.enable": walled, "verifier": verifier, "workspace": workspace}
    if unfit := [name for name, given in of_commands.items() if given]:
        raise ConfigError(f"agent loop 'openai_agent': {unfit[0]} needs a command: a function runs in this process")
    return FunctionAgent(import_object(function) if isinstance(function, str) else function)


def broken_by(error: BaseException) -> BaseException | None:
    """Returns the infrastructure (or server) failure among an exception and its causes, if any."""
    for each in _chain(error, with_contexts=False):
        if isinstance(each, EtudeError | AgentError):  # for the user to mend, whatever caused it
            return None
        if is_infrastructure(each):
            return each
    return None


def _chain(error: BaseException, with_contexts: bool = True) -> Iterator[BaseException]:
    """Yields `error`, its causes, the members of exception groups, and, with `with_contexts`, the implicit contexts."""
    waiting: list[BaseException | None] = [error]
    seen: set[int] = set()
    while waiting:
        each = waiting.pop()
        if each is None or id(each) in seen:
            continue
        seen.add(id(each))
        yield each
        if any(kind.__name__ == "BaseExceptionGroup" for kind in type(each).__mro__):  # builtin from Python 3.11 on
            waiting += each.exceptions  # type: ignore[attr-defined]
        waiting += [each.__cause__, each.__context__ if with_contexts else None]


_GIVE_ONE = (
    f"return a number (a program writes it into the file {REWARD_FILE}), POST it to /reward, "
    "or set reward_model.enable=true"
)


def openai_agent(name: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Decorator for files listed in `plugins`: registers a function as the agent loop `name`.

        @openai_agent("my_agent")
        async def run(client, row): ...

    Raises:
        ConfigError: the name is taken, or the function has unknown parameters.
    """

    def register(function: Callable[..., Any]) -> Callable[..., Any]:
        FunctionAgent(function)

        def loop(**given: Any) -> OpenAIAgentLoop:
            return OpenAIAgentLoop(**given, function=function)

        for attribute in ("__module__", "__qualname__", "__wrapped__"):
            setattr(loop, attribute, function if attribute == "__wrapped__" else getattr(function, attribute, name))
        AGENT_LOOPS.register(name)(loop)
        return function

    return register
