"""Exports a Parquet table with one row per rollout: ids, scores, texts, and the main sequence's token ids, mask and
log-probs as lists.

Nested values of varying shape (messages, tool calls, earlier sequences, extra_info) are JSON strings.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from etude.errors import DataError, one_line
from etude.jsonl import json_safe
from etude.viewer.exports.turns import ExportedRollout, valid
from etude.viewer.rows import calls_of

_BATCH = 256  # rollouts in memory
_JSON = ("messages", "tool_calls", "extra_info", "reward_weights", "sampling", "timings")

SCHEMA = pa.schema(
    [
        *((name, pa.string()) for name in ("place", "uid", "request_id", "split")),
        ("training_step", pa.int64()),
        ("data_source", pa.string()),
        ("score", pa.float64()),
        ("rewards", pa.map_(pa.string(), pa.float64())),
        *((name, pa.string()) for name in ("expected", "stop_reason", "input", "output")),
        ("turns", pa.int64()),
        ("prompt_ids", pa.list_(pa.int64())),
        ("response_ids", pa.list_(pa.int64())),
        ("response_mask", pa.list_(pa.int8())),
        ("response_log_probs", pa.list_(pa.float64())),
        *((name, pa.string()) for name in (*_JSON, "earlier")),
    ]
)


def export(rollouts: Iterator[ExportedRollout], out: Path) -> None:
    """Writes one file, batch by batch."""
    with pq.ParquetWriter(out, SCHEMA, compression="zstd") as writer:
        while batch := [_row(rollout) for rollout in islice(rollouts, _BATCH)]:
            try:
                table = pa.Table.from_pylist(batch, SCHEMA)
            except (OverflowError, pa.ArrowInvalid) as error:
                between = f"{batch[0]['place']} to {batch[-1]['place']}"
                raise DataError(f"{between}: a number is beyond parquet's 64 bits: {one_line(error)}") from error
            writer.write_table(table)


def _row(rollout: ExportedRollout) -> dict[str, Any]:
    record, facts = rollout.record, rollout.facts
    if "tool_calls" in record:  # as the turns, of all sequences
        record = record | {"tool_calls": calls_of(record)}
    main = rollout.sequences[-1] if rollout.sequences else {}
    return (
        {name: valid(value) if isinstance(value, str) else value for name, value in facts.items()}
        | {"rewards": [(valid(name), value) for name, value in rollout.row.rewards.items()]}
        | {name: valid(record.get(name)) for name in ("input", "output")}
        | {"turns": rollout.row.turns, **main, "earlier": json.dumps(json_safe(rollout.sequences[:-1]))}
        | {name: json.dumps(json_safe(record[name])) if name in record else None for name in _JSON}
    )
