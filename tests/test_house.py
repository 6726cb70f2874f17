"""The house stands: rooms import only from floors below, no circles, a tidy root, a docstring in every module."""

import ast
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

import etude
from etude.algorithms import ADVANTAGE_ESTIMATORS, POLICY_LOSSES

PACKAGE = Path(etude.__file__).parent
ROOT = PACKAGE.parent

FLOORS = (
    {"protocol", "trajectory", "schemas", "errors", "registry", "trace", "jsonl", "timeouts", "algorithms"}
    | {"limits", "metrics", "options", "plain", "scratch"}
    | {"run_folder", "dumps", "seeds", "serving"},
    {"models", "chat", "sandbox", "retrieval", "distributed"},
    {"inference", "training", "rewards"},
    {"tools"},
    {"data", "environments", "agents"},
    {"workers"},
    {"trainer", "config", "viewer", "checks"},
    {"cli", "quickstart", "testing", "tinker"},
)
SAME_FLOOR = {
    ("agents", "environments"),
    *(("trainer", "config"), ("trainer", "checks"), ("config", "checks"), ("viewer", "checks"), ("viewer", "trainer")),
    *(("quickstart", "testing"), ("cli", "quickstart"), ("cli", "testing"), ("cli", "tinker")),
}
"""Steps within a floor above the ground; on the ground floor rooms stand on each other, without circles."""

DOORS = {"etude.trainer.main_ppo", "etude.trainer.main_grpo"}
"""Programs whose names the documents fix: they belong to the top floor, and nothing imports them."""

FLOOR_OF = {room: floor for floor, rooms in enumerate(FLOORS) for room in rooms}
MODULES = sorted(PACKAGE.rglob("*.py"))


def module_name(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


NAMES = {module_name(path) for path in MODULES}


def imports(tree: ast.AST, importer: str, *, is_package: bool) -> Iterator[str]:
    """The modules of the package that the nodes of `tree` import, relative imports included."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name.split(".")[0] == "etude")
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                package = importer.split(".") if is_package else importer.split(".")[:-1]
                base = ".".join([*package[: len(package) - node.level + 1], *([base] if base else [])])
            if base.split(".")[0] == "etude":
                for alias in node.names:
                    submodule = f"{base}.{alias.name}"
                    yield submodule if submodule in NAMES else base


def room_of(module: str) -> str:
    """The room of a module; empty for the package itself."""
    if module in DOORS:
        return "cli"
    parts = module.split(".")
    return parts[1] if len(parts) > 1 else ""


def read(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


@pytest.mark.parametrize("path", MODULES, ids=module_name)
def test_a_module_opens_with_its_purpose(path):
    assert (ast.get_docstring(read(path)) or "").strip(), f"{path.relative_to(ROOT)} has no docstring"


def test_every_room_has_its_floor():
    rooms = {room_of(module_name(path)) for path in MODULES} - {"", "__main__"}
    assert rooms <= set(FLOOR_OF), f"rooms without a floor: {sorted(rooms - set(FLOOR_OF))}"


def may_import(room: str, target: str) -> bool:
    same_floor = FLOOR_OF[room] == FLOOR_OF[target]
    stands_on = FLOOR_OF[room] == 0 or (room, target) in SAME_FLOOR
    return room == target or FLOOR_OF[target] < FLOOR_OF[room] or (same_floor and stands_on)


def imports_of(path: Path) -> set[str]:
    """What a module imports from the package, at import time and later."""
    return set(imports(read(path), module_name(path), is_package=path.name == "__init__.py"))


def test_a_room_imports_only_from_floors_below():
    climbs = [
        f"{name} imports {target}"
        for path in MODULES
        if room_of(name := module_name(path)) in FLOOR_OF
        for target in sorted(imports_of(path))
        if room_of(target) in FLOOR_OF and not may_import(room_of(name), room_of(target))
    ]
    assert climbs == []


def test_nothing_imports_a_door():
    assert [module_name(path) for path in MODULES if imports_of(path) & DOORS] == []


def find_circle(graph: dict[str, set[str]]) -> list[str]:
    """A circle in `graph` as a list of nodes, or an empty list."""
    done: set[str] = set()

    def visit(node: str, trail: list[str]) -> list[str]:
        if node in trail:
            return [*trail[trail.index(node) :], node]
        if node in done:
            return []
        for target in sorted(graph.get(node, ())):
            circle = visit(target, [*trail, node])
            if circle:
                return circle
        done.add(node)
        return []

    return next(filter(None, (visit(node, []) for node in sorted(graph))), [])


def test_a_circle_is_found():
    assert find_circle({"a": {"b"}, "b": {"c"}, "c": {"b"}}) == ["b", "c", "b"]
    assert find_circle({"a": {"b", "c"}, "b": {"c"}}) == []


def test_no_rooms_import_each_other():
    graph: dict[str, set[str]] = {}
    for path in MODULES:
        room = room_of(module_name(path))
        graph.setdefault(room, set()).update({room_of(target) for target in imports_of(path)} - {room, ""})
    graph.pop("", None)
    assert find_circle(graph) == []


def test_no_modules_import_each_other():
    """Nor in a function, or for types only: there a circle is hidden, not broken."""
    graph = {name: imports_of(path) - {name, "etude"} for path in MODULES if (name := module_name(path))}
    assert find_circle(graph) == []


def test_one_file_knows_where_workers_run():
    named = {module_name(path) for path in MODULES if "InProcessWorkerGroup" in path.read_text(encoding="utf-8")}
    assert {name for name in named if room_of(name) != "distributed"} == {"etude.trainer.worker_groups"}


def test_no_estimator_or_loss_is_named_above_the_algorithms():
    """What one of them needs stands in its record; a name in the trainer would be a rule that no plug-in can have."""
    names = {name for registry in (ADVANTAGE_ESTIMATORS, POLICY_LOSSES) for name in registry._built_in}
    named = [
        f"{path.relative_to(ROOT)}:{node.lineno}"
        for path in MODULES
        if room_of(module_name(path)) in ("trainer", "workers", "config", "checks", "training")
        for node in ast.walk(read(path))
        if isinstance(node, ast.Constant) and node.value in names
    ]
    assert named == []


def test_the_architecture_page_has_every_room_on_its_floor():
    page = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    rows = dict(re.findall(r"^\| (\d) \| ([^|]+) \|", page, re.MULTILINE))
    assert {int(floor): set(re.findall(r"`(\w+)`", rooms)) for floor, rooms in rows.items()} == dict(enumerate(FLOORS))


def test_nothing_is_called_utils():
    banned = {"utils", "util", "helpers", "common", "misc"}
    assert [module_name(path) for path in MODULES if banned & set(path.relative_to(ROOT).with_suffix("").parts)] == []


def test_the_root_is_tidy():
    if shutil.which("git") is None or not (ROOT / ".git").exists():
        pytest.skip("not a git clone")
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    entries = {name.split("/")[0] for name in listed.split("\0") if name}
    visible = sorted(entry for entry in entries if not entry.startswith("."))
    assert len(visible) <= 13, visible
    assert len([path for path in PACKAGE.glob("*.py") if not path.name.startswith("__")]) <= 12


def test_test_files_have_names_of_their_own():
    names = [path.name for path in (ROOT / "tests").rglob("test_*.py")]
    assert len(names) == len(set(names))


HOPS = {"A rollout": (14, 9), "A tool call": (11, 10), "An update": (7, 6)}
"""Calls below the first, and files, that a reader opens on the way to the decode step, the next prompt and `backward`."""


def test_the_calls_that_the_architecture_page_lists_stand_in_their_files() -> None:
    pages = re.split(r"^### (.*), call by call$", (ROOT / "docs" / "architecture.md").read_text(), flags=re.MULTILINE)
    listed = {
        title: re.findall(r"^\| `(\w+)` \| `([\w/]+\.py)` \|", text, re.M)
        for title, text in zip(pages[1::2], pages[2::2])
    }
    assert "A rollout" in listed
    for title, calls in listed.items():
        most_calls, most_files = HOPS[title]
        assert 0 < len(calls) - 1 <= most_calls, title
        assert len({file for _, file in calls}) <= most_files, title
        for name, file in calls:
            assert name in defined_in(file), f"{file} has no {name}"


def test_the_way_of_a_token_on_the_architecture_page_names_what_stands_in_the_code():
    page = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    way = re.split(r"^##+ ", page.split("## A token, from prompt to gradient")[1], flags=re.MULTILINE)[0]
    named = re.findall(r"((?:`\w+`(?: and |, )?)+) in `([\w/]+\.py)`", way)
    rows = [row for row in way.splitlines() if row.startswith("| ")]
    assert len(named) >= len(rows) > 10
    for names, file in named:
        assert set(re.findall(r"\w+", names)) - {"and"} <= defined_in(file), f"{file} has not all of {names}"


def defined_in(file: str) -> set[str]:
    return {node.name for node in ast.walk(ast.parse((PACKAGE / file).read_text())) if hasattr(node, "name")}
