"""Measures Étude beside TRL and verl, and writes results, tables and a plot.

    python benchmarks/run.py                                      everything: about an hour and a half on two cores
    python benchmarks/run.py --only step,loop --repetitions 5     some of it; the other results stay as they are
    python benchmarks/run.py --only none --publish                write docs/performance.md again, with what is in --work
    python benchmarks/run.py --only pretrained --threads 1 --repetitions 1 --checkpoint FOLDER     the step of SmolLM2, as
                                                                  side_by_side.checkpoint --base makes it: half an hour

The peers' environments are made from PyPI, the model by Étude itself, both once, in `--work`. What is published is kept
in `benchmarks/published.json`: a row stays there until one of its name, measured later, is published.

Every measurement is a fresh process; the contenders of a row take turns, and take them in another order each time. CPU
seconds are user and system time at the given number of threads: on a machine that others use too they are steadier than
wall time, and the ratios within a row steadier still.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import resource
import subprocess
import sys
import time
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE))

from side_by_side import checkpoint, presentation  # noqa: E402
from side_by_side.environments import PACKAGES, python_of  # noqa: E402
from side_by_side.results import Measured, Results  # noqa: E402
from side_by_side.rows import KINDS, Contender, Row, rows  # noqa: E402

_WITH_ITS_OWN = tuple(kind for kind in KINDS if kind != "pretrained")  # those for which run.py makes the model
_TIMEOUT_SECONDS = 7200  # timeout of one process
_PUBLISHED = HERE / "published.json"
_BEGIN, _END = "<!-- benchmarks: begin -->", "<!-- benchmarks: end -->"


def main() -> None:
    """Runs the requested rows, then writes the tables and plot of everything measured so far."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default=",".join(_WITH_ITS_OWN), help=f"some of {','.join(KINDS)}, or none")
    parser.add_argument("--rows", default="", help="only rows whose name begins with one of these, comma-separated")
    parser.add_argument("--list", action="store_true", help="only say which rows there are")
    parser.add_argument("--repetitions", type=int, default=5)
    parser.add_argument("--threads", default="1,2")
    parser.add_argument("--work", type=Path, default=Path("build/benchmarks"), help="environments, model and results")
    parser.add_argument("--checkpoint", type=Path, help="another model than the benchmark's own")
    parser.add_argument("--system", help="the system prompt that goes with it")
    for name in PACKAGES:
        parser.add_argument(f"--{name}-environment", type=Path, help=f"an environment that has {name} already")
    parser.add_argument("--publish", action="store_true", help="write tables and plot into docs/performance*.md too")
    options = parser.parse_args()
    kinds = [kind for kind in options.only.split(",") if kind != "none"]
    for kind in kinds:
        if kind not in KINDS:
            parser.error(f"--only knows {', '.join(KINDS)} and none, not '{kind}'")
    if options.list:
        for row in rows(kinds, [int(count) for count in options.threads.split(",")], ["--checkpoint", ""]):
            print(f"{row.name:20} {row.title}: {', '.join(c.name for c in row.contenders)}")
        return
    work = options.work.resolve()
    results = Results(work / "results.json")
    if kinds:
        model = _model(options, work)
        given = {name: getattr(options, f"{name}_environment") for name in PACKAGES}
        threads = [int(count) for count in options.threads.split(",")]
        wanted = tuple(filter(None, options.rows.split(",")))
        for row in rows(kinds, threads, model):
            if not wanted or row.name.startswith(wanted):
                pythons = {
                    c.environment: python_of(c.environment, work, given=given.get(c.environment))
                    for c in row.contenders
                }
                results.put(_measured(row, options.repetitions, pythons))
    _write(results.load(), work)
    if options.publish:
        _publish(results.load(), HERE.parent / "docs" / "performance.md", Results(_PUBLISHED))


def _model(options: argparse.Namespace, work: Path) -> list[str]:
    """Returns the drivers' arguments that name the checkpoint."""
    if options.checkpoint is None:
        print("making the model, unless it is there", flush=True)
        checkpoint.make(work / "checkpoint")
    arguments = ["--checkpoint", str((options.checkpoint or work / "checkpoint").resolve())]
    return arguments + (["--system", options.system] if options.system else [])


def _measured(row: Row, repetitions: int, pythons: dict[str, Path]) -> Measured:
    readings: dict[str, list[dict[str, float]]] = {contender.name: [] for contender in row.contenders}
    started, load = time.time(), os.getloadavg()[0]
    for repetition in range(repetitions):
        turn = repetition % len(row.contenders)
        for contender in (*row.contenders[turn:], *row.contenders[:turn]):
            reading = _run(contender, pythons[contender.environment], row.threads)
            readings[contender.name].append(reading)
            shown = ", ".join(f"{name} {reading[name]:.4g}" for name in row.figures[:4] if name in reading)
            print(f"{row.name} {repetition + 1}/{repetitions} {contender.name}: {shown}", flush=True)
    conditions = {
        "date": time.strftime("%Y-%m-%d", time.gmtime(started)),
        "time": started,
        "load": load,
        "processors": os.cpu_count(),
        "processor": _processor(),
        "python": platform.python_version(),
    }
    return Measured(row.kind, row.name, row.title, row.figures, dict(row.targets), readings, conditions)


def _run(contender: Contender, python: Path, threads: int) -> dict[str, float]:
    """Returns the figures that a fresh process reports, and those of the process as a whole."""
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(
            [str(HERE), str(HERE.parent)] if contender.environment == "etude" else [str(HERE)]
        ),
        "OMP_NUM_THREADS": str(threads),
        "HF_HUB_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "TRL_EXPERIMENTAL_SILENCE": "1",
        "WANDB_DISABLED": "true",
    }
    started, before = time.perf_counter(), resource.getrusage(resource.RUSAGE_CHILDREN)
    done = subprocess.run(
        [str(python), *contender.command],
        env=environment,
        capture_output=True,
        text=True,
        timeout=_TIMEOUT_SECONDS,
        check=False,
    )
    wall, after = time.perf_counter() - started, resource.getrusage(resource.RUSAGE_CHILDREN)
    if done.returncode:
        raise SystemExit(f"{contender.name}: {' '.join(contender.command)} failed:\n{done.stderr[-3000:]}")
    reported = [line for line in done.stdout.splitlines() if line.startswith("{")]
    figures = json.loads(reported[-1]) if "-m" in contender.command and reported else {}
    if figures.get("sampled_tokens") and "rollout_cpu" in figures:
        figures["cpu_a_token"] = figures["rollout_cpu"] / figures["sampled_tokens"]
    cpu = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return figures | {"process_cpu": cpu, "process_wall": wall}


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), platform.machine())


def _write(measured: list[Measured], work: Path) -> None:
    if not measured:
        raise SystemExit(f"{work}: nothing was measured yet")
    text = presentation.tables(measured)
    (work / "tables.md").write_text(text)
    presentation.plot(measured, work / "performance.svg")
    print(f"{text}\n{work / 'results.json'}, {work / 'tables.md'}, {work / 'performance.svg'}")


def _publish(measured: list[Measured], page: Path, published: Results) -> None:
    """Merges rows into those that the page shows, and rewrites its tables, those of its translation, and its plot."""
    for row in measured:
        published.put_newer(row)
    shown = _ordered(published.load())
    for each in filter(Path.exists, (page, page.with_suffix(".zh.md"))):
        before, rest = each.read_text(encoding="utf-8").split(_BEGIN)
        tables = f"{_BEGIN}\n\n{presentation.tables(shown)}\n{_END}"
        each.write_text(f"{before}{tables}{rest.split(_END)[1]}", encoding="utf-8")
    presentation.plot(shown, page.with_suffix(".svg"))


def _ordered(measured: list[Measured]) -> list[Measured]:
    """Sorts rows into the order of `rows`."""
    names = [row.name for row in rows(KINDS, [1, 2], ["--checkpoint", ""])]
    return sorted(measured, key=lambda row: names.index(row.name) if row.name in names else len(names))


if __name__ == "__main__":
    main()
