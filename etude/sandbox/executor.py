"""The executor: runs programs and sessions in the first isolation mode that confines them on this machine.

Invariant: an executor in an isolated mode is returned only after a container of it was seen to be confined and held to a
limit (`look`); `check`, the command `etude sandbox check`, tries to break every guarantee. At most `workers` programs run at
once; others wait in order. Closing an executor leaves no process, mount or file.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import time
import uuid
import weakref
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

from etude.sandbox import jail, languages
from etude.sandbox.cgroup import AUTO, find_delegation
from etude.sandbox.check import check_isolation, look
from etude.sandbox.container import Container, ContainerGoneError
from etude.sandbox.fork_server import ForkServer
from etude.sandbox.guest.settings import Settings
from etude.sandbox.session import Session
from etude.sandbox.types import (
    CellResult,
    Isolation,
    Limits,
    RunRequest,
    RunResult,
    RunStatus,
    SandboxError,
    SandboxRequestError,
    SandboxUnavailableError,
    UnknownSessionError,
)

T = TypeVar("T")

log = logging.getLogger(__name__)

ATTEMPTS = 3
"""Maximum containers to try for a request, if they die before it runs."""
SESSION_LIMITS = Limits(cpu_seconds=600.0)
"""Default limits of a session."""


@dataclass(frozen=True)
class ExecutorOptions:
    """The environment of an executor's programs, and its limits for sessions."""

    libraries: tuple[str, ...] | None = None
    """Folders of third-party packages that Python programs may import; None: those of this environment."""
    folders: tuple[str, ...] = ()
    """Further folders that programs can read, at their own paths; not below /tmp or /dev/shm, which each run has anew."""
    environment: Mapping[str, str] = field(default_factory=dict)
    """Variables added to the programs' environment, which inherits none of the host's."""
    cgroup: str | None = AUTO
    """A cgroup v2 folder that an administrator delegated to this user, in which each container gets its own group. "auto":
    the delegated folder that this process runs in, if any; None: no cgroups."""
    cpus: float = 1.0
    """CPUs that one container may use at a time; only with `cgroup`."""
    max_sessions: int = 128
    session_idle_seconds: float = 900.0
    """A session that is idle for longer is closed."""


class Executor:
    """Runs model-written code. Bound to the event loop it was opened on; close it, or use it in `async with`."""

    def __init__(self, isolation: Isolation, workers: int, options: ExecutorOptions) -> None:
        self.isolation = isolation
        self.workers = workers
        self._options = options
        self._scratch = jail.jail_scratch() if isolation is Isolation.NONE else None
        self._libraries = jail.library_folders() if options.libraries is None else options.libraries
        self.languages = languages.available(self._libraries)
        self._delegation = find_delegation(options.cgroup)
        self._fork_server: ForkServer | None = None
        self._starting = asyncio.Lock()
        self._slots = asyncio.Semaphore(workers)
        self._containers: weakref.WeakSet[Container] = weakref.WeakSet()
        self._sessions: dict[str, Session] = {}
        self._expiry: asyncio.Task[None] | None = None
        self._closed = False

    @classmethod
    async def open(
        cls,
        isolation: str | Isolation = Isolation.AUTO,
        workers: int | None = None,
        options: ExecutorOptions | None = None,
    ) -> Executor:
        """Returns an executor that was seen to confine programs; `workers`: concurrent programs, by default one per CPU.

        Raises:
            SandboxUnavailableError: the requested mode, or each one, does not confine programs on this machine.
        """
        wanted, options = Isolation(isolation), options or ExecutorOptions()
        workers = workers or len(os.sched_getaffinity(0))
        if wanted is Isolation.NONE:
            log.warning("sandbox: isolation is off; model-written code runs as this user, with this user's files")
            return cls(wanted, workers, options)
        failures = []
        for mode in (Isolation.BUBBLEWRAP, Isolation.NAMESPACES) if wanted is Isolation.AUTO else (wanted,):
            executor = cls(mode, workers, options)
            try:
                await look(executor.run)
            except SandboxError as error:
                failures.append(f"{mode.value}: {error}")
                await executor.close()
            except BaseException:
                await executor.close()
                raise
            else:
                return executor
        raise SandboxUnavailableError(
            f"no isolated sandbox works here ({'; '.join(failures)}); install bubblewrap (Debian, Ubuntu: apt install "
            "bubblewrap), allow user namespaces, or ask for isolation 'none' by name"
        )

    async def check(self) -> None:
        """Attempts to break every guarantee of an isolated mode, in containers.

        Raises:
            SandboxUnavailableError: an attempt succeeded; names the guarantee.
        """
        try:
            await check_isolation(self.run)
        except SandboxError as error:
            raise SandboxUnavailableError(f"isolation {self.isolation.value}: {error}") from error

    def _settings(self) -> Settings:
        isolated = self.isolation is not Isolation.NONE
        search_path = jail.libraries_in_jail(self._libraries) if isolated else self._libraries
        environment = {
            "PATH": f"{os.path.dirname(jail.interpreter())}:{languages.PATH}",
            "LANG": "C.UTF-8",
            "USER": "sandbox",
            "PYTHONPATH": os.pathsep.join(search_path),
            "PYTHONDONTWRITEBYTECODE": "1",
            "MPLBACKEND": "Agg",
            "OMP_NUM_THREADS": "1",
            "OPENBLAS_NUM_THREADS": "1",
            **self._options.environment,
        }
        scratch = str(self._scratch.folder) if self._scratch else ""
        return Settings(isolated, scratch, search_path, environment)

    async def run(self, request: RunRequest) -> RunResult:
        """Runs a program from a fresh state.

        Raises:
            SandboxError: the sandbox failed, not the code.
            SandboxRequestError: the language is not installed, or the files do not fit.
        """
        if request.language not in self.languages:
            tool = languages.RECIPES[request.language].tool
            raise SandboxRequestError(f"language: {request.language.value} needs '{tool}', which is not installed")
        async with self._slots:
            result = await self._in_container(request.limits, lambda container: container.run(request))
            again = result.status is RunStatus.KILLED and getattr(request, "port", None) is None  # nobody saw it
            if again:  # killed presumably from outside; if it happens again, by the program
                log.warning("sandbox: a container was killed while its program ran; the program runs once more")
                result = await self._in_container(request.limits, lambda container: container.run(request))
        return result

    async def _in_container(self, limits: Limits, use: Callable[[Container], Awaitable[T]]) -> T:
        """Calls `use` with a new container; retries with another one if it died before the request ran."""
        for left in range(ATTEMPTS - 1, -1, -1):
            try:
                return await use(await self._fork(limits))
            except ContainerGoneError:
                if not left:
                    raise
        raise AssertionError("unreachable")

    async def _fork(self, limits: Limits) -> Container:
        """Forks a container, in its own control group if there is a delegation; starts a fork server if none is alive."""
        async with self._starting:
            if self._closed:
                raise SandboxError("the sandbox is closed")
            if self._fork_server is not None and not self._fork_server.alive:
                gone, self._fork_server = self._fork_server, None
                await gone.close()
            if self._fork_server is None:
                self._fork_server = await ForkServer.start(
                    self.isolation, self._settings(), self._libraries, self._options.folders
                )
            fork_server = self._fork_server
        container = await fork_server.fork(limits.output_bytes)
        self._containers.add(container)
        try:
            if self._closed:  # meanwhile
                raise SandboxError("the sandbox is closed")
            if self._delegation is not None:
                container.admit(self._delegation.group(), limits, self._options.cpus)
        except BaseException:
            await container.close()
            raise
        return container

    async def session(self, limits: Limits = SESSION_LIMITS, files: Mapping[str, bytes] | None = None) -> str:
        """Opens a session and returns its id.

        Raises:
            SandboxError: the sandbox failed, or `max_sessions` are open.
            SandboxRequestError: the files do not fit.
        """
        if len(self._sessions) >= self._options.max_sessions:
            raise SandboxError(f"{len(self._sessions)} sessions are open, which is the maximum")
        session = await self._in_container(limits, lambda container: Session.open(container, limits, files or {}))
        if self._closed:
            await session.close()
            raise SandboxError("the sandbox is closed")
        session_id = uuid.uuid4().hex
        self._sessions[session_id] = session
        if self._expiry is None:
            self._expiry = asyncio.ensure_future(self._expire())
        return session_id

    async def run_cell(self, session_id: str, code: str, timeout: float | None = None) -> CellResult:
        """Runs a cell in a session once one of the `workers` is free; `timeout` in seconds from then on, by default the
        session's `wall_seconds`.

        Raises:
            UnknownSessionError: there is no such session (any more).
            SandboxError: the sandbox failed.
        """
        with self._use(session_id) as session:
            async with self._slots:
                return await session.run_cell(code, timeout)

    async def write_files(self, session_id: str, files: Mapping[str, bytes]) -> None:
        """Writes files into a session's work directory, replacing existing ones; raises like `run_cell`, or
        `SandboxRequestError` if a path is not allowed or the files do not fit."""
        with self._use(session_id) as session:
            await session.write_files(files)

    async def fetch_files(self, session_id: str, paths: Sequence[str]) -> dict[str, bytes]:
        """Returns the contents of the regular files among `paths` in a session's work directory; raises like
        `write_files`."""
        with self._use(session_id) as session:
            return await session.fetch_files(paths)

    async def close_session(self, session_id: str) -> None:
        """Closes a session; an unknown id is not an error."""
        session = self._sessions.pop(session_id, None)
        if session is not None:
            await session.close()

    @contextlib.contextmanager
    def _use(self, session_id: str) -> Iterator[Session]:
        """Yields a session, and removes it from the open ones if it has ended after the block."""
        session = self._sessions.get(session_id)
        if session is None:
            raise UnknownSessionError(f"there is no session {session_id!r}")
        try:
            yield session
        finally:
            if not session.alive:
                self._sessions.pop(session_id, None)

    async def _expire(self) -> None:
        idle = self._options.session_idle_seconds
        while True:
            await asyncio.sleep(min(max(idle / 4, 0.05), 15.0))
            for session_id, session in list(self._sessions.items()):
                if not session.busy and time.monotonic() - session.used > idle:
                    log.info("sandbox: session %s was idle for %g s and is closed", session_id, idle)
                    with contextlib.suppress(SandboxError):
                        await self.close_session(session_id)

    async def close(self) -> None:
        """Ends all programs and sessions and removes their files: what is active raises `SandboxError`. A second call does
        nothing."""
        if self._closed:
            return
        self._closed = True
        if self._expiry is not None:
            self._expiry.cancel()
            await asyncio.gather(self._expiry, return_exceptions=True)
        for session_id in list(self._sessions):
            with contextlib.suppress(SandboxError):
                await self.close_session(session_id)
        async with self._starting:
            await asyncio.gather(*(each.close() for each in list(self._containers)), return_exceptions=True)
            if self._fork_server is not None:
                await self._fork_server.close()
        if self._scratch:
            self._scratch.remove()
            self._scratch = None

    async def __aenter__(self) -> Executor:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()
