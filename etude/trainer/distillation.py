"""On-policy distillation, the driver's part: which teacher scores which row, and what it reads.

Invariant: a teacher scores the sampled tokens as they are, after the policy's own prompt or, with a hint, after the row's
prompt rendered anew with the hint in its last user message. Nothing is sampled from a teacher.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from etude.agents.batch import IMAGES, rows_of
from etude.data import active_tools
from etude.errors import ConfigError, DataError
from etude.models import load_tokenizer
from etude.options import DistillationOptions
from etude.options.distillation import SELF, is_address
from etude.protocol import DataProto
from etude.trainer.setup import RunSetup
from etude.trajectory import KEPT_IDS


def check_teachers(setup: RunSetup, sources: Collection[str]) -> None:
    """Checks that each data source has a teacher, and that teachers in folders read the policy's token ids.

    Raises:
        ConfigError: names the data source or the teacher.
    """
    options = setup.roles.distillation
    for source in sorted(sources) if options.teachers else ():
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


def teacher_log_probs(setup: RunSetup, batch: DataProto) -> Tensor:
    """(rows, response_len) log-probs of the sampled tokens by each row's teacher, 0 elsewhere.

    Raises:
        DataError: the hint cannot be put into a row's prompt.
        EngineError: a teacher's server failed.
    """
    options, groups = setup.roles.distillation, setup.groups
    asked = batch if options.hint is None else with_hint(setup, batch, options)
    rows: dict[str, list[int]] = {}
    for row, source in enumerate(batch.non_tensor_batch["data_source"].tolist()):
        rows.setdefault(str(options.teacher_of(source)), []).append(row)
    found = torch.zeros(batch.batch["response_mask"].shape, dtype=torch.float32)
    for teacher, its_rows in rows.items():
        part = asked.select_idxs(its_rows)
        if teacher == SELF:
            scored = groups.actor.compute_log_prob(part).fetch().batch["old_log_probs"]
        else:
            scored = groups.teachers[teacher].compute_teacher_log_prob(part).fetch().batch["teacher_log_probs"]
        found = found.to(torch.promote_types(found.dtype, scored.dtype))
        found[its_rows] = scored.to(found.dtype)
    return found


def with_hint(setup: RunSetup, batch: DataProto, options: DistillationOptions) -> DataProto:
    """What the teachers read of `batch`: `input_ids`, `attention_mask`, `response_mask` and any `kept_ids`, with the hint in
    each prompt."""
    assert options.hint is not None
    columns, width = batch.batch, batch.batch["responses"].shape[1]
    prompts = [_hinted_prompt(setup, row, real, options.hint) for row, real in zip(rows_of(batch), _prompts_of(batch))]
    # Padded on the left: reversed, padded on the right, reversed again.
    reversed_ids = [torch.tensor(prompt[::-1], dtype=torch.long) for prompt in prompts]
    ids = pad_sequence(reversed_ids, batch_first=True, padding_value=setup.tokenizer.pad_token_id or 0).flip(1)
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
