"""`TextEnv`: Gymnasium's interface with text for actions and observations, as an `Environment`."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

from etude.environments.base import Environment, Step
from etude.errors import EtudeError, one_line
from etude.rewards.finite import as_flag


class TextEnv:
    """A Gymnasium-style environment with text observations and actions, one object per trajectory.

        class Guess(TextEnv):
            def reset(self, *, seed=None, options=None): ...     -> (observation, info)
            def step(self, action): ...                          -> (observation, reward, terminated, truncated, info)
            def close(self): ...

    Register the class with `@register_env("name")`, like an `Env`. `options` of `reset` is the row's `extra_info`; `seed` is
    the same for all rollouts of a prompt, and for retries of one. `action` is the model's text. Methods may be async or sync
    (those run in a thread); any class with `reset` and `step` works, also a Gymnasium environment that uses text. `reset` is
    called once, then `step` until the episode ends, and `close`, if there is one, however it ends.
    """

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[str, dict[str, Any]]:
        """Starts an episode; a non-empty observation is appended to the prompt's last user message."""
        return "", {}

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        """Steps with the model's text; returns observation, reward of the turn, terminated, truncated, info."""
        raise NotImplementedError

    def close(self) -> None:
        """Releases the episode's resources."""


def is_gym_shaped(environment: object) -> bool:
    """Whether `environment` is a class (or factory function) with `reset` and `step`."""
    return callable(getattr(environment, "reset", None)) and callable(getattr(environment, "step", None))


class TextEnvironment(Environment):
    """Adapts such an object, made by `make`. It has no tools, so that it reads every turn as the model wrote it."""

    def __init__(self, make: Callable[[], Any]) -> None:
        self._env = make()

    def reset(self, task: Mapping[str, Any], seed: int) -> Any:
        """Returns the first observation; see `TextEnv.reset`."""
        return _then(self._env.reset(seed=seed, options=dict(task)), _first)

    def step(self, text: str) -> Any:
        """Steps with the model's text; see `TextEnv.step`."""
        return _then(self._env.step(text), _step)

    def close(self) -> Any:
        """Closes the object, if it can be closed."""
        closing = getattr(self._env, "close", None)
        return None if closing is None else closing()


def _then(returned: Any, read: Callable[[Any], Step]) -> Any:
    """Reads what a method returned, once it is there."""

    async def awaited() -> Step:
        return read(await returned)

    return awaited() if inspect.isawaitable(returned) else read(returned)


def _first(returned: Any) -> Step:
    if not (isinstance(returned, tuple) and len(returned) == 2 and isinstance(returned[0], str)):
        raise EtudeError(f"reset must return (observation, info), the observation a text: got {returned!r:.200}")
    return Step(returned[0], tools=())


def _step(returned: Any) -> Step:
    try:
        observation, reward, terminated, truncated, info = returned
        if reward is None:
            raise TypeError("returned no reward: return 0.0 for a turn that earns nothing")
        return Step(observation, reward, as_flag(terminated) or as_flag(truncated), metrics=dict(info or {}))
    except (TypeError, ValueError) as error:
        rule = "step must return observation, reward, terminated, truncated, info"
        raise EtudeError(f"{rule}: {one_line(error)}") from error
