"""`RankProcess`: one rank of a `RayWorkerGroup`, in the process of a Ray actor.

Invariant: whatever a worker does, a call returns a `Reply`, so that the original exception arrives rather than one of Ray's.
The process ends with its raylet.
Log records at WARNING and above are sent with the replies. A plain class, which the group passes to `ray.remote`.
"""

from __future__ import annotations

import asyncio
import faulthandler
import functools
import inspect
import ipaddress
import logging
import os
import pickle
import socket
import sys
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Concatenate, ParamSpec

import psutil
import torch
import torch.distributed as dist

from etude.distributed.dispatch import Arguments
from etude.distributed.plane import BlockStore, Fetched, check_unwritten, fetch_batches, keep_batches
from etude.distributed.usage import usable_cpus
from etude.distributed.worker import MeshPlace, Worker
from etude.errors import describe_error, user_place
from etude.registry import share_folder

_MAX_RECORDS = 100  # max. log records kept for the next reply

P = ParamSpec("P")
LogRecord = tuple[str, int, str]
"""Logger, level, text."""


@dataclass(frozen=True)
class ProcessOptions:
    """What a rank's process takes over from the driver: working directory and import path, where they exist on its node,
    the number of threads (None: its share of the node's cores), and the log level of Étude."""

    folder: str
    path: tuple[str, ...]
    num_threads: int | None
    log_level: int

    @classmethod
    def of_this_process(cls) -> ProcessOptions:
        """The options of this process, the driver."""
        threads = os.environ.get("OMP_NUM_THREADS", "")
        path = tuple(os.path.abspath(folder) for folder in sys.path)
        level = logging.getLogger("etude").getEffectiveLevel()
        return cls(os.getcwd(), path, int(threads) if threads.isdigit() else None, level)


@dataclass(frozen=True)
class ProcessPlace:
    """Where a process runs, and the log file of its stderr."""

    node_id: str
    host: str
    address: str
    pid: int
    log: str

    def __str__(self) -> str:
        return f"node {self.host} ({self.address}, process {self.pid})"


class RemoteTraceback(Exception):
    """The cause of an exception from another process: its traceback there, and the user's `place` (`file:line`) in it."""

    def __init__(self, text: str, place: str | None = None) -> None:
        super().__init__(text, place)
        self.text, self.place = text, place

    def __str__(self) -> str:
        return f"\n{self.text}"


@dataclass(frozen=True)
class Reply:
    """A call's value, or its exception packed by `pack_error`; and the records logged since the last reply."""

    value: Any = None
    error: bytes | None = None
    records: Sequence[LogRecord] = ()


def _replies(method: Callable[Concatenate[RankProcess, P], object]) -> Callable[Concatenate[RankProcess, P], Reply]:
    """Decorates a method of `RankProcess`: it returns a `Reply`, whatever it raises."""

    @functools.wraps(method)
    def reply(self: RankProcess, *args: P.args, **kwargs: P.kwargs) -> Reply:
        try:
            return Reply(method(self, *args, **kwargs), records=self._records.take())
        except BaseException as error:  # also KeyboardInterrupt, and SystemExit, which would end the actor
            return Reply(error=pack_error(error), records=self._records.take())

    return reply


class RankProcess:
    """The actor class: joins the process group, builds the worker and calls its methods."""

    def __init__(self, options: ProcessOptions) -> None:
        threading.Thread(target=exit_with_parent, name="etude-parent", daemon=True).start()
        share_folder(options.folder, options.path)
        self._options = options
        self._store: dist.TCPStore | None = None
        self._worker: Worker | None = None
        self._records = _Records()
        logging.basicConfig(format="%(levelname)s %(name)s: %(message)s")
        logging.getLogger().addHandler(self._records)
        logging.getLogger("etude").setLevel(options.log_level)
        with suppress(Exception):  # if stderr has no file descriptor
            faulthandler.enable()

    def place(self) -> ProcessPlace:
        """Where this process runs."""
        import ray

        log = ""
        with suppress(OSError):
            log = os.readlink("/proc/self/fd/2")
        node, address = ray.get_runtime_context().get_node_id(), ray.util.get_node_ip_address()
        if interface := network_interface(address):
            for variable in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
                os.environ.setdefault(variable, interface)
        return ProcessPlace(node, socket.gethostname(), address, os.getpid(), log)

    def open_store(self, address: str, world_size: int, seconds: float) -> int:
        """Starts the rendezvous store on this rank's node; returns its port."""
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        listener = socket.create_server((address, 0), family=family, backlog=max(world_size, 128))
        self._store = dist.TCPStore(  # without our listener, it would listen on all network interfaces
            address,
            listener.getsockname()[1],
            world_size,
            is_master=True,
            timeout=timedelta(seconds=seconds),
            wait_for_workers=False,
            master_listen_fd=listener.detach(),
        )
        return int(self._store.port)

    @_replies
    def build(
        self,
        environment: Mapping[str, str],
        seconds: float,
        device: str | None,
        worker_cls: type[Worker],
        given: Arguments,
    ) -> None:
        """Joins `torch.distributed` if there are several ranks, then builds the worker."""
        os.environ.update(environment)
        rank, world_size = int(environment["RANK"]), int(environment["WORLD_SIZE"])
        share = usable_cpus() // int(environment["LOCAL_WORLD_SIZE"])
        torch.set_num_threads(self._options.num_threads or max(1, share))  # Ray sets OMP_NUM_THREADS=1
        if world_size > 1:
            gpu = None if device is None else torch.device(device)
            if gpu is not None:  # else `DeviceMesh` selects number LOCAL_RANK, and Ray leaves a process a single GPU
                torch.cuda.set_device(gpu)
            limit = timedelta(seconds=seconds)
            address, port = environment["MASTER_ADDR"], int(environment["MASTER_PORT"])
            store = self._store or dist.TCPStore(address, port, world_size, is_master=False, timeout=limit)
            backend = "gloo" if gpu is None else "cpu:gloo,cuda:nccl"
            dist.init_process_group(
                backend, store=store, rank=rank, world_size=world_size, timeout=limit, device_id=gpu
            )
        args, kwargs = given
        self._worker = worker_cls(*args, rank=rank, world_size=world_size, **kwargs)

    @_replies
    def call(self, method: str, given: Arguments, store: BlockStore | None) -> Any:
        """Calls a method of the worker; an `async` one runs in a new event loop. References among the arguments are
        fetched first; returned batches are written to `store`, if any."""
        fetched: Fetched = []
        args, kwargs = fetch_batches(given, fetched)
        result = getattr(self._worker, method)(*args, **kwargs)
        if inspect.iscoroutine(result):
            result = asyncio.run(result)
        result = result if store is None else keep_batches(result, store)
        check_unwritten(fetched, f"{type(self._worker).__name__}.{method}")
        return result

    def mesh_place(self, mesh: str) -> MeshPlace:
        assert self._worker is not None
        return self._worker.mesh_place(mesh)

    def ping(self) -> list[LogRecord]:
        """Health check; returns the records logged since the last reply or ping."""
        return self._records.take()

    def interrupt(self) -> None:
        """Asks the running call to end early."""
        if self._worker is not None:
            self._worker.interrupt()

    @_replies
    def close(self) -> None:
        """Closes the worker and leaves the process group."""
        worker, self._worker = self._worker, None
        try:
            if worker is not None:
                worker.close()
        finally:
            if dist.is_initialized():
                dist.destroy_process_group()


def network_interface(address: str) -> str | None:
    """The network interface with `address`, by which gloo and NCCL reach other nodes: otherwise they take the address of the
    hostname, which on Debian is 127.0.1.1. None for a loopback address."""
    if ipaddress.ip_address(address).is_loopback:
        return None
    named = psutil.net_if_addrs().items()
    return next((name for name, found in named if any(a.address.partition("%")[0] == address for a in found)), None)


def exit_with_parent(seconds: float = 1.0) -> None:
    """Ends this process once its parent (the raylet of its node) is dead, also in the middle of a call; looks every
    `seconds`."""
    parent = os.getppid()
    while os.getppid() == parent:
        time.sleep(seconds)
    os._exit(1)


class _Records(logging.Handler):
    """Buffers log records for the next reply."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self._kept: deque[LogRecord] = deque(maxlen=_MAX_RECORDS)
        self._guard = threading.Lock()

    def emit(self, record: logging.LogRecord) -> None:
        with self._guard:
            self._kept.append((record.name, record.levelno, self.format(record)))

    def take(self) -> list[LogRecord]:
        """The records since the last call."""
        with self._guard:
            taken = list(self._kept)
            self._kept.clear()
        return taken


def pack_error(error: BaseException) -> bytes:
    """Serializes an exception, with its traceback, for `unpack_error`."""
    from ray import cloudpickle

    def pack(value: Any) -> bytes | None:
        try:
            return bytes(cloudpickle.dumps(value))
        except Exception:  # pickling a user's object may raise anything
            return None

    fields = {name: value for name, value in vars(error).items() if pack(value) is not None}
    tries = [error, (type(error), error.args, fields), RuntimeError(describe_error(error))]
    forms = [packed for each in tries if (packed := pack(each)) is not None]
    text = "".join(traceback.format_exception(type(error), error, error.__traceback__))
    return pickle.dumps((forms, text, user_place(error)))


def unpack_error(packed: bytes) -> BaseException:
    """Restores an exception, with the remote traceback as its cause; if it cannot be rebuilt here, a RuntimeError that
    describes it."""
    forms, text, place = pickle.loads(packed)
    for form in forms:
        try:
            value = pickle.loads(form)
            if isinstance(value, tuple):  # its class cannot be constructed from `args`
                kind, args, fields = value
                value = kind.__new__(kind, *args)
                value.args = args
                vars(value).update(fields)
            value.__cause__ = RemoteTraceback(text, place)
            return value
        except Exception:  # the class does not exist here, or takes other arguments
            continue
    raise AssertionError("unreachable: the last form is a RuntimeError")
