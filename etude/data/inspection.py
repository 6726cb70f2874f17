"""`inspect_file`: reports what a data file holds, and the problems that a run would have with it.

Invariant: reads the file once and changes nothing; each row is checked as a run would check it, and each row's first
problem is kept with its location.
"""

from __future__ import annotations

import hashlib
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from etude.data.dumped import is_dump
from etude.data.files import Row, located_rows, without_nulls
from etude.data.images import image_tokens, place_images, refuse_other_media
from etude.data.rows import active_tools, check_ground_truth, check_row, question_of, truth_of
from etude.data.sft import check_demonstration
from etude.errors import ConfigError, DataError, one_line
from etude.options.model_path import local_folder
from etude.registry import did_you_mean
from etude.rewards.default import SCORERS
from etude.tools import load_tools

if TYPE_CHECKING:
    from etude.chat import ChatTemplate
    from etude.models import ImageReader

_ROW = re.compile(r"(?::|: row )\d+: ")  # of a file, before what is wrong with it
_BINS = 10
_BAR = 40
_SHOWN_VALUES = 8


@dataclass
class Inspection:
    """The result of an inspection; `lengths` are in `unit`."""

    file: Path
    kind: str = "prompts"
    rows: int = 0
    columns: dict[str, Counter[str]] = field(default_factory=dict)
    sources: Counter[str] = field(default_factory=Counter)
    agents: Counter[str] = field(default_factory=Counter)
    tool_kwargs: Counter[str] = field(default_factory=Counter)
    lengths: list[int] = field(default_factory=list)
    unit: str = "characters of the messages"
    problems: list[str] = field(default_factory=list)
    repeated: int = 0
    contrary: list[str] = field(default_factory=list)

    def lines(self, most: int) -> Iterator[str]:
        """Yields the lines of the report, with at most `most` kinds of problems."""
        yield f"{self.file}: {self.rows:,} rows, {self.kind}"
        yield "\ncolumns"
        for name, kinds in self.columns.items():
            missing = self.rows - sum(kinds.values())
            shown = ", ".join(f"{kind} {count:,}" for kind, count in kinds.most_common())
            yield f"  {name:<20} {shown}{f', missing {missing:,}' if missing else ''}"
        if unread := self.rows - len(self.lengths):
            yield f"\nwhat follows is without {unread:,} of the rows, which cannot be read: see the problems below"
        for title, counts in (
            ("data sources", self.sources),
            ("agents", self.agents),
            ("tool kwargs", self.tool_kwargs),
        ):
            if counts:
                yield f"\n{title}"
                yield from (f"  {name:<50} {count:>8,}" for name, count in counts.most_common(_SHOWN_VALUES))
                if len(counts) > _SHOWN_VALUES:
                    yield f"  … and {len(counts) - _SHOWN_VALUES:,} others"
        if self.lengths:
            yield f"\nlengths in {self.unit}"
            yield from histogram(self.lengths)
        if self.repeated:
            yield f"\n{self.repeated:,} rows repeat the prompt of an earlier one"
        if self.contrary:
            yield f"\n{len(self.contrary):,} rows ask what an earlier one asks, with another ground truth"
            yield from (f"  {each}" for each in self.contrary[:most])
        yield f"\n{len(self.problems):,} problems" if self.problems else "\nno problems"
        alike: dict[str, list[str]] = {}
        for problem in self.problems:
            alike.setdefault(_ROW.split(problem, maxsplit=1)[-1], []).append(problem)
        for first, *others in [*alike.values()][:most]:
            yield f"  {first}{f' ({1 + len(others):,} such rows)' if others else ''}"
        if left := sum(map(len, [*alike.values()][most:])):
            yield f"  … and {left:,} others"


def histogram(values: Sequence[int]) -> Iterator[str]:
    """Yields quantiles, then bars over ten equal ranges."""
    ordered = sorted(values)
    at = {name: ordered[min(len(ordered) - 1, int(share * len(ordered)))] for name, share in _QUANTILES.items()}
    yield "  " + ", ".join(f"{name} {value:,}" for name, value in at.items())
    low, high = ordered[0], ordered[-1]
    width = max(1, -(-(high - low + 1) // _BINS))
    counts = Counter((value - low) // width for value in ordered)
    for place in range((high - low) // width + 1):
        start = low + place * width
        bar = "█" * -(-counts[place] * _BAR // max(counts.values()))
        yield f"  {start:>8,}-{start + width - 1:<8,} {counts[place]:>8,} {bar}"


_QUANTILES = {"min": 0.0, "median": 0.5, "90 %": 0.9, "99 %": 0.99, "max": 1.0}


def inspect_file(
    file: Path,
    *,
    model: str | None = None,
    tool_config: Path | None = None,
    prompt_key: str = "prompt",
    image_key: str = "images",
    tools_in_system: str | None = None,
    chat_template_kwargs: Mapping[str, Any] | None = None,
) -> Inspection:
    """Inspects `file`: prompts, conversations, or a rollout dump; `tools_in_system` is the `multi_turn.format` of a run that
    writes tools into the system message, `chat_template_kwargs` its `data.apply_chat_template_kwargs`.

    Raises:
        DataError: the file cannot be read.
        ConfigError: the model's folder has no tokenizer, or the tool configuration is invalid.
    """
    report = Inspection(file)
    tools = None if tool_config is None else load_tools(str(tool_config))
    schemas = None if tools is None else {tool.name: tool.get_openai_tool_schema().to_openai() for tool in tools}
    chat, reader = (None, None) if model is None else _chat_of(model, tools_in_system, chat_template_kwargs or {})
    if chat is not None:
        report.unit = _unit(chat, with_tools=schemas is not None)
    dump = is_dump(str(file))
    prompts, questions = set[bytes](), dict[str, tuple[str | None, str]]()
    for where, row in located_rows(file):
        report.rows += 1
        for name, value in row.items():
            report.columns.setdefault(name, Counter())
            if value is not None:
                report.columns[name][type(value).__name__] += 1
        try:
            if dump:
                report.kind, report.unit = "rollouts", "tokens, responses included"
                report.lengths.append(len(row["prompt_ids"]) + sum(len(part["token_ids"]) for part in row["segments"]))
            elif "messages" in row and prompt_key not in row:
                report.kind = "conversations"
                if chat is not None:  # which have their own tools
                    report.unit = _unit(chat, with_tools=True)
                talk = check_demonstration(row, where, image_key, file.parent)
                report.lengths.append(_talk_length(talk, where, schemas, chat, reader))
            else:
                _inspect_prompt(report, row, where, (prompt_key, image_key), schemas, chat, reader, prompts, questions)
        except (DataError, ConfigError, KeyError, TypeError, ValueError) as error:
            text = one_line(error)
            report.problems.append(text if text.startswith(str(file)) else f"{where}: {text}")
    return report


def _inspect_prompt(
    report: Inspection,
    row: Row,
    where: str,
    keys: tuple[str, str],
    schemas: Mapping[str, Any] | None,
    chat: ChatTemplate | None,
    reader: ImageReader | None,
    prompts: set[bytes],
    questions: dict[str, tuple[str | None, str]],
) -> None:
    prompt_key, image_key = keys
    info = row.get("extra_info")
    info = without_nulls(info) if isinstance(info, Mapping) else {}
    tool_kwargs, interaction_kwargs = (
        kwargs if isinstance(kwargs, Mapping) else {}
        for kwargs in (info.get("tools_kwargs"), info.get("interaction_kwargs"))
    )
    # without a tool configuration, the row's own tools are assumed to exist
    names = list(schemas) if schemas is not None else list(tool_kwargs)
    interaction = interaction_kwargs.get("name")
    checked = check_row(row, where, names, prompt_key, [interaction] if interaction else ())
    source = checked["data_source"]
    refuse_other_media(checked, where)
    tokens: tuple[int, ...] = ()
    if chat is not None:
        tokens = image_tokens(reader, place_images(checked, image_key, prompt_key, report.file.parent, where), where)
    messages, truth = checked[prompt_key], truth_of(checked)
    shown = repr((messages, checked.get(image_key), checked.get("images")))
    digest = hashlib.blake2b(shown.encode("utf-8", "surrogatepass")).digest()
    report.repeated += digest in prompts
    prompts.add(digest)
    other, first = questions.setdefault(question_of(checked, messages), (truth, where))
    if other != truth:
        report.contrary.append(f"{where} says {truth!r:.60} and {first} says {other!r:.60}")
    active = [schemas[name] for name in active_tools(checked, list(schemas))] if schemas else None
    report.lengths.append(_length(messages, chat, active, tokens))
    report.sources[source] += 1
    report.agents[checked.get("agent_name") or "(by the row's tools)"] += 1
    for tool, kinds in tool_kwargs.items():
        for kind, values in kinds.items():
            report.tool_kwargs[f"{tool}.{kind}({', '.join(sorted(values or {}))})"] += 1
    try:
        check_ground_truth(checked, where)
    except ConfigError as error:  # which the file cannot know to be meant
        near = did_you_mean(source, SCORERS.names())
        line = f"{where}: no scorer for the data source '{source}'{near}; right with a custom_reward_function"
        raise DataError(line) from error


def _talk_length(
    talk: Row, where: str, schemas: Mapping[str, Any] | None, chat: ChatTemplate | None, reader: ImageReader | None
) -> int:
    if chat is None:
        return _length(talk["messages"], chat, None)
    tools = talk["tools"] or list((schemas or {}).values()) or None
    tokens = image_tokens(reader, talk.get("images", ()), where)
    return sum(len(ids) for ids, _ in chat.demonstration(talk["messages"], tools, tokens))


def _length(
    messages: Sequence[Mapping[str, Any]], chat: ChatTemplate | None, tools: Any, images: Sequence[int] = ()
) -> int:
    if chat is not None:
        return chat.prompt_length(list(messages), tools, images)
    return sum(len(part) if isinstance(part, str) else 0 for message in messages for part in [message.get("content")])


def _unit(chat: ChatTemplate, *, with_tools: bool) -> str:
    if not with_tools:
        return "tokens, without tool schemas (--tools adds them)"
    if not chat.shows_tools:
        return "tokens, without tool schemas: the chat template shows none (--tools-in-system adds them)"
    return "tokens, tool schemas included"


def _chat_of(
    model: str, tools_in_system: str | None, kwargs: Mapping[str, Any]
) -> tuple[ChatTemplate, ImageReader | None]:
    from etude.chat import ChatTemplate, ToolParser
    from etude.models import ImageReader, load_processor, load_tokenizer

    folder = local_folder(model)
    is_tokenizer = folder is not None and not (folder / "config.json").exists()  # alone: it reads text
    processor = None if is_tokenizer else load_processor(model)
    tokenizer = load_tokenizer(model) if processor is None else processor.tokenizer
    parser = None if tools_in_system is None else ToolParser.get_tool_parser(tools_in_system, tokenizer)
    chat = ChatTemplate(tokenizer, tools_in_system=parser, processor=processor, **kwargs)
    return chat, None if processor is None else ImageReader(processor)
