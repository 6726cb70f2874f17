"""`build_index`: builds an index folder from a corpus file.

Invariant: `output` appears complete or not at all, and until then `Retriever` opens the index that it replaces, whenever the
build is killed. Work in progress is in `output` + `.building`, in parts of thousands of passages, each written atomically; a
killed build resumes after its last complete part, provided that corpus and options are the same, and results in the
same index as an uninterrupted one.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from etude.errors import ConfigError, EtudeError, one_line
from etude.jsonl import write_json
from etude.retrieval import bm25, dense
from etude.retrieval.corpus import Corpus, Fingerprint, scan
from etude.retrieval.index import MANIFEST, SPANS, VERSION, manifest_digest, set_aside, workplace
from etude.retrieval.options import BuildOptions

Progress = Callable[[str, int, int], None]
"""Called with (stage, passages done, total passages)."""
PART_ROWS = {"bm25": 20_000, "dense": 4_096}
_PLAN = "plan.json"
_DEFAULTS = BuildOptions()


def build_index(
    corpus: str | Path,
    output: str | Path,
    options: BuildOptions = _DEFAULTS,
    *,
    replace: bool = False,
    progress: Progress = lambda stage, done, total: None,
) -> Path:
    """Builds the index of `corpus` at `output` and returns its path; `replace`: whether to replace an existing index.

    Raises:
        ConfigError: `output` exists, or an option is invalid.
        DataError: the corpus is malformed; names file and line.
        MissingExtraError: a library that the method needs is not installed.
    """
    path, output = Path(corpus).expanduser().resolve(), Path(output).expanduser()
    if not output.exists() and (replaced := set_aside(output)).exists():  # a replacement was killed between its renames
        os.replace(replaced, output)
    if output.exists() and not (replace and (output / MANIFEST).is_file()):
        raise ConfigError(f"{output} exists; name another folder, or replace an index with --replace")
    words = bm25.word_splitter(options) if options.uses_bm25 else None
    encoder = dense.Encoder(options) if options.uses_dense else None
    progress("reading", 0, 0)
    spans, fingerprint = scan(path)
    manifest = {
        "version": VERSION,
        "corpus": {"path": str(path), "rows": len(spans), **asdict(fingerprint)},
        "options": asdict(options),
        **({"tokenizer": bm25.TOKENIZER} if words is not None else {}),
    }
    work = _workplace(output, manifest)
    rows = Corpus(path, spans)
    try:
        if words is not None:
            parts = _write_parts(work, "bm25", rows, progress, lambda part, texts: bm25.write_part(part, texts, words))
            bm25.join_parts(parts, work / "index", options)
        if encoder is not None:
            parts = _write_parts(
                work, "dense", rows, progress, lambda part, texts: dense.write_part(part, texts, encoder)
            )
            dense.join_parts(parts, work / "index", options, encoder)
        np.save(work / "index" / SPANS, spans)
        files = sorted((work / "index").iterdir())
        manifest["files"] = {file.name: Fingerprint.of(file).sha256 for file in files}
        write_json(work / "index" / MANIFEST, {**manifest, "sha256": manifest_digest(manifest)})
        _put_in_place(work, output)
    except OSError as error:
        raise EtudeError(f"cannot write {work}: {one_line(error)}; check folder and disk space") from error
    return output


def _workplace(output: Path, manifest: dict[str, Any]) -> Path:
    """Returns the folder for work in progress; cleared if it is from a build of another corpus or with other options."""
    work = workplace(output)
    plan = work / _PLAN
    fixed = {key: manifest["corpus"][key] for key in ("path", "rows", "sha256")}  # not the modification time
    wanted = json.loads(json.dumps({**manifest, "corpus": fixed}))
    try:
        same = json.loads(plan.read_bytes()) == wanted
    except (OSError, ValueError):
        same = False
    if not same:
        shutil.rmtree(work, ignore_errors=True)
    shutil.rmtree(work / "index", ignore_errors=True)
    (work / "index").mkdir(parents=True)
    (work / "parts").mkdir(exist_ok=True)
    write_json(plan, wanted)
    return work


def _write_parts(
    work: Path, kind: str, corpus: Corpus, progress: Progress, write: Callable[[Path, list[str]], None]
) -> list[Path]:
    parts = []
    for number, start in enumerate(range(0, len(corpus), PART_ROWS[kind])):
        rows = range(start, min(start + PART_ROWS[kind], len(corpus)))
        part = work / "parts" / f"{kind}-{number:06d}"
        if not part.exists():
            temporary = part.with_suffix(".tmp")
            write(temporary, list(corpus.contents(rows)))
            os.replace(temporary, part)
        parts.append(part)
        progress(kind, rows.stop, len(corpus))
    return parts


def _put_in_place(work: Path, output: Path) -> None:
    shutil.rmtree(set_aside(output), ignore_errors=True)
    if output.exists():
        os.replace(output, set_aside(output))
    os.replace(work / "index", output)
    shutil.rmtree(work, ignore_errors=True)
