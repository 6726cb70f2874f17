"""Options of `env`: the environments of a run, one section each."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import BeforeValidator

from etude.options.declare import key, options
from etude.options.types import Count, FreeForm, Natural, NonNegative, Positive, Sections, Text


def _as_sections(value: object) -> object:
    """An id alone stands for its section, and for a list of one."""
    entries = [value] if isinstance(value, str) else value
    if not isinstance(entries, list | tuple):
        return value
    return [{"id": each} if isinstance(each, str) else each for each in entries]


EnvironmentSections = Annotated[Sections, BeforeValidator(_as_sections)]


@options
class EnvironmentOptions:
    """An entry of `env`."""

    id: Text = key("A registered name of yours, or package:name (`etude env list`).")
    name: Text | None = key("Picks it, as a row's extra_info.env, and names its metrics. Null: the id.", default=None)
    args: FreeForm = key("Arguments of the environment; any keys.", default_factory=dict)
    python: Text | None = key("The interpreter that has the package, of those that need their own.", default=None)
    tasks: Count | None = key("Most tasks to train on. Null: all it has, or 1000 seeds.", default=None, unit="tasks")
    val_tasks: Natural = key("Most tasks to validate on. 0: none.", default=64, unit="tasks")
    weight: NonNegative = key("Its share of each batch, relative to the others'.", default=1.0)
    limit: Count | None = key("Most sessions at once, in the whole run. Null: the class's.", default=None)
    timeout: Positive = key("Timeout of each call of its methods.", default=60.0, unit="seconds")

    @property
    def label(self) -> str:
        """Its name in the run."""
        return self.name or self.id

    @property
    def identity(self) -> tuple[Any, ...]:
        """What decides which tasks there are, and what they are worth."""
        return self.label, self.id, dict(self.args), self.tasks


__all__ = ["EnvironmentOptions", "EnvironmentSections"]
