"""An agent written with the `openai` package, and nothing else: it looks capitals up, and keeps its history short.

It runs against any server with OpenAI's interface (`python agent.py`, with OPENAI_BASE_URL and OPENAI_API_KEY set), and is
trained as it stands: see agent.yaml. While it trains, `client` leads to the policy.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
from typing import Any

from openai import AsyncOpenAI

CAPITALS = {"France": "Paris", "Japan": "Tokyo", "Kenya": "Nairobi", "Peru": "Lima"}
ATLAS: Any = {
    "type": "function",
    "function": {
        "name": "atlas",
        "description": "Says a country's capital.",
        "parameters": {
            "type": "object",
            "properties": {"country": {"type": "string", "description": "The country's English name."}},
            "required": ["country"],
        },
    },
}
MOST_LOOKUPS = 2


async def run(client: AsyncOpenAI, row: dict[str, Any]) -> float:
    """Answers `row["raw_prompt"]`; returns what the answer is worth."""
    messages = list(row["raw_prompt"])
    notes: list[str] = []
    for _ in range(MOST_LOOKUPS):
        answer = await client.chat.completions.create(model=model_name(), messages=messages, tools=[ATLAS])
        calls = answer.choices[0].message.tool_calls
        if not calls:
            break
        messages.append(answer.choices[0].message.model_dump(exclude_none=True))
        for call in calls:
            notes.append(look_up(call.function.arguments))
            messages.append({"role": "tool", "tool_call_id": call.id, "content": notes[-1]})
    # The history is written anew, so this is a prompt of its own, and a second sequence to learn from.
    summary = (
        f"{row['raw_prompt'][-1]['content']}\nNotes: {'; '.join(notes) or 'none'}\nName the capital, nothing else."
    )
    final = await client.chat.completions.create(
        model=model_name(), messages=[{"role": "user", "content": summary}], max_tokens=32
    )
    named = (final.choices[0].message.content or "").strip(" .\n")
    return float(named == row["reward_model"]["ground_truth"])  # alone: a list of all capitals names it, too


def look_up(arguments: str) -> str:
    """The tool: what the policy wrote may be anything."""
    try:
        country = json.loads(arguments)["country"]
        return f"{country}: {CAPITALS[country]}"
    except (ValueError, KeyError, TypeError):
        return "No such country in the atlas."


def model_name() -> str:
    """Any name will do while it trains."""
    return os.environ.get("OPENAI_MODEL", "policy")


async def main() -> None:
    """Asks one question of the server that the environment names."""
    question = [{"role": "user", "content": "What is the capital of Peru?"}]
    reward = await run(AsyncOpenAI(), {"raw_prompt": question, "reward_model": {"ground_truth": "Lima"}})
    sys.stdout.write(f"reward {reward}\n")


if __name__ == "__main__":
    asyncio.run(main())
