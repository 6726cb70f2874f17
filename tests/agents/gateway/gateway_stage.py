"""The stage of the gateway's tests: sessions over a scripted or a real engine, served on a port and asked by the real
`openai` clients."""

import asyncio
import json
from contextlib import asynccontextmanager
from dataclasses import replace
from types import SimpleNamespace

import aiohttp
import openai
from agents_stage import CHAT, QUESTION, SAMPLING, TOKENIZER, Recorder, context, says

from etude.agents import AgentLoopManager, TrajectoryClient
from etude.agents.gateway import GatewaySession
from etude.agents.gateway.local import LocalGateway
from etude.agents.gateway.request import read_request
from etude.inference import NativeEngine, NativeEngineOptions, SamplingParams
from etude.models import TinyModelSpec, build_tiny_model

USER = {"role": "user", "content": "What is 2 + 3?"}
ECHO = {
    "type": "function",
    "function": {
        "name": "echo",
        "description": "Repeats a text.",
        "parameters": {"type": "object", "properties": {"text": {"type": "string"}}},
    },
}
SPEC = TinyModelSpec(hidden_size=32, num_layers=2, intermediate_size=64, vocab_size=400, initializer_range=0.3)
PROGRAM = """
import json, os, sys, urllib.request
row = json.load(sys.stdin)
body = {"model": os.environ["OPENAI_MODEL"], "messages": row["raw_prompt"]}
request = urllib.request.Request(
    os.environ["OPENAI_BASE_URL"] + "/chat/completions",
    json.dumps(body).encode(),
    {"Authorization": "Bearer " + os.environ["OPENAI_API_KEY"], "Content-Type": "application/json"},
)
made = json.load(urllib.request.urlopen(request))
print("said", made["choices"][0]["message"]["content"])
print(sorted(os.environ), file=sys.stderr)
"""
"""An agent that is a command: one completion."""
PATIENCE = 30  # seconds for what takes a moment, on a busy machine


def native(**options):
    """The real engine over a tiny model of its own."""
    return NativeEngine(build_tiny_model(SPEC, TOKENIZER), NativeEngineOptions(tokenizer=TOKENIZER, **options))


def session(engine, *, name="s", rules=None, parser=None, chat=CHAT, images=None, temperature=1.0, **options):
    """A session over `engine`, which has its trajectory open."""
    shared = replace(context(**options), chat=chat, tokenizer=chat.tokenizer, images=images)
    if parser is not None:
        shared = replace(shared, parser=parser)
    engine.open([name])
    given = SAMPLING.params(0, shared.options.response_length, chat.stop_token_ids)
    params = SamplingParams.of(given | {"temperature": temperature})
    return GatewaySession(name, TrajectoryClient(engine, name), shared, params, rules)


@asynccontextmanager
async def served(engine, **given):
    """A session that is served; its `chat` asks for completions with the real client."""
    made = session(engine, **given)
    async with LocalGateway.here().opened(made, given.get("chat", CHAT).tokenizer) as (url, key):
        client = openai.AsyncOpenAI(base_url=url, api_key=key, max_retries=0, timeout=PATIENCE)
        async with client:

            async def chat(messages, **more):
                return await client.chat.completions.create(model="any", messages=messages, **more)

            yield SimpleNamespace(
                session=made, client=client, chat=chat, url=url, key=key, root=url.split("/s/")[0], engine=engine
            )
            await made.close()


def talk(work, script=None, *, engine=None, **given):
    """What `await work(stage)` returns, over an engine that plays `script`."""

    async def main():
        async with served(engine or Recorder(script), **given) as stage:
            return await asyncio.wait_for(work(stage), 4 * PATIENCE)

    return asyncio.run(main())


def request_of(body):
    """The request in a body that was read for a long context."""
    return read_request(json.dumps(body).encode(), 100_000, lambda request: request, {})


async def post_reward(url, key, body, **headers):
    """(status, JSON of the response) of a reward that is posted to the session whose base URL is `url`."""
    async with (
        aiohttp.ClientSession(headers={"Authorization": f"Bearer {key}", **headers}) as http,
        http.post(url.removesuffix("/v1") + "/reward", json=body) as response,
    ):
        return response.status, await response.json()


def answer(choice):
    """An assistant message as a client sends it back."""
    return choice.message.model_dump()


def roll(name, script=None, *, engine=None, rows=1, **given):
    """(results, engine) of rows that the agent `name` rolls out."""
    engine = engine or Recorder(script or (lambda *_: says("5")))
    manager = AgentLoopManager(context(**given), engine)
    given_rows = [
        {"raw_prompt": QUESTION, "agent_name": name, "uid": f"u{i}", "extra_info": {"index": i}} for i in range(rows)
    ]
    return asyncio.run(manager.generate(given_rows, SAMPLING)), engine
