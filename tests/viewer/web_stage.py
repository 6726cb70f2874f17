"""Runs to look at, a server over them as `etude view DIR --web` starts it, and Chromium."""

import copy
import json
import os
import shutil
import subprocess
import sys
import urllib.error
import urllib.request
from contextlib import contextmanager
from pathlib import Path

import pytest

from etude.jsonl import json_line
from tests.viewer.index_stage import make_record

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
PATIENCE = 60_000  # milliseconds for what takes a tenth of a second, on a busy machine
EVIL = "</script><script>window.pwned=1</script><img src=x onerror=window.pwned=1>\x1b[31mred\u202e\u0645\u0631\u062d"


def needs_chromium():
    """Skips, with the reason, where there is no browser."""
    if CHROMIUM is None:
        pytest.skip("Chromium is not installed: apt install chromium")
    pytest.importorskip("playwright.sync_api", reason="pip install playwright")


@contextmanager
def browsing():
    """Chromium; the tests of CI run as root, under which its sandbox does not start."""
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        arguments = ["--no-sandbox"] if os.getuid() == 0 else []
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=arguments)
        yield browser
        browser.close()


@contextmanager
def serving(folder, *options):
    """The URL that `etude view folder --web` prints, in a process of its own."""
    command = [sys.executable, "-m", "etude.cli.main", "view", str(folder), "--web", "--port", "0", *options]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        try:
            line = process.stdout.readline()
            assert line.startswith("http://"), process.stderr.read()
            yield line.split()[0]
        finally:
            process.terminate()
            process.communicate(timeout=60)


def ask(url, method="GET", headers=None):
    """(status, headers, body) of one request."""
    request = urllib.request.Request(url, method=method, headers=headers or {})
    try:
        with urllib.request.urlopen(request, timeout=60) as response:
            return response.status, response.headers, response.read()
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.headers, error.read()


def metrics_line(step, reward=0.5, **more):
    """A step's line of `metrics.jsonl`, with something for every chart."""
    metrics = {
        "reward/total/mean": reward,
        "reward/score/mean": reward - 0.1,
        "reward/success/mean": min(1.0, max(0.0, reward)),
        "reward/spread/score": 0.7,
        "reward/spread/step/calculator": 0.3,
        "response_length/mean": 100 + step,
        "response_length/min": 50,
        "response_length/max": 200 + step,
        "num_turns/mean": 3.5,
        "tool/calculator/calls": 90 + step % 7,
        "tool/calculator/errors": step % 3,
        "tool/calculator/latency_p95": 0.02,
        "actor/ppo_kl": 0.001,
        "actor/entropy": 1 / (1 + step),
        "actor/grad_norm": 0.5,
        "actor/pg_clipfrac": 0.01,
        "rollout_corr/k3_kl": 1e-5,
        "rollout/infrastructure_failure_share": 0.02,
        "timing_s/step": 4.0,
        "timing_s/gen": 3.0,
        "timing_s/update_actor": 0.8,
    }
    return json.dumps({"step": step} | metrics | more) + "\n"


def write_large_run(folder, steps=50, groups=25, n=4, better=0.0):
    """A finished run with `steps * groups * n` trajectories; the first of each group is right, the others mostly wrong."""
    (folder / "rollouts").mkdir(parents=True)
    records = [
        make_record(0, number, group=number // n, score=float(number % n == 0) + better, words=f" number {number}")
        for number in range(groups * n)
    ]
    for step in range(1, steps + 1):
        lines = []
        for number, record in enumerate(records):
            record |= {"step": step, "uid": f"{step}-{number // n}", "request_id": f"{step}-{number // n}/{number}"}
            lines.append(json_line(record))
        (folder / "rollouts" / f"{step}.jsonl").write_bytes(b"".join(lines))
    lines = [metrics_line(step, step / steps + better) for step in range(1, steps + 1)]
    (folder / "metrics.jsonl").write_text("".join(lines))
    lr = 1e-6 * (1 + better)
    (folder / "config.yaml").write_text(f"trainer: {{total_training_steps: {steps}}}\nactor: {{lr: {lr}}}\n")
    (folder / "run.json").write_text(
        json.dumps({"versions": "python", "hardware": "cpu", "ended": "completed", "total_steps": steps})
    )
    return folder


def with_token_values(record):
    """The record as the trainer writes it where `trainer.rollout_token_values` is on, with a timeline."""
    record = copy.deepcopy(record)
    mask = record["response_mask"]
    old = [p - 0.25 if m else None for p, m in zip(record["response_log_probs"], mask)]
    record["token_values"] = {
        "advantages": [1.5 if m else None for m in mask],
        "old_log_probs": old,
        "log_probs": [None if p is None else p + 0.5 for p in old],
        "entropys": [0.1 * i if m else None for i, m in enumerate(mask)],
    }
    record["timeline"] = [["queue", 100.0, 0.5], ["generate_sequences", 100.5, 1.0], ["tool_calls", 101.5, 0.5]]
    return record


def write_tokenizer(folder):
    """A checkpoint's tokenizer in which id N is the word `wN`."""
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel

    place = folder / "global_step_1" / "actor" / "huggingface"
    place.mkdir(parents=True)
    Tokenizer(WordLevel({f"w{i}": i for i in range(20)}, unk_token="w0")).save(str(place / "tokenizer.json"))


def write_hostile_run(folder: Path):
    """A run whose every text is markup, control characters and writing directions, and a line of a megabyte."""
    write_large_run(folder, steps=1, groups=1, n=2)
    record = make_record(1, 7, group=9, source=EVIL, words=EVIL, row={"uid": EVIL}) | {"request_id": EVIL}
    for call in record["tool_calls"]:
        call |= {"name": EVIL, "arguments": EVIL, "response": EVIL, "error": EVIL}
    record |= {"input": EVIL + "x" * 2**20, "output": EVIL}
    for segment in record["segments"]:
        segment["text"] = EVIL
    with (folder / "rollouts" / "1.jsonl").open("ab") as file:
        file.write(json_line(record) + json_line(record | {"stop_reason": EVIL, "score": EVIL, "segments": EVIL}))
    (folder / "metrics.jsonl").write_text(metrics_line(1, **{f"tool/{EVIL.replace('/', '')}/calls": 3}))
    config = "\n".join(["trainer:", f"  project_name: {json.dumps(EVIL)}"])
    (folder / "config.yaml").write_text(config)
    (folder / "run.json").write_text(json.dumps({"versions": EVIL, "hardware": EVIL, "ended": EVIL}))
    return folder
