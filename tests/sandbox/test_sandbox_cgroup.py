"""What is written into a delegated control group, and when. A plain folder stands for it: the kernel's part, that the
written limits hold, cannot be tested without a delegated group."""

import asyncio
import os
from pathlib import Path

import pytest

from etude.errors import ConfigError
from etude.sandbox import Executor, ExecutorOptions, Limits, RunRequest, RunStatus, SandboxError, cgroup
from etude.sandbox.cgroup import Delegation, Group


@pytest.fixture
def folder(tmp_path):
    root, delegated = tmp_path, tmp_path / "delegated"
    delegated.mkdir()
    for place in (root, delegated):
        (place / "cgroup.controllers").write_text("cpuset cpu io memory pids\n")
        (place / "cgroup.subtree_control").write_text("")
    return delegated


def test_the_controllers_are_turned_on_once(folder):
    Delegation(str(folder))
    assert (folder / "cgroup.subtree_control").read_text() == "+cpu +memory +pids"
    (folder / "cgroup.subtree_control").write_text("cpu memory pids")
    Delegation(str(folder))
    assert (folder / "cgroup.subtree_control").read_text() == "cpu memory pids"


def test_what_is_not_delegated_is_refused(folder, tmp_path):
    with pytest.raises(ConfigError, match=r"is not a cgroup v2 folder"):
        Delegation("/nowhere")
    with pytest.raises(ConfigError, match="the root of all groups"):
        Delegation(str(tmp_path))
    (folder / "cgroup.controllers").write_text("cpu io")
    with pytest.raises(ConfigError, match="no controller memory, pids"):
        Delegation(str(folder))
    (folder / "cgroup.controllers").write_text("cpu memory pids")
    (folder / "cgroup.subtree_control").unlink()
    with pytest.raises(ConfigError, match="not delegated"):
        Delegation(str(folder))


@pytest.fixture
def lives_in(folder, tmp_path, monkeypatch):
    """This process in the group `delegated/host`, as the kernel says it; `folder` is marked as delegated."""
    (folder / "host").mkdir()
    (tmp_path / "mountinfo").write_text(
        f"9 1 0:9 / {tmp_path} rw - tmpfs t rw\n10 1 0:26 / {tmp_path} rw shared:9 - cgroup2 c rw\n"
    )
    (tmp_path / "cgroup").write_text("4:memory:/other\n0::/delegated/host\n")
    monkeypatch.setattr(cgroup._delegated_around, "__defaults__", (tmp_path,))
    marks = {folder: b"1"}

    def getxattr(path, name):
        if name != "user.delegate" or path not in marks:
            raise OSError(61, "no data")
        return marks[path]

    monkeypatch.setattr(os, "getxattr", getxattr)
    return marks


def test_the_delegation_around_this_process_is_found_and_tried_out(folder, lives_in):
    assert cgroup.find_delegation("auto")._folder == folder
    (tried,) = folder.glob("etude-*")
    assert (tried / "cgroup.procs").read_text().isdigit()
    lives_in[folder] = b"0"
    assert cgroup.find_delegation("auto") is None
    lives_in.clear()
    assert cgroup.find_delegation("auto") is None  # writable, but nobody has said that it is ours
    assert cgroup.find_delegation(None) is None


def test_a_group_that_is_not_this_processs_is_not_taken(folder, lives_in, tmp_path):
    (tmp_path / "cgroup").write_text("0::/elsewhere\n")
    assert cgroup.find_delegation("auto") is None
    (tmp_path / "cgroup").write_text("0::/\n")
    lives_in[tmp_path] = b"1"
    assert cgroup.find_delegation("auto") is None  # the root of all groups
    (tmp_path / "cgroup").write_text("3:memory:/\n")
    assert cgroup.find_delegation("auto") is None  # cgroup v1


def test_a_delegation_that_does_not_work_is_told_and_not_used(folder, lives_in, caplog, monkeypatch):
    (folder / "cgroup.controllers").write_text("cpu")
    assert cgroup.find_delegation("auto") is None
    assert "no controller memory, pids" in caplog.text
    (folder / "cgroup.controllers").write_text("cpu memory pids")

    def refuse(self, pid):
        raise SandboxError("cgroup.procs: Permission denied")

    monkeypatch.setattr(Group, "admit", refuse)
    assert cgroup.find_delegation("auto") is None
    assert "Permission denied" in caplog.text


async def test_containers_use_the_delegation_that_was_found(folder, lives_in):
    async with await Executor.open("none", workers=1) as executor:
        assert (await executor.run(RunRequest("print(1)"))).stdout == "1\n"
    assert list(folder.glob("etude-*/memory.max"))


def test_limits_are_written(folder):
    group = Delegation(str(folder)).group()
    (path,) = [entry for entry in folder.iterdir() if entry.is_dir()]
    (path / "memory.swap.max").write_text("max")
    group.admit(4711)
    group.limit(Limits(memory_mb=100, disk_mb=10, processes=5), cpus=0.5)
    written = {entry.name: entry.read_text() for entry in path.iterdir()}
    assert written == {
        "cgroup.procs": "4711",
        "memory.max": str(174 << 20),
        "memory.swap.max": "0",
        "pids.max": "7",
        "cpu.max": "50000 100000",
    }
    assert not group.out_of_memory()
    (path / "memory.events").write_text("low 0\noom 3\noom_kill 2\n")
    assert group.out_of_memory()


def test_an_empty_group_is_removed(folder):
    Delegation(str(folder)).group().close()
    assert not [entry for entry in folder.iterdir() if entry.is_dir()]


def test_a_group_that_cannot_be_written_is_the_sandboxs_failure(tmp_path):
    with pytest.raises(SandboxError, match=r"cgroup\.procs"):
        Group(tmp_path / "gone").admit(1)


def children_of(pid):
    return Path(f"/proc/{pid}/task/{pid}/children").read_text().split()


async def test_each_container_is_admitted_before_it_forks_and_limited_before_it_runs(folder):
    options = ExecutorOptions(cgroup=str(folder), cpus=2)
    async with await Executor.open(workers=1, options=options) as executor:
        for old in folder.glob("etude-*"):
            for file in old.iterdir():
                file.unlink()
            old.rmdir()
        task = asyncio.ensure_future(
            executor.run(RunRequest("import time\ntime.sleep(1)", limits=Limits(memory_mb=99)))
        )
        while not (found := list(folder.glob("etude-*/memory.max"))):
            await asyncio.sleep(0.01)
        group = found[0].parent
        while not (children := children_of((group / "cgroup.procs").read_text())):
            await asyncio.sleep(0.01)
        limits = (group / "cpu.max").read_text(), (group / "memory.max").read_text()
        (group / "memory.events").write_text("oom_kill 1")
        result = await task
    assert len(children) == 1
    assert limits == ("200000 100000", str((99 + 256 + 64) << 20))
    assert (result.status, result.return_code) == (RunStatus.MEMORY_LIMIT, None)


async def test_a_session_is_limited_as_well(folder):
    options = ExecutorOptions(cgroup=str(folder))
    async with await Executor.open(workers=1, options=options) as executor:
        before = set(os.listdir(folder))
        session = await executor.session(limits=Limits(memory_mb=77))
        (group,) = set(os.listdir(folder)) - before
        found = (folder / group / "memory.max").read_text(), (await executor.run_cell(session, "1")).text
    assert found == (str((77 + 256 + 64) << 20), "1")
