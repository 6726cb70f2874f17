"""Renders dumped trajectories as readable conversations: text blocks by provenance, with the rewards in between.

Invariant: for any record, the result is bounded in blocks and characters and free of control characters. Text is labelled
as the model's only if the policy sampled its segment; if segments carry no text, the whole response is one block without an
author.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

from etude.dumps import list_dump_steps, readable_rollouts
from etude.trajectory import StopReason
from etude.viewer.panel import is_number
from etude.viewer.rows import as_list

MAX_TEXT = 6000  # characters per block
MAX_BLOCKS = 80
MAX_SCANNED = 5000  # records read from the last dump

_LABELS = {"sampled": "model", "tool": "tool", "template": "template", "user": "user", "prompt": "prompt"}
PROVENANCE_COLOURS = {"sampled": "green", "tool": "cyan", "user": "yellow", "template": "bright_black"}
"""Rich colour names, for text in a terminal."""
_BIDI = [0x200E, 0x200F, *range(0x202A, 0x202F), *range(0x2066, 0x206A)]  # these reorder displayed text
HIDDEN = [code for code in [*range(32), *range(127, 160), *_BIDI] if chr(code) not in "\n\t"]
_REPEATED = re.compile(r"(<\|\w{1,40}\|>)\1{3,}")
_CONTROL = dict.fromkeys(HIDDEN, "\N{REPLACEMENT CHARACTER}")


def sanitize_text(text: str) -> str:
    """Replaces control characters and bidirectional overrides in `text`; collapses a repeated special token, such as an
    image placeholder, into one with its count."""
    return _REPEATED.sub(_counted, text).translate(_CONTROL)


def _counted(found: re.Match[str]) -> str:
    return f"{found[1]}×{len(found[0]) // len(found[1])}"


@dataclass(frozen=True)
class Block:
    """A span of text from one source: `kind` is a provenance, "prompt" or "reward"; `omitted` characters were truncated."""

    kind: str
    label: str
    text: str
    omitted: int = 0


@dataclass(frozen=True)
class Conversation:
    """One trajectory: its blocks, its score, and `facts` about it as (name, value)."""

    step: int
    score: float | None
    blocks: tuple[Block, ...]
    facts: tuple[tuple[str, str], ...]


@dataclass(frozen=True)
class Samples:
    """Pairs of trajectories from the first and the last dump; the second is None where the prompt does not recur."""

    folder: str
    first_step: int
    last_step: int
    pairs: tuple[tuple[Conversation | None, Conversation | None], ...]


def load_samples(folder: Path, count: int = 3) -> Samples | None:
    """Pairs the first `count` records of the first dump with the same prompts' first records in the last dump.

    If no prompt recurs (training batches differ), the last dump's first records are used. The choice does not depend on
    scores. Returns None if the folder has no dump.

    Raises:
        DataError: a dump cannot be read; names file and line.
    """
    steps = list_dump_steps(folder)
    if not steps:
        return None
    before = list(islice(readable_rollouts(folder / f"{steps[0]}.jsonl"), count))
    if len(steps) == 1:
        return Samples(folder.name, steps[0], steps[0], tuple((parse_conversation(record), None) for record in before))
    last = folder / f"{steps[-1]}.jsonl"
    again = _same_prompts(readable_rollouts(last), before)
    if again:
        pairs = [(record, again.get(_prompt_key(record))) for record in before]
    else:
        after = [*islice(readable_rollouts(last), count), *[None] * count]
        pairs = list(zip(before, after))
    return Samples(
        folder.name, steps[0], steps[-1], tuple((parse_conversation(a), parse_conversation(b)) for a, b in pairs)
    )


def load_change(folder: Path) -> tuple[Conversation, Conversation] | None:
    """Returns the first prompt of the first dump that is scored higher in the last one, as answered then and there; None if
    there is none.

    Raises:
        DataError: a dump cannot be read; names file and line.
    """
    steps = list_dump_steps(folder)
    if len(steps) < 2:
        return None
    before = list(islice(readable_rollouts(folder / f"{steps[0]}.jsonl"), MAX_SCANNED))
    again = _same_prompts(readable_rollouts(folder / f"{steps[-1]}.jsonl"), before)
    for record in before:
        pair = parse_conversation(record), parse_conversation(again.get(_prompt_key(record)))
        if pair[0] and pair[1] and (pair[0].score or 0.0) < (pair[1].score or 0.0):
            return pair[0], pair[1]
    return None


def load_failures(folder: Path, count: int = 3) -> tuple[Conversation, ...]:
    """Returns the first `count` failures in the last dump: truncated or aborted, with a failed tool call, or score ≤ 0.

    Raises:
        DataError: the dump cannot be read; names file and line.
    """
    steps = list_dump_steps(folder)
    if not steps:
        return ()
    records = islice(readable_rollouts(folder / f"{steps[-1]}.jsonl"), MAX_SCANNED)
    conversations = (parse_conversation(record) for record in records if _has_failed(record))
    return tuple(one for one in islice(conversations, count) if one is not None)


def _has_failed(record: Mapping[str, Any]) -> bool:
    score = record.get("score")
    calls = [call for call in as_list(record.get("tool_calls")) if isinstance(call, Mapping)]
    cut = record.get("stop_reason") not in (None, StopReason.COMPLETED.value)
    return cut or any(call.get("error") for call in calls) or (isinstance(score, int | float) and score <= 0)


def _prompt_key(record: Mapping[str, Any]) -> str:
    return str(record.get("input"))


def _same_prompts(records: Iterable[dict[str, Any]], wanted: Iterable[Mapping[str, Any]]) -> dict[str, dict[str, Any]]:
    """Prompt → its first record, for the prompts in `wanted`."""
    missing = {_prompt_key(record) for record in wanted}
    found: dict[str, dict[str, Any]] = {}
    for record in islice(records, MAX_SCANNED):
        key = _prompt_key(record)
        if key in missing:
            found[key] = record
            missing.discard(key)
        if not missing:
            break
    return found


def parse_conversation(record: Mapping[str, Any] | None, max_text: int = MAX_TEXT) -> Conversation | None:
    """Turns a dumped record into readable blocks of at most `max_text` characters each; None for None."""
    if record is None:
        return None
    blocks = _segment_blocks(record, max_text) or _flat_blocks(record, max_text)
    if len(blocks) > MAX_BLOCKS:
        left = len(blocks) - MAX_BLOCKS
        blocks = [*blocks[:MAX_BLOCKS], Block("template", "template", f"… {left} more parts")]
    score = record.get("score")
    step = record.get("step")
    return Conversation(
        step=step if isinstance(step, int) else 0,
        score=float(score) if is_number(score) else None,
        blocks=tuple(blocks),
        facts=tuple(_facts(record)),
    )


def _block(kind: str, text: object, label: str = "", max_text: int = MAX_TEXT) -> Block:
    clean = sanitize_text(str(text))
    return Block(kind, label or _LABELS[kind], clean[:max_text], max(len(clean) - max_text, 0))


def _segment_blocks(record: Mapping[str, Any], max_text: int) -> list[Block]:
    """Blocks of exact text by provenance, each turn's rewards after its tool results; empty if segments carry no text."""
    segments = [item for item in as_list(record.get("segments")) if isinstance(item, Mapping) and "text" in item]
    if not segments:
        return []
    rewards = _step_rewards(record)
    blocks = [_block("prompt", record.get("input", ""), max_text=max_text)]
    turn = ""
    for item in segments[:MAX_BLOCKS]:
        kind = provenance if (provenance := str(item.get("provenance"))) in _LABELS else "template"
        if kind == "sampled" and str(item.get("turn")) != turn:
            blocks += rewards.pop(turn, [])
            turn = str(item.get("turn"))
        if str(item["text"]):
            blocks.append(_block(str(kind), item["text"], max_text=max_text))
    return blocks + [block for group in rewards.values() for block in group]


def _step_rewards(record: Mapping[str, Any]) -> dict[str, list[Block]]:
    rewards = record.get("rewards")
    steps = rewards.get("steps") if isinstance(rewards, Mapping) else None
    groups: dict[str, list[Block]] = defaultdict(list)
    for entry in steps if isinstance(steps, list) else []:
        if isinstance(entry, list) and len(entry) == 3 and is_number(entry[2]) and entry[2] != 0:
            groups[str(entry[0])].append(_block("reward", f"{entry[2]:+.3g}", f"reward of {str(entry[1])[:60]}"))
    return groups


def _flat_blocks(record: Mapping[str, Any], max_text: int) -> list[Block]:
    response = _block("template", record.get("output", ""), "response", max_text)
    return [_block("prompt", record.get("input", ""), max_text=max_text), response]


def _facts(record: Mapping[str, Any]) -> Iterable[tuple[str, str]]:
    rewards = record.get("rewards")
    if isinstance(rewards, Mapping):
        if is_number(rewards.get("score")):
            yield "manager's score", f"{rewards['score']:.3g}"
        final = rewards.get("final")
        for tool, value in islice(final.items(), 8) if isinstance(final, Mapping) else ():
            yield f"{str(tool)[:60]} at the end", f"{value:.3g}" if is_number(value) else str(value)[:20]
    if isinstance(record.get("gts"), (str, int, float)):
        yield "expected", sanitize_text(str(record["gts"]))[:120]
    yield "ended", str(record.get("stop_reason", "?")).replace("_", " ")[:40]
    mask = as_list(record.get("response_mask"))
    if mask:
        yield "tokens", f"{len(mask)} ({sum(value == 1 for value in mask)} sampled)"
    images = [image for image in as_list(record.get("images")) if isinstance(image, Mapping)]
    if images:
        yield "images", f"{len(images)} ({', '.join(str(image.get('tokens')) for image in images[:8])} tokens)"
    if isinstance(record.get("num_turns"), int):
        yield "turns", str(record["num_turns"])
