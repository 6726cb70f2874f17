"""`BaseInteraction`: a simulated user that replies to the policy, with verl's four methods.

    start_interaction → generate_response* → finalize_interaction

`load_interactions` loads them from verl's YAML format:

    interaction:
      - name: gsm8k                      # default: the class's name without "Interaction", in lower case
        class_name: etude.agents.interactions.gsm8k.Gsm8kInteraction    # or path/to/file.py:Class
        config: {}

Invariant (kept by `EnvironmentSession`): one start, then any number of replies, then exactly one `finalize_interaction`,
however the trajectory ends. All trajectories share an interaction object; per-trajectory state is kept by instance id.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any
from uuid import uuid4

from etude.environments import Environment, EnvironmentEntry, Step
from etude.errors import ConfigError, InfrastructureError, describe_error, one_line
from etude.registry import did_you_mean
from etude.rewards.finite import as_flag, as_reward
from etude.tools.config_file import fill_environment, import_class, read_data_file

_KEYS = ("name", "class_name", "config")
_MOVED = {
    "Gsm8kInteraction": "etude.agents.interactions.gsm8k.Gsm8kInteraction",
    "BaseInteraction": "etude.agents.interactions.BaseInteraction",
}
_NOT_HERE = (
    "modules of verl.interactions are not used; derive your class from etude.agents.interactions.BaseInteraction "
    "and name it as 'path/to/file.py:Class'"
)


class BaseInteraction:
    """Base of all interactions; subclasses override at least `generate_response`.

    Attributes:
        config: the mapping under `config` in the YAML. Two of its keys are read here: `timeout` (seconds per call, default
            60) and `max_response_chars` (default 100,000).
        name: by which a row's `extra_info.interaction_kwargs.name` selects it.
    """

    def __init__(self, config: dict[str, Any]) -> None:
        self.config = config
        self.name: str = config.get("name", "interaction_agent")

    async def start_interaction(self, instance_id: str | None = None, **kwargs: Any) -> str:
        """Begins a conversation; `kwargs` are the row's `interaction_kwargs` without the name. Returns the id to use."""
        return instance_id or str(uuid4())

    async def generate_response(
        self, instance_id: str, messages: list[dict[str, Any]], **kwargs: Any
    ) -> tuple[bool, str, float, dict[str, Any]]:
        """Replies to the conversation so far.

        Args:
            messages: the conversation. An assistant message's `content` is everything sampled, its `spoken` the same
                without reasoning and tool calls; tool results have the role `tool`.

        Returns:
            Whether the conversation is over, the user's next message (unused if it is), the reward of the assistant's
            last turn, and metrics to keep.

        Raises:
            InfrastructureError: the trajectory is retried from fresh state. Any other exception is treated the same way,
                since a failing interaction is never the model's fault.
        """
        raise NotImplementedError

    @staticmethod
    def check_keys(config: dict[str, Any], known: Sequence[str]) -> None:
        """Checks that `config` has only `known` keys and those common to all interactions; for use in constructors.

        Raises:
            ConfigError: there is another key.
        """
        known = (*known, "name", "timeout", "max_response_chars")
        for key in config:
            if key not in known:
                raise ConfigError(f"unknown key 'config.{key}'{did_you_mean(key, known)}")

    async def calculate_score(self, instance_id: str, **kwargs: Any) -> float:
        """Returns the conversation's current score. Only `generate_response` may use it: the loop never calls it."""
        return 0.0

    async def finalize_interaction(self, instance_id: str, **kwargs: Any) -> None:
        """Releases the conversation's resources."""


class InteractionEnvironment(Environment):
    """One trajectory's conversation with an interaction. Whatever an interaction does wrong is infrastructure: the model is
    not to blame for its user."""

    reads_calls = False
    names = {"reset": "start_interaction", "step": "generate_response", "close": "finalize_interaction"}  # noqa: RUF012

    def __init__(self, interaction: BaseInteraction) -> None:
        self._user = interaction
        self._id, self._started = "", False

    async def reset(self, task: Mapping[str, Any], seed: int) -> str:
        """Starts the conversation; the user says nothing yet."""
        self._id, self._started = self.row["request_id"], True
        self._kwargs = {key: value for key, value in self.row["interaction_kwargs"].items() if key != "name"}
        with _blamed_on_the_user():
            started = await self._user.start_interaction(self._id, **self._kwargs)
        self._id = started if isinstance(started, str) and started else self._id
        return ""

    async def step(self, text: str) -> Step:
        """Replies to the conversation, of which the interaction gets a copy, which it may modify."""
        messages = copy.deepcopy(self.conversation.messages_for_user())
        with _blamed_on_the_user():
            returned = await self._user.generate_response(self._id, messages, **self._kwargs)
        try:
            over, reply, reward, metrics = returned
            if not isinstance(reply, str):
                raise TypeError(f"its text is a {type(reply).__name__}")
            if reward is None:
                raise TypeError("it has no reward: return 0.0 for a turn that earns nothing")
            longest = self._user.config.get("max_response_chars")
            return Step(reply[:longest], as_reward(reward, "it"), as_flag(over), metrics=dict(metrics or {}))
        except (TypeError, ValueError) as error:
            raise InfrastructureError(f"it returned no user turn: {one_line(error)}") from error

    async def close(self) -> None:
        """Finalizes the conversation, if it was started."""
        if self._started:
            await self._user.finalize_interaction(self._id, **self._kwargs)


@contextmanager
def _blamed_on_the_user() -> Iterator[None]:
    try:
        yield
    except Exception as error:
        raise InfrastructureError(describe_error(error)) from error


def entry_of(interaction: BaseInteraction) -> EnvironmentEntry:
    """The interaction as an environment."""
    make, timeout = partial(InteractionEnvironment, interaction), interaction.config.get("timeout") or 60.0
    return EnvironmentEntry(interaction.name, make, InteractionEnvironment, timeout=timeout, noun="interaction")


def load_interactions(path: str | Path) -> dict[str, BaseInteraction]:
    """Loads the interactions of a file; returns them by name, in file order.

    Raises:
        ConfigError: the file is missing or malformed, a class is missing, or a name is taken; names file and entry.
    """
    path = Path(path).expanduser()
    if not path.is_file():
        raise ConfigError(f"interaction configuration not found: {path}")
    content = read_data_file(path)
    entries = content.get("interaction") if isinstance(content, Mapping) else None
    if not isinstance(entries, list) or not entries:
        raise ConfigError(f"{path}: expected a list of interactions under the key 'interaction'")
    made: dict[str, BaseInteraction] = {}
    for number, entry in enumerate(entries):
        where = f"{path}: interaction[{number}]"
        interaction = _load(entry, path, where)
        if interaction.name in made:
            raise ConfigError(f"{where}: the name '{interaction.name}' is taken by an earlier entry")
        made[interaction.name] = interaction
    return made


def _load(entry: object, file: Path, where: str) -> BaseInteraction:
    if not isinstance(entry, Mapping) or not isinstance(entry.get("class_name"), str):
        raise ConfigError(f"{where}: expected a mapping with the key 'class_name' (a text)")
    for key in entry:
        if key not in _KEYS:
            raise ConfigError(f"{where}: unknown key '{key}'{did_you_mean(str(key), _KEYS)}")
    found = import_class(entry["class_name"], file, where, _MOVED, _NOT_HERE)
    if not (isinstance(found, type) and issubclass(found, BaseInteraction)):
        raise ConfigError(
            f"{where}: '{entry['class_name']}' is no subclass of etude.agents.interactions.BaseInteraction"
        )
    config: Any = fill_environment(dict(entry.get("config") or {}), "config", where)
    name = entry.get("name") or re.sub("Interaction$", "", found.__name__).lower() or found.__name__.lower()
    if not isinstance(name, str):
        raise ConfigError(f"{where}: name must be a text, not {name!r}")
    try:
        for key in ("timeout", "max_response_chars"):
            value = config.get(key)
            number = isinstance(value, int | float) and not isinstance(value, bool)
            if value is not None and not (number and 0 < value < float("inf")):
                raise ConfigError(f"interaction '{name}': config.{key} must be a positive number, not {value!r}")
        made = found({**config, "name": name})
        made.name = name
    except Exception as error:  # a user's constructor may raise anything
        kind = "" if isinstance(error, ConfigError) else f"{type(error).__name__}: "
        raise ConfigError(f"{where} ({entry['class_name']}): {kind}{one_line(error)}") from error
    return made
