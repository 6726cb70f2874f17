"""`inspect_machine`: checks whether this machine can run Étude: versions, CPU, GPU, sandbox, extras, Ray, disk, limits.

Invariant: whatever is reported to work was actually tried (a sandbox mode runs its proofs, a GPU multiplies a matrix), and
nothing outlives the check: no cluster, no server.
"""

from __future__ import annotations

import asyncio
import os
import platform
import resource
import shutil
import tempfile
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, metadata, requires, version
from pathlib import Path
from urllib.request import getproxies

from packaging.requirements import Requirement

from etude.checks.findings import Finding, Findings, Level, Result, check, error, ok, warning
from etude.checks.nodes import versions
from etude.distributed.usage import usable_cpus
from etude.errors import one_line

_MIN_FILES = 4096  # open-file limit that many tools, sessions and connections may need
_MIN_FREE = 5 * 2**30
_MIN_SHARED = 2**30  # size of /dev/shm, where Ray and vLLM exchange tensors
GIB = 2**30
_OTHER_SANDBOX = "run `etude sandbox serve` on another machine, and name it in ETUDE_SANDBOX_URL here"
_NAMESPACES = (
    "allow unprivileged user namespaces: sysctl kernel.apparmor_restrict_unprivileged_userns=0 (Ubuntu), "
    "kernel.unprivileged_userns_clone=1 (Debian), or docker run --security-opt seccomp=unconfined"
)


def inspect_machine() -> Findings:
    """Runs every check. Errors are unmet base requirements, GPUs that compute wrongly and checks that raise."""
    return Findings().run_stage("machine", None)


@check("machine", "python", fix="`python --version`: 3.10 or newer is needed")
def _python(_: None) -> Result:
    yield f"{platform.python_version()} on {platform.system()} {platform.release()}, {platform.machine()}"


def _requirements(extra: str = "") -> Iterator[Requirement]:
    """Yields the requirements of the base install, or those that an extra adds."""
    for line in requires("etude") or ():
        needed = Requirement(line)
        conditional = "extra" in str(needed.marker or "")
        if conditional == bool(extra) and (needed.marker is None or needed.marker.evaluate({"extra": extra})):
            yield needed


def _fault(needed: Requirement) -> str:
    """Returns what is wrong with an installed package; empty if nothing is."""
    try:
        have = version(needed.name)
    except PackageNotFoundError:
        return f"{needed.name} is not installed"
    fits = needed.specifier.contains(have, prereleases=True)
    return "" if fits else f"{needed.name} {have} is not {needed.specifier}"


@check("machine", "packages", fix="pip install --upgrade etude")
def _packages(_: None) -> Result:
    for needed in _requirements():
        if fault := _fault(needed):
            yield error(fault, f"run  pip install '{needed.name}{needed.specifier}'")
    yield ", ".join(f"{name} {have}" for name, have in versions().items() if have and name != "python")


@check("machine", "processors", fix="`nproc` and `free -h` say what the process may use")
def _processors(_: None) -> Result:
    import psutil
    import torch

    usable, memory, load = usable_cpus(), psutil.virtual_memory(), os.getloadavg()[0]
    if load > 2 * usable:
        yield warning(
            f"{load:.0f} processes compete for {usable} CPUs",
            "wait for the others (`top`): time-outs, such as a tool's config.timeout, are in seconds of the clock",
        )
    yield (
        f"{usable} of {os.cpu_count()} CPUs, {torch.get_num_threads()} torch threads, "
        f"{memory.available / GIB:.1f} of {memory.total / GIB:.1f} GiB of memory free"
    )


@check("machine", "gpu", fix="`nvidia-smi` says how the driver is; CUDA_VISIBLE_DEVICES= trains on the CPU")
def _gpu(_: None) -> Result:
    import torch

    if not torch.cuda.is_available():
        if shutil.which("nvidia-smi"):
            yield warning(
                f"there is a driver, but torch {torch.__version__} sees no GPU",
                "`nvidia-smi` says which CUDA the driver has; install the torch that pytorch.org names for it",
            )
        yield "none: runs train on the CPU (trainer.device=auto)"
        return
    said = []
    for number in range(torch.cuda.device_count()):
        square = torch.eye(64, device=f"cuda:{number}")
        if float((square @ square).sum()) != 64.0:
            fix = f"leave it out of CUDA_VISIBLE_DEVICES, and see `nvidia-smi -q -i {number}`"
            yield error(f"cuda:{number} multiplies wrongly", fix)
        free, total = torch.cuda.mem_get_info(number)
        said.append(f"{torch.cuda.get_device_name(number)} ({free / GIB:.0f} of {total / GIB:.0f} GiB free)")
    yield ", ".join(said)


@check("machine", "sandbox", fix=_OTHER_SANDBOX)
def _sandbox(_: None) -> Result:
    from etude.sandbox import Executor, Isolation, SandboxUnavailableError

    async def prove(mode: Isolation) -> str:
        async with await Executor.open(mode) as executor:
            await executor.check()
            return ", ".join(language.value for language in executor.languages)

    works: dict[str, str] = {}
    for mode in (Isolation.BUBBLEWRAP, Isolation.NAMESPACES):
        try:
            works[mode.value] = asyncio.run(prove(mode))
        except SandboxUnavailableError as failed:
            missing = mode is Isolation.BUBBLEWRAP and not shutil.which("bwrap")
            fix = "run `apt-get install bubblewrap`" if missing else _NAMESPACES
            yield warning(f"{mode.value}: {one_line(failed)}", fix)
    if works:
        yield ok("; ".join(f"{mode}: every guarantee holds ({languages})" for mode, languages in works.items()))
    else:
        yield warning("no mode isolates: model-written code cannot run here", f"see above, or {_OTHER_SANDBOX}")


@check("machine", "extras", fix="pip install 'etude[dev]'")
def _extras(_: None) -> Result:
    have = []
    for extra in metadata("etude").get_all("Provides-Extra") or ():
        faults = [fault for needed in _requirements(extra) if needed.name != "etude" and (fault := _fault(needed))]
        if faults and extra != "dev":
            message, fix = f"{extra}: {'; '.join(faults)}", f"if you need it: pip install 'etude[{extra}]'"
            yield Finding(Level.SKIPPED, "", message, fix)
        elif not faults:
            have.append(extra)
    yield ok(f"installed: {', '.join(have) or 'none'}")


@check("machine", "ray", fix="unset RAY_ADDRESS, or `ray start --head` there")
def _ray(_: None) -> Result:
    shared = shutil.disk_usage("/dev/shm").total if Path("/dev/shm").is_dir() else 0
    try:
        have = version("ray")
    except PackageNotFoundError:
        yield "not installed: runs train in one process (trainer.backend=local)"
        return
    if shared < _MIN_SHARED:
        line = f"/dev/shm has {shared / 2**20:.0f} MiB: Ray's object store falls back to the disk"
        yield warning(line, "mount a larger one (docker run --shm-size=8g)")
    address = os.environ.get("RAY_ADDRESS")
    yield f"{have}; a run starts its own cluster" if not address else f"{have}; runs join the cluster at {address}"


@check("machine", "disk", fix="set trainer.default_local_dir, TMPDIR and HF_HOME to folders that exist")
def _disk(_: None) -> Result:
    home = os.environ.get("HF_HOME") or Path.home() / ".cache" / "huggingface"
    hub_cache = Path(os.environ.get("HF_HUB_CACHE") or Path(home) / "hub").expanduser()
    said = []
    for name, folder, key in (
        ("here", Path.cwd(), "trainer.default_local_dir"),
        ("temporary files", Path(tempfile.gettempdir()), "TMPDIR"),
        ("models", hub_cache, "HF_HOME"),
    ):
        there = next(place for place in (folder, *folder.parents) if place.exists())
        free = shutil.disk_usage(there).free
        said.append(f"{name} {free / GIB:.1f} GiB ({folder})")
        if free < _MIN_FREE:
            line = f"{name}: only {free / GIB:.1f} GiB are free at {there}"
            yield warning(line, f"free space, or set {key} to a folder on another disk")
    yield "free: " + ", ".join(said)


@check("machine", "limits", fix="`ulimit -a` lists them")
def _limits(_: None) -> Result:
    files, processes = (resource.getrlimit(which)[0] for which in (resource.RLIMIT_NOFILE, resource.RLIMIT_NPROC))
    if 0 <= files < _MIN_FILES:
        yield warning(f"{files} open files: many tool connections at once fail", f"ulimit -n {_MIN_FILES * 16}")
    proxies = ", ".join(sorted(getproxies()))
    shown = ["unlimited" if each < 0 else str(each) for each in (files, processes)]
    yield f"{shown[0]} open files, {shown[1]} processes" + (f"; proxies for {proxies}" if proxies else "")
