"""Renders dumped trajectories as readable conversations: text blocks by provenance, with the rewards in between.

Invariant: for any record, the result is bounded in blocks and characters and free of control characters. Text is labelled
as the model's only if the policy sampled its segment; if segments carry no text, the whole response is one block without an
author.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any

from etude.viewer.rows import as_dict, as_list, first_response, is_number, message_text, message_turns, own_turns

MAX_TEXT = 6000  # characters per block
MAX_BLOCKS = 80

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
    counted = _REPEATED.sub(lambda found: f"{found[1]}×{len(found[0]) // len(found[1])}", text)
    return counted.translate(_CONTROL)


@dataclass(frozen=True)
class Block:
    """A span of text from one source: `kind` is a provenance, "prompt" or "reward"; `omitted` characters were truncated. A
    message that the policy wrote has its `turn`."""

    kind: str
    label: str
    text: str
    omitted: int = 0
    turn: int | None = None


@dataclass(frozen=True)
class Conversation:
    """One trajectory: its exact text as `blocks`; the same as `messages`, without the template's tokens, if it was recorded
    so; and `facts` about it as (name, value)."""

    blocks: tuple[Block, ...]
    messages: tuple[Block, ...]
    facts: tuple[tuple[str, str], ...]


def parse_conversation(record: Mapping[str, Any], max_text: int = MAX_TEXT) -> Conversation:
    """Turns a dumped record into readable blocks of at most `max_text` characters each."""
    blocks = _segment_blocks(record, max_text)
    if not blocks:
        response = _block("template", record.get("output", ""), "response", max_text)
        blocks = [_block("prompt", record.get("input", ""), max_text=max_text), response]
    return Conversation(_bounded(blocks), _bounded(_messages(record, max_text)), tuple(_facts(record)))


def _bounded(blocks: list[Block]) -> tuple[Block, ...]:
    left = len(blocks) - MAX_BLOCKS
    return (*blocks[:MAX_BLOCKS], *([Block("template", "template", f"… {left} more parts")] if left > 0 else []))


_ROLES = {"system": "prompt", "user": "user", "tool": "tool"}


def _messages(record: Mapping[str, Any], max_text: int) -> list[Block]:
    """The recorded messages; tools' answers to the policy are left out where `tool_calls` has them."""
    messages, first = as_list(record.get("messages")), first_response(record)
    called = {call.get("turn") for call in map(as_dict, as_list(record.get("tool_calls")))}
    blocks, turn, rewards = list[Block](), -1, _step_rewards(record)
    numbers = iter(message_turns(record))
    for at, message in enumerate(map(as_dict, messages)):
        role, text = str(message.get("role"))[:60], message_text(message)
        if at >= first and role == "assistant":
            turn = next(numbers, turn + 1)
            blocks.append(replace(_block("sampled", text, "model", max_text), turn=turn))
            blocks += [block for block in rewards.pop(str(turn), []) if turn not in called]
        elif text and not (role == "tool" and turn in called):
            label = "assistant, in the prompt" if role == "assistant" else role
            blocks.append(_block(_ROLES.get(role, "prompt"), text, label, max_text))
    return blocks


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
    groups: dict[str, list[Block]] = defaultdict(list)
    for entry in as_list(as_dict(record.get("rewards")).get("steps")):
        if isinstance(entry, list) and len(entry) == 3 and is_number(entry[2]) and entry[2] != 0:
            groups[str(entry[0])].append(_block("reward", f"{entry[2]:+.3g}", f"reward of {str(entry[1])[:60]}"))
    return groups


def _facts(record: Mapping[str, Any]) -> Iterable[tuple[str, str]]:
    rewards = as_dict(record.get("rewards"))
    if is_number(rewards.get("score")):
        yield "reward function", f"{rewards['score']:.3g}"
    for tool, value in islice(as_dict(rewards.get("final")).items(), 8):
        yield f"reward of {str(tool)[:60]}, at the end", f"{value:.3g}" if is_number(value) else str(value)[:20]
    if isinstance(record.get("gts"), (str, int, float)):
        yield "expected", sanitize_text(str(record["gts"]))[:120]
    yield "ended", str(record.get("stop_reason", "?")).replace("_", " ")[:40]
    mask = as_list(record.get("response_mask"))
    if mask:
        yield "tokens", f"{len(mask)} ({sum(value == 1 for value in mask)} sampled)"
    images = [image for image in as_list(record.get("images")) if isinstance(image, Mapping)]
    if images:
        yield "images", f"{len(images)} ({', '.join(str(image.get('tokens')) for image in images[:8])} tokens)"
    if written := own_turns(record):
        yield "assistant turns", str(written)
