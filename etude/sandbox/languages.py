"""How programs of each language are compiled and started.

Invariant: a command is a list of arguments, never a shell command line. A language is offered only if its interpreter,
compiler or library is in a folder that the jail contains.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Sequence
from dataclasses import dataclass

from etude.sandbox.jail import interpreter
from etude.sandbox.types import Language

PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
"""PATH of every program, after the interpreter's folder."""


@dataclass(frozen=True)
class Recipe:
    """How to compile and start a language's programs; `{tmp}` in an argument is the run's folder for temporary files."""

    source: str
    """File name of the code in the work directory."""
    command: tuple[str, ...] | None
    """The start command; None for Python, which runs in a warm interpreter."""
    compile: tuple[str, ...] | None = None
    address_space: bool = True
    """Whether the memory limit also applies to the address space."""
    library: str | None = None
    """The Python package that it needs."""

    @property
    def tool(self) -> str | None:
        """The required program or library."""
        command = self.compile or self.command
        return self.library or (command[0] if command else None)

    def installed(self, libraries: Sequence[str]) -> bool:
        """Whether the required program or library is installed where every run can see it."""
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
    """Returns the languages available on this machine; `libraries`: the folders of third-party Python packages."""
    return tuple(language for language, recipe in RECIPES.items() if recipe.installed(libraries))
