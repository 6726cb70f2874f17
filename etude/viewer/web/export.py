"""Exports a run or a trajectory as one HTML file: the web viewer's pages with the server's responses embedded.

Invariant: the file makes no request and runs a single script, which its content security policy allows by hash. The data
are embedded as JSON without "<", so that an HTML parser cannot leave the script element. The file is bounded in
trajectories and bytes.
"""

from __future__ import annotations

import base64
import hashlib
import json
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from urllib.parse import urlencode

from etude.errors import DataError
from etude.jsonl import json_safe, write_atomically
from etude.viewer.rows import Row
from etude.viewer.web import answers
from etude.viewer.web.runs import RunView
from etude.viewer.web.server import PAGES

MAX_TRAJECTORIES = 200
MAX_BYTES = 24 * 2**20
_MAX_TOKENS = 20_000  # per sequence
_MODULES = ("dom", "api", "charts", "trajectories", "trajectory", "overview", "why", "timeline", "compare", "app")
_IMPORT = re.compile(r'^import \{([^}]*)\} from "\./(\w+)\.js";$', re.M)
_EXPORT = re.compile(r"^export (?=(?:async )?(?:const|function) (\w+))", re.M)


def write_page(path: Path, output: Path, place: str = "") -> int:
    """Writes the run in `path` to `output`, or with `place` only that trajectory and its siblings; returns the number of
    trajectories written. Of a run these are the last step's, the last validation's and the first step's, within the limits
    on count and bytes.

    Raises:
        DataError: there is no such run or trajectory, or the run is empty.
        EtudeError: the file cannot be written.
    """
    if not path.exists():
        raise DataError(f"{path}: no such file or folder; name a run's folder or rollout dumps")
    run = RunView("", path)
    index = run.index
    while not index.complete:
        index = run.index
    content: answers.Answer = {}
    if place:
        if (row := index.find(place)) is None:
            raise DataError(f"{path} has no trajectory '{place}'; one is named such as rollouts/12.jsonl:3")
        content |= _trajectories(run, [row, *(each for each in index.siblings(row) if each != row)])
    else:
        if not index.rows and not (path / "metrics.jsonl").exists():
            raise DataError(f"{path} holds no rollouts and no metrics; name a run's folder or rollout dumps")
        content |= _pages(run) | _trajectories(run, _select_rows(index.rows))
    count = sum(address.startswith("trajectory?") for address in content)
    text = _page(content, place, [] if place else ["overview", "why", "trajectories", "timeline"])
    with write_atomically(output) as file:
        file.write(text.encode())
    return count


def _pages(run: RunView) -> answers.Answer:
    """The run's own pages; their step menus offer the last step only."""
    pages: dict[str, answers.Answer] = {"why": answers.why(run), "timeline": answers.timeline(run)}
    for page in pages.values():
        page["steps"] = [page["step"]]
    return {"overview": answers.overview(run), "curves": answers.curves(run)} | pages


def _select_rows(rows: list[Row]) -> Iterator[Row]:
    training = [row for row in rows if row.split in ("train", "")]
    others = [row for row in rows if row.split not in ("train", "")]
    groups = [[row for row in training if row.step == step] for step in sorted({row.step for row in training})]
    last = [row for row in others if row.group[:2] == others[-1].group[:2]]
    for part, share in ((groups[-1:], 2), ([last], 4), (groups[:1] if len(groups) > 1 else [], 4)):
        yield from (row for group in part for row in group[: MAX_TRAJECTORIES // share])


def _trajectories(run: RunView, rows: Iterable[Row]) -> answers.Answer:
    """Responses for `rows` by address, and the list of the rows that fit."""
    content: answers.Answer = {}
    kept: list[Row] = []
    size = 0
    for row in rows:
        page = _trajectory(run, row.place)
        size += len(json.dumps(json_safe(page)))
        if size > MAX_BYTES or len(kept) == MAX_TRAJECTORIES:
            break
        content |= page
        kept.append(row)
    places = {row.place for row in kept}
    for address, page in content.items():
        if address.startswith("trajectory?") and isinstance(page, dict):
            page["siblings"] = [each for each in page["siblings"] if each["place"] in places]
            page |= {name: page[name] if page[name] in places else None for name in ("before", "after")}
    listed = answers.list_rows(run.index, kept)
    return content | {"trajectories": listed}


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


def _page(content: answers.Answer, place: str, pages: list[str]) -> str:
    style, script = (PAGES / "style.css").read_text(encoding="utf-8"), _script()
    policy = (
        f"default-src 'none'; script-src '{_digest(script)}'; style-src '{_digest(style)}'; img-src data:; "
        "base-uri 'none'; form-action 'none'; require-trusted-types-for 'script'; trusted-types 'none'"
    )
    data = json.dumps(json_safe(content)).replace("<", "\\u003c")
    first = "trajectory" if place else "overview"
    named = json.dumps(place).replace("<", "\\u003c")
    head = f'<meta http-equiv="Content-Security-Policy" content="{policy}">\n<style>{style}</style>'
    tail = (
        f'<script type="application/json" id="place">{named}</script>\n'
        f'<script type="application/json" id="data" data-page="{first}" data-pages="{" ".join(pages)}">{data}</script>\n'
        f'<script type="module">{script}</script>\n</body>'
    )
    text = (PAGES / "index.html").read_text(encoding="utf-8")
    text = re.sub(r'<link rel="stylesheet".*?>\n<script.*?</script>', lambda _: head, text)
    return text.replace("</body>", tail)


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
