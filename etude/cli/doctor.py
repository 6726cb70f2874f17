"""`etude doctor`: checks whether this machine can run Étude."""

from __future__ import annotations

import click

from etude.cli.check import json_option, print_findings


@click.command()
@json_option
def doctor(as_json: bool) -> int:
    """Check this machine: versions, CPU and GPU, sandbox modes, extras, Ray, disk, limits.

    What is said to work was tried. Exit status 1 if there is an error; what is missing for some runs only is a warning.
    """
    from etude.checks.machine import inspect_machine

    return print_findings(inspect_machine(), as_json)
