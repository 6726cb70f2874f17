"""The registry used by every plug-in point, and the only way in which user code is imported by name; a file that still
imports verl or RL-Factory is told what to write instead.

Invariant: a name in a registry means one object for the life of the process; registering a different object under a
taken name is an error, registering the same one again (a module imported twice) is not.
"""

from __future__ import annotations

import ast
import difflib
import hashlib
import importlib
import importlib.util
import inspect
import os
import re
import sys
import traceback
from collections.abc import Callable, Iterable, Iterator
from importlib.machinery import ModuleSpec
from itertools import islice
from pathlib import Path
from types import ModuleType
from typing import Any, Generic, TypeVar

from etude.errors import ConfigError, E, one_line, raise_faults

T = TypeVar("T")

USER_MODULE = "etude_user_"
"""Prefix of the module names of files that users import."""
FAULTS = "__etude_faults__"
"""Name in such a module of the errors of its decorators, which are raised together after its import."""
_NEIGHBOURHOODS = set[Path]()
"""Folders of users' files that were appended to the import path."""
_CODE_NAME = re.compile(r"[^\s'\":,\[\]{}]+\.py\b")  # in a tool file: `class_name: tool.py:Price`, `args: [server.py]`
_CLASS_NAME = re.compile(r"\b(?:class_name|_target_)['\"]?\s*:\s*['\"]?((?:\w+\.)+)\w")  # `class_name: mine.Price`


def suggestion(name: str, known: Iterable[str]) -> str:
    """`did you mean 'x'?` for the closest match in `known`, or an empty string: the fix of an unknown name."""
    near = difflib.get_close_matches(name, list(known), n=1, cutoff=0.5)
    return f"did you mean '{near[0]}'?" if near else ""


def unknown_name(kind: type[E], problem: str, name: str, known: Iterable[str], listed: str = "") -> E:
    """The error of a name that is not `known`: its fix is the closest match, with those that are `listed`."""
    if near := suggestion(name, known):
        return kind(problem, fix=f"{near} {listed}".strip())
    return kind(f"{problem} {listed}".strip())


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """The suggestion as the end of a line, after a semicolon."""
    near = suggestion(name, known)
    return f"; {near}" if near else ""


def missing_file(path: Path) -> str:
    """Error message for a missing file: where it was looked for, and a file of its name one folder down, the closest name in
    its folder, or that there is no such folder, with the closest name of one."""
    looked = path.absolute()
    if not path.is_absolute():
        below = (entry / path for entry in islice(Path.cwd().iterdir(), 1000) if entry.is_dir())
        if found := next((place for place in below if place.is_file()), None):
            return f"file not found: {looked}; did you mean {found.relative_to(Path.cwd())}?"
    folder = looked.parent
    if not folder.is_dir():
        beside = [entry.name for entry in folder.parent.iterdir() if entry.is_dir()] if folder.parent.is_dir() else []
        return f"file not found: {looked} (there is no folder {folder}{did_you_mean(folder.name, beside)})"
    near = (entry.name for entry in looked.parent.iterdir() if entry.is_file())
    return f"file not found: {looked}{did_you_mean(path.name, near)}"


def one_edit_from(name: str, known: Iterable[str]) -> str | None:
    """An entry of `known` one edit away from `name`: a letter inserted, deleted, replaced, or swapped with the next."""
    return next((other for other in known if _is_one_edit(name, other)), None)


def _is_one_edit(a: str, b: str) -> bool:
    i = next((n for n, (x, y) in enumerate(zip(a, b)) if x != y), min(len(a), len(b)))
    exchanged = a[i : i + 2] == b[i : i + 2][::-1] and a[i + 2 :] == b[i + 2 :]
    return a != b and (exchanged or b[i + 1 :] in (a[i:], a[i + 1 :]) or a[i + 1 :] == b[i:])


class Registry(Generic[T]):
    """Maps names to objects of one kind (`kind` is the noun that error messages use)."""

    def __init__(self, kind: str) -> None:
        self.kind = kind
        self._items: dict[str, T] = {}

    def register(self, *names: str) -> Callable[[T], T]:
        """Decorator that registers an object under one or more names.

        Raises:
            ConfigError: a name is taken by a different object.
        """

        def enter(item: T) -> T:
            for name in names:
                held = self._items.get(name)
                if held is not None and not _same_definition(held, item):
                    raise ConfigError(
                        f"{self.kind} '{name}' is already registered by {_origin(held)}, and again by {_origin(item)}",
                        fix="rename or remove one",
                    )
                self._items[name] = item
            return item

        return enter

    def get(self, name: str) -> T:
        """Returns the object registered as `name`.

        Raises:
            ConfigError: nothing is registered as `name`; the message lists the known names and suggests the closest.
        """
        if name not in self._items:
            listed = f"(known: {', '.join(self.names()) or 'none'})"
            raise unknown_name(ConfigError, f"unknown {self.kind} '{name}'", name, self._items, listed)
        return self._items[name]

    def names(self) -> list[str]:
        """All registered names, sorted."""
        return sorted(self._items)

    def __contains__(self, name: object) -> bool:
        return name in self._items


def _qualified_name(item: object) -> str:
    return f"{getattr(item, '__module__', '?')}.{getattr(item, '__qualname__', type(item).__name__)}"


def _origin(item: object) -> str:
    item = getattr(item, "__wrapped__", item)  # unwrap a record to its function
    file = _source_file(item)
    return f"{_qualified_name(item)} ({file})" if file else _qualified_name(item)


def _source_file(item: object) -> str | None:
    try:
        return inspect.getsourcefile(item)  # type: ignore[arg-type]
    except TypeError:  # neither a class nor a function
        return None


def _same_definition(a: object, b: object) -> bool:
    """True for the same object, and for a class or function defined again because its file was imported again: under
    another module name, or as the running script."""
    a, b = (getattr(item, "__wrapped__", item) for item in (a, b))
    if a is b:
        return True
    names = [getattr(item, "__qualname__", "<lambda>") for item in (a, b)]
    if names[0] != names[1] or "<lambda>" in names[0]:  # all lambdas of a scope share one name
        return False
    files = [_source_file(item) for item in (a, b)]
    return files[0] == files[1] and (
        files[0] is not None or _qualified_name(a) == _qualified_name(b)
    )  # without a file, compare modules


def import_module(target: str) -> ModuleType:
    """Imports `path/to/file.py` or `dotted.module`, once per process.

    Raises:
        ConfigError: the file does not exist or the import fails; the message names it.
    """
    is_file = target.endswith(".py") or "/" in target
    try:
        return _import_file(Path(target).expanduser()) if is_file else importlib.import_module(target)
    except ConfigError:
        raise
    except Exception as error:  # a user's module may raise anything on import: report it
        why = f"{type(error).__name__}: {one_line(error)}{renamed_imports(error)}"
        raise ConfigError(f"cannot import '{target}': {why}") from error


def _import_file(path: Path) -> ModuleType:
    path = path.resolve()
    if not path.is_file():
        raise ConfigError(missing_file(path))
    name = f"{USER_MODULE}{path.stem}_{hashlib.sha256(str(path).encode()).hexdigest()[:12]}"
    if name in sys.modules:
        return sys.modules[name]
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    _find_neighbours(path)
    sys.modules[name] = module  # before execution, so that dataclasses and pickles of the module resolve
    try:
        try:
            spec.loader.exec_module(module)
        finally:
            raise_faults(vars(module).get(FAULTS, ()))
    except BaseException:
        del sys.modules[name]
        raise
    return module


def _find_neighbours(path: Path) -> None:
    """Lets the file `path` import files and packages beside it, as a script can: appends its folder to the import path. An
    installed module of the same name comes first.

    Raises:
        ConfigError: the neighbour of another user's file has the same name, and would be imported instead.
    """
    folder, waiting, seen = path.parent, [path], set[Path]()
    while waiting:
        for file in _named_code(waiting.pop()):
            if file in seen or not file.is_file() or folder not in file.parents:
                continue
            seen.add(file)
            name = Path(file.relative_to(folder).parts[0]).stem
            spec = importlib.util.find_spec(name)
            if spec is None:
                sys.path.append(str(folder))
                _NEIGHBOURHOODS.add(folder)
            if spec is None or _is_in(spec, folder):
                waiting.append(file)
            elif other := next((each for each in _NEIGHBOURHOODS if _is_in(spec, each)), None):
                raise ConfigError(
                    f"{path} and a file in {other} each import their own '{name}'", fix=f"rename one of {folder / name}"
                )


def _is_in(spec: ModuleSpec, folder: Path) -> bool:
    """Whether a top-level module is a file or a package of `folder`."""
    places = [Path(each) for each in (spec.origin, *(spec.submodule_search_locations or ())) if each]
    return any(place in (folder / f"{spec.name}.py", folder / spec.name) for place in places)


def import_object(target: str) -> Any:
    """Imports the object named `pkg.module.Name` or `path/to/file.py:Name`.

    Raises:
        ConfigError: the module, the file or the name in it does not exist.
    """
    module_name, _, name = target.rpartition(":") if ":" in target else target.rpartition(".")
    if target.endswith(".py"):
        raise ConfigError(f"'{target}' is a file", fix=f"name the object in it too, as in '{target}:NAME'")
    if not module_name or not name:
        raise ConfigError(f"'{target}' is not of the form 'package.module.Name' or 'path/to/file.py:Name'")
    module = import_module(module_name)
    if not hasattr(module, name):
        public = [n for n, v in vars(module).items() if not n.startswith("_") and not inspect.ismodule(v)]
        own = [n for n in public if getattr(getattr(module, n), "__module__", "") == module.__name__]
        listed = f"(it defines {', '.join(own[:10])})" if own else ""
        error = unknown_name(ConfigError, f"'{module_name}' has no '{name}'", name, public, listed)
        raise error if error.fix else ConfigError(error.message, fix=f"name one of these, or call yours '{name}'")
    return getattr(module, name)


def import_beside(target: str, file: Path) -> Any:
    """Like `import_object`, but `path/to/file.py:Name` may also be relative to the folder of `file`, which names it."""
    path, colon, name = target.rpartition(":")
    near = file.parent / Path(path).expanduser()
    try:
        return import_object(f"{near}:{name}" if colon and near.is_file() else target)
    except ConfigError as error:
        module, _, inner = target.replace(":", ".").rpartition(".")
        if not error.fix and (file.parent / f"{module}.py").is_file():
            raise ConfigError(
                error.message, fix=f"for the file beside {file.name}, write {module}.py:{inner}"
            ) from error
        raise


def code_beside(path: Path) -> list[Path]:
    """Returns the Python files that the file `path` names (YAML) or imports (Python) from its own folder, those that these
    import, and so on, in order of path. They are found by reading: nothing is imported."""
    found, waiting = set[Path](), [path]
    while waiting:
        new = {file for file in _named_code(waiting.pop()) if file.is_file()} - found - {path}
        found |= new
        waiting += new
    return sorted(found)


def module_files(module: str) -> list[Path]:
    """Returns the files of a dotted module and of the packages around it, where Python would find them; none of Étude's and
    of what is installed. Nothing is imported."""
    names = module.strip(".").split(".")
    places = [Path(*names[: end + 1]) for end in range(len(names) if names[0] != "etude" else 0)]
    for root in sys.path:
        if "site-packages" not in root and not root.startswith(sys.base_prefix):
            files = (file for place in places for file in (place.with_suffix(".py"), place / "__init__.py"))
            if found := [Path(root) / file for file in files if (Path(root) / file).is_file()]:
                return found
    return []


def _named_code(file: Path) -> Iterator[Path]:
    if file.suffix not in (".py", ".yaml", ".yml"):
        return
    try:
        text = file.read_text(encoding="utf-8")
        nodes = list(ast.walk(ast.parse(text))) if file.suffix == ".py" else []
    except (OSError, ValueError, SyntaxError, RecursionError):
        return
    if file.suffix != ".py":
        yield from (file.parent / Path(name).expanduser() for name in _CODE_NAME.findall(text))
        yield from (each for name in _CLASS_NAME.findall(text) for each in module_files(name))
    for node in nodes:
        folder, modules = file.parent, list[str]()
        if isinstance(node, ast.Import):
            modules = [each.name for each in node.names]
        elif isinstance(node, ast.ImportFrom):
            folder = file.parents[: max(node.level, 1)][-1]
            modules = [f"{node.module or ''}.{each.name}" for each in node.names]
        for module in modules:
            place = folder
            for name in filter(None, module.split(".")):
                place /= name
                yield from (place.with_suffix(".py"), place / "__init__.py")


def digest_code(item: object) -> str:
    """Returns a digest of the user's file that defines a class or function, and of the `code_beside` it; empty if there is
    none, as for our own."""
    file = None if getattr(item, "__module__", "etude.").startswith("etude.") else _source_file(item)
    digest = hashlib.sha256()
    for each in [] if file is None else [Path(file), *code_beside(Path(file))]:
        try:
            digest.update(each.read_bytes())
        except OSError:
            return ""
    return digest.hexdigest()[:16] if file else ""


def share_folder(folder: str, path: Iterable[str]) -> None:
    """Adopts the working directory and import path of another process, as far as they exist on this machine."""
    if os.path.isdir(folder):
        os.chdir(folder)
    sys.path += [each for each in path if each not in sys.path and os.path.exists(each)]


def load_plugins(targets: Iterable[str]) -> None:
    """Imports every entry of the `plugins` key, so that its `@register` decorators run in this process."""
    for target in targets:
        import_module(target)


MODULES = {  # of verl and RL-Factory, for files that still import them; docs/migrating.md has both tables
    "verl": "etude.protocol",
    "verl.protocol": "etude.protocol",
    "verl.tools": "etude.tools",
    "verl.utils.rollout_trace": "etude.trace",
    "verl.utils.reward_score": "etude.rewards",
    "verl.utils.dataset": "etude.data",
    "verl.interactions": "etude.agents.interactions",
    "verl.experimental.agent_loop": "etude.agents",
    "verl.experimental.agent_loop.tool_parser": "etude.chat",
    "verl.experimental.reward_loop": "etude.rewards",
    "verl.experimental.reward": "etude.rewards",
    "verl.workers.reward_manager": "etude.rewards",
    "verl.single_controller": "etude.distributed",
    "verl.trainer.ppo.core_algos": "etude.algorithms",
    "envs": "etude.agents.environments",
    "envs.base": "etude.agents.environments",
    "envs.tool_manager": "etude.agents.environments",
    "envs.tools": "etude.tools",
}
"""The longest matching prefix of a module's name counts."""
_UNUSED = "not used"


def renamed_imports(error: BaseException) -> str:
    """`"; …"`: the replacement for each such import in the file that raised `error`; empty for other errors and packages."""
    frames = traceback.extract_tb(error.__traceback__)
    path = Path(frames[-1].filename) if frames else Path()
    if not isinstance(error, ImportError) or not path.is_file():
        return ""
    package = (error.name or "").partition(".")[0]
    relative = str(error).startswith("attempted relative import")
    if not relative and package not in MODULES:
        return ""
    lines = [f"; {path.name}:{number}: {name} is {place} here" for number, name, place in _imports(path, package)]
    if relative and not lines:
        return f"; {path.name} is imported as a file of its own: name its neighbours without the leading dot"
    return "".join(lines) + "; see docs/migrating.md"


def _place(module: str) -> str:
    names = module.split(".")
    known = (".".join(names[:depth]) for depth in range(len(names), 1, -1))
    replacement = next((MODULES[each] for each in known if each in MODULES), None)
    return replacement or MODULES.get(module, _UNUSED)


def _imports(path: Path, package: str) -> Iterator[tuple[int, str, str]]:
    """Yields (line, module, its place here) for each import of `package` or one of its submodules, and for each relative
    import of names that one of our modules has."""
    for node in ast.walk(ast.parse(path.read_bytes())):
        if isinstance(node, ast.ImportFrom) and node.level:
            places = [place for place in dict.fromkeys(MODULES.values()) if _has_names(place, node.names)]
            if places:
                yield node.lineno, "." * node.level + (node.module or ""), places[0]
        elif isinstance(node, ast.Import | ast.ImportFrom):
            modules = [alias.name for alias in node.names] if isinstance(node, ast.Import) else [node.module or ""]
            yield from ((node.lineno, name, _place(name)) for name in modules if name.partition(".")[0] == package)


def _has_names(module: str, names: Iterable[ast.alias]) -> bool:
    try:
        ours = importlib.import_module(module)
    except ImportError:  # an extra that is not installed
        return False
    return all(hasattr(ours, alias.name) for alias in names)
