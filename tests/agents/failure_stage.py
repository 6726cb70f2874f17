"""The stage of the failure suite: a conversation that passes through every state, and parts that count who holds what."""

import asyncio
import threading
import time
from collections import Counter
from dataclasses import replace

from agents_stage import CHAT, QUESTION, SAMPLING, TOKENIZER, Echo, Recorder, context, says

from etude.agents import AgentLoopManager, AgentState, ToolAgentLoop, register, to_batch
from etude.agents.interactions import BaseInteraction
from etude.chat import ParsedResponse
from etude.inference import NativeEngine, NativeEngineOptions
from etude.models import TinyModelSpec, build_tiny_model
from etude.schemas import FunctionCall

PATIENCE = 60  # seconds for what takes a moment, on a busy machine
SHORT, LONG = 6, 600  # tokens a turn of the real engine may have
SPEC = TinyModelSpec(hidden_size=32, num_layers=2, intermediate_size=64, vocab_size=400, initializer_range=0.3)
MODEL = build_tiny_model(SPEC, TOKENIZER)
CALLS = [FunctionCall(name="echo", arguments='{"text": "seen"}')]


@register("failures_stage")
class EveryState(ToolAgentLoop):
    """A call in the first turn, whatever the model wrote, then words for the user, who ends the conversation."""

    async def run(self, sampling_params, **row):
        self.long_turn = row.get("long_turn")
        return await super().run(sampling_params | {"max_tokens": SHORT}, **row)

    async def _handle_generating_state(self, data, sampling_params):
        turn = data.trajectory.assistant_turns
        data.sampling = replace(data.sampling, max_tokens=LONG if turn == self.long_turn else SHORT)
        await self.sample(data)
        data.parsed = ParsedResponse("", CALLS if turn == 0 else [], [])
        return AgentState.PROCESSING_TOOLS if turn == 0 else AgentState.INTERACTING


class Gate:
    """Holds whoever comes to `point` for ever, and counts them."""

    def __init__(self, point):
        self.point, self.held = point, 0

    async def at(self, point):
        if point == self.point:
            self.held += 1
            await asyncio.sleep(3600)


class Tool(Echo):
    """`log` counts calls that came through, but for release, which counts when it begins."""

    def __init__(self, gate, **config):
        super().__init__(reward=0.5, final=1.0, **config)
        self.gate = gate

    async def create(self, instance_id=None, **kwargs):
        if self.gate.point == "create again" and instance_id.split(":")[0].endswith("/0"):
            raise ConnectionError("gone")
        await self.gate.at("create")
        await self.gate.at("create again")
        return await super().create(instance_id)

    async def execute(self, instance_id, parameters, **kwargs):
        await self.gate.at("execute")
        return await super().execute(instance_id, parameters)

    async def calc_reward(self, instance_id, **kwargs):
        await self.gate.at("calc_reward")
        return await super().calc_reward(instance_id)

    async def release(self, instance_id, **kwargs):
        await super().release(instance_id)
        await self.gate.at("release")


class User(BaseInteraction):
    """Answers once, then is content."""

    def __init__(self, gate, **config):
        super().__init__({"name": "user", **config})
        self.gate, self.log = gate, Counter()

    async def start_interaction(self, instance_id=None, **kwargs):
        self.log["start"] += 1
        await self.gate.at("start_interaction")
        return instance_id

    async def generate_response(self, instance_id, messages, **kwargs):
        await self.gate.at("generate_response")
        over = sum(message["role"] == "assistant" for message in messages) > 2
        return over, "Look again.", 0.25, {}

    async def finalize_interaction(self, instance_id, **kwargs):
        self.log["finalize"] += 1
        await self.gate.at("finalize_interaction")


class Scripted(Recorder):
    """The scripted engine with a gate before each turn."""

    def __init__(self, gate):
        super().__init__(lambda *_: says("5"))
        self.gate = gate

    async def generate(self, request_id, prompt_ids, sampling_params, *, images=None):
        turn = sum(name == request_id for name, _, _ in self.asked)
        await self.gate.at(f"generate {turn}")
        return await super().generate(request_id, prompt_ids, sampling_params, images=images)

    def assert_nothing_is_left(self):
        assert Counter(self.opened) == Counter(self.closed)
        assert max(Counter(self.opened).values()) == 1

    async def rest(self):
        """Nothing runs between requests."""


class Native(NativeEngine):
    """The real engine and a tiny model; the step whose number is in `failing` runs out of memory half-way."""

    def __init__(self, gate, *, deterministic=False, failing=lambda step: False, **options):
        super().__init__(MODEL, NativeEngineOptions(deterministic=deterministic, **options))
        self.gate, self.failing, self.computed = gate, failing, 0
        self.turns = Counter()
        self.lock = threading.Lock()

    async def generate(self, request_id, prompt_ids, sampling_params, *, images=None):
        self.turns[request_id] += 1
        return await super().generate(request_id, prompt_ids, sampling_params, images=images)

    def held(self):
        """Requests that are in the middle of the gate's turn."""
        wanted = int(self.gate.point.removeprefix("generate ")) + 1
        rows = self._rows.items()
        return sum(
            self.turns[name] == wanted and row.request is not None and row.request.tokens != [] for name, row in rows
        )

    def _compute(self, plan):
        drawn = super()._compute(plan)  # so that caches have been written when it breaks
        with self.lock:
            self.computed += 1
            if self.failing(self.computed - 1):
                raise MemoryError("no room for keys and values")
        return drawn

    async def rest(self):
        """Until the step under way has ended."""
        if self._stepping is not None:
            await asyncio.wait_for(asyncio.wait([asyncio.wrap_future(self._stepping.drawn)]), PATIENCE)

    def assert_nothing_is_left(self):
        scheduler = self._scheduler
        assert scheduler.rows == {}
        assert scheduler.active == scheduler.queue == []
        scheduler.reclaim()
        scheduler.prefixes.clear_unused()
        assert scheduler.cache.slab_bytes == 0


ENGINES = {
    "scripted": Scripted,
    "native": Native,
    "deterministic": lambda gate: Native(gate, deterministic=True),
}


class World:
    """A manager whose every part stands at `gate`, with `rows` rows that go through every state."""

    def __init__(self, point="nowhere", engine="scripted", *, rows=3, limits=None, stall_timeout=None, **given):
        self.gate = Gate(point)
        self.engine = ENGINES[engine](self.gate) if isinstance(engine, str) else engine
        self.tool, self.user = Tool(self.gate, **(limits or {})), User(self.gate, **(limits or {}))
        self.scored = []
        shared = context([self.tool], interactions=[self.user], response_length=900, **given)
        deterministic = isinstance(self.engine, Native) and self.engine.options.deterministic
        self.manager = AgentLoopManager(
            shared, self.engine, self.score, deterministic=deterministic, stall_timeout=stall_timeout
        )
        self.rows = [
            {
                "uid": f"u{i}",
                "rollout_index": i,
                "raw_prompt": QUESTION,
                "agent_name": "failures_stage",
                "tools_kwargs": {"echo": {}},
                "interaction_kwargs": {"name": "user"},
                "long_turn": int(point[-1]) if point.startswith("generate ") else None,
            }
            for i in range(rows)
        ]

    async def score(self, trajectory, row):
        await self.gate.at("score")
        self.scored.append(trajectory.request_id)
        trajectory.rewards.score = 1.0

    def all_held(self):
        native = isinstance(self.engine, Native) and self.gate.point.startswith("generate ")
        return (self.engine.held() if native else self.gate.held) == len(self.rows)

    def generate(self):
        return self.manager.generate(self.rows, SAMPLING)

    async def cancelled(self):
        """Cancels the rollout once every row stands at the gate, and waits for its end."""
        await cancel_once(self.all_held, self.generate())
        await self.engine.rest()

    def run(self):
        return asyncio.run(asyncio.wait_for(self.generate(), PATIENCE))

    def assert_nothing_is_left(self):
        """Every tool that was made is released once, every interaction finalized once, every trajectory closed."""
        released = Counter(name for event, name in self.tool.events if event == "release")
        created = Counter(name for event, name in self.tool.events if event == "create")
        assert created == released
        assert max(created.values(), default=1) == 1
        assert self.user.log["start"] == self.user.log["finalize"]
        self.engine.assert_nothing_is_left()


async def cancel_once(held, work):
    """Runs `work` until `held()`, cancels it, and waits for its end."""
    task = asyncio.ensure_future(work)
    deadline = time.monotonic() + PATIENCE
    while not held():
        assert not task.done(), task
        assert time.monotonic() < deadline, "not every row came to the gate"
        await asyncio.sleep(0)
    task.cancel()
    await asyncio.wait_for(asyncio.wait([task]), PATIENCE)
    assert task.cancelled()


def assert_dropped(results):
    """Nothing of these rows can reach a loss or a mean: no trajectory, no score, no mask."""
    assert all(result.trajectory is None and result.dropped is not None for result in results)
    columns = to_batch(results, pad_token_id=CHAT.end_of_turn_id).batch
    assert not columns["response_mask"].any()
    assert not columns["attention_mask"].any()
