"""`prepare`: checks a resolved configuration and opens the worker groups of its run; no model is loaded."""

from __future__ import annotations

from dataclasses import dataclass, replace

from omegaconf import DictConfig

from etude.checks.setup import LoadedSetup, PlainSetup, check_config, check_tool_messages
from etude.trainer.groups import Groups, open_groups


@dataclass(frozen=True)
class RunSetup(LoadedSetup):
    """Adds the run's configuration and worker groups."""

    config: DictConfig
    groups: Groups

    @property
    def plain(self) -> PlainSetup:
        """The options alone."""
        return PlainSetup(self.data, self.algorithm, self.needs, self.trainer, self.roles)


def prepare(config: DictConfig, *, trains: bool = True, restarts: bool = False) -> RunSetup:
    """Checks the whole configuration and opens the worker groups, which load plugins, tools and tokenizer, but no model.

    `trains`: whether there is an actor; False if the model is only rolled out. `restarts`: see `open_groups`.

    Raises:
        ConfigError, DataError: one line that names the key or file.
    """
    options, roles, bundle = check_config(config)
    if not trains:
        roles = replace(roles, needs_ref=False, streams=False, value_head=False)
    critic = trains and "values" in options.needs and not roles.value_head
    groups = open_groups(roles, options, trains=trains, critic=critic, keeps_batches=trains, restarts=restarts)
    with groups.closed_on_error():
        catalogue, *_ = groups.rollout.load_tools()
        setup = RunSetup(
            options.data,
            options.algorithm,
            options.needs,
            options.trainer,
            roles,
            bundle,
            catalogue,
            config,
            groups,
        )
        check_tool_messages(setup, options.data.apply_chat_template_kwargs)
    return setup
