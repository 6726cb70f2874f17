"""Sessions, models, samplers and futures: what is asked of the server, in which order, and for how long it is kept.

Invariant: the requests of a model run one at a time, in the order of their arrival; those of several models take turns,
since one thread computes and each model has at most one request in it. A request that is sent again, because its answer was
lost, is not run again. What belongs to a session ends with it: when its client says so, or sends nothing for
`session_seconds`.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from collections import OrderedDict
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, TypeVar
from uuid import uuid4

from tinker import types

from etude.errors import DataError, EtudeError, one_line
from etude.timeouts import retrieve, settle
from etude.tinker.adapters import Adapter, AdapterShape, Base, Sampler, answer_sample
from etude.tinker.checkpoints import CheckpointStore, Place, check_name
from etude.tinker.wire import TrainingRequest

logger = logging.getLogger(__name__)
R = TypeVar("R")

_SWEEP_SECONDS = 2.0
_POLL_SECONDS = 25.0  # the SDK gives a poll 45 s
_KEPT_SECONDS = 600.0  # for which a result that was fetched is kept, as the fetch may have been lost
_MOST_RANK = 512
_MOST_SAMPLES = 1024


class Gone(Exception):
    """What the request names was there, or never was; the client has to begin again."""


@dataclass(eq=False)
class Pending:
    """A request under way, and later its result: bytes of a protocol buffer, a JSON object, or an error."""

    task: asyncio.Task[bytes | dict[str, Any]]
    started: bool = False
    cancellable: bool = False


@dataclass(eq=False)
class Session:
    """A client: what it asked for, by the number that it gave."""

    id: str
    user_metadata: dict[str, Any] | None
    seen: float = field(default_factory=time.monotonic)
    models: dict[str, Model] = field(default_factory=dict)
    samplers: OrderedDict[str, SamplingSession] = field(default_factory=OrderedDict)
    pending: dict[str, Pending] = field(default_factory=dict)
    sent: dict[tuple[str, int], str] = field(default_factory=dict)


@dataclass(eq=False)
class Model:
    """A training client's model; `adapter` is None until it is made."""

    id: str
    shape: AdapterShape
    adapter: Adapter | None = None
    turn: asyncio.Lock = field(default_factory=asyncio.Lock)


@dataclass(eq=False)
class SamplingSession:
    """A sampling client's weights; None: they were dropped for newer ones. `saved`: when the checkpoint `path` was."""

    sampler: Sampler | None
    path: str | None
    saved: str = ""
    clients: int = 0


class TinkerService:
    """The state of a server; all methods run on its event loop."""

    def __init__(
        self, base: Base, checkpoints: CheckpointStore, *, session_seconds: float = 120.0, max_snapshots: int = 8
    ) -> None:
        """`max_snapshots`: unnamed sampler weights that a session may have; older ones are dropped."""
        self.base, self.checkpoints = base, checkpoints
        self._session_seconds, self._max_snapshots = session_seconds, max_snapshots
        self.sessions: dict[str, Session] = {}
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="etude-tinker")
        self._untrained: Sampler | None = None

    async def compute(self, function: Callable[..., R], *arguments: Any) -> R:
        """Runs a blocking function in the thread that computes."""
        return await asyncio.get_running_loop().run_in_executor(self._thread, function, *arguments)

    # -- sessions ------------------------------------------------------------------------------------------------

    def create_session(self, request: types.CreateSessionRequest) -> str:
        """Opens a session and returns its id."""
        session = Session(str(uuid4()), request.user_metadata)
        self.sessions[session.id] = session
        return session.id

    def session(self, session_id: str) -> Session:
        """Returns an open session, which has thereby been heard of. Raises Gone."""
        session = self.sessions.get(session_id)
        if session is None:
            raise Gone(f"session {session_id[:100]} has ended, or was never opened on this server")
        session.seen = time.monotonic()
        return session

    async def end_session(self, session_id: str) -> None:
        """Cancels what a session has under way and frees its models and samplers."""
        if (session := self.sessions.pop(session_id, None)) is not None:
            await settle({pending.task for pending in session.pending.values()})

    async def end_silent(self) -> None:
        """Ends sessions whose client is silent, until cancelled."""
        while True:
            await asyncio.sleep(min(_SWEEP_SECONDS, self._session_seconds / 4))
            due = time.monotonic() - self._session_seconds
            for session in [each for each in self.sessions.values() if each.seen < due]:
                logger.warning("session %s: no heartbeat for %.0f s; ended", session.id, self._session_seconds)
                await self.end_session(session.id)

    async def close(self) -> None:
        """Ends all sessions."""
        for session_id in list(self.sessions):
            await self.end_session(session_id)
        self._thread.shutdown(wait=False, cancel_futures=True)

    # -- futures -------------------------------------------------------------------------------------------------

    def _submit(
        self,
        session: Session,
        sent: tuple[str, int],
        work: Callable[[], Awaitable[bytes | dict[str, Any]]],
        turn: asyncio.Lock | None = None,
    ) -> str:
        """Begins `work`, after earlier holders of `turn`, unless it was `sent` before; returns the request's id."""
        if (known := session.sent.get(sent)) in session.pending:
            return str(known)
        request_id = f"{session.id}:{sent[0].removeprefix(session.id).strip(':')}:{sent[1]}:{secrets.token_hex(4)}"

        async def run() -> bytes | dict[str, Any]:
            if turn is None:
                session.pending[request_id].started = True
                return await work()
            async with turn:
                session.pending[request_id].started = True
                return await work()

        task = asyncio.ensure_future(run())
        task.add_done_callback(retrieve)  # the client may never ask
        session.pending[request_id] = Pending(task, cancellable=turn is None)
        session.sent[sent] = request_id
        return request_id

    async def retrieve(self, request_id: str) -> bytes | dict[str, Any]:
        """Waits for a result, for some time; returns the SDK's try-again if there is none yet, and its error form if the
        request failed. Raises Gone."""
        session = self.session(request_id.partition(":")[0])
        pending = session.pending.get(request_id)
        if pending is None:
            raise Gone(f"there is no request {request_id[:200]}")
        await asyncio.wait({pending.task}, timeout=_POLL_SECONDS)
        session.seen = time.monotonic()
        if not pending.task.done():
            state = "active" if pending.started else "paused_capacity"
            reason = None if pending.started else "earlier requests of this model, or of others, are still running"
            again = {"type": "try_again", "request_id": request_id, "queue_state": state}
            return {**again, "queue_state_reason": reason}
        asyncio.get_running_loop().call_later(_KEPT_SECONDS, session.pending.pop, request_id, None)
        try:
            return pending.task.result()
        except asyncio.CancelledError:
            return {"error": "the request was cancelled", "category": "user"}
        except EtudeError as error:
            return {"error": one_line(error), "category": "user"}
        except Exception as error:
            logger.exception("request %s", request_id)
            return {"error": f"{type(error).__name__}: {one_line(error)}", "category": "server"}

    def cancel(self, request_id: str) -> None:
        """Cancels a request to sample; others run to their end, since later ones build on them. Raises Gone."""
        pending = self.session(request_id.partition(":")[0]).pending.get(request_id)
        if pending is not None and pending.cancellable:
            pending.task.cancel()

    # -- models --------------------------------------------------------------------------------------------------

    def _named(self, base_model: str | None) -> None:
        if base_model is not None and base_model not in self.base.names:
            here = " or ".join(sorted(self.base.names, key=len))
            raise DataError(f"base model '{base_model[:200]}' is not here: this server has {here}")

    def create_model(self, request: types.CreateModelRequest) -> str:
        """Begins to make an adapter; raises DataError for what is not offered."""
        self._named(request.base_model)
        _check_optimizer(request.optimizer_config)
        lora = request.lora_config or types.LoraConfig(rank=32)
        seed = secrets.randbits(31) if lora.seed is None else lora.seed
        shape = AdapterShape(lora.rank, seed, lora.train_mlp, lora.train_attn)
        if not 0 < shape.rank <= _MOST_RANK or not (shape.train_mlp or shape.train_attn):
            raise DataError(
                f"a rank is 1 to {_MOST_RANK}, and train_mlp or train_attn is needed: the head has no adapter"
            )
        return self._make_model(request.session_id, request.model_seq_id, shape, request.user_metadata)[1]

    def _make_model(self, session_id: str, number: int, shape: AdapterShape, metadata: Any) -> tuple[str, str]:
        """Begins to make an adapter; returns the model's id and the request's."""
        model_id = f"{session_id}:train:{number}"
        session = self.session(session_id)
        model = session.models.setdefault(model_id, Model(model_id, shape))
        metadata = metadata or session.user_metadata

        async def work() -> dict[str, Any]:
            model.adapter = await self.compute(Adapter, self.base, shape)
            await self.compute(self.checkpoints.add_run, model_id, self.base.name, shape, metadata)
            return {"type": "create_model", "model_id": model_id}

        return model_id, self._submit(session, (model_id, 0), work, model.turn)

    def model(self, model_id: str) -> tuple[Session, Model]:
        """Returns a model and its session. Raises Gone."""
        session = self.session(model_id.partition(":")[0])
        if model_id not in session.models:
            raise Gone(f"there is no model {model_id[:200]}")
        return session, session.models[model_id]

    def model_info(self, model_id: str) -> dict[str, Any]:
        """The SDK's `GetInfoResponse`. Raises Gone."""
        model = self.model(model_id)[1]
        data = {"arch": "transformer", "model_name": self.base.name, "tokenizer_id": str(self.base.folder)}
        about = {"model_data": data, "is_lora": True, "lora_rank": model.shape.rank, "model_name": self.base.name}
        return {"type": "get_info", "model_id": model_id, **about}

    def _of_model(self, model_id: str, seq_id: int | None, work: Callable[[Adapter], Awaitable[Any]]) -> str:
        session, model = self.model(model_id)

        async def run() -> Any:
            if model.adapter is None:
                raise DataError(f"model {model_id} could not be made")
            return await work(model.adapter)

        number = secrets.randbits(63) if seq_id is None else seq_id
        return self._submit(session, (model_id, number), run, model.turn)

    def forward_backward(self, request: TrainingRequest) -> str:
        """Begins `Adapter.forward_backward`. Raises Gone."""
        return self._of_model(
            request.model_id, request.seq_id, lambda adapter: self.compute(adapter.forward_backward, request)
        )

    def optim_step(self, request: types.OptimStepRequest) -> str:
        """Begins a step. Raises Gone, DataError for another optimizer than Adam."""
        if not isinstance(request.optim_params, types.AdamParams):
            raise DataError(f"optimizer '{request.optim_params.type}' is not offered here (offered: adamw)")

        async def work(adapter: Adapter) -> dict[str, Any]:
            return {"metrics": await self.compute(adapter.step, request.optim_params)}

        return self._of_model(request.model_id, request.seq_id, work)

    def unload(self, model_id: str) -> str:
        """Frees a model after its earlier requests. Raises Gone."""
        session, model = self.model(model_id)

        async def work(_: Adapter) -> dict[str, Any]:
            session.models.pop(model_id, None)
            model.adapter = None
            return {"type": "unload_model", "model_id": model_id}

        return self._of_model(model_id, None, work)

    # -- checkpoints ---------------------------------------------------------------------------------------------

    def _save(self, adapter: Adapter, place: Place, *, overwrite: bool, ttl: int | None, metadata: Any) -> str:
        known = {"overwrite": overwrite, "ttl_seconds": ttl, "user_metadata": metadata}
        with self.checkpoints.write(place, self.base.name, adapter.shape, **known) as folder:
            adapter.save(folder, optimizer=place.kind == "weights")
        return str(place)

    def save_weights(self, request: types.SaveWeightsRequest) -> str:
        """Begins to save a model with its optimizer. Raises Gone, DataError for a name that is none."""
        place = Place(request.model_id, "weights", request.path or f"{request.seq_id or 0:06}")
        check_name(place.name)

        async def work(adapter: Adapter) -> dict[str, Any]:
            how = {"overwrite": request.overwrite, "ttl": request.ttl_seconds, "metadata": request.user_metadata}
            path = await self.compute(lambda: self._save(adapter, place, **how))
            return {"type": "save_weights", "path": path}

        return self._of_model(request.model_id, request.seq_id, work)

    def load_weights(self, request: types.LoadWeightsRequest) -> str:
        """Begins to load a checkpoint into a model, or into a new one of its shape. Raises Gone, DataError."""
        saved = self.checkpoints.read(request.path)
        self._named(saved.base_model)
        if request.optimizer and saved.place.kind != "weights":
            raise DataError(f"{request.path} has no optimizer: only checkpoints of save_state have one")
        model_id, folder = request.model_id, self.checkpoints.path(saved.place)
        if model_id is None:
            if request.session_id is None or request.model_seq_id is None:
                raise DataError("load_weights needs a model_id, or a session_id and model_seq_id")
            self._named(request.base_model)
            _check_optimizer(request.optimizer_config)
            numbers = request.session_id, request.model_seq_id
            model_id, _ = self._make_model(*numbers, saved.shape, request.user_metadata)

        async def work(adapter: Adapter) -> dict[str, Any]:
            await self.compute(lambda: adapter.load(folder, optimizer=request.optimizer))
            return {"type": "load_weights", "path": request.path, "model_id": model_id}

        return self._of_model(model_id, request.seq_id or -1, work)

    def save_for_sampler(self, request: types.SaveWeightsForSamplerRequest) -> str:
        """Begins to save a model's weights to sample from: as a checkpoint, or unnamed, for one sampling session. Raises
        Gone, DataError."""
        if request.kind != "snapshot":
            raise DataError(f"sampling clients of kind '{request.kind}' are not offered here (offered: snapshot)")
        session, _ = self.model(request.model_id)
        if request.path is not None:
            check_name(request.path)

        async def work(adapter: Adapter) -> dict[str, Any]:
            if request.path is not None:
                place = Place(request.model_id, "sampler_weights", request.path)
                how = {"overwrite": True, "ttl": request.ttl_seconds, "metadata": request.user_metadata}
                path = await self.compute(lambda: self._save(adapter, place, **how))
                return {"type": "save_weights_for_sampler", "path": path}
            sampler = await self.compute(adapter.snapshot)
            sampler_id = self._add_sampler(session, request.sampling_session_seq_id, sampler, None)
            return {"type": "save_weights_for_sampler", "sampling_session_id": sampler_id}

        return self._of_model(request.model_id, request.seq_id, work)

    # -- sampling ------------------------------------------------------------------------------------------------

    def _add_sampler(
        self, session: Session, number: int | None, sampler: Sampler, path: str | None, saved: str = ""
    ) -> str:
        sampler_id = f"{session.id}:sample:{len(session.samplers) if number is None else number}"
        session.samplers[sampler_id] = SamplingSession(sampler, path, saved)
        held = [each for each in session.samplers.values() if each.sampler not in (None, self._untrained)]
        for old in held[: -self._max_snapshots]:
            old.sampler = None
        return sampler_id

    async def create_sampling_session(self, request: types.CreateSamplingSessionRequest) -> str:
        """Opens a sampling session on a checkpoint or the base model; returns its id. Raises Gone, DataError."""
        session, path, saved = self.session(request.session_id), request.model_path, ""
        if path is None:
            self._named(request.base_model)
            sampler = self._untrained = self._untrained or Sampler(self.base, await self.compute(self.base.copy))
        else:
            sampler, saved = await self.compute(self._load_sampler, path)
        return self._add_sampler(session, request.sampling_session_seq_id, sampler, path, saved)

    def _load_sampler(self, path: str) -> tuple[Sampler, str]:
        """Returns a checkpoint's sampler, and when it was saved."""
        saved = self.checkpoints.read(path)
        self._named(saved.base_model)
        adapter = Adapter(self.base, saved.shape)
        adapter.load(self.checkpoints.path(saved.place), optimizer=False)
        return adapter.snapshot(), saved.time

    def sampling_session(self, sampler_id: str) -> tuple[Session, SamplingSession]:
        """Returns a sampling session and its session. Raises Gone."""
        session = self.session(sampler_id.partition(":")[0])
        if sampler_id not in session.samplers:
            raise Gone(f"there is no sampling session {sampler_id[:200]}")
        return session, session.samplers[sampler_id]

    async def sample(self, request: types.SampleRequest) -> tuple[str, list[str]]:
        """Begins to sample; returns the request's id, and an id per sample. Raises Gone, DataError."""
        if request.sampling_session_id is None:
            raise DataError("asample needs a sampling_session_id")
        session, found = self.sampling_session(request.sampling_session_id)
        if request.target_prompt_logprobs is not None or request.prompt_alt_tokens_k or request.record_stability_info:
            raise DataError("target_prompt_logprobs, prompt_alt_tokens and stability info are not offered here")
        if not all(chunk.type == "encoded_text" for chunk in request.prompt.chunks):
            raise DataError("only text is sampled from here, not images or sound")
        if not 0 < request.num_samples <= _MOST_SAMPLES:
            raise DataError(f"num_samples is 1 to {_MOST_SAMPLES}, not {request.num_samples}")
        if not all(
            0 <= k <= self.base.vocabulary for k in (request.topk_prompt_logprobs, request.topk_sample_logprobs)
        ):
            raise DataError(f"top-k log-probs are of 0 to {self.base.vocabulary} tokens")
        prompt, scored = request.prompt.to_ints(), request.prompt_logprobs_last_n
        if scored is not None and not 0 < scored < len(prompt):
            raise DataError(f"prompt_logprobs_last_n is 1 to {len(prompt) - 1} for this prompt, not {scored}")
        if found.sampler is None and found.path is None:
            raise Gone(
                f"these weights were dropped: a session keeps its {self._max_snapshots} newest snapshots; "
                "name those that should stay (save_weights_for_sampler), or start the server with --max-snapshots"
            )
        number = secrets.randbits(62) if request.seq_id is None else request.seq_id
        name = f"{request.sampling_session_id}:{number}"

        async def work() -> bytes:
            if found.sampler is None:
                sampler, saved = await self.compute(self._load_sampler, found.path)
                if saved != found.saved:
                    raise DataError(f"{found.path} was saved anew since this client was made: make another")
                found.sampler = sampler
            return await answer_sample(found.sampler, name, request, prompt, self.compute)

        request_id = self._submit(session, (request.sampling_session_id, number), work)
        return request_id, [f"{name}:{i}" for i in range(request.num_samples)]


def _check_optimizer(config: Any) -> None:
    if config is not None and config.type != "adamw":
        raise DataError(f"optimizer '{config.type}' is not offered here (offered: adamw)")
