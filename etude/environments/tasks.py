"""Rows made by the environments themselves, for a run without data files: one for each task, or for each of some seeds."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Iterator, Mapping
from itertools import islice
from typing import Any

from etude.environments.entry import EnvironmentEntry
from etude.errors import ConfigError, EtudeError, describe_error
from etude.timeouts import awaited

_SEEDS = 1000  # of an environment without tasks, for which the configuration says nothing


def task_rows(entry: EnvironmentEntry, split: str, most: int | None) -> Iterator[dict[str, Any]]:
    """Yields the rows of `split`, `train` or `val`: at most so many. Seeds of the splits are disjoint: even and odd ones.

    Raises:
        ConfigError: `tasks` failed, or a task is no JSON object.
    """
    try:
        given = _tasks(entry, split, most)
    except EtudeError:
        raise
    except Exception as error:  # a user's method may raise anything
        raise ConfigError(f"{entry.label}: tasks('{split}') failed: {describe_error(error)}") from error
    count = len(given) if given is not None else most or _SEEDS
    for number in range(count):
        known: dict[str, Any] = {"index": number, "split": split, "env": entry.name}
        if given is None:
            known |= {"task": {}, "env_seed": 2 * number + (split != "train")}
        elif isinstance(given[number], Mapping):
            known["task"] = dict(given[number])
        else:
            kind = type(given[number]).__name__
            raise ConfigError(f"{entry.label}: tasks('{split}') must give JSON objects, and task {number} is a {kind}")
        yield {"data_source": entry.name, "prompt": [{"role": "user", "content": ""}], "extra_info": known}


def _tasks(entry: EnvironmentEntry, split: str, most: int | None) -> list[Any] | None:
    environment = entry.make()
    try:
        tasks = environment.tasks(split)
        return None if tasks is None else list(islice(tasks, most))
    finally:
        closing = environment.close()
        if inspect.isawaitable(closing):
            asyncio.run(awaited(closing))
