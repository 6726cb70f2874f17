"""Checks a cluster's nodes before workers start there: package versions, the files that the configuration names, the
checkpoint folder, the sandbox.

Invariant: all mismatches on all nodes are reported together, one line each that names the node, before a model is loaded.
The files of `data`, which only the driver reads, are not checked on the nodes.
"""

from __future__ import annotations

import asyncio
import os
import platform
import socket
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from etude.checks.settings import Faults
from etude.checks.start import missing_paths
from etude.errors import ConfigError, ConfigErrors, InfrastructureError, one_line
from etude.options import MultiTurnOptions, Options, TrainOptions
from etude.registry import share_folder

_PACKAGES = ("etude", "torch", "transformers", "ray")
_SECONDS = 300.0  # timeout per check; a node's first task installs the runtime environment


def check_nodes(options: Options, node_ids: Sequence[str], gpus: bool) -> None:
    """Checks each of the given nodes of the connected cluster.

    Raises:
        ConfigErrors: something is missing, or differs from this process.
        InfrastructureError: a node does not answer.
    """
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    run_dir = Path(options.trainer.default_local_dir)
    run_dir.mkdir(parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile(prefix=".nodes-", dir=run_dir) as marker:
        shared = str(run_dir / Path(marker.name).name)
        here = (os.getcwd(), [os.path.abspath(folder) for folder in sys.path], versions(), shared)
        task = ray.remote(num_cpus=0, max_retries=0)(node_problems)
        tasks = [
            task.options(scheduling_strategy=NodeAffinitySchedulingStrategy(node, soft=False)).remote(
                options, *here, gpus
            )
            for node in node_ids
        ]
        try:
            answers = ray.get(tasks, timeout=_SECONDS)
        except ray.exceptions.RayError as error:
            raise InfrastructureError(f"a node of the cluster cannot be checked: {one_line(error)}") from error
    if faults := {str(each): each for faults in answers for each in faults}:
        raise ConfigErrors(list(faults.values()))


def versions() -> dict[str, str]:
    """Versions of Python and of the packages that driver and workers need; empty for a package that is not installed."""
    installed = {"python": ".".join(platform.python_version_tuple()[:2])}
    for package in _PACKAGES:
        installed[package] = ""
        with suppress(PackageNotFoundError):
            installed[package] = version(package)
    return installed


def node_problems(
    options: Options, folder: str, path: Sequence[str], wanted: Mapping[str, str], shared: str, gpus: bool
) -> list[ConfigError]:
    """Returns what a worker would lack on this node. `wanted` are the driver's versions, `shared` is a file in the run's
    folder."""
    share_folder(folder, path)
    return [each.at(f"node {socket.gethostname()}") for each in _faults_here(options, wanted, shared, gpus)]


def _faults_here(options: Options, wanted: Mapping[str, str], shared: str, gpus: bool) -> Faults:
    mine = versions()
    for package, there in wanted.items():
        if mine[package] != there:
            line = f"{package} is {mine[package] or 'not installed'}, and {there or 'not installed'} on the driver's"
            yield ConfigError(line)
    if gpus and mine["torch"].endswith("+cpu"):
        yield ConfigError(f"torch {mine['torch']} is built without CUDA")
    if not os.path.exists(shared):
        place = f"trainer.default_local_dir={options.trainer.default_local_dir}"
        yield ConfigError(f"{place} is not the driver's folder: checkpoints need one that all nodes share")
    yield from (each.at(each.key) for each in missing_paths(options) if not each.key.startswith("data."))
    if isinstance(options, TrainOptions) and not os.environ.get("ETUDE_SANDBOX_URL"):
        talks, scorer = options.actor_rollout_ref.rollout.multi_turn, options.custom_reward_function.path
        yield from sandbox_problems() if runs_code(talks, scorer) else ()


def runs_code(talks: MultiTurnOptions, scorer: str | None) -> bool:
    """Whether tool files, or the custom reward function at `scorer`, mention the sandbox."""
    texts = [scorer or ""]
    for file in (*(talks.tool_config_path or ()), *(talks.function_tool_path or ())):
        with suppress(OSError, UnicodeError):
            texts.append(Path(file).expanduser().read_text(encoding="utf-8"))
    return any(word in text for text in texts for word in ("sandbox", "code_interpreter", "etude.rewards.code"))


def sandbox_problems() -> Iterator[ConfigError]:
    """Yields why model-written code cannot be sandboxed on this machine; nothing if it can."""
    from etude.sandbox import Executor, SandboxUnavailableError

    async def open_one() -> None:
        async with await Executor.open(workers=1):
            pass

    try:
        asyncio.run(open_one())
    except SandboxUnavailableError as error:
        yield ConfigError(one_line(error))
