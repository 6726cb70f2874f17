"""A translation says what its original says: the same code, names, figures and links, in as many parts.

What an edit of the English page adds or takes away is missing from, or left over in, its translation, and is named here.
Links are followed by tests/test_readme.py.
"""

import re
from collections import Counter
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
TRANSLATIONS = sorted((ROOT / "docs").glob("*.zh.md"))
BLOCK = re.compile(r"(?:<!-- [^\n]* -->\n)?^```\w+\n.*?^```$", re.DOTALL | re.MULTILINE)
CODE = re.compile(r"(`+)(.+?)\1", re.DOTALL)
LINK = re.compile(r"\]\(([^)\s]+)\)")
FIGURE = re.compile(r"\d[\d,]*\.\d+|\d[\d,]+\d|\d{2,}")
"""Of two digits and more: 'two' may become 2, and the other way round."""


def original(page: Path) -> Path:
    return page.with_name(page.name.replace(".zh.md", ".md"))


def parts(text: str) -> dict[str, Counter[str]]:
    """What a translation must keep, by kind, and how often it stands there."""
    prose = BLOCK.sub("", text)
    codes = Counter(" ".join(match[2].split()) for match in CODE.finditer(prose))
    bare = CODE.sub("", prose)
    words = re.sub(r"\d+ 月", "", LINK.sub("]", bare))  # November, in English
    return {
        "code blocks": Counter(BLOCK.findall(text)),
        "names": Counter(set(codes)),
        "links": Counter(set(LINK.findall(bare))),
        "figures": Counter(figure.replace(",", "") for figure in set(FIGURE.findall(words))),
        "headings": Counter(re.findall(r"^(#+) ", prose, re.MULTILINE)),
        "rows of tables": Counter(str(row.count("|")) for row in re.findall(r"^\|.*\|$", words, re.MULTILINE)),
        "items of lists": Counter(re.findall(r"^ *(-|\d+\.) ", prose, re.MULTILINE)),
    }


def differences(english: str, translated: str) -> list[str]:
    want, have = parts(english), parts(translated)
    return [
        f"{kind}: {what}: {dict(items)}"
        for kind in want
        for what, items in (("missing", want[kind] - have[kind]), ("left over", have[kind] - want[kind]))
        if items
    ]


@pytest.mark.parametrize("page", TRANSLATIONS, ids=lambda page: page.name)
def test_a_translation_says_what_its_original_says(page):
    found = differences(original(page).read_text(encoding="utf-8"), page.read_text(encoding="utf-8"))
    assert not found, f"{page.name} is stale:\n" + "\n".join(found)


def test_every_translation_has_an_original():
    assert TRANSLATIONS
    assert [page.name for page in TRANSLATIONS if not original(page).exists()] == []


ENGLISH = """\
# Runs

A run has a `seed`, read by `etude runs`; [more](training.md#metrics) took 1,024 steps.

- one

| key | default |
|---|---|
| `trainer.seed` | 1 |

```bash
etude runs
```
"""


@pytest.mark.parametrize(
    ("old", "new", "named"),
    [
        ("`seed`", "`sead`", "names: missing: {'seed': 1}"),
        ("`etude runs`;", "etude runs;", "names: missing: {'etude runs': 1}"),
        ("1,024", "1,025", "figures: left over: {'1025': 1}"),
        ("#metrics", "#dumps", "links: missing: {'training.md#metrics': 1}"),
        ("```bash\netude runs", "```bash\netude run", "code blocks: missing"),
        ("- one", "one", "items of lists: missing: {'-': 1}"),
        ("| `trainer.seed` | 1 |\n", "", "rows of tables: missing: {'3': 1}"),
        ("# Runs", "## Runs", "headings: missing: {'#': 1}"),
    ],
)
def test_a_stale_translation_is_named(old, new, named):
    assert differences(ENGLISH, ENGLISH.replace("steps", "步")) == []
    assert named in "\n".join(differences(ENGLISH, ENGLISH.replace(old, new)))
