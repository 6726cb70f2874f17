"""The README and the pages of docs/ do what they say: their snippets are run, in order, in an empty folder.

Blocks of `python` are executed, lines of `bash` blocks that begin with `etude` or `python` are run, a `console` block that
begins with `$ etude` shows what that command says, a block after `<!-- file: NAME -->` is saved under that name, and one
after `<!-- shown: NAME, … -->` is the file of that name that a command above it wrote.
`<!-- printed: … -->` stands before what the commands above print, with other numbers; … stands for what is left out.
`<!-- not run: REASON -->` exempts the block that follows, `<!-- soak: REASON -->` in all but the soak tests. A translation
(NAME.zh.md) shows the blocks of its original: tests/test_translations.py.
"""

import io
import logging
import re
import runpy
import shlex
import subprocess
import sys
from collections.abc import Iterator
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass
from pathlib import Path

import click
import pytest
import yaml

from etude.agents import AGENT_LOOPS
from etude.agents.environments import ENVIRONMENTS  # and what registers "base"
from etude.algorithms import ADVANTAGE_ESTIMATORS, POLICY_LOSSES
from etude.chat import TOOL_PARSERS
from etude.cli.main import cli, run
from etude.config import compose
from etude.options.validate import plain
from etude.rewards import REWARD_MANAGERS
from etude.run_folder import read_metrics
from etude.tools import FUNCTION_TOOLS

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
GENERATED: dict[str, str] = runpy.run_path(str(DOCS / "reference.py"))["pages"]()
"""Pages that are made when the site is built."""
TRANSLATIONS = sorted(DOCS.glob("*.zh.md"))
PAGES = [ROOT / "README.md", *sorted(set(DOCS.glob("*.md")) - set(TRANSLATIONS))]
REGISTRIES = (
    ADVANTAGE_ESTIMATORS,
    AGENT_LOOPS,
    ENVIRONMENTS,
    FUNCTION_TOOLS,
    POLICY_LOSSES,
    REWARD_MANAGERS,
    TOOL_PARSERS,
)
BLOCK = re.compile(
    r"(?:<!-- (?P<mark>[^\n]*) -->\n)?```(?P<language>\w+)\n(?P<body>.*?)^```$", re.DOTALL | re.MULTILINE
)
LINK = re.compile(r"\]\(([^)#]+)(?:#[^)]*)?\)")
HEADING_LINK = re.compile(r"\]\(([^)#]*)#([^)]+)\)")


@dataclass(frozen=True)
class Block:
    mark: str
    language: str
    body: str
    line: int


def _of_a_user(item):
    """Whether a file of some other test's has registered it in this process."""
    return str(getattr(item, "__module__", "")).startswith("etude_user_")


def blocks(page: Path) -> Iterator[Block]:
    text = page.read_text(encoding="utf-8")
    for match in BLOCK.finditer(text):
        line = text.count("\n", 0, match.start("body")) + 1
        yield Block(match["mark"] or "", match["language"], match["body"], line)


def page_id(page: Path) -> str:
    return page.stem


def _marked(page: Path) -> object:
    """The page of clusters is slow: its snippets train on Ray."""
    return pytest.param(page, marks=pytest.mark.slow) if page.stem == "distributed" else page


def execute(block: Block, page: Path, names: dict[str, object], soak: bool = False) -> None:
    kind, _, value = block.mark.partition(": ")
    if kind == "file":
        Path(value).parent.mkdir(parents=True, exist_ok=True)
        Path(value).write_text(block.body, encoding="utf-8")
    elif kind == "shown":
        assert Path(value.partition(",")[0]).read_text(encoding="utf-8") == block.body
    elif kind in ("not run", "printed") or (kind == "soak" and not soak):
        assert value, "an exemption needs its reason"
    elif block.language == "python":
        # Line numbers of the page, so that a traceback points into it.
        exec(compile("\n" * (block.line - 1) + block.body, str(page), "exec"), names)
    elif block.language == "bash":
        for line in block.body.replace("\\\n", " ").splitlines():
            execute_line(shlex.split(line, comments=True))
    elif block.language == "yaml":
        yaml.safe_load(block.body)
    elif block.language == "console" and block.body.startswith("$ "):
        command, _, shown = block.body.removeprefix("$ ").partition("\n")
        assert output_of(shlex.split(command)) == shown
    else:
        assert block.language in ("console", "text"), f"{page.name}:{block.line}: how is '{block.language}' run?"


def execute_line(words: list[str]) -> None:
    if words[:1] == ["etude"]:
        assert run(cli, words[1:]) == 0, " ".join(words)
    elif words[:1] == ["python"] and words[1].endswith(".py"):
        kept = {registry: dict(registry._items) for registry in REGISTRIES}
        runpy.run_path(words[1], run_name="__main__")
        for registry, items in kept.items():  # what a process registers ends with it
            registry._items = items
    else:
        assert words[:1] in ([], ["make"], [".ci/run"]), f"mark what is not run: {' '.join(words)}"


def output_of(words: list[str]) -> str:
    """What a command prints, errors included."""
    printed = io.StringIO()
    with redirect_stdout(printed), redirect_stderr(printed):
        run(cli, words[1:])
    return printed.getvalue()


@pytest.fixture
def empty_folder(tmp_path, monkeypatch):
    """The present folder for a test; what snippets register, and the level of logging, is undone after it."""
    for registry in REGISTRIES:
        own = {name: item for name, item in registry._items.items() if not _of_a_user(item)}
        monkeypatch.setattr(registry, "_items", own)
    level = logging.getLogger("etude").level
    monkeypatch.chdir(tmp_path)
    yield tmp_path
    logging.getLogger("etude").setLevel(level)


@pytest.mark.parametrize("page", [_marked(page) for page in PAGES], ids=page_id)
def test_the_snippets_of_a_page_run(page, empty_folder, capfd):
    names: dict[str, object] = {"__name__": "__main__"}
    for block in blocks(page):
        if block.mark.startswith("printed: "):
            printed = list(map(without_numbers, capfd.readouterr().out.splitlines()))
            for line in block.body.splitlines():
                parts = [re.escape(part.strip(" ·")) for part in without_numbers(line).split("…")]
                assert any(re.match(".*".join(parts), each) for each in printed), (page.name, line, printed)
        execute(block, page, names)


def without_numbers(line: str) -> str:
    return re.sub(r"-?\d[\d.,]*(?:e[+-]?\d+)?", "N", " ".join(line.split()))


@pytest.mark.parametrize("page", PAGES, ids=page_id)
def test_the_commands_that_are_not_run_exist_with_their_options(page):
    for block in blocks(page):
        exempt = block.language == "bash" and block.mark.startswith(("not run", "soak"))
        for line in block.body.replace("\\\n", " ").splitlines() if exempt else ():
            words = shlex.split(line, comments=True)
            if words[:1] == ["etude"]:
                missing = unknown_words(words[1:])
                assert not missing, f"{page.name}: {line.strip()}: no {missing}"


def unknown_words(words: list[str]) -> list[str]:
    """The first words that name no command, or the options that its command lacks."""
    command: click.Command = cli
    while isinstance(command, click.Group) and words and not words[0].startswith("-"):
        found = command.get_command(click.Context(command), words[0])
        if found is None:
            return words[:1]
        command, words = found, words[1:]
    options = {"-h", "--help"} | {name for each in command.params for name in (*each.opts, *each.secondary_opts)}
    return [word for word in words if word.startswith("--") and word.partition("=")[0] not in options]


def test_the_stages_that_the_readme_shows_are_the_quickstarts():
    [shown, *_] = [block.body for block in blocks(ROOT / "README.md") if block.language == "console"]
    source = (ROOT / "etude" / "quickstart" / "stages.py").read_text(encoding="utf-8")
    stages = [line.removeprefix("== ") for line in shown.splitlines() if line.startswith("== ")]
    assert len(stages) == 5
    assert [stage for stage in stages if f'"{stage.replace("smollm2", "{name}")}"' not in source] == []


@pytest.mark.soak
def test_the_tutorial_followed_to_the_letter_ends_with_a_model_that_asks(empty_folder):
    for block in blocks(DOCS / "tutorial.md"):
        execute(block, DOCS / "tutorial.md", {}, soak=True)
    validations = [
        step["val-core/shop/reward/mean@1"]
        for step in read_metrics("runs/shop/metrics.jsonl")
        if step["step"] in (0, 24)
    ]
    assert validations[0] < 0.1
    assert validations[1] > 0.9


def test_the_commands_that_take_the_place_of_other_frameworks_are_valid():
    found = 0
    for page in (page for page in PAGES if page.name.startswith("from-")):
        for block in blocks(page):
            words = shlex.split(block.body.replace("\\\n", " "), comments=True)
            if words[:3] == ["python", "-m", "etude.trainer.main_ppo"]:
                found += 1
                assert run(cli, ["config", *words[3:]]) == 0, page.name
    assert found == 2


@pytest.mark.parametrize("page", PAGES, ids=page_id)
def test_every_fence_is_understood(page):
    fences = re.findall(r"^```(\w*)$", page.read_text(encoding="utf-8"), re.MULTILINE)
    assert len(fences) == 2 * len(list(blocks(page)))
    assert all(bool(opening) and not closing for opening, closing in zip(fences[::2], fences[1::2]))


def original(page: Path) -> Path:
    return page.with_name(page.name.replace(".zh.md", ".md"))


@pytest.mark.parametrize("page", [*PAGES, *TRANSLATIONS], ids=page_id)
def test_links_lead_somewhere(page):
    text = page.read_text(encoding="utf-8")
    for target in LINK.findall(text):
        if "://" not in target:
            found = (page.parent / target).exists() or target in GENERATED
            assert found, f"{page.name} links to {target}"
    for target, heading in HEADING_LINK.findall(text):
        other = (page.parent / target) if target else original(page)  # a translation has its original's anchors
        text = GENERATED.get(target) or other.read_text(encoding="utf-8")
        assert heading in headings(text), f"{page.name} links to {target}#{heading}"


def headings(text: str) -> set[str]:
    found = re.findall(r"^#+ (.+)$", text, re.MULTILINE)
    return {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in found}


def test_the_lines_that_troubleshooting_shows_are_printed_somewhere():
    """… stands for what is filled in; the rest of a line is a text of the package's, or two: what is wrong; the fix."""
    joined = re.compile(r'"\s*\n\s*f?"')  # where a text goes on in the next line
    sources = [joined.sub("", path.read_text(encoding="utf-8")) for path in (ROOT / "etude").rglob("*.py")]
    shown = [block.body for block in blocks(DOCS / "troubleshooting.md") if block.language == "text"]
    parts = [part.strip(" \n.:;") for body in shown for part in re.split("…|; ", body)]
    long = [part for part in parts if len(part) > 10]
    assert len(long) > 15
    assert [part for part in long if not any(part in source for source in sources)] == []


def test_the_site_lists_every_page():
    everything = list(pages_of(yaml.safe_load((ROOT / "mkdocs.yml").read_text(encoding="utf-8"))["nav"]))
    assert sorted(everything) == sorted([*(page.name for page in PAGES[1:]), *GENERATED])
    listed = [name for name in everything if name not in GENERATED]
    linked = LINK.findall((DOCS / "index.md").read_text(encoding="utf-8"))
    assert linked == [name for name in listed if name != "index.md"]  # the index has them all, in the same order
    assert set(linked) <= set(LINK.findall((DOCS / "index.zh.md").read_text(encoding="utf-8")))


def pages_of(navigation: list) -> Iterator[str]:
    for entry in navigation:
        for item in entry.values():
            yield from pages_of(item) if isinstance(item, list) else [item]


def leaf_names(section: dict, prefix: str = "") -> Iterator[str]:
    for name, value in section.items():
        yield prefix + name
        if isinstance(value, dict):
            yield from leaf_names(value, f"{prefix}{name}.")


def test_every_key_that_a_page_names_exists():
    trees = [plain(compose(root, [])) for root in ("ppo_trainer", "sft")]
    known = {name for tree in trees for name in leaf_names(tree)}
    sections = {name.partition(".")[0] for name in known} | {"actor", "rollout", "multi_turn"}
    places = ("", "actor_rollout_ref.", "actor_rollout_ref.rollout.")
    named = 0
    for page in PAGES:
        if page.name == "migrating.md":  # names what does not exist, too
            continue
        for key in re.findall(r"`([a-z_]+(?:\.[a-z_]+)+)(?:=[^`]*)?`", page.read_text(encoding="utf-8")):
            open_ended = "_kwargs." in key
            if key.partition(".")[0] in sections and not open_ended and not key.endswith((".json", ".py")):
                named += 1
                assert any(place + key in known for place in places), f"{page.name} names {key}"
    assert named > 20


def test_make_says_why_nothing_could_be_installed(tmp_path):
    """With a Python whose pip fails."""
    python = tmp_path / "venv" / "bin" / "python"
    python.parent.mkdir(parents=True)
    python.write_text("#!/bin/sh\nexit 1\n")
    python.chmod(0o755)
    command = ["make", "-C", str(ROOT), "quickstart", f"VENV={tmp_path}/venv", f"PYTHON={sys.executable}"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode != 0
    assert "error: pip could not install Étude: is a package index reachable?" in done.stdout


def test_a_failing_snippet_fails(empty_folder):
    page = Path("page.md")
    page.write_text("```python\nassert 1 == 2\n```\n")
    [block] = blocks(page)
    with pytest.raises(AssertionError):
        execute(block, page, {})
    with pytest.raises(AssertionError):
        execute_line(["etude", "trian"])
    with pytest.raises(AssertionError):
        execute(Block("", "console", "$ etude --version\netude, version none\n", 1), page, {})
    assert unknown_words(["vew", "runs"]) == ["vew"]
    assert unknown_words(["runs", "compare", "--frm"]) == ["--frm"]
    with pytest.raises(AssertionError, match="needs its reason"):
        execute(Block("not run", "bash", "etude quickstart\n", 1), page, {})
