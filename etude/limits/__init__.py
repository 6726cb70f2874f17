"""Concurrency and rate limits, within a process or across a Ray cluster, with one interface."""

from etude.limits.cluster import ClusterLimiter, cluster_limiter, open_limiter, require_ray
from etude.limits.local import ConcurrencyLimit, Limit, Limiter, LocalLimiter, Permit, RateLimit, local_limiter
from etude.limits.pool import ExecutionPool, ExecutionWorker, PoolMode, TokenBucketWorker, init_execution_pool

__all__ = [
    "ClusterLimiter",
    "ConcurrencyLimit",
    "ExecutionPool",
    "ExecutionWorker",
    "Limit",
    "Limiter",
    "LocalLimiter",
    "Permit",
    "PoolMode",
    "RateLimit",
    "TokenBucketWorker",
    "cluster_limiter",
    "init_execution_pool",
    "local_limiter",
    "open_limiter",
    "require_ray",
]
