"""Builds the advice in findings: it names the tool file, tool code, scorer or command that the user should change or run.

Invariant: everything named can be used verbatim: a path, a configuration key, or a command in backticks.
"""

from __future__ import annotations

import inspect
import json
import shlex
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from etude.checks.settings import JUDGE
from etude.errors import user_file

if TYPE_CHECKING:
    from etude.options import CustomRewardOptions, MultiTurnOptions
    from etude.tools import BaseTool

TOOL_FILES = "actor_rollout_ref.rollout.multi_turn.tool_config_path"


def tool_files(talks: MultiTurnOptions) -> list[str]:
    """Returns the files that configure tools."""
    return [*(talks.tool_config_path or ()), *(talks.function_tool_path or ())]


def tool_file(talks: MultiTurnOptions, name: str) -> str:
    """Returns the file that configures a tool; if none mentions it (as for an MCP server's tools), the key of tool files."""
    files = tool_files(talks)
    paths = {file: Path(file).expanduser() for file in files}  # an entry may also be a dotted module
    naming = (file for file, path in paths.items() if path.is_file() and name in path.read_text("utf-8", "replace"))
    return files[0] if len(files) == 1 else next(naming, TOOL_FILES)


def try_tools(talks: MultiTurnOptions) -> str:
    """Advice on how to inspect the configured tools."""
    files = tool_files(talks)
    if not files:
        return f"set {TOOL_FILES}, or correct actor_rollout_ref.env"
    return f"correct {', '.join(files)}; " + " or ".join(f"`etude tools list {shlex.quote(file)}`" for file in files)


def try_alone(talks: MultiTurnOptions) -> str:
    """Advice on how to learn to run a single tool; without one, the row's loop or environment."""
    if not (files := tool_files(talks)):
        return "`etude env test`, with the same configuration, plays rows alone"
    return f"`etude tools call {shlex.quote(files[0])} --help` says how to run a tool alone"


def try_tool(talks: MultiTurnOptions, name: str, arguments: Mapping[str, Any]) -> str:
    """Advice with the command that runs this tool call on its own."""
    given = shlex.quote(json.dumps(arguments, ensure_ascii=False)[:200])
    return f"`etude tools call {shlex.quote(tool_file(talks, name))} {shlex.quote(name)} {given}` runs it alone"


def code_of(tool: BaseTool, talks: MultiTurnOptions) -> str:
    """Returns the user's file that defines the tool, else the one that configures it."""
    return own_code(tool) or tool_file(talks, tool.name)


def own_code(tool: BaseTool) -> str:
    """Returns the user's file that defines the tool; empty for one of the package's."""
    return file_of(getattr(tool, "_function", type(tool)))


def file_of(code: Callable[..., Any]) -> str:
    """Returns the user's file that defines a function or class; empty for one of the package's, or without source."""
    try:
        return user_file(inspect.getsourcefile(inspect.unwrap(code)) or "") or ""
    except TypeError:
        return ""


def scorer(custom: CustomRewardOptions) -> str:
    """Describes the scoring function, or where what it pays is said."""
    if custom.path == JUDGE:
        return "the judge (custom_reward_function.reward_kwargs.rubric)"
    if custom.path:
        return f"{custom.name} in {custom.path}"
    if custom.rewards:
        return "the functions of custom_reward_function.rewards"
    return "the built-in scorer (custom_reward_function.path takes one of your own)"


def try_scorer(custom: CustomRewardOptions, rows: str) -> str:
    """Advice with the command that runs the scorer on its own."""
    own = f" --reward {shlex.quote(f'{custom.path}:{custom.name}')}" if custom.path else ""
    return f"`etude reward try {shlex.quote(rows)}{own}` runs {scorer(custom)}"
