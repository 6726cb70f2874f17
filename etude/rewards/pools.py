"""Reward managers that run scorers elsewhere: `prime` in processes of this machine, `remote` in workers of the Ray cluster.

For CPU-bound functions, which in threads would share one core. Unlike a thread, a hung process is killed.
"""

from __future__ import annotations

import asyncio
import itertools
import pickle
from collections import Counter
from typing import Any

from etude.errors import ConfigError, InfrastructureError, one_line
from etude.limits import require_ray
from etude.limits.cluster import is_connected
from etude.options.declare import key, options
from etude.options.types import Count
from etude.rewards import usage
from etude.rewards.default import Score, Scorer
from etude.rewards.manager import BoundedScorer, NaiveRewardManager, register
from etude.rewards.processes import Answer, ScorerProcesses, result_in
from etude.rewards.user_functions import user_function


@options
class ProcessOptions:
    """`reward_model.reward_kwargs` of `prime`."""

    num_processes: Count = key("Processes at once.", default=8)
    memory_mb: Count | None = key("The most memory of each. Null: no limit.", default=None, unit="MiB")


@options
class WorkerOptions:
    """`reward_model.reward_kwargs` of `remote`."""

    num_workers: Count = key("Workers, one CPU of the cluster each.", default=8)
    memory_mb: Count | None = key("The most memory of each. Null: no limit.", default=None, unit="MiB")


def pickle_scorer(scorer: Scorer) -> bytes:
    """Pickles `scorer` for other processes; raises ConfigError if that is impossible."""
    try:
        return pickle.dumps(user_function(scorer))
    except Exception as error:
        text = f"compute_score cannot go to other processes: {one_line(error)}; define it in a file"
        raise ConfigError(text) from error


class ProcessScorer(BoundedScorer):
    """Runs a scorer in processes on this machine."""

    def __init__(self, scorer: Scorer, timeout: float, given: ProcessOptions) -> None:
        super().__init__(scorer, timeout)
        self.processes = ScorerProcesses(pickle_scorer(scorer), given.num_processes, given.memory_mb)

    async def _run(self, arguments: dict[str, Any]) -> Score:
        result: Score = await self.processes.score(arguments, self._timeout)
        return result


@register("prime")
class PrimeRewardManager(NaiveRewardManager):
    """Scores in `num_processes` processes (default 8), each killed and replaced if a score takes longer than `timeout`."""

    runs = (ProcessScorer, ProcessOptions)


class RemoteWorker:
    """A Ray actor that runs the scorer on some node of the cluster, in a process that can be killed."""

    def __init__(self, scorer: bytes, memory_mb: int | None) -> None:
        self._processes = ScorerProcesses(scorer, 1, memory_mb)

    def score(self, arguments: dict[str, Any], seconds: float) -> tuple[Answer, dict[str, float]]:
        """Returns the process's answer, and what judges used for it."""
        used = Counter[str]()
        with usage.counting(used):
            answer = self._processes.answer(arguments, seconds)
        return answer, dict(used)


class RemoteScorer(BoundedScorer):
    """Runs a scorer in workers of the Ray cluster: the least busy one first, ties in turn."""

    def __init__(self, scorer: Scorer, timeout: float, given: WorkerOptions) -> None:
        super().__init__(scorer, timeout)
        require_ray("reward_manager=remote")
        if not is_connected():
            raise ConfigError(
                "reward_manager=remote scores in workers of a Ray cluster, and there is none: trainer.backend=ray"
            )
        import ray

        made = ray.remote(RemoteWorker).options(num_cpus=1, max_restarts=-1)
        pickled = pickle_scorer(scorer)
        self._workers: list[Any] = [made.remote(pickled, given.memory_mb) for _ in range(given.num_workers)]
        self._turn = itertools.count()
        self._busy = [0] * len(self._workers)

    async def _run(self, arguments: dict[str, Any]) -> Score:
        import ray

        turn = next(self._turn)
        number = min(range(len(self._workers)), key=lambda n: (self._busy[n], (n - turn) % len(self._workers)))
        self._busy[number] += 1
        try:
            asked = self._workers[number].score.remote(arguments, self._timeout)
            answer, used = await asyncio.wrap_future(asked.future())
        except ray.exceptions.RayError as error:
            raise InfrastructureError(f"its worker died: {one_line(error)}") from error
        finally:
            self._busy[number] -= 1
        usage.count(**used)
        score: Score = result_in(answer)
        return score


@register("remote")
class RemoteRewardManager(NaiveRewardManager):
    """Scores in `num_workers` workers (default 8) of the Ray cluster."""

    runs = (RemoteScorer, WorkerOptions)
