"""`run.json`: what a run ran on, and how it ended.

Invariant: the file is there from the first moment, and until the run ends says that it has not; so a run that was killed
is told from one that is complete.
"""

from __future__ import annotations

import json
import os
import platform
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from etude.errors import one_line
from etude.jsonl import write_atomically
from etude.run_folder import COMPLETED, RUN_FILE

_PACKAGES = ("etude", "torch", "transformers", "vllm", "sglang")


@contextmanager
def run_record(run_dir: Path) -> Iterator[None]:
    """Keeps the record of the run that the block is."""
    facts = {"versions": versions(), "hardware": hardware()}
    _write(run_dir, facts | {"ended": None})
    try:
        yield
    except BaseException as error:
        _write(run_dir, facts | {"ended": one_line(error)})
        raise
    _write(run_dir, facts | {"ended": COMPLETED})


def versions() -> str:
    """Python and the packages that results depend on: `python 3.11.7, torch 2.13.0, …`."""
    found = [f"python {platform.python_version()}"]
    for package in _PACKAGES:
        try:
            found.append(f"{package} {version(package)}")
        except PackageNotFoundError:
            continue
    return ", ".join(found)


def hardware() -> str:
    """Processor, cores, and GPUs that torch sees."""
    import torch

    model = platform.processor() or platform.machine()
    if (cpuinfo := Path("/proc/cpuinfo")).is_file():
        lines = cpuinfo.read_text(errors="replace").splitlines()
        model = next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), model)
    gpus = [torch.cuda.get_device_name(number) for number in range(torch.cuda.device_count())]
    return ", ".join([f"{model}, {os.cpu_count()} cores, {torch.get_num_threads()} threads", *gpus])


def _write(run_dir: Path, record: dict[str, Any]) -> None:
    with write_atomically(run_dir / RUN_FILE) as file:
        file.write(json.dumps(record, indent=1).encode())
