"""How a program of each language is compiled and started.

Invariant: a command is a list of arguments for the kernel, never a line for a shell. A language is offered only where
its interpreter or compiler lies in a folder that the jail shows.
"""

from __future__ import annotations

import shutil
from dataclasses import dataclass

from etude.sandbox.types import Language

PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
"""Of every program, after the folder of the interpreter."""


@dataclass(frozen=True)
class Recipe:
    """`{tmp}` in an argument stands for the run's folder for temporary files."""

    source: str
    """The name the code gets in the work directory."""
    command: tuple[str, ...] | None
    """What is started; None for Python, which runs in a warm interpreter."""
    compile: tuple[str, ...] | None = None
    address_space: bool = True
    """Whether the memory limit may bound the address space as well."""

    @property
    def tool(self) -> str | None:
        """The program that has to be installed."""
        command = self.compile or self.command
        return command[0] if command else None


RECIPES = {
    Language.PYTHON: Recipe("main.py", None),
    Language.BASH: Recipe("main.sh", ("bash", "main.sh")),
    Language.JAVASCRIPT: Recipe("main.js", ("node", "main.js"), address_space=False),
    Language.C: Recipe("main.c", ("{tmp}/program",), ("gcc", "-O1", "-o", "{tmp}/program", "main.c", "-lm")),
    Language.CPP: Recipe(
        "main.cpp", ("{tmp}/program",), ("g++", "-std=c++17", "-O1", "-o", "{tmp}/program", "main.cpp")
    ),
}


def available() -> tuple[Language, ...]:
    """The languages whose tool is installed where every run can see it."""
    return tuple(
        language for language, recipe in RECIPES.items() if recipe.tool is None or shutil.which(recipe.tool, path=PATH)
    )
