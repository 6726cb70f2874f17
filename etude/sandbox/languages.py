"""How a program of each language is compiled and started.

Invariant: a command is a list of arguments for the kernel, never a line for a shell. A language is offered only where
its interpreter, compiler or library lies in a folder that the jail shows.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Sequence
from dataclasses import dataclass

from etude.sandbox.jail import interpreter
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
    library: str | None = None
    """A Python package that has to be among the libraries."""

    @property
    def tool(self) -> str | None:
        """What has to be installed: a program, or a library."""
        command = self.compile or self.command
        return self.library or (command[0] if command else None)

    def installed(self, libraries: Sequence[str]) -> bool:
        """Whether it is, where every run can see it."""
        if self.library is not None:
            return any(os.path.isdir(os.path.join(folder, self.library)) for folder in libraries)
        return self.tool is None or shutil.which(self.tool, path=PATH) is not None


RECIPES = {
    Language.PYTHON: Recipe("main.py", None),
    Language.PYTEST: Recipe("test_main.py", (interpreter(), "-m", "pytest", "test_main.py"), library="pytest"),
    Language.BASH: Recipe("main.sh", ("bash", "main.sh")),
    Language.JAVASCRIPT: Recipe("main.js", ("node", "main.js"), address_space=False),
    Language.C: Recipe("main.c", ("{tmp}/program",), ("gcc", "-O1", "-o", "{tmp}/program", "main.c", "-lm")),
    Language.CPP: Recipe(
        "main.cpp", ("{tmp}/program",), ("g++", "-std=c++17", "-O1", "-o", "{tmp}/program", "main.cpp")
    ),
}


def available(libraries: Sequence[str]) -> tuple[Language, ...]:
    """The languages that every run can see here; `libraries` are the folders of third-party Python packages."""
    return tuple(language for language, recipe in RECIPES.items() if recipe.installed(libraries))
