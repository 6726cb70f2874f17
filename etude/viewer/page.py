"""A run as one HTML file, such as its `report.html`: the web viewer's pages with the server's answers embedded.

Invariant: the file makes no request and runs a single script, which its content security policy allows by hash. The data
are embedded as JSON without "<", so that an HTML parser cannot leave the script element. The file is bounded in
trajectories and bytes; of each folder of dumps only the first and the last are read.
"""

from __future__ import annotations

import base64
import hashlib
import json
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

from etude.errors import DataError
from etude.jsonl import json_safe, write_atomically
from etude.run_folder import CONFIG_FILE, METRICS_FILE, REPORT_FILE, SUMMARY_FILE
from etude.viewer import answers
from etude.viewer.rows import Row
from etude.viewer.runs import RunView

PAGES = Path(__file__).with_name("pages")
MAX_TRAJECTORIES = 200
MAX_BYTES = 24 * 2**20
REPORT_TRAJECTORIES = 40
_MAX_TOKENS = 20_000  # per sequence
_MODULES = ("dom", "api", "charts", "trajectories", "trajectory", "overview", "why", "timeline", "compare", "app")
_IMPORT = re.compile(r'^import \{([^}]*)\} from "\./(\w+)\.js";$', re.M)
_EXPORT = re.compile(r"^export (?=(?:async )?(?:const|function) (\w+))", re.M)


def write_report(
    run_dir: Path | str,
    *,
    title: str = "",
    rollouts: Path | str | None = None,
    validation: Path | str | None = None,
) -> Path:
    """Writes `{run_dir}/report.html` and returns its path.

    Args:
        run_dir: a run folder.
        title: defaults to the folder's name.
        rollouts, validation: the dump folders, if they are not those of the run folder or its configuration.

    Raises:
        DataError: the folder does not exist or is not a run folder, or its `summary.json` is malformed.
        EtudeError: the page cannot be written.
    """
    run_dir = Path(run_dir)
    if not run_dir.is_dir():
        raise DataError(f"run folder not found: {run_dir}; give the folder a run wrote (trainer.default_local_dir)")
    given = {"train": rollouts, "validation": validation}
    named = {split: Path(folder) for split, folder in given.items() if folder is not None}
    run = RunView("", run_dir, title, named, ends=True)
    _write_run(run, run_dir / REPORT_FILE, REPORT_TRAJECTORIES)
    return run_dir / REPORT_FILE


def write_page(path: Path, output: Path, place: str = "") -> int:
    """Writes the run in `path` to `output`, or with `place` only that trajectory and its siblings; returns the number of
    trajectories written. Of a run these are those of its results, the last step's, the last validation's and the first
    step's, within the limits on count and bytes.

    Raises:
        DataError: there is no such run or trajectory, or the run is empty.
        EtudeError: the file cannot be written.
    """
    if not path.exists():
        raise DataError(f"{path}: no such file or folder; name a run's folder or rollout dumps")
    if not place:
        return _write_run(RunView("", path, ends=True), output, MAX_TRAJECTORIES)
    run = RunView("", path)
    run.index.refresh()  # all that there is to read
    if (row := run.index.find(place)) is None:
        raise DataError(f"{path} has no trajectory '{place}'; one is named such as rollouts/12.jsonl:3")
    others = [each for each in run.index.siblings(row) if each != row]
    return _write(output, _trajectories(run, [row, *others], MAX_TRAJECTORIES), place)


def _write_run(run: RunView, output: Path, limit: int) -> int:
    run.index.refresh()  # all that there is to read
    rows = run.index.rows
    if not rows and not any((run.folder / name).exists() for name in (METRICS_FILE, SUMMARY_FILE, CONFIG_FILE)):
        raise DataError(f"{run.folder} holds no rollouts and no metrics; is it a run's folder or one of rollout dumps?")
    overview, results = answers.overview(run), answers.results(run)
    why, timeline = answers.why(run), answers.timeline(run)
    for page in (why, timeline):
        page["steps"] = [page["step"]]  # their menus offer this step only
    del overview["facts"]["trajectories"]  # not all of them were read
    pages = {"overview": overview, "results": results, "curves": answers.curves(run), "why": why, "timeline": timeline}
    shown = {place: row for place in _places(results, why) if (row := run.index.find(place)) is not None}
    shown |= {row.place: row for row in _select_rows(rows, limit)}
    return _write(output, pages | _trajectories(run, [*shown.values()], limit))


def _places(results: answers.Answer, why: answers.Answer) -> Iterator[str]:
    """The trajectories that the pages of a run link to."""
    pairs = results["samples"]["pairs"] if results["samples"] else []
    examples = [[example["place"] for example in cause["examples"]] for cause in why["causes"]]
    for places in (results["change"] or (), *pairs, results["failures"], *examples):
        yield from filter(None, places)


def _select_rows(rows: Sequence[Row], limit: int) -> Iterator[Row]:
    training = [row for row in rows if row.split in ("train", "")]
    others = [row for row in rows if row.split not in ("train", "")]
    groups = [[row for row in training if row.step == step] for step in sorted({row.step for row in training})]
    last = [row for row in others if row.group[:2] == others[-1].group[:2]]
    for part, share in ((groups[-1:], 2), ([last], 4), (groups[:1] if len(groups) > 1 else [], 4)):
        yield from (row for group in part for row in group[: limit // share])


def _trajectories(run: RunView, rows: Sequence[Row], limit: int) -> answers.Answer:
    """Answers for `rows` by address, and the list of the rows that fit."""
    content: answers.Answer = {}
    kept: list[Row] = []
    size = 0
    for row in rows[:limit]:
        page = _trajectory(run, row.place)
        size += len(json.dumps(json_safe(page)))
        if size > MAX_BYTES:
            break
        content |= page
        kept.append(row)
    places = {row.place for row in kept}
    for address, page in content.items():
        if address.startswith("trajectory?"):
            page["siblings"] = [each for each in page["siblings"] if each["place"] in places]
            page |= {name: page[name] if page[name] in places else None for name in ("before", "after")}
    return content | {"trajectories": answers.list_rows(kept)}


def _trajectory(run: RunView, place: str) -> answers.Answer:
    found = answers.trajectory(run, place)
    pages: answers.Answer = {_address("trajectory", place=place): found}
    for sequence in range(len(found["sequences"])):
        for offset in range(0, _MAX_TOKENS, answers.PAGE_TOKENS):
            try:
                page = answers.tokens(run, place, sequence, offset)
            except DataError:
                break
            page["total"] = min(page["total"], _MAX_TOKENS)
            pages[_address("tokens", offset=offset or "", place=place, sequence=sequence or "")] = page
            if offset + answers.PAGE_TOKENS >= page["total"]:
                break
    return pages


def _address(path: str, **params: object) -> str:
    """The address of a request, as `api.js` builds it."""
    return f"{path}?{urlencode({name: value for name, value in sorted(params.items()) if value != ''})}"


def _write(output: Path, content: answers.Answer, place: str = "") -> int:
    """Writes the file; returns its number of trajectories."""
    style, script = (PAGES / "style.css").read_text(encoding="utf-8"), _script()
    policy = (
        f"default-src 'none'; script-src '{_digest(script)}'; style-src '{_digest(style)}'; img-src data:; "
        "base-uri 'none'; form-action 'none'; require-trusted-types-for 'script'; trusted-types 'none'"
    )
    first, pages = ("trajectory", "") if place else ("overview", "overview why trajectories timeline")
    head = f'<meta http-equiv="Content-Security-Policy" content="{policy}">\n<style>{style}</style>'
    tail = (
        f'<script type="application/json" id="place">{_embed(place)}</script>\n'
        f'<script type="application/json" id="data" data-page="{first}" data-pages="{pages}">{_embed(content)}</script>\n'
        f'<script type="module">{script}</script>\n</body>'
    )
    text = (PAGES / "index.html").read_text(encoding="utf-8")
    text = re.sub(r'<link rel="stylesheet".*?>\n<script.*?</script>', lambda _: head, text)
    with write_atomically(output) as file:
        file.write(text.replace("</body>", tail).encode())
    return sum(address.startswith("trajectory?") for address in content)


def _embed(value: Any) -> str:
    return json.dumps(json_safe(value)).replace("<", "\\u003c")


def _digest(text: str) -> str:
    return f"sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}"


def _script() -> str:
    """Bundles the pages' ES modules into one script, each in its own function scope."""
    parts = ['"use strict"; const modules = {};']
    for name in _MODULES:
        text = (PAGES / f"{name}.js").read_text(encoding="utf-8")
        exported = ", ".join(found[1] for found in _EXPORT.finditer(text))
        body = _EXPORT.sub("", _IMPORT.sub(r"const {\1} = modules.\2;", text))
        parts.append(f"modules.{name} = (() => {{\n{body}\nreturn {{ {exported} }};\n}})();")
    return "\n".join(parts)
