"""CPU time over processes: children count while they live and after they ended, and nobody counts twice."""

import ctypes
import math
import platform
import shutil
import subprocess
import sys

import pytest
import torch

from etude.distributed.usage import Usage, join_usage, measure_usage, read_energy

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


def test_energy_is_read_where_there_are_counters_and_absent_elsewhere(tmp_path):
    assert read_energy(powercap=tmp_path) == {}
    for zone, name, used in [
        ("intel-rapl:0", "package-0", 3_500_000),
        ("intel-rapl:0:0", "core", 1_000_000),  # part of the package
        ("intel-rapl:0:1", "dram", 500_000),
        ("intel-rapl:1", "psys", 9_000_000),  # all of it
    ]:
        folder = tmp_path / zone
        folder.mkdir()
        for file, text in {"name": name, "energy_uj": used, "max_energy_range_uj": 10_000_000}.items():
            (folder / file).write_text(f"{text}\n")
    (tmp_path / "intel-rapl:2").mkdir()
    now = read_energy(powercap=tmp_path)
    assert sorted(now.values()) == [(0.5, 10.0), (3.5, 10.0)]
    one, zero = (f"{platform.node()}:intel-rapl:0{each}" for each in ("", ":1"))
    before = Usage({}, energy={one: (9.0, 10.0), zero: (0.25, 10.0), "gone": (1.0, 1.0)})
    assert join_usage([Usage({}, energy=now), Usage({}, energy=now)]).joules_since(before) == 4.75  # one started again
    assert Usage({}, energy=now).joules_since(Usage({})) is None


@pytest.mark.skipif(torch.cuda.is_available() or not shutil.which("cc"), reason="needs a C compiler, and no real NVML")
def test_a_gpus_energy_is_nvmls(tmp_path):
    library = tmp_path / "libnvidia-ml.so.1"
    subprocess.run(
        ["cc", "-shared", "-fPIC", f"-Wl,-soname,{library.name}", "-x", "c", "-", "-o", library],
        input="""
            #include <string.h>
            int nvmlInit_v2(void) { return 0; }
            int nvmlDeviceGetHandleByUUID(const char *uuid, void **handle)
              { *handle = (void *)(1L << 40); return strcmp(uuid, "GPU-00-11") ? 6 : 0; }
            int nvmlDeviceGetTotalEnergyConsumption(void *handle, unsigned long long *mj)
              { *mj = 5000000000ULL; return handle == (void *)(1L << 40) ? 0 : 1; }
        """,
        text=True,
        check=True,
    )
    ctypes.CDLL(library)  # found by its name from here on
    powercap = tmp_path / "none"
    assert read_energy("00-11", powercap) == {f"{platform.node()}:00-11": (5e6, math.inf)}
    assert read_energy("other", powercap) == {}
