"""`SharedEnvironment`: a trajectory's use of RL-Factory's `Env`, as an `Environment`; `load_environment`: the environment
that `actor_rollout_ref.env` selects.

Invariant: tools run in the trajectory's `ToolSession`; an observation is appended as messages through the chat template,
never as rendered text. The environment's final score is the trajectory's, unless a reward manager gives one.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import asdict
from functools import partial
from typing import Any

from etude.agents.environments.env import ENVIRONMENTS, Env
from etude.agents.environments.tool_manager import RenderedPrompt, ToolManager, Turn, bind_turns
from etude.environments import Environment, EnvironmentEntry, Environments, Step
from etude.environments.loader import registered_entry
from etude.environments.session import call_method
from etude.errors import ConfigError, EtudeError, one_line
from etude.options import EnvOptions
from etude.rewards.finite import as_flag, as_reward
from etude.rewards.scoring import to_row
from etude.timeouts import BlockingCalls, called, set_outcome
from etude.tools import BaseTool
from etude.trajectory import Provenance, Trajectory

_threads = BlockingCalls("etude-env", limit=64)


Steps = Callable[[Sequence[Any]], Awaitable[Sequence[Any]]]


class LockStep:
    """A barrier for the trajectories of one event loop at a time: as in RL-Factory's `generate_sequences_loop`, all
    generate, the environment steps once with all responses, and all generate again. `rollout.mode=sync` selects this.

    Invariant: a batch is stepped once every trajectory that has joined and not left has submitted its turn; each gets its
    own entry of the result, or the exception that the step raised.
    """

    def __init__(self) -> None:
        self._members = 0
        self._waiting: list[tuple[Any, asyncio.Future[Any]]] = []
        self._steps: Steps | None = None
        self._running: set[asyncio.Task[None]] = set()

    def join(self) -> None:
        """Adds a trajectory; from now on, a step waits for its turn."""
        self._members += 1

    def leave(self) -> None:
        """Removes a trajectory; steps the others if they were only waiting for it."""
        self._members -= 1
        self._go_if_complete()

    async def step(self, turn: Any, steps: Steps) -> Any:
        """Submits a turn and waits for its entry of `await steps(all turns)`."""
        entry = (turn, asyncio.get_running_loop().create_future())
        self._waiting.append(entry)
        self._steps = steps
        self._go_if_complete()
        try:
            return await entry[1]
        finally:
            if entry in self._waiting:  # cancelled before the batch was complete
                self._waiting.remove(entry)

    def _go_if_complete(self) -> None:
        if self._steps is not None and self._waiting and len(self._waiting) >= self._members:
            batch, self._waiting = self._waiting, []
            task = asyncio.ensure_future(self._run(batch, self._steps))
            self._running.add(task)
            task.add_done_callback(self._running.discard)

    async def _run(self, batch: list[tuple[Any, asyncio.Future[Any]]], steps: Steps) -> None:
        try:
            results = await called(steps, [turn for turn, _ in batch])
        except Exception as error:
            results = [error] * len(batch)
        for (_, future), result in zip(batch, results):
            set_outcome(future, result)


class SharedEnvironment(Environment):
    """One trajectory's use of a shared `Env`; with `lockstep`, all trajectories in flight step in one batch."""

    reads_calls = True
    times_itself = True  # tools have limits of their own, and a lock-step waits for other trajectories
    must_reward = False

    def __init__(self, name: str, env: Env, timeout: float, lockstep: LockStep | None = None) -> None:
        self._label, self._env, self._timeout, self._lockstep = f"environment '{name}'", env, timeout, lockstep
        self._joined = False

    async def reset(self, task: Mapping[str, Any], seed: int) -> str:
        """Joins the lock-step, if any; a retried trajectory steps alone, so that it cannot make the others fail again."""
        if self._lockstep is not None and not self.row.get("attempt"):
            self._lockstep.join()
            self._joined = True
        return ""

    async def step(self, text: str) -> Step:
        """Steps the `Env` with the turn's text, alone or in lock-step with all trajectories."""
        trajectory, outcomes = self.conversation.trajectory, list[Any]()
        turn = Turn(self.conversation.session, trajectory.assistant_turns - 1, asyncio.get_running_loop(), outcomes)
        if self._joined and self._lockstep is not None:
            found = await self._lockstep.step((text, turn), self._steps)
        else:
            found = (await self._steps([(text, turn)]))[0]
        if isinstance(found, BaseException):
            raise found
        observation, over = found
        for outcome in outcomes:
            trajectory.tool_calls.append(outcome.to_record())
            if outcome.error is None:
                trajectory.add_step_reward(outcome.requested.name, outcome.reward, outcome.turn)
        if isinstance(observation, RenderedPrompt):
            observation = observation.messages
        return Step("" if over else observation, await self._step_reward(text), over)

    async def _step_reward(self, text: str) -> Any:
        if not self._env.use_process_reward:
            return None
        rewards = await self._call("get_step_reward", self._env.get_step_reward, [text])
        try:
            reward = rewards[0]
        except (TypeError, LookupError) as error:
            raise self._wrong("get_step_reward must return one reward a response", error) from error
        return None if isinstance(reward, float) and math.isnan(reward) else reward  # in RL-Factory: this turn has none

    async def _steps(self, asked: Sequence[tuple[str, Turn]]) -> list[tuple[Any, bool] | BaseException]:
        """Returns (observation, over), or an exception, for each trajectory's turn.

        A user's own `step` or `execute_actions` gets all turns as one batch, in a thread; an exception fails them all.
        """
        manager = type(self._env.tool_manager)
        if type(self._env).step is not Env.step or manager.execute_actions is not ToolManager.execute_actions:
            return [*await self._batch(asked, partial(self._call, "step", self._env.step))]
        each = (self._batch([turn], self._env.astep) for turn in asked)
        results = await asyncio.gather(*each, return_exceptions=True)
        return [entry if isinstance(entry, BaseException) else entry[0] for entry in results]

    async def _batch(self, asked: Sequence[tuple[str, Turn]], step: Any) -> list[tuple[Any, bool]]:
        texts, turns = [text for text, _ in asked], [turn for _, turn in asked]
        with bind_turns(turns):
            returned = await step(texts, self.conversation.context.tokenizer)
        try:
            observations, dones, _, _ = returned
            return [
                (observation, as_flag(done)) for _, observation, done in zip(texts, observations, dones, strict=True)
            ]
        except (TypeError, ValueError) as error:
            rule = "step must return next_obs, dones, valid_action, is_tool, each with one entry a response"
            raise self._wrong(rule, error) from error

    async def score(self) -> float | None:
        """Returns the `Env`'s final score; None if it defines none."""
        if not self._env.scores:
            return None
        score: float = await self._call("compute_score", self._compute_score)
        return score

    def _compute_score(self) -> float:
        """Raises EtudeError if `compute_score` did not return a list of scores per row."""
        env, row, trajectory = self._env, dict(self.row), self.conversation.trajectory
        tokenizer, judge = self.conversation.context.tokenizer, self.conversation.context.reward_model
        if env.use_verify_tool:
            row["reward_model"] = _with_verification(env, trajectory, row, tokenizer)
        sampled = (each.token_ids for each in trajectory.segments if each.provenance is Provenance.SAMPLED)
        said = "\n".join(tokenizer.decode(ids, skip_special_tokens=True) for ids in sampled)
        asked = {"data_source": None, "reward_model": None, "extra_info": None}
        turn_scores: dict[int, float] = {}
        for turn, _, value in trajectory.rewards.steps:
            turn_scores[turn] = turn_scores.get(turn, 0.0) + value
        scored = {"solution_str": said, "tool_use_scores": [turn_scores[turn] for turn in sorted(turn_scores)]}
        data = to_row(trajectory, asked | row | scored)
        scores = env.compute_score(judge, judge and judge.tokenizer, tokenizer, data, bool(row.get("validate")), False)
        try:
            if scores[0][-1] is None:
                raise TypeError("None is no score")
            return as_reward(scores[0][-1], f"{type(env).__name__}.compute_score")
        except (TypeError, IndexError, KeyError) as error:
            raise EtudeError(f"{type(env).__name__}.compute_score must return a list of scores for each row") from error

    async def close(self) -> None:
        """Leaves the lock-step."""
        if self._joined and self._lockstep is not None:
            self._lockstep.leave()

    async def _call(self, method: str, function: Any, *args: Any) -> Any:
        return await call_method(self._label, method, self._timeout, _threads, function, *args)

    def _wrong(self, rule: str, error: Exception) -> EtudeError:
        return EtudeError(f"{self._label}: {rule}: {one_line(error)}")


def _with_verification(env: Env, trajectory: Trajectory, row: Mapping[str, Any], tokenizer: Any) -> dict[str, Any]:
    reward_model = dict(row.get("reward_model") or {})
    truth = reward_model.get("ground_truth")
    solution = tokenizer.decode(trajectory.response_ids)
    verdict = env.verify_tool(str(row.get("data_source")), solution, truth, row.get("extra_info"))
    known = dict(truth) if isinstance(truth, Mapping) else {"target": truth}
    return reward_model | {"ground_truth": known | {"verified_results": verdict}}


def load_environment(options: EnvOptions, tools: Mapping[str, BaseTool], *, lockstep: bool) -> Environments | None:
    """Loads the environment that `options` select, with the run's configured `tools`; None if they select none.

    Raises:
        ConfigError: no environment has that name, or it cannot be created.
    """
    if not options.chosen:
        return None
    name, key = options.name or "base", "actor_rollout_ref.env"
    registered = ENVIRONMENTS.get(name)
    if not (isinstance(registered, type) and issubclass(registered, Env)):
        return Environments.of([registered_entry(name, {}, timeout=options.timeout, key=key)])
    try:
        env = registered({**asdict(options), "_tools": tools})
    except ConfigError:
        raise
    except Exception as error:  # a user's constructor may raise anything
        raise ConfigError(f"environment '{name}': {type(error).__name__}: {one_line(error)}") from error
    make = partial(SharedEnvironment, name, env, options.timeout, LockStep() if lockstep else None)
    entry = EnvironmentEntry(name, make, SharedEnvironment, timeout=options.timeout, key=key)
    return Environments({name: entry}, env.tool_manager.all_tools)
