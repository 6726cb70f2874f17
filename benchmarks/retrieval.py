"""The search service: what BM25 finds on SQuAD questions, and how many single queries a second `/retrieve` answers.

1. recall@{1, 3, 10}: the share of questions whose own paragraph is among the first passages, with 95 % Wilson intervals.
2. `etude retrieve serve` in a process of its own, `--concurrency` clients in this one, each with one query a request:
   queries a second, and CPU milliseconds of the server per query, which other programs on the machine change less.
3. The same for `--queries` queries: the server's memory after each tenth.

The folder holds corpus.jsonl {id, title, text} and qa.jsonl {question, passage_id}.

    python benchmarks/retrieval.py FOLDER [--queries 50000] [--concurrency 32]
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import aiohttp
import psutil

from etude.retrieval import Retriever, build_index
from etude.trainer.validation_metrics import wilson_interval

DEPTHS = (1, 3, 10)


def recall(retriever: Retriever, questions: list[dict]) -> None:
    found = retriever.search([each["question"] for each in questions], max(DEPTHS))
    names = [[retriever.corpus.document(hit.row)["id"] for hit in hits] for hits in found]
    for depth in DEPTHS:
        right = sum(each["passage_id"] in ids[:depth] for each, ids in zip(questions, names))
        low, high = wilson_interval(right, len(questions))
        print(f"recall@{depth:<3} {right / len(questions):.3f}  [{low:.3f}, {high:.3f}]  of {len(questions)}")


async def ask(url: str, questions: list[dict], count: int, concurrency: int) -> float:
    bodies = [json.dumps({"queries": [q["question"]], "topk": 3, "return_scores": True}).encode() for q in questions]
    numbers = iter(range(count))
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=concurrency)) as http:

        async def client() -> None:
            for number in numbers:
                async with http.post(url, data=bodies[number % len(bodies)]) as response:
                    assert response.status == 200
                    await response.read()

        began = time.perf_counter()
        await asyncio.gather(*(client() for _ in range(concurrency)))
        return time.perf_counter() - began


def load(index: Path, questions: list[dict], count: int, concurrency: int) -> None:
    command = [sys.executable, "-m", "etude.cli.main", "retrieve", "serve", str(index), "--port", "0"]
    server = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        url = server.stdout.readline().split()[0]
        process = psutil.Process(server.pid)
        asyncio.run(ask(url, questions, 2000, concurrency))  # warm
        for tenth in range(1, 11):
            before = sum(process.cpu_times()[:2])
            seconds = asyncio.run(ask(url, questions, count // 10, concurrency))
            cpu = sum(process.cpu_times()[:2]) - before
            print(
                f"{tenth * count // 10:>7,} queries  {count / 10 / seconds:7.0f}/s  server {10_000 * cpu / count:.3f} CPU ms"
                f"  memory {process.memory_info().rss / 2**20:.1f} MiB  load {os.getloadavg()[0]:.1f}"
            )
    finally:
        server.send_signal(signal.SIGTERM)
        server.wait(30)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--queries", type=int, default=50_000)
    parser.add_argument("--concurrency", type=int, default=32)
    given = parser.parse_args()
    questions = [json.loads(line) for line in (given.folder / "qa.jsonl").read_text().splitlines()]
    with tempfile.TemporaryDirectory(prefix="etude-retrieval-") as folder:
        index = build_index(given.folder / "corpus.jsonl", Path(folder) / "index")
        recall(Retriever(index), questions)
        load(index, questions, given.queries, given.concurrency)


if __name__ == "__main__":
    main()
