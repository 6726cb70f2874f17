"""On-policy distillation, the driver's part: which teacher scores which row, and with which prompt.

Invariant: a teacher scores exactly the sampled tokens, after the policy's own prompt or, with a hint, after the row's prompt
re-rendered with the hint in its last user message. Nothing is sampled from a teacher.

A hint may quote what came of the rollouts themselves (SDPO, self-distillation policy optimization, arXiv 2601.20802):
`{solution}`, the text of another rollout of the prompt that succeeded, and `{feedback}`, what the scorer said of this one.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from string import Formatter
from typing import Any

import torch

from etude.agents.batch import IMAGES, pad_rows, rows_of
from etude.algorithms.distillation import ABSENT
from etude.chat import ChatTemplate
from etude.checks.setup import Setup
from etude.data import active_tools
from etude.distributed import reads
from etude.errors import ConfigError, DataError
from etude.models import load_tokenizer
from etude.options import TrainOptions
from etude.options.distillation import SELF, is_address
from etude.options.model_path import local_folder, longest_context, read_config
from etude.protocol import DataProto
from etude.trainer.metrics import is_success
from etude.trainer.rollouts import Batch, rollouts_of
from etude.trainer.worker_groups import WorkerGroups
from etude.trajectory import KEPT_IDS
from etude.workers.role import TOKENS

SOLUTION, FEEDBACK = "solution", "feedback"


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
    """Scores each row with its teacher; returns the columns of `etude.workers.teacher.teacher_columns`, `ABSENT` in rows
    without a solution or feedback that their hint could quote.

    Raises:
        DataError: the hint cannot be inserted into a row's prompt, or a row exceeds its teacher's context length.
        EngineError: a teacher's server failed.
    """
    parts = groups.run(divide_among_teachers, batch, setup.options, setup.schemas or {}, with_chat=True)
    scored = [
        (rows, (groups.actor if teacher == SELF else groups.teachers[teacher]).compute_teacher_log_prob(part))
        for teacher, rows, part in parts
    ]
    merged: Batch = groups.run(merge_scored, scored, len(batch)) if scored else groups.run(unscored, batch)
    return merged


def divide_among_teachers(
    chat: ChatTemplate, batch: DataProto, options: TrainOptions, schemas: Mapping[str, Any]
) -> list[tuple[str, list[int], DataProto]]:
    """Returns for each teacher its rows and their inputs: `input_ids`, `attention_mask`, `response_mask`, any `kept_ids` and
    images; with the hint, if any, in each prompt. Rows whose hint has nothing to quote are left out."""
    hints, rows = _hints(chat, batch, options), dict[str, list[int]]()
    for row, source in enumerate(batch.non_tensor_batch["data_source"].tolist()):
        if hints is None or hints[row] is not None:
            rows.setdefault(str(options.distillation.teacher_of(source)), []).append(row)
    objects = [name for name in (IMAGES, KEPT_IDS) if name in batch.non_tensor_batch]
    asked = batch.select(TOKENS, objects)
    if hints is not None:
        width = batch.batch["prompts"].shape[1]
        real = batch.batch["attention_mask"][:, :width].bool()
        given = [ids[kept].tolist() for ids, kept in zip(batch.batch["prompts"], real)]
        prompts = [
            prompt if hint is None else _render_with_hint(chat, schemas, row, prompt, hint)
            for row, prompt, hint in zip(rows_of(batch), given, hints)
        ]
        asked.batch.update(_add_hints(chat, batch, prompts))
    lengths = asked.batch["attention_mask"].sum(dim=1).tolist()
    for teacher, its_rows in rows.items():
        _check_lengths(options, batch, teacher, max(its_rows, key=lengths.__getitem__), lengths)
    return [(teacher, its_rows, asked.select_idxs(its_rows)) for teacher, its_rows in rows.items()]


def merge_scored(scored: Sequence[tuple[list[int], DataProto]], size: int) -> DataProto:
    """Merges the columns of all teachers in the order of the `size` rows; zeros for rows whose teacher lacks a column,
    `ABSENT` log-probs for rows that no teacher scored."""
    columns = dict[str, torch.Tensor]()
    left_out = sorted({*range(size)} - {row for rows, _ in scored for row in rows})
    for rows, part in scored:
        for name, values in part.batch.items():
            column = columns.get(name, values.new_zeros(size, *values.shape[1:]))
            columns[name] = column.to(torch.promote_types(column.dtype, values.dtype))
            columns[name][rows] = values.to(columns[name].dtype)
    for name, column in columns.items():
        if name.endswith("_log_probs"):
            column[left_out] = ABSENT
    return DataProto.from_single_dict(columns)


@reads("response_mask")
def unscored(batch: DataProto) -> DataProto:
    """Returns `teacher_log_probs` of a batch of which no teacher scored a row."""
    return DataProto.from_single_dict({"teacher_log_probs": torch.full(batch.batch["response_mask"].shape, ABSENT)})


def _hints(chat: ChatTemplate, batch: DataProto, options: TrainOptions) -> list[str | None] | None:
    """Returns each row's hint, filled in; None for a row that it has nothing to quote for, or None if there is no hint."""
    template = options.distillation.hint
    if template is None:
        return None
    quotes = _named(template) & {SOLUTION, FEEDBACK}
    outcomes = _outcomes(chat, batch, options) if quotes else [{}] * len(batch)
    return [_fill_in(template, row, found, quotes) for row, found in zip(rows_of(batch), outcomes)]


def _outcomes(chat: ChatTemplate, batch: DataProto, options: TrainOptions) -> list[dict[str, str]]:
    """Of each row, the `SOLUTION` (text of the first other successful rollout of its prompt) and `FEEDBACK` that exist."""
    weights = options.reward_model.tool_reward_weight, options.reward_model.score_weight
    rollouts, solved = rollouts_of(batch), dict[str, list[Any]]()
    for uid, rollout in zip(batch.non_tensor_batch["uid"].tolist(), rollouts):
        trajectory, known = rollout.trajectory, solved.setdefault(uid, [])
        if trajectory is None or any(trajectory is each for each in known):
            continue
        if is_success(trajectory.rewards, *weights):
            known.append(trajectory)
    found = []
    for uid, rollout in zip(batch.non_tensor_batch["uid"].tolist(), rollouts):
        info = {} if rollout.trajectory is None else rollout.trajectory.rewards.score_info
        feedback = str(info.get(FEEDBACK) or "").strip()
        other = next((each for each in solved[uid] if each is not rollout.trajectory), None)
        text = "" if other is None else chat.tokenizer.decode(other.response_ids, skip_special_tokens=True).strip()
        # The policy wrote, or may have moved the scorer to quote, what would end the teacher's turn.
        found.append({name: chat.disarm(text) for name, text in ((SOLUTION, text), (FEEDBACK, feedback)) if text})
    return found


def _fill_in(template: str, row: Mapping[str, Any], found: Mapping[str, str], quotes: Collection[str]) -> str | None:
    """Fills in a row's hint, without the lines that quote what was not `found`; None if no other line quotes. A key of the
    row's own goes before what was found."""
    own = {name: value for name, value in (row.get("extra_info") or {}).items() if value is not None}
    known = {**(row.get("extra_info") or {}), "ground_truth": (row.get("reward_model") or {}).get("ground_truth")}
    kept, quoted = [], False
    for line in template.splitlines():
        named = _named(line) & {*quotes}
        if named <= found.keys() | own.keys():
            kept.append(line)
            quoted |= bool(named)
    if quotes and not quoted:
        return None
    try:
        return "\n".join(kept).format_map({**known, **found, **own})
    except (KeyError, ValueError, IndexError, AttributeError) as error:
        raise DataError(f"{_where(row)}: cannot fill in {template!r}: {type(error).__name__} {error}") from error


def _named(text: str) -> set[str]:
    """The names in braces of a template, whose braces may be unbalanced."""
    try:
        return {name for _, name, *_ in Formatter().parse(text) if name}
    except ValueError:  # `_fill_in` says where
        return set()


def _where(row: Mapping[str, Any]) -> str:
    return f"distillation.hint: row {row.get('index')} of data_source '{row['data_source']}'"


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


def _render_with_hint(
    chat: ChatTemplate, schemas: Mapping[str, Any], row: Mapping[str, Any], prompt: Sequence[int], hint: str
) -> list[int]:
    """Returns the token ids of the row's prompt with the hint."""
    where = _where(row)
    if row.get(IMAGES):
        raise DataError(f"{where} has images, which a hint does not go with")
    if list(prompt) != list(row["raw_prompt_ids"]):
        raise DataError(f"{where}: its agent changed the prompt, so that there is no place for the hint")
    messages = [dict(message) for message in row["raw_prompt"]]
    asked = next((message for message in reversed(messages) if message["role"] == "user"), None)
    if asked is None:
        raise DataError(f"{where} has no user message")
    asked["content"] = f"{asked['content']}\n{hint}"
    return chat.initial_ids(messages, [schemas[name] for name in active_tools(row, list(schemas))] or None)
