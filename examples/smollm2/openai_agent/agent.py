"""An agent written with the `openai` package, which knows nothing of training: the model may ask it to multiply."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from openai import AsyncOpenAI

CALCULATOR: Any = {
    "type": "function",
    "function": {
        "name": "calculator",
        "parameters": {"type": "object", "properties": {"expression": {"type": "string"}}, "required": ["expression"]},
    },
}


async def run(client: AsyncOpenAI, row: dict[str, Any]) -> float:
    """Answers the last question of `row["raw_prompt"]`; returns 1.0 where the answer is right."""
    messages = list(row["raw_prompt"])
    for _ in range(2):
        answer = await client.chat.completions.create(model="policy", messages=messages, tools=[CALCULATOR])
        message = answer.choices[0].message
        if not message.tool_calls:
            break
        messages.append(message.model_dump(exclude_none=True))
        for call in message.tool_calls:
            messages.append({"role": "tool", "tool_call_id": call.id, "content": multiply(call.function.arguments)})
    return float((message.content or "").strip(" .").endswith(f" {row['reward_model']['ground_truth']}"))


def multiply(arguments: str) -> str:
    """The tool: what the policy wrote may be anything."""
    try:
        a, b = json.loads(arguments)["expression"].split("*")
        return str(int(a) * int(b))
    except (ValueError, KeyError, TypeError, AttributeError):
        return "I can only multiply two numbers."
