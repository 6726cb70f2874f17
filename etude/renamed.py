"""Maps the modules of verl and RL-Factory to ours, for Python files that still import them.

Invariant: every module on the right exists. Names within a module are unchanged; docs/migrating.md has both tables.
"""

from __future__ import annotations

import ast
import traceback
from collections.abc import Iterator
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
}
"""The longest matching prefix of a module's name counts."""


def renamed_imports(error: ModuleNotFoundError) -> str:
    """`"; …"`: the replacement for each such import in the file that raised `error`; empty for other packages."""
    package = (error.name or "").partition(".")[0]
    frames = traceback.extract_tb(error.__traceback__)
    path = Path(frames[-1].filename) if frames else Path()
    if package not in MODULES or not path.is_file():
        return ""
    lines = [f"; {path.name}:{number}: {name} is {_place(name)} here" for number, name in _imports(path, package)]
    return "".join(lines) + "; see docs/migrating.md"


def _place(module: str) -> str:
    names = module.split(".")
    known = (".".join(names[:depth]) for depth in range(len(names), 1, -1))
    replacement = next((MODULES[each] for each in known if each in MODULES), None)
    return replacement or MODULES.get(module, "not used")


def _imports(path: Path, package: str) -> Iterator[tuple[int, str]]:
    """Yields (line, module) for each import of `package` or one of its submodules."""
    for node in ast.walk(ast.parse(path.read_bytes())):
        if not isinstance(node, ast.Import | ast.ImportFrom):
            continue
        names = (
            [alias.name for alias in node.names] if isinstance(node, ast.Import) else [node.module or ""][node.level :]
        )
        yield from ((node.lineno, name) for name in names if name.partition(".")[0] == package)
