"""The head of a cluster, which is watched while a process is connected."""

import socket
import subprocess
import sys

import pytest
from wait_stage import is_running, until

from etude.distributed import cluster
from etude.errors import WorkerLost


def test_a_head_that_does_not_answer_any_more_is_lost(monkeypatch):
    monkeypatch.setattr(cluster, "_HEAD_SECONDS", 0.2)
    monkeypatch.setattr(cluster, "_LOOK_SECONDS", 0.02)
    with socket.create_server(("127.0.0.1", 0)) as head:
        address = "{}:{}".format(*head.getsockname())
        watch = cluster._HeadWatch(address)
        monkeypatch.setattr(cluster, "_watch", watch)
        for _ in range(2):
            head.accept()[0].close()
        cluster.check_head()
    until(lambda: watch.lost, "the head is gone")
    with pytest.raises(WorkerLost, match=f"the cluster's head at {address} does not answer"):
        cluster.check_head()
    watch.close()


def test_ray_that_does_not_start_is_a_loss_and_not_a_bare_exception(monkeypatch):
    """So that a restart tries again, and a first start is one line."""
    ray = pytest.importorskip("ray")

    def times_out(**given):
        raise Exception("The current node timed out during startup.")

    monkeypatch.setattr(ray, "is_initialized", lambda: False)
    monkeypatch.setattr(ray, "init", times_out)
    with pytest.raises(WorkerLost, match="timed out during startup"):
        cluster.connect("local", {}, 1)


PARENT = """
import subprocess, sys
child = subprocess.Popen([sys.executable, "-c", sys.argv[1]])
print(child.pid, flush=True)
child.wait()
"""
CHILD = """
import threading, time
from etude.distributed.rank_process import exit_with_parent
threading.Thread(target=exit_with_parent, args=(0.1,), daemon=True).start()
print("ready", flush=True)
time.sleep(600)
"""


def test_a_rank_ends_with_its_parent():
    with subprocess.Popen([sys.executable, "-c", PARENT, CHILD], stdout=subprocess.PIPE, text=True) as parent:
        child = int(parent.stdout.readline())
        assert parent.stdout.readline() == "ready\n"
        parent.kill()
        parent.wait()
        until(lambda: not is_running(child))
