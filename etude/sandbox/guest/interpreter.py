"""Makes a forked interpreter look newly started: a fresh `__main__`, standard streams, and an orderly shutdown.

Invariant: code behaves as in `python main.py`; the supervisor's modules are no longer importable.
"""

from __future__ import annotations

import atexit
import contextlib
import gc
import io
import linecache
import os
import signal
import sys
import threading
import traceback
import types
from collections.abc import Callable, Sequence
from typing import NoReturn


def run_python(path: str, code: str, arguments: Sequence[str]) -> NoReturn:
    """Runs `code` as the file `path`, and exits as the interpreter would."""
    main = become_main(path, arguments)
    os._exit(_execute(lambda: exec(compile(code, path, "exec", dont_inherit=True), main.__dict__), main, path, code))


def become_main(path: str, arguments: Sequence[str]) -> types.ModuleType:
    """Resets the interpreter to look newly started; returns its fresh `__main__` module."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    gc.enable()
    for name in [name for name in sys.modules if name == "guest" or name.startswith("guest.")]:
        del sys.modules[name]
    sys.argv = [path, *arguments]
    sys.path.insert(0, os.getcwd())
    sys.stdin = open(0, encoding="utf-8", errors="surrogateescape", closefd=False)  # noqa: SIM115
    sys.stdout = _text_output(1, line_buffering=False, errors="strict")
    sys.stderr = _text_output(2, line_buffering=True, errors="backslashreplace")
    sys.__stdin__, sys.__stdout__, sys.__stderr__ = sys.stdin, sys.stdout, sys.stderr  # type: ignore[misc]
    site = sys.modules["site"]
    for name in ("setquit", "setcopyright", "sethelper"):  # defines `exit`, `quit` and `help`, which `-S` omits
        getattr(site, name)()
    main = types.ModuleType("__main__")
    main.__dict__.update(__file__=path, __builtins__=sys.modules["builtins"], __annotations__={})
    sys.modules["__main__"] = main
    return main


def _text_output(fd: int, line_buffering: bool, errors: str) -> io.TextIOWrapper:
    stream = io.BufferedWriter(io.FileIO(fd, "w", closefd=False))
    return io.TextIOWrapper(stream, encoding="utf-8", errors=errors, line_buffering=line_buffering)


def _execute(run: Callable[[], object], main: types.ModuleType, path: str, code: str) -> int:
    """Calls `run` and shuts down like the interpreter; returns the exit code."""
    linecache.cache[path] = (len(code), None, code.splitlines(keepends=True), path)
    status = 0
    try:
        run()
    except SystemExit as error:
        status = _exit_status(error)
    except BaseException as error:
        status = 130 if isinstance(error, KeyboardInterrupt) else 1
        _print_exception(error)
    with contextlib.suppress(BaseException):
        threading._shutdown()  # type: ignore[attr-defined]
    with contextlib.suppress(BaseException):
        atexit._run_exitfuncs()
    with contextlib.suppress(BaseException):
        main.__dict__.clear()  # finalizers of the program's objects
        gc.collect()
    return _flush() or status


def _print_exception(error: BaseException) -> None:
    with contextlib.suppress(BaseException):
        sys.stdout.flush()
    own = error.__traceback__
    while own is not None and own.tb_frame.f_code.co_filename == __file__:
        own = own.tb_next
    with contextlib.suppress(BaseException):
        hook = sys.excepthook
        if hook is sys.__excepthook__:
            traceback.print_exception(type(error), error, own)
        else:
            hook(type(error), error, own)


def _exit_status(error: SystemExit) -> int:
    code = error.code
    if code is None:
        return 0
    if isinstance(code, int):
        return code & 0xFF
    with contextlib.suppress(BaseException):
        sys.stdout.flush()
        sys.stderr.write(f"{code}\n")
    return 1


def _flush() -> int:
    """Flushes the output; returns 120 if that fails, as the interpreter does, else 0."""
    try:
        sys.stdout.flush()
    except BaseException:
        return 120
    with contextlib.suppress(BaseException):
        sys.stderr.flush()
    return 0
