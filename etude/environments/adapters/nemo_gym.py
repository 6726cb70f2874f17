"""`nemo_gym:URL`: a resources server of NeMo Gym, over HTTP: `seed_session`, its tools, `verify`; no package is needed here.

Arguments: `dataset` (the server's JSON lines; a row is a task) and `val_dataset`. What the model sees and its tools are the
row's `responses_create_params`, or the server's MCP tools. A turn without a call is the answer, which `verify` scores.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from functools import partial
from typing import Any

import aiohttp

from etude.environments.adapters.servers import as_text, fetch_json, json_object, openai_schema, reading
from etude.environments.base import Environment, InvalidAction, Step
from etude.errors import ConfigError, InfrastructureError
from etude.jsonl import read_json_lines
from etude.rewards.finite import as_reward

_JSON = {"Accept": "application/json, text/event-stream"}


class Session(Environment):
    """One session of the server, kept by its cookie. A turn that a limit cut is not part of what is verified."""

    def __init__(self, url: str, rows: Mapping[str, Iterable[Mapping[str, Any]]]) -> None:
        self._url, self._rows = url, rows
        self._http: aiohttp.ClientSession | None = None
        self._mcp: Mapping[str, Any] | None = None
        self._output: list[dict[str, Any]] = []

    def tasks(self, split: str) -> Iterable[Mapping[str, Any]]:
        """The rows of `dataset` or `val_dataset`."""
        return self._rows.get(split, ())

    async def reset(self, task: Mapping[str, Any], seed: int) -> Step:
        """Seeds a session with the row."""
        self._row = task
        any_address = aiohttp.CookieJar(unsafe=True)  # without a name, too
        self._http = aiohttp.ClientSession(cookie_jar=any_address)
        self._mcp = (await self._post("seed_session", task)).get("mcp")
        params = task["responses_create_params"]
        tools = params.get("tools") or ()
        if self._mcp is not None:
            tools = (await self._request("tools/list", {})).get("tools")
        with reading(f"{self._url}: tools/list"):
            shown = [openai_schema(each) for each in tools]
        return Step(_messages(params["input"]), tools=shown)

    async def call_tool(self, name: str, arguments: Mapping[str, Any]) -> str:
        """Raises InvalidAction if the server refused the call."""
        call = {"call_id": f"call_{len(self._output)}", "type": "function_call", "name": name}
        self._output.append(call | {"arguments": json.dumps(arguments)})
        refused = False
        if self._mcp is not None:
            result = await self._request("tools/call", {"name": name, "arguments": arguments})
            with reading(f"{self._url}: {name}"):
                text, refused = as_text(result), bool(result.get("isError"))
        else:
            try:
                text = json.dumps(await self._post(name, arguments))
            except InvalidAction as error:
                text, refused = str(error), True
        self._output.append({"call_id": call["call_id"], "type": "function_call_output", "output": text})
        if refused:
            raise InvalidAction(text)
        return text

    def step(self, text: str) -> Step:
        """Takes the answer, which ends the episode."""
        content = [{"type": "output_text", "text": text.rpartition("</think>")[2].strip(), "annotations": []}]
        message = {"id": "msg", "type": "message", "role": "assistant", "status": "completed", "content": content}
        self._output.append(message)
        return Step(done=True)

    async def score(self) -> dict[str, Any]:
        """Returns the reward of `verify`, and the other numbers of its answer.

        Raises:
            InfrastructureError: `verify` gave no reward, or none that is a finite number.
        """
        params = self._row["responses_create_params"]
        response = {"id": "resp", "created_at": 0, "model": "policy", "object": "response", "status": "completed"}
        response |= {"parallel_tool_calls": True, "tool_choice": "auto", "tools": params.get("tools") or []}
        found = await self._post("verify", {**self._row, "response": response | {"output": self._output}})
        own = {key: value for key, value in found.items() if isinstance(value, int | float) and key not in self._row}
        own.pop("reward", None)
        if (reward := found.get("reward")) is None:
            raise InfrastructureError(f"{self._url}: verify gave no reward")
        return own | {"score": as_reward(reward, f"{self._url}: verify")}

    async def close(self) -> None:
        """Ends the connections; the server has no way to end a session."""
        if self._http is not None:
            await self._http.close()

    async def _post(self, path: str, body: Mapping[str, Any], headers: Mapping[str, str] = _JSON) -> dict[str, Any]:
        assert self._http is not None
        async with self._http.post(f"{self._url}/{path}", json=body, headers=headers) as answer:
            if answer.status in (400, 404, 422) and path not in ("seed_session", "verify"):
                raise InvalidAction(await answer.text())
            answer.raise_for_status()
            return json_object(self._url, await answer.text())

    async def _request(self, method: str, params: Mapping[str, Any]) -> dict[str, Any]:
        assert self._mcp is not None
        asked = {"jsonrpc": "2.0", "id": 1, "method": method, "params": params}
        with reading(f"{self._url}: {method}"):
            answer = await self._post(self._mcp["url_path"].strip("/"), asked, {**_JSON, **self._mcp["headers"]})
            if "error" in answer:
                raise InvalidAction(str(answer["error"].get("message")))
            return dict(answer["result"])


def _messages(given: Any) -> list[dict[str, Any]]:
    """The input of the Responses API as messages.

    Raises:
        ConfigError: it has more than texts of users and the system.
    """
    messages, items = list[dict[str, Any]](), [{"role": "user", "content": given}] if isinstance(given, str) else given
    for item in items:
        role: Any = "system" if item.get("role") == "developer" else item.get("role")
        content: Any = item.get("content")
        parts = content if isinstance(content, list) else [{"type": "input_text", "text": content}]
        if role not in ("user", "system") or any(part.get("type") != "input_text" for part in parts):
            raise ConfigError(f"its input has more than texts of users and the system: {item!r:.120}")
        messages.append({"role": role, "content": "".join(part["text"] for part in parts)})
    return messages


def open_environment(url: str, *, dataset: str | None = None, val_dataset: str | None = None) -> partial[Session]:
    """See the package.

    Raises:
        ConfigError: no resources server answers there, or a row cannot be shown.
        DataError: a file is no JSON lines.
    """
    url, rows = url.rstrip("/"), dict[str, list[dict[str, Any]]]()
    if "/verify" not in fetch_json("nemo_gym", f"{url}/openapi.json").get("paths", {}):
        raise ConfigError(f"nemo_gym:{url}: is no resources server: it has no /verify")
    for split, path in (("train", dataset), ("val", val_dataset)):
        for number, row in read_json_lines(path) if path else ():
            try:
                _messages(row["responses_create_params"]["input"])
            except (ConfigError, LookupError) as error:
                raise ConfigError(f"{path}: line {number}: {error}", fix="leave it out") from error
            rows.setdefault(split, []).append(row)
    return partial(Session, url, rows)
