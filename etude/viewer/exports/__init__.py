"""`export_rollouts`: streams a run's rollouts into the formats of other programs.

Invariant: exports are deterministic: order, ids and times follow from the dumps alone. The target is either absent or
complete. Data that a format has no field for (token ids, mask, log-probs, rewards) go into its extension field.
"""

from __future__ import annotations

import importlib
import os
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from etude.errors import ConfigError, DataError, EtudeError, one_line
from etude.viewer.exports.turns import ExportedRollout, read_rollout
from etude.viewer.index import RolloutIndex
from etude.viewer.rows import Row

Exporter = Callable[[Iterator[ExportedRollout], Path], None]

FORMATS = {
    "atif": "ATIF 1.7 trajectories (Harbor): a folder of JSON files, or one .jsonl",
    "inspect": "a folder of Inspect .eval logs, one a step",
    "otel": "OpenTelemetry gen_ai spans, as OTLP JSON lines",
    "parquet": "a parquet table with ids, mask and log-probs",
}


def export_rollouts(index: RolloutIndex, rows: Sequence[Row], format: str, out: Path) -> int:
    """Writes `rows` to `out`, which must not exist; returns the number of rollouts.

    Raises:
        ConfigError: the format is unknown, or `out` exists.
        DataError: `rows` is empty, or a record is malformed; names its line.
        MissingExtraError: the library that the format needs is not installed.
        EtudeError: `out` cannot be written.
    """
    if format not in FORMATS:
        raise ConfigError(f"--format {format}: known are {', '.join(FORMATS)}")
    if not rows:
        raise DataError(f"{index.path}: no rollout to export")
    export: Exporter = importlib.import_module(f"etude.viewer.exports.{format}").export
    with _write_whole(out) as target:
        export((read_rollout(index, row) for row in rows), target)
    return len(rows)


@contextmanager
def _write_whole(out: Path) -> Iterator[Path]:
    """Yields a temporary path next to `out`, renamed to `out` if the block succeeds and removed otherwise."""
    if out.exists():
        raise ConfigError(f"{out} exists: name a new file or folder, or remove it")
    temporary = out.with_name(f".{os.getpid()}.{out.name}")
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        yield temporary
        temporary.rename(out)
    except OSError as error:
        raise EtudeError(f"cannot write {out}: {one_line(error)}; check folder and disk space") from error
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
        with suppress(OSError):
            temporary.unlink(missing_ok=True)
