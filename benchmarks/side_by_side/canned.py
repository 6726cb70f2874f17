"""A scripted model, for measuring the overhead of an agent loop.

Every trajectory makes the same calls: `TOOL_TURNS` turns with a tool call, then an answer. A model call takes a
log-normal time around `MEDIAN_SECONDS`, the same for call k of trajectory i in every contender.

Invariant: needs only the tokenizer; ids and log-probs are returned as fresh lists, as by an engine.
"""

from __future__ import annotations

import asyncio
import math
import random
from typing import Any

from side_by_side import task

TOOL_TURNS = 3
MEDIAN_SECONDS, SIGMA = 0.020, 0.5
TURN_TOKENS = 48
_WORDS = "The next step is one more call, with both numbers as they are. "
_CALL = '<tool_call>\n{{"name": "calculator", "arguments": {{"expression": "{} + {}"}}}}\n</tool_call><|im_end|>'
_ANSWER = "The answer is 19.<|im_end|>"


class Script:
    """The model's turns and their latencies."""

    def __init__(self, tokenizer: Any, trajectories: int, *, turns: int = TOOL_TURNS, seed: int = 0) -> None:
        def encode(text: str) -> list[int]:
            return list(tokenizer(text, add_special_tokens=False)["input_ids"])

        words = max(1, round((TURN_TOKENS - len(encode(_CALL))) / len(encode(_WORDS))))
        rng = random.Random(seed)
        self.calls, answer = turns + 1, encode(_ANSWER)
        self._turns = [
            [
                encode(_WORDS * words + "\n" + _CALL.format(rng.randrange(10**6), rng.randrange(10**6)))
                for _ in range(turns)
            ]
            + [answer]
            for _ in range(trajectories)
        ]
        self.seconds = [
            [MEDIAN_SECONDS * math.exp(SIGMA * rng.gauss(0, 1)) for _ in range(self.calls)] for _ in range(trajectories)
        ]
        self.asked, self._seed = 0, seed

    def prompts(self) -> list[list[dict[str, str]]]:
        """Returns the prompts of the trajectories, all different, as in a batch without groups."""
        return [
            [{"role": "system", "content": task.SYSTEM}, {"role": "user", "content": f"Task {n}: {q.text}"}]
            for n, q in enumerate(task.questions(len(self.seconds), self._seed))
        ]

    @property
    def ideal_wall(self) -> float:
        """Seconds that the slowest trajectory waits for the model."""
        return max(map(sum, self.seconds))

    async def say(self, trajectory: int, call: int) -> tuple[list[int], list[float]]:
        """Returns (ids, log-probs) of a trajectory's turn `call`, after its latency."""
        await asyncio.sleep(self.seconds[trajectory][call])
        self.asked += 1
        ids = self._turns[trajectory][call]
        return list(ids), [-0.5] * len(ids)
