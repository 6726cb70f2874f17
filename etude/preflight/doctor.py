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
from importlib.metadata import PackageNotFoundError, requires, version
from pathlib import Path
from urllib.request import getproxies

from packaging.requirements import Requirement

from etude.config.nodes import versions
from etude.errors import one_line
from etude.findings import Findings, Level

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
    findings = Findings()
    steps = {
        "python": (_python, "`python --version`: 3.10 or newer is needed"),
        "packages": (_packages, "pip install --upgrade etude"),
        "processors": (_processors, "`nproc` and `free -h` say what the process may use"),
        "gpu": (_gpu, "`nvidia-smi` says how the driver is; CUDA_VISIBLE_DEVICES= trains on the CPU"),
        "sandbox": (_sandbox, _OTHER_SANDBOX),
        "extras": (_extras, "pip install 'etude[dev]'"),
        "ray": (_ray, "unset RAY_ADDRESS, or `ray start --head` there"),
        "disk": (_disk, "set trainer.default_local_dir, TMPDIR and HF_HOME to folders that exist"),
        "limits": (_limits, "`ulimit -a` lists them"),
    }
    for subject, (step, fix) in steps.items():
        findings.run(subject, lambda step=step: step(findings), fix=fix)  # type: ignore[misc]
    return findings


def _python(findings: Findings) -> str:
    return f"{platform.python_version()} on {platform.system()} {platform.release()}, {platform.machine()}"


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
    return (
        "" if needed.specifier.contains(have, prereleases=True) else f"{needed.name} {have} is not {needed.specifier}"
    )


def _packages(findings: Findings) -> str:
    for needed in _requirements():
        if fault := _fault(needed):
            findings.add(Level.ERROR, "packages", fault, f"run  pip install '{needed.name}{needed.specifier}'")
    return ", ".join(f"{name} {have}" for name, have in versions().items() if have and name != "python")


def _processors(findings: Findings) -> str:
    import psutil
    import torch

    usable, memory = len(os.sched_getaffinity(0)), psutil.virtual_memory()
    load = os.getloadavg()[0]
    if load > 2 * usable:
        line = f"{load:.0f} processes compete for {usable} CPUs"
        fix = "wait for the others (`top`): time-outs, such as a tool's config.timeout, are in seconds of the clock"
        findings.add(Level.WARNING, "processors", line, fix)
    return (
        f"{usable} of {os.cpu_count()} CPUs, {torch.get_num_threads()} torch threads, "
        f"{memory.available / GIB:.1f} of {memory.total / GIB:.1f} GiB of memory free"
    )


def _gpu(findings: Findings) -> str:
    import torch

    if not torch.cuda.is_available():
        if shutil.which("nvidia-smi"):
            fix = "`nvidia-smi` says which CUDA the driver has; install the torch that pytorch.org names for it"
            findings.add(Level.WARNING, "gpu", f"there is a driver, but torch {torch.__version__} sees no GPU", fix)
        return "none: runs train on the CPU (trainer.device=auto)"
    said = []
    for number in range(torch.cuda.device_count()):
        square = torch.eye(64, device=f"cuda:{number}")
        if float((square @ square).sum()) != 64.0:
            fix = f"leave it out of CUDA_VISIBLE_DEVICES, and see `nvidia-smi -q -i {number}`"
            findings.add(Level.ERROR, "gpu", f"cuda:{number} multiplies wrongly", fix)
        free, total = torch.cuda.mem_get_info(number)
        said.append(f"{torch.cuda.get_device_name(number)} ({free / GIB:.0f} of {total / GIB:.0f} GiB free)")
    return ", ".join(said)


def _sandbox(findings: Findings) -> str:
    from etude.sandbox import Executor, Isolation, SandboxUnavailableError

    async def prove(mode: Isolation) -> str:
        async with await Executor.open(mode) as executor:
            await executor.check()
            return ", ".join(language.value for language in executor.languages)

    works: dict[str, str] = {}
    for mode in (Isolation.BUBBLEWRAP, Isolation.NAMESPACES):
        try:
            works[mode.value] = asyncio.run(prove(mode))
        except SandboxUnavailableError as error:
            missing = mode is Isolation.BUBBLEWRAP and not shutil.which("bwrap")
            fix = "run `apt-get install bubblewrap`" if missing else _NAMESPACES
            findings.add(Level.WARNING, "sandbox", f"{mode.value}: {one_line(error)}", fix)
    if not works:
        line = "no mode isolates: model-written code cannot run here"
        findings.add(Level.WARNING, "sandbox", line, f"see above, or {_OTHER_SANDBOX}")
    said = "; ".join(f"{mode}: every guarantee holds ({languages})" for mode, languages in works.items())
    if said:
        findings.add(Level.OK, "sandbox", said)
    return ""


def _extras(findings: Findings) -> str:
    lines = requires("etude") or ()
    names = dict.fromkeys(
        part.split("'")[1]
        for line in lines
        if "extra ==" in line
        for part in line.replace('"', "'").split("extra ==")[1:]
    )
    have = []
    for extra in names:
        faults = [fault for needed in _requirements(extra) if needed.name != "etude" and (fault := _fault(needed))]
        if faults and extra != "dev":
            fix = f"if you need it: pip install 'etude[{extra}]'"
            findings.add(Level.SKIPPED, "extras", f"{extra}: {'; '.join(faults)}", fix)
        elif not faults:
            have.append(extra)
    findings.add(Level.OK, "extras", f"installed: {', '.join(have) or 'none'}")
    return ""


def _ray(findings: Findings) -> str:
    shared = shutil.disk_usage("/dev/shm").total if Path("/dev/shm").is_dir() else 0
    try:
        have = version("ray")
    except PackageNotFoundError:
        return "not installed: runs train in one process (trainer.backend=local)"
    if shared < _MIN_SHARED:
        line = f"/dev/shm has {shared / 2**20:.0f} MiB: Ray's object store falls back to the disk"
        findings.add(Level.WARNING, "ray", line, "mount a larger one (docker run --shm-size=8g)")
    address = os.environ.get("RAY_ADDRESS")
    return f"{have}; a run starts its own cluster" if not address else f"{have}; runs join the cluster at {address}"


def _disk(findings: Findings) -> str:
    places = {
        "here": (Path.cwd(), "trainer.default_local_dir"),
        "temporary files": (Path(tempfile.gettempdir()), "TMPDIR"),
        "models": (_hub_cache(), "HF_HOME"),
    }
    said = []
    for name, (folder, key) in places.items():
        there = next(place for place in (folder, *folder.parents) if place.exists())
        free = shutil.disk_usage(there).free
        said.append(f"{name} {free / GIB:.1f} GiB ({folder})")
        if free < _MIN_FREE:
            line = f"{name}: only {free / GIB:.1f} GiB are free at {there}"
            findings.add(Level.WARNING, "disk", line, f"free space, or set {key} to a folder on another disk")
    return "free: " + ", ".join(said)


def _hub_cache() -> Path:
    home = os.environ.get("HF_HOME") or Path.home() / ".cache" / "huggingface"
    return Path(os.environ.get("HF_HUB_CACHE") or Path(home) / "hub").expanduser()


def _limits(findings: Findings) -> str:
    files, processes = (resource.getrlimit(which)[0] for which in (resource.RLIMIT_NOFILE, resource.RLIMIT_NPROC))
    if 0 <= files < _MIN_FILES:
        line = f"{files} open files: many tool connections at once fail"
        findings.add(Level.WARNING, "limits", line, f"ulimit -n {_MIN_FILES * 16}")
    proxies = ", ".join(sorted(getproxies()))
    shown = ["unlimited" if each < 0 else str(each) for each in (files, processes)]
    return f"{shown[0]} open files, {shown[1]} processes" + (f"; proxies for {proxies}" if proxies else "")
