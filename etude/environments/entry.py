"""`EnvironmentEntry`: an environment of a run, with its name, limits and tools; `Environments`: all of them, from which a
row picks."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from etude.chat.rendering import LRUCache
from etude.environments.base import Environment, EnvironmentTool, tool_methods
from etude.errors import ConfigError, DataError
from etude.limits import Limit, Limiter, open_limiter
from etude.registry import unknown_name
from etude.tools import BaseTool

_MAX_SCHEMAS = 1024  # of one environment, that are kept


@dataclass(frozen=True)
class EnvironmentEntry:
    """An environment that a run may open sessions of.

    Attributes:
        name: picks it, as a row's `extra_info.env`; `key` is its place in the configuration.
        id, args: what it was opened by.
        make: makes the object of a session, of class `kind`.
        timeout: seconds per method call. `limit`: sessions at once, in the whole run; None: the class's.
        version: of the package that it comes from.
        tools: the environment's own, by name.
        noun: what errors call it.
    """

    name: str
    make: Callable[[], Environment]
    kind: type[Environment]
    timeout: float = 60.0
    limit: int | None = None
    version: str = ""
    id: str = ""
    args: Mapping[str, Any] = field(default_factory=dict)
    key: str = "env"
    noun: str = "environment"
    tools: Mapping[str, BaseTool] = field(init=False)
    _schemas: LRUCache[EnvironmentTool] = field(
        default_factory=lambda: LRUCache(_MAX_SCHEMAS), compare=False, repr=False
    )

    def __post_init__(self) -> None:
        """Raises ConfigError if no schema can be derived from a tool of `kind`."""
        tools = {each: EnvironmentTool.of_method(self.kind, each, self.timeout) for each in tool_methods(self.kind)}
        object.__setattr__(self, "tools", tools)

    @property
    def label(self) -> str:
        """`environment 'name'`, for errors."""
        return f"{self.noun} '{self.name}'"

    @property
    def fingerprint(self) -> str:
        """What a resumed run must find unchanged."""
        return f"{self.id} {self.version} {json.dumps(dict(self.args), sort_keys=True, default=str)}"

    @property
    def source(self) -> str:
        """The source of the rewards of its steps: `env`, or `interaction`."""
        return "env" if self.noun == "environment" else self.noun

    @property
    def drives(self) -> bool:
        """Whether the environment drives itself."""
        return self.kind.drive is not Environment.drive

    @property
    def sessions(self) -> int | None:
        """Most sessions at once, in the whole run; None: as many as there are trajectories."""
        return self.kind.limit if self.limit is None else self.limit

    @property
    def limiter(self) -> Limiter | None:
        """What keeps that limit among all processes of the run; None without one."""
        name = f"etude-env-{self.name}-{self.sessions}"  # a limiter's limit never changes
        return None if self.sessions is None else open_limiter(name, Limit(self.sessions))

    def known_tool(self, asked: str | Mapping[str, Any], known: Mapping[str, BaseTool]) -> BaseTool:
        """The tool of that name among `known`, or of that schema, which is kept.

        Raises:
            ConfigError: no tool has that name, or the schema is invalid.
        """
        if isinstance(asked, str):
            if asked not in known:
                raise unknown_name(ConfigError, f"{self.label} has no tool '{asked}'", asked, known)
            return known[asked]
        text = json.dumps(asked, sort_keys=True, default=str)
        if (tool := self._schemas.get(text)) is None:
            tool = EnvironmentTool(asked, self.timeout)
            self._schemas.put(text, tool)
        return tool


@dataclass(frozen=True)
class Environments:
    """The environments of a run by name. `run_tools`: tools that one of them adds to the run's."""

    entries: Mapping[str, EnvironmentEntry]
    tools: Mapping[str, BaseTool] = field(default_factory=dict)

    @classmethod
    def of(cls, entries: Iterable[EnvironmentEntry]) -> Environments:
        """Raises ConfigError if two entries have the same name."""
        made: dict[str, EnvironmentEntry] = {}
        for entry in entries:
            if entry.name in made:
                raise ConfigError(
                    f"{entry.key}: the name '{entry.name}' is taken by an earlier entry", fix="give it a name"
                )
            made[entry.name] = entry
        return cls(made)

    @property
    def limits(self) -> list[int]:
        """The limits that there are."""
        return [each.sessions for each in self.entries.values() if each.sessions is not None]

    def pick(self, row: Mapping[str, Any]) -> EnvironmentEntry:
        """The environment of a row: its `extra_info.env`, or the only one.

        Raises:
            DataError: the row picks none of several, or one that there is not.
        """
        name = (row.get("extra_info") or {}).get("env")
        if name is None and len(self.entries) == 1:
            return next(iter(self.entries.values()))
        if not isinstance(name, str) or name not in self.entries:
            where = f"row {row.get('request_id', '?')}: extra_info.env: there is no environment '{name}'"
            raise unknown_name(DataError, where, str(name), self.entries, f"(configured: {', '.join(self.entries)})")
        return self.entries[name]


def task_of(row: Mapping[str, Any]) -> Mapping[str, Any]:
    """The task that `reset` gets of a row."""
    info = row.get("extra_info") or {}
    return info["task"] if isinstance(info.get("task"), Mapping) else info


def seed_of(row: Mapping[str, Any]) -> int:
    """The seed that `reset` gets of a row: the row's own, or that of its group."""
    seed = (row.get("extra_info") or {}).get("env_seed")
    return int(row["group_seed"] if seed is None else seed)
