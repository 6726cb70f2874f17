"""`etude chat check`: checks before training whether a model's chat template is safe to train with.

Invariant: exit status 0 means safe, 1 unsafe.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from rich.console import Console
from rich.text import Text

from etude.cli.console import open_console
from etude.viewer.conversations import PROVENANCE_COLOURS

if TYPE_CHECKING:
    from etude.trajectory import Run


@click.group()
def chat() -> None:
    """Look at a model's chat template."""


@chat.command()
@click.argument("model", type=click.Path(exists=True, file_okay=False, path_type=Path))
@click.option("--trust-remote-code", is_flag=True, help="Run code that comes with the tokenizer.")
@click.option("--tokens/--no-tokens", default=True, help="Whether to print a conversation token by token.")
@click.option("--set", "options", multiple=True, metavar="KEY=VALUE", help="As data.apply_chat_template_kwargs.KEY.")
def check(model: Path, trust_remote_code: bool, tokens: bool, options: tuple[str, ...]) -> int:
    """Try the chat template of MODEL, the folder of a model or tokenizer.

    Says whether conversations of several turns are trained on exactly the ids that the engine saw and sampled, and shows
    a small one token by token: green is what the policy would sample, cyan a tool's words, yellow a user's, grey what
    the template writes.
    """
    from etude.chat.check import check_template
    from etude.models import load_processor, load_tokenizer

    tokenizer = load_tokenizer(model, trust_remote_code=trust_remote_code)
    whole = (model / "config.json").is_file()
    processor = load_processor(model, trust_remote_code=trust_remote_code) if whole else None
    report = check_template(tokenizer, processor=processor, **template_kwargs(options))
    console = open_console()
    marks = {True: ("✓", "green"), False: ("✗", "bold red"), None: ("·", "default")}
    for finding in report.findings:
        mark, colour = marks[finding.holds]
        console.print(Text.assemble((f"{mark} {finding.statement}", colour), (f"  {finding.evidence}", "default")))
    if tokens:
        _print_tokens(console, report.example, tokenizer)
    verdict = "safe for training on several turns" if report.safe else "NOT safe for training on several turns"
    if report.safe and report.dropped:
        verdict += f", but rows that have {' or '.join(report.dropped)} are refused: the template does not write that"
    console.print(f"[bold]{verdict}[/bold]", soft_wrap=True)
    return int(not report.safe)


def template_kwargs(settings: Sequence[str]) -> dict[str, Any]:
    """Parses `KEY=VALUE` settings into keyword arguments; values are YAML.

    Raises:
        ConfigError: a setting has no valid key, or its value is not YAML.
    """
    import yaml

    from etude.errors import ConfigError

    kwargs = {}
    for setting in settings:
        key, found, value = setting.partition("=")
        try:
            kwargs[key] = yaml.safe_load(value)
        except yaml.YAMLError:
            found = ""
        if not found or not key.isidentifier():
            raise ConfigError(f"--set {setting}: give KEY=VALUE, such as --set enable_thinking=false")
    return kwargs


def _print_tokens(console: Console, runs: list[Run], tokenizer: object) -> None:
    decode = tokenizer.decode  # type: ignore[attr-defined]
    line = Text()
    for ids, provenance in runs:
        for token in ids:
            line.append(decode([token]).replace("\n", "⏎"), style=f"{PROVENANCE_COLOURS[provenance.value]} underline")
            line.append("·", style="bright_black")
    if line:
        console.print(line)
