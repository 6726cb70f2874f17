"""Which settings of `rollout` go with which engine: known from the values alone, before an engine is imported."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from urllib.parse import urlsplit

from etude.errors import ConfigError
from etude.options.rollout import EngineKind, RolloutOptions

KEY = "actor_rollout_ref.rollout"
TEXT_ONLY = (
    "is for `etude eval` only: such a server gives text, and training needs the sampled ids with their log-probs",
    "use native, vllm or sglang",
)
"""What is wrong with training on such an engine, and the fix."""


def serving_faults(rollout: RolloutOptions, kind: EngineKind, engines: Collection[str]) -> Iterator[ConfigError]:
    """What does not go with its engine, which is of `kind`: of `server_urls`, `server_command` and `engine_kwargs`, each
    with its key. `engines` are the names of all."""
    name, urls, command, kwargs = rollout.name, rollout.server_urls, rollout.server_command, rollout.engine_kwargs
    if command and (urls or kind.text_only or kind.servers == "none"):
        other = f"{KEY}.server_urls has those that run" if urls else f"the engine '{name}' takes weights from no server"
        yield ConfigError(f"starts a server, and {other}", key=f"{KEY}.server_command", fix="leave it empty")
    if urls and kind.servers == "none":
        why = f"the engine '{name}' runs in this process"
        yield ConfigError(why, key=f"{KEY}.server_urls", fix="leave it empty")
    elif not rollout.has_servers and kind.servers == "required":
        yield ConfigError(f"needs {KEY}.server_urls, e.g. [http://127.0.0.1:8000]", key=f"{KEY}.name")
    else:
        yield from _address_faults(urls)
    for other in kwargs:
        if kwargs[other] and other not in engines:
            why = f"no engine '{other}' (available: {', '.join(sorted(engines))})"
            yield ConfigError(why, key=f"{KEY}.engine_kwargs")
    if kwargs.get(name) and not kind.takes_kwargs:
        why = f"the engine '{name}' takes none: see the rollout's keys"
        yield ConfigError(why, key=f"{KEY}.engine_kwargs")
    elif kwargs.get(name) and (rollout.has_servers or kind.servers == "required"):
        why = f"nothing is started with those of {name}"
        yield ConfigError(why, key=f"{KEY}.engine_kwargs", fix="give these options to the server")
    words = [word.partition("=")[0].strip("-").replace("-", "_") for word in command]
    for key, given in {"engine_kwargs": kwargs.get(name) or (), "server_command": words}.items():
        if name == "vllm" and "weight_transfer_config" in given:
            why = "asks for vLLM's own transfer of weights (NCCL, IPC), through which none would come"
            yield ConfigError(why, key=f"{KEY}.{key}", fix=f"leave it out: {KEY}.weight_transfer says how weights come")


def _address_faults(texts: Collection[str]) -> Iterator[ConfigError]:
    try:
        addresses = [server_url(text) for text in texts]
    except ConfigError as error:
        yield ConfigError(error.message, key=f"{KEY}.server_urls", fix=error.fix)
    else:
        if len(set(addresses)) < len(addresses):
            yield ConfigError("names an address twice", key=f"{KEY}.server_urls")


def server_url(text: str) -> str:
    """`text` as the base address of a server, without a final slash or `/v1`.

    Raises:
        ConfigError: it is no http address of a host.
    """
    try:
        parts = urlsplit(str(text).strip())
        usable = parts.scheme in ("http", "https") and bool(parts.hostname) and not (parts.query or parts.fragment)
        _ = parts.port  # raises ValueError where it is no number
    except ValueError:
        usable = False
    if not usable:
        raise ConfigError(f"'{text}' is no server address", fix="write it like http://127.0.0.1:8000")
    return parts.geturl().rstrip("/").removesuffix("/v1")
