"""`describe_run`: the provenance of a run for `run.json`: command, code, platform, digests of files, seeds.

Invariant: no secret is recorded: no environment variables, and only redacted settings. Nothing here can fail a run: what
cannot be determined is null.
"""

from __future__ import annotations

import hashlib
import logging
import os
import platform
import re
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import etude
from etude.options import SFTOptions, TrainOptions, declarations
from etude.options.model_path import NAMED_MODELS, named_folder
from etude.options.validate import flatten
from etude.registry import code_beside, module_files
from etude.run_folder import CHANGED, RECONFIGURED, VALIDATION_CHANGED, read_run_record, redact_arguments, utc_now

logger = logging.getLogger(__name__)

_WHOLE_BYTES = 2**30  # of a larger file, only the size and three parts are hashed
_PART_BYTES = 2**26
_MAX_FILES = 1000  # per folder
_GIT_SECONDS = 10.0
_AGENT = "actor_rollout_ref.rollout.agent.openai_agent"
_COMMANDS = (f"{_AGENT}.command", f"{_AGENT}.verifier")
_MAY_NAME_FILES = ("env", f"{_AGENT}.workspace", *_COMMANDS)
_TRAINED_ON = "data.train_files"  # other rows are refused
_VALIDATES = ("data.val_files", "data.val_max_samples", "actor_rollout_ref.rollout.val_kwargs.")  # and no more
_SAMPLES = tuple(f"actor_rollout_ref.rollout.{name}" for name in ("temperature", "top_p", "top_k"))  # in training alone
_ROOM = ("data.max_", *(f"actor_rollout_ref.rollout.{name}" for name in ("max_model_len", "multi_turn.", "agent.")))
_MEASURES = ("reward_model.", "custom_reward_function.", *_VALIDATES, *_SAMPLES, *_ROOM)


def describe_run(kind: str, config: Mapping[str, Any], total_steps: int = 0) -> dict[str, Any]:
    """Describes a run of `kind` (`train`, `sft`, `eval`) with the resolved `config`, as JSON values."""
    policy = config.get("actor_rollout_ref", config)
    served = policy.get("rollout", {}).get("server_model")
    return {
        "kind": kind,
        "model": served or policy.get("model", {}).get("path"),
        "total_steps": total_steps,
        "started": utc_now(),
        "command": redact_arguments([Path(sys.argv[0]).name, *sys.argv[1:]]),
        "working_folder": os.getcwd(),
        "process": {"pid": os.getpid(), "host": platform.node()},
        "code": {
            "version": etude.__version__,
            "etude": git_state(Path(etude.__file__).parent, "__init__.py"),
            "project": git_state(Path.cwd()),
        },
        "platform": platform.platform(),
        "files": digest_files(config),
        "seeds": {key: value for key, value in flatten(config) if re.search(r"(^|\.|_)seed$", key)},
    }


# -- code ----------------------------------------------------------------------------------------------------------------


def git_state(folder: Path, tracked: str | None = None) -> dict[str, Any] | None:
    """Returns `commit`, whether tracked files differ from it (`dirty`), and a digest of the diff; None if `folder` is not in
    a git checkout, or in one that does not track its file `tracked`."""
    if tracked is not None and _git(folder, "ls-files", "--error-unmatch", tracked) is None:
        return None
    commit = _git(folder, "rev-parse", "HEAD")
    if commit is None:
        return None
    changes = _git(folder, "diff", "HEAD", "--no-ext-diff", "--no-color")
    digest = hashlib.sha256(changes).hexdigest()[:16] if changes else None
    return {
        "commit": commit.decode().strip(),
        "dirty": None if changes is None else bool(changes),
        "changes_sha256": digest,
    }


def _git(folder: Path, *arguments: str) -> bytes | None:
    command = ["git", "-c", "core.fsmonitor=false", "-C", str(folder), *arguments]
    try:
        done = subprocess.run(command, capture_output=True, timeout=_GIT_SECONDS, check=False)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout if done.returncode == 0 else None


# -- files ---------------------------------------------------------------------------------------------------------------


def digest_files(config: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Returns the files and folders named by keys of `config` (data, tools, scorers, agents, plugins, models), and the
    `code_beside` them, each with `key`, `bytes` and `sha256`; the last two are null for what is not on this machine, as a
    model on a hub."""
    tree = TrainOptions if "actor_rollout_ref" in config else SFTOptions
    values, found = dict(flatten(config)), dict[str, dict[str, Any]]()
    for key, declared in declarations(tree).items():
        kind = "" if declared.about.alias_of else declared.about.path
        if kind not in ("file", "code", "model") and key not in _MAY_NAME_FILES:
            continue
        for name in _names(key, values.get(key)):
            try:
                path = Path(name.partition(".py:")[0] + (".py" if ".py:" in name else "")).expanduser()
                if key in _MAY_NAME_FILES and not (path.is_file() or (name and key not in _COMMANDS and path.is_dir())):
                    continue  # a word of a command, or the name of an environment
            except (OSError, RuntimeError, ValueError):  # a word that is no path: a program's text, ~NOBODY
                continue
            named = kind == "model" and name in NAMED_MODELS and not path.exists()
            is_module = kind == "code" and not path.exists()
            for each in (is_module and module_files(name.partition(":")[0])) or [path]:
                found.setdefault(str(each), {"key": key, **digest_path(named_folder(name) if named else each)})
                for file in code_beside(each):
                    found.setdefault(str(file), {"key": key, **digest_path(file)})
    return found


def _names(key: str, given: Any) -> Iterator[str]:
    """The names in a key's value, which is one or a list of them; of a reward function's entry its `path`, of an environment
    what follows the colon (`inspect:FILE.py:FUNCTION`)."""
    for entry in [given] if isinstance(given, str) else given or ():
        name = str(entry.get("path") or entry.get("id") or "") if isinstance(entry, Mapping) else str(entry)
        yield name.partition(":")[2] if key == "env" else name


def parent_of(run_dir: Path, checkpoint: Path, step: int) -> dict[str, Any] | None:
    """Returns the `run` (its folder) and `step` that the run in `run_dir` branched from: that of the `checkpoint` it resumes
    from at `step`, if it is another run's, else what the run recorded before; None: it is no branch."""
    if checkpoint.parent.resolve() == run_dir.resolve():
        return read_run_record(run_dir).get("parent")
    return {"run": str(checkpoint.parent.resolve()), "step": step}


def warn_of_changes(run_dir: Path, facts: dict[str, Any], step: int, keys: Sequence[str] = ()) -> None:
    """Logs each file named by the configuration whose content is another than when the run in `run_dir` last started, and
    notes in `facts` which `keys` changed, and after which `step` what rewards and what validations depend on last changed:
    contents, or those of the `keys` that say how is scored, sampled or validated, and with how much room. What is before it
    is not comparable."""
    record = read_run_record(run_dir)
    before = record.get("files") or {}
    old, new = _contents(before), _contents(facts["files"])
    measures = {key for key in keys if key.startswith(_MEASURES)} | (old.keys() & new.keys()) - {_TRAINED_ON}
    changed = {key for key in measures if key not in old or old[key] != new.get(key)}
    trained = any(not key.startswith(_VALIDATES) for key in changed)
    facts[CHANGED] = step if trained else record.get(CHANGED, 0)
    facts[RECONFIGURED] = record.get(RECONFIGURED, []) + [{"step": step, "keys": list(keys)}] * bool(keys)
    facts[VALIDATION_CHANGED] = step if changed - set(_SAMPLES) else record.get(VALIDATION_CHANGED, 0)
    for name, now in facts["files"].items():
        then = (before.get(name) or now)["sha256"]
        if None not in (then, now["sha256"]) and then != now["sha256"]:
            logger.warning("its content changed since the run last started: %s (%s)", name, now["key"])


def _contents(files: Mapping[str, Mapping[str, Any]]) -> dict[str, set[str]]:
    """Key → the digests of its files, whatever they are called; without keys of unreadable ones."""
    found: dict[str, set[str]] = {}
    for each in files.values():
        found.setdefault(each["key"], set()).add(each["sha256"] or "")
    return {key: digests for key, digests in found.items() if "" not in digests}


def digest_path(path: Path) -> dict[str, Any]:
    """Returns `bytes` and `sha256` of a file, or of all files of a folder in order of name; null if it cannot be read.

    For a file above 1 GiB, only its size and 64 MiB at the beginning, middle and end are hashed.
    """
    digest, size = hashlib.sha256(), 0
    try:
        files = [path] if path.is_file() else sorted(each for each in path.rglob("*") if each.is_file())
        if not files or len(files) > _MAX_FILES:
            return {"bytes": None, "sha256": None}
        for file in files:
            digest.update(f"{'' if file == path else file.relative_to(path)}\0{file.stat().st_size}\0".encode())
            size += file.stat().st_size
            _hash_file(file, digest)
    except OSError:
        return {"bytes": None, "sha256": None}
    return {"bytes": size, "sha256": digest.hexdigest()}


def _hash_file(path: Path, digest: hashlib._Hash) -> None:
    size = path.stat().st_size
    with path.open("rb") as file:
        if size <= _WHOLE_BYTES:
            while block := file.read(2**20):
                digest.update(block)
            return
        for start in (0, (size - _PART_BYTES) // 2, size - _PART_BYTES):
            file.seek(start)
            digest.update(file.read(_PART_BYTES))
