"""`open_limiter`: a limit by name, as wide as this process reaches: the Ray cluster it is connected to, else itself.

Invariant: one name means one limit, in a process as in a cluster; asking for it with another limit is an error.
"""

from __future__ import annotations

import threading
import weakref

from etude.errors import ConfigError
from etude.limits.cluster import cluster_limiter, is_connected
from etude.limits.limit import Limit
from etude.limits.limiter import Limiter
from etude.limits.local import LocalLimiter

_named: weakref.WeakValueDictionary[str, LocalLimiter] = weakref.WeakValueDictionary()
_lock = threading.Lock()


def local_limiter(name: str, limit: Limit) -> LocalLimiter:
    """The limiter `name` of this process, which lives as long as somebody has it.

    Raises:
        ConfigError: the name is taken by another limit.
    """
    with _lock:
        limiter = _named.get(name)
        if limiter is None:
            limiter = _named[name] = LocalLimiter(limit)
    if limiter.limit != limit:
        raise ConfigError(
            f"the limiter '{name}' allows {limiter.limit} already; {limit} is asked for: use one limit or two names"
        )
    return limiter


def open_limiter(name: str, limit: Limit) -> Limiter:
    """The limiter `name` of the Ray cluster that this process is connected to; without one, of this process.

    Raises:
        ConfigError: the name is taken by another limit.
        InfrastructureError: the limiter's actor did not come up.
    """
    return cluster_limiter(name, limit) if is_connected() else local_limiter(name, limit)
