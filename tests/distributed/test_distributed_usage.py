"""CPU time over processes: children count while they live and after they ended, and nobody counts twice."""

import subprocess
import sys

import torch

from etude.distributed.usage import Usage, join_usage, measure_usage

BURN = "import time\nwhile time.process_time() < 0.5: pass\nprint('done', flush=True)\ninput()"


def test_a_child_counts_while_it_lives_and_after_it_ended():
    before = measure_usage().total
    with subprocess.Popen(
        [sys.executable, "-c", BURN], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as child:
        assert child.stdout.readline() == "done\n"
        living = measure_usage()
        assert any(f":{child.pid}:" in key for key in living.cpu_seconds)
        child.communicate("\n", timeout=60)
    ended = measure_usage()
    assert not any(f":{child.pid}:" in key for key in ended.cpu_seconds)
    assert living.total - before >= 0.4
    assert ended.total >= living.total - 0.05  # clock ticks
    assert measure_usage(torch.device("cpu")).gpus == frozenset()


def test_a_process_that_two_workers_report_counts_once():
    first = Usage({"a:1": 2.0, "a:2": 1.0}, frozenset({"a::0"}))
    second = Usage({"a:1": 2.5, "b:1": 4.0}, frozenset({"a::0", "b::0"}))
    both = join_usage([first, second])
    assert (both.total, len(both.gpus)) == (7.5, 2)
