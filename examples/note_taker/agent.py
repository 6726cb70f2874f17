"""An agent written with the `openai` package, which reads a long text page by page and remembers only its own note.

`run` is trained as it stands, and knows nothing of training. It edits its history: with each page the pages before are gone,
and what the model wrote about them stands in the question instead. So each page begins a sequence of its own, and only the
last of them goes on, to the answer. All of them are learnt from, exactly as they were sampled, at the reward that `run`
returns: a model that notes nothing on the first page cannot know the answer after the last.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from openai import AsyncOpenAI

NOTHING, UNKNOWN = "nothing", "unknown"


async def run(client: AsyncOpenAI, row: dict[str, Any]) -> float:
    """The agent; returns 1.0 where the answer is right."""
    note = NOTHING
    for page in row["extra_info"]["pages"]:
        history = reading(row["raw_prompt"], note, page)  # written anew: earlier pages are gone
        note = await answer(client, history)
    history += [{"role": "assistant", "content": note}, {"role": "user", "content": "Answer."}]  # goes on
    return float(await answer(client, history) == row["reward_model"]["ground_truth"])


async def answer(client: AsyncOpenAI, messages: list[dict[str, Any]]) -> str:
    """One call of the model."""
    completion = await client.chat.completions.create(model="policy", messages=messages, max_tokens=16)
    return completion.choices[0].message.content or ""


def reading(question: list[dict[str, Any]], note: str, page: str) -> list[dict[str, Any]]:
    """The history with which a page is read."""
    return [*question, {"role": "user", "content": f"Note:\n{note}\nPage:\n{page}"}]


# -- what training starts from -----------------------------------------------------------------------------------------

NAMES = "Ada Bo Cleo Dov Ema Finn Gus Hana Ivo Jun Kai Lena Milo Nora Otto Pia Quin Rosa Sami Tove Uma Vera Wim Yara"
TOWNS = "Bari Bonn Cork Delhi Dover Graz Kiel Kyoto Lima Linz Lviv Metz Minsk Oslo Paris Porto Riga Rome Turku Umea"
PAGES = 4  # of each row, with a line each
SKILLED = (0.9, 0.3)  # share of demonstrations that take notes: first mostly the skill, then mostly the habit


def make_row(rng: random.Random, split: str, index: int) -> dict[str, Any]:
    """A question, and pages that say where four people are; one of them is asked for."""
    people, towns = rng.sample(NAMES.split(), PAGES), rng.sample(TOWNS.split(), PAGES)
    pages = [f"{name} {town}" for name, town in zip(people, towns)]
    asked = rng.randrange(len(people))
    return {
        "data_source": "examples/note_taker",
        "prompt": [{"role": "system", "content": f"Where is\n{people[asked]}"}],
        "reward_model": {"style": "rule", "ground_truth": towns[asked]},
        "extra_info": {"index": index, "split": split, "pages": pages, "line": pages[asked]},
    }


def demonstrations(row: dict[str, Any], takes_notes: bool) -> Iterator[dict[str, Any]]:
    """A conversation for each page of a row, as `run` has them; the last goes on to the answer."""
    pages, line, note = row["extra_info"]["pages"], row["extra_info"]["line"], NOTHING
    for page in pages:
        messages = reading(row["prompt"], note, page)
        note = line if takes_notes and line in (note, page) else NOTHING
        messages.append({"role": "assistant", "content": note})
        if page is pages[-1]:
            said = UNKNOWN if note == NOTHING else row["reward_model"]["ground_truth"]
            messages += [{"role": "user", "content": "Answer."}, {"role": "assistant", "content": said}]
        yield {"messages": messages}


def prepare(folder: Path, seed: int, rows: Any) -> dict[str, list[dict[str, Any]]]:
    """Rows, and demonstrations of which many show a bad habit: noting nothing."""
    tables = {}
    for split in ("train", "val", "test"):
        rng = random.Random(f"{split}/{seed}")
        tables[split] = [make_row(rng, split, index) for index in range(getattr(rows, split))]
    rng = random.Random(f"demonstrations/{seed}")
    shown: list[dict[str, Any]] = []
    for share in SKILLED:
        part: list[dict[str, Any]] = []
        while len(part) < rows.demonstrations // len(SKILLED):
            part += demonstrations(make_row(rng, "demonstrations", len(part)), rng.random() < share)
        rng.shuffle(part)
        shown += part
    return {**tables, "demonstrations": shown}
