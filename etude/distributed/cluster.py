"""`connect`: this process's connection to a Ray cluster, which it starts itself where none is named.

Invariant: what was started here ends here; a cluster or connection that was there before stays as it is.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from typing import Any

from etude.errors import ConfigError, one_line
from etude.limits.cluster import require_ray


def connect(address: str | None, init_kwargs: Mapping[str, Any], min_cpus: int) -> Callable[[], None]:
    """Connects to the cluster at `address`, or that of RAY_ADDRESS, or to one started here with at least `min_cpus` CPUs;
    returns what ends that. A process that is connected already stays so.

    Raises:
        MissingExtraError: Ray is not installed.
        ConfigError: no cluster answers at the address, or Ray refuses an argument.
    """
    require_ray("trainer.backend=ray")
    import ray

    if ray.is_initialized():
        return lambda: None
    address = address or os.environ.get("RAY_ADDRESS") or "local"
    given = {"log_to_driver": False, "logging_level": "ERROR", **init_kwargs, "address": address}
    if address == "local":
        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")  # nothing is sent anywhere
        cores = os.cpu_count() or 1
        given = {"include_dashboard": False, "num_cpus": max(cores, min_cpus), **given}
    elif address.startswith("ray://"):
        raise ConfigError(f"ray.address={address}: a Ray client cannot drive a run; start it on a node of the cluster")
    try:
        ray.init(**given)
    except (ConnectionError, ValueError, TypeError, RuntimeError) as error:
        what = "a cluster cannot be started here" if address == "local" else f"ray.address={address}"
        raise ConfigError(f"{what}: {one_line(error)}") from error
    return ray.shutdown


def has_gpus() -> bool:
    """Whether the connected cluster has any."""
    import ray

    return bool(ray.cluster_resources().get("GPU"))
