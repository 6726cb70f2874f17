"""`openenv:URL`: a server of OpenEnv, over its WebSocket, one connection a session; none of its packages is needed here.

Arguments: `shows` (the fields of an observation that the model sees; default: all that are not empty). A server with MCP
tools gives the model these. Otherwise each turn is an action: text or a number where the action has one field of that type,
else a JSON object. A task goes to the server's `reset`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import aiohttp

from etude.environments.adapters.servers import as_text, fetch_json, json_object, openai_schema, reading
from etude.environments.base import Environment, EnvironmentFull, InvalidAction, Step
from etude.errors import InfrastructureError
from etude.rewards.finite import as_flag, as_reward

_LARGEST = 100 * 2**20  # bytes of a message
_TOLD = ("execution_error", "invalid_args", "tool_not_found")  # of a call; the other errors are not the model's
_NOT_SEEN = ("metadata", "tool_name", "result", "error")
_READ: Mapping[str, tuple[str, Callable[[str], Any]]] = {
    "string": (r".+", str),
    "integer": (r"-?\d+", int),
    "number": (r"-?\d+(?:\.\d+)?", float),
    "object": (r"\{.*\}", json.loads),
}
"""Type of an action, or of its only field → where it stands in a text, and what reads it."""


class Session(Environment):
    """One session of the server; its rewards are those of its steps, and 0 without any."""

    def __init__(self, url: str, action: Mapping[str, Any], shows: Sequence[str]) -> None:
        fields = {key: value for key, value in action.get("properties", {}).items() if key != "metadata"}
        [(name, schema), *others] = [*fields.items()] or [("", {})]
        self._field = "" if others or schema.get("type") not in _READ else name
        self._type = schema["type"] if self._field else "object"
        named = f"{name} ({self._type})" if self._field else f"an action as a JSON object of {json.dumps(fields)}"
        self._rule = f"Each turn, write {named}."
        self._url, self._shows = url, shows
        self._steps_call = not fields or "tool_name" in fields  # its steps take calls, and may reward them
        self._http: aiohttp.ClientSession | None = None
        self._acted = False

    async def reset(self, task: Mapping[str, Any], seed: int) -> Step:
        """Connects, and resets with the task and the seed.

        Raises:
            EnvironmentFull: the server has as many sessions as it may.
        """
        if self._http is not None:  # of a try that found the server full
            await self._http.close()
        self._http = aiohttp.ClientSession()
        self._socket = await self._http.ws_connect(f"{self._url}/ws", max_msg_size=_LARGEST)
        first = await self._ask("reset", {"seed": seed, **task})
        with reading(f"{self._url}: tools/list"):
            listed = await self._request("tools/list", {})
            if "error" in listed and self._steps_call:
                raise InfrastructureError(f"{self._url}: tools/list: {listed['error'].get('message')}")
            tools = [openai_schema(each) for each in listed.get("result", {}).get("tools", ())]
        shown = [self._say(first["observation"]), "" if tools else self._rule]
        return Step("\n".join(filter(None, shown)), done=first["done"], tools=tools)

    async def step(self, text: str) -> Step:
        """Acts with the text. Where steps are calls, it is an answer, and ends the episode.

        Raises:
            InvalidAction: it is no action.
        """
        if self._steps_call:
            return Step(done=True)
        pattern, read = _READ[self._type]
        found = re.findall(pattern, text.rpartition("</think>")[2], re.DOTALL)
        try:
            action = read(found[-1].strip())
            json.dumps(action, allow_nan=False)  # other than a server can read
        except (IndexError, ValueError, RecursionError):
            raise InvalidAction(self._rule) from None
        return self._acts(await self._ask("step", {self._field: action} if self._field else action))

    async def call_tool(self, name: str, arguments: Mapping[str, Any]) -> Any:
        """Calls a tool in a step; of a server whose steps are something else, beside them and without a reward.

        Raises:
            InvalidAction: the tool refused the call.
        """
        if not self._steps_call:
            answer = await self._request("tools/call", {"name": name, "arguments": dict(arguments)})
            with reading(f"{self._url}: {name}"):
                if "error" in answer:
                    raise InvalidAction(str(answer["error"].get("message")))
                return as_text(answer["result"])
        found = await self._ask("step", {"type": "call_tool", "tool_name": name, "arguments": dict(arguments)})
        with reading(f"{self._url}: {name}"):
            step = self._acts(found, as_text(found["observation"].get("result")))
            if (error := found["observation"].get("error")) and error.get("error_type") not in _TOLD:
                raise InfrastructureError(f"{self._url}: {name}: {error.get('message')}")
            if error and not step.done:
                raise InvalidAction(str(error.get("message")), step.reward)
            return step

    def score(self) -> float | None:
        """Returns 0.0 for an episode without an action; otherwise its steps' rewards are all."""
        return None if self._acted else 0.0

    async def close(self) -> None:
        """Ends the connection, and thereby the session."""
        if self._http is not None:
            await self._http.close()

    async def _ask(self, kind: str, data: Mapping[str, Any]) -> dict[str, Any]:
        await self._socket.send_json({"type": kind, "data": data})
        message = await self._socket.receive()
        if message.type != aiohttp.WSMsgType.TEXT:
            raise InfrastructureError(f"{self._url}: the connection was lost")
        answer = json_object(self._url, message.data)
        with reading(f"{self._url}: {kind}"):
            found: dict[str, Any] = answer["data"]
            if answer["type"] != "error":
                if kind != "mcp":
                    if answer["type"] != "observation":
                        raise TypeError(f"it is of the type {answer['type']!r:.40}")
                    as_flag(found["done"])
                    as_reward(found["reward"], self._url)
                    self._say(found["observation"])
                return found
            if found["code"] == "VALIDATION_ERROR" and kind == "step":
                raise InvalidAction("; ".join(f"{'.'.join(map(str, e['loc']))}: {e['msg']}" for e in found["errors"]))
            failed = EnvironmentFull if found["code"] == "CAPACITY_REACHED" else InfrastructureError
            raise failed(f"{self._url}: {kind}: {found['message']}")

    async def _request(self, method: str, params: Mapping[str, Any]) -> dict[str, Any]:
        return await self._ask("mcp", {"jsonrpc": "2.0", "method": method, "params": params, "id": 1})

    def _acts(self, found: Mapping[str, Any], result: str = "") -> Step:
        self._acted = True
        shown = filter(None, [result, self._say(found["observation"])])
        return Step("\n".join(shown), found["reward"], found["done"])

    def _say(self, observation: Mapping[str, Any]) -> str:
        fields = {**observation.get("metadata", {}), **{k: v for k, v in observation.items() if k not in _NOT_SEEN}}
        seen = {k: v for k, v in fields.items() if (k in self._shows if self._shows else v not in (None, "", [], {}))}
        texts = [each if isinstance(each, str) else json.dumps(each) for each in seen.values()]
        return texts[0] if len(texts) == 1 else "\n".join(f"{key}: {text}" for key, text in zip(seen, texts))


def open_environment(url: str, *, shows: Sequence[str] = ()) -> tuple[partial[Session], str]:
    """Also returns the server's version; raises ConfigError if no server of OpenEnv answers there."""
    url = re.sub(r"^ws", "http", url).rstrip("/")
    schema, about = (fetch_json("openenv", f"{url}/{each}") for each in ("schema", "metadata"))
    return partial(Session, url, schema["action"], shows), f"{about['name']} {about.get('version') or ''}"
