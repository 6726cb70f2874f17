"""Calls a function of a solution, inside the sandbox, in the solution's own process.

Standard input holds one line of JSON: `secret`, `solution`, `function`, `arguments`. The last line of standard output that
begins with the secret holds the value: a program that exits early has not printed one. The solution can print a value of
its own choice, which is no more than it could return; the expected value is not here.
"""

import json
import os
import sys
import types

TYPES = "from typing import Any, Callable, Dict, Iterable, Iterator, List, Optional, Sequence, Set, Tuple, Union"
"""What the problem's own program has often imported, so that a solution of the function alone names it freely."""


def main() -> None:
    """Runs the solution and the call; any failure is an exception."""
    job = json.loads(sys.stdin.readline())
    report = os.fdopen(os.dup(1), "w", encoding="utf-8")
    module = types.ModuleType("solution")  # not `__main__`, so that code under that guard does not run
    module.__dict__["__builtins__"] = __builtins__
    sys.modules["solution"] = module
    exec(TYPES, module.__dict__)
    exec(compile(job["solution"], "<solution>", "exec"), module.__dict__)
    found = _plain(_function(module, job["function"])(*job["arguments"]))
    sys.stdout.flush()
    report.write("\n" + job["secret"] + json.dumps(found) + "\n")
    report.flush()


def _function(module: types.ModuleType, name: str):  # type: ignore[no-untyped-def]
    holder = getattr(module, "Solution", None)
    if isinstance(holder, type) and hasattr(holder, name):
        return getattr(holder(), name)
    return getattr(module, name)


def _plain(value):  # type: ignore[no-untyped-def]
    """Converts `value` to JSON data: tuples and sets become lists, keys become strings, NumPy's numbers plain ones."""
    if type(value).__module__ == "numpy" and hasattr(value, "item") and not hasattr(value, "__len__"):
        value = value.item()
    if isinstance(value, dict):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, (set, frozenset)):
        return sorted(map(_plain, value), key=repr)
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    return value if isinstance(value, (str, int, float, bool, type(None))) else repr(value)


if __name__ == "__main__":
    main()
