"""Rows and demonstrations of the environments that an example's `agent.yaml` names: what its `prepare` returns.

Rows are seeds, in turn of each environment. A demonstration is an episode played by the example's own `act`, who plays
well in most turns of the first half of them, and in fewer of the second.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from etude.config import compose
from etude.environments import EnvironmentSession
from etude.environments.entry import EnvironmentEntry
from etude.environments.loader import load_environments
from etude.options import EnvironmentOptions

SKILLED = (0.9, 0.3)  # of the turns of demonstrations: in the first half of these, and in the second
SEEDS = 2**31

Act = Callable[[Sequence[str], bool, random.Random], str]
"""From what was seen and done so far, in turn, and whether to play well, to the next turn."""


def tables(
    folder: Path,
    seed: int,
    rows: Any,
    act: Act | None = None,
    *,
    skilled: tuple[float, float] = SKILLED,
    shown: Sequence[Mapping[str, str]] = (),
) -> dict[str, list[dict[str, Any]]]:
    """The tables of the example in `folder`. `shown`: turns of a worked example before each question."""
    config = compose("agent", [], folder)
    named = [EnvironmentOptions(**each) for each in config.env]
    rng = random.Random(f"{folder.name}/{seed}")
    made = {
        split: [row(label, number, split, shown) for label, number in drawn(named, getattr(rows, split), rng)]
        for split in ("train", "val", "test")
    }
    if act is not None and (environments := load_environments(named)) is not None:
        most, count = config.actor_rollout_ref.rollout.multi_turn.max_assistant_turns, rows.demonstrations
        talks = [
            play(environments.entries[label], number, most, act, skilled[2 * n // count], rng)
            for n, (label, number) in enumerate(drawn(named, count, rng))
        ]
        made["demonstrations"] = [{"messages": talk} for talk in talks]
    return made


def drawn(named: Sequence[EnvironmentOptions], count: int, rng: random.Random) -> Iterator[tuple[str, int]]:
    """Names of environments in turn, each with a seed."""
    return ((named[n % len(named)].label, rng.randrange(SEEDS)) for n in range(count))


def row(name: str, seed: int, split: str, shown: Sequence[Mapping[str, str]]) -> dict[str, Any]:
    """A row for training or evaluation."""
    return {
        "data_source": name,
        "prompt": [*shown, {"role": "user", "content": ""}],
        "extra_info": {"env": name, "env_seed": seed, "split": split},
    }


def play(
    entry: EnvironmentEntry, seed: int, most: int, act: Act, skilled: float, rng: random.Random
) -> list[dict[str, str]]:
    """The messages of an episode of at most so many turns, in which each is played well with probability `skilled`."""

    async def episode() -> list[str]:
        async with EnvironmentSession(entry, {"extra_info": {"env_seed": seed}}) as session:
            assert isinstance(session.observation, str)
            turns = [session.observation]
            while not session.done and len(turns) < 2 * most:
                turns.append(act(turns, rng.random() < skilled, rng))
                _, messages = await session.step(turns[-1])
                turns.extend(message["content"] for message in messages)
        return turns

    turns = asyncio.run(episode())
    del turns[2 * most :]  # what nobody answered
    return [{"role": ("user", "assistant")[n % 2], "content": text} for n, text in enumerate(turns)]
