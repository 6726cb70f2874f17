"""`export_rollouts`: a run's rollouts in the formats of other programs, one rollout in memory at a time.

Invariant: the same dumps give the same export: order, ids and times follow from the files alone. The target is absent or
complete. What a format has no place for (token ids, mask, log-probs, rewards) stands in its field for additions.
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
    """Writes `rows` to `out`, which must not exist, and returns how many.

    Raises:
        ConfigError: the format is unknown, or `out` exists.
        DataError: a record is malformed, or there is none; names its line.
        MissingExtraError: the format's own library is not installed.
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
    """A path beside `out`, of a file or a folder, that becomes `out` if the block ends well and is removed otherwise."""
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
