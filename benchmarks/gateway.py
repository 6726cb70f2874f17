"""What a request costs through the gateway, in CPU time, over asking the engine alone.

    python benchmarks/gateway.py [--trajectories 64] [--turns 4] [--repeats 5]

The same conversations are held in four ways, in turns within one process on one thread, and medians are compared. `engine`
renders each new message and asks a `TrajectoryClient`, as an agent loop does; `session` asks a `GatewaySession`, which has
to find the conversation again and to read the answer; `http` does so over HTTP with a plain client (aiohttp); `openai`
with the real `openai` client. Both ends of HTTP run in this process, so its figures are those of client and server
together. The engine is scripted and answers at once: nothing but CPU time passes, and what the policy itself would take
comes on top of every row alike.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import json
import statistics
import time
from collections.abc import Awaitable, Callable
from typing import Any

import aiohttp

from etude.agents import AgentContext, RolloutOptions, TrajectoryClient
from etude.agents.gateway import GatewaySession, chat_api
from etude.agents.gateway.agent import Clients
from etude.agents.gateway.local import LocalGateway
from etude.chat import ChatTemplate, ToolParser
from etude.inference import SamplingParams, ScriptedEngine
from etude.models import build_tiny_tokenizer

ANSWER = "The answer is 5, which is what comes of 2 and 3. " * 3
TOKENIZER = build_tiny_tokenizer([ANSWER, "What is 2 + 3? And what comes next?"] * 4, 512)
CHAT = ChatTemplate(TOKENIZER)
CONTEXT = AgentContext(
    config=None,
    options=RolloutOptions(prompt_length=512, response_length=8192),
    tokenizer=TOKENIZER,
    chat=CHAT,
    parser=ToolParser.get_tool_parser("hermes", TOKENIZER),
)
IDS = [*TOKENIZER.encode(ANSWER, add_special_tokens=False), CHAT.end_of_turn_id]
PARAMS = SamplingParams(max_tokens=512, stop_token_ids=CHAT.stop_token_ids)


def question(number: int, turn: int) -> dict[str, Any]:
    """A user message."""
    return {"role": "user", "content": f"What is {number} + {turn}? And what comes next?"}


async def engine_alone(number: int, turns: int, client: TrajectoryClient) -> None:
    """Calls the engine as an agent loop does."""
    ids = CHAT.initial_ids([question(number, 0)])
    for turn in range(turns):
        if turn:
            for run, _ in CHAT.context_ids([question(number, turn)], after=ids[-1:]):
                ids += run
        ids += (await client.generate(prompt_ids=ids, sampling_params=PARAMS)).token_ids


Ask = Callable[[list[dict[str, Any]]], Awaitable[dict[str, Any]]]


async def conversation(number: int, turns: int, ask: Ask) -> None:
    """Holds a conversation as an agent that sends its whole history each time."""
    messages: list[dict[str, Any]] = []
    for turn in range(turns):
        messages.append(question(number, turn))
        messages.append(await ask(messages))


async def through_session(number: int, turns: int, client: TrajectoryClient) -> None:
    """Goes through the session, without HTTP."""
    session = GatewaySession(f"s{number}", client, CONTEXT, PARAMS)

    async def ask(messages: list[dict[str, Any]]) -> dict[str, Any]:
        completion = await session.complete(session.read(json.dumps({"messages": messages}).encode(), chat_api.CHAT))
        return chat_api.CHAT.answer(completion, TOKENIZER)["choices"][0]["message"]

    await conversation(number, turns, ask)


async def through_http(number: int, turns: int, client: TrajectoryClient) -> None:
    """Uses a plain HTTP client."""
    session = GatewaySession(f"s{number}", client, CONTEXT, PARAMS)
    async with LocalGateway.here().opened(session, TOKENIZER) as (url, key):
        headers = {"Authorization": f"Bearer {key}"}
        async with aiohttp.ClientSession(headers=headers) as http:

            async def ask(messages: list[dict[str, Any]]) -> dict[str, Any]:
                async with http.post(f"{url}/chat/completions", json={"messages": messages}) as response:
                    return json.loads(await response.read())["choices"][0]["message"]

            await conversation(number, turns, ask)


async def through_openai(number: int, turns: int, client: TrajectoryClient) -> None:
    """Uses the OpenAI client, which most agents are written with."""
    session = GatewaySession(f"s{number}", client, CONTEXT, PARAMS)
    async with LocalGateway.here().opened(session, TOKENIZER) as (url, key):
        openai = Clients.here().asynchronous.copy(base_url=url, api_key=key)

        async def ask(messages: list[dict[str, Any]]) -> dict[str, Any]:
            made = await openai.chat.completions.create(model="policy", messages=messages)  # type: ignore[arg-type]
            return made.choices[0].message.model_dump(exclude_none=True)

        await conversation(number, turns, ask)


WAYS = {"engine": engine_alone, "session": through_session, "http": through_http, "openai": through_openai}


def measured(way: Callable[..., Awaitable[None]], trajectories: int, turns: int) -> tuple[float, float]:
    """Returns (CPU seconds, wall seconds) of this process for all conversations at once."""

    async def all_of_them() -> tuple[float, float]:
        engine = ScriptedEngine(lambda *_: list(IDS))
        clients = [TrajectoryClient(engine, f"t{n}") for n in range(trajectories)]
        gc.collect()
        cpu, wall = time.process_time(), time.perf_counter()
        await asyncio.gather(*(way(n, turns, client) for n, client in enumerate(clients)))
        return time.process_time() - cpu, time.perf_counter() - wall

    return asyncio.run(all_of_them())


def main() -> None:
    """Prints a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trajectories", type=int, default=64)
    parser.add_argument("--turns", type=int, default=4)
    parser.add_argument("--repeats", type=int, default=5)
    options = parser.parse_args()
    requests = options.trajectories * options.turns
    found: dict[str, list[tuple[float, float]]] = {name: [] for name in WAYS}
    for repeat in range(options.repeats + 1):
        for name, way in WAYS.items():
            figures = measured(way, options.trajectories, options.turns)
            if repeat:  # the first round warms up
                found[name].append(figures)
    print(
        f"{options.trajectories} conversations at once x {options.turns} turns of {len(IDS)} sampled tokens, "
        f"medians of {options.repeats}, ms a request"
    )
    print(f"{'way':<10}{'CPU':>10}{'over engine':>14}{'wall':>10}")
    base = statistics.median(cpu for cpu, _ in found["engine"])
    for name, figures in found.items():
        cpu, wall = (statistics.median(column) for column in zip(*figures))
        print(
            f"{name:<10}{1000 * cpu / requests:>10.3f}{1000 * (cpu - base) / requests:>14.3f}{1000 * wall / requests:>10.3f}"
        )


if __name__ == "__main__":
    main()
