"""`env_agent`: the agent loop for environments: generates a turn, steps the environment with it, and repeats until done.

It is the default for rows without an `agent_name` if `actor_rollout_ref.env` configures an environment. It drives an `Env`
(RL-Factory's interface) or a `TextEnv` (Gymnasium's); tools run in the trajectory's `ToolSession`.

Invariant: as in `tool_agent`, the context is the prompt followed by the segments, token for token; an observation is
appended as messages through the chat template, never as rendered text. Every assistant turn is sampled. A step reward goes
to the last token of its turn; the environment's final score is the trajectory's, unless a reward manager gives one.
"""

from __future__ import annotations

import asyncio
import inspect
import logging
import math
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import asdict, dataclass, field
from functools import cache, lru_cache
from typing import Any

import torch

from etude.agents.base import register
from etude.agents.conversation import AgentState, Conversation, add_time, append_to_last_user, end, record
from etude.agents.environments.env import ENVIRONMENTS, Env, is_gym_shaped
from etude.agents.environments.lockstep import LockStep
from etude.agents.environments.tool_manager import RenderedPrompt, ToolManager, Turn, bind_turns
from etude.agents.tool_agent import ToolAgentLoop
from etude.errors import ConfigError, EtudeError, InfrastructureError, describe_error, is_infrastructure, one_line
from etude.options import EnvOptions
from etude.protocol import DataProto
from etude.rewards.number import as_flag, as_reward
from etude.timeouts import BlockingCalls, uninterrupted, within
from etude.tools import BaseTool
from etude.trajectory import Provenance, StopReason, Trajectory

SOURCE = "env"  # source of the step rewards

logger = logging.getLogger(__name__)
_threads = BlockingCalls("etude-env", limit=64)


@dataclass(frozen=True)
class Environment:
    """The environment of a run: an `Env`, or a factory that makes a `TextEnv` per trajectory.

    `timeout`: seconds per method call; `lockstep`: batches the steps of all trajectories in flight.
    """

    name: str
    target: Env | Callable[[], Any]
    timeout: float = 60.0
    lockstep: LockStep | None = None

    @property
    def tools(self) -> Mapping[str, BaseTool]:
        """The tools of an `Env`'s manager, including those that it created itself; empty for a `TextEnv`."""
        return self.target.tool_manager.all_tools if isinstance(self.target, Env) else {}

    async def call(self, method: str, function: Any, *args: Any, limited: bool = True, **kwargs: Any) -> Any:
        """Calls a user's method within `timeout`, in a thread unless it is async; `limited=False` lifts an async method's
        timeout.

        Raises:
            InfrastructureError: it failed because of infrastructure, or timed out.
            EtudeError: it raised anything else.
        """
        try:
            if not inspect.iscoroutinefunction(function):
                return await within(self.timeout, _threads.run, function, *args, **kwargs)
            return await (within(self.timeout, function, *args, **kwargs) if limited else function(*args, **kwargs))
        except Exception as error:
            line = f"environment '{self.name}': {method} failed: {describe_error(error)}"
            if is_infrastructure(error):
                raise InfrastructureError(line) from error
            if isinstance(error, EtudeError):
                raise
            raise EtudeError(line) from error

    def wrong(self, rule: str, what: str) -> EtudeError:
        """Makes the error for a method that violates `rule`."""
        return EtudeError(f"environment '{self.name}': {rule}: {what}")


@dataclass(frozen=True)
class Observation:
    """Result of an environment step: the messages for the model, whether the episode is over, and the turn's reward, if
    any."""

    messages: list[dict[str, Any]]
    over: bool
    reward: Any = None
    metrics: Mapping[str, Any] = field(default_factory=dict)


@register("env_agent")
class EnvAgentLoop(ToolAgentLoop):
    """The agent loop for environments; see the module's docstring."""

    _not_called = ToolAgentLoop._not_called | {"_call_tool"}  # its environment runs the tools

    @asynccontextmanager
    async def surroundings(self, data: Conversation, row: dict[str, Any]) -> AsyncIterator[None]:
        """Opens the trajectory's environment, which scores the trajectory at the end.

        Raises:
            EtudeError: no environment is configured, or it raised an error that is not infrastructure.
        """
        environment = self.context.environment
        if environment is None:
            raise EtudeError("the agent loop 'env_agent' needs actor_rollout_ref.env.name")
        env = environment.target
        self._stage = EnvStage(self, environment, env) if isinstance(env, Env) else TextStage(self, environment)
        try:
            if greeting := await self._stage.begin(data, row):
                append_to_last_user(data.trajectory.messages, self.chat.disarm(greeting))
            yield
            if data.trajectory.stop_reason is not StopReason.PROMPT_TOO_LONG:
                data.trajectory.rewards.score = await self._stage.score(data, row)
        finally:
            await uninterrupted(self._stage.close())

    async def _handle_generating_state(
        self, data: Conversation, sampling_params: Mapping[str, Any], ignore_termination: bool = False
    ) -> AgentState:
        self.set_sampling(data, sampling_params, ignore_termination)
        await self.sample(data)
        if (reason := self.used_up(data)) is not None:
            return end(data, reason)
        return AgentState.PROCESSING_TOOLS

    async def _handle_processing_tools_state(self, data: Conversation) -> AgentState:
        trajectory = data.trajectory
        started = time.perf_counter()
        observed = await self._stage.step(data, trajectory.messages[-1]["content"])
        add_time(trajectory, "tool_calls", started)
        if observed.reward is not None:
            trajectory.add_step_reward(SOURCE, as_reward(observed.reward, "the environment"))
        if observed.over:
            return end(data, StopReason.COMPLETED)
        return self.feed_back(data, observed.messages)

    def as_messages(self, observation: Any) -> list[dict[str, Any]]:
        """Converts an observation to messages. Control tokens that it spells out become plain characters (`context_ids`).

        Raises:
            EtudeError: it is neither text nor messages.
        """
        if isinstance(observation, RenderedPrompt):
            return observation.messages
        if isinstance(observation, str):
            if self.chat.disarm(observation) != observation:
                _warn_of_control_tokens()
            return [{"role": "user", "content": observation}]
        if isinstance(observation, Sequence) and all(isinstance(m, Mapping) and "role" in m for m in observation):
            if any(message["role"] == "assistant" for message in observation):
                raise EtudeError(
                    "an environment must observe messages of users, tools or the system, not of the assistant"
                )
            return [dict(message) for message in observation]
        raise EtudeError(f"an environment must observe text or messages, not {type(observation).__name__}")


class EnvStage:
    """One trajectory's use of a shared `Env`."""

    def __init__(self, loop: EnvAgentLoop, environment: Environment, env: Env) -> None:
        self._loop, self._environment, self._env = loop, environment, env
        self._joined = False

    async def begin(self, data: Conversation, row: dict[str, Any]) -> str:
        """Joins the lockstep, if any; a retried trajectory steps alone, so that it cannot make the others fail again."""
        if self._environment.lockstep is not None and not row.get("attempt"):
            self._environment.lockstep.join()
            self._joined = True
        return ""

    async def step(self, data: Conversation, text: str) -> Observation:
        """Steps the environment with the turn's text, alone or in lockstep with all trajectories."""
        outcomes: list[Any] = []
        turn = Turn(data.session, data.trajectory.assistant_turns - 1, self._loop.loop, outcomes)
        if self._joined and self._environment.lockstep is not None:
            found = await self._environment.lockstep.step((text, turn), self._steps)
        else:
            found = (await self._steps([(text, turn)]))[0]
        if isinstance(found, BaseException):
            raise found
        observation, over = found
        for outcome in outcomes:
            record(data.trajectory, outcome, outcome.response.text or "")
        reward = None
        if self._env.use_process_reward:
            rewards = await self._environment.call("get_step_reward", self._env.get_step_reward, [text])
            try:
                reward = rewards[0]
            except (TypeError, LookupError) as error:
                raise self._environment.wrong(
                    "get_step_reward must return one reward a response", one_line(error)
                ) from error
            if isinstance(reward, float) and math.isnan(reward):  # in RL-Factory: this turn has none
                reward = None
        return Observation([] if over else self._loop.as_messages(observation), over, reward)

    async def _steps(self, asked: Sequence[tuple[str, Turn]]) -> list[tuple[Any, bool] | BaseException]:
        """Returns (observation, over), or an exception, for each trajectory's turn.

        An overridden `step` gets all turns as one batch, and an exception in it fails them all.
        """
        if _overrides_step(self._env):
            return [*await self._batch(asked, self._env.step, limited=True)]
        each = (self._batch([turn], self._env.astep, limited=False) for turn in asked)
        results = await asyncio.gather(*each, return_exceptions=True)
        return [entry if isinstance(entry, BaseException) else entry[0] for entry in results]

    async def _batch(self, asked: Sequence[tuple[str, Turn]], step: Any, *, limited: bool) -> list[tuple[Any, bool]]:
        texts, turns = [text for text, _ in asked], [turn for _, turn in asked]
        with bind_turns(turns):
            returned = await self._environment.call("step", step, texts, self._loop.tokenizer, limited=limited)
        try:
            observations, dones, _, _ = returned
            return [
                (observation, as_flag(done)) for _, observation, done in zip(texts, observations, dones, strict=True)
            ]
        except (TypeError, ValueError) as error:
            raise self._environment.wrong(
                "step must return next_obs, dones, valid_action, is_tool, each with one entry a response",
                one_line(error),
            ) from error

    async def score(self, data: Conversation, row: dict[str, Any]) -> float | None:
        """Returns the environment's final score; None if it defines none."""
        if not self._env.scores:
            return None
        context = self._loop.context
        return await self._environment.call(
            "compute_score", environment_score, self._env, data.trajectory, row, context.tokenizer, context.reward_model
        )

    async def close(self) -> None:
        """Leaves the lockstep."""
        if self._joined and self._environment.lockstep is not None:
            self._environment.lockstep.leave()


class TextStage:
    """One trajectory's own `TextEnv`."""

    def __init__(self, loop: EnvAgentLoop, environment: Environment) -> None:
        self._loop, self._environment = loop, environment
        self._env: Any = None

    async def begin(self, data: Conversation, row: dict[str, Any]) -> str:
        """Creates the environment and resets it; returns its first observation."""
        data.tool_schemas = []
        make: Any = self._environment.target
        self._env = await self._environment.call("__init__", make)
        options = dict(row.get("extra_info") or {})
        returned = await self._environment.call("reset", self._env.reset, seed=row.get("group_seed"), options=options)
        if not (isinstance(returned, tuple) and len(returned) == 2 and isinstance(returned[0], str)):
            raise self._environment.wrong(
                "reset must return (observation, info), the observation a text",
                f"got {returned!r:.200}",
            )
        return str(returned[0])

    async def step(self, data: Conversation, text: str) -> Observation:
        """Steps the environment with the turn's text."""
        returned = await self._environment.call("step", self._env.step, text)
        try:
            observation, reward, terminated, truncated, info = returned
            over, metrics = as_flag(terminated) or as_flag(truncated), dict(info or {})
            if reward is None:
                raise TypeError("returned no reward: return 0.0 for a turn that earns nothing")
        except (TypeError, ValueError) as error:
            raise self._environment.wrong(
                "step must return observation, reward, terminated, truncated, info", one_line(error)
            ) from error
        return Observation([] if over else self._loop.as_messages(observation), over, reward, metrics)

    async def score(self, data: Conversation, row: dict[str, Any]) -> float | None:
        """Returns None: a text environment has only step rewards."""
        return None

    async def close(self) -> None:
        """Closes the environment, if it was created; a failure is only logged."""
        closing = getattr(self._env, "close", None)
        if closing is not None:
            try:
                await self._environment.call("close", closing)
            except (EtudeError, InfrastructureError) as error:
                _warn_of_close(str(error))


@lru_cache(maxsize=64)
def _warn_of_close(line: str) -> None:
    """Logs a failure once: every trajectory's environment is likely to fail in the same way."""
    logger.warning("%s", line)


@cache
def _warn_of_control_tokens() -> None:
    logger.warning(
        "an environment observed text that spells out control tokens, which the model sees as plain characters: if it is a "
        "rendered prompt, return messages, or what tool_manager.get_prompt returned"
    )


def _overrides_step(env: Env) -> bool:
    """Whether the user's class overrides `step` or `execute_actions`; steps then run in a thread, as one batch."""
    manager = type(env.tool_manager)
    return type(env).step is not Env.step or manager.execute_actions is not ToolManager.execute_actions


def environment_score(
    env: Env, trajectory: Trajectory, row: Mapping[str, Any], tokenizer: Any, judge: Any = None
) -> float:
    """Returns the last score that `env.compute_score` gives the trajectory; `judge` is passed on, with its tokenizer.

    Raises:
        EtudeError: `compute_score` did not return a list of scores per row.
    """
    row = dict(row)
    if env.use_verify_tool:
        row["reward_model"] = _with_verification(env, trajectory, row, tokenizer)
    sampled = (each.token_ids for each in trajectory.segments if each.provenance is Provenance.SAMPLED)
    said = "\n".join(tokenizer.decode(ids, skip_special_tokens=True) for ids in sampled)
    asked = {"data_source": None, "reward_model": None, "extra_info": None}
    data = _one_row(trajectory, asked | row | {"solution_str": said})
    read = judge and judge.tokenizer
    scores = env.compute_score(judge, read, tokenizer, data, bool(row.get("validate")), False)
    try:
        if scores[0][-1] is None:
            raise TypeError("None is no score")
        return as_reward(scores[0][-1], f"{type(env).__name__}.compute_score")
    except (TypeError, IndexError, KeyError) as error:
        raise EtudeError(f"{type(env).__name__}.compute_score must return a list of scores for each row") from error


def _with_verification(env: Env, trajectory: Trajectory, row: Mapping[str, Any], tokenizer: Any) -> dict[str, Any]:
    reward_model = dict(row.get("reward_model") or {})
    truth = reward_model.get("ground_truth")
    solution = tokenizer.decode(trajectory.response_ids)
    verdict = env.verify_tool(str(row.get("data_source")), solution, truth, row.get("extra_info"))
    known = dict(truth) if isinstance(truth, Mapping) else {"target": truth}
    return reward_model | {"ground_truth": known | {"verified_results": verdict}}


def _one_row(trajectory: Trajectory, row: Mapping[str, Any]) -> DataProto:
    prompts, responses = torch.tensor([trajectory.prompt_ids]), torch.tensor([trajectory.response_ids])
    columns: dict[str, Any] = {
        "prompts": prompts,
        "responses": responses,
        "response_mask": torch.tensor([trajectory.response_mask]),
        "attention_mask": torch.ones(1, prompts.shape[1] + responses.shape[1], dtype=torch.long),
    }
    scores: dict[int, float] = {}
    for turn, _, value in trajectory.rewards.steps:
        scores[turn] = scores.get(turn, 0.0) + value
    for name, value in {**row, "tool_use_scores": [scores[turn] for turn in sorted(scores)]}.items():
        columns[name] = [value]
    return DataProto.from_single_dict(columns)


def load_environment(options: EnvOptions, tools: Mapping[str, BaseTool], *, lockstep: bool) -> Environment | None:
    """Creates the environment that `options` select, with the run's configured `tools`; None if they select none.

    Raises:
        ConfigError: no environment has that name, or it cannot be created.
    """
    if not options.chosen:
        return None
    name = options.name or "base"
    registered = ENVIRONMENTS.get(name)
    if isinstance(registered, type) and issubclass(registered, Env):
        try:
            env = registered({**asdict(options), "_tools": tools})
        except ConfigError:
            raise
        except Exception as error:  # a user's constructor may raise anything
            raise ConfigError(f"environment '{name}': {type(error).__name__}: {one_line(error)}") from error
        return Environment(name, env, options.timeout, LockStep() if lockstep else None)
    if not is_gym_shaped(registered):
        raise ConfigError(f"environment '{name}' is neither an Env nor a class with the methods reset and step")
    return Environment(name, registered, options.timeout)
