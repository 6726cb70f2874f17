"""Shell completion: names of configurations, and keys of the chosen one.

Invariant: nothing is printed or raised; an invalid configuration completes to nothing.
"""

from __future__ import annotations

from pathlib import Path

import click


def complete_name(context: click.Context, parameter: click.Parameter, incomplete: str) -> list[str]:
    """Étude's configurations, and YAML files where `--config-name` looks for them."""
    from etude.config import package_roots

    given = context.params.get("config_path")
    folders = [Path(given)] if given else [Path("config"), Path()]
    own = {path.stem for folder in folders for path in folder.expanduser().glob("*.yaml")}
    return [name for name in [*package_roots(), *sorted(own)] if name.startswith(incomplete)]


def complete_key(context: click.Context, parameter: click.Parameter, incomplete: str) -> list[str]:
    """`key=` for each key of the configuration named on the command line."""
    from etude.config import DEFAULT_ROOT, compose_with_sources
    from etude.errors import EtudeError

    root = "sft" if context.info_name == "sft" else DEFAULT_ROOT
    try:
        chosen = compose_with_sources(
            context.params.get("config_name"), (), context.params.get("config_path"), root=root
        )
    except EtudeError:
        return []
    return [f"{key}=" for key in chosen.sources if key.startswith(incomplete)]
