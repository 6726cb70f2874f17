"""Servers that speak what was recorded of other packages' servers: OpenEnv 0.10.0 (WebSocket) and NeMo Gym 0.4.0 (HTTP)."""

import asyncio
import json
import random
import threading

import aiohttp
from aiohttp import web

METADATA = {"additionalProperties": True, "title": "Metadata", "type": "object"}
GUESS = {"properties": {"metadata": METADATA, "number": {"title": "Number", "type": "integer"}}, "required": ["number"]}
CALL = {
    "properties": {
        "metadata": METADATA,
        "type": {"const": "call_tool", "default": "call_tool", "type": "string"},
        "tool_name": {"title": "Tool Name", "type": "string"},
        "arguments": {"additionalProperties": True, "type": "object"},
    },
    "required": ["tool_name"],
}
ADD = {
    "name": "add",
    "description": "Adds k to the number.",
    "inputSchema": {"properties": {"k": {"type": "integer"}}, "required": ["k"], "type": "object"},
}


class Served:
    """An aiohttp application in a thread; `url` is where it listens."""

    def __init__(self, *routes):
        self.app = web.Application()
        self.app.add_routes(routes)
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()
        self._runner = web.AppRunner(self.app, shutdown_timeout=0.1)
        self.url = self._run(self._start())

    def _run(self, work):
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(10)

    async def _start(self):
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", 0)
        await site.start()
        return f"http://127.0.0.1:{self._runner.addresses[0][1]}"

    def stop(self):
        """Ends it, and every connection."""
        if self._thread.is_alive():
            self._run(self._runner.cleanup())
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join()
            self._loop.close()

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.stop()


class OpenEnv(Served):
    """`tools`: a counter with the tool `add`; otherwise a game in which a number is guessed, and 13 breaks it."""

    def __init__(self, tools=False, capacity=64):
        self.tools, self.capacity, self.sessions, self.most = tools, capacity, 0, 0
        super().__init__(
            web.get("/schema", self._schema), web.get("/metadata", self._metadata), web.get("/ws", self._play)
        )

    async def _schema(self, request):
        return web.json_response({"action": CALL if self.tools else GUESS, "observation": {}, "state": {}})

    async def _metadata(self, request):
        return web.json_response({"name": "Peer", "description": "Peer environment", "version": "1.0.0"})

    async def _play(self, request):
        socket = web.WebSocketResponse()
        await socket.prepare(request)
        if self.sessions >= self.capacity:
            full = (
                f"Server at capacity: {self.sessions}/{self.capacity} sessions active. Cannot accept new connections."
            )
            await socket.send_json({"type": "error", "data": {"message": full, "code": "CAPACITY_REACHED"}})
            await socket.close()
            return socket
        self.sessions += 1
        self.most = max(self.most, self.sessions)
        state = {"number": 0}
        try:
            async for message in socket:
                if message.type == aiohttp.WSMsgType.TEXT:
                    asked = json.loads(message.data)
                    kind, data = getattr(self, f"_{asked['type']}")(asked.get("data"), state)
                    await socket.send_json({"type": kind, "data": data})
        finally:
            self.sessions -= 1
        return socket

    def _reset(self, data, state):
        state["goal"] = random.Random(data["seed"]).randint(2, 9)
        text = f"Count to {state['goal']}." if self.tools else f"Guess a number {data.get('hint', '')}."
        seen = {"metadata": {"message": text}} if self.tools else {"metadata": {}, "text": text}
        return "observation", {"observation": seen, "reward": 0.0, "done": False}

    def _mcp(self, data, state):
        answer = {"jsonrpc": "2.0", "id": data["id"]}
        if self.tools:
            return "mcp", answer | {"result": {"tools": [ADD]}}
        return "mcp", answer | {"error": {"code": -32603, "message": "Environment does not support MCP", "data": None}}

    def _step(self, data, state):
        return self._call(data, state) if self.tools else self._guess(data, state)

    def _guess(self, data, state):
        if not isinstance(data.get("number"), int):
            fault = {"type": "int_parsing", "loc": ["number"], "msg": "Input should be a valid integer", "input": None}
            return "error", {"message": "Invalid message", "code": "VALIDATION_ERROR", "errors": [fault]}
        if data["number"] == 13:
            return "error", {"message": "unlucky", "code": "EXECUTION_ERROR"}
        won = data["number"] == state["goal"]
        seen = {"metadata": {}, "text": "lower" if data["number"] > state["goal"] else "higher"}
        return "observation", {"observation": seen, "reward": float(won), "done": won}

    def _call(self, data, state):
        seen = {"metadata": {}, "tool_name": data["tool_name"], "result": None, "error": None}
        k = data["arguments"].get("k")
        if data["tool_name"] != "add":
            seen["error"] = {"error_type": "tool_not_found", "message": f"Unknown tool: '{data['tool_name']}'"}
        elif not isinstance(k, int):
            seen["error"] = {"error_type": "timeout", "message": "Tool 'add' timed out after 30 seconds"}
        elif k < 0:
            seen["error"] = {"error_type": "execution_error", "message": "Error calling tool 'add': only upwards"}
        else:
            state["number"] += k
            text = str(state["number"])
            content = [{"type": "text", "text": text, "annotations": None, "meta": None}]
            seen["result"] = {"content": content, "structured_content": {"result": text}, "is_error": False}
        won = state["number"] == state["goal"]
        return "observation", {"observation": seen, "reward": float(won), "done": state["number"] >= state["goal"]}


class NemoGym(Served):
    """`example_session_state_mgmt` of NeMo Gym, a counter a session, which a cookie names. `mcp`: its tools are MCP's."""

    def __init__(self, mcp=False):
        self.mcp, self.counters, self.verified = mcp, {}, []
        paths = ("seed_session", "verify", "increment_counter", "get_counter_value", "mcp")
        routes = [web.post(f"/{path}", getattr(self, f"_{path}")) for path in paths]
        super().__init__(web.get("/openapi.json", self._openapi), *routes)

    async def _openapi(self, request):
        return web.json_response({"openapi": "3.1.0", "paths": {"/seed_session": {}, "/verify": {}}})

    async def _seed_session(self, request):
        key = f"session-{len(self.counters)}"
        self.counters[key] = (await request.json())["initial_count"]
        headers = {"X-NeMo-Gym-Session-Token": key}
        seeded = {"mcp": {"server_name": "peer", "url_path": "/mcp", "transport": "http", "headers": headers}}
        answer = web.json_response(seeded if self.mcp else {})
        answer.set_cookie("peer", key, httponly=True, samesite="lax")
        return answer

    async def _increment_counter(self, request):
        count = (await request.json()).get("count")
        if count == 13:
            raise web.HTTPInternalServerError
        if not isinstance(count, int):
            fault = {"type": "int_parsing", "loc": ["body", "count"], "msg": "Input should be a valid integer"}
            return web.json_response({"detail": [fault]}, status=422)
        self.counters[request.cookies["peer"]] += count
        return web.json_response({"success": True})

    async def _get_counter_value(self, request):
        return web.json_response({"count": self.counters[request.cookies["peer"]]})

    async def _mcp(self, request):
        asked, key = await request.json(), request.headers["X-NeMo-Gym-Session-Token"]
        result = {"tools": [ADD]}
        if asked["method"] == "tools/call":
            k = asked["params"]["arguments"].get("k")
            self.counters[key] += k or 0
            text = "Field required" if k is None else str(self.counters[key])
            result = {"content": [{"type": "text", "text": text}], "isError": k is None}
        return web.json_response({"jsonrpc": "2.0", "id": asked["id"], "result": result})

    async def _verify(self, request):
        body = await request.json()
        self.verified.append(body["response"]["output"])
        right = self.counters[request.cookies["peer"]] == body["expected_count"]
        return web.json_response({**body, "reward": float(right), "seen": True})


def nemo_row(first, expected):
    """A row of the data of that server."""
    integer = {"type": "object", "properties": {"count": {"type": "integer"}}, "required": ["count"]}
    tools = [
        {"type": "function", "name": "increment_counter", "parameters": integer, "strict": True, "description": ""},
        {"type": "function", "name": "get_counter_value", "parameters": {"type": "object"}, "strict": True},
    ]
    asked = {"input": [{"role": "developer", "content": "Count."}, {"role": "user", "content": f"to {expected}"}]}
    return {"responses_create_params": asked | {"tools": tools}, "expected_count": expected, "initial_count": first}
