"""The start-up probes notice each guarantee that does not hold. Their hostile programs never run outside a box."""

import asyncio
import os
import subprocess
import sys

import pytest

from etude.sandbox import RunResult, RunStatus, SandboxError, probe_programs, probes

CONFINED = {
    "user": 1000,
    "system_owner": 65534,
    "capabilities": 0,
    "no_new_privileges": 1,
    "filter": 2,
    "parent": 1,
    "host_name": "sandbox",
    "environment": ["PATH", "HOME"],
}

CONTAINED = {
    "readable": [],
    "written": [],
    "private": [True, True],
    "processes": 2,
    "signalled": False,
    "connected": [],
    "interfaces": ["lo"],
    "families": [],
    "calls": [],
    "forks": 14,
    "file_bytes": 1 << 20,
    "disk_bytes": 4 << 20,
    "open_files": 29,
}


def test_a_confined_and_contained_box_passes():
    probes.judge_look(CONFINED)
    probes.judge_attempts(CONTAINED, 0)


@pytest.mark.parametrize(
    "difference",
    [
        {"user": 0},
        {"system_owner": 1000},
        {"capabilities": 1 << 21},
        {"no_new_privileges": 0},
        {"filter": 0},
        {"parent": 4711},
        {"host_name": "server"},
        {"environment": ["PATH", "ETUDE_TEST_TOKEN"]},
    ],
    ids=lambda difference: next(iter(difference)),
)
def test_a_box_that_does_not_confine_is_noticed_by_looking(difference, monkeypatch):
    monkeypatch.setenv("ETUDE_TEST_TOKEN", "secret")
    with pytest.raises(probes.GuaranteeBroken, match="not kept here"):
        probes.judge_look({**CONFINED, **difference})


@pytest.mark.parametrize(
    "difference",
    [
        {"readable": ["/etc/shadow"]},
        {"written": ["/usr/x"]},
        {"private": [True, False]},
        {"processes": 90},
        {"signalled": True},
        {"connected": ["loopback"]},
        {"interfaces": ["lo", "eth0"]},
        {"families": ["vsock"]},
        {"calls": ["mount"]},
        {"forks": 200},
        {"file_bytes": 3 << 20},
        {"disk_bytes": 8 << 20},
        {"open_files": 1024},
    ],
    ids=lambda difference: next(iter(difference)),
)
def test_an_attempt_that_succeeds_is_noticed(difference):
    with pytest.raises(probes.GuaranteeBroken, match="not kept here"):
        probes.judge_attempts({**CONTAINED, **difference}, 0)


def test_a_listener_that_was_reached_is_noticed():
    with pytest.raises(probes.GuaranteeBroken, match="no network"):
        probes.judge_attempts(CONTAINED, 1)


@pytest.mark.parametrize(
    ("probe", "result"),
    [
        (probes._wall_time, RunResult(RunStatus.FINISHED, 0, "", "")),
        (probes._cpu_time, RunResult(RunStatus.FINISHED, 0, "", "")),
        (probes._cpu_time, RunResult(RunStatus.TIME_LIMIT, None, "", "", wall_seconds=30)),
        (probes._memory, RunResult(RunStatus.FINISHED, 0, "", "")),
        (probes._memory, RunResult(RunStatus.FINISHED, 1, "", "MemoryError")),
        (probes._output, RunResult(RunStatus.FINISHED, 0, "x" * 10**6, "")),
        (probes._output, RunResult(RunStatus.TIME_LIMIT, None, "x", "", stdout_truncated=True)),
        (probes._process_tree, RunResult(RunStatus.FINISHED, 1, "", "no")),
        (probes._next_run, RunResult(RunStatus.FINISHED, 0, "['/tmp']\n", "")),
    ],
)
def test_a_limit_that_does_not_hold_is_noticed(probe, result):
    async def run(request):
        return result

    with pytest.raises(probes.GuaranteeBroken):
        asyncio.run(probe(run))


def test_sockets_that_are_not_counted_are_noticed():
    async def run(request):
        if "socket.socket" in request.code.removeprefix(probe_programs.GUARD):
            return RunResult(RunStatus.TIME_LIMIT, None, "", "")
        return RunResult(RunStatus.MEMORY_LIMIT, 1, "", "MemoryError")

    with pytest.raises(probes.GuaranteeBroken, match="sockets' memory"):
        asyncio.run(probes._memory(run))


def test_a_daemon_that_survives_is_noticed(monkeypatch):
    async def run(request):
        return RunResult(RunStatus.FINISHED, 0, "left\n", "")

    monkeypatch.setattr(probes, "_processes_with", lambda marker: [4711])
    with pytest.raises(probes.GuaranteeBroken, match="process tree"):
        asyncio.run(probes._process_tree(run))


def test_what_a_killed_host_leaves_of_its_probes_is_removed():
    program = (
        "import os\nfrom etude.sandbox import probes\nwith probes._host() as h: print(h.file, flush=True); os._exit(9)"
    )
    left = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True).stdout.strip()
    assert os.path.exists(left)
    with probes._host() as host:
        assert os.path.exists(host.file)
        assert not os.path.exists(left)
    assert not os.path.exists(os.path.dirname(host.file))


def test_processes_are_found_by_their_command_line():
    pid = os.fork()
    if pid == 0:
        os.execvp("sleep", ["sleep", "633.75"])
    try:
        while probes._processes_with("633.75") != [pid]:
            pass
    finally:
        os.kill(pid, 9)
        os.waitpid(pid, 0)


def test_where_the_look_fails_no_attempt_is_made():
    """A jail that is none must not be attacked: the host would be."""
    programs = []

    async def run(request):
        programs.append(request.code)
        return RunResult(RunStatus.FINISHED, 0, '{"user": 0, "system_owner": 0}', "")

    with pytest.raises(probes.GuaranteeBroken, match="a user of its own"):
        asyncio.run(probes.prove(run))
    assert programs == [probe_programs.LOOK]


def test_a_box_that_runs_nothing_is_named():
    async def run(request):
        return RunResult(RunStatus.FINISHED, 1, "", "no interpreter")

    with pytest.raises(SandboxError, match="no interpreter"):
        asyncio.run(probes.prove(run))


def test_the_guard_refuses_to_run_outside():
    with pytest.raises(SystemExit, match="not inside a sandbox"):
        exec(probe_programs.GUARD, {})
