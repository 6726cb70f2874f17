"""`EngineSetup`, from which serving engines are built, and checks that need no model to be loaded.

An engine class registered in `ENGINES` that has `from_setup` is built by `from_setup(EngineSetup(…))`; its attribute
`servers` says whether it needs addresses: "required", or "optional" if it can also run in this process.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from etude.errors import ConfigError, raise_faults
from etude.inference.http import HttpServer
from etude.inference.types import ENGINES
from etude.options import RolloutOptions
from etude.options.rollout import EngineKind
from etude.options.serving import KEY, TEXT_ONLY, server_url, serving_faults


@dataclass(frozen=True)
class EngineSetup:
    """The rollout section as a serving engine sees it; fields are named after its keys.

    `model_path` is the folder or hub name that the trainer also loads, `max_model_len` the longest context in tokens;
    times are in seconds. `engine_kwargs` are those of this engine only. The engine belongs to rollout worker `rank` of
    `ranks`. `shares_gpu`: with the trainer. `keeps_ids`: training restricts sampling to the top k, so that the engine must
    return the ids that it kept.
    """

    model_path: str
    tokenizer: Any
    max_model_len: int
    dtype: str = "float32"
    trust_remote_code: bool = False
    max_num_seqs: int = 256
    max_num_batched_tokens: int = 8192
    seed: int = 0
    server_urls: Sequence[str] = ()
    server_command: Sequence[str] = ()
    rank: int = 0
    ranks: int = 1
    server_model: str | None = None
    server_api_key_env: str | None = None
    server_timeout: float = 300.0
    weight_sync_timeout: float = 600.0
    engine_kwargs: Mapping[str, Any] = field(default_factory=dict)
    shares_gpu: bool = False
    keeps_ids: bool = False

    def own_urls(self) -> Sequence[str]:
        """Returns this rank's share of the configured addresses, so that each server gets weights from one rank; all of
        them if there are fewer addresses than ranks."""
        urls = self.server_urls
        return urls if len(urls) < self.ranks else urls[self.rank :: self.ranks]

    def servers(self, urls: Sequence[str] | None = None) -> list[HttpServer]:
        """Returns an `HttpServer` per address (None: the configured ones), with the API key from the environment."""
        key = api_key(self.server_api_key_env)
        urls = [server_url(url) for url in (self.server_urls if urls is None else urls)]
        return [HttpServer(url, timeout=self.server_timeout, api_key=key) for url in urls]


def api_key(variable: str | None) -> str | None:
    """Returns the API key from the environment variable `variable`; None if no variable is given.

    Raises:
        ConfigError: the variable is not set.
    """
    if variable is None:
        return None
    if not os.environ.get(variable):
        raise ConfigError(f"{KEY}.server_api_key_env: the environment variable {variable} is not set")
    return os.environ[variable]


def kind_of(name: str) -> EngineKind:
    """Returns the kind of the registered engine `name`."""
    engine = ENGINES.get(name)
    return EngineKind(getattr(engine, "servers", "none"), hasattr(engine, "from_setup"), evaluates_only(name))


def check_serving(rollout: RolloutOptions) -> None:
    """Rejects a rollout section that cannot work with its engine, which must be registered.

    Raises:
        ConfigError: a setting is invalid for the engine; names the key.
        MissingExtraError: the engine would run in this process and its package is not installed.
    """
    name, kind = rollout.name, kind_of(rollout.name)
    raise_faults(fault.at(fault.key) for fault in serving_faults(rollout, kind, ENGINES.names()))
    api_key(rollout.server_api_key_env)
    if not rollout.has_servers and kind.servers == "optional":
        ENGINES.get(name).check_installed(rollout.engine_kwargs.get(name) or {})


def evaluates_only(name: str) -> bool:
    """Whether the engine `name` samples from its own model, returns no log-probs and takes no weights."""
    return bool(getattr(ENGINES.get(name), "evaluation_only", False))


def check_trainable(name: str) -> None:
    """Rejects engines that cannot be trained with: those for evaluation only.

    Raises:
        ConfigError: names the engine.
    """
    if evaluates_only(name):
        raise ConfigError(f"{KEY}.name={name} {TEXT_ONLY[0]}", key=f"{KEY}.name", fix=TEXT_ONLY[1])


def check_returns_kept_ids(rollout: RolloutOptions, heads: int = 0) -> None:
    """Rejects training with top-k or top-p on an engine that does not return the ids they kept: the trainer could not
    renormalise over these ids, and its log-probs would be of another distribution. vLLM and SGLang return them for a finite
    top-k only, and vLLM then for every request. With `heads`, also an engine that does not return the `Head`s that score
    centering needs.

    Raises:
        ConfigError: names the key.
    """
    on = "top_p" if rollout.top_p < 1 else "top_k" if rollout.top_k > 0 else None
    engine = ENGINES.get(rollout.name)
    if on == "top_p" and rollout.top_k <= 0 and getattr(engine, "kept_ids_need_top_k", False):
        raise ConfigError(
            f"{KEY}.top_p={rollout.top_p}: {KEY}.name={rollout.name} returns the tokens that it kept, over which the "
            "trainer renormalises, only together with top_k",
            key=f"{KEY}.top_k",
            fix=f"set {KEY}.top_k, too (512 rarely cuts off anything that top_p left)",
        )
    val = rollout.val_kwargs
    unrestricted = val.do_sample and val.temperature > 0 and val.top_k <= 0
    if on and unrestricted and getattr(engine, "keeps_ids_of_all", False):
        raise ConfigError(
            f"{KEY}.{on}={getattr(rollout, on)}: {KEY}.name={rollout.name} then returns the tokens that it kept of every "
            f"request, and validation keeps all ({KEY}.val_kwargs.top_k={val.top_k})",
            key=f"{KEY}.val_kwargs.top_k",
            fix=f"set {KEY}.val_kwargs.top_k, or val_kwargs.do_sample=false",
        )
    if heads and not getattr(engine, "returns_heads", False):
        raise ConfigError(
            f"algorithm.rollout_correction.score_centering_topk={heads}: {KEY}.name={rollout.name} does not return the "
            "most probable tokens of what it sampled from",
            key="algorithm.rollout_correction.score_centering_topk",
            fix=f"set it to 0, or {KEY}.name=native",
        )
    if on and not getattr(engine, "returns_kept_ids", False):
        raise ConfigError(
            f"{KEY}.{on}={getattr(rollout, on)}: {KEY}.name={rollout.name} does not return the tokens that it kept, and the "
            "trainer's log-probs would be of another distribution",
            fix="set top_p=1 and top_k=-1, or name=native",
        )


def check_takes_images(name: str) -> None:
    """Rejects the engine `name` for a vision-language model if it is text-only.

    Such an engine does not know that image placeholders must not be sampled: one that it samples has no image, and even
    without images its log-probs are of a distribution that includes the placeholders.

    Raises:
        ConfigError: names the engine.
    """
    if getattr(ENGINES.get(name), "text_only", False):
        raise ConfigError(
            f"{KEY}.name={name} takes text only, and may sample the placeholders of images: the model is a "
            f"vision-language model, which needs {KEY}.name=native"
        )
