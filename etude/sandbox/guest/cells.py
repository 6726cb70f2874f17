"""The program's side of a session: runs cells in order in one `__main__`, like a notebook.

Invariant: each cell has one answer, a message of limited length: its JSON object is short and its parts are the cell's texts
and images, so the host parses nothing that a cell can make long. This code shares its process with the model's code, which
may tamper with it, but can only forge output of its own session. If a cell ends in an expression, its text is the `repr` of
that value; values with `_repr_png_` and open matplotlib figures become PNG images.
"""

from __future__ import annotations

import ast
import contextlib
import inspect
import io
import linecache
import os
import re
import signal
import sys
import traceback
import types
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NoReturn

from . import interpreter, messages

if TYPE_CHECKING:
    import asyncio

_NOTEBOOK_LINE = re.compile(r"([ \t]*)([!%])(.*?)(\r?\n?)", re.DOTALL)
_SYSTEM, _MAGIC = "__notebook_system__", "__notebook_magic__"
MAX_TEXT = 1 << 20
MAX_TRACEBACK = 1 << 16
MAX_IMAGES = 8
MAX_IMAGE_BYTES = 2 << 20
MAX_HEADER = 4 << 10
"""Maximum bytes of an answer's JSON object."""
MAX_ANSWER = 24 << 20
"""Maximum bytes of an answer's parts: the texts, each character in up to four bytes, and all images."""


def serve(connection: int, work: str) -> NoReturn:
    """Runs cells until the host disconnects."""
    main = interpreter.become_main(os.path.join(work, "session"), ())
    del main.__dict__["__file__"]
    notebook = _Notebook(main)
    owner = os.getpid()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # except while a cell runs
    while (received := messages.receive(connection)) is not None:
        try:
            answer = notebook.run(received[0]["code"])
        except KeyboardInterrupt as error:  # it arrived just after the cell had ended
            answer = _describe_error(error)
        if os.getpid() != owner:  # a child that the cell forked has returned from it as well
            os._exit(0)
        parts = [
            (kind, part if isinstance(part, bytes) else str.encode(part, "utf-8", "backslashreplace"))
            for kind, part in answer
        ]
        messages.send(connection, {"cell": received[0]["cell"]}, parts)
    os._exit(0)


class _Notebook:
    """The state of a session."""

    def __init__(self, main: types.ModuleType) -> None:
        self._main = main
        self._count = 0
        self._images: list[bytes] = []
        self._loop: asyncio.AbstractEventLoop | None = None
        main.__dict__.update({"display": self._display, _SYSTEM: self._system, _MAGIC: _magic})

    def run(self, code: str) -> list[tuple[str, str | bytes]]:
        """Runs a cell and returns the parts of its answer."""
        self._count += 1
        self._images = []
        name = f"<cell {self._count}>"
        linecache.cache[name] = (len(code), None, code.splitlines(keepends=True), name)
        answer: list[tuple[str, str | bytes]] = []
        try:
            signal.signal(signal.SIGINT, signal.default_int_handler)
            tree = _parse(code, name)
            last = tree.body.pop() if tree.body and isinstance(tree.body[-1], ast.Expr) else None
            value = self._evaluate(tree, name, "exec")
            if isinstance(last, ast.Expr):
                value = self._evaluate(ast.Expression(last.value), name, "eval")
            if value is not None:
                self._main.__dict__["_"] = value
                self._keep_png(value)
                text = repr(value)
                cut = f"{text[:MAX_TEXT]}… [{len(text) - MAX_TEXT} more characters]"
                answer.append(("text", text if len(text) <= MAX_TEXT else cut))
            self._collect_figures()
        except BaseException as raised:
            signal.signal(signal.SIGINT, signal.SIG_IGN)
            answer += _describe_error(raised)
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(BaseException):
                stream.flush()
        return answer + [("image", image) for image in self._images]

    def _evaluate(self, tree: ast.AST, name: str, mode: str) -> object:
        compiled = compile(tree, name, mode, ast.PyCF_ALLOW_TOP_LEVEL_AWAIT, dont_inherit=True)  # type: ignore[call-overload]
        if compiled.co_flags & inspect.CO_COROUTINE:
            if self._loop is None:
                import asyncio  # imported here to keep every run's process small

                self._loop = asyncio.new_event_loop()
            return self._loop.run_until_complete(eval(compiled, self._main.__dict__))
        return eval(compiled, self._main.__dict__)

    def _system(self, command: str) -> None:
        """Runs a shell command (`!command`), whose output becomes the cell's."""
        import subprocess  # imported here to keep every run's process small

        sys.stdout.flush()
        done = subprocess.run(["bash", "-c", command], stdin=subprocess.DEVNULL, check=False)
        self._main.__dict__["_exit_code"] = done.returncode

    def _display(self, *values: object) -> None:
        """Displays values: the builtin `display` of notebooks."""
        for value in values:
            if not self._keep_png(value):
                sys.stdout.write(f"{value!r}\n")

    def _keep_png(self, value: object) -> bool:
        method: Callable[[], object] | None = getattr(type(value), "_repr_png_", None) and value._repr_png_  # type: ignore[attr-defined]
        if method is not None and isinstance(image := method(), bytes):
            return self._keep(image)
        figure = getattr(sys.modules.get("matplotlib.figure"), "Figure", None)
        if figure is not None and isinstance(value, figure):
            return self._keep(_render_png(value))
        return False

    def _collect_figures(self) -> None:
        """Renders and closes the open figures, like a notebook."""
        pyplot = sys.modules.get("matplotlib.pyplot")
        if pyplot is None:
            return
        for number in pyplot.get_fignums():
            self._keep(_render_png(pyplot.figure(number)))
        pyplot.close("all")

    def _keep(self, image: bytes) -> bool:
        if len(image) > MAX_IMAGE_BYTES or len(self._images) >= MAX_IMAGES:
            sys.stderr.write(f"[an image of {len(image)} bytes was left out]\n")
        elif image not in self._images:  # a figure that is the last value is usually open as well
            self._images.append(image)
        return True


def _parse(code: str, name: str) -> ast.Module:
    """Parses a cell; notebook lines that are not Python, `!command` and `%magic`, are replaced by calls of our functions.

    Only a line at which a syntax error is reported is replaced, so strings and longer expressions are left unchanged.
    """
    lines: list[str] = []
    while True:
        try:
            return ast.parse("".join(lines) or code, name)
        except SyntaxError as error:
            lines = lines or code.splitlines(keepends=True)
            number = (error.lineno or 0) - 1
            line = lines[number] if 0 <= number < len(lines) else ""
            found = _NOTEBOOK_LINE.fullmatch(line)
            if found is None:
                raise
            indent, kind, text, end = found.groups()
            lines[number] = f"{indent}{_SYSTEM if kind == '!' else _MAGIC}({text!r}){end}"


def _magic(line: str) -> None:
    """Ignores `%matplotlib …`, since figures are always rendered; other magics are an error."""
    if line.split()[:1] != ["matplotlib"]:
        raise NameError(f"%{line.split()[0] if line.split() else ''} is not known here; only %matplotlib is")


def _render_png(figure: Any) -> bytes:
    target = io.BytesIO()
    figure.savefig(target, format="png", bbox_inches="tight")
    return target.getvalue()


def _describe_error(error: BaseException) -> list[tuple[str, str | bytes]]:
    """Returns an exception as parts of an answer, without the frames of this file."""
    own = error.__traceback__
    ours = {__file__, getattr(sys.modules.get("asyncio.base_events"), "__file__", __file__)}
    while own is not None and own.tb_frame.f_code.co_filename in ours:
        own = own.tb_next
    try:
        text, value = "".join(traceback.format_exception(type(error), error, own)), str(error)
    except BaseException as further:  # an exception whose `str` fails
        text = value = f"<no text: {type(further).__name__}>"
    if len(text) > MAX_TRACEBACK:
        text = (
            f"{text[: MAX_TRACEBACK // 2]}\n… [{len(text) - MAX_TRACEBACK} characters] …\n{text[-MAX_TRACEBACK // 2 :]}"
        )
    return [("name", type(error).__name__[:200]), ("value", value[:MAX_TRACEBACK]), ("traceback", text)]
