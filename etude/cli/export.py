"""`etude export SOURCE TARGET`: exports a run's model to a Hugging Face model folder."""

from __future__ import annotations

from pathlib import Path

import click

_DTYPES = ("float32", "bfloat16", "float16")


@click.command()
@click.argument("source", type=click.Path(path_type=Path))
@click.argument("target", type=click.Path(path_type=Path))
@click.option(
    "--dtype",
    type=click.Choice(_DTYPES),
    help="Type of the weights; default that of the checkpoint. float32 are those the optimizer updated, not rounded.",
)
@click.option("--trust-remote-code", is_flag=True, help="Run Python code that comes with the model.")
def export(source: Path, target: Path, dtype: str | None, trust_remote_code: bool) -> None:
    """Write the model of SOURCE to the new folder TARGET, for Transformers, vLLM or a hub.

    SOURCE is a run's folder (its result, or newest checkpoint), a checkpoint (global_step_N) or a model's folder. TARGET
    gets weights (safetensors), configuration and tokenizer; LoRA's adapters are merged.

    \b
    Examples:
      etude export runs/etude/mine models/mine
      etude export runs/etude/mine/global_step_200 models/mine-200 --dtype bfloat16
    """
    from etude.trainer.export import export_model  # imports torch

    exported_from = export_model(source, target, dtype, trust_remote_code=trust_remote_code)
    click.echo(f"model: {target} (from {exported_from})")
