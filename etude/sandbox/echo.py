"""`echoing`: makes a Python request print the value of its last expression, as an interactive prompt does.

Invariant: the program is parsed where it runs, in the sandbox, never here. Works with any server of `/run_code`.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from etude.sandbox.types import Language, RunRequest, SandboxRequestError

SOURCE = ".source.py"
_PROGRAM = Path(__file__).with_name("echo_program.py")


def echoing(request: RunRequest) -> RunRequest:
    """`request`, with the value of its last expression printed after its output.

    Raises:
        SandboxRequestError: it is not Python, or has a file of the name `.source.py`.
    """
    if request.language is not Language.PYTHON:
        raise SandboxRequestError(f"language: only Python has a last value, not {request.language.value}")
    if SOURCE in request.files:
        raise SandboxRequestError(f"files: the name {SOURCE!r} is taken")
    source = request.code.encode("utf-8", "surrogatepass")
    return replace(request, code=_PROGRAM.read_text(encoding="utf-8"), files={**request.files, SOURCE: source})
