"""`registered_tools`: looks up a tool that a configuration only names, as RL-Factory's `.pydata` files do.

Names are looked up, in this order, among classes of `@register_tool`, functions of `@function_tool`, the built-in
tools (`calculator`, …), and the tools of an installed Qwen-Agent. Plug-ins are imported before names are resolved.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from etude.errors import ConfigError, one_line
from etude.registry import did_you_mean
from etude.tools.base import BaseTool
from etude.tools.builtin import builtin_config, builtin_names
from etude.tools.config_file import read_config_file
from etude.tools.entry import checked, load_entry
from etude.tools.environment import filled
from etude.tools.function_tool import FUNCTION_TOOLS
from etude.tools.qwen import TOOL_REGISTRY, QwenTool, registered_tool_class


def registered_tools(name: object, config: Mapping[str, Any], where: str) -> list[BaseTool]:
    """The tool or tools registered as `name`, constructed with `config`.

    Raises:
        ConfigError: nothing has that name, or it cannot be constructed; begins with `where`.
    """
    if not isinstance(name, str) or not name:
        raise ConfigError(f"{where}: 'name' must be the name of a tool, not {name!r}")
    where = f"{where} ({name})"
    made: dict[str, Any] = filled(dict(config), "config", where)
    own = {key: value for key, value in made.items() if key != "name"}
    if name not in TOOL_REGISTRY and name in FUNCTION_TOOLS:
        return [checked(lambda: FUNCTION_TOOLS.get(name).configured(own), where)]
    if name not in TOOL_REGISTRY and name in builtin_names():
        return _builtin(name, own, where)
    try:
        tool_class = registered_tool_class(name)
    except ConfigError as error:
        raise ConfigError(f"{where}: {one_line(error)}") from error
    if tool_class is None:
        known = sorted({*TOOL_REGISTRY.names(), *FUNCTION_TOOLS.names(), *builtin_names()})
        hint = did_you_mean(name, known)
        raise ConfigError(
            f"{where}: no tool is registered as '{name}'{hint} (known: {', '.join(known)}; "
            "a tool of Qwen-Agent needs the package qwen-agent)"
        )
    return [checked(lambda: QwenTool(tool_class, made, name=name), where)]


def _builtin(name: str, config: Mapping[str, Any], where: str) -> list[BaseTool]:
    """The tools of the built-in configuration `name`, with ours merged over its `config`."""
    path = builtin_config(name)
    entries = [entry for _, entry in read_config_file(path).entries]
    made = [{**entry, "config": {**(entry.get("config") or {}), **config}} for entry in entries]
    return [tool for entry in made for tool in load_entry(entry, path, where)]
