"""`serve_policy`: starts a gateway from a configuration (`etude gateway`).

Invariant: every session that sampled anything becomes one line of the record, a rollout in the format of
`trainer.rollout_data_dir`, however it ended; the engine keeps no state of it. Any engine that supports training can serve:
the record has log-probs.
"""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import uvicorn

from etude.agents import AgentContext, Sampling, TrajectoryClient
from etude.agents.gateway import GatewaySession, SessionRules
from etude.agents.gateway.server import SessionStore, create_app
from etude.chat import ToolParser
from etude.checks.setup import Setup, check_options
from etude.dumps import rollout_record, sequence_record
from etude.errors import EtudeError, one_line
from etude.inference import ENGINES, SamplingParams, check_trainable
from etude.jsonl import JsonLines, json_line
from etude.models import check_vocabulary, load_causal_lm
from etude.options import Options
from etude.options.model_path import longest_context
from etude.serving.listening import listen, server_config, url_of
from etude.trainer.rollouts import decode_texts
from etude.workers.engine_link import build_engine
from etude.workers.role import user_config

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class ServingOptions:
    """The server's address, limits and record file; times in seconds."""

    host: str = "127.0.0.1"
    port: int = 8000
    allow_hosts: tuple[str, ...] = ()
    token: str | None = None
    record: Path | None = None
    max_sessions: int = 1024
    idle_seconds: float = 1800.0
    max_choices: int = 16
    max_turns: int = 1000
    max_request_mb: int = 32
    max_image_mb: int = 1024
    grace_seconds: float = 10.0


async def serve_policy(run: Options, options: ServingOptions, ready: Callable[[str], None]) -> None:
    """Serves until SIGINT or SIGTERM; calls `ready` with the address once it is bound.

    Raises:
        ConfigError: the configuration is invalid, or the address cannot be used.
    """
    setup = check_options(run)
    policy = setup.options.actor_rollout_ref
    check_trainable(policy.rollout.name)
    with listen(options.host, options.port) as listener:
        served = ServedPolicy(setup, options)
        app = create_app(
            served.store,
            setup.tokenizer,
            lambda session: [json_line(served.record_of(session))],
            model=Path(str(policy.model.path)).name,
            token=options.token,
            max_request_mb=options.max_request_mb,
        )
        ready(url_of(listener, options.host))
        serving = server_config(
            app,
            options.host,
            options.allow_hosts,
            lifespan="on",
            timeout_keep_alive=600,
            timeout_graceful_shutdown=max(1, round(options.grace_seconds)),
        )
        try:
            await uvicorn.Server(serving).serve(sockets=[listener])
        finally:  # after a second Ctrl-C the application's own shutdown, which ends sessions, does not run
            served.store.end_all()


class ServedPolicy:
    """An engine and the sessions that sample from it."""

    def __init__(self, setup: Setup, options: ServingOptions) -> None:
        """Loads the model, if the engine samples in this process, and builds the engine."""
        run, bundle, model = setup.options, setup.bundle, None
        if not hasattr(ENGINES.get(run.rollout.name), "from_setup"):
            given = run.model
            model = load_causal_lm(
                str(given.path),
                dtype=given.dtype_on(setup.placement.device),
                device=setup.placement.device,
                trust_remote_code=given.trust_remote_code,
            ).eval()
            check_vocabulary(bundle.tokenizer, model)
        longest = run.rollout.max_model_len
        if longest is None:
            longest = run.rollout.prompt_length + run.rollout.response_length
            longest = longest if model is None else longest_context(model.config.to_dict()) or longest
        # Prompt and response may each fill the context: the length limits of training do not apply here.
        rollout = replace(run.rollout, prompt_length=longest, response_length=longest, max_model_len=longest)
        self._context = AgentContext(
            config=user_config(run),
            options=rollout,
            tokenizer=bundle.tokenizer,
            chat=bundle.chat,
            parser=ToolParser.get_tool_parser(rollout.multi_turn.format, bundle.tokenizer),
            processor=bundle.processor,
            images=bundle.images,
        )
        policy = replace(run.actor_rollout_ref, rollout=rollout)
        served = replace(run, actor_rollout_ref=policy, trainer=replace(run.trainer, deterministic=False))
        self._engine = build_engine(served, model, bundle.tokenizer, placement=setup.placement)
        self._rules = SessionRules(
            own_sampling=True,
            max_n=options.max_choices,
            max_turns=options.max_turns,
            request_seconds=rollout.trajectory_timeout,
            max_image_mb=options.max_image_mb,
        )
        self._record = None if options.record is None else JsonLines(options.record)
        self._numbers = itertools.count()
        self._clients: dict[str, TrajectoryClient] = {}
        self.store = SessionStore(
            max_sessions=options.max_sessions,
            idle_seconds=options.idle_seconds,
            make=self._open_session,
            on_end=self._end_session,
        )

    def _open_session(self, name: str) -> GatewaySession:
        number, options = next(self._numbers), self._context.options
        request_id = f"{name}/{number}"
        temperature = options.temperature if options.do_sample else 0.0
        sampling = Sampling(temperature, options.top_p, options.top_k, options.seed)
        params = SamplingParams.of(sampling.params(number, options.response_length, self._context.chat.stop_token_ids))
        self._engine.open([request_id])
        client = self._clients[request_id] = TrajectoryClient(self._engine, request_id)
        return GatewaySession(name, client, self._context, params, self._rules)

    def _end_session(self, session: GatewaySession) -> None:
        client = self._clients.pop(session.request_id, None)
        if client is None:  # already ended
            return
        client.end()
        self._engine.close(session.request_id)
        if self._record is not None and session.tree.turns:
            try:
                self._record.append(self.record_of(session))
            except EtudeError as error:
                logger.error("session %s is lost: %s", session.name, one_line(error))

    def record_of(self, session: GatewaySession) -> dict[str, Any]:
        """Returns the session's rollout as a dump record."""
        *earlier, main = session.trajectories()
        decode = self._context.tokenizer.decode
        return dict(
            rollout_record(
                main,
                {"uid": session.name},
                step=0,
                score=main.rewards.total() if main.rewards.given else None,  # nobody gave one: no reward of 0
                earlier=[sequence_record(sequence, **decode_texts(sequence, decode)) for sequence in earlier],
                **decode_texts(main, decode),
            )
        )
