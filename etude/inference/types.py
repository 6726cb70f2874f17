"""The `Engine` protocol, sampling parameters and outputs.

Invariant: `token_ids` are exactly the sampled ids, `log_probs[i]` is the natural log of the probability with which
`token_ids[i]` was sampled (after a grammar, temperature, top-k and top-p), and `weight_versions[i]` is the version of the
weights that sampled it. Greedy decoding samples from a point mass, so its log-probs are 0.

Engines track *trajectories* as well as requests: `open` announces the trajectories of a batch in row order, and `close`
says that one will send no more requests. Engines with a KV cache keep it between a trajectory's turns; the deterministic
mode needs to know which trajectories to wait for.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any, Literal, Protocol

from etude.errors import ConfigError, GrammarError
from etude.metrics import Metrics
from etude.registry import Registry, did_you_mean
from etude.trajectory import Kept, RoutedExperts

MOST_GRAMMAR = 1 << 17
"""Maximum number of characters of a grammar."""


@dataclass(frozen=True)
class Grammar:
    """The language that a turn is sampled from: a JSON schema, a regular expression (Rust's syntax), or a grammar in
    llguidance's dialect of Lark, as text. The token that ends the turn may follow wherever the text is complete.

    Raises:
        GrammarError: the text is too long.
    """

    kind: Literal["json_schema", "regex", "lark"]
    text: str

    def __post_init__(self) -> None:
        if len(self.text) > MOST_GRAMMAR:
            raise GrammarError(f"a grammar may have {MOST_GRAMMAR} characters, this one has {len(self.text)}")


@dataclass(frozen=True)
class SamplingParams:
    """Sampling parameters. `temperature` 0 is greedy; `top_k` -1 and `top_p` 1.0 are off; `seed` fixes every draw.

    A request ends with the first sampled token that is in `stop_token_ids`, or that completes one of the stop strings
    `stop`; both are part of the output. A `grammar` leaves only tokens that can still lead to a text of its language, and is
    applied first; a request with one and without `stop_token_ids` ends with the tokenizer's eos token. With `top_logprobs`,
    `TokenOutput.kept_ids` also have that many of the most probable ids and their log-probs (`Head`), of engines whose class
    sets `returns_heads`.
    """

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    max_tokens: int = 512
    stop_token_ids: tuple[int, ...] = ()
    seed: int = 0
    stop: tuple[str, ...] = ()
    grammar: Grammar | None = None
    top_logprobs: int = 0

    def __post_init__(self) -> None:
        if self.temperature < 0 or not 0 < self.top_p <= 1 or self.top_k == 0 or self.max_tokens < 1:
            raise ConfigError(
                f"sampling needs temperature >= 0, 0 < top_p <= 1, top_k != 0 and max_tokens >= 1, got "
                f"{self.temperature}, {self.top_p}, {self.top_k}, {self.max_tokens}"
            )
        if self.stop and not all(isinstance(text, str) and text for text in self.stop):
            raise ConfigError(f"sampling: stop must be texts that are not empty, not {self.stop!r:.80}")

    def seeded(self, seed: int) -> SamplingParams:
        """Returns a copy with another seed."""
        return replace(self, seed=seed)

    def within(self, tokens: int) -> SamplingParams:
        """Returns a copy whose `max_tokens` is at most `tokens` (at least 1)."""
        return self if self.max_tokens <= tokens else replace(self, max_tokens=tokens)

    @classmethod
    def of(cls, params: SamplingParams | Mapping[str, Any]) -> SamplingParams:
        """Converts a mapping with the same names; returns an instance unchanged.

        Raises:
            ConfigError: the mapping has a name that is not a sampling parameter.
        """
        if isinstance(params, SamplingParams):
            return params
        if not params.keys() <= _SAMPLING:
            name = next(name for name in params if name not in _SAMPLING)
            raise ConfigError(f"unknown sampling parameter '{name}'{did_you_mean(name, _SAMPLING)}")
        stop = params.get("stop") or ()
        texts = (stop,) if isinstance(stop, str) else tuple(stop)
        return cls(**{**params, "stop_token_ids": tuple(params.get("stop_token_ids", ())), "stop": texts})


_SAMPLING = frozenset(f.name for f in fields(SamplingParams))


@dataclass(frozen=True)
class TokenOutput:
    """One request's result. `stop_reason` is "stop" (a stop id was sampled, or a stop string completed), "length" or
    "aborted". `kept_ids[i]` are the ids that a grammar, top-k and top-p left when `token_ids[i]` was sampled, None if all
    are off. Only engines whose class sets `returns_kept_ids` return them, and only these can train with one of them on."""

    token_ids: list[int]
    log_probs: list[float]
    stop_reason: str
    weight_versions: list[int] = field(default_factory=list)
    num_preempted: int | None = None  # read by verl's loops; no engine here sets it
    routed_experts: RoutedExperts | None = None  # of the context, prompt included, except its last tokens
    extra_fields: dict[str, Any] = field(default_factory=dict)
    kept_ids: list[Kept | None] | None = None


class Engine(Protocol):
    """Turns prompt ids into sampled ids."""

    async def generate(
        self,
        request_id: str,
        prompt_ids: Sequence[int],
        sampling_params: SamplingParams | Mapping[str, Any],
        *,
        images: Sequence[Any] | None = None,
    ) -> TokenOutput:
        """Samples a continuation of `prompt_ids`.

        Args:
            images: all images of the context so far, as `etude.schemas.ImageInput`s in the order of their placeholders;
                `prompt_ids` have one placeholder per token of an image.

        Raises:
            EngineError: the engine failed; the trajectory may be retried.
            ConfigError: the engine, or its model, does not support images.
        """
        ...

    def open(self, request_ids: Sequence[str]) -> None:
        """Announces trajectories, in row order."""
        ...

    def close(self, request_id: str) -> None:
        """Ends a trajectory: it will send no more requests, and its cache may be freed."""
        ...

    async def abort(self, request_id: str) -> None:
        """Aborts a request: its `generate` returns the tokens sampled so far, with stop reason "aborted"."""
        ...

    async def pause(self) -> None:
        """Stops generation between two tokens; requests in flight stay."""
        ...

    async def resume(self) -> None:
        """Resumes after `pause`."""
        ...

    async def update_weights(self, source: Any, version: int) -> None:
        """Loads weights from `source` (None: they are shared, and were changed in place) as version `version`."""
        ...

    def metrics(self) -> Metrics:
        """Returns the metrics since the last call: tokens sampled and prefilled, steps, occupancy. Bare numbers are sums."""
        ...


ENGINES: Registry[Any] = Registry("inference engine")
