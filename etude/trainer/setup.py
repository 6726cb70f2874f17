"""`prepare`: checks a run's options and opens its worker groups; no model is loaded."""

from __future__ import annotations

from dataclasses import replace

from etude.checks.resources import recomputes
from etude.checks.setup import Setup, check_options, check_tool_messages
from etude.options import Options
from etude.trainer.worker_groups import WorkerGroups, open_groups


def prepare(options: Options, *, trains: bool = True, restarts: bool = False) -> tuple[Setup, WorkerGroups]:
    """Checks the options and opens the worker groups, which load plugins, tools and tokenizer, but no model.

    `trains`: whether there is an actor; False if the model is only rolled out. `restarts`: see `open_groups`.

    Raises:
        ConfigError, DataError: one line that names the key or file.
    """
    setup = check_options(options)
    setup.placement = replace(setup.placement, trains=trains, recomputes=trains and recomputes(setup))
    critic = trains and setup.options.has_critic
    groups = open_groups(setup.options, setup.placement, critic=critic, keeps_batches=trains, restarts=restarts)
    with groups.closed_on_error():
        setup.catalogue, *_ = groups.rollout.load_tools()
        check_tool_messages(setup)
    return setup, groups
