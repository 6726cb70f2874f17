"""The quickstart with each algorithm: learning curves for docs/algorithms.md.

    python benchmarks/learning_curves.py                                  all algorithms, three seeds each: hours
    python benchmarks/learning_curves.py --only rloo,gspo --seeds 1,2     some; the others stay as they are
    python benchmarks/learning_curves.py --only none                      table and plot again, of what is in --work
    python benchmarks/learning_curves.py --publish                        table and plot go into docs/

All algorithms of a seed start from the same warmed-up model and see the same prompts. Each run is a fresh process; one that
has finished is read, not run again, and an interrupted one goes on from its last checkpoint. CPU seconds are user and system
time; wall times mean something on an idle machine only.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

from svg import save_svg

from etude.run_folder import METRICS_FILE, read_metrics

_ESTIMATOR, _ACTOR = "algorithm.adv_estimator", "actor_rollout_ref.actor"
_LOSS = f"{_ACTOR}.policy_loss.loss_mode"
_CORRECTION = "algorithm.rollout_correction"
_KEEP = "algorithm.filter_groups.enable=false"  # keeps groups of equal scores, which have gradients here
ALGORITHMS: dict[str, tuple[str, ...]] = {
    "grpo": (),
    "rloo": (f"{_ESTIMATOR}=rloo",),
    "max_rl": (f"{_ESTIMATOR}=max_rl",),
    "reinforce_plus_plus": (f"{_ESTIMATOR}=reinforce_plus_plus", _KEEP),
    "remax": (f"{_ESTIMATOR}=remax", _KEEP),
    "gae": (
        f"{_ESTIMATOR}=gae",
        _KEEP,
        "algorithm.lam=0.95",
        "critic.optim.lr=1e-3",
        "trainer.critic_warmup=2",
    ),
    "gae_shared_trunk": (
        f"{_ESTIMATOR}=gae",
        _KEEP,
        "algorithm.lam=0.95",
        "critic.share_trunk=true",
        "critic.optim.lr=1e-3",
        "trainer.critic_warmup=2",
    ),
    "gigpo": (f"{_ESTIMATOR}=gigpo", _KEEP, "algorithm.gamma=0.95"),
    "dapo": (
        "algorithm.zero_variance=refill",
        "algorithm.filter_groups.max_num_gen_batches=4",
        f"{_ACTOR}.clip_ratio_high=0.28",
        f"{_ACTOR}.loss_agg_mode=token-mean",
    ),
    "hierarchical_grpo": (f"{_ESTIMATOR}=hierarchical_grpo", _KEEP),
    "rae": (f"{_ESTIMATOR}=rae", _KEEP),
    "gspo": (f"{_LOSS}=gspo",),
    "cispo": (f"{_LOSS}=cispo",),
    "dppo_tv": (f"{_LOSS}=dppo_tv",),
    "dppo_kl": (f"{_LOSS}=dppo_kl",),
    "top_p": ("actor_rollout_ref.rollout.top_p=0.95",),
    "score_centering": (
        f"{_CORRECTION}.bypass_mode=false",
        f"{_CORRECTION}.score_centering_topk=16",
        f"{_CORRECTION}.rollout_is=token",
    ),
    "distillation": ("distillation.teachers={{default: {teacher}}}", _KEEP),
    "distillation_topk": (
        "distillation.teachers={{default: {teacher}}}",
        "distillation.distillation_loss.loss_mode=forward_kl_topk",
        _KEEP,
    ),
}
"""Overrides of each algorithm on top of the quickstart's configuration; `{teacher}` is `grpo`'s model of the same seed."""
GREEDY, SAMPLED = "val-core/etude/arithmetic/reward/mean@1", "reward/success/mean"
_DOCS = Path(__file__).resolve().parents[1] / "docs"
_BEGIN, _END = "<!-- learning curves: begin -->", "<!-- learning curves: end -->"

_SECTION = """## Learning curves

The quickstart, trained from the same warmed-up model with each algorithm: medians over seeds, with the range. The teacher of
both distillations is the model that `grpo` made of the same seed. Made by `python benchmarks/learning_curves.py --publish`;
CPU seconds are of 60 steps at one thread, beside other programs.

![Learning curves](learning_curves.svg)

"""


def main() -> None:
    """Runs the requested runs, then writes the table and plot of everything measured so far."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default=",".join(ALGORITHMS), help="comma-separated, or none")
    parser.add_argument("--seeds", default="1,2,3")
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--work", type=Path, default=Path("build/learning_curves"))
    parser.add_argument("--publish", action="store_true", help="table and plot go into docs/")
    arguments = parser.parse_args()
    seeds = [int(seed) for seed in arguments.seeds.split(",")]
    for name in [] if arguments.only == "none" else arguments.only.split(","):
        if name not in ALGORITHMS:
            parser.error(f"no algorithm '{name}' (known: {', '.join(ALGORITHMS)})")
        for seed in seeds:
            run(arguments.work, name, seed, arguments.steps)
    curves = {
        name: found
        for name in ALGORITHMS
        if (found := [c for seed in seeds if (c := read(folder_of(arguments.work, name, seed))) is not None])
    }
    text = table(curves)
    arguments.work.mkdir(parents=True, exist_ok=True)
    (arguments.work / "table.md").write_text(text + "\n")
    plot(curves, arguments.work / "learning_curves.svg")
    print(text)
    if arguments.publish:
        plot(curves, _DOCS / "learning_curves.svg")
        publish(text)


def folder_of(work: Path, name: str, seed: int) -> Path:
    """Returns the folder of a run."""
    return work / name / f"seed-{seed}"


def run(work: Path, name: str, seed: int, steps: int) -> None:
    """Runs one training, unless it has finished, after the runs that it starts from."""
    folder = folder_of(work, name, seed)
    if finished(folder, steps):
        return
    overrides = ALGORITHMS[name]
    if any("{teacher}" in each for each in overrides):
        run(work, "grpo", seed, steps)
        teacher = folder_of(work, "grpo", seed) / f"global_step_{steps}" / "actor" / "huggingface"
        overrides = tuple(each.format(teacher=teacher) for each in overrides)
    start = warm_up(work, seed)
    print(f"{name}, seed {seed}", flush=True)
    folder.mkdir(parents=True, exist_ok=True)
    command = [
        *(sys.executable, "-m", "etude.cli.main", "train", "--config-name=quickstart"),
        f"data.train_files={start}/data/train.parquet",
        f"data.val_files={start}/data/val.parquet",
        f"actor_rollout_ref.model.path={start}/warm_up/huggingface",
        f"trainer.default_local_dir={folder}",
        f"trainer.seed={seed}",
        f"trainer.total_training_steps={steps}",
        "trainer.logger=[jsonl]",
        *overrides,
    ]
    with (folder / "output.txt").open("a") as output:
        made = subprocess.run(command, stdout=output, stderr=subprocess.STDOUT)
    if made.returncode:
        raise SystemExit(f"{name}, seed {seed}: see {folder}/output.txt")


def warm_up(work: Path, seed: int) -> Path:
    """Makes the data and the model that all algorithms start from; returns their folder."""
    folder = work / "start" / f"seed-{seed}"
    ledger = folder / "quickstart.json"
    if ledger.exists() and "warm_up" in json.loads(ledger.read_text())["stages"]:
        return folder
    print(f"warm-up, seed {seed}", flush=True)
    code = (
        "import sys; from pathlib import Path; from etude.quickstart.example import find_example; "
        "from etude.quickstart.stages import Quickstart; "
        "Quickstart(find_example('calculator'), Path(sys.argv[1]), int(sys.argv[2]), (), print).warm_up()"
    )
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "output.txt").open("a") as output:
        command = [sys.executable, "-c", code, str(folder), str(seed)]
        subprocess.run(command, check=True, stdout=output, stderr=subprocess.STDOUT)
    return folder


def finished(folder: Path, steps: int) -> bool:
    """Whether the run has validated after its last step."""
    return any(row["step"] == steps and GREEDY in row for row in metrics(folder))


def metrics(folder: Path) -> list[dict[str, Any]]:
    """Returns the run's records, one per step; empty if it never started."""
    path = folder / METRICS_FILE
    return read_metrics(path) if path.exists() else []


def read(folder: Path) -> dict[str, Any] | None:
    """Returns the curves of a run (step → success) and its CPU seconds; None before its first step."""
    rows = metrics(folder)
    if not any(row["step"] for row in rows):
        return None
    curves = {key: {row["step"]: row[key] for row in rows if key in row} for key in (GREEDY, SAMPLED)}
    return {**curves, "cpu": sum(row.get("perf/cpu_seconds", 0.0) for row in rows)}


def table(curves: dict[str, list[dict[str, Any]]]) -> str:
    """Renders a Markdown table with a row per algorithm: medians over seeds with the range."""
    lines = [
        "| | set | greedy success: before → after | sampled, last five steps | CPU s | seeds |",
        "|---|---|---|---|---|---|",
    ]
    for name, runs in curves.items():
        greedy = [list(each[GREEDY].values()) for each in runs]
        before, after = spread([g[0] for g in greedy if g]), spread([g[-1] for g in greedy if g])
        sampled = spread([statistics.fmean(list(each[SAMPLED].values())[-5:]) for each in runs])
        chosen = "<br>".join(f"`{each.format(teacher='…')}`" for each in ALGORITHMS[name]) or "the quickstart"
        cpu = statistics.median(each["cpu"] for each in runs)
        lines.append(f"| {name} | {chosen} | {before} → {after} | {sampled} | {cpu:.0f} | {len(runs)} |")
    return "\n".join(lines)


def spread(values: list[float]) -> str:
    """Formats the median and the range."""
    if not values:
        return "–"
    middle = f"{statistics.median(values):.2f}"
    return middle if len(values) == 1 else f"{middle} ({min(values):.2f} to {max(values):.2f})"


def plot(curves: dict[str, list[dict[str, Any]]], path: Path) -> None:
    """Draws small multiples, one per algorithm: sampled success in training (thin, by seed), greedy on validation."""
    import matplotlib

    matplotlib.use("svg")
    import matplotlib.pyplot as plt

    columns = 4
    lines = max(1, -(-len(curves) // columns))
    figure, grid = plt.subplots(lines, columns, figsize=(10, 2 * lines), sharex=True, sharey=True, squeeze=False)
    for axes in grid.flat[len(curves) :]:
        axes.set_visible(False)
    for axes, (name, runs) in zip(grid.flat, curves.items()):
        for each in runs:
            axes.plot(list(each[SAMPLED]), list(each[SAMPLED].values()), color="#4878a8", linewidth=0.7, alpha=0.6)
            axes.plot(list(each[GREEDY]), list(each[GREEDY].values()), color="#b85450", linewidth=1.4)
        axes.set_title(name, fontsize=9)
        axes.set_ylim(0, 1.02)
        axes.tick_params(labelsize=7)
        axes.grid(linewidth=0.3)
    figure.supxlabel("step; red: greedy success on validation tasks, blue: sampled success in training", fontsize=8)
    save_svg(figure, path)


def publish(text: str) -> None:
    """Writes the table between the page's marks; without marks, appends a section."""
    page = _DOCS / "algorithms.md"
    before, begin, rest = page.read_text(encoding="utf-8").partition(_BEGIN)
    if not begin:
        before = f"{before.rstrip()}\n\n{_SECTION}"
    page.write_text(f"{before}{_BEGIN}\n\n{text}\n\n{_END}{rest.partition(_END)[2] or chr(10)}", encoding="utf-8")


if __name__ == "__main__":
    main()
