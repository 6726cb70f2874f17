"""The checks notice each guarantee that does not hold. Their hostile programs never run outside a sandbox."""

import asyncio
import json
import os
import subprocess
import sys
from types import SimpleNamespace

import pytest

from etude.sandbox import (
    Executor,
    Limits,
    RunResult,
    RunStatus,
    SandboxError,
    SandboxUnavailableError,
    check,
)


def answering(output, **fields):
    async def run(request):
        return RunResult(**{"status": RunStatus.FINISHED, "return_code": 0, "stdout": output, "stderr": "", **fields})

    return run


@pytest.mark.parametrize("expected", [check.CONFINED, check.CONTAINED], ids=["look", "attempts"])
def test_each_difference_is_noticed(expected):
    asyncio.run(check.report(answering(json.dumps(expected)), "", expected))
    for guarantee, value in expected.items():
        for other in (None, 4711, [] if value else ["more"], ["/etc/shadow"], not value):
            seen = json.dumps({**expected, guarantee: other})
            with pytest.raises(check.GuaranteeBroken, match=f"{guarantee}: not kept here"):
                asyncio.run(check.report(answering(seen), "", expected))


def test_a_container_that_keeps_less_reports_it(isolated_sandbox):
    """The attempts themselves: what is allowed more than they expect says so."""
    goals = {"paths": ["/usr"], "pid": 2, "port": 9, "abstract": "x", "limits": vars(check.SMALL)}
    wide = Limits(memory_mb=512, processes=64, file_size_mb=16, disk_mb=64, open_files=128)
    result = isolated_sandbox.run(check.GUARD + check.ATTEMPTS, args=[json.dumps(goals)], files={"a": b""}, limits=wide)
    seen = json.loads(result.stdout)
    different = {guarantee for guarantee, value in check.CONTAINED.items() if seen[guarantee] != value}
    assert different == {
        "no files of the host",
        "a private work directory and /tmp",
        "a PID namespace of its own",
        *("a limit of processes", "a limit of open files", "a limit of a file's size", "a limit of disk"),
    }


def test_a_variable_that_came_along_is_noticed(isolated_sandbox):
    run = isolated_sandbox.executor.run
    with pytest.raises(check.GuaranteeBroken, match="a scrubbed environment"):
        isolated_sandbox.do(check.report(run, check.LOOK, check.CONFINED, json.dumps(vars(check.SMALL)), "PATH"))


def test_limits_that_are_wider_than_asked_for_are_noticed(isolated_sandbox):
    wide = Limits(processes=64, file_size_mb=16, disk_mb=64, open_files=128)
    seen = json.loads(isolated_sandbox.run(check.LOOK, args=[json.dumps(vars(check.SMALL))], limits=wide).stdout)
    different = {guarantee for guarantee, value in check.CONFINED.items() if seen[guarantee] != value}
    assert different == {"a limit of processes", "a limit of open files", "a limit of a file's size", "a limit of disk"}


@pytest.mark.parametrize("guarantee", ["a filter of system calls", "a limit of all processes' memory"])
def test_a_mode_that_does_not_confine_is_refused_at_the_start(guarantee, monkeypatch, isolated_sandbox):
    if guarantee in check.CONFINED:
        monkeypatch.setitem(check.CONFINED, guarantee, "as it should be")
    else:
        monkeypatch.setitem(check.LIMITS, guarantee, ("print(1)", Limits(), check.LIMITS[guarantee][2]))
    with pytest.raises(SandboxUnavailableError, match=guarantee):
        asyncio.run(Executor.open(isolated_sandbox.executor.isolation))
    with pytest.raises(SandboxUnavailableError, match=guarantee):
        isolated_sandbox.do(isolated_sandbox.executor.check())


def test_a_listener_that_was_reached_is_noticed(isolated_sandbox, monkeypatch):
    """By what the host sees, whatever the programs report."""
    accept = SimpleNamespace(accept=lambda: [SimpleNamespace(close=lambda: None)])
    real = check._host

    @check.contextlib.contextmanager
    def reached():
        with real() as (goals, _):
            yield goals, (accept,)

    monkeypatch.setattr(check, "_host", reached)
    with pytest.raises(check.GuaranteeBroken, match="no network"):
        isolated_sandbox.do(check.check_isolation(isolated_sandbox.executor.run))


@pytest.mark.parametrize(
    ("guarantee", "fields"),
    [
        ("a limit of wall time", {}),
        ("a limit of CPU time", {}),
        ("a limit of CPU time", {"status": RunStatus.TIME_LIMIT, "wall_seconds": 30}),
        ("a limit of one process's memory", {}),
        ("a limit of all processes' memory", {"stderr": "MemoryError"}),
        ("a limit of sockets' memory", {"status": RunStatus.TIME_LIMIT}),
        ("bounded output", {}),
        ("bounded output", {"status": RunStatus.TIME_LIMIT, "stdout": "x", "stdout_truncated": True}),
    ],
)
def test_a_limit_that_does_not_hold_is_noticed(guarantee, fields):
    run = answering(**{"output": "x" * 10**6, **fields} if "stdout" not in fields else {"output": "", **fields})
    with pytest.raises(check.GuaranteeBroken, match=guarantee):
        asyncio.run(check.check_limit(run, guarantee))


def test_what_is_left_of_a_run_is_noticed(monkeypatch):
    with pytest.raises(check.GuaranteeBroken, match="fresh state"):
        asyncio.run(check.check_next_run(answering("['/tmp']\n")))
    with pytest.raises(check.GuaranteeBroken, match="process tree"):
        asyncio.run(check.check_process_tree(answering("", return_code=1, stderr="no")))
    monkeypatch.setattr(check, "processes_with", lambda marker: [4711])
    with pytest.raises(check.GuaranteeBroken, match="process tree"):
        asyncio.run(check.check_process_tree(answering("left\n")))


def test_what_a_killed_host_leaves_of_its_probes_is_removed():
    program = "import os\nfrom etude.sandbox import check\nwith check._host() as (goals, _):"
    program += " print(goals['paths'][0], flush=True); os._exit(9)"
    left = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True).stdout.strip()
    assert os.path.exists(left)
    with check._host() as (goals, _):
        assert os.path.exists(goals["paths"][0])
        assert not os.path.exists(left)
    assert not os.path.exists(os.path.dirname(goals["paths"][0]))


def test_processes_are_found_by_their_command_line():
    pid = os.fork()
    if pid == 0:
        os.execvp("sleep", ["sleep", "633.75"])
    try:
        while check.processes_with("633.75") != [pid]:
            pass
    finally:
        os.kill(pid, 9)
        os.waitpid(pid, 0)


def test_where_the_look_fails_no_attempt_is_made():
    """A jail that is none must not be attacked: the host would be."""
    programs = []

    async def run(request):
        programs.append(request.code)
        return RunResult(RunStatus.FINISHED, 0, '{"a user of its own": [0, true]}', "")

    with pytest.raises(check.GuaranteeBroken, match="a user of its own"):
        asyncio.run(check.check_isolation(run))
    assert programs == [check.LOOK]


def test_a_container_that_runs_nothing_is_named():
    async def run(request):
        return RunResult(RunStatus.FINISHED, 1, "", "no interpreter")

    with pytest.raises(SandboxError, match="no interpreter"):
        asyncio.run(check.check_isolation(run))


def test_the_guard_refuses_to_run_outside():
    with pytest.raises(SystemExit, match="not inside a sandbox"):
        exec(check.GUARD, {})
