"""Names of what a user can change: tool files, code of tools, scorers. An inspection's advice is made of them.

Invariant: a name can be looked up as it stands: a path, a key, or a command in backticks.
"""

from __future__ import annotations

import inspect
import json
import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from etude.errors import user_file

if TYPE_CHECKING:
    from etude.options import CustomRewardOptions, MultiTurnOptions
    from etude.tools import BaseTool

TOOL_FILES = "actor_rollout_ref.rollout.multi_turn.tool_config_path"


def tool_files(talks: MultiTurnOptions) -> list[str]:
    """The files that configure tools."""
    return [*(talks.tool_config_path or ()), *(talks.function_tool_path or ())]


def tool_file(talks: MultiTurnOptions, name: str) -> str:
    """The file that configures a tool; the key of such files if none names it, as with an MCP server's tools."""
    files = tool_files(talks)
    paths = {file: Path(file).expanduser() for file in files}  # a dotted module is no file
    naming = (file for file, path in paths.items() if path.is_file() and name in path.read_text("utf-8", "replace"))
    return files[0] if len(files) == 1 else next(naming, TOOL_FILES)


def try_tools(talks: MultiTurnOptions) -> str:
    """How to look at what tools are configured."""
    files = tool_files(talks)
    if not files:
        return f"set {TOOL_FILES}, or correct actor_rollout_ref.env"
    return f"correct {', '.join(files)}; " + " or ".join(f"`etude tools list {shlex.quote(file)}`" for file in files)


def try_alone(talks: MultiTurnOptions) -> str:
    """How to find out how to run one of the tools alone."""
    return f"`etude tools call {shlex.quote([*tool_files(talks), 'CONFIG'][0])} --help` says how to run a tool alone"


def try_tool(talks: MultiTurnOptions, name: str, arguments: Mapping[str, Any]) -> str:
    """The command that runs a tool alone."""
    given = shlex.quote(json.dumps(arguments, ensure_ascii=False)[:200])
    return f"`etude tools call {shlex.quote(tool_file(talks, name))} {shlex.quote(name)} {given}` runs it alone"


def code_of(tool: BaseTool, talks: MultiTurnOptions) -> str:
    """The user's file in which a tool's code stands, else the one that configures it."""
    code = getattr(tool, "_function", type(tool))
    try:
        found = user_file(inspect.getsourcefile(inspect.unwrap(code)) or "")
    except TypeError:  # made in C, or without a source
        found = None
    return found or tool_file(talks, tool.name)


def scorer(custom: CustomRewardOptions) -> str:
    """The function that scores."""
    if custom.path:
        return f"{custom.name} in {custom.path}"
    if custom.rewards:
        return "the functions of custom_reward_function.rewards"
    return "the built-in scorer (custom_reward_function.path takes one of your own)"


def try_scorer(custom: CustomRewardOptions, rows: str) -> str:
    """How to run the scorer alone."""
    own = f" --reward {shlex.quote(f'{custom.path}:{custom.name}')}" if custom.path else ""
    return f"`etude reward try {shlex.quote(rows)}{own}` runs {scorer(custom)}"
