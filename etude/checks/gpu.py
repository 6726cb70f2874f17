"""`etude doctor --gpu`: in two minutes, whether training on this GPU is right, and how fast it is.

Invariant: every check runs the parts that a run uses, on a model made here from random weights, and compares with the CPU in
float32 or with itself. It runs on any device, which the tests use; sizes are those of the device.
"""

from __future__ import annotations

import asyncio
import sys
import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import Tensor

from etude.checks.findings import Findings, Result, check, error, warning
from etude.checks.ranks import learn_on_ranks
from etude.errors import ConfigError, EtudeError
from etude.inference import NativeEngine, WeightMismatch
from etude.metrics import add_metrics, finish_metrics
from etude.models import TinyModelSpec, build_tiny_model, build_tiny_tokenizer, load_causal_lm, save_pretrained
from etude.models.attention import Scoring
from etude.models.named_weights import weight_checksums
from etude.models.packable import use_packing
from etude.models.packed import CausalSequences, takes_flash
from etude.options import ModelOptions, OptimOptions, TrainOptions
from etude.protocol import DataProto
from etude.training import count_scored, token_log_probs
from etude.training.packing import pack
from etude.workers import TrainWorker
from etude.workers.engine_link import EngineLink, build_engine
from etude.workers.role import Placement

GIB = 2**30
_UPDATES = 10
_TEXTS = ["What is 2 + 3? The answer is 5. A sentence of some length, and another one about capitals of countries."] * 4
_BOUNDS = {torch.float32: (1e-3, 1e-3), torch.bfloat16: (0.2, 0.1)}
"""Largest difference of a log-prob in nats, and of all gradients relative to their norm, from the CPU's in float32."""
_SGLANG = (sys.executable, "-m", "sglang.launch_server", "--model-path={model}", "--host=127.0.0.1", "--port={port}")
_REPORT = "report it, with the output of `etude doctor --gpu --json`"


@dataclass(frozen=True)
class Sizes:
    """Of the model and the batch."""

    spec: TinyModelSpec
    product: int  # rows of the matrices that are multiplied
    groups: int
    rollouts: int
    prompt: int
    response: int

    @property
    def rows(self) -> int:
        return self.groups * self.rollouts


LARGE = Sizes(TinyModelSpec(1024, 12, 16, 4, 4096, 512, 4096), 8192, 4, 8, 512, 512)
SMALL = Sizes(TinyModelSpec(32, 2, 4, 2, 64, 300, 256), 64, 2, 2, 16, 16)


class Trial:
    """What the checks share: the device, and a model's folder."""

    def __init__(self, device: str, folder: Path, sizes: Sizes, ranks: int = 1) -> None:
        self.device, self.folder, self.sizes, self.ranks = torch.device(device), folder, sizes, ranks
        self.flops = 0.0  # measured peak
        torch.manual_seed(0)
        tokenizer = build_tiny_tokenizer(_TEXTS, sizes.spec.vocab_size)
        for name, spec in {"model": sizes.spec, "mixture": replace(sizes.spec, architecture="qwen3_moe")}.items():
            save_pretrained(build_tiny_model(spec, tokenizer), tokenizer, folder / name)
        self.vocabulary = len(tokenizer)

    @property
    def path(self) -> str:
        return str(self.folder / "model")

    def options(self, model: str = "model", **rollout: Any) -> TrainOptions:
        """Options of a deterministic run whose micro-batches are half of the batch; `model`: this one or `mixture`;
        `rollout`: keys of its section."""
        base, sizes = TrainOptions(), self.sizes
        policy, tokens = base.actor_rollout_ref, sizes.prompt + sizes.response
        actor = replace(
            policy.actor,
            ppo_mini_batch_size=sizes.groups,
            ppo_max_token_len_per_gpu=tokens * sizes.rows // 2,
            optim=OptimOptions(lr=1e-3),
        )
        own = replace(policy.rollout, prompt_length=sizes.prompt, response_length=sizes.response, **rollout)
        policy = replace(policy, model=ModelOptions(path=str(self.folder / model)), actor=actor, rollout=own)
        return replace(base, actor_rollout_ref=policy, trainer=replace(base.trainer, deterministic=True))

    def worker(self, model: str = "model", **rollout: Any) -> TrainWorker:
        """A worker with its model on the device."""
        worker = TrainWorker(self.options(model, **rollout), Placement(device=str(self.device)), rank=0, world_size=1)
        worker.init_model()
        return worker

    @cached_property
    def batch(self) -> DataProto:
        """Groups of rows that share a prompt."""
        sizes, generator = self.sizes, torch.Generator().manual_seed(1)
        prompts = torch.randint(5, self.vocabulary, (sizes.groups, sizes.prompt), generator=generator)
        answers = torch.randint(5, self.vocabulary, (sizes.rows, sizes.response), generator=generator)
        ids = torch.cat([prompts.repeat_interleave(sizes.rollouts, 0), answers], 1)
        mask = torch.ones_like(answers)
        advantages = torch.randn(sizes.rows, 1, generator=generator) * mask
        columns = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "response_mask": mask}
        columns |= {"advantages": advantages, "rollout_log_probs": torch.full(answers.shape, -6.0)}
        batch = DataProto.from_single_dict(columns)
        batch.meta_info |= {"temperature": 1.0, "global_step": 0, **count_scored(batch)}
        return batch

    def wait(self) -> None:
        """Waits until the device has computed everything."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def seconds(self, work: Any) -> float:
        """How long `work()` takes on the device."""
        self.wait()
        began = time.perf_counter()
        work()
        self.wait()
        return time.perf_counter() - began


def inspect_gpu(device: str = "cuda", sizes: Sizes | None = None, ranks: int = 1) -> Findings:
    """Runs every check on `device`, and with several `ranks` one on as many; `sizes`: None for those of the device."""
    sizes = sizes or (SMALL if torch.device(device).type == "cpu" else LARGE)
    with TemporaryDirectory(prefix="etude-gpu-") as folder, _global_state():
        return Findings().run_stage("gpu", Trial(device, Path(folder), sizes, ranks), fix=_REPORT)


@contextmanager
def _global_state() -> Iterator[None]:
    """Restores what a deterministic run sets in its process."""
    algorithms, cudnn = torch.are_deterministic_algorithms_enabled(), torch.backends.cuda.cudnn_sdp_enabled()
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(algorithms)
        torch.backends.cuda.enable_cudnn_sdp(cudnn)


@check("gpu", "device")
def _device(trial: Trial) -> Result:
    """Name, free memory, and the peak of a bfloat16 product, which figures of speed are compared with."""
    size, device = trial.sizes.product, trial.device
    left, right = (torch.randn(size, size).to(torch.bfloat16).to(device) for _ in range(2))
    left @ right
    seconds = min(trial.seconds(lambda: [left @ right for _ in range(8)]) / 8 for _ in range(3))
    trial.flops = 2 * size**3 / seconds
    line = f"{trial.flops / 1e12:.3g} TFLOP/s in bfloat16, torch {torch.__version__}"
    if device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
        line = f"{torch.cuda.get_device_name(device)}, {free / GIB:.1f} of {total / GIB:.1f} GiB free, {line}"
    yield line


@check("gpu", "attention")
def _attention(trial: Trial) -> Result:
    """Which kernel computes the attention of rows that share a prompt: the slowest one is an error."""
    sizes, layout = trial.sizes, CausalSequences([trial.sizes.prompt, trial.sizes.response], [(), (0,)])
    heads, kv_heads, width = sizes.spec.num_heads, sizes.spec.num_kv_heads, 64
    query, key, value = (
        torch.randn(count, sum(layout.lengths), width).to(torch.bfloat16).to(trial.device).requires_grad_()
        for count in (heads, kv_heads, kv_heads)
    )
    with torch.profiler.profile(acc_events=True) as profile:
        out = layout.attend(0, query, key, value, Scoring(width**-0.5))
        out.float().sum().backward()
    called = {event.key for event in profile.key_averages()}
    if slow := sorted(name for name in called if "attention_math" in name):
        yield error(
            f"attention runs as {slow[0]}, PyTorch's slowest kernel", "install the torch that pytorch.org names"
        )
    flash = sorted(name for name in called if "flash_attention" in name or "varlen" in name)
    if trial.device.type == "cuda" and not flash:
        if takes_flash(query, Scoring(1.0)):
            yield error("attention does not run as flash attention, though it could", _REPORT)
        else:
            yield warning("this GPU has no flash attention (compute capability below 8.0)", "use one that has it")
    yield f"by {min(flash, key=len) if flash else 'blocks of queries'}"


@check("gpu", "numbers")
def _numbers(trial: Trial) -> Result:
    """Log-probs and gradients against the CPU in float32."""
    batch = trial.batch.select_idxs(list(range(trial.sizes.rollouts)))
    expected, slopes = _differentiate(trial.path, batch, torch.device("cpu"), torch.float32)
    said = []
    for dtype, (nats, share) in _BOUNDS.items():
        found, own = _differentiate(trial.path, batch, trial.device, dtype)
        largest = float((found - expected).abs().max())
        away = float((own - slopes).norm() / slopes.norm())
        kind = str(dtype).removeprefix("torch.")
        said.append(f"{kind}: log-probs within {largest:.2g} nats of the CPU's float32, gradients within {away:.2g}")
        if not (largest <= nats and away <= share):
            yield error(f"{said[-1]}; {nats:g} and {share:g} are expected", _REPORT)
    yield "; ".join(said)


def _differentiate(path: str, batch: DataProto, device: torch.device, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """(log-probs of the scored tokens, all gradients of their sum) in float32 on the CPU."""
    model: Any = load_causal_lm(path, dtype=str(dtype).removeprefix("torch."), device=device)
    use_packing(model)
    packed = pack(batch, range(len(batch)), device)
    log_probs, _ = token_log_probs(packed.hidden(model), model.get_output_embeddings().weight, packed.labels)
    log_probs.mean().backward()
    gradients = [p.grad.detach().cpu().float().flatten() for p in model.parameters() if p.grad is not None]
    return log_probs.detach().cpu().float(), torch.cat(gradients)


@check("gpu", "training")
def _training(trial: Trial) -> Result:
    """Ten updates, twice: speed, waits of the host, and the same bits."""
    sums, seconds, waits = [], 0.0, 0
    for _ in range(2):
        worker = trial.worker()
        worker.update_actor(trial.batch)
        with count_waits(trial) as counted:
            seconds = trial.seconds(lambda worker=worker: [worker.update_actor(trial.batch) for _ in range(_UPDATES)])
        waits = len(counted)
        sums.append(weight_checksums(worker.model))
    weights = sum(parameter.numel() for parameter in worker.model.parameters())
    tokens = trial.sizes.groups * trial.sizes.prompt + trial.sizes.rows * trial.sizes.response
    speed = _UPDATES * tokens / seconds
    share = f", {100 * 6 * weights * speed / trial.flops:.0f} % of the peak" if trial.flops else ""
    counted_line = f", {waits / _UPDATES:.0f} waits of the host an update" if trial.device.type == "cuda" else ""
    if sums[0] != sums[1]:
        different = next(name for name in sums[0] if sums[0][name] != sums[1][name])
        yield error(f"two runs with trainer.deterministic=true differ, the first time in {different}", _REPORT)
    yield f"{speed:,.0f} tokens/s{share}{counted_line}; two runs have the same bits"


@contextmanager
def count_waits(trial: Trial) -> Iterator[list[Any]]:
    """Collects a warning for each wait of the host for a GPU."""
    if trial.device.type != "cuda":
        yield []
        return
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        try:
            yield found
        finally:
            torch.cuda.set_sync_debug_mode("default")


@check("gpu", "engine")
def _engine(trial: Trial) -> Result:
    """The native engine's speed."""
    worker = trial.worker()
    engine = NativeEngine(worker.model)
    prompts = trial.batch.batch["input_ids"][:, : trial.sizes.prompt].tolist()

    async def sample() -> int:
        names = [f"row/{number}" for number in range(len(prompts))]
        engine.open(names)
        params = {"max_tokens": trial.sizes.response, "temperature": 1.0, "seed": 1}
        outputs = await asyncio.gather(*(engine.generate(*each, params) for each in zip(names, prompts)))
        for name in names:
            engine.close(name)
        return sum(len(output.token_ids) for output in outputs)

    made: list[int] = []
    seconds = trial.seconds(lambda: made.append(asyncio.run(sample())))
    yield f"{sum(made) / seconds:,.0f} tokens/s for {len(prompts)} rows"


@check("gpu", "checkpoint")
def _checkpoint(trial: Trial) -> Result:
    """A checkpoint written and read again continues with the same bits."""
    first, second = trial.worker(), trial.worker()
    first.update_actor(trial.batch)
    first.copy_state()
    first.save_checkpoint(str(trial.folder / "step"))
    second.load_checkpoint(str(trial.folder / "step"))
    for worker in (first, second):
        worker.update_actor(trial.batch)
    if weight_checksums(first.model) != weight_checksums(second.model):
        yield error("a resumed run does not continue with the same bits", _REPORT)
    yield "a resumed run continues with the same bits"


@check("gpu", "communication")
def _communication(trial: Trial) -> Result:
    """A process group of this process alone."""
    import torch.distributed as dist

    backend = "nccl" if trial.device.type == "cuda" else "gloo"
    if dist.is_initialized():
        yield f"{backend}: not tried, this process is in a group already"
        return
    gpu = torch.device("cuda", trial.device.index or 0) if backend == "nccl" else None
    dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1, device_id=gpu)
    try:
        values = torch.arange(4.0, device=gpu or "cpu")
        dist.all_reduce(values)
        right = values.tolist() == [0.0, 1.0, 2.0, 3.0]
    finally:
        dist.destroy_process_group()
    if not right:
        yield error(f"{backend} adds up wrongly", "set NCCL_DEBUG=INFO and look at what it logs")
    yield f"{backend} of one rank adds up"


@check("gpu", "ranks")
def _ranks(trial: Trial) -> Result:
    """Several ranks, each with the whole model or with a shard, learn what one process does."""
    ranks, rows = trial.ranks, trial.sizes.rows
    if ranks == 1:
        yield "one: --gpus N tries several"
        return
    if rows % ranks or (trial.device.type == "cuda" and torch.cuda.device_count() < ranks):
        raise ConfigError(f"--gpus={ranks}: it divides {rows}, and so many GPUs are there", key="gpus")
    own = finish_metrics(trial.worker().update_actor(trial.batch))
    said, bound = [], 0.02 if trial.device.type == "cuda" else 1e-4
    found = learn_on_ranks(trial.options(), trial.device.type, trial.batch, ranks, _UPDATES, trial.folder)
    for strategy, (together, seconds) in found.items():
        away = max(abs(together[name] / own[name] - 1) for name in ("actor/loss", "actor/grad_norm"))
        said.append(f"{strategy}: loss and gradient within {away:.2g} of one process's, {seconds:.2g} s an update")
        if not away <= bound:
            yield error(f"{said[-1]}; {bound:g} is expected", _REPORT)
    yield f"{ranks} ranks; {'; '.join(said)}"


@check("gpu", "weight sync")
def _weight_sync(trial: Trial) -> Result:
    """Weights reach an engine with its own copy, and the probe notices an update that did not."""
    yield from _sync(trial, "native")


@check("gpu", "vllm")
def _vllm(trial: Trial) -> Result:
    """The same with vLLM, by folder, also of a mixture of experts, and by CUDA IPC, through a sleep."""
    if find_spec("vllm") is None:
        yield "not installed: not tried"
        return
    kwargs = {"engine_kwargs": {"vllm": {"enforce_eager": True, "gpu_memory_utilization": 0.3}}}
    by_ipc = [("model", "cuda_ipc")] if trial.device.type == "cuda" else []
    for model, transfer in [("model", "folder"), ("mixture", "folder"), *by_ipc]:
        yield from _sync(trial, "vllm", model, weight_transfer=transfer, free_cache_engine=True, **kwargs)


@check("gpu", "sglang")
def _sglang(trial: Trial) -> Result:
    """The same with a server of SGLang, by folder."""
    if find_spec("sglang") is None:
        yield "not installed: not tried"
        return
    command = [*_SGLANG, "--enable-memory-saver", "--mem-fraction-static", "0.3"]
    yield from _sync(trial, "sglang", weight_transfer="folder", free_cache_engine=True, server_command=command)


def _sync(trial: Trial, name: str, model: str = "model", **rollout: Any) -> Result:
    worker = trial.worker(model, name=name, **rollout)
    engine = build_engine(worker.options, None, worker.tokenizer, placement=replace(worker.placement, trains=False))
    link = EngineLink(engine, worker.options.rollout, worker.bundle.chat, worker._actor, worker.dtype)

    async def run() -> tuple[float, float, bool]:
        await link.push(0)
        await link.rest()
        _move(worker)
        began = time.perf_counter()
        metrics = await link.push(1)
        seconds = time.perf_counter() - began
        _move(worker)
        load, engine.update_weights = engine.update_weights, _withheld(engine)  # type: ignore[method-assign]
        try:
            await link.push(2)
        except WeightMismatch:
            caught = True
        else:
            caught = False
        finally:
            engine.update_weights = load  # type: ignore[method-assign]
            if hasattr(engine, "shutdown"):
                await engine.shutdown()
        return seconds, add_metrics([metrics])["weight_sync/largest_difference"].value, caught  # type: ignore[union-attr]

    how = f"{name} by {rollout['weight_transfer']}" if rollout else name
    how += ", a mixture" if model == "mixture" else ""
    try:
        seconds, largest, caught = asyncio.run(run())
    except EtudeError as failed:
        yield error(f"{how}: {failed.message or failed}", failed.fix or _REPORT)
        return
    if not caught:
        yield error(f"{how}: an update that never reached the engine was not noticed", _REPORT)
    yield f"{how}: {seconds:.2g} s, log-probs within {largest:.2g} nats; an update that is withheld is noticed"


def _move(worker: TrainWorker) -> None:
    """Changes the weights by so much that other weights give other log-probs."""
    with torch.no_grad():
        for parameter in worker.model.parameters():
            parameter.add_(torch.randn(parameter.shape).to(parameter) * 0.5 * parameter.float().std().to(parameter))


def _withheld(engine: Any) -> Any:
    """An engine's `update_weights` that only says it has the version."""

    async def update_weights(source: Any, version: int) -> None:
        engine._version = version

    return update_weights
