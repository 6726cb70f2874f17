"""The examples in which a tiny model learns a real tool, for several seeds; prints the table for docs/.

    python benchmarks/learning_examples.py phone_book --seeds 1,2,3 [--work build/learning_examples] [--steps 40]

Each seed: `agent.py FOLDER SEED`, the service that the tool needs, `etude sft` (the warm-up, which ends as a mediocre policy
on purpose), `etude eval` on the test rows, `etude train`, `etude eval` again. Each is the command that its README shows, in
a process of its own; one that has finished is not run again. Intervals are 95 % Wilson intervals over the test rows, sampled
at temperature 1.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

EXAMPLES = Path(__file__).resolve().parents[1] / "examples"
ETUDE = (sys.executable, "-m", "etude.cli.main")
SUCCESS, TOOL_USE = "success", "tool_use"


@contextmanager
def search_service(folder: Path) -> Iterator[dict[str, str]]:
    """`etude retrieve serve` over the folder's corpus."""
    if not (folder / "index").exists():
        call("retrieve", "build", str(folder / "corpus.jsonl"), "--output", str(folder / "index"))
    with service("retrieve", "serve", str(folder / "index"), "--port", "0") as address:
        yield {"SEARCH_URL": address}


@contextmanager
def service(*arguments: str) -> Iterator[str]:
    """A server in a process of its own; yields the address that it prints."""
    server = subprocess.Popen([*ETUDE, *arguments], stdout=subprocess.PIPE, text=True)
    try:
        yield server.stdout.readline().split()[0]
    finally:
        server.terminate()
        server.wait(60)


@contextmanager
def no_service(folder: Path) -> Iterator[dict[str, str]]:
    """The tool brings its own sandbox."""
    yield {}


SERVICES = {"phone_book": search_service, "code_sums": no_service}


def call(*arguments: str, environment: dict[str, str] | None = None, log: Path | None = None) -> None:
    """Runs `etude` to its end."""
    with open(log or os.devnull, "a") as output:
        env = {**os.environ, **(environment or {})}
        subprocess.run([*ETUDE, *arguments], check=True, env=env, stdout=output, stderr=output)


def run_seed(example: str, folder: Path, seed: int, steps: int) -> dict[str, float]:
    """The figures of one seed: before and after, with intervals, wall and CPU seconds."""
    result = folder / "result.json"
    if result.exists():
        return json.loads(result.read_text())
    began, cpu = time.perf_counter(), cpu_seconds()
    code, log = EXAMPLES / example, folder / "log.txt"
    if not (folder / "model").exists():
        subprocess.run([sys.executable, str(code / "agent.py"), str(folder), str(seed)], check=True)
    with SERVICES[example](folder) as environment:
        warm, own = folder / "warm_up" / "huggingface", ("--config-path", str(code), "--config-name", "agent")
        if not warm.exists():
            call(
                *("sft", "--config-name", "quickstart_sft", f"data.train_files={folder}/demonstrations.parquet"),
                *(f"target_success.data_files={folder}/val.parquet", f"model.path={folder}/model"),
                f"multi_turn.tool_config_path={code}/tools.yaml",
                *(f"trainer.default_local_dir={folder}/warm_up", f"trainer.seed={seed}", "trainer.logger=[]"),
                environment=environment,
                log=log,
            )
        before = evaluate(own, folder, "before", warm, environment)
        call(
            *("train", *own, f"data.train_files={folder}/train.parquet", f"actor_rollout_ref.model.path={warm}"),
            *(f"trainer.default_local_dir={folder}/run", f"trainer.seed={seed}", "trainer.report=false"),
            *(f"trainer.total_training_steps={steps}", f"trainer.save_freq={steps}", "trainer.logger=[jsonl]"),
            environment=environment,
            log=log,
        )
        after = evaluate(own, folder, "after", folder / "run" / f"global_step_{steps}/actor/huggingface", environment)
    seconds = {"wall": time.perf_counter() - began, "cpu": cpu_seconds() - cpu}
    found = {"before": before, "after": after, "seconds": seconds}
    result.write_text(json.dumps(found, indent=1))
    return found


def evaluate(own: tuple[str, ...], folder: Path, when: str, model: Path, environment: dict[str, str]) -> dict:
    """The test rows, sampled."""
    output = folder / f"{when}.json"
    call(
        *("eval", *own, f"data.val_files={folder}/test.parquet", f"data.train_files={folder}/train.parquet"),
        *(f"actor_rollout_ref.model.path={model}", "actor_rollout_ref.rollout.val_kwargs.do_sample=true"),
        *(
            "actor_rollout_ref.rollout.val_kwargs.n=2",
            f"trainer.default_local_dir={folder}/eval",
            "--output",
            str(output),
        ),
        environment=environment,
        log=folder / "log.txt",
    )
    return json.loads(output.read_text())


def cpu_seconds() -> float:
    """Of this process and its ended children."""
    both = (resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return sum(usage.ru_utime + usage.ru_stime for usage in both)


def share(result: dict, name: str) -> str:
    """`0.25 [0.20, 0.31]`."""
    return f"{result[name]:.2f} [{result[f'{name}_low']:.2f}, {result[f'{name}_high']:.2f}]"


def main() -> None:
    """Runs the seeds and prints the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("example", choices=sorted(SERVICES))
    parser.add_argument("--seeds", default="1,2,3")
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--work", type=Path, default=Path("build/learning_examples"))
    given = parser.parse_args()
    print("| seed | success before → after | tool use before → after | wall s | CPU s |\n|---|---|---|---|---|")
    for seed in map(int, given.seeds.split(",")):
        folder = (given.work / given.example / f"seed-{seed}").resolve()
        folder.mkdir(parents=True, exist_ok=True)
        found = run_seed(given.example, folder, seed, given.steps)
        cells = [f"{share(found['before'], name)} → {share(found['after'], name)}" for name in (SUCCESS, TOOL_USE)]
        seconds = found["seconds"]
        print(f"| {seed} | {' | '.join(cells)} | {seconds['wall']:.0f} | {seconds['cpu']:.0f} |", flush=True)


if __name__ == "__main__":
    main()
