"""Maps the modules of verl and RL-Factory to ours, for Python files that still import them, also relatively, as files that
stood inside those packages do.

Invariant: every module on the right exists. Names within a module are unchanged; docs/migrating.md has both tables.
"""

from __future__ import annotations

import ast
import importlib
import traceback
from collections.abc import Iterable, Iterator
from pathlib import Path

MODULES = {
    "verl": "etude.protocol",
    "verl.protocol": "etude.protocol",
    "verl.tools": "etude.tools",
    "verl.utils.rollout_trace": "etude.trace",
    "verl.utils.reward_score": "etude.rewards",
    "verl.utils.dataset": "etude.data",
    "verl.interactions": "etude.agents.interactions",
    "verl.experimental.agent_loop": "etude.agents",
    "verl.experimental.agent_loop.tool_parser": "etude.chat",
    "verl.experimental.reward_loop": "etude.rewards",
    "verl.experimental.reward": "etude.rewards",
    "verl.workers.reward_manager": "etude.rewards",
    "verl.single_controller": "etude.distributed",
    "verl.trainer.ppo.core_algos": "etude.algorithms",
    "envs": "etude.agents.environments",
    "envs.base": "etude.agents.environments",
    "envs.tool_manager": "etude.agents.environments",
    "envs.tools": "etude.tools",
}
"""The longest matching prefix of a module's name counts."""
_UNUSED = "not used"


def renamed_imports(error: BaseException) -> str:
    """`"; …"`: the replacement for each such import in the file that raised `error`; empty for other errors and packages."""
    frames = traceback.extract_tb(error.__traceback__)
    path = Path(frames[-1].filename) if frames else Path()
    if not isinstance(error, ImportError) or not path.is_file():
        return ""
    package = (error.name or "").partition(".")[0]
    relative = str(error).startswith("attempted relative import")
    if not relative and package not in MODULES:
        return ""
    lines = [f"; {path.name}:{number}: {name} is {place} here" for number, name, place in _imports(path, package)]
    if relative and not lines:
        return f"; {path.name} is imported as a file of its own: name its neighbours without the leading dot"
    return "".join(lines) + "; see docs/migrating.md"


def _place(module: str) -> str:
    names = module.split(".")
    known = (".".join(names[:depth]) for depth in range(len(names), 1, -1))
    replacement = next((MODULES[each] for each in known if each in MODULES), None)
    return replacement or MODULES.get(module, _UNUSED)


def _imports(path: Path, package: str) -> Iterator[tuple[int, str, str]]:
    """Yields (line, module, its place here) for each import of `package` or one of its submodules, and for each relative
    import of names that one of our modules has."""
    for node in ast.walk(ast.parse(path.read_bytes())):
        if isinstance(node, ast.ImportFrom) and node.level:
            places = [place for place in dict.fromkeys(MODULES.values()) if _has_names(place, node.names)]
            if places:
                yield node.lineno, "." * node.level + (node.module or ""), places[0]
        elif isinstance(node, ast.Import | ast.ImportFrom):
            modules = [alias.name for alias in node.names] if isinstance(node, ast.Import) else [node.module or ""]
            yield from ((node.lineno, name, _place(name)) for name in modules if name.partition(".")[0] == package)


def _has_names(module: str, names: Iterable[ast.alias]) -> bool:
    try:
        ours = importlib.import_module(module)
    except ImportError:  # an extra that is not installed
        return False
    return all(hasattr(ours, alias.name) for alias in names)
