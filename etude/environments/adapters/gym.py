"""`gym:ID`: a Gymnasium environment whose spaces can be said in words, such as toy text and small vectors.

Arguments: `actions` (names of a discrete action space, in order), `invalid_reward` (of a turn that names no action, and of a
game that a token limit ends),
`random_map` (FrozenLake: the size of a map that the seed draws), and those of `gymnasium.make`. What the model sees is the
`ansi` rendering, if there is one, else the observation.
"""

from __future__ import annotations

import contextlib
import logging
import math
import re
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np

from etude.environments.arguments import check_types
from etude.environments.base import Environment, InvalidAction, Step
from etude.errors import ConfigError, one_line
from etude.registry import unknown_name

ACTIONS = {
    "FrozenLake": ("left", "down", "right", "up"),
    "CliffWalking": ("up", "right", "down", "left"),
    "Taxi": ("south", "north", "east", "west", "pickup", "dropoff"),
    "Blackjack": ("stick", "hit"),
    "CartPole": ("left", "right"),
    "MountainCar": ("left", "none", "right"),
    "Acrobot": ("left", "none", "right"),
}
PARTS = {
    "Blackjack": ("your sum", "dealer shows", "usable ace"),
    "CartPole": ("position", "velocity", "angle", "angular velocity"),
    "MountainCar": ("position", "velocity"),
}
_LARGEST = 64  # numbers of an observation or action that are said in words
_EPISODES, _STEPS = 8, 50  # of random actions, for a step that costs

logger = logging.getLogger(__name__)


class Game(Environment):
    """One episode; its rewards are those of its steps, and 0 without any. It is a success if it ended with Gymnasium's
    `reward_threshold`; where there is none, by the run's rule: in total 1 or more."""

    def __init__(
        self,
        id: str,
        actions: Sequence[str],
        random_map: int | None,
        invalid_reward: float | None,
        args: Mapping[str, Any],
    ) -> None:
        self._id, self._names, self._random_map, self._args = id, [*actions], random_map, dict(args)
        self._invalid_reward = self.cut_reward = invalid_reward  # else writing until it is cut is better than losing
        self._steps, self._total, self._ended = 0, 0.0, False
        self._env: Any = None

    def reset(self, task: Mapping[str, Any], seed: int) -> str:
        """Makes the episode that the seed decides, and says what may be done in it."""
        args = dict(self._args)
        if self._random_map is not None:
            from gymnasium.envs.toy_text.frozen_lake import generate_random_map

            args["desc"] = generate_random_map(size=self._random_map, seed=seed)
        self._env = _make(self._id, args)
        observation, _ = self._env.reset(seed=seed)
        return f"{self._id}. Each turn, write one action: {self._choices()}.\n{self._say(observation)}"

    def step(self, text: str) -> Step:
        """Acts with the last action that the text names.

        Raises:
            InvalidAction: it names none.
        """
        action = self._read(text.rpartition("</think>")[2])
        observation, reward, terminated, truncated, _ = self._env.step(action)
        self._steps, self._total, self._ended = self._steps + 1, self._total + float(reward), terminated or truncated
        return Step(self._say(observation), float(reward), bool(self._ended))

    def score(self) -> dict[str, float]:
        """Returns `acc` where the game has a `reward_threshold`, and a score of 0.0 for an episode without a step; otherwise
        its steps' rewards are all."""
        enough = self._env.spec.reward_threshold
        found = {} if enough is None else {"acc": float(self._ended and self._total >= enough)}
        return found if self._steps else {"score": 0.0, **found}

    def close(self) -> None:
        if self._env is not None:
            self._env.close()

    def _choices(self) -> str:
        return ", ".join(self._names) if self._names else f"{_size(self._env.action_space)} numbers, as in [0.5]"

    def _say(self, observation: Any) -> str:
        if self._env.render_mode == "ansi":
            return re.sub(r"\x1b\[[\d;]*m(\S)\x1b\[0m", r"[\1]", str(self._env.render())).strip()
        values = [f"{each:g}" for each in _numbers(observation)]
        parts = PARTS.get(self._id.partition("-")[0], ())
        return ", ".join(f"{p}: {v}" for p, v in zip(parts, values)) if len(parts) == len(values) else ", ".join(values)

    def _read(self, text: str) -> Any:
        if self._names:
            found = re.findall(rf"(?<!\w)({'|'.join(map(re.escape, self._names))})(?!\w)", text.lower())
            if not found:
                raise InvalidAction(f"Write one of: {', '.join(self._names)}.", self._invalid_reward)
            return self._env.action_space.start + self._names.index(found[-1])
        numbers = [
            float(each) for each in re.findall(r"-?(?:\d+(?:\.\d+)?|\.\d+)(?:[eE][-+]?\d+)?", text.replace("−", "-"))
        ]
        space = self._env.action_space
        try:
            action = np.asarray(numbers, dtype=space.dtype).reshape(space.shape)
            is_valid = all(map(math.isfinite, action.flat)) and space.contains(action)
        except (OverflowError, ValueError):  # a number too large for the space's type; too many or too few
            is_valid = False
        if not is_valid:
            raise InvalidAction(f"Write {_size(space)} numbers within their bounds.", self._invalid_reward)
        return action


def _make(id: str, args: Mapping[str, Any]) -> Any:
    import gymnasium

    made = gymnasium.make(id, **args)
    if "ansi" not in made.metadata.get("render_modes", ()) or "render_mode" in args:
        return made
    made.close()
    return gymnasium.make(id, **{"render_mode": "ansi", **args})


def _can_cost(env: Any) -> bool:
    """Whether a step of a few episodes of random actions has a reward below 0."""
    with contextlib.suppress(Exception):  # it may raise anything, as of an action that is not allowed now
        env.action_space.seed(0)
        for seed in range(_EPISODES):
            env.reset(seed=seed)
            for _ in range(_STEPS):
                _, reward, terminated, truncated, _ = env.step(env.action_space.sample())
                if reward < 0:
                    return True
                if terminated or truncated:
                    break
    return False


def _size(space: Any) -> int:
    """How many numbers a value of `space` has; more than can be said if it has others."""
    import gymnasium

    if isinstance(space, gymnasium.spaces.Discrete):
        return 1
    if isinstance(space, gymnasium.spaces.Tuple):
        return sum(map(_size, space.spaces))
    if isinstance(space, gymnasium.spaces.Dict):
        return sum(map(_size, space.spaces.values()))
    if isinstance(space, gymnasium.spaces.Box | gymnasium.spaces.MultiDiscrete):
        return math.prod(space.shape)
    return _LARGEST + 1


def _numbers(value: Any) -> list[float]:
    if isinstance(value, Mapping):
        value = [*value.values()]
    if isinstance(value, list | tuple) or (hasattr(value, "shape") and value.shape):
        return [number for each in value for number in _numbers(each)]
    return [float(value)]


def names() -> list[str]:
    """The environments that are registered."""
    import gymnasium

    return sorted(gymnasium.registry)


def open_environment(
    name: str,
    *,
    actions: Sequence[str] = (),
    random_map: int | None = None,
    invalid_reward: float | None = None,
    **args: Any,
) -> partial[Game]:
    """Raises ConfigError if there is no such environment, it does not take these arguments, or its spaces cannot be said in
    words."""
    import gymnasium
    from gymnasium.envs.registration import load_env_creator

    if name not in gymnasium.registry and ":" not in name:
        raise unknown_name(ConfigError, f"gymnasium has no environment '{name}'", name, names())
    try:
        check_types(load_env_creator(str(gymnasium.spec(name).entry_point)), args, f"gym:{name}")
        tried = _make(name, args)
    except ConfigError:
        raise
    except Exception as error:  # a package may raise anything
        raise ConfigError(f"gym:{name}: {one_line(error)}") from error
    space, shown = tried.action_space, tried.render_mode == "ansi" or _size(tried.observation_space) <= _LARGEST
    if isinstance(space, gymnasium.spaces.Discrete):
        known = ACTIONS.get(name.partition("-")[0], ())
        actions = [*actions] or [*known] or [str(space.start + number) for number in range(space.n)]
        if len(actions) != space.n:
            raise ConfigError(f"gym:{name}: args.actions must name its {space.n} actions")
    elif isinstance(space, gymnasium.spaces.Box | gymnasium.spaces.MultiDiscrete) and _size(space) <= _LARGEST:
        actions = ()
    else:
        shown = False
    if not shown:
        raise ConfigError(
            f"gym:{name}: its spaces cannot be said in words: {space}, {tried.observation_space}",
            fix="write an Environment around it",
        )
    if (invalid_reward is None or invalid_reward >= 0) and _can_cost(tried):
        logger.warning(
            "gym:%s: steps can cost, and turns that name no action cost nothing: a model may earn most by never acting; set "
            "args.invalid_reward to less than 0, and to less than a game is worth that is played well",
            name,
        )
    tried.close()
    return partial(Game, name, [each.lower() for each in actions], random_map, invalid_reward, args)
