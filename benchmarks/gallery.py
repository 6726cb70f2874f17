"""Every example, several seeds each: what docs/gallery.md shows.

    python benchmarks/gallery.py                                       all examples, three seeds each: about an hour
    python benchmarks/gallery.py --only calculator,phone_book --seeds 1    some; the others stay as they are
    python benchmarks/gallery.py --only none                           table and plot again, of what is in --work
    python benchmarks/gallery.py --publish                             table and plot go into docs/
    python benchmarks/gallery.py --real                                the same with a real model: two hours
    python benchmarks/gallery.py --environments                        those of examples/environments

Each is `etude quickstart --example NAME --seed N` in a fresh process of one thread, after what it starts from.
One that has finished is read, not run again; an interrupted or failed one goes on where it stopped. CPU seconds are user and
system time.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from datetime import date
from graphlib import TopologicalSorter
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

from svg import save_svg

from etude.dumps import list_dump_steps, read_rollouts
from etude.errors import ConfigError
from etude.quickstart.example import CALCULATOR, Example, find_example
from etude.run_folder import METRICS_FILE, read_metrics

ROOT = Path(__file__).resolve().parents[1]
DOCS = ROOT / "docs"
REAL, ENVIRONMENTS = "smollm2", "environments"  # folders of the examples with a real model, and of others' environments
PAGE_NAMES = {"": "gallery", REAL: "gallery_real", ENVIRONMENTS: "gallery_environments"}
GRACE = 120  # seconds for a stopped run to end its step and save
_TRAINING = {"success": "reward/success/mean", "reward": "reward/total/mean", "tool_use": "rollout/tool_use_rate"}

Summary: TypeAlias = Mapping[str, Any]


class Job(NamedTuple):
    """An example and a seed."""

    name: str
    seed: int

    def __str__(self) -> str:
        return f"{self.name}, seed {self.seed}"


def main() -> None:
    """Runs the requested jobs, then writes the table and plot of everything in the work folder."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    group = parser.add_mutually_exclusive_group()
    group.add_argument("--real", action="store_const", dest="folder", const=REAL, default="", help="real models")
    group.add_argument("--environments", action="store_const", dest="folder", const=ENVIRONMENTS, help="of others")
    parser.add_argument("--only", default=None, help="comma-separated, or none [all]")
    parser.add_argument("--seeds", default="1,2,3", help="comma-separated [1,2,3]")
    parser.add_argument("--work", type=Path, default=Path("build/gallery"), help="folder [build/gallery]")
    parser.add_argument("--at-once", type=int, default=2, help="runs [2]")
    parser.add_argument("--publish", action="store_true", help="table and plot go into docs/")
    arguments = parser.parse_args()
    found = read_examples(arguments.folder)
    names = list(found) if arguments.only is None else [] if arguments.only == "none" else arguments.only.split(",")
    if unknown := [name for name in names if name not in found]:
        parser.error(f"no example '{unknown[0]}' (known: {', '.join(found)})")
    if not all(seed.isdecimal() for seed in arguments.seeds.split(",")):
        parser.error(f"--seeds {arguments.seeds}: numbers with commas between them")
    seeds, work = sorted({int(seed) for seed in arguments.seeds.split(",")}), arguments.work.resolve()
    jobs = [Job(name, seed) for seed in seeds for name in found if name in names]
    failed = run(jobs, found, work, arguments.at_once)
    name = PAGE_NAMES[arguments.folder]
    if show(found, seeds, work, failed, name) and arguments.publish:
        publish(name, work, DOCS)
    if failed:
        raise SystemExit("\n".join(f"failed: {job}: see {log_of(work, job)}" for job in failed))


def read_examples(folder: str = "") -> dict[str, Example]:
    """Reads the examples of a folder in `examples` by name; of `examples` itself, the package's own comes first."""
    try:
        others = [Example.read(path.parent) for path in sorted((ROOT / "examples" / folder).glob("*/example.yaml"))]
    except ConfigError as error:
        raise SystemExit(f"error: {error}") from error
    return {each.name: each for each in (*([] if folder else [find_example(CALCULATOR)]), *others)}


def folder_of(work: Path, example: Example, seed: int) -> Path:
    """Returns the folder of a run that `etude quickstart` started in `work`."""
    return work / "runs" / example.root / f"seed-{seed}"


def log_of(work: Path, job: Job) -> Path:
    """Returns the file with a run's output."""
    return work / "logs" / f"{job.name}-seed-{job.seed}.txt"


def read_summary(work: Path, example: Example, seed: int) -> Summary | None:
    """Reads a run's summary; None if it has not finished."""
    path = folder_of(work, example, seed) / "summary.json"
    return json.loads(path.read_text(encoding="utf-8")) if path.exists() else None


# -- running ----------------------------------------------------------------------------------------------------------


def plan(jobs: Sequence[Job], found: Mapping[str, Example]) -> TopologicalSorter[Job]:
    """Orders the jobs: each after the jobs it starts from and is taught by, if they are among `jobs`."""
    sorter: TopologicalSorter[Job] = TopologicalSorter()
    for job in jobs:
        options = found[job.name].options
        others = [Job(name, job.seed) for name in (options.start, options.teacher) if name is not None]
        sorter.add(job, *(other for other in others if other in jobs))
    sorter.prepare()
    return sorter


def run(jobs: Sequence[Job], found: Mapping[str, Example], work: Path, at_once: int = 2) -> list[Job]:
    """Runs the jobs that have not finished, `at_once` at a time; returns those that failed. Running jobs stop when this
    process does."""
    sorter, waiting, failed = plan(jobs, found), set[Job](), list[Job]()
    running: dict[Job, subprocess.Popen[bytes]] = {}
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        while sorter.is_active():
            waiting.update(sorter.get_ready())
            for job in sorted(waiting, key=jobs.index)[: at_once - len(running)]:
                waiting.remove(job)
                if read_summary(work, found[job.name], job.seed) is not None:
                    print(f"{job}: finished before", flush=True)
                    sorter.done(job)
                else:
                    print(f"{job}: started", flush=True)
                    running[job] = start(job, work)
            for job in [job for job, process in running.items() if process.poll() is not None]:
                status, summary = running.pop(job).returncode, read_summary(work, found[job.name], job.seed)
                sorter.done(job)
                if status or summary is None:
                    failed.append(job)
                    print(f"{job}: failed with status {status}: see {log_of(work, job)}", flush=True)
                else:
                    print(
                        f"{job}: {cell(summary)}, claim {'held' if summary['claim']['held'] else 'FAILED'}", flush=True
                    )
            time.sleep(0.2 if running else 0)
    except KeyboardInterrupt:
        raise SystemExit(130) from None
    finally:
        stop(list(running.values()))
        signal.signal(signal.SIGTERM, before)
    return failed


def start(job: Job, work: Path) -> subprocess.Popen[bytes]:
    """Starts the run of an example in a new session, so that Ctrl-C reaches it only once, through `stop`."""
    log = log_of(work, job)
    log.parent.mkdir(parents=True, exist_ok=True)
    command = [sys.executable, "-m", "etude.cli.main", "quickstart", "--example", job.name, "--seed", str(job.seed)]
    threads = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
    with log.open("a") as output:
        return subprocess.Popen(
            command,
            cwd=work,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            env={**os.environ, **threads},
            start_new_session=True,
        )


def stop(processes: Sequence[subprocess.Popen[bytes]]) -> None:
    """Lets the processes end their step and save; kills them on a second Ctrl-C, or after `GRACE` seconds."""
    if not processes:
        return
    print("stopping after the current step; the same command goes on from there", flush=True)
    for process in processes:
        process.terminate()
    deadline = time.monotonic() + GRACE
    with suppress(KeyboardInterrupt, subprocess.TimeoutExpired):
        for process in processes:
            process.wait(max(0.0, deadline - time.monotonic()))
    for process in processes:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


# -- results ----------------------------------------------------------------------------------------------------------


def show(found: Mapping[str, Example], seeds: Sequence[int], work: Path, failed: Sequence[Job], name: str) -> bool:
    """Writes `name`.md and `name`.svg into `work`; False if nothing has finished."""
    summaries = {
        Job(name, seed): summary
        for name, example in found.items()
        for seed in seeds
        if (summary := read_summary(work, example, seed)) is not None
    }
    if not summaries:
        print("nothing has finished yet")
        return False
    text = table(found, seeds, summaries, failed)
    print(f"\n{text}")
    newest = max((folder_of(work, found[job.name], job.seed) / "summary.json").stat().st_mtime for job in summaries)
    measured = f"Last measured on {date.fromtimestamp(newest):%-d %B %Y}."
    (work / f"{name}.md").write_text(f"{measured}\n\n{text}\n\n![Learning curves]({name}.svg)\n", encoding="utf-8")
    plot(found, summaries, work, work / f"{name}.svg")
    return True


def table(
    found: Mapping[str, Example], seeds: Sequence[int], summaries: Mapping[Job, Summary], failed: Sequence[Job]
) -> str:
    """Renders a Markdown table, as in docs/, with a row per example and a column per seed."""
    columns = ["example", "shows", "claim", *(f"seed {seed}" for seed in seeds), "CPU s", "claim held"]
    lines = [f"| {' | '.join(columns)} |", "|---" * len(columns) + "|"]
    for name, example in found.items():
        jobs = [Job(name, seed) for seed in seeds]
        done = [summaries[job] for job in jobs if job in summaries]
        cells = [
            f"failed: `{log_of(Path(), job)}`" if job in failed else cell(summaries[job]) if job in summaries else "–"
            for job in jobs
        ]
        cpu = [sum(summary["cpu_seconds"].values()) for summary in done]
        tried = len({*(job for job in jobs if job in summaries), *(job for job in jobs if job in failed)})
        row = [
            f"[{name}]({os.path.relpath(example.folder, DOCS)})",
            example.options.shows,
            f"{example.options.metric.replace('_', ' ')} {example.options.margin:+g}",
            *cells,
            f"{statistics.median(cpu):.0f}" if cpu else "–",
            f"{sum(summary['claim']['held'] for summary in done)} of {tried}" if tried else "–",
        ]
        lines.append(f"| {' | '.join(row)} |")
    return "\n".join(lines)


def cell(summary: Summary) -> str:
    """Formats the claim's metric before and after, with 95 % intervals."""
    claim = summary["claim"]
    return " → ".join(
        f"{claim[when]['value']:.2f} ({claim[when]['low']:.2f} to {claim[when]['high']:.2f})"
        for when in ("before", "after")
    )


def read_curve(folder: Path, metric: str) -> dict[int, float]:
    """Returns step → the metric's mean over the rollouts that were trained on."""
    if metric == "turns":
        dumps = folder / "rollouts"
        return {step: _mean_turns(dumps / f"{step}.jsonl") for step in list_dump_steps(dumps)}
    rows = read_metrics(folder / METRICS_FILE)
    return {row["step"]: row[_TRAINING[metric]] for row in rows if _TRAINING[metric] in row}


def _mean_turns(dump: Path) -> float:
    return statistics.fmean(record["assistant_turns"] for record in read_rollouts(dump))


def plot(found: Mapping[str, Example], summaries: Mapping[Job, Summary], work: Path, path: Path) -> None:
    """Draws small multiples, one per example: the claim's metric in training, a line per seed, and its two evaluations."""
    import matplotlib

    matplotlib.use("svg")
    import matplotlib.pyplot as plt

    names = [name for name in found if any(job.name == name for job in summaries)]
    columns = 4
    lines = -(-len(names) // columns)
    figure, grid = plt.subplots(lines, columns, figsize=(10, 2 * lines + 0.5), squeeze=False)
    for axes in grid.flat[len(names) :]:
        axes.set_visible(False)
    for axes, name in zip(grid.flat, names):
        metric = found[name].options.metric
        for job, summary in summaries.items():
            if job.name == name:
                curve = read_curve(folder_of(work, found[name], job.seed), metric)
                steps = sorted(curve)
                axes.plot(steps, [curve[step] for step in steps], color="#4878a8", linewidth=0.8, alpha=0.7)
                for step, when in ((0, "before"), (max(steps, default=1), "after")):
                    found_at = summary["claim"][when]
                    spread = [[found_at["value"] - found_at["low"]], [found_at["high"] - found_at["value"]]]
                    axes.errorbar(
                        [step], [found_at["value"]], spread, color="#b85450", fmt="o", markersize=3, linewidth=1
                    )
        axes.set_title(f"{name}: {metric.replace('_', ' ')}", fontsize=9)
        if metric in ("success", "tool_use"):
            axes.set_ylim(0, 1.02)
        axes.tick_params(labelsize=7)
        axes.grid(linewidth=0.3)
    figure.supxlabel("step; blue: sampled in training, red: evaluations before and after, 95 % intervals", fontsize=8)
    save_svg(figure, path)


def publish(name: str, work: Path, docs: Path) -> None:
    """Writes `name`.md of `work` between its marks in gallery.md and in its translation, and `name`.svg next to them.

    Raises:
        SystemExit: a page has no marks.
    """
    begin, end = (f"<!-- {name}: {place} -->" for place in ("begin", "end"))
    text = (work / f"{name}.md").read_text(encoding="utf-8")
    for page in docs.glob("gallery*.md"):
        before, begins, rest = page.read_text(encoding="utf-8").partition(begin)
        _, ends, after = rest.partition(end)
        if not begins or not ends:
            raise SystemExit(f"{page} has no marks {begin} and {end}")
        page.write_text(f"{before}{begin}\n\n{text}\n{end}{after}", encoding="utf-8")
    (docs / f"{name}.svg").write_bytes((work / f"{name}.svg").read_bytes())


if __name__ == "__main__":
    main()
