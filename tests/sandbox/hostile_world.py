"""What an attack must not reach, and how to see from outside that it did not: files, listeners, a victim, processes.

Attacks run in isolated containers only: `World` refuses an executor without isolation, and every attack in Python begins
with a guard that ends it where it is not confined.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import re
import secrets
import shutil
import socket
import subprocess
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from etude.sandbox import Executor, Isolation, Language, Limits, RunRequest, RunStatus
from etude.sandbox.check import GUARD
from etude.sandbox.jail import UNPRIVILEGED_ID

ATTACKS = Path(__file__).parent / "attacks"
PRELUDE = GUARD + (ATTACKS / "_prelude.py").read_text(encoding="utf-8")
LANGUAGES = {".py": Language.PYTHON, ".sh": Language.BASH, ".c": Language.C, ".js": Language.JAVASCRIPT}
OPTION = re.compile(r"\b(expect|limits|fetch|stdin|timeout|compile_seconds): ([^|]*)")


@dataclass(frozen=True)
class Attack:
    """One file of `attacks/`; its first line says what it attempts and how it must end."""

    name: str
    code: str
    language: Language
    session: bool
    expected: tuple[str, ...]
    limits: Limits
    fetch: tuple[str, ...]
    stdin: str | None
    timeout: float | None
    compile_seconds: float

    @classmethod
    def read(cls, path: Path) -> Attack:
        text = path.read_text(encoding="utf-8")
        first = text.splitlines()[0].lstrip("#/ ")
        options = {key: value.split() for key, value in OPTION.findall(first)}
        limits = {"wall_seconds": 20.0, "cpu_seconds": 20.0, "memory_mb": 512, "disk_mb": 64}
        for setting in options.get("limits", ()):
            key, value = setting.split("=")
            limits[key] = float(value) if "seconds" in key else int(value)
        return cls(
            name=path.name,
            code=text,
            language=LANGUAGES[path.suffix],
            session=first.startswith("session:"),
            expected=tuple(options.get("expect", ())),
            limits=Limits(**limits),
            fetch=tuple(options.get("fetch", ())),
            stdin="x" * int(options["stdin"][0]) if "stdin" in options else None,
            timeout=float(options["timeout"][0]) if "timeout" in options else None,
            compile_seconds=float(options.get("compile_seconds", ["10"])[0]),
        )


def attacks() -> list[Path]:
    return sorted(path for path in ATTACKS.iterdir() if path.suffix in LANGUAGES and not path.name.startswith("_"))


@dataclass
class World:
    """The outside of an executor."""

    executor: Executor
    loop: asyncio.AbstractEventLoop
    secret: str = field(default_factory=lambda: f"canary-{secrets.token_hex(16)}")
    patience: float = 30.0
    marker: str = field(default_factory=lambda: f"marker-{secrets.token_hex(8)}")

    def __post_init__(self) -> None:
        assert self.executor.isolation is not Isolation.NONE, "attacks run only where they are contained"
        self.folder = Path(tempfile.mkdtemp(prefix="etude-canary-"))
        self.folder.chmod(0o755)
        (self.folder / "secret").write_text(self.secret)
        (self.folder / "secret").chmod(0o644)
        self.victim = self._start_victim()
        self.tcp = socket.create_server(("0.0.0.0", 0))
        self.udp = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        self.udp.bind(("0.0.0.0", 0))
        self.abstract = socket.socket(socket.AF_UNIX)
        self.abstract.bind(f"\0{self.marker}")
        self.named = socket.socket(socket.AF_UNIX)
        self.named.bind(str(self.folder / "socket"))
        (self.folder / "socket").chmod(0o777)
        for listener in (self.abstract, self.named):
            listener.listen()
        for link in (self.tcp, self.udp, self.abstract, self.named):
            link.setblocking(False)
        self.trap = self.folder / "trap"
        self.folder.chmod(0o777)  # whatever gets out may spring the trap
        self.honest = self._honest_run()
        # Another run's secret, in its code and its input.
        self._run(RunRequest(f"x = {self.secret!r}\ninput()", stdin=self.secret))
        self.processes = self._settled()

    def _start_victim(self) -> subprocess.Popen[bytes]:
        """A process of the very user that runs the containers, with the secret in its environment."""
        user = UNPRIVILEGED_ID if os.geteuid() == 0 else None
        return subprocess.Popen(
            ["sleep", "3600"], env={"SECRET": self.secret, "PATH": "/usr/bin:/bin"}, user=user, cwd="/"
        )

    def _run(self, request: RunRequest):
        return self.loop.run_until_complete(self.executor.run(request))

    def goals(self) -> dict[str, object]:
        return {
            "file": str(self.folder / "secret"),
            "socket": str(self.folder / "socket"),
            "trap": str(self.trap),
            "server": os.getpid(),
            "victim": self.victim.pid,
            "port": self.tcp.getsockname()[1],
            "udp_port": self.udp.getsockname()[1],
            "abstract": self.marker,
            "marker": self.marker,
            "addresses": sorted(
                {
                    address.address
                    for addresses in psutil.net_if_addrs().values()
                    for address in addresses
                    if address.family == socket.AF_INET
                }
            ),
            "variables": ["ETUDE_CANARY", "SECRET", "PYTEST_CURRENT_TEST", "SSH_AUTH_SOCK"],
        }

    def program(self, attack: Attack) -> RunRequest:
        """The attack with its prelude; other languages than Python are guarded by a run before them."""
        python = attack.language is Language.PYTHON
        if not python:
            assert self._run(RunRequest(GUARD + "print('confined')")).stdout == "confined\n"
        return RunRequest(
            PRELUDE + attack.code if python else attack.code,
            language=attack.language,
            args=[json.dumps(self.goals())],
            stdin=attack.stdin,
            fetch_files=attack.fetch,
            limits=attack.limits,
            compile_seconds=attack.compile_seconds,
        )

    def run(self, attack: Attack):
        started = time.monotonic()
        result = self._run(self.program(attack))
        assert time.monotonic() - started < attack.limits.wall_seconds + attack.compile_seconds + 25
        return result

    def run_session(self, attack: Attack):
        """The results of the attack and of a cell after it; the second is None if the session died."""
        return self.loop.run_until_complete(self._run_session(attack))

    async def _run_session(self, attack: Attack):
        goals = {"goals.json": json.dumps(self.goals()).encode()}
        session = await self.executor.session(limits=attack.limits, files=goals)
        ready = await self.executor.run_cell(session, PRELUDE)
        assert ready.error is None, ready.error
        result = await self.executor.run_cell(session, attack.code, attack.timeout)
        fetched = {}
        if attack.fetch and result.session_alive:
            for _ in range(200):
                fetched |= await self.executor.fetch_files(session, attack.fetch)
                assert self.secret.encode() not in b"".join(fetched.values())
        after = await self.executor.run_cell(session, "1 + 1", 5.0) if result.session_alive else None
        await self.executor.close_session(session)
        return result, after

    def check(self) -> None:
        """Everything outside is as it was."""
        assert self.victim.poll() is None, "the victim was killed"
        assert psutil.Process(self.victim.pid).status() not in (psutil.STATUS_STOPPED, psutil.STATUS_TRACING_STOP)
        for listener in (self.tcp, self.abstract, self.named):
            with contextlib.suppress(BlockingIOError):
                listener.accept()
                raise AssertionError(f"somebody connected to {listener}")
        with contextlib.suppress(BlockingIOError):
            self.udp.recv(100)
            raise AssertionError("a datagram came")
        assert not self.trap.exists(), "the trap was sprung"
        assert (self.folder / "secret").read_text() == self.secret
        assert sorted(path.name for path in self.folder.iterdir()) == ["secret", "socket"]
        assert _processes_with(self.marker) == []
        for folder in (
            "/",
            "/usr",
            "/usr/bin",
            "/usr/lib",
            "/usr/local/lib",
            "/etc",
            "/dev",
            "/tmp",
            os.path.dirname(os.__file__),
        ):
            assert not [name for name in os.listdir(folder) if self.marker in name], folder
        assert self._honest_run() == self.honest, "the next run differs"
        assert self._settled() == self.processes, "processes were left behind"

    def _honest_run(self) -> str:
        """What a harmless run sees of its world."""
        result = self._run(RunRequest(HONEST))
        assert result.status is RunStatus.FINISHED, result
        assert result.return_code == 0, result
        return result.stdout

    def _settled(self) -> int:
        """How many processes the executor has once the containers of its runs are gone: a moment with no change."""
        deadline = time.monotonic() + self.patience
        counts: list[int] = []
        while time.monotonic() < deadline:
            self.loop.run_until_complete(asyncio.sleep(0.02))
            counts.append(len(_descendants()) - 1)  # without the victim
            settled = len(counts) > 5 and len(set(counts[-5:])) == 1
            if settled and counts[-1] == getattr(self, "processes", counts[-1]):
                break
        return counts[-1]

    def close(self) -> None:
        self.victim.kill()
        self.victim.wait()
        for link in (self.tcp, self.udp, self.abstract, self.named):
            link.close()
        shutil.rmtree(self.folder)


HONEST = """
import builtins, json, os, sys, random, re
print(json.loads(json.dumps([1 + 1])), sorted(os.listdir(".")), os.listdir("/tmp"), os.listdir("/dev/shm"))
print(sorted(os.environ.items()), len(dir(builtins)), len(sys.modules), sys.path, os.getcwd(), os.getuid())
print(sorted(name for name in os.listdir("/proc") if name.isdigit())[:1], open.__name__, os.listdir("/"))
print(sum(len(os.listdir(path)) for path in sys.path if os.path.isdir(path) and "libraries" not in path))
"""


def _descendants() -> list[psutil.Process]:
    return psutil.Process().children(recursive=True)


def _processes_with(marker: str) -> list[int]:
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if process.pid != os.getpid() and any(marker in part for part in process.cmdline()):
                found.append(process.pid)
    return found


def open_world(mode: Isolation) -> World:
    loop = asyncio.new_event_loop()
    os.environ["ETUDE_CANARY"] = "1"
    try:
        return World(loop.run_until_complete(Executor.open(mode, workers=2)), loop)
    except BaseException:
        loop.close()
        raise
    finally:
        del os.environ["ETUDE_CANARY"]


def close_world(world: World) -> None:
    world.close()
    world.loop.run_until_complete(world.executor.close())
    world.loop.close()
