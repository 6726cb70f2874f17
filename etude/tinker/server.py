"""The server: the paths of the Tinker API under `/api/v1`.

Invariant: a request is answered by what the SDK's own types say, or refused with one line that says why, as `{"error",
"category"}`: 400 for what is invalid or not offered, 404 for another path, 410 for what is not, or no longer, here. The SDK
retries none of these. A future that fails has the same form.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from typing import Any, TypeVar

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, Response
from pydantic import BaseModel, ValidationError
from starlette.exceptions import HTTPException
from tinker import types

from etude.errors import DataError, EtudeError, one_line
from etude.serving.middleware import BearerToken, BodyLimit
from etude.timeouts import settle
from etude.tinker.checkpoints import Place
from etude.tinker.service import Gone, TinkerService
from etude.tinker.wire import read_training_request

M = TypeVar("M", bound=BaseModel)

_PROTO = "application/x-protobuf"
_MAX_REQUEST_MB = 64  # the SDK sends data in parts of 5 MB
_CLIENT_CONFIG = {"parallel_fwdbwd_chunks": False, "use_pyqwest_transport": False}  # parts arrive in order


class _WeightsInfoRequest(BaseModel):
    tinker_path: str


def _error(status: int, message: str) -> dict[str, str]:
    return {"error": message, "category": "user" if status < 500 else "server"}


def create_app(service: TinkerService, token: str | None = None) -> FastAPI:
    """Creates the application; sessions end when it shuts down. `token`: the API key that clients must send."""

    @contextlib.asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        sweeping = asyncio.ensure_future(service.end_silent())
        yield
        await settle({sweeping})
        await service.close()

    app = FastAPI(title="Étude's Tinker API", lifespan=lifespan)
    app.add_middleware(BodyLimit, max_bytes=_MAX_REQUEST_MB << 20, error_body=_error)
    if token is not None:
        app.add_middleware(BearerToken, token=token, error_body=_error)
    _add_sessions(app, service)
    _add_futures(app, service)
    _add_clients(app, service)
    _add_checkpoints(app, service)
    _add_errors(app)
    return app


async def _read(request: Request, kind: type[M]) -> M:
    try:
        return kind.model_validate_json(await request.body())
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"]))
        raise DataError(f"{kind.__name__}: {where}: {first['msg']}") from None


def _add_sessions(app: FastAPI, service: TinkerService) -> None:
    @app.get("/api/v1/healthz")
    async def health() -> dict[str, str]:
        return {"status": "ok"}

    @app.post("/api/v1/client/config")
    async def config() -> dict[str, Any]:
        return _CLIENT_CONFIG

    @app.post("/api/v1/client/dynamic_config")
    async def dynamic_config() -> dict[str, Any]:
        return {"sample_cancel_enabled": True}

    @app.get("/api/v1/get_server_capabilities")
    async def capabilities() -> dict[str, Any]:
        model = {"model_name": service.base.name, "max_context_length": service.base.context}
        return {"supported_models": [{**model, "trainable": True, "sampleable": True}]}

    @app.post("/api/v1/telemetry")
    async def telemetry() -> dict[str, str]:
        return {"status": "accepted"}

    @app.post("/api/v1/create_session")
    async def create_session(request: Request) -> dict[str, Any]:
        session_id = service.create_session(await _read(request, types.CreateSessionRequest))
        return {"type": "create_session", "session_id": session_id}

    @app.post("/api/v1/session_heartbeat")
    async def heartbeat(request: Request) -> dict[str, str]:
        service.session((await _read(request, types.SessionHeartbeatRequest)).session_id)
        return {"type": "session_heartbeat"}

    @app.post("/api/v1/sessions/{session_id}/finish")
    async def finish(session_id: str) -> None:
        await service.end_session(session_id)

    @app.get("/api/v1/sessions")
    async def sessions(limit: int = 20, offset: int = 0) -> dict[str, Any]:
        return {"sessions": list(service.sessions)[offset : offset + limit]}

    @app.get("/api/v1/sessions/{session_id}")
    async def session(session_id: str) -> dict[str, Any]:
        found = service.session(session_id)
        own = {"training_run_ids": list(found.models), "sampler_ids": list(found.samplers)}
        return {**own, "user_metadata": found.user_metadata}


def _add_futures(app: FastAPI, service: TinkerService) -> None:
    """The requests that begin something, and how their results are fetched."""

    def begins(path: str, kind: type[M], begin: Callable[[M], str]) -> None:
        @app.post(f"/api/v1/{path}")
        async def submit(request: Request) -> dict[str, str]:
            return {"request_id": begin(await _read(request, kind))}

    begins("create_model", types.CreateModelRequest, service.create_model)
    begins("unload_model", types.UnloadModelRequest, lambda asked: service.unload(asked.model_id))
    begins("optim_step", types.OptimStepRequest, service.optim_step)
    begins("save_weights", types.SaveWeightsRequest, service.save_weights)
    begins("save_weights_for_sampler", types.SaveWeightsForSamplerRequest, service.save_for_sampler)
    begins("load_weights", types.LoadWeightsRequest, service.load_weights)

    @app.post("/api/v1/forward_backward")
    async def forward_backward(request: Request) -> dict[str, str]:
        if request.headers.get("content-type") != _PROTO:
            raise DataError(f"forward_backward takes {_PROTO}, which newer clients send: update the SDK")
        return {"request_id": service.forward_backward(read_training_request(await request.body()))}

    @app.post("/api/v1/asample")
    async def sample(request: Request) -> dict[str, Any]:
        request_id, sequence_ids = await service.sample(await _read(request, types.SampleRequest))
        return {"request_id": request_id, "sample_sequence_ids": sequence_ids}

    @app.post("/api/v1/retrieve_future")
    async def retrieve(request: Request) -> Response:
        result = await service.retrieve((await _read(request, types.FutureRetrieveRequest)).request_id)
        return Response(result, media_type=_PROTO) if isinstance(result, bytes) else JSONResponse(result)

    @app.post("/api/v1/cancel_future")
    async def cancel(request: Request) -> None:
        service.cancel((await _read(request, types.FutureRetrieveRequest)).request_id)


def _add_clients(app: FastAPI, service: TinkerService) -> None:
    """What training and sampling clients ask about themselves."""

    @app.post("/api/v1/get_info")
    async def get_info(request: Request) -> dict[str, Any]:
        return service.model_info((await _read(request, types.GetInfoRequest)).model_id)

    @app.post("/api/v1/create_sampling_session")
    async def create(request: Request) -> dict[str, str]:
        asked = await _read(request, types.CreateSamplingSessionRequest)
        sampler_id = await service.create_sampling_session(asked)
        return {"type": "create_sampling_session", "sampling_session_id": sampler_id}

    @app.post("/api/v1/join_sampling_session")
    async def join(request: Request) -> dict[str, Any]:
        asked = await _read(request, types.JoinSamplingSessionRequest)
        found = service.sampling_session(asked.sampling_session_id)[1]
        found.clients += 1
        return {"type": "join_sampling_session", "client_counter": found.clients}

    @app.get("/api/v1/samplers/{sampler_id}")
    async def sampler(sampler_id: str) -> dict[str, Any]:
        found = service.sampling_session(sampler_id)[1]
        return {"sampler_id": sampler_id, "base_model": service.base.name, "model_path": found.path}


def _add_checkpoints(app: FastAPI, service: TinkerService) -> None:
    store = service.checkpoints

    @app.post("/api/v1/weights_info")
    async def weights_info(request: Request) -> dict[str, Any]:
        saved = store.read((await _read(request, _WeightsInfoRequest)).tinker_path)
        shape = saved.shape
        trained = {"train_unembed": False, "train_mlp": shape.train_mlp, "train_attn": shape.train_attn}
        return {"base_model": saved.base_model, "is_lora": True, "lora_rank": shape.rank, **trained}

    @app.get("/api/v1/training_runs")
    async def runs(limit: int = 20, offset: int = 0) -> dict[str, Any]:
        names = store.runs()
        cursor = {"offset": offset, "limit": limit, "total_count": len(names)}
        return {"training_runs": [store.run_record(each) for each in names[offset : offset + limit]], "cursor": cursor}

    @app.get("/api/v1/training_runs/{run}")
    async def run(run: str) -> dict[str, Any]:
        return store.run_record(run)

    @app.get("/api/v1/training_runs/{run}/checkpoints")
    async def checkpoints_of(run: str) -> dict[str, Any]:
        return {"checkpoints": [each.record() for each in store.of_run(run)]}

    @app.get("/api/v1/checkpoints")
    async def checkpoints(limit: int = 100, offset: int = 0) -> dict[str, Any]:
        found = [each.record() for name in store.runs() for each in store.of_run(name)]
        cursor = {"offset": offset, "limit": limit, "total_count": len(found)}
        return {"checkpoints": found[offset : offset + limit], "cursor": cursor}

    @app.delete("/api/v1/training_runs/{run}/checkpoints/{kind}/{name}")
    async def delete(run: str, kind: str, name: str) -> None:
        store.remove(store.read(str(Place.of(f"tinker://{run}/{kind}/{name}"))).place)


def _add_errors(app: FastAPI) -> None:
    @app.exception_handler(Gone)
    async def gone(_: Request, error: Gone) -> JSONResponse:
        return JSONResponse(_error(410, one_line(error)), 410)

    @app.exception_handler(EtudeError)
    async def invalid(_: Request, error: EtudeError) -> JSONResponse:
        return JSONResponse(_error(400, one_line(error)), 400)

    @app.exception_handler(HTTPException)
    async def refused(request: Request, error: HTTPException) -> JSONResponse:
        unknown = error.status_code in (404, 405)
        reason = f"{request.method} {request.url.path} is not offered by this server" if unknown else str(error.detail)
        return JSONResponse(_error(error.status_code, reason), error.status_code, error.headers)
