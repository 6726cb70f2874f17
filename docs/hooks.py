"""What `mkdocs build` does beside MkDocs and its plugins."""

from __future__ import annotations

import logging
import re
import shutil
from pathlib import Path

import reference
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.pages import Page
from pymdownx.slugs import slugify

ROOT = Path(__file__).parents[1]
log = logging.getLogger("mkdocs.plugins.etude")  # whose warnings fail a strict build
slug = slugify(case="lower")
ELSEWHERE = re.compile(r"\[([^\]]+)\]\(\.\./[^)]*\)")  # other folders of the repository
HEADING = re.compile(r"^```.*?^```$|^(#+ [^\n]+)$", re.DOTALL | re.MULTILINE)


def on_startup(**_: object) -> None:
    """Writes the pages that are made from the code (git ignores all but the keys of verl, for readers of a clone)."""
    shutil.rmtree(ROOT / "docs/reference", ignore_errors=True)
    for name, text in reference.pages().items():
        path = ROOT / "docs" / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(text, encoding="utf-8")


def on_config(config: MkDocsConfig) -> None:
    """Anchors as GitHub makes them, so that a link works on both."""
    config.mdx_configs["toc"]["slugify"] = slug


def on_page_markdown(markdown: str, *, page: Page, **_: object) -> str:
    """Links that leave the site become text. A translation's headings get the anchors of the original's: its links need no
    translation."""
    name = Path(page.file.abs_src_path or "").name
    markdown = ELSEWHERE.sub(r"\1", markdown)
    if not name.endswith(".zh.md"):
        return markdown
    original = ROOT / "docs" / name.replace(".zh.md", ".md")
    anchors = [slug(heading.lstrip("# "), "-") for heading in headings(original.read_text(encoding="utf-8"))]
    if len(anchors) != len(headings(markdown)):
        log.warning(f"{name} has {len(headings(markdown))} headings, {original.name} has {len(anchors)}")
        return markdown
    return HEADING.sub(lambda match: f"{match[0]} {{#{anchors.pop(0)}}}" if match[1] else match[0], markdown)


def headings(markdown: str) -> list[str]:
    return [heading for heading in HEADING.findall(markdown) if heading]
