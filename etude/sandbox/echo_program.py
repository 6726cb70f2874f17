"""Runs inside the sandbox, never in this process: `source.py` as the main program, then the value of its last
expression, printed as an interactive prompt prints it. Its tracebacks omit this file.
"""

import ast
import linecache
import os
import sys
import traceback
import types

SOURCE = ".source.py"
SHOWN = "<code>"


def main() -> None:
    """Runs the program, and exits with its status."""
    with open(SOURCE, "rb") as file:
        source = file.read()
    os.unlink(SOURCE)
    text = source.decode("utf-8", "replace")
    linecache.cache[SHOWN] = (len(text), None, text.splitlines(keepends=True), SHOWN)
    module = types.ModuleType("__main__")
    module.__dict__["__builtins__"] = __builtins__
    sys.modules["__main__"] = module
    try:
        tree = ast.parse(source, SHOWN)
        last = tree.body.pop() if tree.body and isinstance(tree.body[-1], ast.Expr) else None
        program = compile(tree, SHOWN, "exec")
        value = compile(ast.Expression(last.value), SHOWN, "eval") if isinstance(last, ast.Expr) else None
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


if __name__ == "__main__":
    main()
