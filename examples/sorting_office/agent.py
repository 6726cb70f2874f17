"""A stateful tool of one's own, which rewards single turns: letters are put into trays, one call after another.

`SortingOffice` keeps the letters of a trajectory from `create` to `release`: it shows the first letter at the beginning, and
the next after each call. A letter in its right tray is a step reward, an office without a mistake the final one; nothing
else is scored. `prepare` makes what training starts from, all of it drawn from a seed: rows, and
demonstrations that are often careless: what is left to find out is that care pays.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from etude.tools import BaseTool, ToolError, ToolResponse

TOWNS = {
    "north": ("Oslo", "Turku", "Umea"),
    "east": ("Lviv", "Minsk", "Kazan"),
    "south": ("Bari", "Malaga", "Patras"),
    "west": ("Cork", "Brest", "Porto"),
}
TRAY_OF = {town: tray for tray, towns in TOWNS.items() for town in towns}
LETTERS = 4  # letters in each row
CARE = 0.6  # share of demonstrated letters that are looked at; the others go into any tray
SYSTEM = "Sort the letters."


@dataclass
class Office:
    """The state of one trajectory: its letters, and what became of those that are sorted."""

    letters: list[str]
    right: list[bool] = field(default_factory=list)

    def shown(self) -> str:
        """What the model sees: the next letter."""
        done = len(self.right)
        return f"Letter to {self.letters[done]}." if done < len(self.letters) else "All sorted."


class SortingOffice(BaseTool):
    """The tool `sort`. One object serves every trajectory: each has its `Office` under its instance id."""

    def __init__(self, config: dict[str, Any], tool_schema: Any = None) -> None:
        super().__init__(config, tool_schema)
        self._step_reward, self._final_reward = float(config["step_reward"]), float(config["final_reward"])
        self._offices: dict[str, Office] = {}

    async def create(
        self, instance_id: str | None = None, *, letters: list[str], **create_kwargs: Any
    ) -> tuple[str, ToolResponse]:
        """`letters` are the row's. What is returned here is appended to the question."""
        assert instance_id is not None
        self._offices[instance_id] = office = Office(list(letters))
        return instance_id, ToolResponse(text=office.shown())

    async def execute(
        self, instance_id: str, parameters: dict[str, Any], **execute_kwargs: Any
    ) -> tuple[ToolResponse, float, dict[str, Any]]:
        """Puts the letter into a tray: (the next letter, the reward of this turn, metrics)."""
        office = self._offices[instance_id]
        if len(office.right) == len(office.letters):
            raise ToolError("There is no letter left.")  # the model reads this
        right = TRAY_OF[office.letters[len(office.right)]] == parameters["tray"]
        office.right.append(right)
        return ToolResponse(text=office.shown()), self._step_reward * right, {"right": float(right)}

    async def calc_reward(self, instance_id: str, **calc_reward_kwargs: Any) -> float:
        """Once, at the end: paid where every letter was sorted, and rightly."""
        office = self._offices[instance_id]
        return self._final_reward * (len(office.right) == len(office.letters) and all(office.right))

    async def release(self, instance_id: str, **release_kwargs: Any) -> None:
        """Once, however the trajectory ended."""
        del self._offices[instance_id]


def row(letters: list[str], split: str, index: int) -> dict[str, Any]:
    """A row for training or evaluation; it tells the tool its letters."""
    return {
        "data_source": "examples/sorting_office",
        "prompt": [{"role": "system", "content": SYSTEM}, {"role": "user", "content": "Sort these."}],
        "reward_model": {"style": "rule", "ground_truth": [TRAY_OF[town] for town in letters]},
        "extra_info": {
            "index": index,
            "split": split,
            "need_tools_kwargs": True,
            "tools_kwargs": {"sort": {"create_kwargs": {"letters": letters}}},
        },
    }


def demonstration(letters: list[str], rng: random.Random) -> dict[str, Any]:
    """A conversation that puts each letter into its tray with probability `CARE`, else into any."""
    office = Office(letters)
    messages = [
        {"role": "system", "content": SYSTEM},
        {"role": "user", "content": f"Sort these.\n{office.shown()}"},
    ]
    for town in letters:
        tray = TRAY_OF[town] if rng.random() < CARE else rng.choice(list(TOWNS))
        call = {"type": "function", "function": {"name": "sort", "arguments": {"tray": tray}}}
        office.right.append(False)
        messages.append({"role": "assistant", "content": "", "tool_calls": [call]})
        messages.append({"role": "tool", "content": office.shown()})
    return {"messages": [*messages, {"role": "assistant", "content": "Done."}]}


def prepare(folder: Path, seed: int, rows: Any) -> dict[str, list[dict[str, Any]]]:
    """Rows and demonstrations. Four towns of twelve: the splits share some rows."""
    rng = random.Random(f"sorting_office/{seed}")
    tables = {
        split: [row(rng.sample(list(TRAY_OF), LETTERS), split, index) for index in range(getattr(rows, split))]
        for split in ("train", "val", "test")
    }
    shown = [demonstration(rng.sample(list(TRAY_OF), LETTERS), rng) for _ in range(rows.demonstrations)]
    return {**tables, "demonstrations": shown}
