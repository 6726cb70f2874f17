"""Execution pools without a cluster: threads and processes of this machine, under a limit of this process."""

import asyncio
import gc
import math
import os
import subprocess
import sys
import threading
import time

import pytest
from wait_stage import is_running, until

from etude.errors import ConfigError, InfrastructureError
from etude.limits import (
    Limit,
    PoolMode,
    TokenBucketWorker,
    cluster_limiter,
    init_execution_pool,
    local_limiter,
    open_limiter,
)

MODES = [PoolMode.ThreadMode, PoolMode.ProcessMode]


@pytest.mark.parametrize("mode", MODES)
async def test_results_and_errors_come_back(mode):
    with init_execution_pool(2, rate_limit=2, mode=mode, name=f"results {mode}") as pool:
        assert await pool.ping.remote()
        assert await asyncio.gather(*(pool.execute.remote(math.sqrt, i * i) for i in range(6))) == list(range(6))
        assert pool.execute.remote(divmod, 7, 2).result(60) == (3, 1)
        assert await pool.execute.remote(int, "ff", base=16) == 255
        with pytest.raises(ZeroDivisionError):
            await pool.execute.remote(divmod, 1, 0)
        assert await pool.execute.remote(divmod, 1, 1) == (1, 0), "the permit of the one that failed is back"


def test_threads_stay_within_the_limit():
    inside, most, lock = 0, 0, threading.Lock()

    def visit():
        nonlocal inside, most
        with lock:
            inside, most = inside + 1, max(most, inside + 1)
        time.sleep(0.002)
        with lock:
            inside -= 1

    with init_execution_pool(8, rate_limit=3, name="threads") as pool:
        for pending in [pool.execute.remote(visit) for _ in range(40)]:
            pending.result(60)
    assert most == 3
    most = 0
    with init_execution_pool(8, enable_global_rate_limit=False, rate_limit=1) as pool:
        for pending in [pool.execute.remote(visit) for _ in range(40)]:
            pending.result(60)
    assert most > 3


def test_processes_are_processes_and_one_that_dies_is_replaced():
    with init_execution_pool(1, rate_limit=1, mode=PoolMode.ProcessMode, name="deaths") as pool:
        first = pool.execute.remote(os.getpid).result(60)
        assert first != os.getpid()
        with pytest.raises(InfrastructureError, match="a process of the pool died"):
            pool.execute.remote(os._exit, 3).result(60)
        second = pool.execute.remote(os.getpid).result(60)
        assert second not in (first, os.getpid())
        assert local_limiter("deaths", Limit(max_concurrent=1)).held == 0
        pool.execute.remote(time.sleep, 100)
        time.sleep(0.2)
    until(lambda: not is_running(second), "closing kills what still runs")


@pytest.mark.parametrize("number", [0, -1, 1.5, True, "4"])
def test_a_number_of_workers_that_makes_no_sense(number):
    with pytest.raises(ConfigError, match="num_workers must be a whole number from 1"):
        init_execution_pool(number)


def test_pools_of_one_name_share_a_limit_and_may_not_disagree():
    with init_execution_pool(2, rate_limit=1, name="agree") as first:
        with pytest.raises(ConfigError, match="'agree' allows 1 at once already; 2 at once is asked for"):
            init_execution_pool(2, rate_limit=2, name="agree")
        with init_execution_pool(2, rate_limit=1, name="agree") as second:
            began = time.monotonic()
            for pending in (first.execute.remote(time.sleep, 0.2), second.execute.remote(time.sleep, 0.2)):
                pending.result(60)
            assert time.monotonic() - began >= 0.4


def test_a_name_is_free_again_when_nobody_has_it():
    limiter = local_limiter("passing", Limit(max_concurrent=1))
    assert open_limiter("passing", Limit(max_concurrent=1)) is limiter
    with pytest.raises(ConfigError):
        local_limiter("passing", Limit(max_concurrent=2))
    del limiter
    gc.collect()
    assert local_limiter("passing", Limit(max_concurrent=2)).limit.max_concurrent == 2


def test_permits_without_identity():
    bucket = TokenBucketWorker(2, name="plain")
    other = TokenBucketWorker(2, name="plain")
    bucket.acquire()
    other.acquire()
    assert (bucket.get_current_count(), other.get_current_count()) == (1, 1)
    with pytest.raises(TimeoutError):
        bucket.acquire(timeout=0.01)
    other.release()
    bucket.acquire(timeout=1)
    assert bucket.get_current_count() == 2
    bucket.release()
    bucket.release()
    with pytest.raises(RuntimeError, match="release without acquire"):
        bucket.release()


def test_a_cluster_is_asked_for_in_so_many_words():
    if "ray" in sys.modules and sys.modules["ray"].is_initialized():
        pytest.skip("this process is connected")
    with pytest.raises(ConfigError, match="the cluster-wide limiter 'x' needs a Ray cluster"):
        cluster_limiter("x", Limit(max_concurrent=1))


def test_importing_the_room_imports_neither_ray_nor_torch():
    program = "import sys, etude.limits; sys.exit(bool({'ray', 'torch', 'pydantic'} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0


def test_without_ray_the_pip_line_is_named():
    program = (
        "import sys; sys.modules['ray'] = None\n"
        "from etude.limits import Limit, cluster_limiter\n"
        "from etude.errors import MissingExtraError\n"
        "try: cluster_limiter('x', Limit(max_concurrent=1))\n"
        "except MissingExtraError as error: print(error)"
    )
    done = subprocess.run([sys.executable, "-c", program], check=True, capture_output=True, text=True)
    assert "pip install 'etude[ray]'" in done.stdout
