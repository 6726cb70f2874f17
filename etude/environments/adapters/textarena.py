"""`textarena:ID`: a TextArena game; of several players, the model is the first.

Arguments: `opponent` (`path/to/file.py:function` or `package.function`: from what a player sees to the action; needed by
games of two; `etude.agents.roles` has a policy play itself), `all_or_nothing` (only a game's full reward pays, 1; else what
comes near it may be easier to earn than it), and those of `textarena.make`. The model sees the game's messages as they
come, without the wrappers, which would repeat the history each turn.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from functools import partial
from importlib import import_module
from typing import Any

from etude.environments.arguments import check_types
from etude.environments.base import Environment, Step
from etude.environments.randomness import GlobalRandom
from etude.errors import ConfigError, one_line
from etude.registry import import_object, unknown_name

_TURNS_OF_OTHERS = 100  # in a row


class Game(Environment):
    """One game. Games draw from the global generators: each session has its own state of these."""

    def __init__(
        self, name: str, players: int, opponent: Callable[[str], str] | None, whole: bool, args: Mapping[str, Any]
    ) -> None:
        self._name, self._players, self._opponent = name, players, opponent
        self._whole, self._args = whole, dict(args)
        self.cut_reward = -1.0 if players > 1 else None  # that of a defeat: else writing until it is cut is better

    def reset(self, task: Mapping[str, Any], seed: int) -> str:
        """Begins the game that the seed decides."""
        import textarena

        self._random = GlobalRandom(seed)
        with self._random:
            self._game = textarena.make(self._name, **self._args)
            self._game.reset(num_players=self._players, seed=seed)
            return self._play_others()

    def step(self, text: str) -> Step:
        """Plays the text; the other players follow."""
        with self._random:
            done, _ = self._game.step(text.rpartition("</think>")[2].strip())
            shown = "" if done else self._play_others()
        return Step(shown, done=self._game.state.done)

    def score(self) -> dict[str, float]:
        """Returns the game's reward of the model; 0 if a limit cut the game (see `cut_reward`)."""
        earned = float((self._game.state.rewards or {}).get(0, 0.0))
        reason = (self._game.state.game_info.get(0) or {}).get("invalid_move")
        return {"score": float(earned >= 1) if self._whole else earned, "lost_by_invalid_move": float(bool(reason))}

    def _play_others(self) -> str:
        """Lets the others play until it is the model's turn; returns what the model sees then."""
        for _ in range(_TURNS_OF_OTHERS):
            player, messages = self._game.get_observation()
            shown = "\n".join(text for sender, text, _ in messages if sender != player).strip()
            if player == 0 or self._game.state.done or self._opponent is None:
                return shown
            done, _ = self._game.step(self._opponent(shown))
            if done:
                return ""
        raise RuntimeError(f"the other players had {_TURNS_OF_OTHERS} turns in a row")


def names() -> list[str]:
    """The games, without their variants for other wrappers."""
    from textarena.envs.registration import ENV_REGISTRY

    return sorted(name for name in ENV_REGISTRY if not name.endswith(("-raw", "-train")))


def open_environment(
    name: str, *, opponent: str | None = None, players: int | None = None, all_or_nothing: bool = False, **args: Any
) -> partial[Game]:
    """Raises ConfigError if there is no such game, it needs data, a key or an opponent, or does not take these arguments."""
    from textarena.envs.registration import ENV_REGISTRY

    if name not in names():
        raise unknown_name(ConfigError, f"textarena has no game '{name}'", name, names())
    count = players or (1 if opponent is None else 2)
    module, _, kind = str(ENV_REGISTRY[name].entry_point).partition(":")
    check_types(getattr(import_module(module), kind), args, f"textarena:{name}")
    rival = None if opponent is None else import_object(opponent)
    make = partial(Game, f"{name}-raw", count, rival, all_or_nothing, args)
    try:
        make().reset({}, 0)
    except Exception as error:  # a game may raise anything
        # NLTK's way to say that data is missing, in twenty lines of a LookupError
        if data := re.search(r"Resource (?:\x1b\[\d+m)?(\w+)", str(error)):
            fix = f"run  python -m nltk.downloader {data[1]}  where there is a network"
            raise ConfigError(f"textarena:{name}: NLTK's data '{data[1]}' are not there", fix=fix) from error
        needs_rival = isinstance(error, AssertionError) and opponent is None
        fix = "give args.opponent, which plays the others" if needs_rival else ""
        raise ConfigError(f"textarena:{name}: {type(error).__name__}: {one_line(error)}", fix=fix) from error
    return make
