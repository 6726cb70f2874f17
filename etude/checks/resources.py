"""Checks what a run needs of its machine: reachable services, memory, disk.

Invariant: estimates are read from the headers of the model's files, and addresses are only connected to: nothing is loaded,
sent or written, and all checks take milliseconds (the shapes of a model's layers: a second) unless a service does not answer
(`_SECONDS`). The memory estimate is of the largest micro-batch that the options allow; where activations cannot be told, it
says so.
"""

from __future__ import annotations

import json
import math
import os
import shutil
import socket
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit
from urllib.request import getproxies, proxy_bypass

import psutil
import torch

from etude.checks.findings import Finding, Level, Result, check, error, warning
from etude.checks.nodes import runs_code
from etude.checks.setup import Setup
from etude.errors import ConfigError, one_line
from etude.models import torch_dtype
from etude.models.footprint import Footprint, activation_bytes
from etude.models.loading import DTYPES
from etude.options.distillation import is_address
from etude.options.model_path import local_folder, read_config
from etude.rewards.code import URL_VARIABLE
from etude.training.log_probs import GPU_CHUNK
from etude.workers.context import addresses_in

_SECONDS = 2.0  # timeout for connecting to a service
_MAX_HEADER = 100_000_000  # bytes; limit of the safetensors format
_STORED = {"float32": 4, "fp32": 4}
"""Bytes per weight by dtype; 2 for all others."""
_MOMENTS = {"adamw": 8.0, "muon": 4.0, "adamw_8bit": 2.0, "adamw_schedule_free": 8.0}
"""Bytes of optimizer state per weight."""
_INSTRUCTIONS = {"bfloat16": {"avx512_bf16", "amx_bf16", "bf16"}, "float16": {"avx512_fp16", "amx_fp16", "asimdhp"}}
"""CPU features that compute in a dtype, of which one is enough; the last ones are ARM's."""
_CPU_INFO = Path("/proc/cpuinfo")
_RATES = {False: 2e-5, True: 5e-4}
"""At which a pretrained model learnt (docs/gallery.md), by whether with LoRA."""
_TINY_RATE = 3e-4
"""At which the gallery's models below `_SMALLEST` learnt."""
_FAR = 15.0  # factor
_SMALLEST, _LARGEST = 10e6, 1e9  # weights of a model that these rates are for
GIB = 2**30
_USABLE = 0.9  # share of the free memory that a run may plan with
_PROCESS = 0.6 * GIB  # of an interpreter with torch and Transformers, chunks of logits included


# -- services --------------------------------------------------------------------------------------------------------------


def service_addresses(setup: Setup) -> dict[str, tuple[str, str]]:
    """Returns address → (where it is configured, what to do if nothing answers)."""
    rollout, custom = setup.options.rollout, setup.options.custom_reward_function
    talks = rollout.multi_turn
    files = ", ".join([*(talks.tool_config_path or ()), *(talks.function_tool_path or ())])
    found = {}
    for place, address in setup.catalogue.addresses:
        tool, _, field = place.partition(".")
        found[address] = (f"tool {place}", f"{_start(address, place)}, or correct {field} of '{tool}' in {files}")
    keys = dict.fromkeys(rollout.server_urls, "actor_rollout_ref.rollout.server_urls")
    for key, kwargs in (
        ("reward_model.reward_kwargs", setup.options.reward_model.reward_kwargs),
        ("custom_reward_function.reward_kwargs", custom.reward_kwargs),
        ("custom_reward_function.rewards", custom.rewards),
    ):
        keys |= {url: place for place, url in addresses_in(kwargs, key)}
    teachers = setup.options.distillation.teachers.items()
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


@check("loaded", "services")
def unreachable_services(setup: Setup) -> Result:
    """Yields an error for each service that accepts no connection; a warning with Ray, whose workers may run elsewhere."""
    services = service_addresses(setup)
    level = Level.WARNING if setup.options.trainer.backend == "ray" else Level.ERROR
    with ThreadPoolExecutor(32) as pool:
        for (url, (place, fix)), reason in zip(services.items(), pool.map(_refusal, services)):
            if reason:
                yield Finding(level, "", f"{place}: nothing answers at {_public_url(url)}: {reason}", fix)
    yield f"{len(services)} reachable"


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
    except (OSError, ValueError, UnicodeError) as refused:
        return one_line(refused)
    return ""


# -- arithmetic, memory and disk -------------------------------------------------------------------------------------------


@check("loaded", "precision")
def _precision(setup: Setup) -> Result:
    device = setup.placement.device
    yield from slow_dtypes(device, setup.options.model.dtype_on(device), "actor_rollout_ref.model.dtype")


def slow_dtypes(device: str, dtype: str, key: str) -> Iterator[Finding]:
    """Yields a warning if `dtype`, the value of `key`, is one for which this machine's CPU has no instructions."""
    kind = DTYPES[dtype]
    if device != "cpu" or kind not in _INSTRUCTIONS or not (flags := _cpu_flags()) or flags & _INSTRUCTIONS[kind]:
        return
    needed = ", ".join(sorted(_INSTRUCTIONS[kind]))
    line = f"{key}={dtype}: this CPU has no instructions for it ({needed}) and emulates it"
    yield warning(f"{line}, many times slower than float32", f"set {key}=float32", "precision")


def _cpu_flags() -> set[str]:
    """Returns the features of this machine's CPU as Linux lists them; empty elsewhere."""
    try:
        text = _CPU_INFO.read_text()
    except OSError:
        return set()
    return {flag for line in text.splitlines() if line.startswith(("flags", "Features")) for flag in line.split()}


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


@check("loaded", "learning rate")
def learning_rate(setup: Setup) -> Result:
    """Checks that the policy's rate is not far from the one at which a pretrained model of about its size learnt."""
    model, rate = setup.options.model, setup.options.actor.optim.lr
    weights, learnt = count_weights(model.path), _RATES[model.lora_rank > 0]
    wrong = not learnt / _FAR < rate < learnt * _FAR
    if weights <= _SMALLEST:
        learnt, wrong = _TINY_RATE, not _TINY_RATE / 100 < rate < _TINY_RATE * _FAR
    if wrong and 0 < weights < _LARGEST and setup.options.actor.optim.name != "muon":
        effect = "hardly moves" if rate < learnt else "may spoil"
        what = f"a model of {weights / 1e6:,.0f} million weights{' with LoRA' if model.lora_rank else ''}"
        yield warning(f"{rate:g} {effect} {what}", f"set actor_rollout_ref.actor.optim.lr={learnt:g} or close to it")


@check("loaded", "memory")
def memory(setup: Setup) -> Result:
    """Checks whether a rank's weights, gradients, optimizer states and the activations of a full micro-batch fit its memory;
    where they do not, says which key to set to what."""
    if not (weights := count_weights(setup.options.model.path)):
        yield "the model's size is not known here: it is fetched when the run starts"
        return
    options, cluster = setup.options, setup.options.trainer.backend == "ray"
    key, tokens = _micro_batch(setup)
    checkpointing = recomputes(setup)
    parts = estimate_memory(setup, weights, tokens, checkpointing)
    total, free, where = _memory_here(setup)
    needed, listed = sum(parts.values()), ", ".join(f"{name} {size / GIB:.2f}" for name, size in parts.items())
    told = "activations" in parts
    counted = f"micro-batches of up to {tokens:,} tokens" if told else "activations not counted"
    counted += ", with gradient checkpointing" if told and checkpointing else ""
    how_sure = "up to" if told else "at least"
    line = f"{how_sure} {needed / GIB:.2f} GiB of {total / GIB:.1f} GiB {where} ({listed}; {counted})"
    fix = (
        "change actor_rollout_ref.model.path to a smaller model, set actor_rollout_ref.model.lora_rank=16, or spread it: "
        "trainer.backend=ray with actor.strategy=fsdp2"
    )
    fixed = needed - parts.get("activations", 0.0)
    if told and fixed < _USABLE * free:
        fix = _smaller_micro_batches(setup, key, tokens, checkpointing, _USABLE * free - fixed)
    elif max(parts, key=lambda part: parts[part]) == "KV cache":
        fix = f"lower actor_rollout_ref.rollout.kv_cache_memory_mb={options.rollout.kv_cache_memory_mb}"
    if fixed > total and not cluster:
        yield error(line, fix)
    elif needed > _USABLE * free:
        yield warning(f"{line}; {free / GIB:.1f} GiB are free", fix)
    else:
        yield line


def recomputes(setup: Setup) -> bool:
    """Whether the run uses gradient checkpointing: as its placement or its options say, else where the largest micro-batch
    would not fit the free memory without it. Of a cluster's machines this one stands for all."""
    given = (setup.placement.recomputes, setup.options.model.checkpointing)
    if (decided := next((each for each in given if each is not None), None)) is not None:
        return decided
    if not (weights := count_weights(setup.options.model.path)):
        return False
    parts = estimate_memory(setup, weights, _micro_batch(setup)[1], False)
    return "activations" in parts and sum(parts.values()) > _USABLE * _memory_here(setup)[1]


def estimate_memory(setup: Setup, weights: int, tokens: int, checkpointing: bool) -> dict[str, float]:
    """Returns the most bytes that a rank needs, by what for, to update with micro-batches of this many tokens; on a GPU of
    its memory, not the host's. Without `activations` where these cannot be told."""
    options, device = setup.options, setup.placement.device
    ranks = setup.options.trainer.ranks if options.actor.strategy != "ddp" else 1
    computed = _STORED.get(options.model.dtype_on(device), 2)
    offload = options.actor.optim.offload or (ranks > 1 and options.actor.fsdp_config.param_offload)
    if options.model.lora_rank:
        per_weight = {"frozen weights": 0.6 if options.model.quantization else computed, "adapters": 0.2}
    elif offload and device != "cpu":
        per_weight = {} if ranks > 1 else {"computing": computed}
    else:
        per_weight = {"weights": 4.0, "gradients": 4.0, "optimizer": _MOMENTS.get(options.actor.optim.name, 8.0)}
        if computed < 4 and ranks == 1:
            per_weight["computing"] = computed
        if options.needs_ref:
            per_weight["reference"] = computed
        if options.has_critic:
            per_weight["critic"] = 8.0 + _MOMENTS.get(options.critic.optim.name, 8.0)
        if options.trainer.max_staleness:
            per_weight["engine"] = computed
    parts = {name: size * weights / ranks for name, size in per_weight.items()}
    if ranks > 1:
        parts["gathered"] = _gathered_bytes(setup, weights, computed)
    if cache := options.rollout.kv_cache_memory_mb:
        parts["KV cache"] = cache * 2**20
    if (found := _footprint(setup, checkpointing)) is None:
        return parts
    parts["activations"] = (found.kept + found.working) * tokens
    parts["working"] = _working_bytes(setup, tokens, computed, found.working * tokens)
    if "gradients" in parts and tokens >= _mini_batch(setup):  # of a single micro-batch they come as activations go
        parts["gradients"] = max(0.0, parts["gradients"] - parts["activations"])
    return parts


def _micro_batch(setup: Setup) -> tuple[str, int]:
    """Returns the key that sets the size of micro-batches, and the most tokens that one can have: a full one, or a single
    longer row, or the whole mini-batch, whose answers share their prompts."""
    options, key = setup.options, "actor_rollout_ref.actor.ppo_max_token_len_per_gpu"
    budget = options.actor.ppo_max_token_len_per_gpu
    if options.has_critic and options.critic.ppo_max_token_len_per_gpu > budget:
        key, budget = "critic.ppo_max_token_len_per_gpu", options.critic.ppo_max_token_len_per_gpu
    return key, min(max(budget, _longest_row(setup)), _mini_batch(setup))


def _mini_batch(setup: Setup) -> int:
    """The most tokens of a mini-batch, all ranks' together."""
    options, rollout = setup.options, setup.options.rollout
    prompts = max(options.actor.ppo_mini_batch_size, options.has_critic and options.critic.ppo_mini_batch_size)
    group = rollout.prompt_length + rollout.n * rollout.response_length
    return min(prompts, options.data.train_batch_size) * group


def _longest_row(setup: Setup) -> int:
    """The most tokens of a row that one rank computes."""
    row = setup.options.rollout.prompt_length + setup.options.rollout.response_length
    team = setup.options.actor.ulysses_sequence_parallel_size if setup.options.trainer.ranks > 1 else 1
    return -(-min(row, setup.options.longest_sequence or row) // team)


def _footprint(setup: Setup, checkpointing: bool) -> Footprint | None:
    """Of the policy on the run's device."""
    model, device = setup.options.model, setup.placement.device
    dtype, on_gpu = torch_dtype(model.dtype_on(device)), device != "cpu"
    found = activation_bytes(model, dtype, checkpointing=checkpointing, on_gpu=on_gpu)
    if found and on_gpu and model.enable_activation_offload:
        return replace(found, kept=found.kept - found.layers)
    return found


def _model_config(setup: Setup) -> dict[str, Any]:
    folder = local_folder(str(setup.options.model.path))
    config = read_config(folder) if folder else {}
    return {"vocab_size": 0, "hidden_size": 0, "num_hidden_layers": 1} | config | (config.get("text_config") or {})


def _gathered_bytes(setup: Setup, weights: int, computed: float) -> float:
    """Bytes of what FSDP gathers: embedding and head, two layers, and the gradients of one, once more in float32."""
    config = _model_config(setup)
    ends = config["vocab_size"] * config["hidden_size"] * (1 if config.get("tie_word_embeddings") else 2)
    layer = max(0, weights - ends) / config["num_hidden_layers"]
    gradients = 0 if setup.options.model.lora_rank else computed + 4
    return computed * (ends + 2 * layer) + gradients * layer


def _working_bytes(setup: Setup, tokens: int, computed: float, layer: float) -> float:
    """Bytes beside activations: the process itself, chunks of logits (on a GPU four of 512 MiB in the head's backward pass,
    where there is no `layer` yet), and the gradient of the head, which exists once more before it is added to that of the
    embedding."""
    config, model = _model_config(setup), setup.options.model
    head = 0 if model.lora_rank else config["vocab_size"] * config["hidden_size"]
    if setup.placement.device == "cpu":
        return _PROCESS + 4 * head
    rounded = computed if computed < 4 else 0.0
    return max(0.0, 16 * min(GPU_CHUNK, tokens * config["vocab_size"]) - layer) + (4 + rounded) * head


def _smaller_micro_batches(setup: Setup, key: str, tokens: int, checkpointing: bool, room: float) -> str:
    """Returns the advice for activations that do not fit `room` (bytes)."""
    row, advice = _longest_row(setup), []
    for switched in sorted({checkpointing, True}):
        found = _footprint(setup, switched)
        fits = min(tokens, int(room / (found.kept + found.working))) if found else 0
        if fits < row:
            continue
        switch = "actor_rollout_ref.model.enable_gradient_checkpointing=true"
        settings = [switch] if switched and not checkpointing else []
        if fits < tokens:
            settings.append(f"{key}={max(row, fits // 256 * 256)}")
        advice.append(" and ".join(settings))
    if advice:
        return f"set {', or '.join(advice)}"
    return (
        f"a single row of {row:,} tokens does not fit: lower data.max_response_length or data.max_prompt_length, or set "
        "actor_rollout_ref.model.lora_rank=16"
    )


def _memory_here(setup: Setup) -> tuple[float, float, str]:
    """Returns (total bytes, free bytes, where) for one rank."""
    if setup.placement.device.startswith("cuda") and torch.cuda.is_available():
        free, total = torch.cuda.mem_get_info()
        return total, free, "of the GPU"
    trainer = setup.options.trainer
    processes = trainer.n_gpus_per_node if trainer.backend == "ray" else 1
    machine = psutil.virtual_memory()
    return machine.total / processes, machine.available / processes, "of memory"


@check("loaded", "disk")
def disk(setup: Setup) -> Result:
    """Checks whether the kept checkpoints fit the disk: weights in the model's dtype, and the float32 training state."""
    if not (weights := count_weights(setup.options.model.path)):
        return
    trainer, options = setup.options.trainer, setup.options
    state = 0.2 if options.model.lora_rank else 4 + _MOMENTS.get(options.actor.optim.name, 8.0)
    size = weights * (_STORED.get(options.model.dtype_on(setup.placement.device), 2) + state)
    kept = trainer.max_actor_ckpt_to_keep or 1
    folder = Path(trainer.default_local_dir).expanduser().absolute()
    there = next(place for place in (folder, *folder.parents) if place.exists())
    space = shutil.disk_usage(there)
    if not (space.total and os.access(there, os.W_OK | os.X_OK)):
        yield error(f"trainer.default_local_dir={folder}: {there} cannot be written", "set trainer.default_local_dir")
        return
    free = space.free
    line = f"a checkpoint takes about {size / GIB:.2f} GiB; {free / GIB:.1f} GiB are free at {there}"
    fix = "free space there, set trainer.default_local_dir to another disk, or lower trainer.max_actor_ckpt_to_keep"
    if 2 * size > free:  # a new checkpoint is complete before an old one is removed
        yield error(
            f"{line}, and {2 * size / GIB:.2f} are needed: a new one is complete before the last is removed", fix
        )
    elif kept > 0 and (kept + 1) * size > free:
        yield warning(f"{line}, and {kept} are kept", fix)
    else:
        yield line
