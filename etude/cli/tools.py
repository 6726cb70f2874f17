"""`etude tools`: lists tools, calls them by hand, and serves them over MCP, all without a model.

Invariant: `call` runs a tool exactly as a rollout does, through a `ToolSession`: create, the calls, calc_reward, release.
Exit status of `call`: 0 if every call succeeded, 1 if one was refused or failed, 3 for an infrastructure failure, 2 for a
user error. Only results go to stdout, everything else to stderr.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from collections.abc import Callable, Coroutine, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from click.core import ParameterSource

from etude.cli.listening import listening
from etude.errors import ConfigError, DataError, InfrastructureError, one_line
from etude.registry import USER_MODULE, did_you_mean

if TYPE_CHECKING:
    from etude.tools import BaseTool, ToolCall

REFUSED, BROKEN = 1, 3
_MAX_JSON_BYTES = 10_000_000


@click.group()
def tools() -> None:
    """Show tools, run them by hand, or serve them to MCP clients.

    CONFIG is a tool configuration (YAML, JSON with mcpServers, RL-Factory's .pydata), a Python file with @function_tool
    functions, or the name of a built-in tool, such as calculator.
    """


_config = click.argument("config")
_plugin = click.option(
    "--plugin",
    "plugins",
    multiple=True,
    metavar="FILE",
    help="Python file to import first; may be given more than once.",
)


@tools.command("list")
@_config
@_plugin
def list_tools(config: str, plugins: tuple[str, ...]) -> None:
    """List the tools of CONFIG: name, class and description.

    \b
    Example:
      etude tools list tools.yaml
    """
    for tool in _load(config, plugins):
        function = tool.get_openai_tool_schema().function
        click.echo(f"{tool.name:<24} {_class_of(tool):<48} {' '.join(function.description.split())}".rstrip())


@tools.command()
@_config
@click.argument("names", nargs=-1)
@_plugin
def schema(config: str, names: tuple[str, ...], plugins: tuple[str, ...]) -> None:
    """Print the schemas of CONFIG's tools, or of those NAMES, as the model sees them: a JSON list.

    \b
    Example:
      etude tools schema tools.yaml search
    """
    loaded = _load(config, plugins)
    chosen = [_find_tool(loaded, name) for name in names] if names else loaded
    schemas = [tool.get_openai_tool_schema().to_openai() for tool in chosen]
    click.echo(json.dumps(schemas, indent=2, ensure_ascii=False))


@tools.command()
@_config
@click.argument("name")
@click.argument("arguments", nargs=-1)
@click.option("--create-kwargs", metavar="JSON", help='Of the row, for create; for example {"ground_truth": "72"}.')
@click.option("--execute-kwargs", metavar="JSON", help="Of the row, for each call.")
@click.option("--calc-reward-kwargs", metavar="JSON", help="Of the row, for calc_reward.")
@click.option("--release-kwargs", metavar="JSON", help="Of the row, for release.")
@click.option("--at-once", is_flag=True, help="Run the calls at the same time, as those of one turn.")
@click.option("--json", "as_json", is_flag=True, help="One JSON object on stdout instead of text.")
@_plugin
def call(
    config: str,
    name: str,
    arguments: tuple[str, ...],
    at_once: bool,
    as_json: bool,
    plugins: tuple[str, ...],
    **given: str | None,
) -> int:
    """Run the tool NAME of CONFIG: create, one call for each of ARGUMENTS, calc_reward, release.

    ARGUMENTS are key=value words of one call, or a JSON object for each call, sent as a model would send it; @FILE reads
    one from a file. Without any, the tool is created, scored and released. Exit status: 0 answered, 1 refused or failed, 3
    infrastructure broke, 2 wrong usage.

    \b
    Examples:
      etude tools call calculator calculator expression="6 * 7"
      etude tools call calculator calculator '{"expression": "6 * 7"}' '{"expression": "1 / 0"}'
    """
    kwargs = {key: _mapping(text, f"--{key.replace('_', '-')}") for key, text in given.items() if text is not None}
    tool = _find_tool(_load(config, plugins), name)
    texts = _texts(tool, arguments)
    try:
        report = asyncio.run(_run(tool, texts, kwargs, at_once=at_once, aloud=not as_json))
    except InfrastructureError as error:
        if as_json:
            click.echo(json.dumps({"error": "infrastructure", "message": one_line(error)}, ensure_ascii=False))
        click.secho(f"infrastructure: {one_line(error)}", fg="red", err=True)
        return BROKEN
    if as_json:
        click.echo(json.dumps(report, indent=2, ensure_ascii=False, default=str))
    return REFUSED if any(each["error"] for each in report["calls"]) else 0


@tools.command()
@_config
@click.option(
    "--transport",
    type=click.Choice(["stdio", "streamable-http"]),
    default="stdio",
    show_default=True,
    help="stdio serves the one client that started this process; streamable-http any number.",
)
@listening(8000, only="streamable-http")
@click.option("--path", default="/mcp", show_default=True, help="Path of the endpoint (streamable-http).")
@click.option(
    "--tools-kwargs",
    metavar="JSON",
    help='As a row\'s, the same for every client: {"NAME": {"create_kwargs": {…}}}; @FILE reads it from a file.',
)
@_plugin
def serve(
    config: str,
    transport: str,
    host: str,
    port: int,
    allow_hosts: tuple[str, ...],
    path: str,
    tools_kwargs: str | None,
    plugins: tuple[str, ...],
) -> None:
    """Serve the tools of CONFIG to MCP clients.

    Each client has its own instances of the tools; they are released when it leaves. Press Ctrl-C to stop.

    \b
    Examples:
      etude tools serve tools.yaml
      etude tools serve tools.yaml --transport streamable-http --port 8000
    """
    kwargs = {} if tools_kwargs is None else _mapping(tools_kwargs, "--tools-kwargs")
    serve_mcp(_load(config, plugins), kwargs, transport, host, port, path, allow_hosts)


def serve_mcp(
    tools: list[BaseTool],
    tools_kwargs: dict[str, Any],
    transport: str,
    host: str,
    port: int,
    path: str,
    allow_hosts: Sequence[str],
) -> None:
    """Serves `tools` to MCP clients over `transport`, until the stdio client disconnects or a signal arrives.

    Raises:
        ConfigError: the path or the address is invalid, or given for stdio, which has none.
    """
    source = click.get_current_context().get_parameter_source
    given = [name for name in ("host", "port", "allow_hosts", "path") if source(name) is ParameterSource.COMMANDLINE]
    if transport == "stdio" and given:
        option = given[0].replace("allow_hosts", "allow-host")
        raise ConfigError(f"--{option} needs --transport streamable-http: stdio has no address")
    if not path.startswith("/"):
        raise ConfigError(f"--path must begin with '/', not '{path}'")
    from etude.tools.server import ToolServer

    server = ToolServer(tools, tools_kwargs)
    if transport == "stdio":
        if sys.stdin.isatty():
            click.echo("waiting for an MCP client on stdin; this command is normally started by one", err=True)
        asyncio.run(_until_terminated(server.serve_stdio()))
        return
    from etude.serving.listening import listen

    with listen(host, port) as listener:
        click.echo(f"serving on http://{host}:{listener.getsockname()[1]}{path} (Ctrl-C stops)", err=True)
        asyncio.run(server.serve_http(listener, path=path, host=host, allow_hosts=allow_hosts))


async def _until_terminated(work: Coroutine[Any, Any, None]) -> None:
    """Awaits `work`. SIGTERM cancels it, so that tools are released, and the process then exits with status 143."""
    task = asyncio.ensure_future(work)
    terminated = asyncio.Event()

    def terminate() -> None:
        terminated.set()
        task.cancel()

    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, terminate)
    try:
        await task
    except asyncio.CancelledError:
        if not terminated.is_set():
            raise
        raise SystemExit(128 + signal.SIGTERM) from None


def _load(config: str, plugins: Sequence[str]) -> list[BaseTool]:
    from etude.registry import load_plugins
    from etude.tools import builtin_config, load_tools
    from etude.tools.builtin import builtin_names

    load_plugins(plugins)
    if not Path(config).is_file() and config in builtin_names():
        return load_tools(builtin_config(config))
    if not Path(config).exists() and "/" not in config and "." not in config:
        raise ConfigError(f"no file and no built-in tool '{config}' (built in: {', '.join(builtin_names())})")
    return load_tools(config)


def _find_tool(loaded: Sequence[BaseTool], name: str) -> BaseTool:
    for tool in loaded:
        if tool.name == name:
            return tool
    names = [tool.name for tool in loaded]
    raise ConfigError(f"no tool '{name}'{did_you_mean(name, names)} (configured: {', '.join(names)})")


def _class_of(tool: BaseTool) -> str:
    from etude.tools import FunctionTool

    code: Any = tool if isinstance(tool, FunctionTool) else type(tool)
    file = getattr(sys.modules.get(code.__module__), "__file__", None)
    if code.__module__.startswith(USER_MODULE) and file:  # in the form that a configuration uses
        return f"{os.path.relpath(file)}:{code.__qualname__}"
    return f"{code.__module__}.{code.__qualname__}"


def _texts(tool: BaseTool, given: Sequence[str]) -> list[str]:
    """Returns the arguments of each call as a model would write them."""
    from etude.testing.play import read_arguments

    if not given or all(each.lstrip()[:1] in ("{", "@") for each in given):
        return [_text(each) for each in given]
    schema = tool.get_openai_tool_schema().to_openai()
    if (arguments := read_arguments(given, schema)) is None:
        names = schema["function"]["parameters"].get("properties") or ()
        words = " ".join(f"{each}=VALUE" for each in names)
        raise DataError(
            f"arguments of '{tool.name}': write JSON objects, or key=value{f', here {words}' if names else ''}"
        )
    return [json.dumps(arguments, ensure_ascii=False)]


def _text(given: str) -> str:
    """Returns `given`, or for `@FILE` the content of the file."""
    if not given.startswith("@"):
        return given
    path = Path(given[1:])
    try:
        if path.stat().st_size > _MAX_JSON_BYTES:
            raise DataError(f"{path}: larger than {_MAX_JSON_BYTES} bytes")
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"{path}: cannot be read: {one_line(error)}") from error


def _mapping(given: str, option: str) -> dict[str, Any]:
    try:
        value = json.loads(_text(given))
    except (ValueError, RecursionError) as error:
        raise DataError(f"{option}: not valid JSON: {one_line(error)}") from error
    if not isinstance(value, dict):
        raise DataError(f"{option}: expected a JSON object, not {type(value).__name__}")
    return value


async def _run(
    tool: BaseTool, texts: Sequence[str], kwargs: dict[str, Any], *, at_once: bool, aloud: bool
) -> dict[str, Any]:
    """Runs the whole lifecycle of a tool instance and returns a report; prints each step if `aloud`."""
    from etude.schemas import FunctionCall
    from etude.tools import ToolSession

    say: Callable[[str], None] = click.echo if aloud else lambda text: None
    calls = [FunctionCall(name=tool.name, arguments=text) for text in texts]
    report: dict[str, Any] = {"tool": tool.name, "initial": [], "calls": [], "reward": None}
    async with ToolSession({tool.name: tool}, {tool.name: kwargs}, request_id="by-hand") as session:
        for response in session.initial_responses:
            report["initial"].append(_response_record(response))
            say(f"create     {_response_record(response)['text']}")
        turns = [calls] if at_once and calls else [[each] for each in calls]
        for turn, together in enumerate(turns):
            for outcome in await session.execute(together, turn):
                report["calls"].append(_outcome_record(outcome))
                say(_format_outcome(outcome))
        report["reward"] = (await session.calc_rewards()).get(tool.name)
        say(f"reward     {report['reward']:g}")
    return report


def _response_record(response: Any) -> dict[str, Any]:
    media = {kind: len(items) for kind in ("image", "video") if (items := getattr(response, kind))}
    return {"text": response.text or "", **media}


def _outcome_record(outcome: ToolCall) -> dict[str, Any]:
    return {
        "arguments": outcome.requested.arguments,
        "response": _response_record(outcome.response),
        "reward": outcome.reward,
        "metrics": dict(outcome.metrics),
        "seconds": round(outcome.seconds, 6),
        "error": outcome.error,
    }


def _format_outcome(outcome: ToolCall) -> str:
    shown = _response_record(outcome.response)
    media = "".join(f" [{count} {kind}]" for kind, count in shown.items() if kind != "text")
    error = f" ({outcome.error})" if outcome.error else ""
    metrics = f" {json.dumps(dict(outcome.metrics), default=str)}" if outcome.metrics else ""
    measured = f"step reward {outcome.reward:g}, {outcome.seconds:.3f} s{metrics}"
    return f"call       {shown['text']}{media}{error}\n           {measured}"
