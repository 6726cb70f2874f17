"""Checks one statement about a solution, inside the sandbox, in a process that never runs the solution.

Standard input holds one line of JSON: `secret`, `solution`, `statement`. This process, the checker, runs the statement; a
child, forked before the line is read, runs the solution. The names that the statement takes from the solution stand for
objects of the child: to call one sends a message. If the statement holds, the last line of standard output begins with the
secret; `null` follows, or the class of an argument that cannot be sent.

Invariant: between the processes pass plain values, rebuilt from JSON by a fixed list of classes, and numbers for everything
else. What the checker compares is therefore a plain value, or a `Remote`, which equals only itself. The child inherits no
descriptor but its end of the connection, and cannot open the checker's memory or descriptors; the checker imports nothing
from the work directory. A child that ends, or breaks the protocol, ends the check.
"""

import ast
import builtins
import contextlib
import ctypes
import importlib
import json
import operator
import os
import socket
import struct
import sys
import types
from collections import deque
from typing import Any, NoReturn

_MAX_BYTES = 16 << 20  # of a message
_LENGTH = struct.Struct("!I")
_PR_SET_DUMPABLE = 4
_COLLECTIONS: dict[str, Any] = {"tuple": tuple, "set": set, "frozenset": frozenset, "deque": deque}
_BYTES: dict[str, Any] = {"bytes": bytes, "bytearray": bytearray}
_VALUES = {"complex": "builtins", "range": "builtins", "Decimal": "decimal", "Fraction": "fractions"}
_VALUES |= dict.fromkeys(("date", "datetime", "time", "timedelta"), "datetime")
"""Classes whose objects cross as the arguments that make them, and their modules."""
_ALIASES = {"np": "numpy", "pd": "pandas"}
TYPES = "from typing import Any, Callable, Dict, Iterable, Iterator, List, Optional, Sequence, Set, Tuple, Union"
"""What the problem's own program has often imported, so that a solution of the function alone names it freely."""


class CannotCross(TypeError):
    """An argument is neither plain, nor callable, nor an iterator."""


class Peer:
    """One process's end of the connection. `operations`: what the other process may do with the objects that it was sent
    numbers of; `exports`: whether any object may get a number, or only functions and iterators."""

    def __init__(self, connection: socket.socket, operations: dict[str, Any], exports: bool) -> None:
        self._connection = connection
        self._operations = operations
        self._exports = exports
        self._own: list[Any] = []
        self._numbers: dict[int, int] = {}  # by `id`; `_own` keeps the objects alive
        self._remotes: dict[int, Remote] = {}

    def ask(self, operation: str, *arguments: Any) -> Any:
        """Returns (value, arguments after the call if it returned None); raises what the operation raised there."""
        self._send({"do": operation, "with": [self.encode(each) for each in arguments]})
        while "do" in (message := self.receive()):
            self.answer(message)
        try:
            if "error" not in message:
                return self.decode(message["value"]), self.decode(message.get("after"))
            name, text = message["error"]
            kind = getattr(builtins, name)
            if kind is StopIteration and operation != "next":
                kind = RuntimeError  # it would end the test's own loops: `zip(map(f, inputs), outputs)`
            error: Exception = kind.__new__(kind, str(text))
        except Exception:
            os._exit(1)
        raise error

    def answer(self, message: dict[str, Any]) -> None:
        """Does what the other process asks for."""
        try:
            arguments = [self.decode(each) for each in message["with"]]
            value = self._operations[message["do"]](*arguments)
            reply = {"value": self.encode(value)}
            if message["do"] == "call" and value is None:
                reply["after"] = self.encode(arguments[1])
        except Exception as error:
            kind = next(each for each in type(error).__mro__ if each.__module__ == "builtins")
            reply = {"error": [kind.__name__, str(error)]}
        self._send(reply)

    def _send(self, message: dict[str, Any]) -> None:
        data = json.dumps(message).encode()
        if len(data) > _MAX_BYTES:
            raise ValueError(f"a message of {len(data)} bytes (at most {_MAX_BYTES})")
        try:
            self._connection.sendall(_LENGTH.pack(len(data)) + data)
        except OSError:
            os._exit(1)

    def receive(self) -> dict[str, Any]:
        """Returns the next message; ends the process if none comes."""
        try:
            (length,) = _LENGTH.unpack(self._exactly(_LENGTH.size))
            message = json.loads(self._exactly(length)) if length <= _MAX_BYTES else None
        except Exception:
            message = None
        if not isinstance(message, dict):
            os._exit(1)
        return message

    def _exactly(self, size: int) -> bytes:
        data = bytearray()
        while len(data) < size:
            part = self._connection.recv(min(size - len(data), 1 << 20))
            if not part:
                raise EOFError
            data += part
        return bytes(data)

    def encode(self, value: Any) -> Any:
        """Returns `value` as JSON data: itself, a list of what crosses, or an object with the name of what it is."""
        if value is None or isinstance(value, str | float | bool):
            return value
        if isinstance(value, int):
            return value if -(1 << 63) < value < 1 << 63 else {"int": hex(value)}
        if isinstance(value, list):
            return [self.encode(each) for each in value]
        if isinstance(value, dict):
            return {"dict": [[self.encode(key), self.encode(each)] for key, each in value.items()]}
        for name, kind in _COLLECTIONS.items():
            if isinstance(value, kind):
                return {name: [self.encode(each) for each in value]}
        for name, kind in _BYTES.items():
            if isinstance(value, kind):
                return {name: value.hex()}
        if isinstance(value, Remote):
            return {"yours": value._number}
        kind = type(value)
        if kind.__module__ == "numpy" and hasattr(value, "item") and not hasattr(value, "__len__"):
            return self.encode(value.item())
        if _VALUES.get(kind.__name__) == kind.__module__:
            made_of = value.__getnewargs__() if kind is complex else value.__reduce__()[1]
            return {kind.__name__: [self.encode(each) for each in made_of]}
        own_name = getattr(value, "__name__", None)
        if isinstance(own_name, str) and getattr(builtins, own_name, None) is value:
            return {"builtin": own_name}
        return {"object": self._number_of(value)}

    def _number_of(self, value: Any) -> int:
        if not (self._exports or callable(value) or hasattr(value, "__next__")):
            raise CannotCross(type(value).__name__)
        if id(value) not in self._numbers:
            self._numbers[id(value)] = len(self._own)
            self._own.append(value)
        return self._numbers[id(value)]

    def decode(self, data: Any) -> Any:
        """The reverse of `encode`; any exception means that `data` is not what it returns."""
        if isinstance(data, list):
            return [self.decode(each) for each in data]
        if not isinstance(data, dict):
            return data
        ((name, content),) = data.items()
        if name == "dict":
            return {self.decode(key): self.decode(value) for key, value in content}
        if name == "int":
            return int(content, 16)
        if name in _COLLECTIONS:
            return _COLLECTIONS[name](self.decode(each) for each in content)
        if name in _BYTES:
            return _BYTES[name].fromhex(content)
        if name in _VALUES:
            return getattr(importlib.import_module(_VALUES[name]), name)(*(self.decode(each) for each in content))
        if name == "yours":
            return self._own[operator.index(content)]
        if name == "builtin":
            found = getattr(builtins, content)
            if not (self._exports or (isinstance(found, type) and found is not type)):
                raise ValueError("only classes come from the solution, and not the one that makes classes")
            return found
        if name == "object":
            number = operator.index(content)
            return self._remotes.setdefault(number, Remote(self, number))
        raise ValueError(name)


class Remote:
    """An object of the other process. It can be called, iterated over and asked for attributes, items, length, truth and
    text; it equals only itself."""

    def __init__(self, peer: Peer, number: int) -> None:
        self.__dict__.update(_peer=peer, _number=number)

    def _ask(self, operation: str, *arguments: Any) -> Any:
        return self._peer.ask(operation, self, *arguments)[0]

    def __call__(self, *arguments: Any, **keywords: Any) -> Any:
        value, after = self._peer.ask("call", self, list(arguments), keywords)
        for mine, changed in zip(arguments, after or ()):
            if type(mine) is type(changed) and type(mine) in _OVERWRITE:
                mine.clear()
                _OVERWRITE[type(mine)](mine, changed)
        return value

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):  # libraries look for their protocols so, which stay in the solution's process
            raise AttributeError(name)
        return self._ask("getattr", name)

    def __setattr__(self, name: str, value: Any) -> None:
        self._ask("setattr", name, value)

    def __getitem__(self, key: Any) -> Any:
        return self._ask("getitem", key)

    def __len__(self) -> Any:
        return self._ask("len")

    def __bool__(self) -> Any:
        return self._ask("bool")

    def __str__(self) -> Any:
        return self._ask("str")

    def __iter__(self) -> Any:
        return self._ask("iter")

    def __next__(self) -> Any:
        return self._ask("next")


_OVERWRITE: dict[type, Any] = {list: list.extend, deque: deque.extend, bytearray: bytearray.extend}
_OVERWRITE |= {dict: dict.update, set: set.update}


def _call(function: Any, arguments: list[Any], keywords: dict[str, Any]) -> Any:
    return function(*arguments, **keywords)


_OF_A_TEST: dict[str, Any] = {"call": _call, "iter": iter, "next": next}
_OF_A_SOLUTION = _OF_A_TEST | {"getattr": getattr, "setattr": setattr, "getitem": operator.getitem}
_OF_A_SOLUTION |= {"len": len, "bool": bool, "str": str}


def _serve(connection: socket.socket) -> NoReturn:
    """Runs the solution and answers the checker: the child."""
    nothing = os.open(os.devnull, os.O_RDWR)
    for number in (0, 1, 2):
        os.dup2(nothing, number)
    os.dup2(connection.detach(), 3)
    os.closerange(4, 1 << 16)
    module = types.ModuleType("solution")  # not `__main__`, so that code under that guard does not run
    module.__dict__["__builtins__"] = builtins
    sys.modules["solution"] = module
    exec(TYPES, module.__dict__)

    def run(source: str) -> None:
        exec(compile(source, "<solution>", "exec"), module.__dict__)

    def look_up(names: list[str]) -> tuple[dict[str, Any], list[str]]:
        found = {name: module.__dict__[name] for name in names if name in module.__dict__}
        modules = [name for name, value in found.items() if isinstance(value, types.ModuleType)]
        return {name: value for name, value in found.items() if name not in modules}, modules

    peer = Peer(socket.socket(fileno=3), {**_OF_A_SOLUTION, "run": run, "look_up": look_up}, exports=True)
    try:
        while True:
            peer.answer(peer.receive())
    finally:
        os._exit(1)


def _check(connection: socket.socket) -> None:
    """Runs the statement and reports: the checker."""
    if ctypes.CDLL(None).prctl(_PR_SET_DUMPABLE, 0, 0, 0, 0) != 0:
        os._exit(1)
    sys.path[:] = [path for path in sys.path if path not in ("", os.getcwd())]
    os.chdir("/")
    job = json.loads(sys.stdin.readline())
    peer = Peer(connection, _OF_A_TEST, exports=False)
    peer.ask("run", job["solution"])
    tree = ast.parse(job["statement"], "<test>")
    (found, modules), _ = peer.ask("look_up", _names(tree))
    asked = _attributes(tree)
    for name in {*modules, *(asked.keys() & found.keys())}:  # the checker's own, whatever the solution means by it
        if name in sys.stdlib_module_names or name in _ALIASES:
            with contextlib.suppress(ImportError):  # not installed: a name of the solution's
                module = importlib.import_module(_ALIASES.get(name, name))
                if name in modules or all(hasattr(module, attribute) for attribute in asked[name]):
                    found[name] = module
    refused = None
    try:
        exec(compile(tree, "<test>", "exec"), {**found, "__name__": "test"})
    except CannotCross as error:
        refused = str(error)
    sys.stdout.write("\n" + job["secret"] + json.dumps(refused) + "\n")


def _names(tree: ast.Module) -> list[str]:
    """Returns the names that a statement takes from the solution: those it uses, but neither binds nor has as builtins.
    A statement without any other name tests a function that is called like a builtin."""
    used: set[str] = set()
    bound: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Name):
            (used if isinstance(node.ctx, ast.Load) else bound).add(node.id)
        elif isinstance(node, ast.Import | ast.ImportFrom):
            bound |= {(alias.asname or alias.name).partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            bound.add(node.name)
        elif isinstance(node, ast.arg):
            bound.add(node.arg)
    return sorted(name for name in used - bound if not hasattr(builtins, name)) or sorted(used - bound)


def _attributes(tree: ast.Module) -> dict[str, set[str]]:
    """Name → what a statement asks of it, as `isclose` of `math`."""
    asked: dict[str, set[str]] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            asked.setdefault(node.value.id, set()).add(node.attr)
    return asked


def main() -> None:
    """Checks the statement; any failure is an exception."""
    ours, theirs = socket.socketpair()
    if os.fork() == 0:
        ours.close()
        _serve(theirs)
    theirs.close()
    _check(ours)


if __name__ == "__main__":
    main()
