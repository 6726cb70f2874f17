"""`EnvironmentSession`: one trajectory's conversation with its environment, whoever that is (a game, a user, a server).

Invariant: a place within `limit` is taken before the environment is made, and given back after its `close`, which is called
exactly once on every ending: finish, cut, cancellation, an exception in `reset`. Calls of one session run one at a time, in
the order of the model's calls, each within `timeout`. A failure is infrastructure (retried from fresh state, then dropped),
an `InvalidAction` (told), or the end of the run; it never becomes a reward, and neither does a reward that is missing.
"""

from __future__ import annotations

import asyncio
import inspect
import logging
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache, partial
from types import TracebackType
from typing import Any

from etude.environments.base import Environment, EnvironmentFull, InvalidAction, Step
from etude.environments.entry import EnvironmentEntry, seed_of, task_of
from etude.errors import EtudeError, InfrastructureError, ToolError, describe_error, is_infrastructure, one_line
from etude.limits import Permit
from etude.rewards.finite import as_flag, as_reward
from etude.schemas import ToolResponse
from etude.timeouts import BlockingCalls, uninterrupted
from etude.tools import BaseTool
from etude.tools.base import Execution
from etude.tools.function_tool import normalize_result, pays_in_tuples
from etude.trajectory import plain_numbers

MAX_OBSERVATION_CHARS = 100_000
_FIRST_WAIT, _LONGEST_WAIT = 0.25, 10.0  # seconds between two tries of a server that is full
_FULL_TRIES = 100

logger = logging.getLogger(__name__)
_threads = BlockingCalls("etude-env", limit=64)


async def call_method(
    label: str, method: str, seconds: float, threads: BlockingCalls, function: Callable[..., Any], *args: Any
) -> Any:
    """Calls a user's method within `seconds`: in a thread, or here if it is async.

    Raises:
        InfrastructureError: it failed because of infrastructure, or timed out.
        ToolError: it raised one, for the model.
        EtudeError: it raised anything else; names the method.
    """
    try:
        return await threads.call_within(seconds, function, *args)
    except ToolError:
        raise
    except Exception as error:
        line = f"{label}: {method} failed: {describe_error(error)}"
        if is_infrastructure(error):
            kind = EnvironmentFull if isinstance(error, EnvironmentFull) else InfrastructureError
            raise kind(line) from error
        if isinstance(error, EtudeError):
            raise error.at(label) from error
        raise EtudeError(line) from error


class EnvironmentSession:
    """An async context manager, entered once; `observation` is then what `reset` returned.

    Attributes:
        tools: the tools of this episode by name: those of the environment and, of the run's, those that `run_tools` has and
            that `reset` left.
        done: whether the episode is over.
        metrics: the last value of each metric that a step reported.
    """

    def __init__(
        self,
        entry: EnvironmentEntry,
        row: Mapping[str, Any],
        *,
        run_tools: Mapping[str, BaseTool] | None = None,
    ) -> None:
        """`row`: as a loop's `run` gets it; see `task_of` and `seed_of`."""
        self.entry, self._row = entry, row
        self.environment: Environment | None = None
        self.observation: list[dict[str, Any]] | str = ""
        self.tools: dict[str, BaseTool] = dict(run_tools or {})
        self.done = False
        self.metrics: dict[str, Any] = {}
        self._rewarded, self._turns = False, 0
        self._made: list[Environment] = []  # the one to close: whoever pops it closes it
        self._closing = False
        self._permit: Permit | None = None
        self._lock = asyncio.Lock()
        self._own_thread = entry.kind.thread == "own"
        self._threads = BlockingCalls(f"etude-env-{entry.name}", limit=1) if self._own_thread else _threads

    async def __aenter__(self) -> EnvironmentSession:
        """Makes the environment and resets it.

        Raises:
            InfrastructureError: it failed because of infrastructure.
            EtudeError: it raised anything else, or `reset` returned no observation.
        """
        try:
            if (limiter := self.entry.limiter) is not None:
                self._permit = await limiter.acquire()
            if self.entry.kind.times_itself:
                self._make()
            else:
                await self._call("__init__", self._make)
            self._begin(await self._reset())
        except BaseException:
            await uninterrupted(self._close())
            raise
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Closes the environment; raises only cancellation."""
        await uninterrupted(self._close())

    def bind(self, conversation: Any) -> None:
        """Gives the environment the loop's state."""
        self._environment.conversation = conversation

    # -- the episode -----------------------------------------------------------------------------------------------

    @property
    def reads_calls(self) -> bool:
        """Whether tool calls stand in the text of `step`."""
        reads = self.entry.kind.reads_calls
        return not self.tools if reads is None else reads

    async def step(self, text: str) -> tuple[Step, list[dict[str, Any]]]:
        """Acts with a turn; also returns the observation as messages, none if the episode is over.

        Raises:
            InfrastructureError, EtudeError: see `call_method`; or the environment returned something else than it may.
        """
        self._turns += 1
        try:
            returned = await self._call("step", self._environment.step, text)
        except ToolError as error:
            self._count_invalid()
            returned = Step(str(error), getattr(error, "reward", None))
        step = returned if isinstance(returned, Step) else Step(returned)
        self._take(step)
        messages = [] if self.done else as_messages(step.observation, self.label)
        if not messages and not self.done:
            raise self._wrong("step observed no message, and the episode goes on")
        return step, messages

    async def call_tool(self, name: str, arguments: Mapping[str, Any]) -> Execution:
        """Runs a call of one of the environment's tools; returns what a tool's `execute` does.

        Raises:
            ToolError: the model is told.
            InfrastructureError, EtudeError: see `call_method`.
        """
        self._turns += 1
        environment, pays = self._environment, True
        if name in self.entry.tools:
            method = getattr(environment, name)
            function: Callable[..., Any] = partial(method, **arguments)
            pays = pays_in_tuples(getattr(method, "__func__", method))
        else:
            function = partial(environment.call_tool, name, arguments)
        try:
            returned = await self._call(name, function, acts=True)
        except InvalidAction as error:
            self._count_invalid()
            if error.reward is None:
                raise
            returned = Step(str(error), error.reward)
        if isinstance(returned, Step):
            if not isinstance(returned.observation, str):
                raise self._wrong(f"{name} must observe text, not {type(returned.observation).__name__}")
            self._take(returned)
            response = ToolResponse(text=returned.observation[:MAX_OBSERVATION_CHARS])
            return response, returned.reward or 0.0, dict(returned.metrics)
        self._rewarded |= pays and isinstance(returned, tuple) and len(returned) > 1 and returned[1] is not None
        try:
            return normalize_result(returned, pays=pays, name=name)
        except TypeError as error:
            raise self._wrong(f"{name} {one_line(error)}") from error

    def charge_cut(self) -> float | None:
        """Returns what a token limit's end costs the last turn, None if nothing; it counts as an invalid action.

        Raises:
            EtudeError: it is no finite number.
        """
        if (reward := self._environment.cut_reward) is None:
            return None
        self._count_invalid()
        self._rewarded = True
        return self._as_reward(reward)

    async def score(self, *, completed: bool) -> tuple[float | None, dict[str, Any]]:
        """Returns the episode's score, None if there are only rewards of steps, and what is reported beside it.
        `completed`: the episode was not cut by a limit.

        Raises:
            EtudeError: there is no reward at all, or the score is no finite number.
        """
        return self._read_score(await self._call("score", self._environment.score), completed)

    async def drive(self, base_url: str, api_key: str) -> tuple[float | dict[str, float] | None, dict[str, Any]]:
        """Lets an environment that drives itself play; returns what `score` does, or rewards by role. Without a score it may
        have posted its rewards, which the agent loop knows.

        Raises:
            EtudeError: it returned no number.
        """
        returned = await self._environment.drive(base_url, api_key)
        if returned is None:
            return None, {}
        if isinstance(returned, Mapping) and isinstance(by_role := returned.get("score"), Mapping):
            rewards = {role: self._as_reward(value) for role, value in by_role.items() if value is not None}
            info = plain_numbers({name: value for name, value in returned.items() if name != "score"})
            self._as_reward(info.get("acc"))
            return rewards, info
        return self._read_score(returned, True)

    def _read_score(self, returned: Any, completed: bool) -> tuple[float | None, dict[str, Any]]:
        value, info = returned, dict[str, Any]()
        if isinstance(returned, Mapping):
            info = plain_numbers(returned)
            value = info.pop("score", None)
        if value is None:
            # A policy whose first turn was cut did nothing that a step could have rewarded.
            if self.entry.kind.must_reward and not self._rewarded and (self._turns or completed or info):
                other = "; get_reward is called score here" if hasattr(self.entry.kind, "get_reward") else ""
                raise self._wrong(f"it gave no reward: no Step has one, and score() returned none{other}")
            return None, info
        if info.get("acc") is not None:
            self._as_reward(info["acc"])
        return self._as_reward(value), info

    def _as_reward(self, value: Any) -> float:
        try:
            return as_reward(value, self.label)
        except InfrastructureError as error:
            raise EtudeError(str(error)) from error

    # -- within ------------------------------------------------------------------------------------------------------

    @property
    def label(self) -> str:
        """`environment 'name'`, for errors."""
        return self.entry.label

    @property
    def _environment(self) -> Environment:
        assert self.environment is not None
        return self.environment

    def _make(self) -> None:
        self.environment = self.entry.make()
        self.environment.row = self._row
        self._made.append(self.environment)
        if self._closing and (late := _pop(self._made)):  # nobody waits for it any more
            late.close()

    async def _reset(self) -> Any:
        wait, task, seed = _FIRST_WAIT, task_of(self._row), seed_of(self._row)
        for number in range(_FULL_TRIES):
            try:
                return await self._call("reset", self._environment.reset, task, seed)
            except EnvironmentFull as error:
                if number == 0:
                    _warn(f"{error}: sessions wait for a place; set {self.entry.key}.limit to what the server has")
                await asyncio.sleep(wait)
                wait = min(2 * wait, _LONGEST_WAIT)
            except EtudeError as error:
                if isinstance(error.__cause__, KeyError) and error.__cause__.args[0] not in task:
                    raise self._without(error.__cause__.args[0], task, error) from error
                raise
        raise InfrastructureError(f"{self.label}: the server was full {_FULL_TRIES} times; set {self.entry.key}.limit")

    def _without(self, key: object, task: Mapping[str, Any], error: EtudeError) -> EtudeError:
        """The error of a `reset` that asks its task for a key which it has not."""
        kind, has = self.entry.kind, f"has only {', '.join(map(repr, task))}" if task else "is empty"
        own = kind.tasks is Environment.tasks and kind.__name__ != "TextEnvironment"
        why = f": {kind.__name__} defines no tasks(self, split)" if own and not task else ""
        write = f"write tasks(self, split) in {kind.__name__}, which lists {{{key!r}: …}}, or " if own else ""
        rows = f"give rows whose extra_info.task has {key!r} (data.train_files)"
        return EtudeError(f"{error.message}; the task {has}{why}", fix=write + rows)

    def _begin(self, returned: Any) -> None:
        first = returned if isinstance(returned, Step) else Step(returned)
        observation = first.observation
        self.observation = (
            observation[:MAX_OBSERVATION_CHARS]
            if isinstance(observation, str)
            else as_messages(observation, self.label)
        )
        known = {**self.tools, **self.entry.tools}
        if first.tools is not None:
            listed = [self.entry.known_tool(each, known) for each in first.tools]
            known = {each.name: each for each in listed}
        self.tools = known
        if first.done or first.reward is not None:
            raise self._wrong("reset must not end the episode, nor reward it")
        self._note(first.metrics)

    def _note(self, metrics: Any) -> None:
        if not isinstance(metrics, Mapping) or not all(isinstance(name, str) for name in metrics):
            raise self._wrong(f"metrics must be numbers by name, not {metrics!r:.60}")
        self.metrics |= plain_numbers(metrics)

    def _take(self, step: Step) -> None:
        try:
            self.done |= as_flag(step.done)
        except TypeError as error:
            raise self._wrong(f"done: {one_line(error)}") from error
        if step.reward is not None:
            as_reward(step.reward, self.label)
            self._rewarded = True
        self._note(step.metrics)

    async def _call(self, method: str, function: Callable[..., Any], *args: Any, acts: bool = False) -> Any:
        name = self._name(method)
        async with self._lock:
            if acts and self.done:  # an earlier call of the turn ended it: the same act must not be rewarded twice
                raise ToolError("The episode is over.")
            if self.entry.kind.times_itself and inspect.iscoroutinefunction(function):
                return await function(*args)
            try:
                return await call_method(self.label, name, self.entry.timeout, self._threads, function, *args)
            except ToolError as error:
                if method in ("__init__", "reset", "score"):  # no turn of the model's is answered
                    raise self._wrong(f"{name} failed: {describe_error(error)}") from error
                raise

    async def _close(self) -> None:
        self._closing = True
        try:
            if (environment := _pop(self._made)) is not None:
                await call_method(self.label, self._name("close"), self.entry.timeout, self._threads, environment.close)
        except (EtudeError, InfrastructureError, ToolError) as error:
            _warn(str(error))
        finally:
            if self._own_thread:
                self._threads.end()
            if self._permit is not None:
                self._permit.release()

    def _count_invalid(self) -> None:
        self.metrics["invalid_actions"] = self.metrics.get("invalid_actions", 0) + 1

    def _name(self, method: str) -> str:
        return self.entry.kind.names.get(method, method)

    def _wrong(self, what: str) -> EtudeError:
        return EtudeError(f"{self.label}: {what}")


def as_messages(observation: Any, label: str) -> list[dict[str, Any]]:
    """Converts an observation to messages: text becomes a user's.

    Raises:
        EtudeError: it is neither text nor messages, or one is the assistant's.
    """
    if isinstance(observation, str):
        return [{"role": "user", "content": observation[:MAX_OBSERVATION_CHARS]}]
    fields = {"role", "content"}
    if isinstance(observation, Sequence) and all(isinstance(m, Mapping) and fields <= m.keys() for m in observation):
        if any(message["role"] == "assistant" for message in observation):
            raise EtudeError(
                f"{label}: an observation has messages of users, tools or the system, not of the assistant"
            )
        return [dict(message) for message in observation]
    raise EtudeError(f"{label} must observe text or messages, not {type(observation).__name__}")


def _pop(made: list[Environment]) -> Environment | None:
    try:
        return made.pop()
    except IndexError:
        return None


@lru_cache(maxsize=64)
def _warn(line: str) -> None:
    """Logs a line once: every trajectory's environment is likely to fail in the same way."""
    logger.warning("%s", line)
