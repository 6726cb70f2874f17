"""On-policy distillation, the driver's part: which teacher scores which row, and with which prompt.

Invariant: a teacher scores exactly the sampled tokens, after the policy's own prompt or, with a hint, after the row's prompt
re-rendered with the hint in its last user message. Nothing is sampled from a teacher.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

import torch

from etude.agents.batch import IMAGES, pad_rows, rows_of
from etude.chat import ChatTemplate
from etude.checks.setup import Setup
from etude.data import active_tools
from etude.errors import ConfigError, DataError
from etude.model_folder import local_folder, longest_context, read_config
from etude.models import load_tokenizer
from etude.options import TrainOptions
from etude.options.distillation import SELF, is_address
from etude.protocol import DataProto
from etude.trainer.rollouts import Batch
from etude.trainer.worker_groups import WorkerGroups
from etude.trajectory import KEPT_IDS
from etude.workers.role import TOKENS


def check_teachers(setup: Setup, sources: Collection[str]) -> None:
    """Checks that each data source has a teacher, that local teachers have the policy's token ids, and that the vocabulary
    has at least `topk` tokens.

    Raises:
        ConfigError: names the data source or the teacher.
    """
    options = setup.options.distillation
    if not options.teachers:
        return
    if options.topk > len(setup.tokenizer):
        raise ConfigError(
            f"distillation.distillation_loss.topk={options.topk}: the tokenizer has only {len(setup.tokenizer)} tokens"
        )
    for source in sorted(sources):
        if options.teacher_of(source) is None:
            raise ConfigError(f"distillation.teachers: no teacher for data_source '{source}'; add it, or `default`")
    ours = setup.tokenizer.get_vocab()
    for teacher in dict.fromkeys(options.teachers.values()):
        if teacher == SELF or is_address(teacher):
            continue
        theirs = load_tokenizer(teacher, trust_remote_code=setup.options.model.trust_remote_code).get_vocab()
        other = next((token for token, number in ours.items() if theirs.get(token) != number), None)
        if other is not None:
            raise ConfigError(
                f"distillation.teachers: {teacher} has another tokenizer than the policy: token {other!r} is "
                f"{theirs.get(other)} there and {ours[other]} here"
            )


def ask_teachers(setup: Setup, groups: WorkerGroups, batch: Batch) -> Batch:
    """Scores each row with its teacher; returns the columns of `etude.workers.teacher.teacher_columns`.

    Raises:
        DataError: the hint cannot be inserted into a row's prompt, or a row exceeds its teacher's context length.
        EngineError: a teacher's server failed.
    """
    parts = groups.run(divide_among_teachers, batch, setup.options, setup.schemas or {}, with_chat=True)
    scored = [
        (rows, (groups.actor if teacher == SELF else groups.teachers[teacher]).compute_teacher_log_prob(part))
        for teacher, rows, part in parts
    ]
    merged: Batch = groups.run(merge_scored, scored)
    return merged


def divide_among_teachers(
    chat: ChatTemplate, batch: DataProto, options: TrainOptions, schemas: Mapping[str, Any]
) -> list[tuple[str, list[int], DataProto]]:
    """Returns for each teacher its rows and their inputs: `input_ids`, `attention_mask`, `response_mask`, any `kept_ids` and
    images; with the hint, if any, in each prompt."""
    hint, rows = options.distillation.hint, dict[str, list[int]]()
    for row, source in enumerate(batch.non_tensor_batch["data_source"].tolist()):
        rows.setdefault(str(options.distillation.teacher_of(source)), []).append(row)
    objects = [name for name in (IMAGES, KEPT_IDS) if name in batch.non_tensor_batch]
    asked = batch.select(TOKENS, objects)
    if hint is not None:
        asked.batch.update(
            _add_hints(chat, batch, [_render_with_hint(chat, schemas, *each, hint) for each in _prompts_of(batch)])
        )
    lengths = asked.batch["attention_mask"].sum(dim=1).tolist()
    for teacher, its_rows in rows.items():
        _check_lengths(options, batch, teacher, max(its_rows, key=lengths.__getitem__), lengths)
    return [(teacher, its_rows, asked.select_idxs(its_rows)) for teacher, its_rows in rows.items()]


def merge_scored(scored: Sequence[tuple[list[int], DataProto]]) -> DataProto:
    """Merges the columns of all teachers in the original row order; zeros for rows whose teacher lacks a column."""
    size, columns = sum(len(rows) for rows, _ in scored), dict[str, torch.Tensor]()
    for rows, part in scored:
        for name, values in part.batch.items():
            column = columns.get(name, values.new_zeros(size, *values.shape[1:]))
            columns[name] = column.to(torch.promote_types(column.dtype, values.dtype))
            columns[name][rows] = values.to(columns[name].dtype)
    return DataProto.from_single_dict(columns)


def _check_lengths(options: TrainOptions, batch: DataProto, teacher: str, longest: int, lengths: Sequence[int]) -> None:
    """Checks the longest row of a local teacher; a server checks its own limit."""
    folder = None if teacher == SELF or is_address(teacher) else local_folder(teacher)
    limit = options.longest_sequence if teacher == SELF else longest_context(read_config(folder)) if folder else None
    if limit is not None and lengths[longest] > limit:
        columns = batch.non_tensor_batch
        raise DataError(
            f"distillation.teachers: row {columns['index'][longest]} of data_source '{columns['data_source'][longest]}' has "
            f"{lengths[longest]} tokens with its answer and any hint, of which the teacher {teacher} reads {limit}: shorten "
            "distillation.hint or data.max_response_length, or take another teacher"
        )


def _add_hints(chat: ChatTemplate, batch: DataProto, prompts: Sequence[Sequence[int]]) -> dict[str, torch.Tensor]:
    """Returns `input_ids` and `attention_mask` with the prompts replaced."""
    columns, width = batch.batch, batch.batch["responses"].shape[1]
    ids = pad_rows(prompts, chat.tokenizer.pad_token_id or 0, left=True)
    real = torch.arange(-ids.shape[1], 0) >= -torch.tensor([[len(prompt)] for prompt in prompts])
    return {
        "input_ids": torch.cat([ids, columns["responses"]], dim=1),
        "attention_mask": torch.cat([real.long(), columns["attention_mask"][:, -width:]], dim=1),
    }


def _prompts_of(batch: DataProto) -> Iterator[tuple[dict[str, Any], list[int]]]:
    """Returns each row with its prompt's token ids."""
    ids = batch.batch["prompts"]
    real = batch.batch["attention_mask"][:, : ids.shape[1]].bool()
    return zip(rows_of(batch), (row[kept].tolist() for row, kept in zip(ids, real)))


def _render_with_hint(
    chat: ChatTemplate, schemas: Mapping[str, Any], row: Mapping[str, Any], prompt: Sequence[int], hint: str
) -> list[int]:
    """Returns the token ids of the row's prompt with the hint."""
    where = f"distillation.hint: row {row.get('index')} of data_source '{row['data_source']}'"
    if row.get(IMAGES):
        raise DataError(f"{where} has images, which a hint does not go with")
    if list(prompt) != list(row["raw_prompt_ids"]):
        raise DataError(f"{where}: its agent changed the prompt, so that there is no place for the hint")
    known = {**(row.get("extra_info") or {}), "ground_truth": (row.get("reward_model") or {}).get("ground_truth")}
    try:
        text = hint.format_map(known)
    except (KeyError, ValueError, IndexError, AttributeError) as error:
        raise DataError(f"{where}: cannot fill in {hint!r}: {type(error).__name__} {error}") from error
    messages = [dict(message) for message in row["raw_prompt"]]
    asked = next((message for message in reversed(messages) if message["role"] == "user"), None)
    if asked is None:
        raise DataError(f"{where} has no user message")
    asked["content"] = f"{asked['content']}\n{text}"
    return chat.initial_ids(messages, [schemas[name] for name in active_tools(row, list(schemas))] or None)
