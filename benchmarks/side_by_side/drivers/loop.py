"""Agent loops over a model that answers from a script (`side_by_side.canned`): what one call of the model costs beside it.

`floor` only waits; `plain` is the least that a hand-written loop can do; `etude` is `AgentLoopManager` with the built-in
tool loop, batch columns included; `verl` is verl's `AgentLoopWorker`, which pads and stacks as well.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import re
import statistics
import tempfile
from collections.abc import Awaitable, Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from side_by_side import canned, task
from side_by_side.meter import Meter, peak_mib, report, resident_mib

Run = Callable[[canned.Script], Awaitable[object]]


def main() -> None:
    """Measures one contender at one number of trajectories."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("contender", choices=("floor", "plain", "etude", "verl"))
    parser.add_argument("--checkpoint", type=Path, required=True)
    parser.add_argument("--trajectories", type=int, default=256)
    parser.add_argument("--turns", type=int, default=canned.TOOL_TURNS)
    parser.add_argument("--runs", type=int, default=3)
    options = parser.parse_args()
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(options.checkpoint)
    run = {"floor": _floor, "plain": _plain, "etude": _etude, "verl": _verl}[options.contender](tokenizer, options)
    before = resident_mib()

    def once(trajectories: int, seed: int) -> dict[str, float]:
        script = canned.Script(tokenizer, trajectories, turns=options.turns, seed=seed)
        meter = Meter()
        asyncio.run(_awaited(run, script))
        figures = meter.read()
        if script.asked != trajectories * script.calls:
            raise SystemExit(f"{script.asked} calls of the model instead of {trajectories * script.calls}")
        return figures | {
            "cpu_a_call": figures["cpu"] / script.asked,
            "calls": float(script.asked),
            "ideal_wall": script.ideal_wall,
        }

    once(4, 0)
    parts = [once(options.trajectories, seed + 1) for seed in range(options.runs)]
    medians = {name: statistics.median(part[name] for part in parts) for name in parts[0]}
    report({**medians, "memory": peak_mib() - before})


async def _awaited(run: Run, script: canned.Script) -> None:
    await run(script)


def _floor(tokenizer: Any, options: argparse.Namespace) -> Run:
    async def one(script: canned.Script, number: int) -> None:
        for call in range(script.calls):
            await script.say(number, call)

    async def run(script: canned.Script) -> object:
        return await asyncio.gather(*(one(script, i) for i in range(len(script.seconds))))

    return run


def _plain(tokenizer: Any, options: argparse.Namespace) -> Run:
    """A minimal loop: appends ids, decodes each turn once, finds calls by a pattern, encodes tool responses alone."""
    encode = tokenizer.backend_tokenizer.encode
    decode = tokenizer.backend_tokenizer.decode
    pattern = re.compile(r"<tool_call>\s*(.*?)\s*</tool_call>", re.DOTALL)
    between = encode("\n", add_special_tokens=False).ids

    async def tool(expression: str) -> str:
        return task.calculate(expression)

    async def one(script: canned.Script, number: int, ids: list[int]) -> tuple[list[int], list[int], list[float]]:
        mask: list[int] = []
        log_probs: list[float] = []
        for call in range(script.calls):
            said, probs = await script.say(number, call)
            ids += said
            mask += [1] * len(said)
            log_probs += probs
            calls = [json.loads(found) for found in pattern.findall(decode(said, skip_special_tokens=False))]
            if not calls:
                break
            answers = [await tool(**found["arguments"]) for found in calls]
            text = "".join(f"\n<tool_response>\n{answer}\n</tool_response>" for answer in answers)
            following = (
                between
                + encode(f"<|im_start|>user{text}<|im_end|>\n<|im_start|>assistant\n", add_special_tokens=False).ids
            )
            ids += following
            mask += [0] * len(following)
            log_probs += [0.0] * len(following)
        return ids, mask, log_probs

    async def run(script: canned.Script) -> object:
        asked = script.prompts()
        head = tokenizer.apply_chat_template(asked[0], tools=[task.SCHEMA], tokenize=False, add_generation_prompt=True)
        first = asked[0][-1]["content"]
        starts = [encode(head.replace(first, p[-1]["content"]), add_special_tokens=False).ids for p in asked]
        return await asyncio.gather(*(one(script, i, ids) for i, ids in enumerate(starts)))

    return run


class _Engine:
    """Serves the script through Étude's engine interface."""

    def __init__(self) -> None:
        self.script: canned.Script | None = None
        self._known: dict[str, list[int]] = {}

    def open(self, request_ids: Sequence[str]) -> None:
        for request_id in request_ids:
            self._known[request_id] = [int(request_id.split("/")[1]), 0]

    def close(self, request_id: str) -> None:
        self._known.pop(request_id, None)

    async def generate(
        self, request_id: str, prompt_ids: Sequence[int], sampling_params: Any, *, images: Any = None
    ) -> Any:
        from etude.inference import TokenOutput

        assert self.script is not None
        place = self._known[request_id]
        ids, log_probs = await self.script.say(*place)
        place[1] += 1
        return TokenOutput(ids, log_probs, "stop", [0] * len(ids))


def _etude(tokenizer: Any, options: argparse.Namespace) -> Run:
    from etude.agents import AgentContext, AgentLoopManager, MultiTurnOptions, RolloutOptions, Sampling, to_batch
    from etude.chat import ChatTemplate, ToolParser
    from etude.tools.function_tool import FunctionTool

    async def calculator(expression: str) -> str:
        return task.calculate(expression)

    rollout = RolloutOptions(
        prompt_length=512,
        response_length=256 * (options.turns + 1),
        max_concurrent_trajectories=4096,
        multi_turn=MultiTurnOptions(max_assistant_turns=options.turns + 1),
    )
    context = AgentContext(
        config=None,
        options=rollout,
        tokenizer=tokenizer,
        chat=ChatTemplate(tokenizer),
        parser=ToolParser.get_tool_parser("hermes", tokenizer),
        tools={"calculator": FunctionTool(calculator, schema=task.SCHEMA)},
    )
    engine = _Engine()
    manager = AgentLoopManager(context, engine)  # type: ignore[arg-type]

    async def run(script: canned.Script) -> object:
        engine.script = script
        rows: list[Mapping[str, Any]] = [
            {"raw_prompt": messages, "uid": "row", "rollout_index": i} for i, messages in enumerate(script.prompts())
        ]
        results = await manager.generate(rows, Sampling(1.0, 1.0, -1, 0))
        return to_batch(results, tokenizer.pad_token_id)

    return run


_VERL_TOOL = """
import re

from verl.tools.function_tool import function_tool

@function_tool
def calculator(expression: str) -> str:
    \"\"\"Evaluate one arithmetic expression.

    Args:
        expression: An expression such as "12 + 7".
    \"\"\"
    a, operator, b = expression.split()
    return str({"+": int(a) + int(b), "-": int(a) - int(b), "*": int(a) * int(b)}[operator])
"""


def _verl(tokenizer: Any, options: argparse.Namespace) -> Run:
    os.environ.setdefault("VERL_LOGGING_LEVEL", "ERROR")
    import numpy as np
    import torch
    from hydra import compose, initialize_config_module
    from verl.experimental.agent_loop.agent_loop import AgentLoopWorker
    from verl.protocol import DataProto
    from verl.workers.rollout.replica import TokenOutput

    tools = Path(tempfile.mkdtemp()) / "calculator_tool.py"
    tools.write_text(_VERL_TOOL)
    rollout = "actor_rollout_ref.rollout"
    with initialize_config_module(config_module="verl.trainer.config", version_base=None):
        config = compose(
            "ppo_trainer",
            overrides=[
                f"actor_rollout_ref.model.path={options.checkpoint}",
                f"{rollout}.name=vllm",
                f"{rollout}.mode=async",
                f"{rollout}.prompt_length=512",
                f"{rollout}.response_length={256 * (options.turns + 1)}",
                f"{rollout}.calculate_log_probs=True",
                f"{rollout}.multi_turn.enable=True",
                f"{rollout}.multi_turn.format=hermes",
                f"{rollout}.multi_turn.max_assistant_turns={options.turns + 1}",
                f"{rollout}.multi_turn.max_user_turns={options.turns + 1}",
                f"{rollout}.multi_turn.function_tool_path={tools}",
            ],
        )

    class Client:
        """Serves the script through verl's interface of a server client."""

        def __init__(self, script: canned.Script) -> None:
            self.script, self.known = script, dict[str, list[int]]()

        async def generate(self, request_id: str, **_: Any) -> Any:
            place = self.known.setdefault(request_id, [len(self.known), 0])
            ids, log_probs = await self.script.say(*place)
            place[1] += 1
            return TokenOutput(token_ids=ids, log_probs=log_probs, num_preempted=0, extra_fields={})

    worker = AgentLoopWorker(config, llm_client=None)

    async def run(script: canned.Script) -> object:
        worker.llm_client = Client(script)
        asked = script.prompts()
        raw = np.empty(len(asked), dtype=object)
        raw[:] = asked
        batch = DataProto.from_dict(
            tensors={"dummy": torch.zeros(len(asked), 1)},
            non_tensors={
                "raw_prompt": raw,
                "agent_name": np.array(["tool_agent"] * len(asked), dtype=object),
                "index": np.arange(len(asked)),
                "data_source": np.array(["benchmark"] * len(asked), dtype=object),
            },
            meta_info={"global_steps": 1},
        )
        return await worker.generate_sequences(batch)

    return run


if __name__ == "__main__":
    main()
