"""vLLM in this process: an `AsyncLLM`, whose engine core vLLM runs in a child process.

Weights are loaded from a checkpoint's folder; with `transfer="cuda_ipc"`, if trainer and engine share a GPU, from IPC
handles of the trainer's own tensors instead, without writing files. (That path was written without a GPU and has never
run.)

vLLM is imported when the engine is built, in the environment that the trainer runs in.
"""

from __future__ import annotations

import asyncio
import atexit
import base64
import pickle
import signal
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from importlib.util import find_spec
from multiprocessing import resource_tracker
from typing import Any

from etude.errors import ConfigError, EngineError, MissingExtraError, one_line
from etude.inference.engine_setup import KEY, EngineSetup
from etude.inference.router import connect
from etude.inference.served import Answer, ServedEngine, checkpoint_folder, validate_answer, version_spans
from etude.inference.types import ENGINES, Engine, SamplingParams, TokenOutput
from etude.inference.vllm.server import VLLMServerEngine, check_loaded, check_same, sampling_fields
from etude.registry import did_you_mean

_RECEIVER = "etude.inference.vllm.worker.SharedWeightReceiver"
_SHUTDOWN_SECONDS = 5.0
_BESIDE_TRAINER = {"gpu_memory_utilization": 0.5, "enable_sleep_mode": True}
"""vLLM takes 0.92 of a GPU by default, and does not start on one that the trainer uses, too."""
_OURS = ("model", "tokenizer", "logprobs_mode", "return_sampling_mask", "worker_extension_cls")
"""The engine's correctness depends on these."""


@ENGINES.register("vllm")
class VLLMEngine(ServedEngine):
    """Implements `etude.inference.Engine` with vLLM in this process; `arguments`: those of vLLM's `AsyncEngineArgs`."""

    servers = "optional"
    returns_kept_ids = True
    keeps_ids_of_all = True

    def __init__(self, arguments: Mapping[str, Any], max_model_len: int, sync_timeout: float = 600.0) -> None:
        """Raises ConfigError if vLLM rejects the arguments, EngineError if it cannot start."""
        super().__init__(max_model_len, bool(arguments.get("return_sampling_mask")))
        self._arguments, self._sync_timeout = dict(arguments), sync_timeout
        self._engine: Any = None
        self._slept_with: Any = None
        self._starting = asyncio.Lock()

    @classmethod
    def from_setup(cls, setup: EngineSetup) -> Engine:
        """Returns server engines if servers are configured (a router over several), else vLLM in this process."""
        if setup.server_urls or setup.server_command:
            return connect(
                setup,
                lambda server: VLLMServerEngine(
                    server, setup.max_model_len, setup.weight_sync_timeout, keeps_ids=setup.keeps_ids
                ),
            )
        arguments = {
            "model": setup.model_path,
            "dtype": setup.dtype,
            "trust_remote_code": setup.trust_remote_code,
            "max_model_len": setup.max_model_len,
            "max_num_seqs": setup.max_num_seqs,
            "max_num_batched_tokens": max(setup.max_num_batched_tokens, setup.max_model_len),
            "seed": setup.seed,
            "generation_config": "vllm",
            "disable_log_stats": True,
            **(_BESIDE_TRAINER if setup.shares_gpu else {}),
            **setup.engine_kwargs,
            "logprobs_mode": "processed_logprobs",
            **({"return_sampling_mask": True} if setup.keeps_ids else {}),
            "worker_extension_cls": _RECEIVER,
        }
        return cls(arguments, setup.max_model_len, setup.weight_sync_timeout)

    @staticmethod
    def check_installed(given: Mapping[str, Any]) -> None:
        """Rejects, before a model is loaded, a missing vLLM and arguments that vLLM does not know.

        Raises:
            MissingExtraError: vLLM is not installed.
            ConfigError: `given`, the section engine_kwargs.vllm, has a name that vLLM does not know or the engine sets.
        """
        if find_spec("vllm") is None:
            raise MissingExtraError("rollout.name=vllm without rollout.server_urls", "vllm")
        if not given:
            return
        from vllm.engine.arg_utils import AsyncEngineArgs

        known = set(AsyncEngineArgs.__dataclass_fields__)
        for name in given:
            if name in _OURS:
                raise ConfigError(f"{KEY}.engine_kwargs.vllm.{name} is set by the engine itself: leave it out")
            if name not in known:
                raise ConfigError(f"{KEY}.engine_kwargs.vllm: vLLM has no argument '{name}'{did_you_mean(name, known)}")

    async def _started(self) -> Any:
        """Returns the `AsyncLLM`, started on first use because it is bound to the running event loop."""
        async with self._starting:
            if self._engine is None:
                from vllm.engine.arg_utils import AsyncEngineArgs
                from vllm.v1.engine.async_llm import AsyncLLM

                try:
                    with _interrupts_blocked():
                        self._engine = AsyncLLM.from_engine_args(AsyncEngineArgs(**self._arguments))
                except (ValueError, TypeError) as error:  # pydantic's ValidationError is a ValueError
                    raise ConfigError(f"{KEY}.engine_kwargs.vllm: {one_line(error)}") from error
                except Exception as error:
                    raise EngineError(f"vLLM did not start: {type(error).__name__}: {one_line(error)}") from error
                atexit.register(_end, weakref.ref(self._engine))  # its processes would block interpreter exit
        return self._engine

    async def _ask(self, name: str, prompt: list[int], params: SamplingParams) -> TokenOutput:
        from vllm import SamplingParams as VLLMSamplingParams
        from vllm.sampling_params import RequestOutputKind

        engine, version = await self._started(), self._version
        kind, fields = RequestOutputKind.FINAL_ONLY, sampling_fields(params, self._keeps_ids)
        vllm_params = VLLMSamplingParams(**({"detokenize": False} | fields), output_kind=kind)
        final = None
        try:
            async for output in engine.generate({"prompt_token_ids": prompt}, vllm_params, name):
                final = output
        except Exception as error:
            raise EngineError(f"vLLM failed a request: {type(error).__name__}: {one_line(error)}") from error
        if final is None or not final.outputs:
            raise EngineError("vLLM ended a request without an answer")
        done = final.outputs[0]
        ids = list(done.token_ids)
        try:
            log_probs = [step[token].logprob for step, token in zip(done.logprobs or (), ids)]
        except (KeyError, AttributeError) as error:
            raise EngineError(f"vLLM gave no log-prob of a token that it sampled: {one_line(error)}") from error
        spans = version_spans(
            [{"version": s.version, "start": s.start, "end": s.end} for s in done.weight_versions or ()]
        )
        kept = None if (mask := getattr(done, "sampling_mask", None)) is None else mask.token_ids
        answer = Answer(ids, log_probs, done.finish_reason, spans, kept)
        return validate_answer(answer, params, version, "vLLM", self._keeps_ids)

    async def _abort(self, name: str) -> None:
        await (await self._started()).abort(name)

    async def check(self) -> None:
        """Raises EngineError if the engine core is dead."""
        try:
            await (await self._started()).check_health()
        except Exception as error:
            raise EngineError(f"vLLM is dead: {type(error).__name__}: {one_line(error)}") from error

    async def _pause(self) -> None:
        await (await self._started()).pause_generation(mode="keep")

    async def _resume(self) -> None:
        await (await self._started()).resume_generation()

    async def _load(self, source: Any, version: int) -> None:
        """Loads new weights; `source` may also map names to CUDA tensors of this process, shared by their IPC handles."""
        engine, (method, argument) = await self._started(), _weights_call(source)
        try:
            results = await engine.collective_rpc(method, timeout=self._sync_timeout, args=(argument,))
            check_loaded(results, "vLLM")
            if not await engine.reset_prefix_cache(reset_running_requests=True):
                raise EngineError("vLLM could not drop the old weights' keys and values")
            await engine.update_weight_version(str(version))
        except EngineError:
            raise
        except Exception as error:
            raise EngineError(f"vLLM did not take the weights: {type(error).__name__}: {one_line(error)}") from error

    async def sleep(self) -> None:
        """Moves the weights to host memory and drops the KV cache (needs engine_kwargs.vllm.enable_sleep_mode)."""
        self._slept_with = await (await self._started()).collective_rpc("etude_checksums")
        await (await self._started()).sleep(level=1)

    async def wake(self, *parts: str) -> None:
        """See `ServedEngine.wake`.

        Raises:
            EngineError: the weights are not those from before `sleep`.
        """
        await (await self._started()).wake_up(list(parts) or None)
        if self._slept_with is not None and (not parts or "weights" in parts):
            check_same(self._slept_with, await (await self._started()).collective_rpc("etude_checksums"), "vLLM")

    async def shutdown(self) -> None:
        """Ends vLLM's processes; using the engine again restarts it."""
        engine, self._engine = self._engine, None
        if engine is not None:
            _end(lambda: engine)


def _end(reference: Callable[[], Any]) -> None:
    """Shuts down a weakly referenced engine in any state; never raises."""
    if (engine := reference()) is not None:
        with suppress(Exception):
            engine.shutdown(timeout=_SHUTDOWN_SECONDS)
            engine.shutdown = lambda timeout=None: None  # its finalizer calls it again during interpreter shutdown


@contextmanager
def _interrupts_blocked() -> Iterator[None]:
    """Makes processes started inside ignore SIGINT: after a Ctrl-C the trainer finishes its step, for which it needs the
    engine, and then ends them. An interrupt received meanwhile is delivered at exit from the block."""
    resource_tracker.ensure_running()  # starting it later would unblock the signal again
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _weights_call(source: Any) -> tuple[str, str]:
    """Returns the name and the argument of the `WeightReceiver` method that loads `source`."""
    if not isinstance(source, Mapping):
        return "etude_load_folder", checkpoint_folder(source, "vllm")
    from torch.multiprocessing.reductions import reduce_tensor

    if not all(tensor.is_cuda for tensor in source.values()):
        raise ConfigError("weights are shared by handles only where they lie on a GPU: hand over a folder instead")
    handles = [(name, reduce_tensor(tensor.detach())) for name, tensor in source.items()]
    return "etude_load_handles", base64.b64encode(pickle.dumps(handles)).decode()
