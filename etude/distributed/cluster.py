"""`connect`: connects this process to a Ray cluster; starts a local one if no address is given.

Invariant: what was started here is shut down here; an existing cluster or connection is left alone. While connected, a
thread checks that the head node answers: Ray kills this process 60 s after the head has stopped answering.
"""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any

from etude.errors import ConfigError, WorkerLost, one_line
from etude.limits.cluster import require_ray

_HEAD_SECONDS, _LOOK_SECONDS, _CONNECT_SECONDS = 20.0, 2.0, 5.0


class _HeadWatch(threading.Thread):
    """Polls the head node at `address`; `lost` is the error message once it no longer accepts connections."""

    def __init__(self, address: str) -> None:
        super().__init__(name="etude-head", daemon=True)
        self.lost: str | None = None
        self._address, self._closed = address, threading.Event()
        self.start()

    def run(self) -> None:
        """Polls until `close`, or until the head is lost."""
        answered = time.monotonic()
        while not self._closed.wait(_LOOK_SECONDS) and self.lost is None:
            try:
                _try_connect(self._address)
                answered = time.monotonic()
            except OSError as error:
                if time.monotonic() - answered >= _HEAD_SECONDS:
                    self.lost = f"the cluster's head at {self._address} does not answer ({one_line(error)})"

    def close(self) -> None:
        self._closed.set()
        self.join()


def _try_connect(address: str) -> None:
    host, _, port = address.rpartition(":")
    socket.create_connection((host.strip("[]"), int(port)), timeout=_CONNECT_SECONDS).close()


_watch: _HeadWatch | None = None  # a process has at most one connection


def check_head() -> None:
    """Checks that the head node is not lost; any request to a lost head would block until Ray kills the process.

    Raises:
        WorkerLost: the head is lost.
    """
    if _watch is not None and _watch.lost is not None:
        raise WorkerLost(_watch.lost)


def connect(address: str | None, init_kwargs: Mapping[str, Any], min_cpus: int) -> Callable[[], None]:
    """Connects to the cluster at `address`, else at RAY_ADDRESS, else to a new local one with at least `min_cpus` CPUs.
    Returns the function that disconnects; an existing connection is reused and not closed.

    Raises:
        MissingExtraError: Ray is not installed.
        ConfigError: no cluster answers at the address, or Ray rejects an argument.
        WorkerLost: Ray did not start; it may the next time.
    """
    require_ray("trainer.backend=ray")
    import ray

    if ray.is_initialized():
        return _watch_head(lambda: None)
    address = address or os.environ.get("RAY_ADDRESS") or "local"
    given = {"log_to_driver": False, "logging_level": "ERROR", **init_kwargs, "address": address}
    if address == "local":
        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")  # no telemetry
        cores = os.cpu_count() or 1
        given = {"include_dashboard": False, "num_cpus": max(cores, min_cpus), **given}
    elif address.startswith("ray://"):
        raise ConfigError(f"ray.address={address}: a Ray client cannot drive a run; start it on a node of the cluster")
    try:
        if ":" in address:  # without a cluster there, `ray.init` would block for minutes
            _try_connect(address)
        ray.init(**given)
    except (OSError, ValueError, TypeError, RuntimeError) as error:
        what = "a cluster cannot be started here" if address == "local" else f"ray.address={address}"
        raise ConfigError(f"{what}: {one_line(error)}") from error
    except Exception as error:  # what Ray raises when a process of its own does not start in time
        raise WorkerLost(f"Ray does not start: {one_line(error)}") from error
    return _watch_head(ray.shutdown)


def _watch_head(end: Callable[[], object]) -> Callable[[], None]:
    global _watch
    import ray

    watch = _watch = _HeadWatch(ray.get_runtime_context().gcs_address)

    def close() -> None:
        global _watch
        watch.close()
        try:
            end()
        finally:
            _watch = None

    return close


def has_gpus() -> bool:
    import ray

    return bool(ray.cluster_resources().get("GPU"))
