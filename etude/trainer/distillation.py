"""On-policy distillation, the driver's part: which teacher scores which row, and what it reads.

Invariant: a teacher scores the sampled tokens as they are, after the policy's own prompt or, with a hint, after the row's
prompt rendered anew with the hint in its last user message. Nothing is sampled from a teacher.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch

from etude.agents.batch import IMAGES, pad_rows, rows_of
from etude.data import active_tools
from etude.errors import ConfigError, DataError
from etude.model_folder import local_folder, longest_context, read_config
from etude.models import load_tokenizer
from etude.options import DistillationOptions
from etude.options.distillation import SELF, is_address
from etude.protocol import DataProto
from etude.trainer.setup import RunSetup
from etude.trajectory import KEPT_IDS


def check_teachers(setup: RunSetup, sources: Collection[str]) -> None:
    """Checks that each data source has a teacher, that teachers in folders read the policy's token ids, and that there are
    as many as `topk`.

    Raises:
        ConfigError: names the data source or the teacher.
    """
    options = setup.roles.distillation
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
        theirs = load_tokenizer(teacher, trust_remote_code=setup.roles.model.trust_remote_code).get_vocab()
        other = next((token for token, number in ours.items() if theirs.get(token) != number), None)
        if other is not None:
            raise ConfigError(
                f"distillation.teachers: {teacher} has another tokenizer than the policy: token {other!r} is "
                f"{theirs.get(other)} there and {ours[other]} here"
            )


def add_teacher_columns(setup: RunSetup, batch: DataProto) -> None:
    """Adds what each row's teacher says of its tokens: see `etude.workers.teacher.teacher_columns`.

    Raises:
        DataError: the hint cannot be put into a row's prompt, or a row is longer than its teacher reads.
        EngineError: a teacher's server failed.
    """
    options, groups = setup.roles.distillation, setup.groups
    asked = batch if options.hint is None else with_hint(setup, batch, options)
    rows: dict[str, list[int]] = {}
    for row, source in enumerate(batch.non_tensor_batch["data_source"].tolist()):
        rows.setdefault(str(options.teacher_of(source)), []).append(row)
    for teacher, its_rows in rows.items():
        part, group = asked.select_idxs(its_rows), groups.actor if teacher == SELF else groups.teachers[teacher]
        _check_lengths(setup, batch, teacher, its_rows, part.batch["attention_mask"].sum(dim=1).tolist())
        for name, scored in group.compute_teacher_log_prob(part).fetch().batch.items():
            column = batch.batch.get(name)
            if column is None:
                column = scored.new_zeros(len(batch), *scored.shape[1:])
            batch.batch[name] = column.to(torch.promote_types(column.dtype, scored.dtype))
            batch.batch[name][its_rows] = scored.to(batch.batch[name].dtype)


def _check_lengths(
    setup: RunSetup, batch: DataProto, teacher: str, rows: Sequence[int], lengths: Sequence[int]
) -> None:
    """A server says itself what is too long for it."""
    folder = None if teacher == SELF or is_address(teacher) else local_folder(teacher)
    limit = setup.longest_sequence if teacher == SELF else longest_context(read_config(folder)) if folder else None
    longest = max(range(len(rows)), key=lengths.__getitem__)
    if limit is not None and lengths[longest] > limit:
        columns, row = batch.non_tensor_batch, rows[longest]
        raise DataError(
            f"distillation.teachers: row {columns['index'][row]} of data_source '{columns['data_source'][row]}' has "
            f"{lengths[longest]} tokens with its answer and any hint, of which the teacher {teacher} reads {limit}: shorten "
            "distillation.hint or data.max_response_length, or take another teacher"
        )


def with_hint(setup: RunSetup, batch: DataProto, options: DistillationOptions) -> DataProto:
    """What the teachers read of `batch`: `input_ids`, `attention_mask`, `response_mask` and any `kept_ids`, with the hint in
    each prompt."""
    assert options.hint is not None
    columns, width = batch.batch, batch.batch["responses"].shape[1]
    prompts = [_hinted_prompt(setup, row, real, options.hint) for row, real in zip(rows_of(batch), _prompts_of(batch))]
    ids = pad_rows(prompts, setup.tokenizer.pad_token_id or 0, left=True)
    lengths = torch.tensor([[len(prompt)] for prompt in prompts])
    real = (torch.arange(-ids.shape[1], 0) >= -lengths).long()
    asked = DataProto.from_single_dict(
        {
            "input_ids": torch.cat([ids, columns["responses"]], dim=1),
            "attention_mask": torch.cat([real, columns["attention_mask"][:, -width:]], dim=1),
            "response_mask": columns["response_mask"],
        }
    )
    asked.meta_info = batch.meta_info
    if KEPT_IDS in batch.non_tensor_batch:
        asked.non_tensor_batch[KEPT_IDS] = batch.non_tensor_batch[KEPT_IDS]
    return asked


def _prompts_of(batch: DataProto) -> list[list[int]]:
    ids = batch.batch["prompts"]
    real = batch.batch["attention_mask"][:, : ids.shape[1]].bool()
    return [row[kept].tolist() for row, kept in zip(ids, real)]


def _hinted_prompt(setup: RunSetup, row: Mapping[str, Any], prompt: Sequence[int], hint: str) -> list[int]:
    """The ids of the row's prompt with the hint."""
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
    schemas = setup.schemas or {}
    return setup.chat.initial_ids(messages, [schemas[name] for name in active_tools(row, list(schemas))] or None)
