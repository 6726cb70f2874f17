"""What a serving engine is built from, and what can be said of it before any model is loaded.

An engine class registered in `ENGINES` that has `from_setup` is built by `from_setup(EngineSetup(…))`; its attribute
`servers` says whether it needs addresses: "required", or "optional" where it can also run in this process.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from etude.errors import ConfigError
from etude.inference.http import HttpServer, server_url
from etude.inference.types import ENGINES

KEY = "actor_rollout_ref.rollout"


@dataclass(frozen=True)
class EngineSetup:
    """The rollout section as a serving engine sees it; fields bear the names of its keys.

    `model_path` is the folder or hub name that the trainer loads too, `max_model_len` the longest context in tokens,
    times are seconds. `engine_kwargs` are those of this engine alone.
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
    server_model: str | None = None
    server_api_key_env: str | None = None
    server_timeout: float = 300.0
    weight_sync_timeout: float = 600.0
    engine_kwargs: Mapping[str, Any] = field(default_factory=dict)

    def servers(self) -> list[HttpServer]:
        """One a configured address, the key from the environment among its headers."""
        key = api_key(self.server_api_key_env)
        urls = [server_url(url, f"{KEY}.server_urls") for url in self.server_urls]
        return [HttpServer(url, timeout=self.server_timeout, api_key=key) for url in urls]


def api_key(variable: str | None) -> str | None:
    """The value of an environment variable; None without a name.

    Raises:
        ConfigError: it is not set.
    """
    if variable is None:
        return None
    if not os.environ.get(variable):
        raise ConfigError(f"{KEY}.server_api_key_env: the environment variable {variable} is not set")
    return os.environ[variable]


def check_serving(
    name: str, server_urls: Sequence[str], server_api_key_env: str | None, engine_kwargs: Mapping[str, Any]
) -> None:
    """Refuses a rollout section that cannot work with the engine `name`, which is registered.

    Raises:
        ConfigError: names the key.
        MissingExtraError: the engine would run in this process and its package is not installed.
    """
    engine = ENGINES.get(name)
    servers = getattr(engine, "servers", "none")
    if server_urls and servers == "none":
        raise ConfigError(f"{KEY}.server_urls is set, but the engine '{name}' runs in this process: leave it empty")
    if not server_urls and servers == "required":
        raise ConfigError(f"{KEY}.name={name} needs {KEY}.server_urls, e.g. [http://127.0.0.1:8000]")
    urls = [server_url(url, f"{KEY}.server_urls") for url in server_urls]
    if len(set(urls)) < len(urls):
        raise ConfigError(f"{KEY}.server_urls names an address twice")
    api_key(server_api_key_env)
    for other, given in engine_kwargs.items():
        if given and other not in ENGINES.names():
            raise ConfigError(f"{KEY}.engine_kwargs: no engine '{other}' (available: {', '.join(ENGINES.names())})")
    given = engine_kwargs.get(name) or {}
    if given and not hasattr(engine, "from_setup"):
        raise ConfigError(
            f"{KEY}.engine_kwargs.{name} is set, but the engine '{name}' takes none: see the rollout's keys"
        )
    if given and (server_urls or servers == "required"):
        raise ConfigError(
            f"{KEY}.engine_kwargs.{name} is set, but nothing is started with it: give these options to the server"
        )
    if not server_urls and servers == "optional":
        engine.check_installed(given)


def evaluates_only(name: str) -> bool:
    """Whether the engine `name` samples from a model of its own, gives no log-probs and takes no weights."""
    return bool(getattr(ENGINES.get(name), "evaluation_only", False))


def check_trainable(name: str) -> None:
    """Refuses to train with an engine that gives no ids and log-probs.

    Raises:
        ConfigError: names the engine.
    """
    if evaluates_only(name):
        raise ConfigError(
            f"{KEY}.name={name} is for `etude eval` only: such a server gives text, and training needs the sampled ids "
            "with their log-probs; use native, vllm or sglang"
        )


def check_takes_images(name: str) -> None:
    """Refuses the engine `name` for a vision-language model where it takes text only.

    Such an engine does not know that placeholders are never sampled: one that it samples is an image that is not there,
    and its log-probs are those of a distribution with them, also where no image is shown.

    Raises:
        ConfigError: names the engine.
    """
    if getattr(ENGINES.get(name), "text_only", False):
        raise ConfigError(
            f"{KEY}.name={name} takes text only, and may sample the placeholders of images: the model is a "
            f"vision-language model, which needs {KEY}.name=native"
        )
