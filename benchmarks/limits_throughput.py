"""Round trips (acquire, then release) of the cluster-wide limiter beside the classic one, in one run.

The classic limiter is a named Ray actor around a semaphore, with one thread for `acquire` and ten for `release`, as
verl's documents show it. Both allow the same number at once, in the same cluster. Rounds of the two alternate; each
figure is the median of its rounds.

The last row has 4 processes hold 2 permits for `--hold` milliseconds at a time: what each change of hands costs over the
time held, beside the round trip of a bare call of an asynchronous actor, made by as many processes at once.

    python benchmarks/limits_throughput.py [--rounds 5] [--limit 10] [--seconds 2] [--hold 20]
"""

from __future__ import annotations

import argparse
import statistics
import threading
import time
from itertools import chain

import ray

from etude.limits import Limit, cluster_limiter


@ray.remote(num_cpus=0, concurrency_groups={"acquire": 1, "release": 10})
class Classic:
    """The baseline: a semaphore in an actor."""

    def __init__(self, rate_limit: int) -> None:
        self._semaphore = threading.Semaphore(rate_limit)
        self._count = 0

    @ray.method(concurrency_group="acquire")
    def acquire(self) -> None:
        self._semaphore.acquire()
        self._count += 1

    @ray.method(concurrency_group="release")
    def release(self) -> None:
        self._count -= 1
        self._semaphore.release()


def classic(actor, latencies: list[float], until: float) -> None:
    while (began := time.perf_counter()) < until:
        ray.get(actor.acquire.remote())
        ray.get(actor.release.remote())
        latencies.append(time.perf_counter() - began)


def leased(limiter, latencies: list[float], until: float) -> None:
    while (began := time.perf_counter()) < until:
        limiter.acquire_blocking(60).release()
        latencies.append(time.perf_counter() - began)


def measure(body, subject, threads: int, seconds: float) -> list[float]:
    """Returns the latencies of all round trips of `threads` callers; the last entry is the round trips per second."""
    found: list[list[float]] = [[] for _ in range(threads)]
    began = time.perf_counter()
    until = began + seconds
    workers = [threading.Thread(target=body, args=(subject, latencies, until)) for latencies in found]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    latencies = sorted(latency for part in found for latency in part)
    return [*latencies, len(latencies) / (time.perf_counter() - began)]


@ray.remote(num_cpus=0)
class Echo:
    """Measures the cost of a message that does nothing."""

    async def ping(self) -> None:
        pass


@ray.remote(num_cpus=0)
class Caller:
    """A process that competes with others for permits."""

    def hold(self, limit: int, calls: int, seconds: float) -> list[tuple[float, float]]:
        """Returns when 2 threads of this process held permits: (start, end) in seconds of `time.time`."""
        limiter = cluster_limiter("bench-contended", Limit(max_concurrent=limit))
        spans: list[tuple[float, float]] = []

        def body() -> None:
            for _ in range(calls):
                with limiter.permit(60):
                    began = time.time()
                    time.sleep(seconds)
                    spans.append((began, time.time()))

        threads = [threading.Thread(target=body) for _ in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return spans

    def ping(self, actor, calls: int, pause: float) -> list[float]:
        """Returns the round trips of bare calls, in seconds."""
        found = []
        for _ in range(calls):
            began = time.perf_counter()
            ray.get(actor.ping.remote())
            found.append(time.perf_counter() - began)
            time.sleep(pause)
        return found

    def run(self, kind: str, subject, limit: int, seconds: float) -> tuple[int, list[float]]:
        if kind == "leased":
            subject = cluster_limiter("bench-contended", Limit(max_concurrent=limit))
        result = measure(leased if kind == "leased" else classic, subject, 2, seconds)
        return len(result) - 1, result[:-1]


def percentile(ordered: list[float], share: float) -> float:
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--limit", type=int, default=10)
    parser.add_argument("--seconds", type=float, default=2.0)
    parser.add_argument("--hold", type=float, default=20.0, help="milliseconds")
    options = parser.parse_args()
    ray.init(address="local", num_cpus=2, include_dashboard=False, log_to_driver=False)
    peer = Classic.options(name="classic").remote(options.limit)
    ours = cluster_limiter("bench", Limit(max_concurrent=options.limit))
    ray.get(peer.acquire.remote())
    ray.get(peer.release.remote())
    ours.acquire_blocking(60).release()
    print(f"limit {options.limit}, {options.rounds} rounds of {options.seconds:g} s each, alternating")
    print(f"{'callers':>24}  {'limiter':8} {'round trips/s':>14} {'p50 ms':>9} {'p99 ms':>9}")
    for threads in (1, 32):
        compare(
            f"{threads} thread{'s' * (threads > 1)}",
            options.rounds,
            {
                "classic": lambda threads=threads: measure(classic, peer, threads, options.seconds),
                "etude": lambda threads=threads: measure(leased, ours, threads, options.seconds),
            },
        )
    callers = [Caller.remote() for _ in range(4)]

    def contended(kind: str, subject: object) -> list[float]:
        began = time.perf_counter()
        parts = ray.get([caller.run.remote(kind, subject, 2, options.seconds) for caller in callers])
        elapsed = time.perf_counter() - began
        return [*sorted(latency for _, part in parts for latency in part), sum(count for count, _ in parts) / elapsed]

    scarce = Classic.options(name="classic-contended").remote(2)
    compare(
        "4 processes x 2, limit 2",
        options.rounds,
        {
            "classic": lambda: contended("classic", scarce),
            "etude": lambda: contended("leased", None),
        },
    )
    change_hands(callers, options.rounds, options.hold / 1e3)
    ray.shutdown()


def change_hands(callers: list, rounds: int, hold: float, limit: int = 2, calls: int = 30) -> None:
    """Measures how long permits lie idle when they change hands, and prints the last row."""
    echo = Echo.options(max_concurrency=1000).remote()
    over, lost, bare = [], [], []
    for _ in range(rounds):
        spans = sorted(chain(*ray.get([caller.hold.remote(limit, calls, hold) for caller in callers])))
        held = sum(end - began for began, end in spans)
        elapsed = max(end for _, end in spans) - spans[0][0]
        over.append(elapsed * limit / held)
        lost.append((elapsed * limit - held) / len(spans))
        pings = list(chain(*ray.get([caller.ping.remote(echo, calls, hold) for caller in callers])))
        bare.append(statistics.median(pings))
    print(
        f"4 processes hold {limit} permits {hold * 1e3:g} ms each: {statistics.median(over):.2f} x the time held; "
        f"{statistics.median(lost) * 1e3:.1f} ms a change of hands, "
        f"a bare call of an actor {statistics.median(bare) * 1e3:.1f} ms"
    )


def compare(label: str, rounds: int, bodies: dict) -> None:
    figures: dict[str, list[tuple[float, float, float]]] = {name: [] for name in bodies}
    for _ in range(rounds):
        for name, body in bodies.items():
            *latencies, rate = body()
            figures[name].append((rate, percentile(latencies, 0.5) * 1e3, percentile(latencies, 0.99) * 1e3))
    medians = {name: [statistics.median(column) for column in zip(*rows)] for name, rows in figures.items()}
    for name, (rate, p50, p99) in medians.items():
        print(f"{label:>24}  {name:8} {rate:14,.0f} {p50:9.3f} {p99:9.3f}")
    (classic_rate, classic_p50, _), (rate, _, p99) = medians["classic"], medians["etude"]
    print(f"{'':>24}  ratio {rate / classic_rate:.0f} x; our p99 is {p99 / classic_p50:.3f} of the classic's p50")


if __name__ == "__main__":
    main()
