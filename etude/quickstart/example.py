"""`Example`: a folder with an example to train a tiny model on, and its expected result.

    example.yaml   the fields of `ExampleOptions`: what it shows, its claim, numbers of rows
    agent.yaml     the run's configuration; the quickstart sets data, model, folders and seed
    agent.py       `prepare(folder, seed, rows)` → {table name: rows} for train, val, test and demonstrations; if it needs
                   a service, the context manager `serve(folder)` → environment variables; plug-ins

Invariant: loading an example executes nothing of it except the import of its `agent.py`. An invalid file raises a one-line
error that names it.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeAlias

import yaml

from etude.errors import WARNING, ConfigError, one_line
from etude.options.declare import key, options
from etude.options.model_path import NAMED_MODELS
from etude.options.validate import to_options
from etude.registry import did_you_mean, import_module

logger = logging.getLogger(__name__)
STORIES, CALCULATOR = "stories", "calculator"
"""The examples shipped with the package: `etude quickstart` runs the stories unless told otherwise."""
_BUILT_IN = Path(__file__).parent
_GALLERY = Path(__file__).parents[2] / "examples"  # exists in a checkout only

Tables: TypeAlias = Mapping[str, Sequence[Mapping[str, Any]]]


@options
class Rows:
    """Numbers of rows that `agent.py` should make."""

    train: int = key("Questions to train on.", default=1024)
    val: int = key("Questions that the warm-up and the run are watched on.", default=64)
    test: int = key("Questions of the evaluations before and after.", default=256)
    demonstrations: int = key("Conversations of the warm-up; with a model, default 0: none.", default=8000)


@options
class ExampleOptions:
    """The schema of `example.yaml`."""

    shows: str = key("What the example shows, in a line.")
    metric: Literal["success", "tool_use", "reward", "turns"] = key("What the claim is about.", default="success")
    margin: float = key("By how much it rises, sampled on the test questions; negative: falls.", default=0.4)
    greedy: bool = key("Whether the evaluations are greedy, too, and not only sampled.", default=True)
    rows: Rows = key("", default_factory=Rows)
    vocabulary: int = key("Tokens of the untrained model's tokenizer.", default=512)
    warm_up: tuple[str, ...] = key("Arguments of `etude sft` beside those of quickstart_sft.", default=())
    model: str | None = key(
        "Pretrained model that it starts from, as in model.path, in place of an untrained one.",
        default=None,
    )
    start: str | None = key(
        "Example whose warmed-up model it starts from, and whose rows it takes where it has no `prepare`.", default=None
    )
    teacher: str | None = key("Example whose trained model is the teacher.", default=None)

    def __post_init__(self) -> None:
        if not self.margin:
            raise ValueError("margin must not be 0")


@dataclass(frozen=True)
class Example:
    """A folder with an `example.yaml`."""

    folder: Path
    options: ExampleOptions

    @classmethod
    def read(cls, folder: Path) -> Example:
        """Reads the example in `folder`.

        Raises:
            ConfigError: `example.yaml` is missing or invalid.
        """
        path = folder / "example.yaml"
        try:
            given = yaml.safe_load(path.read_text(encoding="utf-8"))
        except (OSError, ValueError, yaml.YAMLError) as error:
            raise ConfigError(f"cannot read {path}: {one_line(error)}") from error
        if not isinstance(given, dict):
            raise ConfigError(f"{path} must be a mapping")
        if (model := given.get("model")) is not None:
            rows = given.get("rows")
            given["rows"] = {"demonstrations": 0, **rows} if isinstance(rows, dict) else rows or {"demonstrations": 0}
            if isinstance(model, str) and model not in NAMED_MODELS and "/" not in model and not Path(model).is_dir():
                raise ConfigError(
                    f"{path}: model '{model}' is no folder and not known{did_you_mean(model, NAMED_MODELS)}"
                )
        try:
            return cls(folder.resolve(), to_options(ExampleOptions, given))
        except ConfigError as error:
            raise ConfigError(f"{path}: {error}") from error

    @property
    def name(self) -> str:
        """The folder's name; in a checkout's `examples/`, its path there."""
        inside = _GALLERY.resolve() in self.folder.parents
        return self.folder.relative_to(_GALLERY.resolve()).as_posix() if inside else self.folder.name

    @property
    def prepare(self) -> Callable[[Path, int, Rows], Tables] | None:
        """Function that makes the tables, and any other files that the example needs, from a seed; None if not defined."""
        return getattr(self._code, "prepare", None)

    def serve(self, folder: Path) -> AbstractContextManager[Mapping[str, str]]:
        """Runs the example's service, if any; yields the environment variables that clients need to find it."""
        served = getattr(self._code, "serve", None)
        return nullcontext({}) if served is None else served(folder)

    @property
    def _code(self) -> Any:
        path = self.folder / "agent.py"
        return import_module(str(path)) if path.is_file() else None

    def warn_of_model(self) -> None:
        """Warns if `agent.yaml` names a model: the example starts from that of `example.yaml`, or from an untrained one."""
        file, model, start = self.folder / "agent.yaml", self.options.model, self.options.start
        try:
            named = yaml.safe_load(file.read_text(encoding="utf-8"))["actor_rollout_ref"]["model"]["path"]
        except (OSError, ValueError, LookupError, TypeError, yaml.YAMLError):
            return  # none is named; a malformed file is told when it is composed
        if named != model:
            own = f"`start: {start}`" if start else "an untrained one, for lack of `model`"
            rule = f"`model: {model}`" if model else own
            line = f"{file}: actor_rollout_ref.model.path={named} is overruled by example.yaml: {rule}"
            logger.warning(WARNING, line, "name the model as `model` in example.yaml alone")

    @property
    def root(self) -> str:
        """Name of its folder in `runs/`."""
        return "quickstart" if self.folder == _BUILT_IN / CALCULATOR else self.name

    def run_folder(self, seed: int) -> Path:
        """Default run folder, where other examples look for its models."""
        return (Path("runs") / self.root / f"seed-{seed}").resolve()


def find_example(given: str) -> Example:
    """Finds an example by folder, or by name in a checkout's `examples/`.

    Raises:
        ConfigError: there is none.
    """
    names = [path.parent.relative_to(_GALLERY).as_posix() for path in sorted(_GALLERY.glob("**/example.yaml"))]
    for folder in (Path(given).expanduser(), (_BUILT_IN if given in (STORIES, CALCULATOR) else _GALLERY) / given):
        if (folder / "example.yaml").is_file():
            return Example.read(folder)
    if Path(given).is_dir():
        raise ConfigError(f"{given} holds no example.yaml")
    if given == Path.cwd().name and Path("example.yaml").is_file():
        raise ConfigError(f"no folder '{given}' here: it is the working directory itself", fix="name it --example .")
    known = [*(path.parent.name for path in Path().glob("*/example.yaml")), STORIES, CALCULATOR, *names]
    where = "" if names else "; the others are in the folder examples/ of the repository: name one of its folders"
    raise ConfigError(f"no example '{given}'{did_you_mean(given, known)} (known: {', '.join(known)}){where}")
