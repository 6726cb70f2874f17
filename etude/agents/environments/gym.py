"""`TextEnv`: a Gymnasium-style environment, one object per trajectory, with text observations and actions.

    class Guess(TextEnv):
        def reset(self, *, seed=None, options=None): ...     -> (observation, info)
        def step(self, action): ...                          -> (observation, reward, terminated, truncated, info)
        def close(self): ...

Register the class with `@register_env("name")`, like an `Env`. `options` of `reset` is the row's `extra_info`, `action` the
model's text. Any class with these three methods will do, including one of Gymnasium's own if it uses text.

Invariant (kept by the loop): one `reset`, then steps until one of them ends the episode, and `close` in every ending.
"""

from __future__ import annotations

from typing import Any


class TextEnv:
    """Base of text environments; methods may be sync (they run in a thread) or async."""

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[str, dict[str, Any]]:
        """Begins an episode; a non-empty observation is appended to the prompt's last user message."""
        return "", {}

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        """The answer to the model's turn: observation, reward of the turn, terminated, truncated, info."""
        raise NotImplementedError

    def close(self) -> None:
        """Releases the episode's resources."""


def is_gym_shaped(environment: object) -> bool:
    """Whether `environment` is a class (or factory function) with `reset` and `step`, and not an `Env`."""
    return callable(getattr(environment, "reset", None)) and callable(getattr(environment, "step", None))
