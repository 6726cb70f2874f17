"""Opening and closing executors: what is refused, what is left behind, what options do."""

import asyncio
import contextlib
import os
import resource
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import psutil
import pytest

from etude.sandbox import (
    Executor,
    ExecutorOptions,
    Isolation,
    RunRequest,
    SandboxError,
    SandboxUnavailableError,
    fork_server,
    jail,
)


def test_closing_leaves_nothing(tmp_path, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))  # closed to other users: a root host must look elsewhere
    folders = []
    make = tempfile.mkdtemp
    monkeypatch.setattr(
        "tempfile.mkdtemp", lambda *args, **kwargs: folders.append(make(*args, **kwargs)) or folders[-1]
    )

    async def use(mode):
        async with await Executor.open(mode, workers=2) as executor:
            await executor.run(RunRequest("print(1)"))
            await executor.session()
            pending = asyncio.ensure_future(executor.run(RunRequest("import time; time.sleep(60)")))
            await asyncio.sleep(0.1)
        with pytest.raises((asyncio.CancelledError, SandboxError)):
            await pending
        with pytest.raises(SandboxError, match="closed"):
            await executor.run(RunRequest("print(1)"))

    before = len(psutil.Process().children(recursive=True))
    mounts = Path("/proc/self/mountinfo").read_text()
    descriptors = len(os.listdir("/proc/self/fd"))
    for mode in (Isolation.AUTO, Isolation.NONE):
        asyncio.run(use(mode))
    assert len(psutil.Process().children(recursive=True)) == before
    assert Path("/proc/self/mountinfo").read_text() == mounts
    assert len(os.listdir("/proc/self/fd")) <= descriptors
    assert len(folders) >= 3
    assert not [folder for folder in folders if os.path.exists(folder)]


def test_without_any_isolation_it_refuses_and_says_what_to_install(monkeypatch):
    monkeypatch.setattr(jail, "command_line", lambda *_: ["/bin/false"])
    with pytest.raises(SandboxUnavailableError, match="apt install bubblewrap"):
        asyncio.run(Executor.open())


async def test_a_missing_bubblewrap_is_named(monkeypatch):
    monkeypatch.setattr(jail.shutil, "which", lambda name, path=None: None)
    with pytest.raises(SandboxUnavailableError, match=r"'bwrap' is not installed.*apt install bubblewrap"):
        await Executor.open("bubblewrap")
    async with await Executor.open() as executor:
        assert executor.isolation is Isolation.NAMESPACES


def test_a_bubblewrap_that_cannot_be_executed_is_named(monkeypatch):
    monkeypatch.setattr(jail, "command_line", lambda *_: ["/nowhere/bwrap"])
    with pytest.raises(SandboxUnavailableError, match="nowhere"):
        asyncio.run(Executor.open("bubblewrap"))


async def test_no_isolation_must_be_asked_for_and_warns(caplog):
    async with await Executor.open("none", workers=1) as executor:
        assert (await executor.run(RunRequest("print(1)"))).stdout == "1\n"
    assert "isolation is off" in caplog.text


async def test_a_jail_that_does_not_start_in_time(monkeypatch):
    monkeypatch.setattr(fork_server, "START_SECONDS", 0.2)
    monkeypatch.setattr(jail, "command_line", lambda *_: ["/bin/sleep", "60"])
    with pytest.raises(SandboxError, match="did not start within"):
        async with await Executor.open("none", workers=1) as executor:
            await executor.run(RunRequest("print(1)"))


async def test_containers_that_nobody_waits_for_any_more_leave_nothing():
    """Their requests are cancelled at every moment of the way into a container."""
    async with await Executor.open("none", workers=4) as executor:
        await executor.run(RunRequest("print(1)"))
        await asyncio.sleep(0.1)
        before = len(os.listdir("/proc/self/fd")), len(psutil.Process().children(recursive=True))
        for moment in range(40):
            task = asyncio.ensure_future(executor.run(RunRequest("import time\ntime.sleep(60)")))
            for _ in range(moment % 20):
                await asyncio.sleep(0)
            await asyncio.sleep(0.0005 * (moment // 20) * (moment % 20))
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
        for _ in range(1000):
            await asyncio.sleep(0.01)
            after = len(os.listdir("/proc/self/fd")), len(psutil.Process().children(recursive=True))
            if after == before:
                break
        assert after == before


async def test_a_stopped_fork_server_is_replaced(monkeypatch):
    async with await Executor.open(workers=1) as executor:
        monkeypatch.setattr(fork_server, "FORK_SECONDS", 1.0)
        stopped = executor._fork_server
        signal.pidfd_send_signal(stopped._pidfd, signal.SIGSTOP)
        assert (await executor.run(RunRequest("print(1)"))).stdout == "1\n"
        assert executor._fork_server is not stopped
        assert stopped._process.poll() is not None


def test_the_hosts_own_privileges_of_scheduling_are_not_inherited():
    async def run():
        async with await Executor.open(workers=1) as executor:
            code = """
import os
for attempt in (lambda: os.nice(-10), lambda: os.sched_setscheduler(0, os.SCHED_RR, os.sched_param(1))):
    try:
        attempt()
        print("BREACH")
    except PermissionError:
        print("refused")
"""
            return await executor.run(RunRequest(code))

    kinds = resource.RLIMIT_NICE, resource.RLIMIT_RTPRIO
    before = [resource.getrlimit(kind) for kind in kinds]
    try:
        try:
            for kind in kinds:
                resource.setrlimit(kind, (40, 40))
        except ValueError:
            pytest.skip("only who may raise limits can give itself some that a program must not inherit")
        assert asyncio.run(run()).stdout == "refused\nrefused\n"
    finally:
        for kind, limits in zip(kinds, before, strict=True):
            resource.setrlimit(kind, limits)


async def test_options_reach_the_programs():
    options = ExecutorOptions(environment={"MINE": "1"}, libraries=())
    async with await Executor.open(workers=1, options=options) as executor:
        code = "import os\nprint(os.environ['MINE'])\nimport numpy"
        result = await executor.run(RunRequest(code))
    assert result.stdout == "1\n"
    assert "No module named 'numpy'" in result.stderr


async def test_no_descriptors_left_is_the_sandboxs_failure_and_passes():
    async with await Executor.open("none", workers=1) as executor:
        assert (await executor.run(RunRequest("print(1)"))).stdout == "1\n"
        limits = resource.getrlimit(resource.RLIMIT_NOFILE)
        holes = [os.dup(0) for _ in range(64)]  # the limit is one of numbers, not of how many are open
        descriptors = len(os.listdir("/proc/self/fd"))
        for room in (1, 2, 3, 5, 7, 9):
            resource.setrlimit(resource.RLIMIT_NOFILE, (max(holes) + room, limits[1]))
            try:
                with pytest.raises(SandboxError, match="descriptors"):
                    await executor.run(RunRequest("print(1)"))
            finally:
                resource.setrlimit(resource.RLIMIT_NOFILE, limits)
        assert len(os.listdir("/proc/self/fd")) == descriptors
        for fd in holes:
            os.close(fd)
        assert (await executor.run(RunRequest("print(1)"))).stdout == "1\n"


@pytest.mark.slow
@pytest.mark.parametrize("mode", [Isolation.BUBBLEWRAP, Isolation.NAMESPACES, Isolation.NONE], ids=lambda m: m.value)
@pytest.mark.parametrize("victims", ["everything", "programs"])
async def test_after_the_death_of_all_containers_every_run_and_session_succeeds(mode, victims):
    strangers = psutil.Process().children(recursive=True)

    def kill_containers():
        ours = [process for process in psutil.Process().children(recursive=True) if process not in strangers]
        assert len(ours) > 4
        for process in ours if victims == "everything" else [process for process in ours if not process.children()]:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()

    try:
        async with await Executor.open(mode, workers=4) as executor:
            descriptors = set()
            for turn in range(4):
                await executor.run(RunRequest("print(1)"))
                descriptors.add(len(os.listdir("/proc/self/fd")))
                lost = [await executor.session() for _ in range(4)]
                kill_containers()  # and no turn of the event loop: nobody has noticed when the next request comes
                if turn % 2:
                    session = await executor.session()
                    assert (await executor.run_cell(session, "6 * 7")).text == "42"
                    await executor.close_session(session)
                runs = [executor.run(RunRequest(f"print({i})")) for i in range(12)]
                assert [result.stdout for result in await asyncio.gather(*runs)] == [f"{i}\n" for i in range(12)]
                for session in lost:
                    await executor.close_session(session)
            assert len(descriptors) == 1
    except SandboxUnavailableError as error:
        pytest.skip(str(error))


async def test_a_sandbox_whose_containers_keep_dying_is_given_up(monkeypatch):
    fork, forks = fork_server.ForkServer.fork, []

    async def stillborn(self, *args):
        forks.append(await fork(self, *args))
        forks[-1].kill()
        return forks[-1]

    async with await Executor.open("none", workers=1) as executor:
        await executor.run(RunRequest("print(1)"))
        with monkeypatch.context() as patch:
            patch.setattr(fork_server.ForkServer, "fork", stillborn)
            for start in (lambda: executor.run(RunRequest("print(1)")), executor.session):
                with pytest.raises(SandboxError, match="container"):
                    await start()
        assert len(forks) == 6
        assert (await executor.run(RunRequest("print(1)"))).stdout == "1\n"


HOST = """
import asyncio, os, sys
from etude.sandbox import Executor, RunRequest

async def main():
    executor = await Executor.open(sys.argv[1], workers=2)
    session = await executor.session()
    program = RunRequest("import os\\nos.execvp('sleep', ['sleep', __import__('sys').argv[1]])",
                         args=[sys.argv[2]])
    running = asyncio.ensure_future(executor.run(program))
    await executor.run_cell(session, "import subprocess; subprocess.Popen(['sleep', '%s'])" % sys.argv[2])
    await asyncio.sleep(0.5)
    print("ready", flush=True)
    await running

asyncio.run(main())
"""


def sleepers(seconds):
    return [p.pid for p in psutil.process_iter(["cmdline"]) if seconds in (p.info["cmdline"] or [])[1:2]]


@pytest.mark.slow
@pytest.mark.parametrize(("mode", "seconds"), [("bubblewrap", "644.1"), ("namespaces", "644.2"), ("none", "644.3")])
def test_a_killed_host_leaves_nothing(mode, seconds):
    host = subprocess.Popen([sys.executable, "-c", HOST, mode, seconds], stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    if host.stdout.readline() != b"ready\n":
        pytest.skip(host.communicate()[1].decode()[-300:])
    family = psutil.Process(host.pid).children(recursive=True)
    assert len(sleepers(seconds)) == 2
    host.kill()
    host.wait()
    host.stdout.close()
    host.stderr.close()
    _, alive = psutil.wait_procs(family, timeout=20)
    assert alive == []
    assert sleepers(seconds) == []


def test_a_root_host_needs_a_folder_that_others_can_pass(monkeypatch):
    monkeypatch.setattr(jail, "_passable", lambda folder: False)
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    with pytest.raises(SandboxError, match="TMPDIR"):
        jail.jail_scratch()
