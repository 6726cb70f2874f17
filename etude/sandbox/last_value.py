"""`print_last_value`: makes a Python request print the value of its last expression, like a REPL.

Invariant: the program is parsed in the sandbox, never here. Works with any `/run_code` server.
"""

from __future__ import annotations

import inspect
from dataclasses import replace

from etude.sandbox.types import Language, RunRequest, SandboxRequestError

SOURCE = ".source.py"


def print_last_value(request: RunRequest) -> RunRequest:
    """Returns `request`, changed to print the value of its last expression after its output.

    Raises:
        SandboxRequestError: the request is not Python, or has a file named `.source.py`.
    """
    if request.language is not Language.PYTHON:
        raise SandboxRequestError(f"language: only Python has a last value, not {request.language.value}")
    if SOURCE in request.files:
        raise SandboxRequestError(f"files: the name {SOURCE!r} is taken")
    source = request.code.encode("utf-8", "surrogatepass")
    program = f"{inspect.getsource(_print_last_value)}\n_print_last_value({SOURCE!r}, '<code>')\n"
    return replace(request, code=program, files={**request.files, SOURCE: source})


def _print_last_value(path: str, shown_as: str) -> None:
    # This function's text runs in the sandbox, alone; tracebacks omit it.
    import ast
    import linecache
    import os
    import sys
    import traceback
    import types

    with open(path, "rb") as file:
        source = file.read()
    os.unlink(path)
    text = source.decode("utf-8", "replace")
    linecache.cache[shown_as] = (len(text), None, text.splitlines(keepends=True), shown_as)
    module = types.ModuleType("__main__")
    module.__dict__["__builtins__"] = __builtins__
    sys.modules["__main__"] = module
    try:
        tree = ast.parse(source, shown_as)
        last = tree.body.pop() if tree.body and isinstance(tree.body[-1], ast.Expr) else None
        program = compile(tree, shown_as, "exec")
        value = compile(ast.Expression(last.value), shown_as, "eval") if isinstance(last, ast.Expr) else None
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        traceback.print_exception(type(error), error, None)
        sys.exit(1)
    try:
        exec(program, module.__dict__)
        if value is not None and (shown := eval(value, module.__dict__)) is not None:
            print(repr(shown))  # noqa: T201
    except SystemExit:
        raise
    except BaseException as error:
        trace = error.__traceback__
        traceback.print_exception(type(error), error, trace.tb_next if trace else None)
        sys.exit(1)
