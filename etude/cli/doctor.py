"""`etude doctor`: checks whether this machine can run Étude."""

from __future__ import annotations

import click

from etude.cli.check import json_option, print_findings


@click.command()
@click.option("--gpu", is_flag=True, help="Train and sample on the GPU, and compare with the CPU: two minutes.")
@click.option("--device", default="cuda", show_default=True, help="Of --gpu: cuda, cuda:N, or cpu, in seconds.")
@click.option(
    "--gpus", type=click.IntRange(1), default=1, show_default=True, help="Of --gpu: learn on so many ranks, too."
)
@json_option
def doctor(gpu: bool, device: str, gpus: int, as_json: bool) -> int:
    """Check this machine: versions, CPU and GPU, sandbox modes, extras, Ray, disk, limits.

    What is said to work was tried. Exit status 1 if there is an error; what is missing for some runs only is a warning.
    With --gpu, a model of random weights trains and samples on the GPU instead: speed, kernels, numbers against the CPU's,
    the same bits twice, a checkpoint, communication, weight syncs; vLLM where it is installed. Paste it into an issue.
    """
    if gpu:
        from etude.checks.gpu import inspect_gpu
        from etude.checks.setup import resolve_device

        return print_findings(inspect_gpu(resolve_device(device), ranks=gpus), as_json)
    from etude.checks.machine import inspect_machine

    return print_findings(inspect_machine(), as_json)
