"""Checks what a run needs of its machine: reachable services, memory, disk.

Invariant: estimates are read from the headers of the model's files, and addresses are only connected to: nothing is loaded,
sent or written, and all checks take milliseconds unless a service does not answer (`_SECONDS`). The memory estimate is a
lower bound: it excludes activations.
"""

from __future__ import annotations

import json
import math
import os
import shutil
import socket
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from urllib.parse import urlsplit
from urllib.request import getproxies, proxy_bypass

import psutil
import torch

from etude.config.nodes import runs_code
from etude.errors import ConfigError, one_line
from etude.findings import Finding, Level
from etude.model_folder import local_folder
from etude.options.distillation import is_address
from etude.rewards.code import URL_VARIABLE
from etude.trainer.setup import LoadedSetup
from etude.workers.context import addresses_in

_SECONDS = 2.0  # timeout for connecting to a service
_MAX_HEADER = 100_000_000  # bytes; limit of the safetensors format
_STORED = {"float32": 4, "fp32": 4}
"""Bytes per weight by dtype; 2 for all others."""
_MOMENTS = {"adamw": 8.0, "muon": 4.0, "adamw_8bit": 2.0, "adamw_schedule_free": 8.0}
"""Bytes of optimizer state per weight."""
GIB = 2**30


def find_shortages(setup: LoadedSetup) -> Iterator[Finding]:
    """Yields warnings and errors: unreachable services, too little memory or disk."""
    yield from unreachable_services(setup)
    weights = count_weights(setup.roles.model.path)
    if weights:
        yield from (found for found in (memory(setup, weights), disk(setup, weights)) if found.level is not Level.OK)


# -- services --------------------------------------------------------------------------------------------------------------


def service_addresses(setup: LoadedSetup) -> dict[str, tuple[str, str]]:
    """Returns address → (where it is configured, what to do if nothing answers)."""
    rollout, custom = setup.roles.rollout, setup.roles.custom_reward
    talks = rollout.multi_turn
    files = ", ".join([*(talks.tool_config_path or ()), *(talks.function_tool_path or ())])
    found = {}
    for place, address in setup.catalogue.addresses:
        tool, _, field = place.partition(".")
        found[address] = (f"tool {place}", f"{_start(address, place)}, or correct {field} of '{tool}' in {files}")
    keys = dict.fromkeys(rollout.server_urls, "actor_rollout_ref.rollout.server_urls")
    for key, kwargs in (
        ("reward_model.reward_kwargs", setup.roles.reward.reward_kwargs),
        ("custom_reward_function.reward_kwargs", custom.reward_kwargs),
        ("custom_reward_function.rewards", custom.rewards),
    ):
        keys |= {url: place for place, url in addresses_in(kwargs, key)}
    teachers = setup.roles.distillation.teachers.items()
    keys |= {url: f"distillation.teachers.{name}" for name, url in teachers if is_address(url)}
    found |= {url: (key, f"{_start(url, key)}, or correct {key}") for url, key in keys.items()}
    if runs_code(talks, custom.path) and (url := os.environ.get(URL_VARIABLE)):
        found[url] = (URL_VARIABLE, f"{_start(url, 'sandbox')}, or unset {URL_VARIABLE} to use this machine's sandbox")
    return found


def _start(url: str, place: str) -> str:
    """Returns advice on how to start the service at `url`, which is configured at `place`."""
    if "sandbox" in place:
        return "run `etude sandbox serve`"
    if "retriev" in place or "retrieve" in url:
        return "run `etude retrieve serve`"
    kinds = {"server_urls": "inference", "teachers": "teacher's", "reward": "judge's"}
    return f"start the {next((kind for word, kind in kinds.items() if word in place), 'tool')} server at {_public_url(url)}"


def unreachable_services(setup: LoadedSetup) -> Iterator[Finding]:
    """Yields an error for each service that accepts no connection; a warning with Ray, whose workers may run elsewhere."""
    services = service_addresses(setup)
    if not services:
        return
    level = Level.WARNING if setup.trainer.backend == "ray" else Level.ERROR
    with ThreadPoolExecutor(min(len(services), 32)) as pool:
        for (url, (place, fix)), reason in zip(services.items(), pool.map(_refusal, services)):
            if reason:
                yield Finding(level, "services", f"{place}: nothing answers at {_public_url(url)}: {reason}", fix)


def _public_url(url: str) -> str:
    """Returns the URL without credentials and query."""
    parts = urlsplit(url if "//" in url else f"//{url}")
    return f"{parts.scheme or 'http'}://{parts.netloc.rpartition('@')[2]}{parts.path}"


def _refusal(url: str) -> str:
    """Returns why no connection to `url` can be made; empty if one can, or if it would go through a proxy."""
    parts = urlsplit(url if "//" in url else f"http://{url}")
    try:
        host, port = parts.hostname, parts.port or (443 if parts.scheme == "https" else 80)
        if not host:
            return "it names no host"
        if parts.scheme in getproxies() and not proxy_bypass(host):
            return ""
        socket.create_connection((host, port), timeout=_SECONDS).close()
    except (OSError, ValueError, UnicodeError) as error:
        return one_line(error)
    return ""


# -- memory and disk -------------------------------------------------------------------------------------------------------


def count_weights(model: str | None) -> int:
    """Number of weights in a model's folder, from the headers of its safetensors files; 0 if unknown."""
    try:
        folder = local_folder(model) if model else None
    except ConfigError:
        return 0
    return sum(_header_weights(file) for file in sorted(folder.glob("*.safetensors"))) if folder else 0


def _header_weights(file: Path) -> int:
    """Counts a safetensors file's weights. The format: eight bytes with the header's length, then the header, JSON: tensor →
    {dtype, shape, data_offsets}."""
    try:
        with file.open("rb") as stream:
            length = int.from_bytes(stream.read(8), "little")
            header = json.loads(stream.read(length)) if length <= _MAX_HEADER else {}
        return sum(math.prod(each["shape"]) for name, each in header.items() if name != "__metadata__")
    except (OSError, ValueError, KeyError, TypeError):
        return 0


def memory(setup: LoadedSetup, weights: int) -> Finding:
    """Checks whether a rank's weights, gradients and optimizer states fit its memory."""
    cluster = setup.trainer.backend == "ray"
    here = setup.trainer.n_gpus_per_node if cluster else 1  # ranks on this machine
    ranks = (
        here * setup.trainer.nnodes if cluster and setup.roles.actor.strategy != "ddp" else 1
    )  # ranks over which the model is sharded
    parts = {name: size * weights / ranks for name, size in _bytes_per_weight(setup).items()}
    if cache := setup.roles.rollout.kv_cache_memory_mb:
        parts["KV cache"] = cache * 2**20
    needed, (total, free, where) = sum(parts.values()), _memory_here(setup.roles.device, here)
    listed = ", ".join(f"{name} {size / GIB:.2f}" for name, size in parts.items())
    line = f"at least {needed / GIB:.2f} GiB of {total / GIB:.1f} GiB {where} ({listed}; activations not counted)"
    fix = (
        "change actor_rollout_ref.model.path to a smaller model, set actor_rollout_ref.model.lora_rank=16, or spread it: "
        "trainer.backend=ray with actor.strategy=fsdp2"
    )
    if max(parts, key=lambda part: parts[part]) == "KV cache":
        fix = f"lower actor_rollout_ref.rollout.kv_cache_memory_mb={cache}"
    if needed > total and not cluster:
        return Finding(Level.ERROR, "memory", line, fix)
    if needed > 0.9 * free:
        return Finding(Level.WARNING, "memory", f"{line}; {free / GIB:.1f} GiB are free", fix)
    return Finding(Level.OK, "memory", line)


def _bytes_per_weight(setup: LoadedSetup) -> dict[str, float]:
    roles = setup.roles
    computed = _STORED.get(roles.model.dtype, 2)
    if roles.model.lora_rank:
        return {"frozen weights": 0.6 if roles.model.quantization else computed, "adapters": 0.2}
    moments = _MOMENTS.get(roles.actor.optim.name, 8.0)
    parts = {"weights": 4.0, "gradients": 4.0, "optimizer": moments}
    if computed < 4:
        parts["computing"] = computed
    if roles.needs_ref:
        parts["reference"] = computed
    if "values" in setup.needs and not roles.value_head:
        parts["critic"] = 8.0 + _MOMENTS.get(roles.critic.optim.name, 8.0)
    if roles.streams:
        parts["engine"] = computed
    return parts


def _memory_here(device: str, processes: int) -> tuple[float, float, str]:
    """Returns (total bytes, free bytes, where) for one rank."""
    if device.startswith("cuda") and torch.cuda.is_available():
        free, total = torch.cuda.mem_get_info()
        return total, free, "of the GPU"
    machine = psutil.virtual_memory()
    return machine.total / processes, machine.available / processes, "of memory"


def disk(setup: LoadedSetup, weights: int) -> Finding:
    """Checks whether the kept checkpoints fit the disk: weights in the model's dtype, and the float32 training state."""
    trainer, roles = setup.trainer, setup.roles
    state = 0.2 if roles.model.lora_rank else 4 + _MOMENTS.get(roles.actor.optim.name, 8.0)
    size = weights * (_STORED.get(roles.model.dtype, 2) + state)
    kept = trainer.max_actor_ckpt_to_keep or 1
    folder = Path(trainer.default_local_dir).expanduser().absolute()
    there = next(place for place in (folder, *folder.parents) if place.exists())
    free = shutil.disk_usage(there).free
    line = f"a checkpoint takes about {size / GIB:.2f} GiB; {free / GIB:.1f} GiB are free at {there}"
    fix = "free space there, set trainer.default_local_dir to another disk, or lower trainer.max_actor_ckpt_to_keep"
    if 2 * size > free:  # a new checkpoint is complete before an old one is removed
        return Finding(Level.ERROR, "disk", line, fix)
    if kept > 0 and (kept + 1) * size > free:
        return Finding(Level.WARNING, "disk", f"{line}, and {kept} are kept", fix)
    return Finding(Level.OK, "disk", line)
