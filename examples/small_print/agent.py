"""Small print: a picture with a number in it that is too small to read at a glance, and a tool to look closer.

Run as a program, this file draws the pictures and writes a question for each; the run's configuration names
`compute_score`. The loop is the built-in `tool_agent`, the tool the built-in `image_zoom_in_tool`: what it cuts out of the
picture is what the model sees next.
"""

from __future__ import annotations

import json
import random
import re
import sys
from pathlib import Path

from PIL import Image, ImageDraw, ImageFont

QUESTION = "Somewhere in this picture stands a number. Which one?"
SIDE = 640  # pixels


def draw(number: int, generator: random.Random) -> Image.Image:
    """A picture with coloured shapes and, in small digits, `number`."""
    picture = Image.new("RGB", (SIDE, SIDE), "white")
    pen = ImageDraw.Draw(picture)
    for _ in range(12):
        left, top, size = generator.randrange(SIDE), generator.randrange(SIDE), generator.randrange(40, 160)
        colour = tuple(generator.randrange(120, 256) for _ in range(3))
        generator.choice([pen.ellipse, pen.rectangle])((left, top, left + size, top + size), fill=colour)
    place = (generator.randrange(20, SIDE - 60), generator.randrange(20, SIDE - 40))
    pen.text(place, str(number), fill="black", font=ImageFont.load_default(size=12))
    return picture


def write(folder: Path, count: int, seed: int = 0) -> None:
    """Draws `count` pictures into `folder`, and writes `train.jsonl` for `etude data pictures`."""
    generator = random.Random(seed)
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "train.jsonl").open("w") as file:
        for index in range(count):
            number = generator.randrange(100, 1000)
            draw(number, generator).save(folder / f"{index}.png")
            row = {"question": QUESTION, "answer": str(number), "image": f"{index}.png"}
            file.write(json.dumps(row) + "\n")


def compute_score(solution_str: str, ground_truth: str) -> float:
    """1.0 where the last `<answer>` is the number, 0.1 where there is an answer at all."""
    answers = re.findall(r"<answer>(.*?)</answer>", solution_str, flags=re.DOTALL)
    if not answers:
        return 0.0
    return 1.0 if answers[-1].strip() == ground_truth else 0.1


if __name__ == "__main__":
    write(Path(sys.argv[1]), int(sys.argv[2]))
