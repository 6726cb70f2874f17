"""A text environment of one's own: the model guesses a number, and is told which numbers are left.

`Bisection` has Gymnasium's methods, one object a trajectory. Five guesses are enough for 31 numbers if each halves what is
left, and rarely otherwise. `prepare` makes what training starts from, all of it drawn from a seed: rows, and demonstrations,
which first mostly halve, then mostly guess anything that is left, or the lowest or highest of it.
"""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

from etude.agents.environments import TextEnv, register_env

HIGHEST, GUESSES = 31, 5
HALVES = (0.9, 0.3)  # of the guesses in demonstrations: in the first half of these, and in the second
SYSTEM = "Find my number."


@register_env("bisection")
class Bisection(TextEnv):
    """`options` is the row's `extra_info`: `number` is to be found."""

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[str, dict[str, Any]]:
        """What is appended to the prompt: the numbers that are left."""
        assert options is not None
        self._number, self._low, self._high, self._guesses = int(options["number"]), 1, HIGHEST, 0
        return self._left(), {}

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        """Ends with a hit, which earns 1 and a tenth for each guess that is left, or with the last guess."""
        said = action.strip()
        guess = int(said) if said.isascii() and said.isdigit() and len(said) <= 2 else 0
        self._guesses += 1
        if guess == self._number:
            return "", 1.0 + 0.1 * (GUESSES - self._guesses), True, False, {}
        hint = "No."
        if self._low <= guess < self._number:
            hint, self._low = "Higher.", guess + 1
        elif self._number < guess <= self._high:
            hint, self._high = "Lower.", guess - 1
        return f"{hint} {self._left()}", 0.0, False, self._guesses == GUESSES, {}

    def _left(self) -> str:
        return f"From {self._low} to {self._high}."


def row(number: int, split: str, index: int) -> dict[str, Any]:
    """A row for training or evaluation; the environment alone knows its number."""
    return {
        "data_source": "examples/bisection",
        "prompt": [{"role": "system", "content": SYSTEM}, {"role": "user", "content": "Guess."}],
        "reward_model": {"style": "rule", "ground_truth": str(number)},
        "extra_info": {"index": index, "split": split, "number": number},
    }


def demonstration(number: int, halves: float, rng: random.Random) -> dict[str, Any]:
    """An episode in which a guess halves what is left with probability `halves`."""
    env = Bisection()
    shown, _ = env.reset(options={"number": number})
    messages = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": f"Guess.\n{shown}"}]
    over, low, high = False, 1, HIGHEST
    while not over:
        habit = rng.choice((low, high, rng.randint(low, high)))
        guess = (low + high) // 2 if rng.random() < halves else habit
        shown, _, hit, last, _ = env.step(str(guess))
        messages.append({"role": "assistant", "content": str(guess)})
        over = hit or last
        if not over:
            messages.append({"role": "user", "content": shown})
            low, high = (guess + 1, high) if guess < number else (low, guess - 1)
    return {"messages": messages}


def prepare(folder: Path, seed: int, rows: Any) -> dict[str, list[dict[str, Any]]]:
    """Rows, whose numbers are those of all splits, and demonstrations."""
    rng = random.Random(f"bisection/{seed}")
    tables = {
        split: [row(rng.randint(1, HIGHEST), split, index) for index in range(getattr(rows, split))]
        for split in ("train", "val", "test")
    }
    count = rows.demonstrations
    shown = [demonstration(rng.randint(1, HIGHEST), HALVES[2 * i // count], rng) for i in range(count)]
    return {**tables, "demonstrations": shown}
