"""The head of a cluster, which is watched while a process is connected."""

import socket

import pytest
from wait_stage import until

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
