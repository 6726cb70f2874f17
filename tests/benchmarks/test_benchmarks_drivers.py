"""Every benchmark starts, and those that take seconds at their smallest do their work."""

import importlib.util
import runpy
import sys
from pathlib import Path

import pytest
import torch

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
DRIVERS = BENCHMARKS / "side_by_side" / "drivers"
PEERS = {"trl_step.py": "trl", "llama.py": "llama_cpp"}
PROGRAMS = sorted(
    path for folder in (BENCHMARKS, DRIVERS) for path in folder.glob("*.py") if path.name != "__init__.py"
)
SMALLEST = [
    "trace.py --calls 50 --repeats 1",
    "tools_session.py --trajectories 2 --turns 1 --repeats 1",
    "reward_overlap.py --trajectories 2 --rollout 0 0.01 --score 0 0.01",
    "data_plane.py proto --mebibytes 1 --rounds 1 --blocks 2",
    "gateway.py --trajectories 2 --turns 1 --repeats 1",
    "sandbox_executor.py --rounds 2 --flat 2",
    "tools_mcp.py --calls 2 --rounds 1",
    "run.py --list",
    "side_by_side/drivers/dataproto.py etude --runs 1",
    "side_by_side/drivers/update.py etude --sequences 4 --runs 1",
    "side_by_side/drivers/update.py padded --sequences 4 --runs 1",
]


@pytest.fixture
def output_of(monkeypatch, capsys):
    """Runs a program with arguments in this process, where torch is loaded already, and returns what it prints."""
    threads = torch.get_num_threads()

    def run(path, *arguments):
        monkeypatch.syspath_prepend(str(BENCHMARKS))
        monkeypatch.setattr(sys, "argv", [str(path), *arguments])
        runpy.run_path(str(path), run_name="__main__")
        return capsys.readouterr().out.strip()

    yield run
    torch.set_num_threads(threads)


@pytest.mark.parametrize("path", PROGRAMS, ids=lambda path: path.name)
def test_a_program_can_be_imported(path, monkeypatch):
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    for name, package in PEERS.items():
        if path.name == name:
            pytest.importorskip(package)
    spec = importlib.util.spec_from_file_location(f"benchmark_{path.stem}", path)
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, spec.name, module)
    spec.loader.exec_module(module)


@pytest.mark.parametrize("command", SMALLEST)
def test_a_program_does_its_smallest_work(output_of, command):
    path, *arguments = command.split()
    assert output_of(BENCHMARKS / path, *arguments)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    """The benchmark's model, untrained."""
    sys.path.insert(0, str(BENCHMARKS))
    try:
        from side_by_side import checkpoint, task

        folder = tmp_path_factory.mktemp("checkpoint") / "work"
        checkpoint._untrained(folder, checkpoint._demonstrations(500, folder))
        (folder / "model" / task.SYSTEM_FILE).write_text('{"system": "Use the tool."}')
    finally:
        sys.path.remove(str(BENCHMARKS))
    return folder / "model"


@pytest.mark.parametrize(
    "command",
    [
        "etude_latency.py --tool-seconds 0.001 --runs 1",
        "etude_step.py --steps 1 --prompts 1",
        "loop.py etude --trajectories 2 --turns 1 --runs 1",
        "loop.py floor --trajectories 2 --turns 1 --runs 1",
        "loop.py plain --trajectories 2 --turns 1 --runs 1",
    ],
)
def test_a_side_by_side_driver_does_its_smallest_work(output_of, checkpoint, command):
    path, *arguments = command.split()
    assert output_of(DRIVERS / path, *arguments, "--checkpoint", str(checkpoint))


@pytest.mark.parametrize("what", ["--trajectories 2 --width 2", "--layers", "--decode --batches 2"])
def test_the_native_engine_is_measured(output_of, checkpoint, what):
    assert output_of(BENCHMARKS / "native_engine.py", "--model", str(checkpoint), *what.split())
