"""The attack suite's judge sees what it must: each trace that an attack could leave outside is left here, by hand."""

import os
import signal
import socket
import subprocess

import pytest
from hostile_world import Attack, attacks, close_world, open_world
from test_attacks import judge_run

from etude.sandbox import Isolation, RunResult, RunStatus, SandboxUnavailableError


@pytest.fixture
def world():
    try:
        world = open_world(Isolation.NAMESPACES)
    except SandboxUnavailableError as error:
        pytest.skip(str(error))
    yield world
    close_world(world)


def seen(world, what):
    with pytest.raises(AssertionError, match=what):
        world.check()


def test_each_trace_is_seen(world):
    world.check()
    world.patience = 1.0

    with socket.create_connection(("127.0.0.1", world.tcp.getsockname()[1])):
        seen(world, "connected")
    with socket.socket(socket.AF_UNIX) as link:
        link.connect(f"\0{world.marker}")
        seen(world, "connected")
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as link:
        link.sendto(b"x", ("127.0.0.1", world.udp.getsockname()[1]))
        seen(world, "datagram")

    world.trap.touch()
    seen(world, "trap")
    world.trap.unlink()

    daemon = subprocess.Popen(["bash", "-c", "sleep 600; true", world.marker], start_new_session=True)
    seen(world, None)
    os.killpg(daemon.pid, signal.SIGKILL)
    daemon.wait()
    left = subprocess.Popen(["sleep", "600"])
    seen(world, "left behind")
    left.kill()
    left.wait()

    world.honest += "more"
    seen(world, "the next run differs")
    world.honest = world.honest.removesuffix("more")
    world.check()

    world.victim.kill()
    world.victim.wait()
    seen(world, "the victim was killed")


@pytest.mark.parametrize(
    "result",
    [
        RunResult(RunStatus.FINISHED, 0, "BREACH x\nend\n", ""),
        RunResult(RunStatus.FINISHED, 0, "end\n", "BREACH"),
        RunResult(RunStatus.FINISHED, 0, "SECRET end\n", ""),
        RunResult(RunStatus.FINISHED, 0, "end\n", "", files={"a": b"SECRET"}),
        RunResult(RunStatus.FINISHED, 0, "", ""),
        RunResult(RunStatus.FINISHED, 1, "end\n", ""),
        RunResult(RunStatus.FINISHED, -9, "end\n", ""),
        RunResult(RunStatus.TIME_LIMIT, None, "end\n", ""),
        RunResult(RunStatus.KILLED, None, "end\n", ""),
        RunResult(RunStatus.FINISHED, 0, "x" * 5_000_000 + "end\n", ""),
    ],
)
def test_each_bad_ending_is_seen(result):
    class Fake:
        secret = "SECRET"

        def run(self, attack):
            return result

    attack = Attack.read(next(path for path in attacks() if path.name == "read_shadow.py"))
    with pytest.raises(AssertionError):
        judge_run(Fake(), attack)
