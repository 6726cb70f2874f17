"""The size budget of one server response: a request's text, images and files together, counted as the JSON sent.

Invariant: a response is at most `ANSWER_BYTES`, plus a few thousand characters of each cell that no longer fits; omitted
parts are named in their place.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from etude.sandbox.wire import CellRunResult

ANSWER_BYTES = 32 << 20
_KEPT_CHARS = 1000
_NOTE = "\n[the answer is full: the rest of what this cell printed and showed was left out]\n"


class AnswerBudget:
    """The budget of one request."""

    def __init__(self, limit: int = ANSWER_BYTES) -> None:
        self._left = limit

    def admit_cell(self, cell: CellRunResult) -> CellRunResult:
        """The cell unchanged, or what fits of it."""
        size = len(cell.model_dump_json())
        if size > self._left:
            return _shorten(cell)
        self._left -= size
        return cell

    def admit_text(self, *texts: str) -> None:
        """Counts texts that are bounded elsewhere, at their maximum escaped length."""
        self._left -= 6 * sum(map(len, texts))

    def admit_files(self, files: Mapping[str, bytes]) -> tuple[dict[str, bytes], dict[str, str]]:
        """The files that fit, and why each other one is omitted."""
        kept, left_out = {}, {}
        for path, content in files.items():
            size = -(-len(content) // 3) * 4  # in base64
            if size > self._left:
                left_out[path] = f"{len(content)} bytes are more than this answer has room for"
            else:
                self._left -= size
                kept[path] = content
        return kept, left_out


def _shorten(cell: CellRunResult) -> CellRunResult:
    texts = [str(bundle["text/plain"])[:_KEPT_CHARS] for bundle in cell.display if "text/plain" in bundle]
    return CellRunResult(
        stdout=cell.stdout[:_KEPT_CHARS],
        stderr=cell.stderr[:_KEPT_CHARS] + _NOTE,
        display=[{"text/plain": text} for text in texts],
        error=[_shorten_error(error) for error in cell.error],
    )


def _shorten_error(error: Mapping[str, Any]) -> dict[str, Any]:
    trace = "\n".join(error["traceback"])[-_KEPT_CHARS:].splitlines()
    return {"ename": error["ename"], "evalue": error["evalue"][:_KEPT_CHARS], "traceback": trace}
