"""`etude play`: lets a person play the model's part in a rollout, or shows the model playing it."""

from __future__ import annotations

import sys
from pathlib import Path

import click
import yaml

from etude.cli.config import PLAIN_SETTINGS, configuration_arguments
from etude.cli.env import plugins_option


@click.command(context_settings=PLAIN_SETTINGS)
@configuration_arguments
@plugins_option
@click.option("--row", default=0, show_default=True, type=click.IntRange(0), help="Which row, from 0.")
@click.option("--val", "validation", is_flag=True, help="A row of data.val_files instead of data.train_files.")
@click.option("--policy", is_flag=True, help="The model answers instead of you.")
@click.option("--ask", "question", metavar="TEXT", help="The model answers this instead of the row's question.")
@click.option(
    "--output-dir",
    "folder",
    type=click.Path(path_type=Path),
    help="Folder for the trajectory; default play in the run's folder.",
)
def play(
    config_name: str | None,
    config_path: str | None,
    overrides: tuple[str, ...],
    plugins: tuple[str, ...],
    row: int,
    validation: bool,
    policy: bool,
    question: str | None,
    folder: Path | None,
) -> int:
    """Take the model's seat: the prompt, tools and reward of a run, and you type what the model would write.

    The arguments are those of `etude train`. What is printed is what the model sees. A call is typed as
    {"name": "TOOL", "arguments": {…}} or as  TOOL key=value;  anything else is an answer. At the end come the score and its
    parts, and the trajectory is kept as a run keeps its rollouts, for `etude explain` and `etude view`.

    With --policy the model of actor_rollout_ref.model.path answers, as in a validation; with --ask a question of yours,
    in place of the row's, with the row's other messages and its tools.

    With the id of an environment, its arguments and nothing else, that is played, without a run or a model.

    \b
    Example:
      etude play --config-path shop --config-name agent --row 3
      etude play --config-path shop --config-name agent --ask "How much is one plum?" \\
        actor_rollout_ref.model.path=runs/shop/global_step_24/actor/huggingface
      etude play gym:FrozenLake-v1 is_slippery=false
    """
    from etude.quickstart.prepare import example_inputs
    from etude.testing.play import play as play_row

    if overrides and "=" not in overrides[0]:
        from etude.options import EnvironmentOptions
        from etude.registry import load_plugins
        from etude.testing.play import play_environment

        load_plugins(plugins)
        args = {key: yaml.safe_load(value) for key, _, value in (each.partition("=") for each in overrides[1:])}
        options = EnvironmentOptions(id=overrides[0], args=args)
        earned = play_environment(options, row=row, validation=validation, typed=sys.stdin, echo=click.echo)
        return 0 if earned is not None else 1
    scored = play_row(
        config_name,
        (*example_inputs(config_path, config_name, overrides), *overrides),
        config_path,
        row=row,
        validation=validation,
        folder=folder,
        typed=None if policy or question is not None else sys.stdin,
        echo=click.echo,
        question=question,
    )
    return 0 if scored else 1
