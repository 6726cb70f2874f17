"""The confined process that waits in a box for its orders.

Invariant: it has dropped every privilege before it receives its orders, and sets its limits before the first instruction
that is not ours. A failure on the way is reported to the supervisor as the sandbox's; a compiled program that cannot be
started is the model's own.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

from . import cells, frames, program
from .box import Box
from .settings import Settings


class Broken(Exception):
    """The start of the program failed."""


@dataclass(frozen=True)
class PreparedProcess:
    """A confined process that waits for orders on the other end of `orders`."""

    pid: int
    orders: int


def prepare(settings: Settings, box: Box, stdio: Sequence[int], cells_fd: int) -> PreparedProcess:
    """Forks a process that drops its privileges and waits for orders."""
    ours, theirs = socket.socketpair()
    pid = os.fork()
    if pid == 0:
        program.take_descriptors([*stdio, cells_fd, theirs.detach()])
        ours.detach()
        _become(settings, box)
    theirs.close()
    return PreparedProcess(pid, ours.detach())


def start(prepared: PreparedProcess, request: dict[str, Any], command: list[str] | None) -> None:
    """Gives a prepared process its orders; returns when its code starts.

    Raises:
        Broken: it could not be confined, or its interpreter could not be started.
    """
    wanted = ("kind", "source", "code", "args", "limits", "address_space")
    failure = b""
    try:
        frames.send(prepared.orders, {"command": command, **{name: request[name] for name in wanted}})
        while part := os.read(prepared.orders, 4096):
            failure += part
    finally:
        os.close(prepared.orders)
    if failure:
        raise Broken(failure.decode("utf-8", "replace"))


def _become(settings: Settings, box: Box) -> NoReturn:
    """The life of a prepared process: orders come on descriptor 4, a session's cells on 3."""
    orders = 4
    command: list[str] | None = None
    try:
        program.confine(settings, box)
        received = frames.receive(orders)
        if received is None:
            os._exit(0)
        order = received[0]
        command = order["command"]
        program.limit(program.Bounds.of(order["limits"], order["address_space"]), settings.isolated)
        if command is not None:
            os.close(3)
            program.execute(command)
        os.close(orders)
    except BaseException as error:
        text = f"{type(error).__name__}: {error}"[:1000].encode("utf-8", "replace")
        compiled = command is not None and command[0].startswith(box.tmp)  # the model's own failure
        os.write(2 if compiled else orders, text)
        os._exit(126)
    if order["kind"] == "session":
        cells.serve(3, box.work)
    os.close(3)
    program.run_python(os.path.join(box.work, order["source"]), order["code"], order["args"])
