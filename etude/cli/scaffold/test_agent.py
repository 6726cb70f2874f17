"""Tests of the agent's parts, without a model:  python -m pytest AGENT_NAME"""

import asyncio
import json
from pathlib import Path

from etude.registry import import_object
from etude.schemas import FunctionCall
from etude.tools import ToolSession, load_tools

HERE = Path(__file__).parent
compute_score = import_object(f"{HERE}/reward.py:compute_score")
ROWS = [json.loads(line) for name in ("rows.jsonl", "val.jsonl") for line in (HERE / name).read_text().splitlines()]


def ask(kwargs: dict, *items: str) -> list[str]:
    """What the tool answers, through the lifecycle of a rollout: create, calls, release."""

    async def run() -> list[str]:
        tools = {tool.name: tool for tool in load_tools(str(HERE / "tools.yaml"))}
        async with ToolSession(tools, kwargs, request_id="test") as session:
            calls = [FunctionCall(name="price", arguments=json.dumps({"item": item})) for item in items]
            return [outcome.response.text or "" for outcome in await session.execute(calls, 0)]

    return asyncio.run(run())


def test_the_tool_knows_its_rows_prices_and_says_what_it_has() -> None:
    kwargs = {"price": {"create_kwargs": {"prices": {"pear": 3}}}}
    known, unknown = ask(kwargs, "pear", "plane")
    assert known == "3"
    assert "the shop has pear" in unknown


def test_the_reward_pays_for_the_right_number_at_the_end_only() -> None:
    assert compute_score("AGENT_NAME", "That makes 13.", "13") == 1.0
    assert compute_score("AGENT_NAME", "They cost $13.00.", "13") == 1.0
    assert compute_score("AGENT_NAME", "13, or 14", "13") == 0.0
    assert compute_score("AGENT_NAME", "1,3", "13") == 0.0
    assert compute_score("AGENT_NAME", "1,300 in all", "1300") == 1.0
    assert compute_score("AGENT_NAME", "It is -13, or 4.13", "13") == 0.0
    assert compute_score("AGENT_NAME", "", "13") == 0.0


def test_every_row_can_be_solved_with_the_tool() -> None:
    for row in ROWS:
        order = row["extra_info"]["order"]
        prices = ask(row["extra_info"]["tools_kwargs"], *order)
        total = sum(int(price) * count for price, count in zip(prices, order.values()))
        assert compute_score(row["data_source"], f"It is {total}.", row["reward_model"]["ground_truth"]) == 1.0
